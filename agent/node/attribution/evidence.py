"""Brings what is known of each rail at one moment into the form that its ledger classes (ledger.py).

Which bytes stand for collectives, direction by direction:

* Transmit: what NCCL handed to the device, where that is seen of every observed library; otherwise what the model
  expects (agent/model/edge_share.py).
* Receive: what the model expects, times what was handed over for each expected byte on the way out: protocols that
  send flags with the data, and trees in place of rings, change both directions alike.

The model does not know which of several rails a small message took.  Where connections are known, they tell: what it
expects on a rail beyond what they carried there is expected on siblings that carried more; and once connections were
seen to carry most of what is expected of all rails, the rest is expected of each as it carried before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from railscope.agent.facts.rail_ledger import RailKey, RailLedger
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.node.attribution.explained import DirectionWire, NcclBytes, RailWire, divide_in_proportion
from railscope.agent.node.attribution.ledger import NO_SOCKETS, Account, Evidence, HeaderSizes, Sockets
from railscope.agent.node.attribution.parties import owner_of_party
from railscope.agent.node.attribution.queue_pair_owners import NO_CLAIMS, PortClaims
from railscope.agent.node.sampling.state import DeviceTotals

_MOST_WIRE_FACTOR: Final = 2.0
"""LL sends as many flags as data; nothing sends more."""

_MATTERS: Final = 64
"""Less than this part of NCCL's bytes does not change on which rails they are."""

INFINIBAND_HEADERS: Final = HeaderSizes(24, 26, 66)
"""LRH 8, BTH 12, ICRC 4; extended headers in some packets, GRH 40 in few."""
ROCE_HEADERS: Final = HeaderSizes(16, 58, 82)
"""Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4; VLAN and IPv6 at most, and at least what a driver counts that leaves out
the lower layers."""


@dataclass(frozen=True, slots=True)
class Connections:
    """TCP connections through a port, one direction."""

    sockets: Sockets
    """See `Evidence`, as the others."""
    own: Mapping[TrafficOwner, Sockets] = field(default_factory=dict)
    others: Mapping[TrafficOwner, Sockets] = field(default_factory=dict)
    undecided_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PortAndConnections:
    """A port and the TCP connections through it, read together; totals never fall."""

    transmit_bytes: int
    receive_bytes: int
    transmit_packets: int
    receive_packets: int
    sent: Connections
    received: Connections
    skew: float
    """How long reading took, as a part of the time between two readings."""
    fresh: bool
    """Whether the last reading worked, so that another will follow."""
    reading: int | None = None
    """Its number; None: not told."""


@dataclass(frozen=True, slots=True)
class HandedBytes:
    """What collectives of observed processes gave to network devices, in bytes since the probes were attached."""

    device_bytes: Mapping[tuple[int, str], int] | None = None
    """By network namespace (inode of the sending process's) and device; None: not observed."""
    whole: bool = False
    """Whether everything that observed processes hand over is seen at present."""
    in_network: bool = False
    """Whether collectives were seen that run in the switches (CollNet), whose bytes NCCL does not hand over."""


NOT_OBSERVED: Final = HandedBytes()


@dataclass(frozen=True, slots=True)
class RailEvidence:
    """What is known of one rail; `expected_bytes` as the model has them."""

    key: RailKey
    transmit: Evidence
    receive: Evidence


def port_and_connections(
    counted: DeviceTotals, *, skew: float, undecided: tuple[int, int] = (0, 0), reading: int | None = None
) -> PortAndConnections:
    """Port bytes, and those of connections, from the totals of `railscope.probes.netdev.tcp_counters`.

    `undecided`: bytes sent and received by connections of which it is not known yet whose they are.
    """
    total = dict(counted.counters)
    # The kernel counts what it received for the first time only: what comes twice belongs to no socket.
    return PortAndConnections(
        transmit_bytes=total["port_tx_bytes"],
        receive_bytes=total["port_rx_bytes"],
        transmit_packets=total["port_tx_packets"],
        receive_packets=total["port_rx_packets"],
        sent=replace(
            _connections(
                total, counted.transmit_bytes, "tx_bytes", "retransmitted_bytes", "segments_sent", "header_bytes_sent"
            ),
            undecided_bytes=undecided[0],
        ),
        received=replace(
            _connections(total, counted.receive_bytes, "rx_bytes", "", "segments_received", "header_bytes_received"),
            undecided_bytes=undecided[1],
        ),
        skew=skew,
        fresh=counted.present,
        reading=reading,
    )


