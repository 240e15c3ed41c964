"""Facts of the processes that run ranks, read beside the daemon's loop."""

from __future__ import annotations

import os
import pwd
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.agent.node.targets import rank_processes
from railscope.agent.node.targets.rank_processes import MOST_READING_NS, MOST_THREADS, RankProcesses, UserNames
from railscope.probes.clock import SystemClock
from railscope.probes.processes.owner import ProcessOwner, ProcessUsage
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of
from tests.unit.stall_world import SimulatedClock


@contextmanager
def running(*command: str) -> Iterator[ProcessIdentity]:
    process = subprocess.Popen(command)
    try:
        identity = identity_of(PROCFS, process.pid)
        assert identity is not None
        yield identity
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_is_told_with_its_owner_and_usage_until_it_ends() -> None:
    processes = RankProcesses(PROCFS, SystemClock(), UserNames())
    with running("sleep", "60") as identity:
        processes.add(identity, os.getuid())
        assert processes.owner(identity) is None, "what it runs is not known"
        processes.set_program(identity, "sleep")
        me = pwd.getpwuid(os.getuid()).pw_name
        wait_for(lambda: processes.owner(identity) == ProcessOwner(identity, me, "sleep", os.getuid()))
        (told,) = processes.read()
        assert told.identity == identity
        assert told.owner == processes.owner(identity)
        assert told.usage is not None
        assert told.usage.threads == 1
    # It has ended and the loop has not heard of that yet.
    time.sleep(0.3)
    assert processes.read()[0].usage is None
    processes.remove(identity)
    assert processes.read() == ()
    assert processes.owner(identity) is None


def test_a_later_process_with_the_pid_is_not_taken_for_the_first_nor_removed_with_it() -> None:
    processes = RankProcesses(PROCFS, SystemClock(), UserNames())
    with running("sleep", "60") as identity:
        first = ProcessIdentity(identity.pid, identity.start_time_ticks - 1)
        processes.add(identity, None)
        processes.set_program(first, "make")
        assert processes.owner(identity) is None
        processes.set_program(identity, "sleep")
        assert processes.owner(identity) == ProcessOwner(identity, "", "sleep")
        assert processes.owner(first) is None
        processes.remove(first)
        assert [one.identity for one in processes.read()] == [identity]


def test_another_program_of_a_process_is_known_anew() -> None:
    processes, identity = RankProcesses(Path("/other"), SystemClock(), UserNames()), ProcessIdentity(7, 1)
    said = []
    for program in ("train.py", "evaluate.py"):
        processes.add(identity, 1000)
        assert processes.owner(identity) is None
        processes.set_program(identity, program)
        said.append(processes.owner(identity))
    assert said == [ProcessOwner(identity, "", one, 1000) for one in ("train.py", "evaluate.py")]


def test_a_name_that_hangs_keeps_nobody_waiting_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def read(uid: int) -> str:
        if uid < MOST_THREADS - 1:
            released.wait(60)
        return f"user{uid}"

    monkeypatch.setattr(rank_processes, "user_name", read)
    users = UserNames()
    try:
        for uid in range(MOST_THREADS - 1):
            assert users.name_of(uid) == str(uid)
        for uid in range(100, 110):
            wait_for(lambda uid=uid: users.name_of(uid) == f"user{uid}")  # type: ignore[misc]
        assert users.name_of(0) == "0"
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "user-name")
    finally:
        released.set()
    wait_for(lambda: users.name_of(0) == "user0")


def test_of_4000_processes_a_question_reads_what_time_allows_and_the_next_ones_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimulatedClock()
    asked: list[int] = []

    def read(_procfs: Path, identity: ProcessIdentity, _clock: object) -> ProcessUsage:
        clock.now_ns += 100_000
        asked.append(identity.pid)
        return ProcessUsage(clock.now_ns, 1.0, 1 << 30, 100, 1)

    monkeypatch.setattr(rank_processes, "usage_of", read)
    processes = RankProcesses(PROCFS, clock, UserNames())
    for pid in range(1, 4001):
        processes.add(ProcessIdentity(pid, 1), None)
    questions = 0
    while any(one.usage is None for one in processes.read()):
        questions += 1
        assert len(asked) <= questions * (MOST_READING_NS // 100_000 + 1)
        clock.now_ns += 1_000_000_000
    assert sorted(asked[:4000]) == list(range(1, 4001)), "nobody was read twice before everybody was read once"
    # Who asks again at once gets the same, unless it was not read yet.
    clock.now_ns += 1_000_000_000
    processes.read()
    before = len(asked)
    processes.read()
    assert set(asked[before:]).isdisjoint(asked[before - 100 : before])
