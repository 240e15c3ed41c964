"""Derives the verdict from the facts of a fleet: what is stuck, the root cause, and what only waits because of it.

Each communicator is judged by itself (agent/cluster/verdict/culprits.py); then a communicator that waits for a process
which is stuck elsewhere, or for a rail that is to blame elsewhere, is listed below the one that is the root.  Nothing
is read here, and no clock is asked: the same facts give the same verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from railscope.agent.cluster.fleet.facts import Fleet, Rail, Rank, SlowRank
from railscope.agent.cluster.verdict.culprits import (
    Culprit,
    communicator_size,
    find_culprits,
    has_exited,
    is_identified,
    is_inside_call,
    missing_ranks,
    scraped_too_early,
    stall_start,
)
from railscope.agent.facts.causes import HELD, Cause, Tier
from railscope.agent.facts.label_numbers import UNKNOWN


@dataclass(frozen=True, slots=True)
class StalledCommunicator:
    """One communicator that hosts call stalled, or that goes at the pace of a slow rank, and why."""

    comm: str
    ranks: tuple[Rank, ...]
    culprit: Culprit
    others: tuple[Culprit, ...]
    """Further causes that were found, weaker ones last."""
    missing: tuple[str, ...]
    nranks: int | None
    op: str
    seconds: float | None
    """For how long it has waited; None: not known."""
    too_early: tuple[Rank, ...]
    """Ranks whose last scrape precedes the stall, so that their sequence proves nothing."""


@dataclass(frozen=True, slots=True)
class Dependent:
    """A communicator that waits only because of another."""

    stalled: StalledCommunicator
    why: str


@dataclass(frozen=True, slots=True)
class RootCause:
    """A stall with everything that waits because of it."""

    stalled: StalledCommunicator
    dependents: tuple[Dependent, ...] = ()
    deadlock: bool = False
    """Each of several communicators waits for a process that is stuck in another one of them."""


def find_root_causes(fleet: Fleet) -> tuple[RootCause, ...]:
    """Every stall of the fleet and every slow rank, root causes apart from what only waits; the clearest and widest
    first."""
    by_comm: dict[str, list[Rank]] = defaultdict(list)
    for rank in fleet.ranks:
        by_comm[rank.comm].append(rank)
    stalled = [
        _judged(comm, ranks, fleet)
        for comm, ranks in sorted(by_comm.items())
        if any(rank.stall for rank in ranks) and not (has_ended(ranks) or is_idle(ranks) or is_suspended(ranks))
    ]
    held_up = [
        one
        for comm, ranks in sorted(by_comm.items())
        if not any(rank.stall for rank in ranks) and _awaits_writer(ranks)
        if (one := _judged(comm, ranks, fleet)).culprit.cause == Cause.WRITING
    ]
    slow = _slow(by_comm, stalled, fleet)
    found = _grouped([*stalled, *held_up, *slow], list(by_comm.values()))
    # One that no host calls stalled is listed only if others wait because of it.
    silent = {one.comm for one in held_up}
    return tuple(cause for cause in found if cause.stalled.comm not in silent or cause.dependents)


def _awaits_writer(ranks: Sequence[Rank]) -> bool:
    """Whether somebody entered an operation that one which writes did not: its own host calls nobody stalled who
    waits for it there."""
    return any(_came_further(rank, [writer]) for writer in ranks if writer.writing for rank in ranks)


def _slow(
    by_comm: Mapping[str, Sequence[Rank]], stalled: Iterable[StalledCommunicator], fleet: Fleet
) -> list[StalledCommunicator]:
    """Communicators that go at the pace of a few of their ranks, and share no process with one that is stalled."""
    stuck = _processes(rank for one in stalled for rank in one.ranks)
    found = []
    for comm in dict.fromkeys(one.comm for one in fleet.slow):
        of_comm = [one for one in fleet.slow if one.comm == comm]
        named = {(one.host, one.rank) for one in of_comm}
        ranks = tuple(by_comm.get(comm, ()))
        blamed = tuple(rank for rank in ranks if (rank.host, rank.rank) in named)
        # Where most ranks are slow, it is the others that are odd.
        if blamed and 2 * len(blamed) <= len(ranks) and not stuck & _processes(ranks):
            found.append(
                StalledCommunicator(
                    comm,
                    ranks,
                    Culprit(Cause.RANK_SLOW, blamed, basis="pace", strength=_strength_of(of_comm)),
                    (),
                    (),
                    communicator_size(ranks),
                    "",
                    fleet.at - min(one.slowness.since for one in of_comm),
                    (),
                )
            )
    return found


def _strength_of(slow: Iterable[SlowRank]) -> str:
    """Calls are made ahead of GPUs: that a rank makes them last need not mean that GPUs wait."""
    return "weak" if all(one.stretch_seconds is None for one in slow) else "strong"


def has_ended(ranks: Sequence[Rank]) -> bool:
    """Whether processes of a communicator are gone and no rank is left that could wait for them."""
    if not all(is_identified(rank) for rank in ranks):
        return False  # there may be other, unknown ones
    told_of = {rank.rank for rank in ranks if rank.ended}
    here = [rank for rank in ranks if rank.present]
    left = all((rank.ended and not is_inside_call(rank)) or has_exited(rank) for rank in here)
    return left and any(has_exited(rank) for rank in here) and told_of.issuperset(missing_ranks(ranks))


def is_idle(ranks: Sequence[Rank]) -> bool:
    """Whether no rank waits although a process is stopped: every rank completed all that any of them entered.

    The host of a process that is stopped between operations cannot know whether ranks elsewhere went on without it.
    """
    here = [rank for rank in ranks if rank.present]
    stalls = [rank.stall for rank in here if rank.stall]
    if (
        not stalls
        or missing_ranks(ranks)
        or communicator_size(ranks) != len(here)
        or not all(map(is_identified, ranks))
    ):
        return False
    if any(stall.cause not in HELD or stall.strength != "weak" for stall in stalls):
        return False
    if not all(stall.op for stall in stalls):
        return False  # others may wait for it in another communicator: its host could not tell in which it was
    # Where ranks entered operations a moment ago, one of them may have entered another since.
    if any(rank.moving or rank.inflight_seconds for rank in here):
        return False
    if any(rank.completed is None or rank.completed != rank.enqueued for rank in here):
        return False
    entered = {rank.position.entered if rank.position and not rank.position.learnt else None for rank in here}
    return len(entered) == 1 and None not in entered


def is_suspended(ranks: Sequence[Rank]) -> bool:
    """Whether all ranks of a communicator are stopped or frozen, as a batch system or a user suspends a job."""
    here = [rank for rank in ranks if rank.present]
    held = all(rank.stall is not None and rank.stall.cause in HELD for rank in here)
    whole = communicator_size(ranks) == len(here) and not missing_ranks(ranks)
    return bool(here) and held and whole and all(map(is_identified, ranks))


def _judged(comm: str, ranks: Sequence[Rank], fleet: Fleet) -> StalledCommunicator:
    present = [rank for rank in ranks if rank.present]
    found = find_culprits(ranks, fleet)
    ops = [rank.stall.op for rank in present if rank.stall and rank.stall.op]
    return StalledCommunicator(
        comm=comm,
        ranks=tuple(ranks),
        culprit=found[0],
        others=tuple(other for other in found[1:] if other.tier < Tier.UNSEEN),
        missing=missing_ranks(ranks),
        nranks=communicator_size(ranks),
        op=max(sorted(set(ops)), key=ops.count, default=""),
        seconds=_waited(present, fleet.at),
        too_early=scraped_too_early(present),
    )


def _waited(present: Sequence[Rank], at: float) -> float | None:
    began = stall_start(present)
    if began is not None:
        return max(0.0, at - began)
    ages = [
        rank.inflight_seconds or rank.stalled_seconds
        for rank in present
        if rank.stall and (rank.inflight_seconds or rank.stalled_seconds)
    ]
    return max((age for age in ages if age is not None), default=None)


# Which communicators wait because of which


@dataclass(frozen=True, slots=True)
class _Link:
    """That one communicator waits because of another."""

    on: str
    why: str
    elsewhere: bool = False
    """The process it waits for is itself waiting in the other."""


def _grouped(stalled: Sequence[StalledCommunicator], communicators: Iterable[Sequence[Rank]]) -> tuple[RootCause, ...]:
    """`communicators`: the ranks of each, stalled or not; they tell what belongs to one job."""
    by_comm = {one.comm: one for one in stalled}
    clearest = sorted(stalled, key=_clearest)
    links = {}
    for one in stalled:
        link = next((link for other in clearest if (link := _link(one, other)) is not None), None)
        if link is not None:
            links[one.comm] = link
    links |= _within_jobs(clearest, communicators, links, by_comm)
    dependents: dict[str, list[Dependent]] = defaultdict(list)
    deadlocks = set()
    for one in stalled:
        root, cycle = _root(one.comm, links, by_comm)
        if cycle and by_comm[root].culprit.cause != Cause.RANK_SLOW:
            deadlocks.add(root)
        if root != one.comm:
            dependents[root].append(Dependent(one, links[one.comm].why))
    causes = [
        RootCause(one, tuple(dependents[one.comm]), one.comm in deadlocks)
        for one in clearest
        if _root(one.comm, links, by_comm)[0] == one.comm
    ]
    return tuple(sorted(causes, key=lambda cause: (cause.stalled.culprit.tier, -len(cause.dependents))))


def _within_jobs(
    clearest: Sequence[StalledCommunicator],
    communicators: Iterable[Sequence[Rank]],
    links: Mapping[str, _Link],
    by_comm: Mapping[str, StalledCommunicator],
) -> dict[str, _Link]:
    """Links to the clearest stall of a job, of those without an explanation, and of processes that ended after it.

    A job is all that shares processes.  When one of them ends, the others give up, often within milliseconds.
    """
    job_of = _jobs(communicators)
    first: dict[int, str] = {}
    found = {}
    for one in clearest:
        job = next((job_of[process] for process in _processes(one.ranks)), None)
        if job is None or _root(one.comm, links, by_comm)[0] != one.comm:
            continue
        root = first.setdefault(job, one.comm)
        if root == one.comm:
            continue
        if one.culprit.tier >= Tier.UNSEEN:
            found[one.comm] = _Link(root, "other communicators of the same job connect them")
        elif one.culprit.cause in (Cause.PROCESS_GONE, Cause.PEER_LEFT):
            ended = _blamed(one.culprit)
            found[one.comm] = _Link(
                root, f"{_process_text(ended) if ended else 'a process of the same job'} ended then, or soon after"
            )
    return found


def _jobs(communicators: Iterable[Sequence[Rank]]) -> dict[tuple[str, str], int]:
    """A number of its job for each process."""
    job_of: dict[tuple[str, str], int] = {}
    members: dict[int, set[tuple[str, str]]] = {}
    for number, ranks in enumerate(communicators):
        merged = _processes(ranks)
        for earlier in {job_of[process] for process in merged if process in job_of}:
            merged |= members.pop(earlier)
        members[number] = merged
        job_of |= dict.fromkeys(merged, number)
    return job_of


def _clearest(one: StalledCommunicator) -> tuple[int, int, str]:
    """Sorts the clearest cause first, and of equals the stall that began first, as far as scrapes can tell."""
    return one.culprit.tier, -round(one.seconds or 0.0), one.comm


def _root(comm: str, links: Mapping[str, _Link], by_comm: Mapping[str, StalledCommunicator]) -> tuple[str, bool]:
    """Where the links from one communicator end, and whether they end in a circle of waiting."""
    way = [comm]
    while way[-1] in links:
        on = links[way[-1]].on
        if on in way:
            circle = way[way.index(on) :]
            root = min(circle, key=lambda name: _clearest(by_comm[name]))
            return root, all(links[name].elsewhere for name in circle)
        way.append(on)
    return way[-1], False


def _link(one: StalledCommunicator, other: StalledCommunicator) -> _Link | None:
    """Why `one` waits only because of `other`; None: it does not."""
    if one.comm == other.comm:
        return None
    mine, its = one.culprit, other.culprit
    same_process = _blamed(mine) & _blamed(its)
    if same_process and _clearest(other) < _clearest(one):
        return _Link(other.comm, f"the same process is to blame: {_process_text(same_process)}")
    same_rail = _rail_keys(mine.rails) & _rail_keys(its.rails)
    if same_rail and _clearest(other) < _clearest(one):
        return _Link(other.comm, f"the same rail is to blame: {_rail_text(same_rail)}")
    if mine.tier < Tier.SEQUENCE:
        return None
    here = _processes(one.ranks)
    if its.tier == 0 and (blamed := _blamed(its) & here):
        return _Link(other.comm, f"its member is to blame there: {_process_text(blamed)}")
    waits_for = _processes(mine.ranks)
    stuck_there = _processes(
        rank
        for rank in other.ranks
        if rank not in its.ranks
        and (
            rank.stall
            or its.cause == Cause.RANK_SLOW
            or (its.cause == Cause.WRITING and _came_further(rank, its.ranks))
        )
    )
    if (elsewhere := waits_for & stuck_there) and not same_process:
        there = "waits there again and again" if its.cause == Cause.RANK_SLOW else "is stuck there"
        return _Link(other.comm, f"it waits for {_process_text(elsewhere)}, which {there}", elsewhere=True)
    if waits_for and mine.basis in ("sequence", "host", "idle", "pace"):
        return None  # it has a culprit of its own, which is not waiting anywhere
    same_host = {rank.host for rank in mine.ranks} & {rank.host for rank in its.ranks}
    if same_host and mine.cause == its.cause == Cause.RANK_MISSING and _clearest(other) < _clearest(one):
        return _Link(other.comm, f"the ranks of the same host are missing: {', '.join(sorted(same_host))}")
    if its.tier < Tier.SEQUENCE:
        hosts = {rail.host for rail in its.rails} & {rank.host for rank in one.ranks if rank.present}
        if hosts:
            return _Link(other.comm, f"it runs on {', '.join(sorted(hosts))}, whose rail is to blame there")
    # Without a culprit the stall that began first is the likeliest root.
    clearer = its.tier < mine.tier or (mine.tier >= Tier.UNSEEN and _clearest(other) < _clearest(one))
    if clearer and (shared := here & _processes(other.ranks)):
        return _Link(other.comm, f"both have {_process_text(shared)}")
    if its.cause == Cause.GPU_NOT_PROGRESSING and (gpus := _gpus(one.ranks) & _gpus(other.ranks)):
        host, gpu = min(gpus)
        return _Link(other.comm, f"both use GPU {gpu} of {host}")
    return None


def _came_further(rank: Rank, others: Iterable[Rank]) -> bool:
    """Whether it entered an operation that none of these others did."""
    entered = [other.position.entered for other in others if other.position]
    return bool(entered) and rank.present and rank.position is not None and rank.position.entered > max(entered)


def _processes(ranks: Iterable[Rank]) -> set[tuple[str, str]]:
    return {(rank.host, rank.identity.process) for rank in ranks if rank.identity.pid}


def _blamed(culprit: Culprit) -> set[tuple[str, str]]:
    """Processes that are to blame: none where only one of them is, whichever it is."""
    return set() if culprit.one_of_several else _processes(culprit.ranks)


def _gpus(ranks: Iterable[Rank]) -> set[tuple[str, str]]:
    return {(rank.host, rank.identity.gpu) for rank in ranks if rank.identity.gpu != UNKNOWN}


def _rail_keys(rails: Iterable[Rail]) -> set[tuple[str, str, str]]:
    return {(rail.host, rail.device, rail.netns) for rail in rails}


def _process_text(processes: Iterable[tuple[str, str]]) -> str:
    found = sorted(processes)
    host, pid = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"pid {pid} on {host}{more}"


def _rail_text(rails: Iterable[tuple[str, str, str]]) -> str:
    return ", ".join(f"{device}{f' in {netns}' if netns else ''} of {host}" for host, device, netns in sorted(rails))
