"""What the typical node costs a real Prometheus, against what `railscope dashboards cost` reckons."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from railscope.agent.facts.snapshot import Snapshot
from railscope.dashboards import cost, recorded, rules_files
from railscope.dashboards.typical_node import typical_node
from tests.stack.agents import served
from tests.stack.prometheus import prometheus, store_at, until

pytestmark = pytest.mark.stack

LAST = "count_over_time(rail:railscope_transmit_to_siblings:ratio[5s]) > 3"

OF_STEPS = frozenset(
    one.name
    for one in (
        recorded.STEP_SECONDS,
        recorded.STEP_PART_SECONDS,
        recorded.STEP_SECONDS_HELD,
        recorded.STEP_PART_SECONDS_HELD,
        recorded.JOB_WAITING,
        recorded.JOB_STEP_PARTS,
        recorded.GOODPUT,
    )
)
"""Recorded while a job makes steps: the counters of the typical node stand."""


def snapshot() -> Snapshot:
    return replace(typical_node(), realtime_ns=time.time_ns())


def test_prometheus_stores_as_many_series_as_are_reckoned(tmp_path_factory: pytest.TempPathFactory) -> None:
    node = cost.count_series(typical_node())
    # Joins with other exporters' series are for who has these.
    rules = sorted(file for file in rules_files.SHIPPED.glob("*.yml") if file.name != rules_files.JOINS)
    folder = tmp_path_factory.mktemp("prometheus")
    with served(snapshot, hosts=("gpu-a:9779",)) as scrapes, prometheus(folder, scrapes, rules) as url:
        store = store_at(url)
        until(lambda: bool(store.query(LAST)), "the recording rules")
        (scraped,) = store.query("scrape_samples_scraped")
        assert scraped.value == node.series
        added = store.query('count({job="railscope",__name__!~".*railscope_.*|process_.*|ALERTS.*"})')
        assert [one.value for one in added] == [len(cost.OF_A_SCRAPE)]

        def found() -> dict[str, float]:
            named = 'label_replace({__name__=~".+:railscope_.+"}, "metric", "$1", "__name__", "(.+)")'
            return {one.labels["metric"]: one.value for one in store.query(f"count by (metric) ({named})")}

        expected = {name: node.families[metric] for name, metric in cost.RECORDED_LIKE.items() if name not in OF_STEPS}
        until(lambda: found() == expected, f"{expected}, not {found()}")
