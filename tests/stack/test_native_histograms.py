"""A real Prometheus that takes native histograms asks us for protobuf, and answers from them, panels included."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from railscope.agent.cluster.fleet.prometheus import PrometheusStore
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.snapshot import OpHistogram, Snapshot
from railscope.agent.node.collectives.node_totals import SIZE_BOUNDS
from railscope.agent.node.completion.completion import BANDWIDTH_BOUNDS
from railscope.dashboards import build, documents, expressions, recorded, rules_files
from railscope.exporters.web.http import MetricsServer, ServerSettings
from tests.stack.prometheus import prometheus, store_at, until
from tests.unit.exporters_snapshots import full_snapshot

pytestmark = pytest.mark.stack

FEATURE = "--enable-feature=native-histograms"
SIZE = "railscope_collective_size_bytes"
BANDWIDTH = "railscope_collective_bus_bandwidth_bytes_per_second"


class Growing:
    """A node on which each scrape finds a hundred more calls of 48 to 64 MiB, and one of no bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scrapes = 0

    def snapshot(self) -> Snapshot:
        with self._lock:
            self._scrapes += 1
            scrapes = self._scrapes
        counts = [0] * (len(SIZE_BOUNDS) + 1)
        counts[0], counts[26] = scrapes, 100 * scrapes
        sizes = OpHistogram("AllReduce", Histogram(SIZE_BOUNDS, tuple(counts), 100.0 * scrapes * 48 * 2**20))
        counts = [0] * (len(BANDWIDTH_BOUNDS) + 1)
        counts[BANDWIDTH_BOUNDS.index(2.0**36)] = 100 * scrapes
        bandwidths = OpHistogram("AllReduce", Histogram(BANDWIDTH_BOUNDS, tuple(counts), 100.0 * scrapes * 48e9))
        full = full_snapshot()
        completion = replace(full.collectives.completion, bandwidths=(bandwidths,))
        return replace(full, collectives=replace(full.collectives, sizes=(sizes,), completion=completion))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusStore]:
    """A Prometheus that takes native histograms, and scrapes one agent."""
    server = MetricsServer(
        ServerSettings(listen_address="127.0.0.1:0"),
        snapshot=Growing().snapshot,
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
    )
    with server:
        target = server.url.removeprefix("http://")
        config = f"scrape_configs:\n  - job_name: railscope\n    static_configs: [{{targets: ['{target}']}}]\n"
        rules = [rules_files.SHIPPED / rules_files.RECORDING]
        with prometheus(tmp_path_factory.mktemp("prometheus"), config, rules, [FEATURE]) as url:
            yield store_at(url)


def test_quantiles_of_native_histograms_need_no_le_and_find_what_was_counted(native: PrometheusStore) -> None:
    def value(query: str) -> float:
        found = native.query(query)
        return found[0].value if len(found) == 1 else math.nan

    until(lambda: value(f"histogram_count(rate({SIZE}[10s]))") > 0, "a rate of the native histogram")
    # In the bucket that ends with 64 MiB: a native histogram's quantile has no `le` to be found by.
    assert 2**25 < value(f"histogram_quantile(0.5, rate({SIZE}[10s]))") <= 2**26
    # The calls without bytes are in the bucket around zero, one of 101.
    assert 0 <= value(f"histogram_quantile(0.005, rate({SIZE}[10s]))") <= 1
    assert value(f"histogram_sum({SIZE}) / (histogram_count({SIZE}) * 100 / 101)") == 48 * 2**20
    # What is native has no classic buckets beside it, unless a newer Prometheus is told to keep them.
    assert native.query(f"{SIZE}_bucket") == ()
    # Histograms of times have no native bounds: as ever.
    assert value('count(railscope_collective_duration_seconds_bucket{op="AllReduce", source="proxy"})') > 1
    assert value("railscope_snapshot_timestamp_seconds") > 0
    assert value("up") == 1


def job_panels(*metrics: str) -> Iterator[tuple[documents.Panel, str]]:
    """The panels of the dashboard Job that ask for one of these, with each query as Prometheus gets it."""
    for panel in documents.read_documents(build.COMMITTED)["railscope-job.json"].panels:
        for query in panel.queries:
            if any(metric in query.expression for metric in metrics):
                yield panel, expressions.substitute_variables(query.expression, "10s")


def test_panels_show_native_histograms_too(native: PrometheusStore) -> None:
    until(lambda: bool(native.query(f"histogram_count(rate({BANDWIDTH}[10s])) > 0")), "a rate of the native histogram")
    until(lambda: bool(native.query(str(recorded.PROCESSES_OF_JOB))), "which hosts a job runs on")
    panels = list(job_panels(SIZE, BANDWIDTH))
    assert {panel.title for panel, _ in panels} == {
        "Message sizes",
        "Bus bandwidth of operations",
        "Bus bandwidth, percentiles",
    }
    assert len(panels) == 4
    for panel, expression in panels:
        if panel.kind == "heatmap":
            (operations,) = native.query(f"histogram_count({expression})")
            assert operations.value > 0, panel.title
        else:
            (bytes_per_second,) = native.query(expression)
            assert 2**35 < bytes_per_second.value <= 2**36, panel.title
