"""What collectives should have put on each rail, beside what the rail's port counted.

Input are running totals: expected wire bytes per rail set (the rails that one network namespace's processes share)
and port bytes per rail.  Output are, per rail and direction, a running total of expected wire bytes and the ratio of
the two over a sliding window.

**Which rail.**  NCCL spreads a large message evenly over the rails; a small one may use a single rail, and which one
is its free choice.  So large messages (`spread`) are shared out evenly, and small ones (`small`) by the best evidence
there is of all rails of the set:

1. What NCCL handed to each rail in the last window: rails get what they lack of that proportion.  For receive, what
   its connections received there, or the port without what queue pairs show to be others'.
2. Likewise, what its connections sent.  For receive, what was handed over on the way out: a ring's channel receives
   on the rail on which it sends, but where NCCL_CROSS_NIC lets it take another one.
3. The port bytes of the last window that nothing has explained yet.  Another library's bytes among them mislead.
4. None: evenly.

The first two are of NCCL alone, so that much traffic of others beside it changes nothing.  The split is an estimate
nevertheless: an operation is expected when it is enqueued, before anything shows which rail it takes.  What it got
wrong, later operations make up for.  Bytes are whole and all of them are given out at every update: the rails' totals
add up to the rail set's.

**Which moment.**  Expected bytes are counted when an operation is enqueued; the port counts them when they leave,
which for a long operation is seconds later.  Comparing both at arbitrary moments gives wild ratios: much above 1
just after a large operation was enqueued, 0 while it drains.  The backlog, expected minus port bytes of the whole
rail set, tells the moments apart: it jumps when an operation is enqueued, and falls as bytes leave.  When it is as
low as at any time in the last four windows (within 1/64 of a window's traffic), all that was enqueued has left, by
this account; the ratio is taken between two such settled moments.  Protocol headers make the port count a little
more than expected, so that operations settle anew as they complete, also without a pause between them.  While none
settles the last ratio stands for one window, and as long as the rails carry traffic until that moment is four windows
old.  If nothing settles for four windows, the account itself does not add up (a tree instead of a ring, traffic that
takes another way), and the plain window is shown: a ratio above 1 is the finding.

Limits: a job that begins to keep several operations queued has an old ratio for up to four windows, or none if it is
the first; traffic of others beside an operation longer than the window blurs the moment at which it settles; an
operation that takes longer than four windows shows as unexplained traffic until it ends.

**What cannot be known.**  If the expected bytes of a rail set cannot be known, its rails' totals are None, with the
reason, and they resume where they were once the cause is gone.  A rail with too little port traffic in the window
has no ratio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from railscope.agent.model.expected import ExpectedBytes, WireTotals

DEFAULT_WINDOW_NS: Final = 30_000_000_000
MINIMUM_PORT_BYTES: Final = 64 * 1024
"""Below this much port traffic a ratio says more about neighbour discovery than about collectives."""
_KEPT_WINDOWS: Final = 4
_SAMPLES_PER_WINDOW: Final = 120
_SETTLED_WITHIN: Final = 64
"""A backlog above the lowest by less than this part of a window's traffic counts as settled."""


@dataclass(frozen=True, slots=True)
class NcclBytes:
    """Bytes so far of NCCL alone on one rail."""

    handed_bytes: int | None = None
    """That NCCL handed to the rail's device; None: not all of it is seen."""
    sent_bytes: int | None = None
    """That its connections sent, or the port less what others are known to have sent; None: not known."""
    received_bytes: int | None = None
    """Likewise."""


NOT_KNOWN: Final = NcclBytes()


@dataclass(frozen=True, slots=True)
class PortTotals:
    """Port bytes so far of one rail; they never fall."""

    rail_set: str
    device: str
    port: str
    transmit_bytes: int
    receive_bytes: int
    carries: bool = True
    """False: the jobs that run send nothing through it, so nothing new is expected of it."""
    nccl: NcclBytes = NOT_KNOWN


