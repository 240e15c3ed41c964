"""Derives the verdict from the facts of a fleet: what is stuck, the root cause, and what only waits because of it.

Each communicator is judged by itself (agent/cluster/verdict/culprits.py); then a communicator that waits for a process
which is stuck elsewhere, or for a rail that is to blame elsewhere, is listed below the one that is the root
(agent/cluster/verdict/links.py).  Nothing is read here, and no clock is asked: the same facts give the same verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from railscope.agent.cluster.fleet.facts import Fleet, Rail, Rank, SlowRank
from railscope.agent.cluster.verdict.culprits import (
    HOSTS_OF_A_PLANE,
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
from railscope.agent.cluster.verdict.links import (
    StalledCommunicator,
    came_further,
    clearest_first,
    find_links,
    find_root,
    link_within_jobs,
    processes_of,
)
from railscope.agent.facts.causes import HELD, Cause, Tier


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


def find_root_causes(fleet: Fleet, *, afterwards: bool = False) -> tuple[RootCause, ...]:
    """Every stall of the fleet and every slow rank, root causes apart from what only waits; the clearest and widest
    first.

    `afterwards`: files of a job are read once it is over; a stall in them counts although no rank is left that waits.
    """
    by_comm = by_communicator(fleet)
    rails_of: dict[str, list[Rail]] = defaultdict(list)
    for rail in fleet.rails:
        rails_of[rail.host].append(rail)
    stalled = [
        _judged(comm, ranks, rails_of, fleet.at)
        for comm, ranks in sorted(by_comm.items())
        if is_stalled(ranks) or (afterwards and has_ended(ranks))
    ]
    stalled = _over_planes(stalled)
    held_up = [
        one
        for comm, ranks in sorted(by_comm.items())
        if not any(rank.stall for rank in ranks) and _awaits_writer(ranks)
        if (one := _judged(comm, ranks, rails_of, fleet.at)).culprit.cause == Cause.WRITING
    ]
    slow = _slow(by_comm, stalled, fleet)
    found = _grouped([*stalled, *held_up, *slow], list(by_comm.values()))
    # One that no host calls stalled is listed only if others wait because of it.
    silent = {one.comm for one in held_up}
    return tuple(cause for cause in found if cause.stalled.comm not in silent or cause.dependents)


def _over_planes(stalled: Sequence[StalledCommunicator]) -> list[StalledCommunicator]:
    """The same, but that of rails of one number that are down on several hosts one communicator blames all.

    A leaf switch takes them down together, in communicators that may have no process in common: the one that has most
    of them tells of them all, and of the others the rail there is then to blame for.
    """
    blaming: dict[str, list[StalledCommunicator]] = defaultdict(list)
    for one in sorted(stalled, key=clearest_first):
        if one.culprit.cause == Cause.RAIL_DOWN:
            for number in {rail.rail for rail in one.culprit.rails if rail.rail}:
                blaming[number].append(one)
    telling: dict[str, StalledCommunicator] = {}
    for number, those in blaming.items():
        all_rails = {
            (rail.host, rail.device, rail.netns): rail
            for one in those
            for rail in one.culprit.rails
            if rail.rail == number
        }
        widest = telling.get(those[0].comm, those[0])
        if len({rail.host for rail in all_rails.values()}) >= HOSTS_OF_A_PLANE:
            rails = dict.fromkeys((*widest.culprit.rails, *all_rails.values()))
            telling[widest.comm] = replace(widest, culprit=replace(widest.culprit, rails=tuple(rails)))
    return [telling.get(one.comm, one) for one in stalled]


def _awaits_writer(ranks: Sequence[Rank]) -> bool:
    """Whether somebody entered an operation that one which writes did not: its own host calls nobody stalled who
    waits for it there."""
    least = min((rank.position.entered for rank in ranks if rank.writing and rank.position), default=None)
    return any(came_further(rank, least) for rank in ranks)


def _slow(
    by_comm: Mapping[str, Sequence[Rank]], stalled: Iterable[StalledCommunicator], fleet: Fleet
) -> list[StalledCommunicator]:
    """Communicators that go at the pace of a few of their ranks, and share no process with one that is stalled."""
    stuck = processes_of(rank for one in stalled for rank in one.ranks)
    slow: dict[str, list[SlowRank]] = defaultdict(list)
    for one in fleet.slow:
        slow[one.comm].append(one)
    found = []
    for comm, of_comm in slow.items():
        named = {(one.host, one.rank) for one in of_comm}
        ranks = tuple(by_comm.get(comm, ()))
        blamed = tuple(rank for rank in ranks if (rank.host, rank.rank) in named)
        # Where most ranks are slow, it is the others that are odd.
        if blamed and 2 * len(blamed) <= len(ranks) and not stuck & processes_of(ranks):
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


def by_communicator(fleet: Fleet) -> dict[str, list[Rank]]:
    """The ranks of each communicator."""
    found: dict[str, list[Rank]] = defaultdict(list)
    for rank in fleet.ranks:
        found[rank.comm].append(rank)
    return found


def is_stalled(ranks: Sequence[Rank]) -> bool:
    """Whether a host calls one of these ranks of a communicator stalled, and some rank can wait for it."""
    return any(rank.stall for rank in ranks) and not (has_ended(ranks) or is_idle(ranks) or is_suspended(ranks))


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


def _judged(comm: str, ranks: Sequence[Rank], rails_of: Mapping[str, Sequence[Rail]], at: float) -> StalledCommunicator:
    present = [rank for rank in ranks if rank.present]
    hosts = dict.fromkeys(rank.host for rank in ranks)
    found = find_culprits(ranks, [rail for host in hosts for rail in rails_of.get(host, ())])
    ops = [rank.stall.op for rank in present if rank.stall and rank.stall.op]
    return StalledCommunicator(
        comm=comm,
        ranks=tuple(ranks),
        culprit=found[0],
        others=tuple(other for other in found[1:] if other.tier < Tier.UNSEEN),
        missing=missing_ranks(ranks),
        nranks=communicator_size(ranks),
        op=max(sorted(set(ops)), key=ops.count, default=""),
        seconds=_waited(present, at),
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


def _grouped(stalled: Sequence[StalledCommunicator], communicators: Iterable[Sequence[Rank]]) -> tuple[RootCause, ...]:
    """`communicators`: the ranks of each, stalled or not; they tell what belongs to one job."""
    by_comm = {one.comm: one for one in stalled}
    clearest = sorted(stalled, key=clearest_first)
    links = find_links(stalled)
    links |= link_within_jobs(clearest, communicators, links, by_comm)
    dependents: dict[str, list[Dependent]] = defaultdict(list)
    deadlocks = set()
    for one in stalled:
        root, cycle = find_root(one.comm, links, by_comm)
        if cycle and by_comm[root].culprit.cause != Cause.RANK_SLOW:
            deadlocks.add(root)
        if root != one.comm:
            dependents[root].append(Dependent(one, links[one.comm].why))
    causes = [
        RootCause(one, tuple(dependents[one.comm]), one.comm in deadlocks)
        for one in clearest
        if find_root(one.comm, links, by_comm)[0] == one.comm
    ]
    return tuple(sorted(causes, key=lambda cause: (cause.stalled.culprit.tier, -len(cause.dependents))))