def _connections(
    total: Mapping[str, int], observed_bytes: int, payload: str, retransmitted: str, segments: str, headers: str
) -> Connections:
    """`observed_bytes`: of observed processes' connections, where none are known by party."""
    own: dict[TrafficOwner, Sockets] = {}
    others: dict[TrafficOwner, Sockets] = {}
    for party in (name.partition("/")[0] for name in total if name.endswith(f"/{payload}")):
        owner, of_observed = owner_of_party(party)
        (own if of_observed else others)[owner] = Sockets(
            total[f"{party}/{payload}"],
            total.get(f"{party}/{retransmitted}", 0),
            total[f"{party}/{segments}"],
            total[f"{party}/{headers}"],
            total[f"{party}/connection_changes"],
        )
    if not own and not others:
        again = total.get(retransmitted, 0)
        sockets = Sockets(observed_bytes, again, total[segments], total[headers], total["connection_changes"])
    else:
        sockets = _together(own.values())
    return Connections(sockets, {owner: one for owner, one in own.items() if owner is not TrafficOwner.NCCL}, others)


def _together(several: Iterable[Sockets]) -> Sockets:
    found = NO_SOCKETS
    for one in several:
        found = Sockets(
            found.payload_bytes + one.payload_bytes,
            found.retransmitted_bytes + one.retransmitted_bytes,
            found.segments + one.segments,
            found.header_bytes + one.header_bytes,
            found.changes + one.changes,
        )
    return found


_NO_CONNECTIONS: Final = Connections(NO_SOCKETS)


def evidence_of(
    key: RailKey,
    port: DeviceTotals,
    wire: RailWire | None,
    handed_over_bytes: int | None,
    together: PortAndConnections | None,
    *,
    complete: bool,
) -> RailEvidence:
    """Whose the port bytes of a network device were, as its connections tell while they are as when they were read.

    `together` None: connections are not known here.
    """
    counted = dict(port.counters)
    sent, received = (together.sent, together.received) if together is not None else (_NO_CONNECTIONS,) * 2
    transmit_bytes, receive_bytes = port.transmit_bytes, port.receive_bytes
    transmit_packets, receive_packets = counted.get("tx_packets"), counted.get("rx_packets")
    if together is not None and together.fresh:
        transmit_bytes, receive_bytes = together.transmit_bytes, together.receive_bytes
        transmit_packets, receive_packets = together.transmit_packets, together.receive_packets
    closing = together is not None and not together.fresh
    skew = together.skew if together is not None else 0.0
    return RailEvidence(
        key,
        Evidence(
            transmit_bytes,
            transmit_packets,
            handed_over_bytes,
            complete and handed_over_bytes is not None,
            _expected(wire.transmit if wire else None),
            sent.sockets if together is not None else None,
            sent.own,
            sent.others,
            sent.undecided_bytes if not closing else 0,
            skew=skew,
            closing=closing,
            reading=together.reading if together is not None else None,
        ),
        Evidence(
            receive_bytes,
            receive_packets,
            expected_bytes=_expected(wire.receive if wire else None),
            sockets=received.sockets if together is not None else None,
            own=received.own,
            others=received.others,
            undecided_bytes=received.undecided_bytes if not closing else 0,
            skew=skew,
            closing=closing,
            reading=together.reading if together is not None else None,
        ),
    )


