"""Finds ranks of a communicator that are held up in another communicator, and what holds up that one.

A job's ranks are in several communicators at once.  One that is stopped keeps its peers waiting in one of them, these
keep theirs waiting in others, and so on: only the first of them waits for a culprit.

So this begins with those who are to blame and goes from communicator to communicator as they wait: each process and
each communicator is visited once, however many paths cross, so that the shortest path is found.  Only communicators in
which something is in flight are visited; of the others it is found out when one is asked about.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from railscope.agent.node.stalls.evidence import Elsewhere, GonePeer, ProcessFacts, RankFacts

_MOST_NAMED: Final = 4
"""Communicators of a chain; of a longer one only that at its beginning: else the words of all grow with its square."""


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
        self._stopped: dict[int, str] | None = None
        self._held: dict[int, tuple[int, str]] | None = None
        self._why: dict[str, str | None] = {}
        """By the communicator's name, of those that were asked about."""
        self._chains: dict[str, tuple[int, str]] = {}
        """Of a communicator that another one holds up: how many lie between it and what is to blame, the first one of
        these included, and that one's name."""

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
                found.append(Elsewhere(peer.pid, peer.name, place.comm, self._held_up(place.comm) or ""))
            elif len(self._ranks.by_process.get(peer.pid, ())) > 1 and self._lost_a_peer(peer.pid):
                why = "connections of its process were closed at their other end"
                found.append(Elsewhere(peer.pid, peer.name, "", why))
        return tuple(found)

    def _place_besides(self, rank: RankFacts) -> RankFacts | None:
        """Where else the process of a rank has something in flight, or lost a peer: rather where it is known why."""
        return next((place for place in self._places_of(rank.pid) if place.comm != rank.comm), None)

    def _places_of(self, pid: int) -> tuple[RankFacts, ...]:
        """Where a process has something in flight, or lost a peer; first those of which it is known what holds them."""
        if pid not in self._places:
            places = self._in_flight_of(pid)
            self._places[pid] = tuple(sorted(places, key=lambda one: self._held_up(one.comm) is None))
        return self._places[pid]

    def _in_flight_of(self, pid: int) -> list[RankFacts]:
        """Ranks of a process in which something is in flight, or whose communicator lost a peer."""
        ranks = self._ranks
        perhaps = ranks.by_process.get(pid, ()) if ranks.perhaps_in is None else ranks.perhaps_in(pid)
        return [one for one in perhaps if self._is_in(one)]

    def _is_in(self, rank: RankFacts) -> bool:
        flight = rank.in_flight
        in_it = flight is not None and flight.one_of == 1 and not flight.missing
        return in_it or self._ranks.gone_of(rank.comm) is not None

    def _lost_a_peer(self, pid: int) -> bool:
        if pid not in self._lost:
            self._lost[pid] = self._ranks.lost_a_peer(pid)
        return self._lost[pid]

    def _held_up(self, comm: str) -> str | None:
        """What holds a communicator up in the end, in words; None: that is not seen."""
        if comm not in self._why:
            self._why[comm] = self._first_cause(comm) or self._later_cause(comm)
        return self._why[comm]

    def _first_cause(self, comm: str) -> str | None:
        """The rank for which a communicator waits, and which no other communicator holds up, in words."""
        gone = self._ranks.gone_of(comm)
        if gone is not None:
            return gone.sentence
        if self._stopped is None:
            facts = ((pid, self._ranks.facts_of(pid)) for pid in self._ranks.by_process)
            self._stopped = {pid: one.condition for pid, one in facts if one is not None and one.condition != "running"}
        stopped = self._stopped
        held = next((one for one in self._ranks.by_comm.get(comm, ()) if one.pid in stopped), None) if stopped else None
        return None if held is None else f"process {held.pid} of its rank {held.name} is {stopped[held.pid]}"

    def _later_cause(self, comm: str) -> str | None:
        """The communicator in which a rank of this one waits that makes no call here, in words."""
        held = self._held_processes()
        idle = (one.pid for one in self._ranks.by_comm.get(comm, ()) if one.in_flight is None) if held else ()
        first = min((held[pid] for pid in idle if pid in held), default=None)
        return None if first is None else self._because_of(first[1])

    def _because_of(self, comm: str) -> str:
        between, first = self._chains.get(comm, (0, comm))
        if between >= _MOST_NAMED:
            return f"and that, through {between} others, because of communicator {first}: {self._held_up(first)}"
        return f"and that because of communicator {comm}: {self._held_up(comm)}"

    def _held_processes(self) -> Mapping[int, tuple[int, str]]:
        """Processes that wait in a communicator which is held up, by pid: how near to the cause, and in which."""
        if self._held is None:
            held = self._held = {}
            waits_in, idle_in = self._waits()
            ahead = deque(comm for comm in waits_in if self._first_cause(comm) is not None)
            come_to = set(ahead)
            while ahead:
                comm = ahead.popleft()
                for pid in waits_in[comm]:
                    if pid in held:
                        continue
                    held[pid] = len(held), comm
                    for other in idle_in[pid]:
                        if other not in come_to:
                            come_to.add(other)
                            self._why[other] = self._because_of(comm)
                            between, first = self._chains.get(comm, (0, comm))
                            self._chains[other] = between + 1, first
                            ahead.append(other)
        return self._held

    def _waits(self) -> tuple[Mapping[str, list[int]], Mapping[int, list[str]]]:
        """Processes that have something in flight in each communicator, and where among these each makes no call.

        Communicators in which nothing is in flight are left out: mostly that is all but a few of thousands.
        """
        by_comm = self._ranks.by_comm
        waits_in: defaultdict[str, list[int]] = defaultdict(list)
        idle_in: defaultdict[int, list[str]] = defaultdict(list)
        for pid in self._ranks.by_process:
            for one in self._in_flight_of(pid):
                if one.comm in by_comm:
                    waits_in[one.comm].append(pid)
        for comm in waits_in:
            for one in by_comm[comm]:
                if one.in_flight is None:
                    idle_in[one.pid].append(comm)
        return waits_in, idle_in
