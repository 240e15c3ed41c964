"""A real Prometheus that takes native histograms asks us for protobuf, and answers from them."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent.node_totals import SIZE_BOUNDS
from agent.prometheus_query import Endpoint, PrometheusStore
from agent.snapshot import Histogram, OpHistogram, Snapshot
from exporters.http import MetricsServer, ServerSettings
from tests.stack.prometheus import prometheus, until
from tests.unit.exporters_snapshots import full_snapshot

pytestmark = pytest.mark.stack

FEATURE = "--enable-feature=native-histograms"
SIZE = "railscope_collective_size_bytes"


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
        return replace(full_snapshot(), sizes=(sizes,))


def test_quantiles_of_native_histograms_need_no_le_and_find_what_was_counted(tmp_path: Path) -> None:
    server = MetricsServer(
        ServerSettings(listen_address="127.0.0.1:0"),
        snapshot=Growing().snapshot,
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
    )
    with server:
        target = server.url.removeprefix("http://")
        config = f"scrape_configs:\n  - job_name: railscope\n    static_configs: [{{targets: ['{target}']}}]\n"
        with prometheus(tmp_path, config, arguments=[FEATURE]) as url:
            store = PrometheusStore(Endpoint(url))

            def value(query: str) -> float:
                found = store.query(query)
                return found[0].value if len(found) == 1 else math.nan

            until(lambda: value(f"histogram_count(rate({SIZE}[10s]))") > 0, "a rate of the native histogram")
            # In the bucket that ends with 64 MiB: a native histogram's quantile has no `le` to be found by.
            assert 2**25 < value(f"histogram_quantile(0.5, rate({SIZE}[10s]))") <= 2**26
            # The calls without bytes are in the bucket around zero, one of 101.
            assert 0 <= value(f"histogram_quantile(0.005, rate({SIZE}[10s]))") <= 1
            assert value(f"histogram_sum({SIZE}) / (histogram_count({SIZE}) * 100 / 101)") == 48 * 2**20
            # What is native has no classic buckets beside it, unless a newer Prometheus is told to keep them.
            assert store.query(f"{SIZE}_bucket") == ()
            # Histograms of times have no native bounds: as ever.
            assert value('count(railscope_collective_duration_seconds_bucket{op="AllReduce", source="proxy"})') > 1
            assert value("railscope_snapshot_timestamp_seconds") > 0
            assert value("up") == 1
