"""A job on namespace hosts whose rank stops, on the dashboards: what an operator would see of it."""

from __future__ import annotations

import os
import time
from typing import Final

import pytest

if os.environ.get("RAILSCOPE_TEST_PANELS") != "1":
    pytest.skip("Grafana's component packages are 500 MB: run 'make test-panels'", allow_module_level=True)

from railscope.agent.cluster.fleet.prometheus import Endpoint, PrometheusStore
from railscope.testbed.faults import Stopped
from railscope.testbed.job import Job, JobOptions
from tests.panels.bundle import ICONS, bundle
from tests.panels.chromium import Browser
from tests.panels.drawing import Drawn, Question, draw
from tests.panels.server import page_served
from tests.stack.prometheus import until
from tests.stack.stack import Pace, Stack

pytestmark = [
    pytest.mark.browser,
    pytest.mark.root,
    pytest.mark.fabric,
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

LOAD: Final = JobOptions(pattern="ddp", seconds=600, batch=1_000_000_000, linger=True, pace_us=50_000)
RUNNING: Final = (
    "count(sum by (instance) (rate(railscope_collective_calls_total[5s])) > 0) == 2"
    ' and count(up{job="railscope"} offset 15s) == 2'
)
"""Both agents have been scraped for as long as the dashboards look back."""
STALLED: Final = 'count_over_time(railscope_comm_stall_info{cause="process_stopped"}[10s]) > 2'
"""For more than one point of a line."""


def now(browser: Browser, url: str, name: str) -> Drawn:
    end = time.time()
    return draw(browser, url, Question(f"railscope-{name}", end - 15, end, scrape=1))


def text(found: Drawn, title: str) -> str:
    return next(one.text for one in found.panels if one.title == title)


def test_the_dashboards_show_who_stopped() -> None:
    page = bundle()
    with Stack(2, pace=Pace("1s")) as stack, Job(stack.fabric.hosts, LOAD) as job, Browser() as browser:
        store = PrometheusStore(Endpoint(stack.prometheus_url))
        with page_served(page, ICONS, stack.prometheus_url) as url:
            until(lambda: bool(store.query(RUNNING)), "both hosts to be seen for a while")
            before = now(browser, url, "stall")
            with Stopped(job.pids[1]):
                until(lambda: bool(store.query(STALLED)), "the stall to be seen")
                during = now(browser, url, "stall")
                fleet = now(browser, url, "fleet")
        assert text(before, "Ranks stalled").split()[-1] == "0"
        assert text(during, "Ranks stalled").split()[-1] != "0"
        said = next(one.rows for one in during.panels if one.title == "What the hosts say")
        assert [row for row in said if "host1" in row and "process_stopped" in row]
        assert "process_stopped" in text(fleet, "Causes with the strongest evidence")
        (states,) = (one for one in during.panels if one.title == "Stalled")
        assert states.coloured > 0
        # What namespace hosts lack is not drawn; nothing fails.
        instead = {one.instead for found in (before, during, fleet) for one in found.panels}
        assert instead <= {"", "No data"}
