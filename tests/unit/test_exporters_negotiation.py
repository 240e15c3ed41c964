"""Which format and compression an answer has, by the headers of the request."""

from __future__ import annotations

import pytest

from railscope.exporters.series.protobuf import Protobuf
from railscope.exporters.series.text import Format
from railscope.exporters.web.negotiation import accepts_gzip, metrics_format
from tests.unit.http_agent import PROMETHEUS_2, PROMETHEUS_NATIVE, PROTOBUF


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("", Format.PROMETHEUS),
        ("*/*", Format.PROMETHEUS),
        ("text/html,application/xhtml+xml,*/*;q=0.8", Format.PROMETHEUS),
        ("application/*", Format.PROMETHEUS),
        ("application/openmetrics-text", Format.OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", Format.OPENMETRICS),
        ("text/plain,application/openmetrics-text", Format.OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", Format.PROMETHEUS),
        (PROMETHEUS_2, Format.OPENMETRICS),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.7", Format.PROMETHEUS),
        ("application/openmetrics-text;q=0.3,text/plain;version=1.0.0;q=0.7", Format.OPENMETRICS),
        ("application/openmetrics-text;q=0.3,*/*;q=0.7", Format.PROMETHEUS),
        ("application/openmetrics-text;q=0.3,text/plain;q=0.1,*/*;q=0.7", Format.OPENMETRICS),
        ("application/openmetrics-text;q=0", Format.PROMETHEUS),
        ("application/openmetrics-text;q=high", Format.PROMETHEUS),
        ("image/png", Format.PROMETHEUS),
        (",;=,q=;", Format.PROMETHEUS),
        (PROMETHEUS_NATIVE, Protobuf.DELIMITED),
        ("application/vnd.google.protobuf", Format.PROMETHEUS),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily", Format.PROMETHEUS),
        (f"{PROTOBUF};encoding=text", Format.PROMETHEUS),
        (f"{PROTOBUF};encoding=delimited;q=0.3,text/plain;q=0.7", Format.PROMETHEUS),
        (f"{PROTOBUF};encoding=delimited;q=0.3,application/openmetrics-text;q=0.7", Format.OPENMETRICS),
        (f"{PROTOBUF};encoding=delimited;q=0", Format.PROMETHEUS),
    ],
)
def test_the_format_follows_accept_and_its_qualities(accept: str, format: Format | Protobuf) -> None:
    assert metrics_format(accept) is format


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("*", True),
        ("*;q=0, gzip", True),
        ("gzip;q=0, *", False),
        ("identity", False),
        ("br", False),
    ],
)
def test_compression_follows_accept_encoding_and_its_qualities(header: str, allowed: bool) -> None:
    assert accepts_gzip(header) is allowed
