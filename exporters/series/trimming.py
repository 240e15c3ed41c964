"""What is given up where a node has more series than its budget allows.

A tenant, a user or one of a user's containers, loses its own detail: the next to go is always of the tenant with the
most series of ranks, so that a tenant with thousands of communicators, or of stalls, takes nothing from the others.  Of
its detail the bytes between ranks go first, and all of them: a part would look like the whole.  Then go communicators
with all series of their ranks: the ended ones, then the oldest, those that stall last.  When no communicator is left,
the rails lose what is merely detailed, then rails go, the last ones first, so that those that stay are the same from
scrape to scrape.  The node's totals and railscope's own health stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CommunicatorFacts, PeerTotal, RailFacts
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
    rails: tuple[RailFacts, ...]
    ranks_gone: frozenset[LabelValues] = frozenset()
    """Communicator and rank of those that have no series any more, whatever else is known of them."""

    @property
    def empty(self) -> bool:
        """Whether nothing is left that could be given up."""
        return not (self.communicators or self.rails)


def goes_with_rank(metric: Metric) -> bool:
    """Whether a metric's series go with the rank that their first two labels name."""
    return metric.labels[:2] == ("comm", "rank") and metric not in (catalogue.COMM_INFO, catalogue.COMM_PEER_WIRE_BYTES)


def trim(
    detail: Detail, shown: Iterable[Family], excess: int, series_of_rail: SeriesOfRail
) -> tuple[Detail, Mapping[int | None, int]]:
    """The detail without what stands for `excess` series of those `shown`, if that many can be given up.

    Also how many series of ranks each user lost, by uid; None: not known.
    """
    detail, excess, lost = _without_ranks(detail, shown, excess)
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
    detail: Detail, shown: Iterable[Family], excess: int
) -> tuple[Detail, int, Mapping[int | None, int]]:
    """Without detail of ranks until `excess` series are saved; what excess is left; what each user lost."""
    of_ranks = [family for family in shown if goes_with_rank(family.metric)]
    series = Counter(labels[:2] for family in of_ranks for labels, _ in family.samples)
    stalled = {labels[:2] for one in of_ranks if one.metric is catalogue.COMM_STALLED for labels, _ in one.samples}
    tenants = {one.identity.key: one.tenant for one in detail.communicators}
    between = {(one.comm, one.rank, one.peer, one.basis) for one in detail.peers}
    peers = Counter(tenants.get((comm, rank), UNKNOWN) for comm, rank, _peer, _basis in between)
    ends = Counter(one.identity.key for one in detail.communicators)
    without_peers: set[str] = set()
    gone: set[int] = set()
    ranks_gone: set[LabelValues] = set()
    lost: Counter[int | None] = Counter()
    for tenant, index in _first_to_go(detail.communicators, peers, series, stalled):
        if excess <= 0:
            break
        if index is None:
            without_peers.add(tenant)
            saved = peers[tenant]
        else:
            gone.add(index)
            rank = detail.communicators[index].identity.key
            ends[rank] -= 1
            # Its comm_info, and the rank's series unless another end of the same rank still needs them.
            saved = 1
            if not ends[rank]:
                saved += series[rank]
                ranks_gone.add(rank)
        excess -= saved
        lost[_uid(tenant)] += saved
    kept = replace(
        detail,
        communicators=tuple(one for index, one in enumerate(detail.communicators) if index not in gone),
        peers=tuple(
            one
            for one in detail.peers
            if (one.comm, one.rank) not in ranks_gone
            and tenants.get((one.comm, one.rank), UNKNOWN) not in without_peers
        ),
        ranks_gone=detail.ranks_gone | ranks_gone,
    )
    return kept, excess, lost


def _first_to_go(
    communicators: Sequence[CommunicatorFacts],
    peers: Mapping[str, int],
    series: Mapping[LabelValues, int],
    stalled: Collection[LabelValues],
) -> Iterable[tuple[str, int | None]]:
    """Tenants with what they give up next: the place of a communicator, None for all bytes between ranks."""

    def of_tenants() -> Iterator[tuple[str, int | None, int]]:
        for tenant, count in peers.items():
            yield tenant, None, count
        order = sorted(
            range(len(communicators)),
            key=lambda index: (communicators[index].identity.key in stalled, communicators[index].alive, index),
        )
        for index in order:
            one = communicators[index]
            yield one.tenant, index, 1 + series.get(one.identity.key, 0)

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
