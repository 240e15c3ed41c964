"""Lines about stalls: each has one up to a number for a tenant and minute, and the rest is summed up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from railscope.agent.facts.stall import Stall
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls.stall_log import MOST_LINES, WINDOW_NS, StallLog
from tests.unit.exporters_snapshots import stall
from tests.unit.stall_world import SimulatedClock

GREEDY, MODEST = 1, 2
TENANTS = {GREEDY: Tenant(5000), MODEST: Tenant(5001)}


def of_rank(pid: int, rank: int) -> Stall:
    return replace(stall(), pid=pid, rank=str(rank))


def told_of(lines: list[str]) -> list[str]:
    """Process and rank of each line about a stall that begins."""
    return [f"{line.rpartition('process ')[2][0]} {line.partition(' rank ')[2].partition(' ')[0]}" for line in lines]


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "railscope.stalls"):
        yield


def test_many_stalls_of_one_tenant_leave_another_s_lines_and_are_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    log = StallLog(clock, TENANTS.__getitem__)
    for number in range(500):
        log.begun(of_rank(GREEDY, number))
    for _ in range(400):
        log.ended(replace(stall(ended_ns=clock.now_ns), pid=GREEDY))
    log.begun(of_rank(MODEST, 0))
    assert told_of(caplog.messages) == [*(f"{GREEDY} {number}" for number in range(MOST_LINES)), f"{MODEST} 0"]
    log.sum_up()
    assert len(caplog.messages) == MOST_LINES + 1, "not before the minute is over"
    assert log.owes
    caplog.clear()
    clock.sleep(WINDOW_NS / 1e9)
    log.sum_up()
    assert caplog.messages == [
        "of the ranks of uid 5000, 480 more begin to stall and 400 more go on: /stalls has them one by one"
    ]
    assert not log.owes


def test_what_is_of_no_known_communicator_is_its_process_s_when_it_begins_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = StallLog(SimulatedClock(), TENANTS.__getitem__)
    nameless = replace(stall(), comm="unknown", rank="unknown", nranks="unknown", pid=GREEDY)
    write = replace(nameless, op="nixl Write", library="nixl", peer="decode-0")
    for one in (write, replace(nameless, op="cudaStreamSynchronize")):
        log.begun(one)
        log.ended(replace(one, ended_ns=one.since_ns + 3_000_000_000))
    what = [line.partition(" does not complete: rail_down")[0] for line in caplog.messages]
    assert what == [
        "nixl Write to decode-0 of process 1",
        "nixl Write to decode-0 of process 1 is over after 3.0 s (rail_down)",
        "cudaStreamSynchronize of process 1",
        "cudaStreamSynchronize of process 1 is over after 3.0 s (rail_down)",
    ]


def test_each_minute_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    log = StallLog(clock, TENANTS.__getitem__)
    for _ in range(3):
        for number in range(MOST_LINES):
            log.begun(of_rank(GREEDY, number))
        clock.sleep(WINDOW_NS / 1e9)
    assert len(caplog.messages) == 3 * MOST_LINES
    assert not log.owes


def test_a_minute_that_is_over_is_summed_up_before_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    log = StallLog(clock, TENANTS.__getitem__)
    for number in range(MOST_LINES + 1):
        log.begun(of_rank(GREEDY, number))
    caplog.clear()
    clock.sleep(WINDOW_NS / 1e9)
    log.begun(of_rank(GREEDY, 99))
    summed_up, again = caplog.messages
    assert summed_up == "of the ranks of uid 5000, 1 more begin to stall: /stalls has them one by one"
    assert told_of([again]) == [f"{GREEDY} 99"]
