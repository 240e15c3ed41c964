"""What is pushed by OTLP: names, messages, the queue, and the sending process against a server that decodes it all."""

from __future__ import annotations

import os
import pickle
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.config.values import otlp_endpoint
from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import METRICS, Metric
from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.otlp.names import otlp_name
from railscope.exporters.otlp.push import OtlpPush, read_boot_seconds
from railscope.exporters.otlp.sender import MOST_ATTEMPTS, MOST_WAITING, Sender, read_headers
from railscope.exporters.otlp.wire import Export, Report, SenderSettings
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from tests.unit.exporters_snapshots import full_snapshot
from tests.waiting import eventually

BOOT_SECONDS = 1_700_000_000


def test_names_of_our_own_become_the_same_in_prometheus_again() -> None:
    words = {"By": "bytes", "By/s": "bytes_per_second", "s": "seconds", "1": "ratio", "Cel": "celsius", "W": "watts"}
    for metric in METRICS:
        name = otlp_name(metric)
        if not name.name.startswith("railscope.") or not metric.name.startswith(catalogue.PREFIX):
            continue
        # What Prometheus and the collector's exporters make of a name: dots, then the unit, then the kind.
        translated = name.name.replace(".", "_") + (f"_{words[name.unit]}" if name.unit else "")
        assert translated + ("_total" if name.instrument == "counter" else "") == metric.name


def test_no_two_metrics_of_one_name_differ_in_unit_or_kind() -> None:
    known: dict[str, tuple[str, str]] = {}
    for metric in METRICS:
        name = otlp_name(metric)
        assert known.setdefault(name.name, (name.unit, name.instrument)) == (name.unit, name.instrument)


@pytest.mark.parametrize(
    ("metric", "name", "unit"),
    [
        (catalogue.RAIL_TRANSMIT_BYTES, "hw.network.io", "By"),
        (catalogue.RAIL_SPEED, "hw.network.bandwidth.limit", "By/s"),
        (catalogue.GPU_PCIE_RECEIVE_BYTES, "hw.gpu.io", "By"),
        (catalogue.PROCESS_CPU, "process.cpu.time", "s"),
        (catalogue.COMM_INFLIGHT_SECONDS, "railscope.comm.inflight", "s"),
        (catalogue.COLLECTIVE_CALLS, "railscope.collective.calls", ""),
    ],
)
def test_a_metric_has_the_name_of_the_conventions_or_ours(metric: Metric, name: str, unit: str) -> None:
    assert (otlp_name(metric).name, otlp_name(metric).unit) == (name, unit)


def export_of(snapshot: Snapshot) -> Export:
    return Export(
        realtime_ns=snapshot.realtime_ns,
        start_realtime_ns=snapshot.health.started_realtime_ns,
        boot_realtime_ns=BOOT_SECONDS * 10**9,
        version="1.2.3",
        resource={"service.name": "railscope", "host.name": "node-1"},
        packed=tuple(pickle.dumps(one) for one in make_families(snapshot)),
    )


def test_every_series_of_a_scrape_is_a_point() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra 'otlp' is not installed")
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

    from railscope.exporters.otlp.messages import count_points, to_metrics_data

    families = make_families(full_snapshot())
    data = to_metrics_data(export_of(full_snapshot()))
    assert count_points(data) == sum(len(one.samples) + len(one.histograms) for one in families)
    # As it goes over the wire.
    [resource] = encode_metrics(data).resource_metrics
    metrics = {one.name: one for one in resource.scope_metrics[0].metrics}
    assert len(metrics) == len(resource.scope_metrics[0].metrics)
    io = metrics["hw.network.io"].sum
    assert io.is_monotonic
    assert io.aggregation_temporality == 2  # cumulative
    assert {point.start_time_unix_nano for point in io.data_points} == {BOOT_SECONDS * 10**9}
    assert not metrics["hw.network.up"].sum.is_monotonic
    # More than a signed number of 64 bits holds.
    assert max(point.as_double for point in io.data_points) == 2.0**63
    calls = metrics["railscope.collective.calls"].sum.data_points[0]
    assert calls.start_time_unix_nano == full_snapshot().health.started_realtime_ns
    assert calls.time_unix_nano == full_snapshot().realtime_ns
    histograms = [point for one in metrics.values() for point in one.histogram.data_points]
    assert all(point.count == sum(point.bucket_counts) for point in histograms)
    # What is not known is absent, and not 0.
    assert {point.HasField("sum") for point in histograms} == {True, False}
    assert not any(point.HasField("min") or point.HasField("max") for point in histograms)


