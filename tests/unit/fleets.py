"""Made-up fleets for tests of the verdict: hosts with ranks and two rails each, healthy until a test says otherwise.

And a case of their tables: a fleet, and what the verdict on it says and does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import pytest
from hypothesis import strategies as st

from railscope.agent.cluster.fleet.facts import (
    Agent,
    BriefStall,
    FailedOver,
    Fleet,
    HardwareSign,
    LongWait,
    Moving,
    Rail,
    Rank,
    SilentProcess,
    SlowRank,
    Stall,
    StallHistory,
)
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.finding import Finding
from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.rank_identity import RankIdentity, rank_identity_from_labels
from railscope.agent.facts.slowness import Slowness
from railscope.agent.facts.stall import LastCollectives

NOW: Final = 1_000_000.0
SIZES: Final = (2, 4)
"""Hosts of a fleet, where a case holds for few and for more."""
CALL_CAUSES: Final = (
    *(Cause.DEADLOCK, Cause.RANKS_DISAGREE, Cause.PEER_LEFT, Cause.INSIDE_CALL),
    Cause.UNSEEN_WORK_STUCK,
)
"""What ranks call, or are inside of, decides these."""
SAME: Final = ("AllReduce of 8 bytes float32",) * 3
COMM: Final = "00000000000000aa"
OTHER: Final = "00000000000000bb"
_OF_JOB: Final = frozenset(("job", "world_rank", "user"))
_OF_IDENTITY: Final = frozenset(field.name for field in fields(RankIdentity)) - _OF_JOB


def stall(cause: str, **more: str) -> Stall:
    return Stall(op=more.pop("op", "AllReduce"), cause=cause, strength=more.pop("strength", "strong"), **more)


def identity(comm: str, rank: str, **labels: str) -> RankIdentity:
    """With these labels of its comm_info."""
    return rank_identity_from_labels(comm, rank, labels, ())


def _changed(one: Any, **changes: Any) -> Any:
    """The fact with other fields; of a rank those of its identity too, and what is told of its job."""
    if isinstance(one, Rank):
        job = {**dict(one.identity.job), **{name: changes.pop(name) for name in _OF_JOB & changes.keys()}}
        own = {name: changes.pop(name) for name in _OF_IDENTITY & changes.keys()}
        changes["identity"] = replace(one.identity, **own, job=tuple(job.items()))
    return replace(one, **changes)


@dataclass
class Fleets:
    """A fleet in the making."""

    hosts: int = 2
    ranks_per_host: int = 1
    ranks: list[Rank] = field(default_factory=list)
    rails: list[Rail] = field(default_factory=list)
    hardware: list[HardwareSign] = field(default_factory=list)
    agents: list[Agent] = field(default_factory=list)
    moving: list[Moving] = field(default_factory=list)
    waiting: list[LongWait] = field(default_factory=list)
    slow_ranks: list[SlowRank] = field(default_factory=list)
    failed_over: list[FailedOver] = field(default_factory=list)
    history: list[StallHistory] = field(default_factory=list)
    brief: list[BriefStall] = field(default_factory=list)
    silent: list[SilentProcess] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    """Communicators that stand with ranks in different places, and that no host calls stalled."""
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
                    identity(
                        comm,
                        str(number),
                        nranks=str(len(places)),
                        pid=str(pids + number),
                        gpu=str(number % self.ranks_per_host),
                    ),
                    f"host{host}",
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

    def each(self, **changes: Any) -> Fleets:
        """Change facts of all ranks."""
        self.ranks = [_changed(one, **changes) for one in self.ranks]
        return self

    def never_told_of(self, *numbers: int) -> Fleets:
        """These ranks have no series at all."""
        self.ranks = [one for one in self.ranks if int(one.rank) not in numbers]
        return self

    def _all_of(self, comm: str, **changes: Any) -> Fleets:
        self._change(self.ranks, lambda one: one.comm == comm, changes)
        return self

    def behind(self, number: int, comm: str = COMM, by: int = 1) -> Fleets:
        """This rank did not enter the last operation, and has nothing under way."""
        at = 1205 - by
        return self.rank(
            number, comm, enqueued=at, completed=at, position=Position(at), inflight_seconds=0.0, stall=None
        )

    def standing(self, comm: str = COMM) -> Fleets:
        """It stands, its ranks entered different numbers of operations, and no host calls it stalled."""
        self.apart.append(comm)
        return self

    def all_say(self, cause: str, comm: str = COMM, **more: str) -> Fleets:
        """Every host calls every rank of the communicator stalled for this cause."""
        self.ranks = [replace(one, stall=stall(cause, **more)) if one.comm == comm else one for one in self.ranks]
        return self

    def working(self, comm: str = COMM) -> Fleets:
        """Its ranks complete what they enter."""
        return self._all_of(comm, completed=1205, inflight_seconds=0.0, calls_per_second=2.0, moving=True)

    def slow(self, number: int, comm: str = COMM, **changes: Any) -> Fleets:
        """The others wait for this rank in all of the last 12 stretches of 5 seconds."""
        host = next(one.host for one in self.ranks if (one.comm, one.rank) == (comm, str(number)))
        since = Slowness(self.at - 60.0, 12, 12, 120.0)
        one = SlowRank(comm, str(number), host, 0.8, since, 5.0, waited_seconds=0.4, times_median=11.0)
        self.slow_ranks.append(replace(one, **changes))
        return self

    def was_stalled(self, comm: str = COMM, *, ago: float, for_: float = 6.0, times: int = 1, by: Stall) -> Fleets:
        """Until so long ago its last host called it stalled."""
        last = self.at - ago
        self.history.append(StallHistory(comm, times, last - for_, last, last, (("host1", "1", by),)))
        return self

    def silent_since(self, seconds: float, *world_ranks: str, host: int = 1, job: str = "7") -> Fleets:
        """Processes with these ranks of a job were there when the agent came, so long ago, and made no call since."""
        for number, world_rank in enumerate(world_ranks):
            self.silent.append(SilentProcess(f"host{host}", str(500 + number), job, world_rank, seconds))
        return self

    def wrote(self, comm: str) -> Fleets:
        """Within the window one of its ranks wrote to storage and made no call."""
        self._change(self.history, lambda one: one.comm == comm, {"wrote": True})
        return self

    def rail(self, host: int, rail: int, **changes: Any) -> Fleets:
        self._change(self.rails, lambda one: (one.host, one.rail) == (f"host{host}", str(rail)), changes)
        return self

    def ill(self, host: int, sentence: str, **more: Any) -> Fleets:
        """Hardware of a host is so."""
        self.hardware.append(HardwareSign(f"host{host}", sentence, **more))
        return self

    def told(self, host: int, sentence: str, *, ago: float) -> Fleets:
        """A host told of it so many seconds ago."""
        return self.ill(host, sentence, at=self.at - ago)

    def agent(self, host: int, **changes: Any) -> Fleets:
        self._change(self.agents, lambda one: one.host == f"host{host}", changes)
        return self

    def restart_agent(self, host: int) -> Fleets:
        """It was lost and is back: it knows nothing of what was before."""
        self.lose_host(host)
        self.agents[host] = Agent(f"host{host}", up=True)
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
        facts[:] = [_changed(one, **changes) if which(one) else one for one in facts]

    def made(self) -> Fleet:
        return Fleet(
            self.at,
            300.0,
            self.scrape_seconds,
            tuple(self.agents),
            tuple(self.ranks),
            tuple(self.rails),
            tuple(self.hardware),
            tuple(self.moving),
            tuple(self.waiting),
            slow=tuple(self.slow_ranks),
            failed_over=tuple(self.failed_over),
            apart=tuple(self.apart),
            communicators=len({one.comm for one in self.ranks}),
            history=tuple(sorted(self.history, key=lambda one: -one.last)),
            brief=tuple(self.brief),
            silent=tuple(self.silent),
        )


def only(fleets: Fleets) -> Finding:
    """The one root cause of their verdict."""
    verdict = make_verdict(fleets.made())
    assert verdict.problem
    (finding,) = verdict.findings
    return finding


def waiting(hosts: int = 2) -> Fleets:
    """A communicator in which every rank waits and no host knows why."""
    return Fleets(hosts).communicator().all_say("unknown")


def waits(hosts: int = 2) -> Fleets:
    """Every rank waits, and its host says so."""
    return waiting(hosts).all_say("rank_behind")


def inside(call: str, *numbers: int, hosts: int = 2, made: bool = True) -> Fleets:
    """These ranks are inside a call for 40 seconds; all have completed what they called, and wait for nothing else.

    `made` False: they have no communicator yet.
    """
    fleets = Fleets(hosts).communicator().each(completed=1205, inflight_seconds=0.0)
    for number in numbers:
        fleets.rank(number, stall=stall("inside_call", op=call), inflight_seconds=40.0)
        if not made:
            fleets.rank(number, enqueued=None, completed=None, position=None)
    return fleets


def in_unseen_work(*numbers: int, hosts: int = 2, **more: str) -> Fleets:
    """These ranks wait for their GPUs for 40 seconds; no operation of any rank is in flight."""
    fleets = Fleets(hosts).communicator().each(completed=1205, inflight_seconds=0.0)
    for number in numbers:
        said = stall("unseen_work_stuck", op="cuStreamSynchronize", strength="weak", **more)
        fleets.rank(number, stall=said, inflight_seconds=40.0)
    return fleets


def having_made(fleets: Fleets, *last: LastCollectives[str]) -> Fleets:
    """With what each of its ranks made last."""
    for rank, one in enumerate(last):
        fleets.rank(rank, last=one)
    return fleets


def gone(blaming: int) -> Stall:
    return stall("process_gone", blamed_rank=str(blaming))


def killed(*first: int) -> Fleets:
    """A job with two ranks a host whose processes are all gone; of each host, the rank that went first."""
    fleets = Fleets(len(first), 2).communicator()
    for number in range(2 * len(first)):
        fleets.rank(number, stall=gone(first[number // 2]), ended=True, inflight_seconds=None)
    return fleets


def failed_last() -> Fleets:
    """A job of four ranks that have all ended, the last of which failed."""
    return Fleets(2, 2).communicator().each(ended=True, inflight_seconds=None).rank(3, stall=gone(3))


def idle(**changes: Any) -> Fleets:
    """Every rank completed its 1,205 operations, and then the process of rank 1 was stopped; changes: of rank 0."""
    fleets = Fleets(2).communicator().each(completed=1205, inflight_seconds=0.0)
    return fleets.rank(1, stall=stall("process_stopped", blamed_rank="1", strength="weak")).rank(0, **changes)


def checkpoint(hosts: int = 2, comm: str = COMM, at: float = NOW) -> Fleets:
    """Rank 0 writes while all others wait for it."""
    fleets = Fleets(hosts, at=at).communicator(comm).all_say("rank_behind", comm)
    return fleets.behind(0, comm).rank(0, comm, writing=True)


Words = tuple[str, str]
"""Where something is said (headline, evidence, its first line, healthy, unknown, steps, why, notes), and what: a part
of a line there, its beginning `…`, `…` its end, or `=` all of it."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is said of one fleet."""

    name: str
    fleets: Fleets
    says: tuple[Words, ...] = ()
    never: tuple[Words, ...] = ()
    found: Mapping[str, object] = field(default_factory=dict)
    """Facts of the only finding, by their name."""

    def assert_found(self, cause: str) -> None:
        """There is one root cause, which is this, with all that the case asks for."""
        finding = only(self.fleets)
        assert finding.cause == cause
        facts = {"commands": tuple(step.command for step in finding.next_steps)}
        assert {name: facts.get(name) or getattr(finding, name) for name in self.found} == self.found
        self._assert_said(lambda where: _lines_of(finding, where))

    def assert_silent(self, comm: str | None = None) -> None:
        """There is no stall, and all that the case asks for is said."""
        verdict = make_verdict(self.fleets.made(), comm)
        assert not verdict.problem
        assert verdict.findings == ()
        self._assert_said(lambda where: verdict.notes if where == "notes" else (verdict.headline,))

    def _assert_said(self, lines: Callable[[str], Iterable[str]]) -> None:
        for where, words in self.says:
            assert any(_holds(line, words) for line in lines(where)), (where, words, list(lines(where)))
        for where, words in self.never:
            assert not any(_holds(line, words) for line in lines(where)), (where, words, list(lines(where)))


