"""Ledgers of several rails together (simulated evidence): what each is expected to have carried."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.rail_ledger import Origin, RailLedger
from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.node.attribution.evidence import (
    Connections,
    HandedBytes,
    PortAndConnections,
    RailEvidence,
    RailLedgers,
    bytes_of_nccl,
    evidence_of,
    port_and_connections,
    port_without_others,
    rdma_evidence,
    redistribute,
)
from railscope.agent.node.attribution.explained import DirectionWire, NcclBytes, RailWire
from railscope.agent.node.attribution.ledger import Evidence, Sockets
from railscope.agent.node.rails.rdma_rails import RdmaRails
from railscope.agent.node.sampling.state import DeviceTotals
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.tcp_counters import TCP_FIELDS
from tests.trees.rdma import mlx5_roce_8rails

NO_RATES = Histogram((1.0,), (0, 0), 0.0)
MEGABYTE = 1_000_000
NETNS = 7


def counted(transmit: int = 0, receive: int = 0, *, present: bool = True, **counters: int) -> DeviceTotals:
    return DeviceTotals(NETNS, "rail0", transmit, receive, tuple(counters.items()), NO_RATES, NO_RATES, present=present)


def wire(transmit: int | None, receive: int | None) -> RailWire:
    return RailWire("7", "rail0", "", DirectionWire(transmit, None), DirectionWire(receive, None))


def moment(payload: int, port: int, *, fresh: bool = True) -> PortAndConnections:
    """Of one rail on which both directions carry the same."""
    connections = Connections(Sockets(payload, 0, payload // 1000, 0, 0))
    packets = payload // 1000
    return PortAndConnections(port, port, packets, packets, connections, connections, 0.0, fresh)


def rail(name: str, moment: PortAndConnections, expected: int, handed: int | None = None) -> RailEvidence:
    port = counted(moment.transmit_bytes, moment.receive_bytes)
    return evidence_of((NETNS, name), port, wire(expected, expected), handed, moment, complete=handed is not None)


def ledger(ledgers: RailLedgers, name: str) -> RailLedger:
    found = ledgers.get((NETNS, name))
    assert found is not None
    return found


def test_the_port_is_taken_from_the_moment_at_which_connections_were_read_as_long_as_they_are() -> None:
    port = counted(900, 800, tx_packets=9, rx_packets=8)
    together = moment(500, 600)
    fresh = evidence_of((NETNS, "rail0"), port, None, None, together, complete=True)
    assert (fresh.transmit.port_bytes, fresh.transmit.closing, fresh.transmit.complete) == (600, False, False)
    stale = evidence_of((NETNS, "rail0"), port, None, 5, moment(500, 600, fresh=False), complete=True)
    assert (stale.transmit.port_bytes, stale.receive.port_bytes, stale.transmit.closing) == (900, 800, True)
    assert (stale.transmit.sockets, stale.transmit.complete) == (together.sent.sockets, True)
    alone = evidence_of((NETNS, "rail0"), port, None, None, None, complete=True)
    assert (alone.transmit.packets, alone.receive.packets, alone.transmit.sockets) == (9, 8, None)


def test_totals_of_connections_become_evidence_of_both_directions() -> None:
    values: Mapping[str, int] = {name: number for number, name in enumerate(TCP_FIELDS) if number > 1}
    together = port_and_connections(counted(11, 22, present=False, **values), skew=0.25)
    assert (together.sent.sockets.payload_bytes, together.received.sockets.payload_bytes, together.fresh) == (
        11,
        22,
        False,
    )
    assert together.transmit_packets == values["port_tx_packets"]
    assert together.sent.sockets.header_bytes == values["header_bytes_sent"]
    assert together.received.sockets.segments == values["segments_received"]
    assert together.received.sockets.retransmitted_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), min_size=1, max_size=6))
def test_levelling_keeps_the_sum_and_explains_all_that_can_be(rails: list[tuple[int, int]]) -> None:
    expected, carried = [one for one, _ in rails], [other for _, other in rails]
    levelled = redistribute(expected, carried)
    assert sum(levelled) == sum(expected)
    assert min(levelled) >= 0
    explained = sum(min(one, other) for one, other in zip(levelled, carried, strict=True))
    if any(carried):
        assert explained == min(sum(expected), sum(carried))


def test_what_little_was_carried_so_far_does_not_tell_where_the_rest_will_go() -> None:
    """Connections are set up on one rail."""
    assert redistribute([500, 500], [10, 0]) == [500, 500]
    assert redistribute([500, 500], [600, 0]) == [1000, 0]


def test_a_small_message_is_explained_on_the_rail_that_it_took() -> None:
    """The model gave half of it to each rail."""
    ledgers = RailLedgers()
    ledgers.update([rail("rail0", moment(0, 0), 0), rail("rail1", moment(0, 0), 0)])
    ledgers.update(
        [rail("rail0", moment(MEGABYTE, MEGABYTE), MEGABYTE // 2), rail("rail1", moment(0, 0), MEGABYTE // 2)]
    )
    assert ledger(ledgers, "rail0").transmit.of_origin(Origin.COLLECTIVE) == MEGABYTE
    assert ledger(ledgers, "rail0").receive.of_origin(Origin.COLLECTIVE) == MEGABYTE
    assert ledger(ledgers, "rail0").transmit.error_ratio == 0


def test_a_protocol_that_doubles_the_data_doubles_what_is_expected_to_come_in() -> None:
    ledgers = RailLedgers()
    for step in range(5):
        carried = step * 2 * MEGABYTE
        ledgers.update([rail("rail0", moment(carried, carried), step * MEGABYTE, handed=carried)])
    assert ledger(ledgers, "rail0").transmit.of_origin(Origin.COLLECTIVE) == 8 * MEGABYTE
    assert ledger(ledgers, "rail0").receive.of_origin(Origin.COLLECTIVE) == 8 * MEGABYTE
    assert ledger(ledgers, "rail0").receive.of_origin(Origin.UNSEEN) == 0


def test_rails_of_a_namespace_that_has_gone_are_forgotten() -> None:
    ledgers = RailLedgers()
    ledgers.update([rail("rail0", moment(0, 0), 0)])
    ledgers.forget(NETNS)
    assert ledgers.get((NETNS, "rail0")) is None


@pytest.mark.parametrize("infiniband", [True, False])
def test_an_rdma_port_s_packets_tell_headers_and_its_counters_what_was_sent_again(infiniband: bool) -> None:
    packets, header = 100_000, 26 if infiniband else 58
    ledgers = RailLedgers()

    def read(handed: int, packets: int, **counters: int) -> None:
        counters |= {"port_xmit_packets": packets, "port_rcv_packets": packets}
        port = packets * (4096 + header)
        ledgers.update(
            [
                rdma_evidence(
                    (0, "mlx5_0:1"), port, port, counters, wire(handed, handed), handed,
                    complete=True, infiniband=infiniband, in_network=False,
                )
            ]
        )  # fmt: skip

    read(0, 0, packet_seq_err=7)
    read((packets - 500) * 4096, packets, packet_seq_err=507)
    found = ledgers.get((0, "mlx5_0:1"))
    assert found is not None
    sent = found.transmit
    assert sent.of_origin(Origin.COLLECTIVE) == (packets - 500) * 4096
    assert sent.of_origin(Origin.RETRANSMISSION) == pytest.approx(500 * (4096 + header), rel=0.01)
    assert sent.of_origin(Origin.OVERHEAD) == pytest.approx(packets * header, rel=0.01)
    assert sent.of_origin(Origin.FOREIGN) <= 500 * header * 2
    assert found.receive.of_origin(Origin.FOREIGN) == pytest.approx(500 * (4096 + header), rel=0.02)


def test_evidence_of_the_receiving_side_is_never_what_was_handed_over() -> None:
    evidence = evidence_of((NETNS, "rail0"), counted(5, 5), wire(3, 4), 3, None, complete=True)
    assert evidence.receive == Evidence(5, None, expected_bytes=4)


def test_an_rdma_rail_s_ledger_is_of_what_its_port_counts(tmp_path: Path) -> None:
    payload, packets = 4096 * 1000, 1024
    tree = mlx5_roce_8rails(tmp_path / "sys")
    rails = RdmaRails(SystemClock(), sysfs=tree.sysfs, sample_interval_ns=20_000_000, window_ns=10**9, patterns=())

    def until(shown: Callable[[RailFacts], bool], handed: int = 0) -> RailFacts:
        deadline = time.monotonic() + 30
        while True:
            rails.correlate([], HandedBytes({(NETNS, "mlx5_0"): handed}, whole=True))
            found = next(one for one in rails.rails() if one.device == "mlx5_0")
            if shown(found):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    with closing(rails):
        rails.start()
        before = until(lambda found: found.transmit_bytes is not None and bool(found.counters))
        assert before.transmit_bytes is not None
        counted = {name: count for name, _, count in before.counters}["port_xmit_packets"] + packets
        tree.set("mlx5_0/1", "counters/port_xmit_packets", counted)
        until(lambda found: ("port_xmit_packets", "context", counted) in found.counters, handed=payload)
        port = before.transmit_bytes + packets * (4096 + 58) // 4 * 4
        tree.set("mlx5_0/1", "counters/port_xmit_data", port // 4)
        until(lambda found: found.transmit_bytes == port, handed=payload)
        # Bytes may have come between the account and the look at them.
        found = until(lambda _: True, handed=payload)
    assert found.ledger is not None
    sent = found.ledger.transmit
    assert sent.of_origin(Origin.COLLECTIVE) == payload
    assert (
        sent.of_origin(Origin.COLLECTIVE) + sent.of_origin(Origin.OVERHEAD) + sent.of_origin(Origin.FOREIGN)
        == port - before.transmit_bytes
    )
    assert sent.of_origin(Origin.OVERHEAD) == pytest.approx(1000 * 58, rel=0.01)
    assert found.transmit_utilization is not None
    assert found.transmit_utilization > 0


def test_bytes_of_nccl_are_without_those_of_other_owners_of_the_same_processes() -> None:
    sent = Connections(
        Sockets(9_000, 500, 9, 0, 0),
        own={TrafficOwner.TCP_OTHER: Sockets(1_500, 0, 2, 0, 0)},
        others={TrafficOwner.NIXL: Sockets(400_000, 0, 400, 0, 0)},
    )
    undecided = Connections(Sockets(9_000, 0, 9, 0, 0), undecided_bytes=5_000)
    together = PortAndConnections(420_000, 20_000, 420, 20, sent, undecided, 0.001, fresh=True)
    assert bytes_of_nccl(6_900, together) == NcclBytes(6_900, 7_000, None)
    assert bytes_of_nccl(None, None) == NcclBytes()


def test_a_port_without_others_keeps_what_may_be_nccl_s() -> None:
    moved = {
        TrafficOwner.NIXL: Sockets(400_000, 0, 100, 5_800, 0),
        TrafficOwner.NCCL: Sockets(10_000, 0, 3, 174, 0),
        TrafficOwner.UNKNOWN: Sockets(1_000, 0, 1, 58, 0),
    }
    assert port_without_others(420_000, moved) == 14_200
