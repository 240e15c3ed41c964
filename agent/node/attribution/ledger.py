"""Where the bytes of a rail came from, and whose they were: every byte that its port counted, in exactly one class.

| Origin         | What it holds                                                                                      |
|----------------|----------------------------------------------------------------------------------------------------|
| collective     | what observed collectives moved: as NCCL handed it to the device, else as the model expects it     |
| transfer       | what connections of another communication library carried                                          |
| overhead       | headers of the packets that carried these and observed processes' bytes, acknowledgements included |
| retransmission | what their connections sent again; on RDMA an estimate, from counters of packets                   |
| unseen         | other bytes of observed processes: calls that are not observed, replays, set-up, their programs'   |
| offload        | what nothing explains where collectives run in the network (SHARP), past what NCCL hands over      |
| foreign        | the rest: traffic of others, and what nobody can attribute                                         |

A class is an owner and an origin: who moved bytes is known by their connections (parties.py), and sums of the same
classes are bytes by owner and bytes by origin.  Collectives, and what belongs to them, are NCCL's.

Input are running totals at one moment (`Evidence`); a class holds what it got since the first of them.  Three rules
hold whatever the evidence says: no class is ever negative, none ever falls, and together they are the port bytes.

**Evidence that changes its mind.**  At every moment the split is made anew from the totals since the beginning, so
that what one moment shows too early (bytes in a queue, an operation enqueued and not yet sent) is right at a later
one.  A class that holds more than its new share keeps it and gets nothing, and the others share what the port counted
since, in proportion to what each lacks.  So an error heals with the next traffic; only one of the very last moment
before silence stays.

**Bytes that wait.**  Who holds a new connection is known a moment later.  Until then what nothing else explains is in
no class, as far as such connections may have carried it.  Nor is, for some readings, anything that nothing explains:
its class would keep it, and a connection that is not accepted yet, or not found, is counted from its beginning later.

**How many packets carried it.**  Some devices count a packet of 64 KiB that is cut up behind them as one (veth, virtio
and others), most count what leaves them.  Where observed connections alone have more segments than the port has
packets, or where their headers would not fit, the device counts large packets: all headers then follow from the port's
packets, and whose they are, within limits, from how much others carried.  Otherwise every segment is a packet.

**How far to trust it.**  The error is half the width of the band that a class may lie in: bytes that passed between
reading one counter and another, and before the first reading; headers between the two ways of counting packets; bytes
of connections that came or went between two readings; the disagreement between what the model expects and what
connections carried, for as long as nothing is handed over by NCCL itself; on rails without evidence of connections,
half of what nothing explains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from railscope.agent.facts.rail_ledger import DirectionLedger, Origin
from railscope.agent.facts.traffic_owners import NAMED_LIBRARIES, TrafficOwner
from railscope.agent.node.attribution.explained import divide_in_proportion

_LARGEST_PACKET_BYTES: Final = 65_536
_SMALL_PACKET_BYTES: Final = 64
"""What a packet may carry where a device takes large ones, on average over those of others."""
_MATTERS: Final = 64
"""Less than this part of all bytes does not change which evidence counts."""
_READINGS: Final = 3
"""For as many what nothing explains has to stay so before it is nobody's: connections are counted later than ports."""
_MARGIN: Final = 20
"""Totals that are read one after the other may differ by this part of them, …"""
_MARGIN_SEGMENTS: Final = 2_000
"""… and by this much, before the difference means something."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """TCP connections on one rail, one direction; no total ever falls."""

    payload_bytes: int
    """Retransmissions included."""
    retransmitted_bytes: int
    segments: int
    """Those without data included."""
    header_bytes: int
    """Of all headers, if every segment is a packet."""
    changes: int
    """Connections that came or went.  What one carried after it was last read is not in these totals, and nothing of
    one that came and went between two readings."""


NO_SOCKETS: Final = Sockets(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class HeaderSizes:
    """Bytes of headers of a packet that the port counts, where no connection tells."""

    least: int
    usual: int
    most: int


TCP_HEADERS: Final = HeaderSizes(54, 66, 90)
"""Ethernet 14, IPv4 20 or IPv6 40, TCP 20 and timestamps 12; at most a VLAN tag of 4 besides."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one rail and direction at one moment: running totals."""

    port_bytes: int
    packets: int | None
    """That the port counted; None: it does not tell."""
    handed_over_bytes: int | None = None
    """As NCCL gave them to the device; never falls.  None: not observed, or not in this direction."""
    complete: bool = False
    """Whether everything that observed processes hand over is in `handed_over_bytes` at present."""
    expected_bytes: int | None = None
    """What the model says that observed collectives should move; None: it cannot say."""
    sockets: Sockets | None = None
    """Of observed processes, but for those of libraries other than NCCL; None: connections are not known here."""
    own: Mapping[TrafficOwner, Sockets] = field(default_factory=dict)
    """Those of `sockets` that are not NCCL's: of observed processes' own programs, or nobody knows of which library."""
    others: Mapping[TrafficOwner, Sockets] = field(default_factory=dict)
    """All other connections of which it is known whose they are."""
    undecided_bytes: int = 0
    """What connections have carried of which that is going to be known soon, if at all: so much waits to be classed."""
    headers: HeaderSizes = TCP_HEADERS
    retransmitted_packets: int = 0
    """Where `sockets` is None: packets that the device sent or received again, as far as it counts them."""
    offload_bytes: int = 0
    """The most of the port's bytes that may be the card's or a switch's own."""
    skew: float = 0.0
    """Part of the port's bytes since the moment before that another counter may not have seen, or seen twice."""
    closing: bool = False
    """Connections may have sent more than `sockets` says: no more evidence of them will come."""
    reading: int | None = None
    """Number of the reading of port and connections; None: it is not known when there is a new one."""
    claimants: frozenset[TrafficOwner] = frozenset({TrafficOwner.UNKNOWN})
    """Where `sockets` is None: who may have moved what nothing else explains, at present."""


