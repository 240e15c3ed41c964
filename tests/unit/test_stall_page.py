"""The page that tells of stalls in words."""

from __future__ import annotations

import json
from dataclasses import replace

from exporters.stall_page import stalls_json
from tests.unit.exporters_snapshots import full_snapshot


def test_a_stall_is_told_with_whom_it_blames_since_when_and_on_what_evidence() -> None:
    snapshot = full_snapshot()
    page = json.loads(stalls_json(snapshot))
    (stall,) = page["stalls"]
    assert stall["cause"] == "rail_down"
    assert (stall["comm"], stall["rank"], stall["nranks"], stall["op"]) == ("00c0ffee00c0ffee", "1", "2", "AllReduce")
    assert (stall["rail"], stall["device"], stall["blamed_rank"], stall["strength"]) == ("1", "rail1", None, "strong")
    assert stall["evidence"] == ["rail 1 (rail1) has no carrier or is switched off"]
    assert stall["seconds"] == 2.5
    assert snapshot.realtime_ns - stall["since_realtime_ns"] == 2_500_000_000
    assert stall["ended_realtime_ns"] is None
    assert page["simulated"] is True


def test_what_ended_keeps_its_length() -> None:
    (ended,) = json.loads(stalls_json(full_snapshot()))["ended"]
    assert ended["seconds"] == 1.0
    assert ended["ended_realtime_ns"] - ended["since_realtime_ns"] == 1_000_000_000


def test_a_host_without_stalls_says_so() -> None:
    page = json.loads(stalls_json(replace(full_snapshot(), stalls=(), ended_stalls=())))
    assert (page["stalls"], page["ended"]) == ([], [])