@dataclass(frozen=True, slots=True)
class DirectionWire:
    wire_bytes: int | None
    """Expected wire bytes so far, never falling; None: cannot be known."""
    explained_ratio: float | None
    """Expected over port bytes in the window; None: too little traffic to tell, or unknown."""
    unknown: str = ""
    """Why the bytes cannot be known."""


@dataclass(frozen=True, slots=True)
class RailWire:
    rail_set: str
    device: str
    port: str
    transmit: DirectionWire
    receive: DirectionWire


class Correlator:
    """Keeps what was given to each rail so far, and the window over which ratios are taken.

    Not safe for use by several threads at once; results are immutable.
    """

    def __init__(self, window_ns: int = DEFAULT_WINDOW_NS, minimum_port_bytes: int = MINIMUM_PORT_BYTES) -> None:
        self._window_ns = window_ns
        self._minimum_port_bytes = minimum_port_bytes
        self._directions: dict[tuple[str, str], _Direction] = {}
        self._updated: list[_Direction] = []
        """Those of the last update."""

    def update(
        self, now_ns: int, ports: Sequence[PortTotals], expected: Sequence[ExpectedBytes]
    ) -> tuple[RailWire, ...]:
        """Take the totals of one moment; returns one `RailWire` for each of `ports`, in their order.

        A rail set without an entry in `expected` has had no collectives.  A rail set without rails gives nothing, and
        its bytes wait for a rail to appear.  Rails may come and go; one that comes back continues its total.
        """
        by_set = {entry.rail_set: entry for entry in expected}
        members: dict[str, list[PortTotals]] = {}
        for port in ports:
            members.setdefault(port.rail_set, []).append(port)
        found: dict[tuple[str, str, str], RailWire] = {}
        self._updated = []
        for rail_set, rails in members.items():
            rails.sort(key=attrgetter("device", "port"))
            totals = by_set.get(rail_set, ExpectedBytes(rail_set, WireTotals(), WireTotals()))
            unused = [rail for rail in rails if not rail.carries and any(other.carries for other in rails)]
            rails = [rail for rail in rails if rail not in unused]
            names = tuple((rail.device, rail.port) for rail in rails)
            sending, receiving = self._direction(rail_set, "transmit"), self._direction(rail_set, "receive")
            handed = _of_all([rail.nccl.handed_bytes for rail in rails])
            transmit = sending.update(
                now_ns,
                names,
                tuple(rail.transmit_bytes for rail in rails),
                totals.transmit,
                (handed, _of_all([rail.nccl.sent_bytes for rail in rails])),
            )
            receive = receiving.update(
                now_ns,
                names,
                tuple(rail.receive_bytes for rail in rails),
                totals.receive,
                (_of_all([rail.nccl.received_bytes for rail in rails]), handed),
            )
            self._updated += [sending, receiving]
            for (device, port_name), sent, received in zip(names, transmit, receive, strict=True):
                found[rail_set, device, port_name] = RailWire(rail_set, device, port_name, sent, received)
            for rail in unused:
                name = (rail.device, rail.port)
                found[rail_set, *name] = RailWire(
                    rail_set, *name, sending.unused(name, totals.transmit), receiving.unused(name, totals.receive)
                )
        return tuple(found[port.rail_set, port.device, port.port] for port in ports)

    @property
    def all_sent(self) -> bool:
        """Whether all that was enqueued had left at the last update, wherever that ever shows: the next may come late.

        Where iterations are long, moments at which it has are few, and none is to be missed.
        """
        return all(direction.all_sent for direction in self._updated)

    def forget(self, rail_set: str) -> None:
        """Drop the rails of a rail set whose network namespace was closed.

        What was given out of its totals stays given: they go on rising from there when its name is used again.
        """
        for direction in ("transmit", "receive"):
            old = self._directions.pop((rail_set, direction), None)
            if old is not None:
                self._direction(rail_set, direction).taken = old.taken

    def _direction(self, rail_set: str, direction: str) -> _Direction:
        key = (rail_set, direction)
        if key not in self._directions:
            self._directions[key] = _Direction(self._window_ns, self._minimum_port_bytes)
        return self._directions[key]


