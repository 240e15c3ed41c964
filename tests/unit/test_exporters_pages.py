"""What rendering a page does to the process beside it."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format
from railscope.exporters.web.pages import Page, Pages
from tests.unit.exporters_snapshots import full_snapshot, large_snapshot

METRICS = Page("/metrics", Format.PROMETHEUS)


def pages(snapshot: Snapshot, budget: SeriesBudget | None = None) -> Pages:
    return Pages(
        telemetry_path="/metrics",
        snapshot=lambda: snapshot,
        processes=lambda _wanted: (),
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
        budget=budget or SeriesBudget(),
        selection=Selection(),
    )


def test_the_collector_of_cycles_does_not_walk_the_series_of_a_scrape() -> None:
    served = pages(large_snapshot())
    begun = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info)

    gc.collect()
    gc.callbacks.append(count)
    try:
        served.render(METRICS)
    finally:
        gc.callbacks.remove(count)
    assert len(begun) < 10, "with the collector there are some hundred"
    assert gc.isenabled()


def test_the_collector_comes_back_after_a_scrape_that_failed() -> None:
    broken = replace(full_snapshot(), rails=(None,))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        pages(broken).render(METRICS)
    assert gc.isenabled()
