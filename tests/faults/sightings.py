"""What the agents of a cluster call stalled, moment by moment, and whether it is right.

An agent's accusation is one series `railscope_comm_stall_info`: a rank waits, for this cause, because of that rank or
rail.  An accusation is right when it names the right one for an expected cause; it is harmless when it only says that
a rank waits for others; anything else is wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.faults.cluster import Agent, Cluster
from tests.faults.scenarios import Expected
from tests.faults.web import WebError

Ranks = Mapping[tuple[str, str], str]
"""A job's own number, by communicator and rank in it."""
_POLL_SECONDS: Final = 0.2
_RAIL_CAUSES: Final = frozenset({"rail_down", "rail_slow", "rail_lossy", "rail_filtered", "rail_mtu"})
_WAITING_CAUSES: Final = frozenset({"rank_behind", "unknown", "unseen"})


@dataclass(frozen=True, slots=True)
class Accusation:
    """One series of `comm_stall_info` on one host."""

    host: int
    comm: str
    rank: str
    """Who waits, or stands still; here and below the job's numbers, where its ranks have several communicators."""
    cause: str
    strength: str
    blamed_rank: str
    rail: str

    def __str__(self) -> str:
        blamed = [f"rank {self.blamed_rank}"] if self.blamed_rank else []
        blamed += [f"rail {self.rail}"] if self.rail else []
        words = f"host{self.host}: rank {self.rank} {self.cause} {' '.join(blamed)}".rstrip()
        return f"{words} (weak)" if self.strength == "weak" else words

    def is_right(self, expected: Expected) -> bool:
        """Whether this is what the scenario's fault must bring to light."""
        if self.cause not in expected.causes or (expected.host is not None and self.host != expected.host):
            return False
        # At another host the rank that is behind is seen by its absence: its number may be unknown there.
        rank = expected.rank is None or self.blamed_rank == str(expected.rank)
        if expected.host is None and self.blamed_rank == "":
            rank = True
        return rank and (expected.rail is None or self.rail == str(expected.rail))

    def only_waits(self, expected: Expected) -> bool:
        """Whether it is a host's word that its rank waits where another one writes: it cannot know why."""
        return (
            expected.writer is not None
            and self.host != 0
            and self.cause == "rank_behind"
            and self.rail == ""
            and self.blamed_rank in ("", str(expected.writer))
        )

    def is_wrong(self, expected: Expected) -> bool:
        """Whether it accuses somebody innocent."""
        if expected.rank is not None:
            return self.rail != "" or self.blamed_rank not in ("", str(expected.rank))
        if expected.rail is not None:
            if self.cause in _RAIL_CAUSES:
                return self.rail != str(expected.rail)
            # Of two ranks each may say that it waits for the other; none may say that it is behind itself.
            return self.cause not in _WAITING_CAUSES or self.blamed_rank == self.rank
        return self.cause not in expected.causes


@dataclass(frozen=True, slots=True)
class Moment:
    """What all agents said at one time."""

    at: float
    """time.monotonic()."""
    accusations: frozenset[Accusation]


class Watcher:
    """Asks all agents again and again; `comms` are the only communicators that count."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.comms: Collection[str] = ()
        self.ranks: Ranks = {}
        """Of jobs whose ranks have several communicators; what is not in here has the same number in both."""
        self.moments: list[Moment] = []
        self.evidence: dict[Accusation, tuple[str, ...]] = {}
        """What the agent gave as its reasons when it said so first."""

    def look(self) -> Moment:
        """Ask all agents once.  One that does not answer, as while it is restarted, says nothing."""
        found = set()
        for agent in self._cluster.agents:
            try:
                samples = agent.samples("comm_stall_info")
            except WebError:
                continue
            for sample in samples:
                accusation = _accusation(agent.host.index, sample.labels)
                if accusation.comm in self.comms:
                    own = replace(
                        accusation,
                        rank=job_rank(self.ranks, accusation.comm, accusation.rank),
                        blamed_rank=job_rank(self.ranks, accusation.comm, accusation.blamed_rank),
                    )
                    found.add(own)
                    if own not in self.evidence:
                        self.evidence[own] = _evidence(agent, accusation)
        self.moments.append(Moment(time.monotonic(), frozenset(found)))
        return self.moments[-1]

    def watch(self, seconds: float, enough: Callable[[Moment], bool] = lambda _: False) -> Moment | None:
        """Look until `enough` (returns that moment) or the time is over (None)."""
        deadline = time.monotonic() + seconds
        while True:
            moment = self.look()
            if enough(moment):
                return moment
            if moment.at > deadline:
                return None
            time.sleep(_POLL_SECONDS)

    def in_two_places(self, at: float, but: int) -> frozenset[str]:
        """Ranks, but for one, that were said to stand in two communicators at once after a time."""
        found = set()
        for moment in self.moments:
            stands = Counter({(one.rank, one.comm) for one in moment.accusations if moment.at >= at})
            ranks = Counter(rank for rank, _ in stands)
            found |= {rank for rank, places in ranks.items() if places > 1 and rank != str(but)}
        return frozenset(found)

    def since(self, at: float) -> frozenset[Accusation]:
        """Everything that was said after a time."""
        return frozenset(one for moment in self.moments if moment.at >= at for one in moment.accusations)


def _evidence(agent: Agent, accusation: Accusation) -> tuple[str, ...]:
    """Sentences of the stall on the agent's page; none if it has ended in the meantime."""
    try:
        stalls = agent.stalls()["stalls"]
    except WebError:
        return ()
    return tuple(
        str(sentence)
        for stall in stalls
        if (stall["comm"], str(stall["rank"])) == (accusation.comm, accusation.rank)
        for sentence in stall["evidence"]
    )


def comms_of(cluster: Cluster, pids: Collection[int]) -> frozenset[str]:
    """The communicators of some processes, those that are still being made too, as the agents name them."""
    wanted = {str(pid) for pid in pids}
    return frozenset(
        sample.labels["comm"]
        for agent in cluster.agents
        for sample in agent.samples("comm_info", "call_inside_seconds")
        if sample.labels["pid"] in wanted
    )


def job_rank(ranks: Ranks, comm: str, rank: str) -> str:
    """The job's number of a communicator's rank."""
    return ranks.get((comm, rank), rank)


def ranks_of(cluster: Cluster, pids: Sequence[int]) -> Ranks:
    """How a job's ranks are numbered in its communicators; `pids` in the job's own order."""
    own = {str(pid): str(rank) for rank, pid in enumerate(pids)}
    return {
        (sample.labels["comm"], sample.labels["rank"]): own[sample.labels["pid"]]
        for agent in cluster.agents
        for sample in agent.samples("comm_info")
        if sample.labels["pid"] in own
    }


def _accusation(host: int, labels: Mapping[str, str]) -> Accusation:
    return Accusation(
        host,
        labels["comm"],
        labels["rank"],
        labels["cause"],
        labels.get("strength", ""),
        labels.get("blamed_rank", ""),
        labels.get("rail", ""),
    )
