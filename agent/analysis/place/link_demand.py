"""Computes how many rail and spine links a job needs: how many can go before an iteration grows by more than ε.

A rail link joins one server's NIC to its leaf switch; spine links join leaf switches.  The demand is the matrix: what
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

Two answers follow, both exact under the model:

- While the spine stays, servers are independent.  A server needs links whose rates add up to its bytes / L; the fewest
  that do are its fastest ones, since any set of as many links has at most their rate (so there is nothing to search,
  whatever the rates; for equal links it is a division).
- Without a spine, bytes must arrive on the rail that they left on, so that all servers split their bytes over the same
  rails in the same proportions.  Rail r can take the share u(r) = min over servers of L × rate / bytes, and rails are
  enough if their shares add up to 1: the fewest that do are those of the largest u.  Then no spine link is needed.

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
    """What changes rails between servers now: the spine carries it, unless NVLink does before."""


def find_link_demand(
    pairs: Pairs,
    place_of_gpu: Sequence[Link],
    rates: Mapping[Link, int],
    epsilon: float,
    network_share: float = 1.0,
) -> LinkAnswer:
    """Which links between servers a job needs: the largest sets whose removal keeps an iteration's growth within ε.

    Args:
        pairs: wire bytes between GPUs.
        place_of_gpu: by GPU, the link that its bytes leave its server by.
        rates: of every link, bytes per second each way; links without GPUs of their own may be among them.
        epsilon: part of the iteration by which it may grow, such as 0.05.
        network_share: the part of the iteration that communication between servers takes, above 0 and up to 1.
    """
    out, into, spine = _demand(pairs, place_of_gpu)
    links = sorted(set(rates) | set(place_of_gpu), key=_natural_link)
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

    after: dict[Link, Fraction] = {}
    for server, found in own.items():
        order = sorted(found, key=lambda link: (-speed[link], -of_rail[link[1]], _natural(link[1])))
        stay = _fewest(order, [speed[link] * limit for link in order], totals[server])
        whole = sum((speed[link] for link in stay), start=Fraction(0))
        for link in stay:
            moved = len(stay) < len(found)
            after[link] = totals[server] * speed[link] / whole if moved else Fraction(busy[link])

    rails = sorted(of_rail, key=_natural)
    senders = [server for server, total in totals.items() if total]
    shares = {rail: _share(rail, senders, totals, speed, limit) for rail in rails}
    by_share = sorted(rails, key=lambda rail: (-shares[rail], -of_rail[rail], _natural(rail)))
    common = set(_fewest(by_share, [shares[rail] for rail in by_share], 1 if senders else 0))
    scale = sum((shares[rail] for rail in common), start=Fraction(0))
    as_now = len(common) == len(rails) and not spine
    longest = now if as_now or not senders else limit / scale if scale else limit
    possible = as_now or not senders or scale >= 1
    kept_without = {link for link in links if not possible or (link[1] in common and totals[link[0]])}
    growth = max((load / speed[link] for link, load in after.items()), default=Fraction(0))
    return LinkAnswer(
        epsilon=epsilon,
        network_share=network_share,
        links=tuple(
            RailLink(
                server=link[0],
                rail=link[1],
                transmit_bytes=out[link],
                receive_bytes=into[link],
                needed=link in after,
                busier_bytes_after=-int(-after.get(link, Fraction(0)) // 1),
                needed_without_spine=link in kept_without,
            )
            for link in links
        ),
        removable=len(links) - len(after),
        inflation=_inflation(growth, now, network_share),
        removable_without_spine=len(links) - len(kept_without) if possible else None,
        inflation_without_spine=_inflation(longest, now, network_share),
        spine_bytes=spine,
    )


def _share(
    rail: str, senders: Sequence[str], totals: Mapping[str, int], speed: Mapping[Link, Fraction], limit: Fraction
) -> Fraction:
    """The part of every server's bytes that a rail can take."""
    return min((limit * speed.get((one, rail), Fraction(0)) / totals[one] for one in senders), default=Fraction(0))


def _demand(pairs: Pairs, place_of_gpu: Sequence[Link]) -> tuple[Mapping[Link, int], Mapping[Link, int], int]:
    out: defaultdict[Link, int] = defaultdict(int)
    into: defaultdict[Link, int] = defaultdict(int)
    server, rail = (_numbered([place[part] for place in place_of_gpu]) for part in (0, 1))
    gpus = len(place_of_gpu)
    for found, by_gpu in ((out, pairs.sent_apart(gpus, server)), (into, pairs.received_apart(gpus, server))):
        for link, count in zip(place_of_gpu, by_gpu.tolist(), strict=True):
            found[link] += count
    return out, into, int(pairs.sent_apart(gpus, server, rail).sum())


def _numbered(names: Sequence[str]) -> NDArray[np.int32]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int32)


def _fewest(order: Sequence[_T], worth: Sequence[Fraction], needed: int) -> list[_T]:
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