Class = tuple[TrafficOwner, Origin]


@dataclass(frozen=True, slots=True)
class _Split:
    collective: int
    overhead: int
    retransmission: int
    foreign: int
    unseen: int
    offload: int
    uncertain_bytes: int
    """Half the width of the band that a class may lie in."""


@dataclass(slots=True)
class _Sums:
    """What is added up from moment to moment, beyond the totals that the evidence holds."""

    port_bytes: int = 0
    handed_bytes: int = 0
    """Handed over, as far as it was seen."""
    expected_bytes: int = 0
    inexact_bytes: int = 0
    """Port bytes of times in which not everything that was handed over was seen."""
    unknown_bytes: int = 0
    """Port bytes of times in which nothing could be expected either."""
    tail_bytes: int = 0
    """Port bytes beyond those of connections, of times in which connections came or went."""
    unseen_bytes: int = 0
    """The most that connections were seen to carry beyond what collectives explained by then."""
    early_bytes: int = 0
    """The most of what was handed over that the port may have sent before it was first read."""
    rest_bytes: int = 0
    """The most that nothing explained where connections are not known."""
    claimed: dict[TrafficOwner, int] = field(default_factory=dict)
    """By how much that grew while an owner alone had a claim to it."""
    large_packets: bool = False
    """The port counts packets larger than a link carries."""

    @property
    def exact(self) -> bool:
        """Whether what was handed over is all, but for what does not matter."""
        return self.inexact_bytes * _MATTERS <= self.port_bytes

    @property
    def collective_bytes(self) -> int:
        """What collectives moved.

        One number or the other, never one for some time and one for another: the same bytes are expected at the call,
        and handed over when the call before is through.
        """
        return self.handed_bytes if self.exact else max(self.handed_bytes, self.expected_bytes)


