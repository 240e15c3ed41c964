"""Where a blamed rank's Python code stands: a real py-spy on a real process, and programs that are no py-spy."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import ProcessStack
from railscope.agent.node.stalls.stacks import MOST_FRAMES, MOST_STUCK, Stacks
from railscope.probes.clock import SystemClock
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of
from tests.unit.stall_world import STOPPED, SimulatedClock, World, steady

PY_SPY = Path(sys.executable).with_name("py-spy")
CODE = """
import sys, threading, time
def wait_for_input(): time.sleep(600)
def training_step(depth=0):
    if depth < 60: training_step(depth + 1)
    wait_for_input()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
training_step()
"""


@pytest.fixture
def rank() -> Iterator[ProcessIdentity]:
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            identity = identity_of(PROCFS, process.pid)
            assert identity is not None
            yield identity
        finally:
            process.kill()


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def read(stacks: Stacks, identity: ProcessIdentity, seconds: float = 30.0) -> ProcessStack:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stacks.follow([identity])
        stack = stacks.stack_of(identity)
        if stack is not None:
            return stack
        time.sleep(0.02)
    raise AssertionError("no stack came")


def test_the_main_thread_of_a_rank_is_read_while_it_runs(rank: ProcessIdentity) -> None:
    with closing(Stacks(PY_SPY, SystemClock())) as stacks:
        stack = read(stacks, rank)
    assert stack.why == ""
    assert stack.lines[0].startswith("wait_for_input (")
    assert stack.lines[1].startswith("training_step (")
    assert len(stack.lines) == MOST_FRAMES


def test_a_process_without_python_is_said_to_have_none() -> None:
    with subprocess.Popen(["sleep", "600"]) as process, closing(Stacks(PY_SPY, SystemClock())) as stacks:
        try:
            identity = identity_of(PROCFS, process.pid)
            assert identity is not None
            stack = read(stacks, identity)
        finally:
            process.kill()
    assert (stack.lines, stack.why) == ((), "py-spy finds no Python there, or may not read it")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exit 1", "finds no Python"),
        ("echo '[[[['", "finds no Python"),
        ("""echo '[{"os_thread_id": "x", "frames": 3}]'""", "in no Python code"),
        ("yes | head -c 9000000", "more than 1 MiB"),
    ],
)
def test_what_is_no_stack_is_not_taken_for_one(tmp_path: Path, text: str, why: str) -> None:
    identity = ProcessIdentity(4711, 1)
    with closing(Stacks(program(tmp_path / "py-spy", text), SystemClock())) as stacks:
        stack = read(stacks, identity)
    assert stack.lines == ()
    assert why in stack.why


def test_a_program_that_hangs_is_ended_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    clock = SimulatedClock()
    identity, pids = ProcessIdentity(4711, 1), tmp_path / "pid"
    hangs = program(tmp_path / "py-spy", f"echo $$ > {pids}; exec sleep 600")
    with closing(Stacks(hangs, clock)) as stacks:
        began = time.monotonic()
        stacks.follow([identity])
        while not pids.exists() or not pids.read_text():
            time.sleep(0.01)
        stacks.follow([identity])
        assert stacks.stack_of(identity) is None
        clock.now_ns += 6 * 10**9
        stacks.follow([identity])
        assert time.monotonic() - began < 20
        stack = stacks.stack_of(identity)
        assert stack is not None
        assert "took longer than 5 s" in stack.why
        while Path(f"/proc/{pids.read_text().strip()}").exists():
            assert time.monotonic() - began < 30
            stacks.follow([])
            time.sleep(0.01)


def test_helpers_that_cannot_end_keep_no_look_waiting_and_are_few(tmp_path: Path) -> None:
    # One that waits for a page of its process does so for as long as the process's user likes, killed or not.
    clock, asked = SimulatedClock(), tmp_path / "asked"
    stacks = Stacks(program(tmp_path / "py-spy", f"echo x >> {asked}; exec sleep 600"), clock)
    unkillable: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(MOST_STUCK + 3):
            blamed = [ProcessIdentity(4711 + number, 1)]
            stacks.follow(blamed)
            if stacks._reading is not None:
                # Simulated: the kernel does not let it go.
                helper = stacks._reading.helper
                unkillable.append(helper)
                helper.kill = lambda: None  # type: ignore[method-assign]
            clock.now_ns += 6 * 10**9
            began = time.monotonic()
            stacks.follow(blamed)
            assert time.monotonic() - began < 5
        assert len(unkillable) == MOST_STUCK
    finally:
        for helper in unkillable:
            helper.send_signal(signal.SIGKILL)
        stacks.close()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with closing(Stacks(tmp_path / "nothing", SystemClock())) as stacks:
        assert read(stacks, ProcessIdentity(4711, 1)).why == f"{tmp_path / 'nothing'}: No such file or directory"


def test_the_blamed_rank_is_read_and_the_one_that_waits_is_not(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    records = program(tmp_path / "py-spy", f'echo "$5" >> {asked}; echo "[]"')
    world = World(ranks=2, stacks=lambda clock: Stacks(records, clock))
    steady(world)
    waits, stopped = world.ranks
    waits.begin()
    stopped.process = STOPPED
    world.until_flagged(20)
    while not asked.exists() or not world.watch.facts().stacks:
        time.sleep(0.02)
        world.step()
    facts = world.watch.facts()
    assert Cause.PROCESS_STOPPED in {stall.diagnosis.cause for stall in facts.current}
    assert asked.read_text().split() == [str(stopped.pid)]
    assert [(rank, stack.why) for (_, rank), stack in facts.stacks.items()] == [
        (1, "its main thread is in no Python code")
    ]
    world.watch.close()
