"""Made-up fleets for tests of the verdict: hosts with ranks and two rails each, healthy until a test says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from railscope.agent.cluster.fleet.facts import (
    Agent,
    BriefStall,
    Fleet,
    LongWait,
    Moving,
    Rail,
    Rank,
    Stall,
    StallHistory,
)
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.words import Finding, verdict_of

NOW: Final = 1_000_000.0
COMM: Final = "00000000000000aa"
OTHER: Final = "00000000000000bb"


def stall(cause: str, **more: str) -> Stall:
    return Stall(op=more.pop("op", "AllReduce"), cause=cause, strength=more.pop("strength", "strong"), **more)


@dataclass
class Fleets:
    """A fleet in the making."""

    hosts: int = 2
    ranks_per_host: int = 1
    ranks: list[Rank] = field(default_factory=list)
    rails: list[Rail] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    moving: list[Moving] = field(default_factory=list)
    waiting: list[LongWait] = field(default_factory=list)
    history: list[StallHistory] = field(default_factory=list)
    brief: list[BriefStall] = field(default_factory=list)
    scrape_seconds: float = 1.0
    at: float = NOW

    def __post_init__(self) -> None:
        for host in range(self.hosts):
            self.agents.append(Agent(f"host{host}", up=True, clock_offset_seconds=-0.2))
            for rail in range(2):
                self.rails.append(
                    Rail(
                        f"host{host}",
                        str(rail),
                        f"eth{rail}",
                        up=True,
                        speed=1.25e9,
                        transmit=0.0,
                        usual_transmit=1e8,
                        backlog_bytes=0.0,
                        round_trip_seconds=0.0002,
                        retransmitted_ratio=0.0,
                    )
                )

    def communicator(self, comm: str = COMM, *, pids: int = 100, hosts: Iterable[int] | None = None) -> Fleets:
        """Add one with a rank (or more) on each host, all waiting in operation 1,205 for 40 seconds."""
        places = [
            host for host in (hosts if hosts is not None else range(self.hosts)) for _ in range(self.ranks_per_host)
        ]
        for number, host in enumerate(places):
            self.ranks.append(
                Rank(
                    comm,
                    str(number),
                    f"host{host}",
                    nranks=len(places),
                    pid=str(pids + number),
                    gpu=str(number % self.ranks_per_host),
                    enqueued=1205,
                    completed=1204,
                    inflight_seconds=40.0,
                    position=Position(1205),
                    calls_per_second=0.0,
                    usual_calls_per_second=50.0,
                    scraped=NOW - 0.5,
                )
            )
        return self

    def rank(self, number: int, comm: str = COMM, **changes: Any) -> Fleets:
        """Change facts of one rank."""
        self._change(self.ranks, lambda one: (one.comm, one.rank) == (comm, str(number)), changes)
        return self

    def behind(self, number: int, comm: str = COMM, by: int = 1) -> Fleets:
        """This rank did not enter the last operation, and has nothing under way."""
        at = 1205 - by
        return self.rank(
            number, comm, enqueued=at, completed=at, position=Position(at), inflight_seconds=0.0, stall=None
        )

    def all_say(self, cause: str, comm: str = COMM, **more: str) -> Fleets:
        """Every host calls every rank of the communicator stalled for this cause."""
        self.ranks = [replace(one, stall=stall(cause, **more)) if one.comm == comm else one for one in self.ranks]
        return self

    def was_stalled(self, comm: str = COMM, *, ago: float, for_: float = 6.0, times: int = 1, by: Stall) -> Fleets:
        """Until so long ago its last host called it stalled."""
        last = self.at - ago
        self.history.append(StallHistory(comm, times, last - for_, last, last, (("host1", "1", by),)))
        return self

    def wrote(self, comm: str) -> Fleets:
        """Within the window one of its ranks wrote to storage and made no call."""
        self._change(self.history, lambda one: one.comm == comm, {"wrote": True})
        return self

    def rail(self, host: int, rail: int, **changes: Any) -> Fleets:
        self._change(self.rails, lambda one: (one.host, one.rail) == (f"host{host}", str(rail)), changes)
        return self

    def lose_host(self, host: int) -> Fleets:
        """Its agent is silent: what it said is history."""
        name = f"host{host}"
        self._change(self.agents, lambda one: one.host == name, {"up": False, "silent_seconds": 50.0})
        self.rails = [one for one in self.rails if one.host != name]
        gone = {"enqueued": None, "completed": None, "inflight_seconds": None, "position": None, "stall": None}
        self._change(self.ranks, lambda one: one.host == name, {**gone, "present": False, "scraped": None})
        return self

    def _change(self, facts: list[Any], which: Callable[[Any], bool], changes: dict[str, Any]) -> None:
        assert any(map(which, facts)), "there is none to change"
        facts[:] = [replace(one, **changes) if which(one) else one for one in facts]

    def made(self) -> Fleet:
        return Fleet(
            self.at,
            300.0,
            self.scrape_seconds,
            tuple(self.agents),
            tuple(self.ranks),
            tuple(self.rails),
            tuple(self.moving),
            tuple(self.waiting),
            communicators=len({one.comm for one in self.ranks}),
            history=tuple(sorted(self.history, key=lambda one: -one.last)),
            brief=tuple(self.brief),
        )


def only(fleets: Fleets) -> Finding:
    """The one root cause of their verdict."""
    verdict = verdict_of(fleets.made())
    assert verdict.problem
    (finding,) = verdict.findings
    return finding


def waiting(hosts: int = 2) -> Fleets:
    """A communicator in which every rank waits and no host knows why."""
    return Fleets(hosts).communicator().all_say("unknown")
