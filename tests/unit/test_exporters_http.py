"""What the server answers, page by page, on real sockets of the loopback."""

from __future__ import annotations

import gzip
import http.client
import logging
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.web.http import ServerError
from tests.unit.exporters_snapshots import full_snapshot
from tests.unit.http_agent import FREE_PORT, PROMETHEUS_2, PROMETHEUS_NATIVE, Agent, ask, ask_on, serving
from tests.unit.metric_families import read_families


@pytest.fixture
def agent() -> Iterator[Agent]:
    with serving() as one:
        yield one


def test_metrics_are_plain_text_for_whoever_does_not_ask(agent: Agent) -> None:
    answer = ask(agent.server(), "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    assert "Content-Encoding" not in answer.headers
    assert "railscope_rail_up{" in answer.text


def test_prometheus_gets_openmetrics_compressed(agent: Agent) -> None:
    answer = ask(agent.server(), "/metrics", Accept=PROMETHEUS_2, Accept_Encoding="gzip")
    assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.headers["Content-Encoding"] == "gzip"
    text = gzip.decompress(answer.body).decode()
    families = {family.name for family in parse_openmetrics(text)}
    assert "railscope_comm_enqueued" in families


def test_prometheus_gets_protobuf_where_it_takes_native_histograms(agent: Agent) -> None:
    answer = ask(agent.server(), "/metrics", Accept=PROMETHEUS_NATIVE, Accept_Encoding="gzip")
    assert answer.headers["Content-Type"] == (
        "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
    )
    read = {family.name: family for family in read_families(gzip.decompress(answer.body))}
    assert "railscope_comm_enqueued_total" in read
    # The text that others get is not touched by it.
    assert "railscope_comm_enqueued_total{" in ask(agent.server(), "/metrics").text


def test_a_small_answer_is_not_compressed(agent: Agent) -> None:
    agent.snapshot = lambda: Snapshot(realtime_ns=0, version="0.1.0", kernel="6.8.0")
    answer = ask(agent.server(), "/metrics", Accept_Encoding="gzip")
    assert len(answer.body) < 1024
    assert "Content-Encoding" not in answer.headers


def test_head_has_the_headers_of_get_and_no_body(agent: Agent) -> None:
    server = agent.server()
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as client:
        head = ask_on(client, "/metrics", "HEAD")
        full = ask_on(client, "/metrics", "GET")
    assert head.status == 200
    assert (head.body, head.headers["Content-Length"]) == (b"", full.headers["Content-Length"])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused_with_those_that_work(agent: Agent, method: str) -> None:
    answer = ask(agent.server(), "/metrics", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_what_is_not_there_is_one_line_that_says_where_metrics_are(agent: Agent) -> None:
    answer = ask(agent.server(), "/metricss?x=<script>")
    assert (answer.status, answer.text) == (404, "nothing here; metrics are at /metrics, all pages at /\n")


def test_a_query_does_not_change_the_page(agent: Agent) -> None:
    assert ask(agent.server(), "/metrics?collect[]=x").status == 200


def test_the_landing_page_links_to_the_metrics_wherever_they_are(agent: Agent) -> None:
    server = agent.server(replace(FREE_PORT, telemetry_path="/rails"))
    answer = ask(server, "/")
    assert answer.headers["Content-Type"].startswith("text/html")
    for link in re.findall(r'href="([^"]+)"', answer.text):
        assert ask(server, link).status == 200
    assert 'href="/rails"' in answer.text
    assert ask(server, "/metrics").status == 404


@pytest.mark.parametrize("path", ["metrics", "/healthz", "/readyz", "/a b", "/é", ""])
def test_a_telemetry_path_that_cannot_be_one_is_refused(agent: Agent, path: str) -> None:
    with pytest.raises(ServerError, match=r"--web\.telemetry-path"):
        agent.server(replace(FREE_PORT, telemetry_path=path))


def test_health_and_readiness_say_what_is_wrong(agent: Agent) -> None:
    server = agent.server()
    assert (ask(server, "/healthz").status, ask(server, "/readyz").status) == (200, 200)
    agent.health = (False, "the ring reader stopped 12 s ago")
    agent.readiness = (False, "no readings yet")
    assert (ask(server, "/healthz").status, ask(server, "/healthz").text) == (503, "the ring reader stopped 12 s ago\n")
    assert (ask(server, "/readyz").status, ask(server, "/readyz").text) == (503, "no readings yet\n")


def test_a_snapshot_that_fails_is_one_line_to_the_client_and_the_reason_in_the_log(
    agent: Agent, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Snapshot:
        raise OSError("map is gone")

    agent.snapshot = fail
    server = agent.server()
    with caplog.at_level(logging.ERROR, "railscope.http"):
        answer = ask(server, "/metrics")
        server.close()
    assert (answer.status, answer.text) == (500, "internal error; see the agent's log\n")
    assert [record.getMessage() for record in caplog.records] == ["127.0.0.1: OSError: map is gone"]
    assert capfd.readouterr() == ("", "")


def test_after_a_failed_snapshot_the_next_scrape_works(agent: Agent) -> None:
    answers = iter([ValueError("once")])

    def fail_once() -> Snapshot:
        for error in answers:
            raise error
        return full_snapshot()

    agent.snapshot = fail_once
    server = agent.server()
    assert [ask(server, "/metrics").status for _ in range(2)] == [500, 200]
