"""When calls meet a probe at the level *watch*, and which libraries keep theirs; probes and levels are simulated."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from railscope.agent.node.daemon.watching import AWAITED_NS, PERIOD_NS, SOON_NS, Watching
from railscope.probes.nccl.functions.internals import Level
from tests.unit.stall_world import SimulatedClock

SECOND_NS = 1_000_000_000


@dataclass(slots=True)
class Host:
    """Libraries 1 (numbered) and 2 (not); takes what is asked of them."""

    target_level: Level = Level.WATCH
    numbered: frozenset[int] = frozenset({1})
    unnumbered: tuple[tuple[str, str], ...] = ()
    awaits_counts: bool = False
    share_numbered: float = 1.0
    uncounted: frozenset[int] = frozenset()
    log: list[str] = field(default_factory=list)

    def set_watched(self, numbers: Collection[int]) -> list[str]:
        if frozenset(numbers) != self.uncounted:
            self.uncounted = frozenset(numbers)
            self.log.append(f"probes off {sorted(numbers)}")
        return []

    def watch_libraries(self, watching: Collection[int], uncounted: Collection[int]) -> None:
        self.log.append(f"watch {sorted(watching)}, uncounted {sorted(uncounted)}")


def seconds_between_moments(host: Host, seconds: int) -> list[int]:
    """After how many seconds calls were counted for a moment, tick by tick."""
    clock, found = SimulatedClock(), list[int]()
    watching = Watching(host, host, host, clock)
    last = 0
    for second in range(seconds):
        watching.begin_update()
        watching.follow()
        if watching.counts_for_a_moment:
            found.append(second - last)
            last = second
        clock.now_ns += SECOND_NS
    return found


def test_calls_are_counted_for_a_moment_soon_and_then_ever_more_seldom() -> None:
    assert seconds_between_moments(Host(), 600)[:6] == [2, 6, 18, 54, PERIOD_NS // SECOND_NS, PERIOD_NS // SECOND_NS]
    assert SOON_NS == 2 * SECOND_NS


def test_where_no_call_was_counted_yet_the_next_moment_comes_sooner() -> None:
    pauses = seconds_between_moments(Host(awaits_counts=True), 600)
    assert max(pauses) == AWAITED_NS // SECOND_NS


def test_a_probe_is_back_only_after_its_calls_are_no_longer_taken_for_uncounted() -> None:
    host, clock = Host(), SimulatedClock()
    watching = Watching(host, host, host, clock)
    watching.follow()
    clock.now_ns += SOON_NS
    host.log.clear()
    watching.follow()
    assert host.log == ["watch [1], uncounted []", "probes off []"]
    host.log.clear()
    watching.follow()
    assert host.log == ["watch [1], uncounted []", "probes off [1]"]
    watching.begin_update()
    assert host.log[-1] == "watch [1], uncounted [1]"
    host.target_level = Level.COUNTS
    host.log.clear()
    watching.follow()
    assert host.log == ["watch [], uncounted []", "probes off []"]


def test_a_library_without_numbers_keeps_its_probes_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host(numbered=frozenset(), unnumbered=(("/opt/libnccl.so.2", "2.21.5"),))
    watching = Watching(host, host, host, SimulatedClock())
    with caplog.at_level(logging.WARNING):
        assert watching.lowest(asked=False) is Level.COUNTS
        assert caplog.messages == []
        for _ in range(3):
            assert watching.lowest(asked=True) is Level.COUNTS
            assert watching.follow() == []
    assert host.uncounted == frozenset()
    (line,) = caplog.messages
    assert "/opt/libnccl.so.2" in line
    assert "2.21.5" in line
    assert "2.26" in line


@pytest.mark.parametrize(
    ("host", "asked", "lowest"),
    [
        (Host(), False, Level.WATCH),
        (Host(share_numbered=0.5), False, Level.COUNTS),
        (Host(share_numbered=0.5), True, Level.WATCH),
        (Host(numbered=frozenset()), True, Level.COUNTS),
    ],
)
def test_the_governor_may_go_as_low_as_nccl_numbers_what_the_job_calls(host: Host, asked: bool, lowest: Level) -> None:
    assert Watching(host, host, host, SimulatedClock()).lowest(asked=asked) is lowest
