"""Computes what a node did between two scrapes: rates of ranks, operations, rails and NVLinks.

A rate is None where it cannot be known: a series that is new, gone, or fell (the agent or the device began again).  The
time between two scrapes is the agent's own, so that a slow network does not bend the rates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.bound import StepShares
from railscope.agent.facts.causes import tier_of
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.exporters.top.counter_delta import increase, increased_errors, per_second, ratio
from railscope.exporters.top.nvlink_view import GpuView, make_gpu_views
from railscope.exporters.top.scraped import (
    CompletedCounts,
    NodeScrape,
    OpCounts,
    RailKey,
    ScrapedProcess,
    ScrapedRail,
    ScrapedRank,
    ScrapedStall,
)
from railscope.exporters.top.transfers import TransferView, make_transfer_views

_NO_PROCESS: Final = ScrapedProcess()
_LEAST_PART: Final = 0.0005
"""Of a rail's bytes: with three decimals less is 0, and its owner is not shown."""


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank's end of a communicator did between two moments."""

    identity: RankIdentity
    op: str
    """What it stalls in, else what it called most between the scrapes, else what it called most of all; empty:
    cannot be known."""
    calls_per_second: float | None
    """Calls and what replayed graphs ran."""
    calls_estimated: bool
    """Some of these calls met no probe: NCCL's own numbers tell of them."""
    payload_bytes_per_second: float | None
    mean_seconds: float | None
    """How long the operations took that completed between the scrapes."""
    inflight_seconds: float | None
    """Age of the oldest operation that is not complete, 0: none."""
    incomplete: int | None
    """Operations given to NCCL that are not complete."""
    behind: int | None
    """Calls that another rank of the communicator on this node has made and this one has not."""
    late_ratio: float | None
    """Time per time by which it came after the rank before it, in the calls that it made last on this node."""
    stall: ScrapedStall | None
    process: ScrapedProcess
    cpu_ratio: float | None
    """Processors that its process kept busy between the scrapes, 1.0: one."""
    ended: bool
    """Its end of the communicator was destroyed or its process has gone: the agent keeps it readable for a while.
    False too where the agent does not tell."""


@dataclass(frozen=True, slots=True)
class RailView:
    """What one network port did between two moments."""

    rail: str
    device: str
    netns: str
    up: bool | None
    speed_bytes_per_second: float | None
    transmit_bytes_per_second: float | None
    receive_bytes_per_second: float | None
    transmit_explained_ratio: float | None
    receive_explained_ratio: float | None
    new_errors: tuple[tuple[str, int], ...]
    """What grew between the scrapes, by how much; the most first."""
    past_errors: tuple[tuple[str, int], ...]
    """What grew since the first scrape, and not between the last two."""
    blamed: bool
    """A stall names it."""
    owners: tuple[tuple[str, float], ...] = ()
    """Parts of what it sent and received between the scrapes, by who moved it; the largest first."""
    transmit_explained_due: bool = False
    """It carries what collectives put on it, and not yet enough to compare: as a job begins, or keeps more operations
    queued than have left (agent/node/attribution/explained.py)."""
    receive_explained_due: bool = False


@dataclass(frozen=True, slots=True)
class OpView:
    """One kind of operation on the whole node."""

    op: str
    calls_per_second: float | None
    payload_bytes_per_second: float | None
    mean_payload_bytes: float | None
    """Of the calls between the scrapes."""
    algorithm_bandwidth: float | None
    """Bytes per second of the operations that completed between the scrapes: payload over time."""
    bus_bandwidth: float | None
    """Likewise, with nccl-tests' factor."""


@dataclass(frozen=True, slots=True)
class JobView:
    """The steps of a job since the first moment, or since it began where none were told since."""

    comm: str
    """The largest of the rank that stands for it here."""
    job: str
    """As its batch system or launcher calls it; empty: not known."""
    step_seconds: float | None
    """Mean."""
    shares: StepShares | None
    ended: bool
    """The rank that stood for it has."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node between two moments."""

    at_seconds: float
    """Of the later scrape, since the Unix epoch."""
    span_seconds: float | None
    """Between the scrapes; None: there is only one, and no rate is known."""
    version: str
    simulated: bool
    processes: int | None
    ranks: tuple[RankView, ...]
    rails: tuple[RailView, ...]
    gpus: tuple[GpuView, ...]
    """Those that have NVLinks."""
    ops: tuple[OpView, ...]
    jobs: tuple[JobView, ...]
    """Of those whose steps are known; what has ended comes last."""
    stalls: tuple[ScrapedStall, ...]
    """The best founded cause first, and of one the longest."""
    last_ended: ScrapedStall | None
    failing_collectors: tuple[str, ...]
    transfers: tuple[TransferView, ...] = ()
    """Of libraries other than NCCL."""


