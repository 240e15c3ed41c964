"""Finds ranks of a communicator that are held up in another communicator, and what holds up that one.

A job's ranks are in several communicators at once.  One that is stopped keeps its peers waiting in one of them, these
keep theirs waiting in others, and so on: only the first of them waits for a culprit.

So this begins with those who are to blame and goes from communicator to communicator as they wait: each process and
each communicator is visited once, however many paths cross, so that the shortest path is found.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from railscope.agent.node.stalls.evidence import Elsewhere, GonePeer, ProcessFacts, RankFacts


@dataclass(frozen=True, slots=True)
class Ranks:
    """What is asked about the ranks of this host."""

    by_comm: Mapping[str, Sequence[RankFacts]]
    """Of communicators that have a name."""
    by_process: Mapping[int, Sequence[RankFacts]]
    """By pid."""
    facts_of: Callable[[int], ProcessFacts | None]
    """Of a process, by pid; None: it has ended."""
    gone_of: Callable[[str], GonePeer | None]
    """By the communicator's name: those whose process has ended."""
    lost_a_peer: Callable[[int], bool]
    """By pid: whether a process at the other end of its connections has ended."""
    perhaps_in: Callable[[int], Sequence[RankFacts]] | None = None
    """By pid: its ranks in which something is in flight, or whose communicator lost a peer; None: any may be one."""

    def runs(self, pid: int) -> bool:
        facts = self.facts_of(pid)
        return facts is not None and facts.condition == "running"


class Dependencies:
    """Which communicators of this host are held up, as of one look."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._places: dict[int, tuple[RankFacts, ...]] = {}
        self._lost: dict[int, bool] = {}
        self._why: dict[str, str] | None = None

    def waiting_elsewhere(self, peers: Iterable[RankFacts]) -> tuple[Elsewhere, ...]:
        """Those of these ranks that have nothing in flight, and whose process is held up in another communicator.

        A rank whose own process may not run is none of them: no other rank holds it up.
        """
        found = []
        for peer in peers:
            if peer.in_flight is not None:
                continue
            place = self._place_besides(peer)
            if place is not None and self._ranks.runs(peer.pid):
                found.append(Elsewhere(peer.pid, peer.name, place.comm, self._held_up().get(place.comm, "")))
            elif len(self._ranks.by_process.get(peer.pid, ())) > 1 and self._lost_a_peer(peer.pid):
                why = "connections of its process were closed at their other end"
                found.append(Elsewhere(peer.pid, peer.name, "", why))
        return tuple(found)

    def _place_besides(self, rank: RankFacts) -> RankFacts | None:
        """Where else the process of a rank has something in flight, or lost a peer: rather where it is known why."""
        first = None
        for place in self._places_of(rank.pid):
            if place.comm != rank.comm:
                if place.comm in self._held_up():
                    return place
                first = first or place
        return first

    def _places_of(self, pid: int) -> tuple[RankFacts, ...]:
        """Where a process has something in flight, or lost a peer; first those of which it is known what holds them."""
        if pid not in self._places:
            ranks = self._ranks
            perhaps = ranks.by_process.get(pid, ()) if ranks.perhaps_in is None else ranks.perhaps_in(pid)
            places = [one for one in perhaps if self._is_in(one)]
            # Most processes are nowhere: what holds up communicators takes a look at all of them.
            held_up = self._held_up() if places else {}
            self._places[pid] = tuple(sorted(places, key=lambda one: one.comm not in held_up))
        return self._places[pid]

    def _is_in(self, rank: RankFacts) -> bool:
        flight = rank.in_flight
        in_it = flight is not None and flight.one_of == 1 and not flight.missing
        return in_it or self._ranks.gone_of(rank.comm) is not None

    def _lost_a_peer(self, pid: int) -> bool:
        if pid not in self._lost:
            self._lost[pid] = self._ranks.lost_a_peer(pid)
        return self._lost[pid]

    def _held_up(self) -> Mapping[str, str]:
        """What holds a communicator up in the end, in words, by its name; those of which that is not seen are left
        out."""
        if self._why is None:
            self._why = self._follow(self._first_causes())
        return self._why

    def _first_causes(self) -> dict[str, str]:
        """Communicators that wait for a rank which no other communicator holds up."""
        stopped = {
            pid: facts.condition
            for pid in self._ranks.by_process
            if (facts := self._ranks.facts_of(pid)) is not None and facts.condition != "running"
        }
        why = {}
        for comm, ranks in self._ranks.by_comm.items():
            gone = self._ranks.gone_of(comm)
            held = next((one for one in ranks if one.pid in stopped), None)
            if gone is not None:
                why[comm] = gone.sentence
            elif held is not None:
                why[comm] = f"process {held.pid} of its rank {held.name} is {stopped[held.pid]}"
        return why

    def _follow(self, why: dict[str, str]) -> dict[str, str]:
        """The same, with communicators that wait for a process that waits in one of these."""
        waits_in: defaultdict[str, list[int]] = defaultdict(list)
        for comm, ranks in self._ranks.by_comm.items():
            waits_in[comm] = [one.pid for one in ranks if self._is_in(one)]
        come_to: set[int] = set()
        ahead = deque(why)
        while ahead:
            comm = ahead.popleft()
            for pid in waits_in[comm]:
                if pid in come_to:
                    continue
                come_to.add(pid)
                for idle in self._ranks.by_process[pid]:
                    if idle.in_flight is None and idle.comm in self._ranks.by_comm and idle.comm not in why:
                        why[idle.comm] = f"and that because of communicator {comm}: {why[comm]}"
                        ahead.append(idle.comm)
        return why
