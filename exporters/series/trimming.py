"""What is given up where a node has more series than its budget allows.

A tenant, a user or one of his containers, loses his own detail: the next to go is always of the tenant who has the most
series of ranks, so that one who makes thousands of communicators, or of stalls, takes nothing from the others.  Of his
detail the bytes between ranks go first, and all of them: a part would look like the whole.  Then go communicators with
all series of their ranks: the ended ones, then the oldest, those that stall last.  When no communicator is left, the
rails lose what is merely detailed, then rails go, the last ones first, so that those that stay are the same from scrape
to scrape.  The node's totals and railscope's own health stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.snapshot import (
    UNKNOWN,
    CommunicatorFacts,
    Histogram,
    NodeStalls,
    PeerTotal,
    RailFacts,
    RankArrivals,
    RankKey,
    RankTimes,
)
from railscope.exporters.series.family import Family, LabelValues
from railscope.exporters.series.rail_families import COUNTERS, RATES

_NO_HISTOGRAM: Final = Histogram(bounds=(), counts=(), sum=None)

SeriesOfRail = Callable[[RailFacts, tuple[Metric, ...] | None], int]
"""How many series a rail has of some metrics; None: of all."""


@dataclass(frozen=True, slots=True)
class Detail:
    """What of a snapshot the series budget may leave out."""

    communicators: tuple[CommunicatorFacts, ...]
    """Oldest first."""
    peers: tuple[PeerTotal, ...]
    times: tuple[RankTimes, ...]
    arrivals: tuple[RankArrivals, ...]
    stalls: NodeStalls
    rails: tuple[RailFacts, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing is left that could be given up."""
        return not (self.communicators or self.rails)


def trim(
    detail: Detail, shown: Iterable[Family], excess: int, series_of_rail: SeriesOfRail
) -> tuple[Detail, Mapping[int | None, int]]:
    """The detail without what stands for `excess` series of those `shown`, if that many can be given up.

    Also how many series of ranks each user lost, by uid; None: not known.
    """
    detail, excess, lost = _without_ranks(detail, _series_by_rank(shown), excess)
    rails = list(detail.rails)
    for index in reversed(range(len(rails))):
        if excess > 0:
            excess -= series_of_rail(rails[index], COUNTERS)
            rails[index] = replace(rails[index], counters=())
    for index in reversed(range(len(rails))):
        if excess > 0:
            excess -= series_of_rail(rails[index], RATES)
            rails[index] = replace(rails[index], transmit_rate=_NO_HISTOGRAM, receive_rate=_NO_HISTOGRAM)
    while rails and excess > 0:
        excess -= series_of_rail(rails.pop(), None)
    return replace(detail, rails=tuple(rails)), lost


def _without_ranks(
    detail: Detail, series: Mapping[LabelValues, int], excess: int
) -> tuple[Detail, int, Mapping[int | None, int]]:
    """Without detail of ranks until `excess` series are saved; what excess is left; what each user lost."""
    tenants = {one.identity.key: one.tenant for one in detail.communicators}
    peers = Counter(
        tenants.get(rank, UNKNOWN) for rank, _ in {((one.comm, one.rank), one.peer) for one in detail.peers}
    )
    ends = Counter(one.identity.key for one in detail.communicators)
    without_peers: set[str] = set()
    gone: set[int] = set()
    ranks_gone: set[RankKey] = set()
    lost: Counter[int | None] = Counter()
    for tenant, index in _first_to_go(detail, peers, series):
        if excess <= 0:
            break
        if index is None:
            without_peers.add(tenant)
            saved = peers[tenant]
        else:
            gone.add(index)
            one = detail.communicators[index]
            rank = one.identity.key
            ends[rank] -= 1
            # Its comm_info, and the rank's series unless another end of the same rank still needs them.
            saved = 1
            if not ends[rank]:
                saved += series.get(rank, 0)
                ranks_gone.add(rank)
        excess -= saved
        lost[_uid(tenant)] += saved
    if not gone and not without_peers:
        return detail, excess, lost

    communicators = tuple(one for index, one in enumerate(detail.communicators) if index not in gone)
    ranks = {one.identity.key for one in communicators}
    stalls = detail.stalls
    kept = Detail(
        communicators=communicators,
        peers=tuple(
            one
            for one in detail.peers
            if (one.comm, one.rank) in ranks and tenants[one.comm, one.rank] not in without_peers
        ),
        times=tuple(one for one in detail.times if (one.comm, one.rank) in ranks),
        arrivals=tuple(one for one in detail.arrivals if (one.comm, one.rank) in ranks),
        stalls=replace(
            stalls,
            lengths=tuple(one for one in stalls.lengths if (one.comm, one.rank) not in ranks_gone),
            writing=tuple(rank for rank in stalls.writing if rank not in ranks_gone),
        ),
        rails=detail.rails,
    )
    return kept, excess, lost


def _series_by_rank(shown: Iterable[Family]) -> Counter[LabelValues]:
    """How many series each rank's numbers are, besides its communicators' `comm_info` and bytes between ranks."""
    others = (catalogue.COMM_INFO, catalogue.COMM_PEER_WIRE_BYTES)
    families = (one for one in shown if one.metric.labels[:2] == ("comm", "rank") and one.metric not in others)
    return Counter(labels[:2] for family in families for labels, _ in family.samples)


def _first_to_go(
    detail: Detail, peers: Mapping[str, int], series: Mapping[LabelValues, int]
) -> Iterable[tuple[str, int | None]]:
    """Tenants with what they give up next: the place of a communicator, None for all bytes between ranks."""
    stalled = {(one.comm, one.rank) for one in detail.stalls.lengths if one.current is not None}
    communicators = detail.communicators

    def of_tenants() -> Iterator[tuple[str, int | None, int]]:
        for tenant, count in peers.items():
            yield tenant, None, count
        order = sorted(
            range(len(communicators)),
            key=lambda index: (communicators[index].identity.key in stalled, communicators[index].alive, index),
        )
        for index in order:
            yield communicators[index].tenant, index, 1 + series.get(communicators[index].identity.key, 0)

    items = list(of_tenants())
    left: defaultdict[str, int] = defaultdict(int)
    for tenant, _, count in items:
        left[tenant] += count
    having = []
    """How many series its tenant has when each goes."""
    for tenant, _, count in items:
        having.append(left[tenant])
        left[tenant] -= count
    for place in sorted(range(len(items)), key=having.__getitem__, reverse=True):
        tenant, index, _ = items[place]
        yield tenant, index


def _uid(tenant: str) -> int | None:
    uid = tenant.partition("/")[0]
    return int(uid) if uid.isdecimal() else None