def rdma_evidence(
    key: RailKey,
    transmit_bytes: int,
    receive_bytes: int,
    counters: Mapping[str, int],
    wire: RailWire | None,
    handed_over_bytes: int | None,
    *,
    complete: bool,
    infiniband: bool,
    in_network: bool,
    claims: PortClaims = NO_CLAIMS,
    undecided: tuple[int, int] = (0, 0),
) -> RailEvidence:
    """What an RDMA port and its queue pairs tell of whose its bytes were.

    `in_network`: collectives run in the switches, whose bytes NCCL does not hand over.  `undecided`: what the port
    sent and received since bound counters were read last.
    """
    headers = rdma_headers(infiniband=infiniband)
    sent_again = sum(counters.get(name, 0) for name in _SENT_AGAIN)
    got_again = sum(counters.get(name, 0) for name in _GOT_AGAIN)
    return RailEvidence(
        key,
        Evidence(
            transmit_bytes,
            _first_of(counters, _SENT_PACKETS),
            handed_over_bytes,
            complete and handed_over_bytes is not None,
            _expected(wire.transmit if wire else None),
            headers=headers,
            retransmitted_packets=sent_again,
            offload_bytes=transmit_bytes if in_network else 0,
            others=claims.sent,
            claimants=claims.claimants,
            undecided_bytes=undecided[0],
        ),
        Evidence(
            receive_bytes,
            _first_of(counters, _RECEIVED_PACKETS),
            expected_bytes=_expected(wire.receive if wire else None),
            headers=headers,
            retransmitted_packets=got_again,
            offload_bytes=receive_bytes if in_network else 0,
            others=claims.received,
            claimants=claims.claimants,
            undecided_bytes=undecided[1],
        ),
    )


def bytes_of_nccl(handed_over_bytes: int | None, together: PortAndConnections | None) -> NcclBytes:
    """What NCCL alone moved through a network device.

    `handed_over_bytes` None: not all is seen.  NCCL's connections are observed processes' but for those of which it is
    known that another owner has them; while too many have no owner yet, nothing is known of them.
    """

    def carried(connections: Connections) -> int | None:
        whole, *others = (
            one.payload_bytes - one.retransmitted_bytes for one in (connections.sockets, *connections.own.values())
        )
        of_nccl = whole - sum(others)
        return of_nccl if connections.undecided_bytes <= of_nccl // _MATTERS else None

    if together is None:
        return NcclBytes(handed_over_bytes)
    return NcclBytes(handed_over_bytes, carried(together.sent), carried(together.received))


def port_without_others(port_bytes: int, moved: Mapping[TrafficOwner, Sockets]) -> int:
    """What a port counted less what owners other than NCCL are known to have moved, both read at one moment."""
    others = (one for owner, one in moved.items() if owner not in (TrafficOwner.NCCL, TrafficOwner.UNKNOWN))
    return port_bytes - sum(one.payload_bytes + one.header_bytes for one in others)


def rdma_headers(*, infiniband: bool) -> HeaderSizes:
    """Of a packet of an RDMA port."""
    return INFINIBAND_HEADERS if infiniband else ROCE_HEADERS


