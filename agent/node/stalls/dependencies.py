"""Who of a communicator's ranks on this host is held up in another communicator, and by what in the end.

A job's ranks are in several communicators at once.  One that is stopped keeps its peers waiting in one of them, these
keep theirs waiting in others, and so on: only the first of them waits for somebody who is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from railscope.agent.node.stalls.evidence import Elsewhere, GonePeer, ProcessFacts, RankFacts


@dataclass(frozen=True, slots=True)
class Ranks:
    """What is asked about the ranks of this host."""

    of_comm: Callable[[str], Sequence[RankFacts]]
    """By the communicator's name."""
    of_process: Callable[[int], Sequence[RankFacts]]
    """By pid."""
    facts_of: Callable[[int], ProcessFacts | None]
    """Of a process, by pid; None: it has ended."""
    gone_of: Callable[[str], Sequence[GonePeer]]
    """By the communicator's name: those whose process has ended."""
    lost_a_peer: Callable[[int], bool]
    """By pid: whether a process at the other end of its connections has ended."""

    def runs(self, rank: RankFacts) -> bool:
        facts = self.facts_of(rank.pid)
        return facts is not None and facts.condition == "running"

    def places(self, rank: RankFacts) -> list[RankFacts]:
        """Where else the process of a rank with nothing in flight has something in flight, or lost a peer."""
        if rank.in_flight is not None:
            return []
        others = [one for one in self.of_process(rank.pid) if one.comm != rank.comm]
        return [
            one
            for one in others
            if self.gone_of(one.comm)
            or (one.in_flight is not None and one.in_flight.one_of == 1 and not one.in_flight.missing)
        ]


def waiting_elsewhere(peers: Iterable[RankFacts], ranks: Ranks) -> tuple[Elsewhere, ...]:
    """Those of these ranks that have nothing in flight, and whose process is held up in another communicator.

    A rank whose own process may not run is none of them: nobody but itself holds it up.
    """
    found = []
    for peer in peers:
        ends = [(place, _end(place, ranks, frozenset({peer.pid}), set())) for place in ranks.places(peer)]
        if ends and ranks.runs(peer):
            place, why = max(ends, key=lambda one: bool(one[1]))
            found.append(Elsewhere(peer.pid, peer.name, place.comm, why))
        elif peer.in_flight is None and len(ranks.of_process(peer.pid)) > 1 and ranks.lost_a_peer(peer.pid):
            why = "a process at the other end of its connections has ended"
            found.append(Elsewhere(peer.pid, peer.name, "", why))
    return tuple(found)


def _end(place: RankFacts, ranks: Ranks, passed: frozenset[int], seen: set[str]) -> str:
    """What holds a rank up in the end, in words; empty: that is not seen here.

    `passed`: pids on the way; `seen`: communicators that were looked at, each once, as ways may cross many times.
    """
    if place.comm in seen:
        return ""
    seen.add(place.comm)
    for gone in ranks.gone_of(place.comm):
        return gone.sentence
    peers = [one for one in ranks.of_comm(place.comm) if one.pid not in passed]
    for peer in peers:
        facts = ranks.facts_of(peer.pid)
        if facts is not None and facts.condition != "running":
            return f"process {peer.pid} of its rank {peer.name} is {facts.condition}"
    further = ((peer, one) for peer in peers for one in ranks.places(peer))
    ways = ((one.comm, _end(one, ranks, passed | {peer.pid}, seen)) for peer, one in further)
    return next((f"and that because of communicator {comm}: {why}" for comm, why in ways if why), "")
