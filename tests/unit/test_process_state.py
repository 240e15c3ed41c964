"""What the kernel's files tell of a process: of real ones where that can be had, of written ones where not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from railscope.probes.clock import SystemClock
from railscope.probes.processes.processes import ProcessIdentity, identity_of
from railscope.probes.processes.state import (
    CGROUPS,
    Condition,
    is_ending,
    process_state,
    threads_waiting_for_network,
)

PROC = Path("/proc")
SYSCALLS = {"x86_64": {"recvfrom": 45, "poll": 7, "read": 0}, "aarch64": {"recvfrom": 207, "ppoll": 73, "read": 63}}


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def identity(pid: int) -> ProcessIdentity:
    found = identity_of(PROC, pid)
    assert found is not None
    return found


def condition(one: ProcessIdentity) -> Condition:
    return process_state(PROC, one, SystemClock()).condition


def test_a_process_that_is_stopped_and_goes_on_is_seen_to(child: subprocess.Popen[bytes]) -> None:
    one = identity(child.pid)
    assert condition(one) == "running"
    child.send_signal(signal.SIGSTOP)
    assert eventually(lambda: condition(one) == "stopped")
    child.send_signal(signal.SIGCONT)
    assert eventually(lambda: condition(one) == "running")


def test_a_zombie_is_gone_and_so_is_one_that_was_reaped(child: subprocess.Popen[bytes]) -> None:
    one = identity(child.pid)
    child.kill()
    assert eventually(lambda: condition(one) == "gone")
    child.wait()
    assert condition(one) == "gone"


def test_another_process_with_the_same_pid_is_not_the_one_that_was_asked_about() -> None:
    own = identity(os.getpid())
    assert condition(ProcessIdentity(own.pid, own.start_time_ticks + 1)) == "gone"


def test_a_process_whose_first_thread_ended_before_the_others_runs() -> None:
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(100,)).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            one = identity(process.pid)
            stat = PROC / str(process.pid) / "stat"
            assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
            assert condition(one) == "running"
        finally:
            process.kill()


def test_work_of_every_thread_and_what_is_written_are_counted(tmp_path: Path) -> None:
    own = identity(os.getpid())
    before = process_state(PROC, own, SystemClock())
    busy = threading.Thread(target=lambda: sum(range(2_000_000)))
    busy.start()
    busy.join()
    with (tmp_path / "checkpoint").open("wb") as file:
        file.write(bytes(4 << 20))
        file.flush()
        os.fsync(file.fileno())
    sum(range(2_000_000))
    after = process_state(PROC, own, SystemClock())
    assert after.time_ns > before.time_ns
    assert after.busy_ns > before.busy_ns
    assert {thread.tid for thread in after.threads} >= {threading.get_native_id()}


def test_a_process_that_was_killed_is_about_to_end(child: subprocess.Popen[bytes]) -> None:
    one = identity(child.pid)
    assert not is_ending(PROC, one)
    child.kill()
    assert eventually(lambda: is_ending(PROC, one))
    child.wait()
    assert is_ending(PROC, one)
    assert is_ending(PROC, ProcessIdentity(os.getpid(), 1)), "its number is another one's"


@pytest.mark.parametrize(
    ("flags", "pending", "ending"),
    [("4194304", "0000000000000000", False), ("4194308", "0000000000000000", True), ("0", "0000000000000100", True)],
    ids=["lives", "exits", "SIGKILL"],
)
def test_a_process_that_gives_back_its_memory_shows_by_its_flags_or_its_signals(
    tmp_path: Path, flags: str, pending: str, ending: bool
) -> None:
    (tmp_path / "7").mkdir()
    fields = ["D", "1", "1", "1", "0", "-1", flags, *("0" for _ in range(12)), "300", *("0" for _ in range(10))]
    (tmp_path / "7/stat").write_text(f"7 (a) rank) {' '.join(fields)}\n")
    (tmp_path / "7/status").write_text(f"Name:\trank\nSigPnd:\t0000000000000000\nShdPnd:\t{pending}\n")
    assert is_ending(tmp_path, ProcessIdentity(7, 300)) is ending


@pytest.mark.root
@pytest.mark.parametrize("version", [1, 2])
def test_a_frozen_process_is_told_by_its_control_group(
    child: subprocess.Popen[bytes], version: int, tmp_path: Path
) -> None:
    roots = [CGROUPS / "freezer"] if version == 1 else [CGROUPS / "unified", CGROUPS]
    root = next((path for path in roots if (path / "cgroup.procs").exists()), None)
    if root is None:
        pytest.skip(f"this machine has no control groups of version {version}")
    name, frozen, thawed = ("freezer.state", "FROZEN", "THAWED") if version == 1 else ("cgroup.freeze", "1", "0")
    group = root / f"railscope-test-{os.getpid()}"
    inner = group / "inner"
    try:
        group.mkdir()
        inner.mkdir()
        (inner / "cgroup.procs").write_text(str(child.pid))
        (group / name).write_text(frozen)
    except OSError as error:
        with contextlib.suppress(OSError):
            inner.rmdir()
            group.rmdir()
        pytest.skip(f"nothing can be frozen here: {error}")
    one = identity(child.pid)
    try:
        assert eventually(lambda: condition(one) == "frozen")
        # Its parent group was frozen; from where no group can be seen it shows as well, and not which it is.
        assert process_state(PROC, one, SystemClock()).freezer == str(group / name)
        hidden = process_state(PROC, one, SystemClock(), cgroups=tmp_path)
        assert (hidden.condition, hidden.freezer) == ("frozen", "")
        (group / name).write_text(thawed)
        assert eventually(lambda: condition(one) == "running")
        assert process_state(PROC, one, SystemClock(), cgroups=tmp_path).condition == "running"
    finally:
        (group / name).write_text(thawed)
        child.kill()
        child.wait()
        eventually(lambda: not (inner / "cgroup.procs").read_text())
        inner.rmdir()
        group.rmdir()


class Waiting:
    """A thread that waits in a system call, until the socket is closed."""

    def __init__(self, wait: Callable[[int], object]) -> None:
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs
        self.tid = 0

        def run() -> None:
            self.tid = threading.get_native_id()
            wait(theirs.fileno())

        self._thread = threading.Thread(target=run)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._thread.join()
        self._theirs.close()

    def found(self) -> dict[int, str]:
        return threads_waiting_for_network(PROC, os.getpid(), frozenset({self.tid}), platform.machine())


libc = ctypes.CDLL(None, use_errno=True)


class PollEntry(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def poll(entries: list[int], timeout_ms: int) -> None:
    array = (PollEntry * len(entries))(*(PollEntry(fd, 1, 0) for fd in entries))
    libc.poll(array, len(entries), timeout_ms)


@pytest.mark.root
@pytest.mark.parametrize(
    ("wait", "names"),
    [
        (lambda fd: libc.recv(fd, ctypes.create_string_buffer(1), 1, 0), {"recvfrom"}),
        (lambda fd: libc.read(fd, ctypes.create_string_buffer(1), 1), {"read"}),
        (lambda fd: poll([fd], -1), {"poll", "ppoll"}),
        (lambda fd: poll([fd, fd, -1], -1), {"poll", "ppoll"}),
    ],
    ids=["recv", "read", "poll", "poll many"],
)
def test_a_thread_that_waits_for_a_socket_without_a_limit_is_named(
    wait: Callable[[int], object], names: set[str]
) -> None:
    with Waiting(wait) as waiting:
        assert eventually(lambda: bool(waiting.found()))
        assert set(waiting.found().values()) <= names


@pytest.mark.root
def test_waits_with_a_limit_or_for_something_else_are_not() -> None:
    reading, writing = os.pipe()
    folder = PROC / "self/task"

    def in_poll(tid: int) -> bool:
        text = (folder / str(tid) / "syscall").read_text()
        return text.split()[0] in {"7", "73", "271"} and tid > 0

    try:
        for wait in (lambda fd: poll([fd], 5000), lambda fd: poll([fd, reading], -1)):
            with Waiting(wait) as waiting:
                assert eventually(lambda one=waiting: one.tid > 0 and in_poll(one.tid))  # type: ignore[misc]
                assert waiting.found() == {}
    finally:
        os.close(writing)
        os.close(reading)


def test_threads_that_run_or_are_gone_or_of_another_machine_wait_for_nothing(tmp_path: Path) -> None:
    task = tmp_path / "5" / "task" / "6"
    task.mkdir(parents=True)
    for text in ("running\n", "-1 0x7ffd 0x7f\n", "", "45\n", "nonsense 1 2 3\n"):
        (task / "syscall").write_text(text)
        assert threads_waiting_for_network(tmp_path, 5, frozenset({6, 7}), "x86_64") == {}
    (task / "syscall").write_text("45 0x3 0x0 0x0 0x0 0x0 0x0 0x7ffd 0x7f\n")
    assert threads_waiting_for_network(tmp_path, 5, frozenset({6}), "riscv64") == {}
    (task.parent.parent / "fd").mkdir()
    (task.parent.parent / "fd" / "3").symlink_to("socket:[77]")
    assert threads_waiting_for_network(tmp_path, 5, frozenset({6}), "x86_64") == {6: "recvfrom"}
