"""Which stalled communicators wait because of which: by processes, rails and GPUs that they have in common.

A communicator is linked to the clearest one that explains it, and so on to the root.  Only communicators that share
something can be linked, so each is compared with those that an index of what they share gives, and not with all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from railscope.agent.cluster.fleet.facts import Rank
from railscope.agent.cluster.verdict.culprits import Culprit
from railscope.agent.facts.causes import Cause, Tier
from railscope.agent.facts.label_numbers import UNKNOWN

Process = tuple[str, str]
"""Host and pid; in files of a job that name no hosts, nothing and its rank in the job."""


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
class Link:
    """That one communicator waits because of another."""

    on: str
    why: str
    elsewhere: bool = False
    """The process it waits for is itself waiting in the other."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What one communicator may share with another."""

    stalled: StalledCommunicator
    order: tuple[int, int, int, str]
    processes: frozenset[Process]
    blamed: frozenset[Process]
    """None where only one of them is to blame, whichever it is."""
    stuck: frozenset[Process]
    """Those that wait in it, and are not to blame."""
    rails: frozenset[tuple[str, str, str]]
    """Host, device and network namespace of those to blame."""
    rail_hosts: frozenset[str]
    hosts: frozenset[str]
    """Of ranks that are seen."""
    missing_hosts: frozenset[str]
    """Of ranks that no agent reports, where that is the cause."""
    gpus: frozenset[tuple[str, str]]

    @property
    def gives(self) -> Iterable[Hashable]:
        """Keys of what another one may wait for here."""
        yield from self.processes | self.blamed
        yield from self.rails
        yield from (("host of a rail", host) for host in self.rail_hosts)
        yield from (("host of missing ranks", host) for host in self.missing_hosts)
        if self.stalled.culprit.cause == Cause.GPU_NOT_PROGRESSING:
            yield from (("GPU", *gpu) for gpu in self.gpus)

    @property
    def takes(self) -> Iterable[Hashable]:
        """Keys of what it may itself wait for elsewhere."""
        yield from self.processes | self.blamed
        yield from self.rails
        yield from (("host of a rail", host) for host in self.hosts)
        yield from (("host of missing ranks", host) for host in self.missing_hosts)
        yield from (("GPU", *gpu) for gpu in self.gpus)


def find_links(stalled: Sequence[StalledCommunicator]) -> dict[str, Link]:
    """Why communicators wait because of others, by hash; what is missing in it is explained by none."""
    sides = sorted(map(_side, stalled), key=lambda side: side.order)
    giving: defaultdict[Hashable, list[int]] = defaultdict(list)
    for at, side in enumerate(sides):
        for key in side.gives:
            giving[key].append(at)
    links = {}
    for side in sides:
        candidates = sorted({at for key in side.takes for at in giving.get(key, ())})
        link = next((link for at in candidates if (link := _link(side, sides[at])) is not None), None)
        if link is not None:
            links[side.stalled.comm] = link
    return links


def link_within_jobs(
    clearest: Sequence[StalledCommunicator],
    communicators: Iterable[Sequence[Rank]],
    links: Mapping[str, Link],
    by_comm: Mapping[str, StalledCommunicator],
) -> dict[str, Link]:
    """Links to the clearest stall of a job, of those without an explanation, and of processes that ended after it.

    A job is all that shares processes.  When one of them ends, the others give up, often within milliseconds.
    """
    job_of = _jobs(communicators)
    first: dict[Process, str] = {}
    found = {}
    for one in clearest:
        job = next((job_of[process] for process in processes_of(one.ranks)), None)
        if job is None or find_root(one.comm, links, by_comm)[0] != one.comm:
            continue
        root = first.setdefault(job, one.comm)
        if root == one.comm:
            continue
        if one.culprit.tier >= Tier.UNSEEN:
            found[one.comm] = Link(root, "other communicators of the same job connect them")
        elif one.culprit.cause in (Cause.PROCESS_GONE, Cause.PEER_LEFT):
            ended = blamed_processes(one.culprit)
            found[one.comm] = Link(
                root, f"{format_processes(ended) if ended else 'a process of the same job'} ended then, or soon after"
            )
    return found


def _jobs(communicators: Iterable[Sequence[Rank]]) -> dict[Process, Process]:
    """One process of its job, always the same, for each process."""
    above: dict[Process, Process] = {}

    def top(process: Process) -> Process:
        while (higher := above.setdefault(process, process)) != process:
            above[process] = above[higher]  # the way is half as long for who asks next
            process = higher
        return process

    for ranks in communicators:
        tops = [top(process) for process in processes_of(ranks)]
        above |= dict.fromkeys(tops, tops[0]) if tops else {}
    return {process: top(process) for process in list(above)}


def clearest_first(one: StalledCommunicator) -> tuple[int, int, int, str]:
    """Sorts the clearest cause first; of equals the one in which most hosts blame a rail of theirs, then the stall that
    began first, as far as scrapes can tell."""
    hosts = {rail.host for rail in one.culprit.rails}
    return one.culprit.tier, -len(hosts), -round(one.seconds or 0.0), one.comm