def make_node_view(before: NodeScrape | None, now: NodeScrape, first: NodeScrape | None = None) -> NodeView:
    """What `railscope top` shows of the node between `before` and `now`; errors are remembered from scrape `first` on.

    A `before` that is not older than `now` says nothing: rates are unknown then.
    """
    span = None if before is None or now.at_seconds <= before.at_seconds else now.at_seconds - before.at_seconds
    compared = before if span is not None else None
    return NodeView(
        at_seconds=now.at_seconds,
        span_seconds=span,
        version=now.version,
        simulated=now.simulated,
        processes=now.processes,
        ranks=_ranks(compared, now, span),
        rails=_rails(compared, now, span, first or compared),
        gpus=make_gpu_views(compared, now, span, first or compared),
        ops=_ops(compared, now, span),
        jobs=_jobs(first, now),
        stalls=tuple(sorted(now.stalls, key=_rank_of_stall)),
        last_ended=now.ended_stalls[-1] if now.ended_stalls else None,
        failing_collectors=now.failing_collectors,
        transfers=make_transfer_views(
            compared.transfers if compared is not None else None,
            now.transfers,
            span,
            {
                (stall.library, stall.op.removeprefix(f"{stall.library} "), stall.pid, stall.peer): stall.cause
                for stall in now.stalls
                if stall.library
            },
        ),
    )


def _rank_of_stall(stall: ScrapedStall) -> tuple[int, bool, float]:
    """Where several ends of a communicator stand, what one of them sees explains what the others only feel."""
    return tier_of(stall.cause), stall.strength == "weak", -stall.seconds


def _jobs(first: NodeScrape | None, now: NodeScrape) -> tuple[JobView, ...]:
    views = []
    for (comm, rank), job in now.jobs.items():
        before = first.jobs.get((comm, rank)) if first is not None else None
        steps, seconds, parts = job.steps, job.seconds, dict(job.parts)
        if before is not None and before.steps < job.steps:
            steps, seconds = steps - before.steps, seconds - before.seconds
        if before is not None and before.parts.keys() <= parts.keys():
            more = {part: value - before.parts.get(part, 0.0) for part, value in parts.items()}
            parts = more if all(value >= 0 for value in more.values()) and any(more.values()) else parts
        ended = now.living is not None and (comm, rank) not in now.living
        views.append(JobView(comm, job.job, ratio(seconds, steps), StepShares.from_parts(parts), ended))
    return tuple(sorted(views, key=lambda job: job.ended))


def _entered(now: NodeScrape) -> dict[tuple[str, str], float]:
    """Operations that each rank entered, on one scale for a communicator; those that cannot be compared are left out.

    Calls are counted from when the agent came: where that was late for any rank, NCCL's own numbers serve, if at all.
    """
    late = {comm for (comm, _), rank in now.ranks.items() if rank.late}
    entered = {}
    for key, rank in now.ranks.items():
        comm, _ = key
        position = rank.sequence if comm in late else rank.enqueued
        if position is not None and comm != UNKNOWN:
            entered[key] = position
    return entered


def _ranks(before: NodeScrape | None, now: NodeScrape, span: float | None) -> tuple[RankView, ...]:
    stalls = {(stall.comm, stall.rank): stall for stall in reversed(now.stalls)}
    entered = _entered(now)
    furthest: dict[str, float] = {}
    for (comm, _), position in entered.items():
        furthest[comm] = max(furthest.get(comm, 0.0), position)
    ops_of = _OpsOfRanks(before, now)
    views = []
    for key, rank in now.ranks.items():
        old = before.ranks.get(key) if before is not None else None
        if old is not None and old.identity.pid != rank.identity.pid:
            old = None
        called, payload, calls = ops_of(rank)
        estimated = old is not None and bool(increase(old.estimated or 0.0, rank.estimated))
        stall = stalls.get(key)
        views.append(
            RankView(
                identity=rank.identity,
                op=stall.op if stall is not None else called,
                calls_per_second=_calls_per_second(old, rank, span, None if estimated else calls),
                calls_estimated=estimated,
                payload_bytes_per_second=None if payload is None or span is None else payload / span,
                mean_seconds=None
                if old is None
                else ratio(
                    increase(old.operation_seconds, rank.operation_seconds), increase(old.operations, rank.operations)
                ),
                inflight_seconds=rank.inflight_seconds,
                incomplete=_whole(increase(rank.completed, rank.enqueued)),
                behind=None if key not in entered else int(furthest[rank.identity.comm] - entered[key]),
                late_ratio=None if old is None else per_second(old.arrival_lag_seconds, rank.arrival_lag_seconds, span),
                stall=stall,
                process=now.rank_processes.get(rank.identity.process, _NO_PROCESS),
                cpu_ratio=_cpu_ratio(before, now, rank.identity.process),
                ended=now.living is not None and key not in now.living,
            )
        )
    return tuple(views)