class Account:
    """Classes the bytes of one rail in one direction.  Not safe for use by several threads at once."""

    def __init__(self) -> None:
        self._first: Evidence | None = None
        self._last: Evidence | None = None
        self._highest: Evidence | None = None
        """Every total as it was last known: of what is not known now, as it was before that."""
        self._read: Evidence | None = None
        """The last evidence whose port or sockets differed from those before."""
        self._sums = _Sums()
        self._given: dict[Class, int] = {}
        self._waiting_bytes = 0
        """Of the port, in no class yet."""
        self._nobodys: dict[int, int] = {}
        """By number of a reading, what nothing explained then; the last ones."""
        self._begun: tuple[int, int] | None = None
        """Bytes handed over and expected, before the first evidence."""
        self.ledger = DirectionLedger({}, None)
        """As of the last update."""

    @property
    def has_evidence(self) -> bool:
        """Whether there was any evidence."""
        return self._first is not None

    @property
    def exact(self) -> tuple[int, int]:
        """(handed over, expected) bytes, both 0 where not everything that is handed over is seen."""
        return (self._sums.handed_bytes, self._sums.expected_bytes) if self._sums.exact else (0, 0)

    def begin(self, handed_over_bytes: int, expected_bytes: int) -> None:
        """Totals of a moment before port and connections are read for the first time.

        The first evidence has what was read of the port together with what had been handed over some time later: of a
        job that sends already, what it handed over in between would be taken for bytes that collectives did not move.
        """
        if self._first is None:
            self._begun = handed_over_bytes, expected_bytes

    def update(self, evidence: Evidence) -> DirectionLedger:
        """Take the evidence of one moment.

        Totals that fell stand still: a port that begins anew, or evidence of connections that is missing for a while.
        """
        first, last, highest, read = self._first, self._last, self._highest, self._read
        if first is None or last is None or highest is None or read is None:
            self._first = self._last = self._highest = self._read = evidence
            if self._begun is not None:
                self._last = _as_of(evidence, *self._begun)
                self._sums.early_bytes = max(0, (evidence.handed_over_bytes or 0) - (self._last.handed_over_bytes or 0))
            return self.ledger
        evidence = _not_before(evidence, highest)
        growth = evidence.port_bytes - read.port_bytes
        self._add_collectives(last, evidence, growth)
        # What connections have sent at least: what had been handed over by a moment that is past.
        floor = ((evidence if evidence.closing else last).handed_over_bytes or 0) - (first.handed_over_bytes or 0)
        self._last = evidence
        self._highest = replace(
            evidence,
            packets=highest.packets if evidence.packets is None else evidence.packets,
            sockets=evidence.sockets or highest.sockets,
        )
        same = evidence.sockets == read.sockets and evidence.others == read.others
        if not growth and not self._waiting_bytes and same and not evidence.closing:
            return self.ledger
        self._add_tail(read, evidence, growth)
        self._read = evidence
        split = self._split(first, evidence, floor, round(growth * min(1.0, evidence.skew)))
        classes = self._classes(split, first, evidence)
        growth += self._waiting_bytes
        unknown = TrafficOwner.UNKNOWN, Origin.FOREIGN
        nobodys = classes.get(unknown, 0)
        held_back = max(evidence.undecided_bytes, nobodys - self._lasting(nobodys, evidence))
        self._waiting_bytes = min(growth, held_back, max(0, nobodys - self._given.get(unknown, 0)))
        _add(classes, unknown, -self._waiting_bytes)
        self._distribute(classes, split.uncertain_bytes, growth - self._waiting_bytes)
        return self.ledger

    def _lasting(self, nobodys_bytes: int, evidence: Evidence) -> int:
        """What nothing explained at each of the last readings: at least so much is nobody's."""
        if evidence.reading is None or evidence.closing:
            self._nobodys.clear()
            return nobodys_bytes
        self._nobodys.pop(evidence.reading, None)
        self._nobodys[evidence.reading] = nobodys_bytes
        while len(self._nobodys) > _READINGS:
            del self._nobodys[next(iter(self._nobodys))]
        return min(self._nobodys.values()) if len(self._nobodys) == _READINGS else 0

    def _add_collectives(self, last: Evidence, evidence: Evidence, growth: int) -> None:
        sums = self._sums
        sums.port_bytes += growth
        sums.handed_bytes += (evidence.handed_over_bytes or 0) - (last.handed_over_bytes or 0)
        exact = evidence.complete and last.complete
        sums.inexact_bytes += 0 if exact else growth
        if evidence.expected_bytes is not None and last.expected_bytes is not None:
            sums.expected_bytes += evidence.expected_bytes - last.expected_bytes
        elif not exact:
            sums.unknown_bytes += growth

    def _add_tail(self, read: Evidence, evidence: Evidence, growth: int) -> None:
        before, after = read.sockets, evidence.sockets
        if after is None:
            return
        carried = 0
        if before is not None:
            carried = after.payload_bytes - before.payload_bytes
        if evidence.closing or (before is not None and after.changes > before.changes):
            self._sums.tail_bytes += max(0, growth - carried)

    def _split(self, first: Evidence, evidence: Evidence, floor: int, skew_bytes: int) -> _Split:
        sums = self._sums
        port = evidence.port_bytes - first.port_bytes
        packets = None
        if evidence.packets is not None and first.packets is not None:
            packets = max(0, evidence.packets - first.packets)
        collective = max(0, sums.collective_bytes)
        if evidence.sockets is None:
            split = _without_sockets(port, packets, collective, evidence, first)
        else:
            sockets = _since(first.sockets, evidence.sockets)
            own = sockets.payload_bytes - sockets.retransmitted_bytes
            tail = self._tail(own, collective, floor, max(0, port - own))
            headers = self._headers(port, packets, _with_tail(sockets, tail, packets or 0, evidence.headers))
            split = _with_sockets(port, collective, own + tail, sockets.retransmitted_bytes, headers, evidence)
            split = _wider(split, max(0, sums.tail_bytes - tail) // 2)
            if not sums.exact:
                split = _wider(split, min(abs(collective - own - tail), sums.inexact_bytes) // 2)
        early_bytes = min(sums.early_bytes, split.collective)
        return _wider(split, (min(split.unseen, sums.unknown_bytes) + early_bytes) // 2 + skew_bytes)

    def _tail(self, own: int, collective: int, floor: int, room: int) -> int:
        """What connections carried after they were read for the last time, in the same mix as before."""
        sums = self._sums
        sums.unseen_bytes = max(sums.unseen_bytes, own - collective)
        explained = own - sums.unseen_bytes
        missing = max(min(sums.tail_bytes, collective - explained), floor - explained, 0)
        if explained > 0:
            missing = min(missing * own // explained, max(missing, sums.tail_bytes))
        return min(missing, room)

    def _headers(self, port: int, packets: int | None, sockets: Sockets) -> _Headers:
        """Of the packets that connections sent or received."""
        segments, together = sockets.segments, sockets.header_bytes
        if not segments:
            return _Headers(0, 0)
        room = max(0, port - sockets.payload_bytes + sockets.retransmitted_bytes)
        most = min(together, room)
        fewest = -(-sockets.payload_bytes // _LARGEST_PACKET_BYTES)
        if packets is None:
            least = min(most, fewest * together // segments)
            return _Headers((most + least) // 2, (most - least) // 2)
        more = segments - packets > packets // _MARGIN + _MARGIN_SEGMENTS
        no_room = together - room > room // _MARGIN + _MARGIN_SEGMENTS * together // segments
        self._sums.large_packets |= more or no_room
        if not self._sums.large_packets:
            return _Headers(most, 0)
        # All headers are known, and so is what others put into packets, but not into how many of them.
        others = max(0, port - sockets.payload_bytes - packets * together // segments)
        least_mine = max(min(fewest, packets), packets - others // _SMALL_PACKET_BYTES)
        most_mine = max(least_mine, packets - others // _LARGEST_PACKET_BYTES)
        half_width = (most_mine - least_mine) * together // segments // 2
        return _Headers(min(most, (least_mine + most_mine) * together // segments // 2), half_width)

    def _classes(self, split: _Split, first: Evidence, evidence: Evidence) -> dict[Class, int]:
        """Whose the bytes of each origin were."""
        own = {owner: _since(first.own.get(owner), sockets) for owner, sockets in evidence.own.items()}
        found = _classes_of_observed(split, own, evidence, first)
        others = {owner: _since(first.others.get(owner), sockets) for owner, sockets in evidence.others.items()}
        left = split.foreign
        if (counted := others.pop(TrafficOwner.NCCL, None)) is not None and evidence.sockets is None:
            # Of queue pairs: what their counters have beyond the collectives.
            known = split.collective + split.overhead + split.retransmission
            unseen = min(left, max(0, counted.payload_bytes + counted.header_bytes - known))
            _add(found, (TrafficOwner.NCCL, Origin.UNSEEN), unseen)
            left -= unseen
        elif counted is not None:
            others[TrafficOwner.NCCL] = counted
        room = left
        if self._sums.large_packets and evidence.packets is not None and split.overhead:
            # Headers of packets that the port counted, beyond those of observed processes.
            sockets = _since(first.sockets, evidence.sockets or NO_SOCKETS)
            header_bytes = max(1, sockets.header_bytes // max(1, sockets.segments))
            room = max(0, (evidence.packets - (first.packets or 0)) * header_bytes - split.overhead)
        for origin, wanted in (
            (Origin.TRANSFER, {owner: one.payload_bytes - one.retransmitted_bytes for owner, one in others.items()}),
            (Origin.OVERHEAD, {owner: one.header_bytes for owner, one in others.items()}),
            (Origin.RETRANSMISSION, {owner: one.retransmitted_bytes for owner, one in others.items()}),
        ):
            together = min(sum(wanted.values()), left, room if origin is Origin.OVERHEAD else left)
            for owner, share in zip(wanted, divide_in_proportion(together, list(wanted.values())), strict=True):
                named = owner in NAMED_LIBRARIES
                _add(found, (owner, origin if named else Origin.FOREIGN), share)
            left -= together if wanted else 0
        if evidence.sockets is not None:
            _add(found, (TrafficOwner.UNKNOWN, Origin.FOREIGN), left)
            return found
        packets = max(0, (evidence.packets or 0) - (first.packets or 0))
        known_headers = sum(count for (_owner, origin), count in found.items() if origin is Origin.OVERHEAD)
        headers = min(left, max(0, packets * evidence.headers.usual - known_headers))
        self._divide_rest(found, left, headers, evidence)
        return found

    def _divide_rest(self, found: dict[Class, int], rest: int, headers: int, evidence: Evidence) -> None:
        """Give what nothing explains to who alone may have moved it, for as long as that was so.

        `headers`: how much of it are headers.
        """
        sums = self._sums
        grown = max(0, rest - sums.rest_bytes)
        sums.rest_bytes += grown
        claimants = evidence.claimants
        if sums.exact and evidence.handed_over_bytes is not None and len(claimants) > 1:
            claimants -= {TrafficOwner.NCCL}  # what it moved is known
        owner = next(iter(claimants)) if len(claimants) == 1 else TrafficOwner.UNKNOWN
        sums.claimed[owner] = sums.claimed.get(owner, 0) + grown
        for one, share in zip(sums.claimed, divide_in_proportion(rest, list(sums.claimed.values())), strict=True):
            if one in NAMED_LIBRARIES:
                overhead = _part(headers, share, rest, share)
                _add(found, (one, Origin.OVERHEAD), overhead)
                _add(found, (one, Origin.TRANSFER), share - overhead)
            else:
                _add(found, (one, Origin.UNSEEN if one is TrafficOwner.NCCL else Origin.FOREIGN), share)

    def _distribute(self, wanted: Mapping[Class, int], uncertain_bytes: int, growth: int) -> None:
        given = self._given
        classes = list(dict.fromkeys((*given, *wanted)))
        lacking = [max(0, wanted.get(one, 0) - given.get(one, 0)) for one in classes]
        for one, share in zip(classes, divide_in_proportion(growth, lacking), strict=True):
            _add(given, one, share)
        port = sum(given.values())
        error = min(1.0, uncertain_bytes / port) if port else None
        self.ledger = DirectionLedger(dict(given), error)


def _add(classes: dict[Class, int], one: Class, count: int) -> None:
    if count:
        classes[one] = classes.get(one, 0) + count


def _classes_of_observed(
    split: _Split, own: Mapping[TrafficOwner, Sockets], evidence: Evidence, first: Evidence
) -> dict[Class, int]:
    """What observed processes moved: NCCL's, but for what their programs' own connections carried."""
    sockets = _since(first.sockets, evidence.sockets or NO_SOCKETS)
    found: dict[Class, int] = {}
    unseen, overhead, retransmission = split.unseen, split.overhead, split.retransmission
    for owner, one in own.items():
        shares = (
            (Origin.UNSEEN, min(unseen, one.payload_bytes - one.retransmitted_bytes)),
            (Origin.OVERHEAD, _part(split.overhead, one.header_bytes, sockets.header_bytes, overhead)),
            (
                Origin.RETRANSMISSION,
                _part(split.retransmission, one.retransmitted_bytes, sockets.retransmitted_bytes, retransmission),
            ),
        )
        for origin, share in shares:
            _add(found, (owner, origin), share)
        unseen, overhead, retransmission = (
            left - share for left, (_, share) in zip((unseen, overhead, retransmission), shares, strict=True)
        )
    for origin, count in (
        (Origin.COLLECTIVE, split.collective),
        (Origin.OVERHEAD, overhead),
        (Origin.RETRANSMISSION, retransmission),
        (Origin.UNSEEN, unseen),
        (Origin.OFFLOAD, split.offload),
    ):
        _add(found, (TrafficOwner.NCCL, origin), count)
    return found


def _part(total: int, mine: int, everyones: int, most: int) -> int:
    """A share of a total; of what is left at most."""
    return min(most, total * mine // everyones) if everyones > 0 else 0


def _as_of(evidence: Evidence, handed_over_bytes: int, expected_bytes: int) -> Evidence:
    """Evidence with what collectives had given at an earlier moment."""
    handed, expected = evidence.handed_over_bytes, evidence.expected_bytes
    return replace(
        evidence,
        handed_over_bytes=None if handed is None else min(handed, handed_over_bytes),
        expected_bytes=None if expected is None else min(expected, expected_bytes),
    )


@dataclass(frozen=True, slots=True)
class _Headers:
    """Of observed processes' packets."""

    bytes: int
    half_width: int


def _with_sockets(
    port: int, collective: int, payload: int, retransmitted: int, headers: _Headers, evidence: Evidence
) -> _Split:
    """`payload` is what observed processes sent for the first time, or received."""
    # What a queue on this host holds back or drops is sent for TCP and not for the port.
    retransmission = min(retransmitted, max(0, port - payload - headers.bytes))
    payload = min(payload, port)
    overhead = min(headers.bytes, port - payload)
    explained = min(collective, payload)
    rest = port - payload - overhead - retransmission
    offload = min(rest, evidence.offload_bytes)
    return _Split(
        collective=explained,
        overhead=overhead,
        retransmission=retransmission,
        foreign=rest - offload,
        unseen=payload - explained,
        offload=offload,
        uncertain_bytes=headers.half_width + offload // 2,
    )


def _without_sockets(port: int, packets: int | None, collective: int, evidence: Evidence, first: Evidence) -> _Split:
    """Nobody tells whose the bytes are: what collectives do not explain is foreign, or it is not."""
    sizes = evidence.headers
    counted = packets or 0
    all_headers = min(counted * sizes.usual, port)
    explained = min(collective, port - all_headers)
    # Every packet is taken to be like the others.
    mine = explained / max(1, port - all_headers)
    overhead = min(int(all_headers * mine), port - explained)
    again = evidence.retransmitted_packets - first.retransmitted_packets
    retransmission = min(max(0, again) * port // max(1, counted), port - explained - overhead)
    rest = port - explained - overhead - retransmission
    offload = min(rest, evidence.offload_bytes)
    unsure = int(counted * (sizes.most - sizes.least) * mine) // 2 + retransmission + rest // 2
    return _Split(explained, overhead, retransmission, rest - offload, 0, offload, unsure)


def _wider(split: _Split, more_bytes: int) -> _Split:
    return replace(split, uncertain_bytes=split.uncertain_bytes + more_bytes) if more_bytes > 0 else split


def _since(first: Sockets | None, now: Sockets) -> Sockets:
    if first is None:
        return now
    payload = now.payload_bytes - first.payload_bytes
    return Sockets(
        payload,
        min(payload, now.retransmitted_bytes - first.retransmitted_bytes),
        now.segments - first.segments,
        now.header_bytes - first.header_bytes,
        now.changes,
    )


def _with_tail(sockets: Sockets, tail_bytes: int, packets: int, sizes: HeaderSizes) -> Sockets:
    """As if connections had carried this much more, in packets like the others; in the port's where there are none."""
    payload = sockets.payload_bytes + tail_bytes
    if not tail_bytes or not sockets.payload_bytes:
        segments = packets if tail_bytes else sockets.segments
        header_bytes = segments * sizes.usual if tail_bytes else sockets.header_bytes
        return replace(sockets, payload_bytes=payload, segments=segments, header_bytes=header_bytes)
    return replace(
        sockets,
        payload_bytes=payload,
        segments=sockets.segments * payload // sockets.payload_bytes,
        header_bytes=sockets.header_bytes * payload // sockets.payload_bytes,
    )


def _not_before(now: Evidence, last: Evidence) -> Evidence:
    """The evidence with totals that never fall below those of `last`."""
    handed, packets, sockets = now.handed_over_bytes, now.packets, now.sockets
    if last.handed_over_bytes is not None:
        handed = max(handed or 0, last.handed_over_bytes)
    if packets is not None:
        packets = max(packets, last.packets or 0)
    if sockets is not None and last.sockets is not None:
        sockets = _risen(sockets, last.sockets)
    return replace(
        now,
        port_bytes=max(now.port_bytes, last.port_bytes),
        packets=packets,
        handed_over_bytes=handed,
        sockets=sockets,
        own=_all_risen(now.own, last.own),
        others=_all_risen(now.others, last.others),
        retransmitted_packets=max(now.retransmitted_packets, last.retransmitted_packets),
    )


def _all_risen(
    now: Mapping[TrafficOwner, Sockets], last: Mapping[TrafficOwner, Sockets]
) -> Mapping[TrafficOwner, Sockets]:
    if now == last:
        return now
    return {**last, **{owner: _risen(one, last.get(owner, NO_SOCKETS)) for owner, one in now.items()}}


def _risen(now: Sockets, last: Sockets) -> Sockets:
    return Sockets(
        max(now.payload_bytes, last.payload_bytes),
        max(now.retransmitted_bytes, last.retransmitted_bytes),
        max(now.segments, last.segments),
        max(now.header_bytes, last.header_bytes),
        max(now.changes, last.changes),
    )
