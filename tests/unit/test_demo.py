"""What the demo shows of its job, and what it says of stalls.  The job and its stalls are made up."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.cli import demo
from railscope.agent.cli.demo import find_library
from railscope.agent.cli.demo_counts import (
    LiveTotals,
    OpCompletion,
    RailCount,
    communicator_lines,
    completion_table,
    rail_line,
    rail_table,
)
from railscope.agent.cli.demo_fault import (
    OwnStalls,
    describe_process,
    next_step_lines,
    plan_stop,
    slow_mbit,
    verdict_lines,
)
from railscope.agent.facts.snapshot import CommunicatorFacts, RankTimes
from railscope.testbed.hosts import TestbedError
from railscope.testbed.nccl.build import BuildError, build
from railscope.testbed.nccl.library import NCCL_VERSION, LibraryMissing
from tests.unit.exporters_snapshots import communicator, rail, stall


def doing(comm: str, enqueued: int, *, alive: bool = True) -> CommunicatorFacts:
    return replace(communicator(comm), enqueued=enqueued, alive=alive)


def test_the_busiest_communicators_come_first_ended_ones_last_and_the_rest_are_counted() -> None:
    idle = [doing(f"idle{number}", 1_000_000) for number in range(8)]
    shown = [*idle, doing("ended", 9_000, alive=False), doing("new", 70), doing("slow", 1_050), doing("fast", 3_000)]
    enqueued = {(4711, facts.identity.comm): 1_000_000 for facts in idle}
    before = LiveTotals(enqueued | {(4711, "slow"): 1_000, (4711, "fast"): 1_000}, {})
    lines = list(communicator_lines(shown, before))
    assert [line.split()[1] for line in lines[:4]] == ["fast", "new", "slow", "idle0"]
    assert lines[0].startswith("  comm fast rank 0/4:   2,000 ops/s   AllReduce 1,200")
    assert len(lines) == 9
    assert lines[-1] == "  … and 4 more"
    few = list(communicator_lines(shown[8:], before))
    assert [line.split()[1] for line in few] == ["fast", "new", "slow", "ended"]
    assert few[-1].startswith("  comm ended rank 0/4:         ended   ")


def test_only_stalls_of_the_demo_s_own_processes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    stalls = OwnStalls()
    mine, others = replace(stall(), pid=11), replace(stall(), pid=12)
    transfer = replace(mine, comm="unknown", rank="unknown", op="nixl Write", library="nixl", peer="decode-0")
    with caplog.at_level(logging.WARNING):
        stalls.record(others)
        stalls.record(mine)
        stalls.record(transfer)
        assert not caplog.messages
        stalls.log_new((10, 11))
        stalls.log_new((10, 11))
    assert caplog.messages == [
        f"communicator {mine.comm} rank 1 stalls in AllReduce: rail_down: "
        "rail 1 (rail1) has no carrier or is switched off",
        "process 11 stalls in nixl Write to decode-0: rail_down: rail 1 (rail1) has no carrier or is switched off",
    ]


def test_a_view_tells_how_long_the_operations_since_the_last_one_took() -> None:
    key = ("fast", "0")
    before = LiveTotals({(4711, "fast"): 1_000}, {key: RankTimes(*key, operations=1_000, seconds=1.0)})
    now = LiveTotals({}, {key: RankTimes(*key, operations=1_100, seconds=1.2)})
    (line,) = communicator_lines([doing("fast", 1_100)], before, now)
    assert "100 ops/s, each 2ms on the network" in line


def test_a_rail_s_line_tells_what_nccl_handed_over_as_no_part_of_what_the_port_has_counted_by_then() -> None:
    facts = replace(rail(device="rail0"), netns="railscope-ab-host1", transmit_bytes=482_000_000)
    unseen = replace(facts, transmit_collective_bytes=None)
    assert rail_line(unseen, "0.981", 3.0) == "  host1 rail0: port sent 482.0 MB, expected / port (over 3 s) 0.981"
    assert rail_line(replace(facts, transmit_collective_bytes=492_600_000), "…", 3.0) == (
        "  host1 rail0: port sent 482.0 MB, NCCL handed over 492.6 MB, expected / port (over 3 s) …"
    )


def test_tables_show_what_is_known_and_leave_out_a_column_of_which_nothing_is() -> None:
    carried = RailCount("rail0", "railscope-ab-host1", "transmit", 2_000, 1_900, 0.95)
    assert "by collectives" not in "\n".join(rail_table([carried]))
    head, sent, received = rail_table([replace(carried, collective_bytes=1_800), replace(carried, direction="receive")])
    assert head.split() == [
        "rail", "direction", "port", "bytes", "by", "collectives", "expected", "wire", "expected", "/", "port",
    ]  # fmt: skip
    assert sent.split() == ["host1", "rail0", "transmit", "2,000", "1,800", "1,900", "0.950"]
    assert received.split() == ["host1", "rail0", "receive", "2,000", "–", "1,900", "0.950"]
    _, row = completion_table([OpCompletion("AllReduce", 1_200, 0.0021, 2.5e9)])
    assert row.split() == ["AllReduce", "1,200", "2ms", "2.50", "GB/s"]


def test_a_verdict_has_the_words_of_stalls_and_the_steps_of_its_cause() -> None:
    one = stall()
    lines = list(verdict_lines([one], one.flagged_ns))
    assert lines[0].startswith(f"  communicator {one.comm}, rank 1 (pid {one.pid}): stalled in AllReduce")
    assert lines[1] == ("    cause rail_down, blames rail 1 (rail1): A rail has no carrier, or is switched off.")
    assert lines[2:] == ["    evidence: rail 1 (rail1) has no carrier or is switched off"]
    steps = list(next_step_lines(one))
    assert steps[0].startswith("  ip -s link show rail1   # ")
    assert not any("{" in step for step in steps)


@pytest.mark.parametrize(("before", "shaped"), [(0.0, 1), (4.6, 1), (27.0, 3), (500.0, 50), (2_400.0, 50)])
def test_a_rail_is_made_slow_for_what_it_carried(before: float, shaped: int) -> None:
    assert slow_mbit(before) == shaped


def test_without_nccl_the_demo_says_so_and_goes_on_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LibraryMissing("libnccl.so.2 is missing: run testbed/nccl/fetch-wheels")

    monkeypatch.setattr(demo, "build", missing)
    found = find_library("auto")
    assert found.nccl is None
    assert (
        "calls are all there is to see (the real NCCL is not here: `make demo` in a checkout fetches it" in found.words
    )
    with pytest.raises(TestbedError, match="is missing: run testbed"):
        find_library("nccl")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("gcc is missing: install the packages gcc and libc6-dev", "gcc is missing: install the packages gcc and "),
        ("python3 failed:\nTraceback:\n …\nModuleNotFoundError: elftools", "python3 failed: ModuleNotFoundError: elf"),
    ],
)
def test_a_stand_in_that_does_not_build_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: str, why: str
) -> None:
    def broken() -> None:
        raise BuildError(error)

    monkeypatch.setattr(demo, "build", broken)
    assert f"(the stand-in for CUDA does not build: {why}" in find_library("auto").words


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    library = tmp_path / ".venv" / "nccl" / NCCL_VERSION / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / ".venv" / "nccl" / "double").touch()
    with pytest.raises(BuildError, match=r"double/layout-\w+: cannot build there: Not a directory$"):
        build(tmp_path)


def test_what_has_become_of_a_process_that_was_stopped_is_told() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            planned = plan_stop("rank 0", sleeper.pid)
            assert planned.words == f"rank 0 is stopped: kill -STOP {sleeper.pid}"
            assert planned.past.format(ago="8 s ago") == f"rank 0 was stopped 8 s ago by kill -STOP {sleeper.pid}"
            with planned.fault:
                os.waitpid(sleeper.pid, os.WUNTRACED)
                assert describe_process(sleeper.pid) == "is still stopped"
                os.kill(sleeper.pid, signal.SIGCONT)
                os.waitpid(sleeper.pid, os.WCONTINUED)
                assert describe_process(sleeper.pid) == "runs again"
        finally:
            sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert describe_process(sleeper.pid) == "has ended"
    assert describe_process(sleeper.pid) == "has ended"