def _lines_of(finding: Finding, where: str) -> Iterable[str]:
    if where == "steps":
        return [f"{step.host}: {step.command}" for step in finding.next_steps]
    if where == "first":
        return finding.evidence[:1]
    if where == "why":
        return [step.why for step in finding.next_steps]
    said = getattr(finding, where)
    return (said,) if isinstance(said, str) else said


def _holds(line: str, words: str) -> bool:
    if words.startswith("="):
        return line == words[1:]
    if words.startswith("…"):
        return line.endswith(words[1:])
    return line.startswith(words[:-1]) if words.endswith("…") else words in line


def of_cause(cases: Mapping[str, Iterable[Case]]) -> list[Any]:
    """Parameters of a test: each cause with each of its cases."""
    return [pytest.param(cause, case, id=f"{cause}: {case.name}") for cause, of_it in cases.items() for case in of_it]


def named(cases: Iterable[Case]) -> list[Any]:
    """Parameters of a test: each case."""
    return [pytest.param(case, id=case.name) for case in cases]


CAUSES: Final = st.sampled_from([*(cause for cause in Cause if cause is not Cause.RANK_MISSING), "some_new_cause"])


@st.composite
def fleets_of_any_kind(draw: st.DrawFn) -> Fleets:
    """Communicators over two to four hosts, with any mixture of what hosts may say."""
    fleets = Fleets(draw(st.integers(2, 4)))
    for index in range(draw(st.integers(1, 4))):
        comm = f"{index:016x}"
        fleets.communicator(comm, pids=draw(st.sampled_from([100, 101, 500])))
        for number in range(fleets.hosts):
            entered = draw(st.integers(1200, 1206))
            fleets.ranks = [
                replace(
                    one,
                    stall=draw(st.none() | st.builds(stall, CAUSES, blamed_rank=st.sampled_from(["", "0", "1", "9"]))),
                    enqueued=entered,
                    completed=draw(st.none() | st.integers(1199, entered)),
                    position=draw(st.none() | st.just(Position(entered)) | st.just(Position(entered, 2, True))),
                    present=draw(st.sampled_from([True, True, True, False])),
                )
                if (one.comm, one.rank) == (comm, str(number))
                else one
                for one in fleets.ranks
            ]
    fleets.rails = draw(st.lists(st.sampled_from(fleets.rails), unique=True))
    return fleets