_SENT_PACKETS: Final = ("port_xmit_packets", "tx_pkts", "rdma_tx_packets", "sent_pkts")
_RECEIVED_PACKETS: Final = ("port_rcv_packets", "rx_pkts", "rdma_rx_packets", "rcvd_pkts")
"""By driver: mlx5 and others with InfiniBand's counters, bnxt_re and efa, mlx5's optional ones, rxe."""
_SENT_AGAIN: Final = (
    *("packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "rnr_nak_retry_err", "roce_adp_retrans"),
    *("to_retransmits", "seq_err_naks_rcvd", "rnr_naks_rcvd", "retrans_pkts"),
)
"""A packet each at least: after a gap everything from there on is sent again."""
_GOT_AGAIN: Final = ("duplicate_request", "dup_req")


class RailLedgers:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._accounts: dict[RailKey, tuple[Account, Account]] = {}

    def begin(self, key: RailKey, wire: RailWire | None, handed_over_bytes: int | None) -> None:
        """Note what collectives have given to a rail whose port and connections are yet to be read together."""
        transmit, receive = self._accounts.setdefault(key, (Account(), Account()))
        transmit.begin(handed_over_bytes or 0, _expected(wire.transmit if wire else None) or 0)
        receive.begin(0, _expected(wire.receive if wire else None) or 0)

    def update(self, rails: Sequence[RailEvidence]) -> None:
        """Take the evidence of all rails that share the same collectives, at one moment."""
        accounts = [self._accounts.setdefault(rail.key, (Account(), Account())) for rail in rails]
        for (transmit, _), evidence in zip(accounts, _levelled([rail.transmit for rail in rails]), strict=True):
            transmit.update(evidence)
        factor = _wire_factor([transmit for transmit, _ in accounts])
        receiving = [
            replace(
                rail.receive,
                expected_bytes=None
                if rail.receive.expected_bytes is None
                else round(rail.receive.expected_bytes * factor),
            )
            for rail in rails
        ]
        for (_, receive), evidence in zip(accounts, _levelled(receiving), strict=True):
            receive.update(evidence)

    def get(self, key: RailKey) -> RailLedger | None:
        """A rail's ledger, both directions; None: nothing is known of it yet."""
        accounts = self._accounts.get(key)
        if accounts is None or not accounts[0].has_evidence:
            return None
        return RailLedger(accounts[0].ledger, accounts[1].ledger)

    def known(self) -> dict[RailKey, RailLedger]:
        """Every rail's ledger of which something is known."""
        return {key: ledger for key in self._accounts if (ledger := self.get(key)) is not None}

    def forget(self, netns: int) -> None:
        """Drop the rails of a network namespace that has gone."""
        self._accounts = {key: accounts for key, accounts in self._accounts.items() if key[0] != netns}


def redistribute(expected: Sequence[int], carried: Sequence[int]) -> list[int]:
    """What collectives should have put on each rail, in the light of what connections carried there; the sum stays."""
    ahead = sum(expected) - sum(carried)
    if 0 <= ahead <= sum(carried) and any(carried):
        return [there + more for there, more in zip(carried, divide_in_proportion(ahead, list(carried)), strict=True)]
    missing = [max(0, there - here) for here, there in zip(expected, carried, strict=True)]
    surplus = [max(0, here - there) for here, there in zip(expected, carried, strict=True)]
    moved = min(sum(missing), sum(surplus))
    if not moved:
        return list(expected)
    gained, lost = divide_in_proportion(moved, missing), divide_in_proportion(moved, surplus)
    return [here + more - less for here, more, less in zip(expected, gained, lost, strict=True)]


def _levelled(rails: Sequence[Evidence]) -> list[Evidence]:
    expected, carried = [], []
    for rail in rails:
        if rail.expected_bytes is None or rail.sockets is None:
            return list(rails)
        expected.append(rail.expected_bytes)
        carried.append(rail.sockets.payload_bytes - rail.sockets.retransmitted_bytes)
    return [
        replace(rail, expected_bytes=level) for rail, level in zip(rails, redistribute(expected, carried), strict=True)
    ]


def _wire_factor(transmit: Sequence[Account]) -> float:
    """Bytes handed over for each byte that the model expected; 1 where that is not known."""
    handed = sum(account.exact[0] for account in transmit)
    expected = sum(account.exact[1] for account in transmit)
    if not handed or not expected:
        return 1.0
    return min(_MOST_WIRE_FACTOR, handed / expected)


def _expected(wire: DirectionWire | None) -> int | None:
    return wire.wire_bytes if wire is not None else None


def _first_of(counters: Mapping[str, int], names: Sequence[str]) -> int | None:
    return next((counters[name] for name in names if name in counters), None)
