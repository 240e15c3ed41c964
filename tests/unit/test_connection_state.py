"""What one TCP connection waits for, from what the kernel says of it.  The numbers are simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from railscope.probes.netdev.connection_state import MOST_CONNECTIONS, ConnectionState, _chosen_ports, _some
from railscope.probes.netdev.tcp_info import NO_SOCKETS

QUIET = ConnectionState(
    pid=5,
    device="rail0",
    cookie=1,
    peer_closed=False,
    probing=False,
    unread_bytes=0,
    unanswered_retransmissions=0,
    unanswered_probes=0,
    unacknowledged_segments=0,
    last_acknowledged_ms=600_000,
    round_trip_us=100,
    round_trip_deviation_us=20,
    bytes_acked=10,
    bytes_received=20,
    not_sent_bytes=0,
    minimum_round_trip_us=90,
    busy_us=0,
    receive_window_limited_us=0,
    bytes_sent=10,
    retransmitted_bytes=0,
    peer_window_bytes=65536,
    segment_bytes=8948,
    arrived_beyond_segments=0,
)


@pytest.mark.parametrize(
    ("state", "unanswered"),
    [
        (QUIET, False),
        (replace(QUIET, unacknowledged_segments=182), False),
        (replace(QUIET, unacknowledged_segments=182, unanswered_retransmissions=1), False),
        (replace(QUIET, unacknowledged_segments=182, unanswered_retransmissions=2), True),
        (replace(QUIET, probing=True, not_sent_bytes=262160, unanswered_probes=3), True),
        (replace(QUIET, probing=True, not_sent_bytes=262160, unanswered_probes=1), False),
        (replace(QUIET, probing=True, not_sent_bytes=262160, unanswered_probes=3, peer_window_bytes=0), False),
        (replace(QUIET, not_sent_bytes=262160), False),
    ],
    ids=[
        "nothing under way",
        "just sent",
        "sent again once",
        "sent again and again",
        "own sends fail",
        "one failed",
        "peer does not read",
        "waits for its turn",
    ],
)
def test_what_the_network_keeps_waiting_is_told_from_what_the_peer_does(
    state: ConnectionState, unanswered: bool
) -> None:
    assert state.unanswered is unanswered


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("32768\t60999\n", (32768, 60999)),
        ("10000\t65535\n", (10000, 65535)),
        ("40000\t50000\n", (32768, 60999)),
        (None, (32768, 60999)),
    ],
)
def test_ports_that_either_end_s_kernel_may_choose_are_collectives(
    text: str | None, ports: tuple[int, int], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "sys/net/ipv4").mkdir(parents=True)
        (tmp_path / "sys/net/ipv4/ip_local_port_range").write_text(text)
    assert _chosen_ports(tmp_path) == ports


@pytest.mark.parametrize(
    ("under_way", "arrived", "again", "small"),
    [(30, 3, 2, True), (30, 3, 1, False), (30, 0, 4, False), (3, 3, 4, False)],
    ids=["the same again and again", "once", "nothing arrives", "all arrived"],
)
def test_a_path_that_drops_large_packets_is_told_by_what_arrives_behind_them(
    under_way: int, arrived: int, again: int, small: bool
) -> None:
    stuck = replace(
        QUIET,
        unacknowledged_segments=under_way,
        arrived_beyond_segments=arrived,
        unanswered_retransmissions=again,
    )
    assert stuck.only_small_arrive is small


def test_a_user_with_thousands_of_connections_hides_none_of_another() -> None:
    rows = np.zeros(20_000, NO_SOCKETS.rows.dtype)
    rows["user"] = 5000
    rows["user"][[7, 19_999]] = 1000
    places = np.flatnonzero(np.arange(20_000) % 2)
    chosen = _some(rows, places)
    assert len(chosen) == MOST_CONNECTIONS
    assert {7, 19_999} <= set(chosen.tolist())
    assert set(chosen.tolist()) <= set(places.tolist())
    assert _some(rows, places[:100]).tolist() == places[:100].tolist()