def find_root(comm: str, links: Mapping[str, Link], by_comm: Mapping[str, StalledCommunicator]) -> tuple[str, bool]:
    """Where the links from one communicator end, and whether they end in a circle of waiting."""
    way: dict[str, None] = {}
    while comm in links and comm not in way:
        way[comm] = None
        comm = links[comm].on
    if comm not in way:
        return comm, False
    names = list(way)
    circle = names[names.index(comm) :]
    root = min(circle, key=lambda name: clearest_first(by_comm[name]))
    return root, all(links[name].elsewhere for name in circle)


def _side(one: StalledCommunicator) -> _Side:
    culprit = one.culprit
    to_blame = frozenset(culprit.ranks)
    foremost = max((rank.position.entered for rank in culprit.ranks if rank.position), default=None)
    stuck = (
        rank
        for rank in one.ranks
        if rank not in to_blame
        and (
            rank.stall
            or culprit.cause == Cause.RANK_SLOW
            or (culprit.cause == Cause.WRITING and came_further(rank, foremost))
        )
    )
    return _Side(
        stalled=one,
        order=clearest_first(one),
        processes=processes_of(one.ranks),
        blamed=blamed_processes(culprit),
        stuck=processes_of(stuck),
        rails=frozenset((rail.host, rail.device, rail.netns) for rail in culprit.rails),
        rail_hosts=frozenset(rail.host for rail in culprit.rails),
        hosts=frozenset(rank.host for rank in one.ranks if rank.present),
        missing_hosts=frozenset(rank.host for rank in culprit.ranks if culprit.cause == Cause.RANK_MISSING),
        gpus=frozenset((rank.host, rank.identity.gpu) for rank in one.ranks if rank.identity.gpu != UNKNOWN),
    )


def _link(one: _Side, other: _Side) -> Link | None:
    """Why `one` waits only because of `other`; None: it does not."""
    if one.order == other.order:
        return None
    mine, its, on = one.stalled.culprit, other.stalled.culprit, other.stalled.comm
    same_process, clearer = one.blamed & other.blamed, other.order < one.order
    if same_process and clearer:
        return Link(on, f"the same process is to blame: {format_processes(same_process)}")
    if clearer and (same_rail := one.rails & other.rails):
        return Link(on, f"the same rail is to blame: {_format_rails(same_rail)}")
    if mine.tier < Tier.SEQUENCE:
        return None
    if its.tier == 0 and (blamed := other.blamed & one.processes):
        return Link(on, f"its member is to blame there: {format_processes(blamed)}")
    waits_for = processes_of(mine.ranks)
    if (elsewhere := waits_for & other.stuck) and not same_process:
        there = "waits there again and again" if its.cause == Cause.RANK_SLOW else "is stuck there"
        return Link(on, f"it waits for {format_processes(elsewhere)}, which {there}", elsewhere=True)
    if waits_for and mine.basis in ("sequence", "host", "idle", "pace"):
        return None  # it has a culprit of its own, which is not waiting anywhere
    if clearer and (same_host := one.missing_hosts & other.missing_hosts):
        return Link(on, f"the ranks of the same host are missing: {', '.join(sorted(same_host))}")
    if its.tier < Tier.SEQUENCE and (hosts := other.rail_hosts & one.hosts):
        return Link(on, f"it runs on {', '.join(sorted(hosts))}, whose rail is to blame there")
    # Without a culprit the stall that began first is the likeliest root.
    explains = its.tier < mine.tier or (mine.tier >= Tier.UNSEEN and clearer)
    if explains and (shared := one.processes & other.processes):
        return Link(on, f"both have {format_processes(shared)}")
    if its.cause == Cause.GPU_NOT_PROGRESSING and (gpus := one.gpus & other.gpus):
        host, gpu = min(gpus)
        return Link(on, f"both use GPU {gpu} of {host}")
    return None


def came_further(rank: Rank, operations: int | None) -> bool:
    """Whether it entered more operations than so many; None: that is not known of those it is compared with."""
    return operations is not None and rank.present and rank.position is not None and rank.position.entered > operations


def processes_of(ranks: Iterable[Rank]) -> frozenset[Process]:
    """The processes of these ranks, as far as they are known."""
    return frozenset(
        (rank.host, rank.identity.process if rank.identity.pid else rank.world_rank)
        for rank in ranks
        if rank.identity.pid or (not rank.host and rank.world_rank)
    )


def blamed_processes(culprit: Culprit) -> frozenset[Process]:
    """Processes that are to blame: none where only one of them is, whichever it is."""
    return frozenset() if culprit.one_of_several else processes_of(culprit.ranks)


def format_processes(processes: Iterable[Process]) -> str:
    """`pid 7 on host0 and 2 more`, `rank 3 of the job`."""
    found = sorted(processes)
    host, number = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"pid {number} on {host}{more}" if host else f"rank {number} of the job{more}"


def _format_rails(rails: Iterable[tuple[str, str, str]]) -> str:
    return ", ".join(f"{device}{f' in {netns}' if netns else ''} of {host}" for host, device, netns in sorted(rails))
