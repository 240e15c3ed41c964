"""Computes how many rail and spine links a job needs: how many can go before an iteration grows by more than ε.

A rail link joins one server's NIC to its leaf switch; spine links join leaf switches.  Which leaf switch a link ends at
is told (agent/analysis/place/leaves.py); as a rule, each rail has its own.  The demand is the matrix: what
the GPUs of each rail of a server send to other servers, and receive from them.

The model, and what it assumes:

1. What a removed link carried goes over the server's remaining links: NVLink takes it to the GPU of another rail, whose
   NIC sends it (NCCL calls this PXN), and in the same way where it arrives.  NVLink is no bottleneck.
2. A server spreads its bytes over its remaining links in proportion to their rates, in many messages, so that the
   split has no grain.  Servers from which no link is taken go on as they did.
3. Communication over the network takes as long as its busiest link, each direction for itself; it grows by the factor
   by which that link's bytes (over its rate) grow.  It makes up `network_share` of the iteration, and nothing of it is
   hidden: with 1, the default, the answer is what holds whatever the job computes.
4. So an iteration grows by no more than ε if no link takes longer than L = (1 + ε/network_share) × the busiest one now.

Two answers follow, both exact under the model where a server has one link to each leaf switch:

- While the spine stays, servers are independent.  A server needs links whose rates add up to its bytes / L; the fewest
  that do are its fastest ones, since any set of as many links has at most their rate (so there is nothing to search,
  whatever the rates; for equal links it is a division).
- Without a spine, bytes must arrive at the leaf switch that they left to, so that servers that talk to each other split
  their bytes over the same leaf switches in the same proportions.  Leaf switch s can take the share u(s) = min over
  servers of L × rate / bytes, and they are enough if their shares add up to 1: the fewest that do are those of the
  largest u.  Then no spine link is needed.  Nor is one where all bytes stay below a leaf switch as they are now.  Of
  several links of a server to one leaf switch the fastest ones stay, as many as its share needs; whether another choice
  of leaf switches would need fewer is not searched.

Where links are alike, those of the rails that carry least go first.

What this is not: room for failures, for other jobs, or for what the recording did not see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts.fact_columns import Pairs

_T = TypeVar("_T")

Link = tuple[str, str]
"""Server and rail."""


@dataclass(frozen=True, slots=True)
class RailLink:
    """One server's link to one rail, and what it has to carry, over the whole recording."""

    server: str
    rail: str
    leaf: str
    """The leaf switch that it ends at."""
    transmit_bytes: int
    receive_bytes: int
    needed: bool
    """Whether it stays while the spine stays."""
    busier_bytes_after: int
    """Then: what it carries in its busier direction, rounded up."""
    needed_without_spine: bool
    """Whether it stays if no spine link does."""


@dataclass(frozen=True, slots=True)
class LinkAnswer:
    """Which links a job needs."""

    epsilon: float
    network_share: float
    links: tuple[RailLink, ...]
    """By server and rail."""
    removable: int
    """Rail links that can go while the spine stays."""
    inflation: float
    """By which the iteration then grows; at most ε."""
    removable_without_spine: int | None
    """Rail links that can go together with all spine links; None: the spine is needed."""
    inflation_without_spine: float
    spine_bytes: int
    """What goes between leaf switches now: the spine carries it, unless NVLink does before."""


