"""A real Prometheus keeps our exemplars, whichever format it asks for."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.facts.histogram import Exemplar, Histogram
from railscope.agent.facts.snapshot import OpHistogram, Snapshot
from railscope.agent.node.completion.completion import DURATION_BOUNDS
from railscope.exporters.web.http import MetricsServer, ServerSettings
from tests.stack.prometheus import prometheus, until
from tests.unit.exporters_snapshots import full_snapshot

pytestmark = pytest.mark.stack

LABELS = (("comm", "00c0ffee00c0ffee"), ("rank", "3"), ("sequence", "17"))


def snapshot() -> Snapshot:
    counts = [0] * (len(DURATION_BOUNDS) + 1)
    counts[5] = 1
    exemplars: list[Exemplar | None] = [None] * len(counts)
    exemplars[5] = Exemplar(LABELS, 30e-6, time.time_ns())
    slow = Histogram(DURATION_BOUNDS, tuple(counts), 30e-6, tuple(exemplars))
    full = full_snapshot()
    completion = replace(full.collectives.completion, durations=(OpHistogram("AllReduce", slow),))
    return replace(full, collectives=replace(full.collectives, completion=completion))


@pytest.mark.parametrize("features", ["exemplar-storage", "exemplar-storage,native-histograms"])
def test_prometheus_keeps_the_operation_behind_a_bucket(tmp_path: Path, features: str) -> None:
    server = MetricsServer(
        ServerSettings(listen_address="127.0.0.1:0"),
        snapshot=snapshot,
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
    )
    with server:
        target = server.url.removeprefix("http://")
        config = f"scrape_configs:\n  - job_name: railscope\n    static_configs: [{{targets: ['{target}']}}]\n"
        with prometheus(tmp_path, config, arguments=[f"--enable-feature={features}"]) as url:

            def kept() -> list[dict[str, Any]]:
                query = {
                    "query": "railscope_collective_duration_seconds_bucket",
                    "start": str(time.time() - 60),
                    "end": str(time.time() + 60),
                }
                with urllib.request.urlopen(f"{url}/api/v1/query_exemplars?{urllib.parse.urlencode(query)}") as answer:
                    data: list[dict[str, Any]] = json.load(answer)["data"]
                return data

            until(lambda: bool(kept()), "an exemplar")
            (series,) = kept()
            assert float(series["seriesLabels"]["le"]) == DURATION_BOUNDS[5]
            assert series["exemplars"][0]["labels"] == dict(LABELS)
            assert float(series["exemplars"][0]["value"]) == 30e-6