def _cpu_ratio(before: NodeScrape | None, now: NodeScrape, pid: str) -> float | None:
    """By the moments at which the agent read each process: it reads some more seldom than it is asked."""
    new = now.rank_processes.get(pid, _NO_PROCESS)
    old = before.rank_processes.get(pid, _NO_PROCESS) if before is not None else _NO_PROCESS
    if new.read_realtime_ns is None or old.read_realtime_ns is None or new.start_realtime_ns != old.start_realtime_ns:
        return None
    span = (new.read_realtime_ns - old.read_realtime_ns) / 1e9
    return per_second(old.cpu_seconds, new.cpu_seconds, span) if span > 0 else None


def _calls_per_second(
    old: ScrapedRank | None, rank: ScrapedRank, span: float | None, calls: float | None
) -> float | None:
    """`calls`: those between the scrapes that the payload is of; None: not known.

    The agent answers /metrics and /communicators at different moments: a rate of the one beside a rate of the other
    would tell of calls without bytes.
    """
    if old is None:
        return None
    called = per_second(old.enqueued, rank.enqueued, span)
    if called is not None and calls is not None:
        called = per_second(0.0, calls, span)
    # Shown from the first replay on.
    replayed = per_second(old.replayed or 0.0, rank.replayed or 0.0, span)
    return None if called is None or replayed is None else called + replayed


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


class _OpsOfRanks:
    """The operations that a rank called, from the agent's series of the rank or of its GPU.

    An agent that has no page of communicators counts operations by GPU: where one rank alone can have called on a GPU
    between the scrapes, what was called is that rank's.
    """

    def __init__(self, before: NodeScrape | None, now: NodeScrape) -> None:
        self._told = now.living is not None
        by_rank: dict[tuple[str, str], dict[str, OpCounts]] = defaultdict(dict)
        by_rank_before: dict[tuple[str, str], dict[str, OpCounts]] = defaultdict(dict)
        for scrape, found in ((now, by_rank), (before, by_rank_before)):
            for (comm, rank, op), counts in scrape.rank_ops.items() if scrape is not None else ():
                found[comm, rank][op] = counts
        self._by_rank, self._by_rank_before = by_rank, by_rank_before
        self._by_gpu = _by_gpu(now)
        self._by_gpu_before = _by_gpu(before) if before is not None else {}
        self._lonely = _lonely_ranks([*now.ranks.values(), *(before.ranks.values() if before is not None else ())])

    def __call__(self, rank: ScrapedRank) -> tuple[str, float | None, float | None]:
        """What it called most (empty: cannot be known); between the scrapes, its payload and the calls with it."""
        key, gpu = rank.identity.key, rank.identity.gpu
        if self._told:
            return _most(self._by_rank_before.get(key), self._by_rank.get(key, {}))
        before = self._by_gpu_before.get(gpu)
        if before is not None and self._lonely.get(gpu) == key:
            called, payload, _ = _most(before, self._by_gpu.get(gpu, {}))
            # What the GPU did before may have been another process's.
            return called if payload else "", payload, None
        return "", None, None


def _by_gpu(scrape: NodeScrape) -> dict[str, dict[str, OpCounts]]:
    found: dict[str, dict[str, OpCounts]] = defaultdict(dict)
    for (gpu, op), counts in scrape.ops.items():
        found[gpu][op] = counts
    return found


def _lonely_ranks(ranks: Iterable[ScrapedRank]) -> dict[str, tuple[str, str]]:
    """The only rank of each GPU that has called anything, by GPU."""
    by_gpu: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for rank in ranks:
        if rank.enqueued and rank.identity.gpu != UNKNOWN:
            by_gpu[rank.identity.gpu].add(rank.identity.key)
    return {gpu: next(iter(found)) for gpu, found in by_gpu.items() if len(found) == 1}


def _most(before: Mapping[str, OpCounts] | None, now: Mapping[str, OpCounts]) -> tuple[str, float | None, float | None]:
    """What was called most; the payload of all between the scrapes, and their number; None: not known."""
    if not now:
        return "", None, None
    of_all = max(now, key=lambda op: now[op].calls)
    if before is None:
        return of_all, None, None
    calls: dict[str, float] = {}
    payload: float | None = 0.0
    for op, counts in now.items():
        old = before.get(op, OpCounts(0.0, 0.0))
        called = increase(old.calls, counts.calls)
        moved = increase(old.payload_bytes, counts.payload_bytes)
        calls[op] = called or 0.0
        payload = None if payload is None or called is None or moved is None else payload + moved
    lately = max(calls, key=lambda op: calls[op])
    return (lately if calls[lately] else of_all), payload, None if payload is None else sum(calls.values())