_Evidence = tuple[tuple[int, ...] | None, ...]
"""What NCCL alone put on each rail, the best first; None: not known of all of them."""


@dataclass(frozen=True, slots=True)
class _Sample:
    time_ns: int
    port: tuple[int, ...]
    wire: tuple[int, ...]
    evidence: _Evidence
    backlog: int
    settled: bool
    """No earlier sample that is kept had a backlog that was lower by more than the tolerance."""


@dataclass(slots=True)
class _Direction:
    """One rail set in one direction."""

    window_ns: int
    minimum_port_bytes: int
    given: dict[tuple[str, str], int] = field(default_factory=dict)
    """Wire bytes given to each rail so far, also to rails that left."""
    taken: WireTotals = field(default_factory=WireTotals)
    """What of the rail set's totals has been given out."""
    turn: int = 0
    """Whose turn it is to get the bytes that do not divide evenly."""
    rails: tuple[tuple[str, str], ...] = ()
    samples: deque[_Sample] = field(default_factory=deque)

    @property
    def all_sent(self) -> bool:
        """Whether the last sample is, or none of those that are kept: then the plain window is shown at any moment."""
        return not self.samples or self.samples[-1].settled or not any(sample.settled for sample in self.samples)

    def update(
        self,
        now_ns: int,
        rails: tuple[tuple[str, str], ...],
        port: tuple[int, ...],
        totals: WireTotals,
        evidence: _Evidence,
    ) -> list[DirectionWire]:
        if totals.unknown:
            self.samples.clear()
            return [DirectionWire(None, None, totals.unknown) for _ in rails]
        if rails != self.rails or (self.samples and _fell(self.samples[-1].port, port)):
            self.rails = rails
            self.samples.clear()
        self._distribute(port, totals, evidence)
        wire = tuple(self.given[rail] for rail in rails)
        self._keep(now_ns, port, wire, evidence)
        ratios = self._ratios(now_ns)
        return [DirectionWire(total, ratio) for total, ratio in zip(wire, ratios, strict=True)]

    def unused(self, rail: tuple[str, str], totals: WireTotals) -> DirectionWire:
        """A rail that takes no part now: what it was given stays."""
        return DirectionWire(None if totals.unknown else self.given.get(rail, 0), None, totals.unknown)

    def _distribute(self, port: tuple[int, ...], totals: WireTotals, evidence: _Evidence) -> None:
        """Share out what is new in the totals; a total that fell gives nothing until it is above its old value."""
        count = len(self.rails)
        wire = [self.given.setdefault(rail, 0) for rail in self.rails]
        each, rest = divmod(max(0, totals.spread_bytes - self.taken.spread_bytes), count)
        for index in range(count):
            wire[index] += each + ((index - self.turn) % count < rest)
        self.turn = (self.turn + rest) % count
        small = max(0, totals.small_bytes - self.taken.small_bytes)
        if small:
            weights = self._lacking(small, wire, evidence) or self._unexplained(port, wire)
            for index, part in enumerate(divide_in_proportion(small, weights)):
                wire[index] += part
        self.given.update(zip(self.rails, wire, strict=True))
        self.taken = WireTotals(
            max(totals.spread_bytes, self.taken.spread_bytes), max(totals.small_bytes, self.taken.small_bytes)
        )

    def _lacking(self, small: int, wire: list[int], evidence: _Evidence) -> list[int]:
        """What each rail lacks of its part of what NCCL alone moved; empty: nothing of NCCL's is seen.

        `small`: bytes to be given out; `wire`: given so far, large messages included.
        """
        for column, now in enumerate(evidence):
            if now is None or not any(now):
                continue
            past = (sample for sample in self._in_window() if sample.evidence[column] is not None)
            start = next(past, None)
            before = start.evidence[column] if start is not None else None
            moved = [max(0, after - earlier) for after, earlier in zip(now, before or [0] * len(now), strict=True)]
            if not any(moved):
                return list(now)
            given = [
                after - earlier for after, earlier in zip(wire, start.wire if start else [0] * len(wire), strict=True)
            ]
            parts = divide_in_proportion(sum(given) + small, moved)
            return [max(0, part - there) for part, there in zip(parts, given, strict=True)]
        return []

    def _unexplained(self, port: tuple[int, ...], wire: list[int]) -> list[int]:
        """Port bytes of the last window that no expected byte covers."""
        if not self.samples:
            return [0] * len(wire)
        start = self._window_start()
        return [
            max(0, (new_port - old_port) - (new_wire - old_wire))
            for new_port, old_port, new_wire, old_wire in zip(port, start.port, wire, start.wire, strict=True)
        ]

    def _in_window(self) -> Iterator[_Sample]:
        since = self.samples[-1].time_ns - self.window_ns if self.samples else 0
        return (sample for sample in self.samples if sample.time_ns >= since)

    def _window_start(self) -> _Sample:
        return next(self._in_window())

    def _keep(self, now_ns: int, port: tuple[int, ...], wire: tuple[int, ...], evidence: _Evidence) -> None:
        """Add a sample; it takes the place of the newest one while that lies close to the one before."""
        while self.samples and self.samples[0].time_ns < now_ns - _KEPT_WINDOWS * self.window_ns:
            self.samples.popleft()
        backlog = sum(wire) - sum(port)
        settled = True
        if self.samples:
            moved = sum(port) - sum(self._window_start().port)
            lowest = min(sample.backlog for sample in self.samples)
            settled = backlog <= lowest + moved // _SETTLED_WITHIN
        sample = _Sample(now_ns, port, wire, evidence, backlog, settled)
        spacing_ns = self.window_ns // _SAMPLES_PER_WINDOW
        if len(self.samples) >= 2 and now_ns - self.samples[-2].time_ns < spacing_ns:
            self.samples.pop()
        self.samples.append(sample)

    def _ratios(self, now_ns: int) -> list[float | None]:
        candidates = [sample for sample in self.samples if sample.settled] or list(self.samples)
        end = candidates[-1]
        before = [sample for sample in candidates if sample.time_ns <= end.time_ns - self.window_ns]
        start = before[-1] if before else candidates[0]
        # While nothing settles, what is under way may hang: only a rail that carries something keeps its last ratio.
        lately = self._window_start() if now_ns - end.time_ns > self.window_ns else None
        return [
            self._ratio(index, start, end)
            if lately is None or self._carried_enough(index, lately, self.samples[-1])
            else None
            for index in range(len(self.rails))
        ]

    def _ratio(self, index: int, start: _Sample, end: _Sample) -> float | None:
        if not self._carried_enough(index, start, end):
            return None
        return (end.wire[index] - start.wire[index]) / (end.port[index] - start.port[index])

    def _carried_enough(self, index: int, start: _Sample, end: _Sample) -> bool:
        return end.port[index] - start.port[index] >= max(1, self.minimum_port_bytes)


def _of_all(totals: Sequence[int | None]) -> tuple[int, ...] | None:
    """None: one of them is not known."""
    known = tuple(total for total in totals if total is not None)
    return known if len(known) == len(totals) else None


def divide_in_proportion(total: int, weights: list[int]) -> list[int]:
    """Divide bytes among rails: whole parts that add up to `total`, by weight; equal parts if all weights are 0."""
    weight_sum = sum(weights)
    if not weight_sum:
        weights, weight_sum = [1] * len(weights), len(weights)
    parts, given, reached = [], 0, 0
    for weight in weights:
        reached += weight
        part = total * reached // weight_sum - given
        given += part
        parts.append(part)
    return parts


def _fell(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    return any(after < before for before, after in zip(old, new, strict=True))