def test_the_oldest_is_given_up_where_too_many_wait() -> None:
    told: list[Report] = []
    sender = Sender(lambda _: Report("success"), told.append)
    for number in range(MOST_WAITING + 3):
        sender.offer(bytes([number]))
    assert [one.result for one in told] == ["dropped"] * 3


def test_what_fails_is_tried_again_when_more_comes_and_given_up_at_last() -> None:
    told: list[Report] = []
    sent: list[bytes] = []

    def send(packed: bytes) -> Report:
        sent.append(packed)
        if packed == b"poisoned":
            # The next comes when this one has failed.
            if len(sent) < MOST_ATTEMPTS + 1:
                sender.offer(b"good")
            return Report("failure", error="400")
        if sent.count(b"good") == MOST_ATTEMPTS:
            sender.end()
        return Report("success")

    sender = Sender(send, told.append)
    sender.offer(b"poisoned")
    sender.run()
    assert sent == [b"poisoned"] * MOST_ATTEMPTS + [b"good"] * MOST_ATTEMPTS
    assert [one.result for one in told] == ["failure"] * MOST_ATTEMPTS + ["dropped"] + ["success"] * MOST_ATTEMPTS


def test_headers_are_read_and_a_wrong_line_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# of the tenant\nAuthorization: Bearer a:b\n\nX-Scope-OrgID:  7 \n")
    assert read_headers(file) == {"authorization": "Bearer a:b", "x-scope-orgid": "7"}
    file.write_text("hunter2\n")
    with pytest.raises(ValueError, match=r"line 1 is no header: write 'Name: value'") as error:
        read_headers(file)
    assert "hunter2" not in str(error.value)


def test_the_boot_is_read_and_unknown_is_0(tmp_path: Path) -> None:
    assert read_boot_seconds(Path("/proc")) > 0
    assert read_boot_seconds(tmp_path) == 0


@contextmanager
def pushing(
    settings: SenderSettings, interval_seconds: float = 0.5, failing: Callable[[], None] = lambda: None
) -> Iterator[OtlpPush]:
    """`failing`: what is done before each export."""

    def families(take: Callable[[Family], object]) -> Snapshot:
        failing()
        for one in make_families(full_snapshot()):
            take(one)
        return full_snapshot()

    push = OtlpPush(
        settings,
        interval_seconds,
        families,
        totals_are_kept=False,
        boot_realtime_ns=BOOT_SECONDS * 10**9,
        in_kubernetes=True,
    )
    push.start()
    try:
        yield push
    finally:
        push.close()


def settings_for(url: str, **files: str) -> SenderSettings:
    return SenderSettings(url, timeout_seconds=2, **files)


def counts(push: OtlpPush) -> dict[str, int]:
    return dict(push.results().exports)


def last_succeeded(push: OtlpPush) -> bool | None:
    last = push.results().collector
    return None if last is None else last.success


def test_a_server_decodes_what_the_sending_process_pushes(tmp_path: Path) -> None:
    otlp_receiver = _receiver_module()
    (tmp_path / "headers").write_text("X-Scope-OrgID: gpu\n")
    with otlp_receiver.receiver() as received:
        received.answers = [400]
        with pushing(settings_for(received.url, headers_file=str(tmp_path / "headers"))) as push:
            eventually(lambda: counts(push)["success"] >= 2)
            assert counts(push)["failure"] == 1
            assert last_succeeded(push)
        assert received.headers[0]["x-scope-orgid"] == "gpu"
        resource = dict(otlp_receiver.attributes_of(received.requests[0].resource_metrics[0].resource.attributes))
        assert resource["service.name"] == "railscope"
        assert resource["k8s.node.name"] == full_snapshot().node.name
        [(attributes, _), *_] = received.points("hw.network.up").items()
        assert {"hw.id", "hw.name", "hw.type", "railscope.rail"} <= {name for name, _ in attributes}