def _rails(
    before: NodeScrape | None, now: NodeScrape, span: float | None, first: NodeScrape | None
) -> tuple[RailView, ...]:
    blamed = {(stall.rail, stall.netns) for stall in now.stalls if stall.rail}
    views = []
    for key, rail in now.rails.items():
        old = _rail_of(before, key)
        new_errors = increased_errors(old.errors if old else None, rail.errors)
        shown = {name for name, _ in new_errors}
        oldest = _rail_of(first, key)
        past_errors = increased_errors(oldest.errors if oldest else None, rail.errors)
        views.append(
            RailView(
                rail=rail.rail,
                device=rail.device,
                netns=rail.netns,
                up=rail.up,
                speed_bytes_per_second=rail.speed_bytes_per_second,
                transmit_bytes_per_second=per_second(old.transmit_bytes if old else None, rail.transmit_bytes, span),
                receive_bytes_per_second=per_second(old.receive_bytes if old else None, rail.receive_bytes, span),
                transmit_explained_ratio=rail.transmit_explained_ratio,
                receive_explained_ratio=rail.receive_explained_ratio,
                new_errors=new_errors,
                past_errors=tuple(one for one in past_errors if one[0] not in shown),
                blamed=(rail.rail, rail.netns) in blamed,
                owners=_owners(old, rail),
                transmit_explained_due=rail.transmit_explained_ratio is None
                and bool(increase(old.transmit_expected_bytes if old else None, rail.transmit_expected_bytes)),
                receive_explained_due=rail.receive_explained_ratio is None
                and bool(increase(old.receive_expected_bytes if old else None, rail.receive_expected_bytes)),
            )
        )
    return tuple(views)


def _owners(old: ScrapedRail | None, rail: ScrapedRail) -> tuple[tuple[str, float], ...]:
    if old is None:
        return ()
    moved = {owner: count - old.bytes_by_owner.get(owner, 0.0) for owner, count in rail.bytes_by_owner.items()}
    together = sum(count for count in moved.values() if count > 0)
    parts = [(owner, count / together) for owner, count in moved.items() if count > 0]
    return tuple(sorted((one for one in parts if one[1] >= _LEAST_PART), key=lambda one: -one[1]))


def _rail_of(scrape: NodeScrape | None, key: RailKey) -> ScrapedRail | None:
    return scrape.rails.get(key) if scrape is not None else None


def _ops(before: NodeScrape | None, now: NodeScrape, span: float | None) -> tuple[OpView, ...]:
    counts, old_counts = _by_op(now), _by_op(before) if before is not None else {}
    views = []
    for op in dict.fromkeys((*counts, *now.completed)):
        new = counts.get(op)
        # A kind of operation is shown from its first call on.
        old = old_counts.get(op, OpCounts(0.0, 0.0)) if before is not None else None
        calls = increase(old.calls, new.calls) if old is not None and new is not None else None
        payload = increase(old.payload_bytes, new.payload_bytes) if old is not None and new is not None else None
        algorithm, bus = _bandwidths(op, before, now)
        views.append(
            OpView(
                op=op,
                calls_per_second=None if calls is None or span is None else calls / span,
                payload_bytes_per_second=None if payload is None or span is None else payload / span,
                mean_payload_bytes=ratio(payload, calls),
                algorithm_bandwidth=algorithm,
                bus_bandwidth=bus,
            )
        )
    return tuple(views)


def _by_op(scrape: NodeScrape) -> dict[str, OpCounts]:
    found: dict[str, OpCounts] = {}
    for (_, op), counts in scrape.ops.items():
        sums = found.get(op, OpCounts(0.0, 0.0))
        payload = None
        if sums.payload_bytes is not None and counts.payload_bytes is not None:
            payload = sums.payload_bytes + counts.payload_bytes
        found[op] = OpCounts(sums.calls + counts.calls, payload)
    return found


def _bandwidths(op: str, before: NodeScrape | None, now: NodeScrape) -> tuple[float | None, float | None]:
    """algbw and busbw of what completed between the scrapes."""
    new = now.completed.get(op)
    if before is None or new is None:
        return None, None
    old = before.completed.get(op, CompletedCounts(0.0, 0.0, 0.0))
    seconds = increase(old.seconds, new.seconds)
    return (
        ratio(increase(old.payload_bytes, new.payload_bytes), seconds),
        ratio(increase(old.bus_bytes, new.bus_bytes), seconds),
    )
