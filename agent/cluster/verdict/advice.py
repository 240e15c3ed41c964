"""What to check next: steps of the table of causes (agent/facts/causes.py), for the ranks, rails and hosts in question.

Once a stall is over nothing is left to be stopped, let go or looked at as it happens: logs of that time, counters that
keep what they counted, and the recording that the agent made when the stall began tell why it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from railscope.agent.cluster.fleet.facts import Rail, Rank
from railscope.agent.cluster.verdict.culprits import Culprit
from railscope.agent.cluster.verdict.links import StalledCommunicator
from railscope.agent.cluster.verdict.quantities import format_rank_numbers
from railscope.agent.facts.causes import CAUSES, About, Cause, CauseFacts, StepFacts, Where, facts_of
from railscope.agent.facts.label_numbers import UNKNOWN

_MOST_SUBJECTS: Final = 2
_BEFORE_SECONDS: Final = 120.0
"""A cause comes before its stall, which hosts tell of after some seconds and scrapes show later still."""
_AFTER_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, and why."""

    host: str
    """Where; empty: anywhere."""
    command: str
    """Empty: there is none to type."""
    why: str


@dataclass(frozen=True, slots=True)
class Period:
    """When it was stalled, seconds since the Unix epoch."""

    began: float
    ended: float

    @property
    def window(self) -> str:
        """journalctl's options for the time of the cause."""
        return f"--since '{_moment(self.began - _BEFORE_SECONDS)}' --until '{_moment(self.ended + _AFTER_SECONDS)}'"

    @property
    def text(self) -> str:
        return f"from {_moment(self.began)} to {_moment(self.ended)}"


@dataclass(frozen=True, slots=True)
class _Subject:
    """What one step is about."""

    host: str
    values: Mapping[str, str]
    """Of the placeholders."""
    running: bool = False
    """Its process is known."""


def next_steps(stalled: StalledCommunicator) -> tuple[Step, ...]:
    """What a person should look at next, while it is stalled."""
    facts = _facts(stalled.culprit)
    nobody = CAUSES[Cause.UNKNOWN]
    steps = _steps(facts.now, facts, stalled, {}) or _steps(nobody.now, nobody, stalled, {})
    return tuple(dict.fromkeys([*_not_started(stalled), *steps]))


def _not_started(stalled: StalledCommunicator) -> Iterable[Step]:
    """Of a call that ranks leave out which no host sees: most likely nobody started them."""
    culprit = stalled.culprit
    if culprit.cause == Cause.INSIDE_CALL and culprit.basis == "absence":
        jobs = sorted({job for rank in stalled.ranks if (job := rank.identity.job_name)})
        of_job = f" of job {jobs[0]}" if len(jobs) == 1 else ""
        numbers = format_rank_numbers(culprit.missing)
        yield Step("", "", f"{numbers}{of_job}: {facts_of(culprit.cause).remedy}")


def past_steps(stalled: StalledCommunicator, period: Period) -> tuple[Step, ...]:
    """What a person should look at who wants to know why it was stalled."""
    facts = _facts(stalled.culprit)
    steps = _steps(facts.after, facts, stalled, {"window": period.window, "period": period.text})
    hosts = list(dict.fromkeys(rank.host for rank in stalled.ranks if rank.stall))[:_MOST_SUBJECTS]
    unseen = [step for host in hosts for step in _filled(CAUSES[Cause.UNSEEN].now, _Subject(host, {}))]
    return tuple(dict.fromkeys([*steps, *_recordings(hosts, period), *(() if steps else unseen)]))


def _facts(culprit: Culprit) -> CauseFacts:
    """Of the cause whose steps are asked for: if it is unknown which of several is gone, that they are missing."""
    return CAUSES[Cause.RANK_MISSING] if culprit.one_of_several else facts_of(culprit.cause)


def _steps(
    steps: Sequence[StepFacts], facts: CauseFacts, stalled: StalledCommunicator, values: Mapping[str, str]
) -> list[Step]:
    subjects = [_Subject(one.host, {**one.values, **values}, one.running) for one in _subjects(facts.about, stalled)]
    if facts.about in (About.RANK, About.RAIL):
        return [step for subject in subjects for step in _filled(steps, subject)]
    # Hosts of which one step is enough where it tells: the same on each before the next.
    found = []
    for step in steps:
        if step.where is Where.UNPLACED:
            culprit = stalled.culprit
            placed = [rank for rank in culprit.ranks if rank.host]
            found += [Step("", step.command, step.why)] if len(placed) < len(culprit.missing) else []
        elif step.where is Where.ONE_HOST:
            found += [made for subject in subjects if subject.running for made in _filled([step], subject)][:1]
        else:
            found += [made for subject in subjects for made in _filled([step], subject)]
    return found


def _filled(steps: Iterable[StepFacts], subject: _Subject) -> Iterable[Step]:
    for step in steps:
        if step.where is Where.ANYWHERE or subject.host:
            host = "" if step.where is Where.ANYWHERE else subject.host
            yield Step(host, step.command.format(**subject.values), step.why.format(**subject.values))


def _subjects(about: About, stalled: StalledCommunicator) -> list[_Subject]:
    culprit = stalled.culprit
    if about is About.RANK:
        return [_of_rank(rank) for rank in culprit.ranks[:_MOST_SUBJECTS]]
    if about is About.RAIL:
        return [
            _Subject(rail.host, {"device": rail.device or "DEVICE", "inside": _inside_namespace(rail, stalled)})
            for rail in culprit.rails[: min(culprit.alike, _MOST_SUBJECTS)]
        ]
    if about is About.HOST:
        hosts = list(dict.fromkeys(rank.host for rank in culprit.ranks if rank.host))
        return [_Subject(host, {"host": host}) for host in hosts[:_MOST_SUBJECTS]]
    present = [rank for rank in stalled.ranks if rank.present]
    by_host: dict[str, Rank] = {}
    for rank in present:
        if rank.host not in by_host or (rank.identity.pid and not by_host[rank.host].identity.pid):
            by_host[rank.host] = rank
    return [_of_rank(rank) for rank in list(by_host.values())[:_MOST_SUBJECTS]]


def _of_rank(rank: Rank) -> _Subject:
    # The number that the job's logs have.
    pid, gpu = rank.identity.pid, rank.identity.gpu
    values = {
        "rank": rank.world_rank or rank.rank,
        "pid": str(pid) if pid else "PID",
        "gpu": "GPU" if gpu == UNKNOWN else gpu,
    }
    return _Subject(rank.host, values, running=bool(pid))


def _inside_namespace(rail: Rail, stalled: StalledCommunicator) -> str:
    """The prefix of a command for a device in a network namespace: the host may have a device of the same name."""
    if not rail.netns:
        return ""
    here = [rank for rank in stalled.ranks if rank.present and rank.identity.pid]
    there = (rank.identity.pid for rank in here if (rank.host, rank.identity.netns) == (rail.host, rail.netns))
    return f"nsenter -t {next(there, 'PID')} -n "


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _recordings(hosts: Sequence[str], period: Period) -> Iterable[Step]:
    """Where agents recorded it: on the hosts that called it stalled."""
    for host in hosts:
        yield Step(
            host,
            "ls -l /var/lib/railscope/recordings",
            f"what was recorded as it began, about {_moment(period.began)}: 'railscope export --perfetto' shows it",
        )
    for host in hosts[:1]:
        yield Step(host, f"journalctl -u railscope {period.window}", "what the agent said of it, and when")