def find_link_demand(
    pairs: Pairs,
    place_of_gpu: Sequence[Link],
    rates: Mapping[Link, int],
    epsilon: float,
    network_share: float = 1.0,
    leaf_of: Mapping[Link, str] | None = None,
) -> LinkAnswer:
    """Which links between servers a job needs: the largest sets whose removal keeps an iteration's growth within ε.

    Args:
        pairs: wire bytes between GPUs.
        place_of_gpu: by GPU, the link that its bytes leave its server by.
        rates: of every link, bytes per second each way; links without GPUs of their own may be among them.
        epsilon: part of the iteration by which it may grow, such as 0.05.
        network_share: the part of the iteration that communication between servers takes, above 0 and up to 1.
        leaf_of: the leaf switch that each link ends at; None: each rail has its own.
    """
    links = sorted(set(rates) | set(place_of_gpu), key=_natural_link)
    leaf = {link: link[1] if leaf_of is None else leaf_of[link] for link in links}
    demand = _find_demand(pairs, place_of_gpu, leaf)
    out, into = demand.out, demand.into
    speed = {link: Fraction(rates.get(link, min(rates.values(), default=1))) for link in links}
    busy = {link: max(out[link], into[link]) for link in links}
    now = max((busy[link] / speed[link] for link in links), default=Fraction(0))
    limit = now * (1 + Fraction(str(epsilon)) / Fraction(str(network_share)))
    own: defaultdict[str, list[Link]] = defaultdict(list)
    of_rail: defaultdict[str, int] = defaultdict(int)
    for link in links:
        own[link[0]].append(link)
        of_rail[link[1]] += busy[link]
    totals = {
        server: max(sum(out[link] for link in found), sum(into[link] for link in found))
        for server, found in own.items()
    }
    for found in own.values():
        found.sort(key=lambda link: (-speed[link], -of_rail[link[1]], _natural(link[1])))

    after: dict[Link, Fraction] = {}
    for server, found in own.items():
        stay = _fewest(found, [speed[link] * limit for link in found], totals[server])
        whole = sum((speed[link] for link in stay), start=Fraction(0))
        for link in stay:
            moved = len(stay) < len(found)
            after[link] = totals[server] * speed[link] / whole if moved else Fraction(busy[link])

    kept_without: set[Link] = set()
    possible, longest = True, now
    for servers in demand.together:
        mine = {server: own[server] for server in servers if totals[server]}
        kept, load = _without_spine(mine, totals, speed, leaf, of_rail, limit)
        as_now = len(kept) == sum(map(len, mine.values())) or load > limit
        if as_now and demand.spine_of[servers[0]]:
            possible = possible and load <= limit
        elif as_now:
            kept, load = {link for found in mine.values() for link in found}, now
        kept_without |= kept
        longest = max(longest, load)
    growth = max((load / speed[link] for link, load in after.items()), default=Fraction(0))
    return LinkAnswer(
        epsilon=epsilon,
        network_share=network_share,
        links=tuple(
            RailLink(
                server=link[0],
                rail=link[1],
                leaf=leaf[link],
                transmit_bytes=out[link],
                receive_bytes=into[link],
                needed=link in after,
                busier_bytes_after=-int(-after.get(link, Fraction(0)) // 1),
                needed_without_spine=not possible or link in kept_without,
            )
            for link in links
        ),
        removable=len(links) - len(after),
        inflation=_inflation(growth, now, network_share),
        removable_without_spine=len(links) - len(kept_without) if possible else None,
        inflation_without_spine=_inflation(longest, now, network_share),
        spine_bytes=sum(demand.spine_of.values()),
    )


def _without_spine(
    own: Mapping[str, Sequence[Link]],
    totals: Mapping[str, int],
    speed: Mapping[Link, Fraction],
    leaf: Mapping[Link, str],
    of_rail: Mapping[str, int],
    limit: Fraction,
) -> tuple[set[Link], Fraction]:
    """Links that servers which talk to each other need if no spine link stays, and how long the busiest of them takes.

    Longer than the limit: they cannot do without.  `own` are the servers' links, the first ones to stay first.
    """
    at: defaultdict[str, defaultdict[str, list[Link]]] = defaultdict(lambda: defaultdict(list))
    for server, found in own.items():
        for link in found:
            at[leaf[link]][server].append(link)
    shares = {
        name: min(limit * sum(speed[link] for link in there) / totals[server] for server, there in servers.items())
        for name, servers in at.items()
        if len(servers) == len(own)
    }
    carried = {name: sum(of_rail[rail] for rail in {link[1] for each in at[name].values() for link in each})
               for name in shares}  # fmt: skip
    order = sorted(shares, key=lambda name: (-shares[name], -carried[name], _natural(name)))
    common = _fewest(order, [shares[name] for name in order], 1 if own else 0)
    scale = sum((shares[name] for name in common), start=Fraction(0))
    if own and not scale:
        return set(), limit + 1
    kept: set[Link] = set()
    longest = Fraction(0)
    for name in common:
        for server, there in at[name].items():
            part = totals[server] * shares[name] / scale
            stay = _fewest(there, [speed[link] * limit for link in there], part)
            kept.update(stay)
            longest = max(longest, part / sum(speed[link] for link in stay))
    return kept, longest


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a job's servers send to each other."""

    out: Mapping[Link, int]
    into: Mapping[Link, int]
    together: tuple[tuple[str, ...], ...]
    """Servers that talk to each other, also by others of them; none is in two."""
    spine_of: Mapping[str, int]
    """By the first one of such servers: what goes between leaf switches."""


def _find_demand(pairs: Pairs, place_of_gpu: Sequence[Link], leaf: Mapping[Link, str]) -> _Demand:
    out: defaultdict[Link, int] = defaultdict(int)
    into: defaultdict[Link, int] = defaultdict(int)
    server = _numbered([place[0] for place in place_of_gpu])
    at = _numbered([leaf[place] for place in place_of_gpu])
    gpus = len(place_of_gpu)
    for found, by_gpu in ((out, pairs.sent_apart(gpus, server)), (into, pairs.received_apart(gpus, server))):
        for link, count in zip(place_of_gpu, by_gpu.tolist(), strict=True):
            found[link] += count
    names = list(dict.fromkeys(place[0] for place in place_of_gpu))
    together = _together(len(names), server[pairs.source], server[pairs.destination])
    first = {number: several[0] for several in together for number in several}
    spine: defaultdict[str, int] = defaultdict(int)
    for number, count in zip(server.tolist(), pairs.sent_apart(gpus, server, at).tolist(), strict=True):
        spine[names[first[number]]] += count
    return _Demand(out, into, tuple(tuple(names[number] for number in several) for several in together), spine)


def _together(servers: int, source: NDArray[np.int32], destination: NDArray[np.int32]) -> list[list[int]]:
    """Servers that talk to each other, each once, in their order."""
    group = np.arange(servers)
    ends = np.divmod(np.unique(source.astype(np.int64) * servers + destination), servers)
    while True:
        lowest = np.minimum(*(group[end] for end in ends))
        before = group.copy()
        for end in ends:
            np.minimum.at(group, end, lowest)
        if (group == before).all():
            break
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, first in enumerate(group.tolist()):
        found[first].append(number)
    return list(found.values())


def _numbered(names: Sequence[str]) -> NDArray[np.int32]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int32)


def _fewest(order: Sequence[_T], worth: Sequence[Fraction], needed: int | Fraction) -> list[_T]:
    """The first ones whose worth reaches what is needed; all, where none do."""
    found: list[_T] = []
    reached = Fraction(0)
    for one, value in zip(order, worth, strict=True):
        if reached >= needed:
            break
        found.append(one)
        reached += value
    return found


def _inflation(after: Fraction, before: Fraction, share: float) -> float:
    return max(0.0, float(after / before - 1) * share) if before else 0.0


def _natural_link(link: Link) -> tuple[tuple[int, str], tuple[int, str]]:
    return _natural(link[0]), _natural(link[1])


def _natural(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (1 << 30, text)
