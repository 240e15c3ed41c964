"""The load that the tracker's cost is measured with is one that the agent follows: simulated records, no timing."""

from __future__ import annotations

import pytest

from tests.bench import tracker_cost
from tests.bench.target import BenchError


def test_the_load_is_followed_and_is_no_stall() -> None:
    with tracker_cost.processes() as pids:
        assert tracker_cost.followed_percent(tracker_cost.Load(pids, communicators=8), warm_seconds=1, seconds=1) > 0


def test_a_load_that_nobody_follows_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.agent.node.daemon.observer.Observer.record_calls", lambda *_: None)
    with tracker_cost.processes() as pids, pytest.raises(BenchError, match="not followed"):
        tracker_cost.followed_percent(tracker_cost.Load(pids, communicators=8), warm_seconds=1, seconds=1)


def test_a_scrape_after_a_second_in_which_everything_moved_takes_a_few_microseconds_a_series() -> None:
    """Three on a quiet machine; it was seven to ten when each scrape found out again who every communicator is."""
    with tracker_cost.processes() as pids:
        assert min(tracker_cost.scrape_microseconds(tracker_cost.Load(pids, communicators=64))) < 7
