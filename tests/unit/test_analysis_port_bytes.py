"""What rails' ports counted: bytes, mean and peak rates, and the part of the link.  All readings are simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.analysis.facts.report import RailUse, Unknown
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.report import report_of
from railscope.agent.analysis.report.report_json import as_json
from railscope.agent.analysis.report.text import as_text
from railscope.agent.analysis.traffic.port_bytes import find_port_bytes
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset

MB = 1_000_000
SPEED = 50 * MB


def readings(
    job: JobDataset, server: int, rail: int, totals: list[tuple[int, int]], every_ns: int = SECOND_NS // 4
) -> None:
    """A rail that was read at regular distances; `totals` are bytes sent and received."""
    columns = {"rail": str(rail), "device": f"mlx5_{rail}", "speed_bytes_per_second": SPEED if rail == 0 else None}
    job.row(server, "rails", rail_id=rail, **columns)
    for place, (sent, received) in enumerate(totals):
        time_ns = BEGAN_NS + place * every_ns
        job.row(server, "rail_samples", time_ns=time_ns, rail_id=rail, transmit_bytes=sent, receive_bytes=received)


def found(job: JobDataset) -> tuple[tuple[RailUse, ...], tuple[Unknown, ...]]:
    return find_port_bytes(job.open())


def burst() -> list[tuple[int, int]]:
    """Ten seconds: 40 MB are sent within the third one, and 10 MB are received at an even pace."""
    return [(7 + MB * min(max(place - 8, 0) * 10, 40), 1000 + place * MB // 4) for place in range(41)]


@pytest.mark.parametrize("shuffle", [None, 3])
def test_bytes_mean_and_peak_are_those_of_the_readings(tmp_path: Path, shuffle: int | None) -> None:
    job = JobDataset(tmp_path, servers=(1,), shuffle=shuffle)
    readings(job, 0, 0, burst())
    (use,), unknown = found(job)
    assert not unknown
    assert (use.server, use.rail, use.device) == ("node-0", "0", "mlx5_0")
    assert (use.seconds, use.transmit_bytes, use.receive_bytes) == (10.0, 40 * MB, 10 * MB)
    assert (use.transmit_bytes_per_second, use.receive_bytes_per_second) == (4 * MB, MB)
    # Three of the four readings that show the burst lie in one second of the clock.
    assert use.peak_transmit_bytes_per_second == pytest.approx(30 * MB)
    assert use.peak_receive_bytes_per_second == pytest.approx(MB)
    assert use.transmit_utilisation == pytest.approx(4 / 50)
    assert use.receive_utilisation == pytest.approx(1 / 50)


def test_a_rail_that_was_read_for_less_than_a_second_did_its_mean_at_most(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    readings(job, 0, 0, [(0, 0), (10 * MB, 5 * MB), (20 * MB, 10 * MB)])
    (use,), _ = found(job)
    assert use.transmit_bytes_per_second == use.peak_transmit_bytes_per_second == pytest.approx(40 * MB)
    assert use.receive_bytes_per_second == use.peak_receive_bytes_per_second == pytest.approx(20 * MB)


def test_a_total_that_falls_began_anew(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    readings(job, 0, 0, [(5 * MB, 0), (9 * MB, 0), (2 * MB, 0), (3 * MB, 0)])
    (use,), _ = found(job)
    assert use.transmit_bytes == (4 + 2 + 1) * MB


def test_a_single_fast_reading_is_no_peak(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    # The driver shows a whole second of traffic in one reading.
    readings(job, 0, 0, [(40 * MB * (place // 10), 0) for place in range(41)], every_ns=SECOND_NS // 10)
    (use,), _ = found(job)
    assert use.peak_transmit_bytes_per_second == pytest.approx(40 * MB)


def test_a_link_of_unknown_speed_has_no_utilisation_and_one_reading_tells_nothing(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1))
    readings(job, 0, 1, burst())
    readings(job, 1, 0, burst()[:1])
    (use,), _ = found(job)
    assert (use.speed_bytes_per_second, use.transmit_utilisation, use.receive_utilisation) == (None, None, None)


def test_without_readings_it_is_said_what_to_do(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    uses, unknown = found(job)
    assert not uses
    assert [one.row for one in unknown] == [5]
    assert "'railscope record'" in unknown[0].reason


def test_a_report_shows_the_ports_in_every_form(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1))
    for server in (0, 1):
        readings(job, server, 0, burst())
    report = report_of(job.open())
    assert [use.server for use in report.rails] == ["node-0", "node-1"]
    content = as_json(report)["rails"]
    assert content[0]["transmit_bytes"] == 40 * MB
    assert content[0]["speed_bytes_per_second"] == SPEED
    rows = [line.split() for line in as_text(report).splitlines() if "mlx5_0" in line]
    assert rows[0] == [
        *("node-0", "0", "mlx5_0", "38.1", "MiB", "4", "MB/s", "30", "MB/s"),
        *("9.54", "MiB", "1", "MB/s", "1", "MB/s", "8", "%"),
    ]
    page = html_text(report)
    assert "Port bytes of rails" in page
    assert page.count("mlx5_0") == 2
