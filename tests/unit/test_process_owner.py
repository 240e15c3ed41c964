"""Whose a process is and which program it runs, of processes that do their best to mislead whoever reads that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.rank_process import describe_process
from railscope.probes.clock import SystemClock
from railscope.probes.processes.owner import (
    MOST_NAME,
    ProcessOwner,
    command_line,
    owner_of,
    program_name,
    usage_of,
)
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of

_NOBODY = 65534


@contextmanager
def waiting(*words: bytes, user: int | None = None) -> Iterator[ProcessIdentity]:
    """A shell that waits, under a name of its own and with any arguments (after `-s`, which makes it take them)."""
    program, *arguments = words or (b"sh",)
    process = subprocess.Popen([program, b"-s", *arguments], executable="/bin/sh", stdin=subprocess.PIPE, user=user)
    try:
        identity = identity_of(PROCFS, process.pid)
        assert identity is not None
        # The kernel lets go of the old program before it has the new one's command line.
        while not (PROCFS / str(process.pid) / "cmdline").read_bytes():
            assert process.poll() is None
        yield identity
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("python", "train.py", "--api-key", "hunter2"), "python train.py"),
        (("/usr/bin/python3.12", "-u", "/home/ada/secret/train.py", "--token=hunter2"), "python3.12 train.py"),
        (("python3", "-X", "faulthandler", "-Wignore", "-W", "error", "train.py"), "python3 train.py"),
        (("python3", "-um", "torch.distributed.run", "train.py"), "python3 -m torch.distributed.run"),
        (("python3", "-mtrain", "x"), "python3 -m train"),
        (("python3", "-m", "not a module; hunter2"), "python3 -m"),
        (("python3", "-c", "key = 'hunter2'"), "python3 -c"),
        (("python3", "--check-hash-based-pycs", "never", "train.py"), "python3 train.py"),
        (("python3", "-"), "python3"),
        (("python3",), "python3"),
        (("bash", "run.sh", "hunter2"), "bash run.sh"),
        (("bash", "-c", "export KEY=hunter2"), "bash"),
        (("./all_reduce_perf", "-b", "8"), "all_reduce_perf"),
        (("/opt/my tools/bench", "hunter2"), "bench"),
        (("ray::Trainer.fit(key=hunter2)",), "ray::Trainer.fit(key=hunter2)"),
        (("trainer --api-key hunter2",), "trainer"),
        (("",), ""),
        ((), ""),
    ],
)
def test_a_program_is_told_with_its_script_and_without_arguments(words: tuple[str, ...], program: str) -> None:
    assert program_name(words) == program


@given(st.lists(st.text()))
def test_of_any_words_a_program_is_two_short_ones(words: list[str]) -> None:
    assert len(program_name(tuple(words))) <= 2 * MOST_NAME + 1


@given(st.binary())
def test_whatever_a_command_line_holds_a_terminal_can_show_it(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    procfs = tmp_path_factory.mktemp("procfs")
    (procfs / "7").mkdir()
    (procfs / "7/cmdline").write_bytes(text)
    assert all(word.isprintable() for word in command_line(procfs, 7))


def test_escape_sequences_go_with_what_they_would_have_done_and_bytes_that_are_no_text_are_marked() -> None:
    hostile = b"/bin/\x1b]0;owned\x07py\x1b[31;1mth\xc2\x9b2Jon\x1b(B\r\n3\xff"
    with waiting(hostile, b"\x1b[2J\xe2\x80\xaetrain.py") as identity:
        assert command_line(PROCFS, identity.pid) == ("/bin/python3\N{REPLACEMENT CHARACTER}", "-s", "train.py")


def test_a_command_line_of_100_kb_is_read_as_far_as_its_bound() -> None:
    with waiting(b"python3", b"train.py", b"x" * 100_000) as identity:
        assert command_line(PROCFS, identity.pid) == ("python3", "-s", "train.py")
    with waiting(b"x" * 100_000) as identity:
        owner = owner_of(PROCFS, identity)
        assert owner is not None
        assert owner.program == "sh"  # the name that the kernel gave it


@pytest.mark.root
def test_a_process_of_another_user_is_named_with_its_user() -> None:
    with waiting(b"python3", b"train.py", user=_NOBODY) as identity:
        owner = owner_of(PROCFS, identity)
    assert owner == ProcessOwner(identity, "nobody", "python3 train.py")


@pytest.mark.root
def test_a_user_without_a_name_on_this_host_is_its_number() -> None:
    with waiting(user=3_000_000) as identity:
        owner = owner_of(PROCFS, identity)
    assert owner is not None
    assert owner.user == "3000000"


def test_what_a_process_takes_is_that_of_the_process() -> None:
    clock = SystemClock()
    identity = identity_of(PROCFS, os.getpid())
    assert identity is not None
    before = usage_of(PROCFS, identity, clock)
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    after = usage_of(PROCFS, identity, clock)
    assert before is not None
    assert after is not None
    assert after.cpu_seconds - before.cpu_seconds >= 0.08  # clock ticks are 10 ms
    assert after.read_realtime_ns > before.read_realtime_ns > after.start_realtime_ns
    assert after.resident_bytes > 1 << 20
    assert after.threads >= 1


def test_of_a_process_that_has_ended_nothing_is_known() -> None:
    with waiting() as identity:
        pass
    assert owner_of(PROCFS, identity) is None
    assert usage_of(PROCFS, identity, SystemClock()) is None


def test_a_pid_that_passed_to_another_process_tells_nothing_of_the_first() -> None:
    with waiting() as identity:
        earlier = ProcessIdentity(identity.pid, identity.start_time_ticks - 1)
        assert owner_of(PROCFS, earlier) is None
        assert usage_of(PROCFS, earlier, SystemClock()) is None


def test_a_zombie_has_its_user_and_no_arguments() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        identity = identity_of(PROCFS, process.pid)
        assert identity is not None
        assert command_line(PROCFS, process.pid) == ()
        owner = owner_of(PROCFS, identity)
        assert owner is not None
        assert owner.user
        assert " " not in owner.program
    finally:
        process.wait()


def test_of_another_hosts_procfs_only_the_program_is_known(tmp_path: Path) -> None:
    with waiting() as identity:
        folder = tmp_path / str(identity.pid)
        folder.mkdir()
        for name in ("stat", "cmdline"):
            (folder / name).write_bytes((PROCFS / str(identity.pid) / name).read_bytes())
        assert owner_of(tmp_path, identity) == ProcessOwner(identity, "", "sh")
        assert usage_of(tmp_path, identity, SystemClock()) is None


def test_the_name_of_a_program_cannot_end_its_quotation() -> None:
    owner = ProcessOwner(ProcessIdentity(7, 1), "ada", 'x") stalls: rail_down, blamed on (')
    assert describe_process(7, owner) == """process 7 of ada, "x') stalls: rail_down, blamed on (\""""
    assert describe_process(7, None) == "process 7"