def test_an_endpoint_that_is_not_there_is_a_failure_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    _receiver_module()
    with pushing(SenderSettings("http://127.0.0.1:9/v1/metrics", timeout_seconds=0.1), interval_seconds=0.1) as push:
        eventually(lambda: counts(push)["dropped"] >= 1)
        assert last_succeeded(push) is False
    # Not a line for each attempt.
    assert sum("it is tried again at each interval" in one.message for one in caplog.records) == 1


def test_an_export_that_cannot_be_made_is_a_failure_and_the_next_one_is_made(caplog: pytest.LogCaptureFixture) -> None:
    otlp_receiver = _receiver_module()
    errors = [ValueError("a family is odd")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    with otlp_receiver.receiver() as received:
        with pushing(settings_for(received.url), failing=fail_once) as push:
            eventually(lambda: counts(push)["success"] >= 1)
            assert counts(push)["failure"] == 1
            assert last_succeeded(push)
    assert "an export cannot be made" in caplog.text


def test_a_sending_process_that_writes_no_report_or_dies_is_a_failure_and_another_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    otlp_receiver = _receiver_module()
    python = tmp_path / "python"
    tries = tmp_path / "tries"
    python.write_text(
        f"#!/bin/sh\necho >> {tries}\n"
        f'case $(wc -l < {tries}) in 1) echo surprise; exec sleep 600;; 2) exit 3;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with otlp_receiver.receiver() as received:
        with pushing(settings_for(received.url)) as push:
            eventually(lambda: counts(push)["success"] >= 1)
            assert counts(push)["failure"] == 2
    assert "surprise" in caplog.text


def test_a_file_that_is_missing_is_a_failure_that_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _receiver_module()
    with pushing(settings_for("https://127.0.0.1:9/v1/metrics", ca_file=str(tmp_path / "ca.pem"))) as push:
        eventually(lambda: counts(push)["failure"] >= 1)
    assert "ca.pem" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_a_key_that_only_the_agent_may_read_is_a_failure_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _receiver_module()
    own = {"certificate_file": str(tmp_path / "agent.crt"), "key_file": str(tmp_path / "agent.key")}
    for file in map(Path, own.values()):
        file.touch(mode=0o600)
    os.chown(own["key_file"], 65534, 65534)
    with pushing(settings_for("https://127.0.0.1:9/v1/metrics", **own)) as push:
        eventually(lambda: counts(push)["failure"] >= 1)
    assert own["key_file"] in caplog.text


def test_tls_with_a_certificate_of_the_agent(tmp_path: Path) -> None:
    otlp_receiver = _receiver_module()
    for name in ("server", "client"):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
                *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", f"{name}.key", "-out", f"{name}.crt"),
            ],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            timeout=60,
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.load_verify_locations(tmp_path / "client.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    with otlp_receiver.receiver(context) as received:
        trusted = {"ca_file": str(tmp_path / "server.crt")}
        own = {"certificate_file": str(tmp_path / "client.crt"), "key_file": str(tmp_path / "client.key")}
        with pushing(settings_for(received.url, **trusted, **own)) as push:
            eventually(lambda: counts(push)["success"] >= 1)
        with pushing(settings_for(received.url, **trusted)) as push:
            eventually(lambda: counts(push)["failure"] >= 1)
        with pushing(settings_for(received.url, **own)) as push:
            eventually(lambda: counts(push)["failure"] >= 1)


def _receiver_module() -> Any:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra 'otlp' is not installed")
    from tests import otlp_receiver

    return otlp_receiver


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://collector:4318", "http://collector:4318/v1/metrics"),
        ("https://collector.example/", "https://collector.example/v1/metrics"),
        ("https://store:9090/api/v1/otlp/v1/metrics", "https://store:9090/api/v1/otlp/v1/metrics"),
        ("", None),
    ],
)
def test_an_endpoint_without_a_path_gets_that_of_otlp(written: str, meant: str | None) -> None:
    assert otlp_endpoint(written) == meant


@pytest.mark.parametrize(
    "written", ["collector:4318", "grpc://collector:4317", "http://", "http://u:hunter2@c", "http://c:99999"]
)
def test_what_is_no_endpoint_is_not_repeated(written: str) -> None:
    with pytest.raises(ValueError, match="write one such as http://collector:4318") as error:
        otlp_endpoint(written)
    assert "hunter2" not in str(error.value)
