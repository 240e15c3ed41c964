"""Simulated: what the agents of a fleet expose while jobs run on it and things break.

Nothing here was measured.  A node is dashboards/typical_node.py's, with communicators as training jobs have them, and
its exposition is written by the product's own renderer: of what never changes once, of communicators and rails anew at
every scrape.  Every node has eight GPUs with one process each; the jobs take a half, a quarter, an eighth and the rest
of the nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.agent.facts.snapshot import (
    CommunicatorFacts,
    CommunicatorStall,
    NodeCollectives,
    NodeStalls,
    NodeTimes,
    RailFacts,
    RankTimes,
)
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.dashboards.typical_node import GPUS, typical_node
from railscope.exporters.series.families import make_families
from railscope.exporters.series.lean import FULL, LEAN, LeanSeries
from railscope.exporters.series.text import Format, Renderer

FIRST_PID: Final = 4000
STALL_SECONDS: Final = 2.0
"""After so long a host calls an operation stalled that does not complete."""
_NODES_OF_A_GROUP: Final = 4
"""Of pipeline and model parallelism; of context parallelism half as many."""
_OPERATIONS_PER_SECOND: Final = {
    "world": 0.2, "tp": 40.0, "ep": 20.0, "dp": 2.0, "pp": 10.0, "cp": 12.0, "dpcp": 1.0, "mp": 0.5,
}  # fmt: skip
_OPERATION_SECONDS: Final = 0.011
_RAIL_BYTES_PER_SECOND: Final = 2_000_000_000
_SICK_GPU: Final = 5
_SICK_RAIL: Final = 3
_LEAF: Final = 4
"""A leaf switch takes down a rail of one node of so many."""
_SILENT: Final = 5
_MOVING: Final = frozenset(
    {
        catalogue.COMM_INFO,
        catalogue.COMM_ENQUEUED,
        catalogue.COMM_SEQUENCE,
        catalogue.COMM_COMPLETED,
        catalogue.COMM_SIGNATURE,
        catalogue.COMM_INFLIGHT_SECONDS,
        catalogue.COMM_OPERATIONS,
        catalogue.COMM_OPERATION_SECONDS,
        catalogue.COMM_STALLED,
        catalogue.COMM_STALL_INFO,
        catalogue.COMM_STALL_SECONDS,
        catalogue.COMM_ENDED,
        catalogue.COMM_COUNTED_FROM_START,
        catalogue.RAIL_TRANSMIT_BYTES,
        catalogue.RAIL_RECEIVE_BYTES,
        catalogue.RAIL_UP,
        catalogue.SNAPSHOT_TIMESTAMP,
        catalogue.AGENT_START_TIME,
    }
)
"""Families that are made at every scrape."""


class Fault(StrEnum):
    """What breaks."""

    NONE = "none"
    BEHIND = "behind"
    """A rank enters nothing any more, and its host cannot say why."""
    RAIL = "rail"
    """A rail of one node goes down."""
    LEAF = "leaf"
    """A rail of a quarter of the nodes goes down."""
    SILENT = "silent"
    """Five agents do not answer."""
    THREE = "three"
    """A rank behind, a rail down and a stopped process, each in a job of its own."""


@dataclass(frozen=True, slots=True)
class Sickness:
    """What holds up a job."""

    cause: Cause | None
    """As the host where it is says; None: its host says nothing."""
    since: float
    """Seconds since the Unix epoch."""
    nodes: frozenset[int]
    """Of the job's nodes, counted from 0."""
    gpu: int


@dataclass(frozen=True, slots=True)
class Culprit:
    """What is to blame for the stall of one job."""

    cause: Cause
    nodes: frozenset[int]
    pid: int | None
    """Of the process; None: a rail is to blame."""


@dataclass(frozen=True, slots=True)
class Job:
    """Nodes that train one model."""

    name: str
    first: int
    nodes: int


@dataclass(frozen=True, slots=True)
class _End:
    """One rank's end of a communicator."""

    kind: str
    comm: str
    rank: int
    nranks: int
    node_rank: int
    local_ranks: int
    gpu: int


class Fleet:
    """Nodes 0, 1, …; `text` is what one of them exposes at a moment."""

    def __init__(self, nodes: int, began: float, profile: str = FULL) -> None:
        """Nodes whose agents are well.

        Args:
            nodes: how many.
            began: when the jobs did, seconds since the Unix epoch.
            profile: of what the agents show.
        """
        self.nodes, self._began = nodes, began
        self.jobs = tuple(_share_out(nodes))
        self._job_of = {job.first + at: job for job in self.jobs for at in range(job.nodes)}
        self._ends = {node: tuple(_ends(job, node - job.first)) for node, job in self._job_of.items()}
        self._sick: dict[str, Sickness] = {}
        self._rails_down: frozenset[int] = frozenset()
        self.silent: frozenset[int] = frozenset()
        typical = typical_node(0)
        self._rails = tuple(replace(rail, counters=(), queue=None, tcp=None, ledger=None) for rail in typical.rails)
        self._typical = replace(typical, rails=self._rails)
        self._lean = {node: LeanSeries() for node in range(nodes)} if profile == LEAN else None
        if self._lean is not None:
            self._rails = typical.rails
        self._still = Renderer().render(
            (family for family in make_families(typical_node(0)) if family.metric not in _MOVING), Format.PROMETHEUS
        )

    def break_by(self, fault: Fault, now: float) -> None:
        """Mend what is broken, and let this happen."""
        first = self.jobs[0]
        self._sick, self._rails_down, self.silent = {}, frozenset(), frozenset()
        match fault:
            case Fault.BEHIND | Fault.THREE:
                self._sick[first.name] = Sickness(None, now, frozenset({first.nodes // 3}), _SICK_GPU)
            case Fault.LEAF:
                down = range(max(1, self.nodes // _LEAF))
                self._rails_down = frozenset(down)
                sick = frozenset(node for node in down if node < first.nodes)
                self._sick[first.name] = Sickness(Cause.RAIL_DOWN, now, sick, _SICK_RAIL)
            case Fault.SILENT:
                self.silent = frozenset(range(1, min(_SILENT + 1, self.nodes)))
        if fault in (Fault.RAIL, Fault.THREE):
            second = self.jobs[1]
            self._sick[second.name] = Sickness(Cause.RAIL_DOWN, now, frozenset({second.nodes - 1}), _SICK_RAIL)
            self._rails_down = frozenset({second.first + second.nodes - 1})
        if fault is Fault.THREE:
            third = self.jobs[2]
            self._sick[third.name] = Sickness(Cause.PROCESS_STOPPED, now, frozenset({third.nodes - 1}), 2)

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """What is to blame, of each job that stands still."""
        first = {job.name: job.first for job in self.jobs}
        return tuple(
            Culprit(
                one.cause or Cause.RANK_BEHIND,
                frozenset(first[job] + node for node in one.nodes),
                None if one.cause is Cause.RAIL_DOWN else FIRST_PID + one.gpu,
            )
            for job, one in self._sick.items()
        )

    def text(self, node: int, now: float) -> bytes:
        """The exposition of one node, in Prometheus's text format."""
        job = self._job_of[node]
        facts, times, stalls = [], [], []
        for end in self._ends[node]:
            fact, stall = self._rank(job, node - job.first, end, now)
            facts.append(fact)
            done = fact.completed or 0
            times.append(RankTimes(end.comm, str(end.rank), done, done * _OPERATION_SECONDS))
            if stall is not None:
                stalls.append(stall)
        snapshot = replace(
            self._typical,
            realtime_ns=int(now * 1e9),
            monotonic_ns=int(now * 1e9),
            collectives=NodeCollectives(
                communicators=tuple(facts), times=NodeTimes(by_rank=tuple(times)), identity_conflicts=0
            ),
            rails=tuple(self._rail(rail, node, now) for rail in self._rails),
            stalls=NodeStalls(lengths=tuple(stalls)),
            health=replace(self._typical.health, started_realtime_ns=int(self._began * 1e9)),
        )
        if self._lean is not None:
            return Renderer().render(self._lean[node].select(make_families(snapshot), snapshot), Format.PROMETHEUS)
        moving = (family for family in make_families(snapshot) if family.metric in _MOVING)
        return self._still + Renderer().render(moving, Format.PROMETHEUS)

    def _rail(self, rail: RailFacts, node: int, now: float) -> RailFacts:
        down = node in self._rails_down and rail.rail == str(_SICK_RAIL)
        carried = int((now - self._began) * _RAIL_BYTES_PER_SECOND)
        return replace(rail, up=not down, transmit_bytes=carried, receive_bytes=carried)

    def _rank(self, job: Job, node: int, end: _End, now: float) -> tuple[CommunicatorFacts, CommunicatorStall | None]:
        sick = self._sick.get(job.name)
        completed = int(((sick.since if sick else now) - self._began) * _OPERATIONS_PER_SECOND[end.kind])
        entered, said = _stand_still(sick, job, node, end) if sick else (False, None)
        waited = now - sick.since if sick and entered else 0.0
        position = completed + entered
        fact = CommunicatorFacts(
            identity=RankIdentity(
                comm=end.comm,
                rank=str(end.rank),
                nranks=str(end.nranks),
                gpu=str(end.gpu),
                node_rank=str(end.node_rank),
                local_ranks=str(end.local_ranks),
                nccl_version="2.28.9",
                pid=FIRST_PID + end.gpu,
                netns="",
                job=(("job", job.name), ("user", "ada")),
                identity_source="layout",
                gpu_uuid=f"GPU-{node}-{end.gpu}",
                pci_bus_id=f"00000000:1{end.gpu}:00.0",
            ),
            enqueued=position,
            ops=(),
            alive=True,
            completed=completed,
            inflight_seconds=waited,
            whole=True,
            position=position,
            signature=position // 64 * 2**32 + 1 if end.rank % end.local_ranks == 0 else None,
        )
        if sick is None or said is None or now - sick.since < STALL_SECONDS:
            return fact, None
        stall = _stall(end, said, sick.since)
        return fact, CommunicatorStall(end.comm, str(end.rank), said.cause.value, now - sick.since, stall)


def _share_out(nodes: int) -> Iterator[Job]:
    sizes = [nodes // 2, nodes // 4, nodes // 8]
    first = 0
    for name, size in zip("ABCD", (*sizes, nodes - sum(sizes)), strict=True):
        if size:
            yield Job(f"pretrain-{name}", first, size)
            first += size


def _ends(job: Job, node: int) -> Iterator[_End]:
    """The communicators of a node's eight processes, as data, tensor, pipeline and expert parallelism make them."""

    def comm(*which: object) -> str:
        return hashlib.blake2b(repr((job.name, *which)).encode(), digest_size=8).hexdigest()

    group, pair = node // _NODES_OF_A_GROUP, node // 2
    in_group = min(_NODES_OF_A_GROUP, job.nodes - _NODES_OF_A_GROUP * group)
    for gpu in range(GPUS):
        yield _End("world", comm("world"), GPUS * node + gpu, GPUS * job.nodes, node, GPUS, gpu)
        yield _End("tp", comm("tp", node), gpu, GPUS, 0, GPUS, gpu)
        yield _End("ep", comm("ep", node), gpu, GPUS, 0, GPUS, gpu)
        yield _End("dp", comm("dp", gpu), node, job.nodes, node, 1, gpu)
        yield _End("pp", comm("pp", group, gpu), node % _NODES_OF_A_GROUP, in_group, node % _NODES_OF_A_GROUP, 1, gpu)
        yield _End("cp", comm("cp", pair, gpu), node % 2, min(2, job.nodes - 2 * pair), node % 2, 1, gpu)
        alike = (job.nodes + 1 - node % 2) // 2
        yield _End("dpcp", comm("dpcp", node % 2, gpu), pair, alike, pair, 1, gpu)
        place = GPUS * (node % _NODES_OF_A_GROUP) + gpu
        yield _End("mp", comm("mp", group), place, GPUS * in_group, node % _NODES_OF_A_GROUP, GPUS, gpu)


def _stand_still(sick: Sickness, job: Job, node: int, end: _End) -> tuple[bool, Diagnosis | None]:
    """Of a rank whose job stands still: whether it is inside an operation, and what its host says of it.

    The data parallel communicator of the sick GPU stands still; in the tensor parallel one of each node the others
    wait for the rank that waits there.  The job's other communicators are between operations.
    """
    waits = Diagnosis(Cause.RANK_BEHIND, ("it waits",), culprit=False)
    here = node in sick.nodes
    if job.nodes > 1 and end.kind == "dp" and end.gpu == sick.gpu:
        blamed = min(sick.nodes)
        match sick.cause:
            case Cause.RAIL_DOWN if here:
                return True, _rail_down()
            case Cause.RAIL_DOWN:
                return True, Diagnosis(Cause.UNKNOWN, ("it waits",), culprit=False)
            case None if here:
                return False, None
            case Cause() as cause if here:
                return False, Diagnosis(cause, ("it is stopped",), culprit=True, blamed_rank=blamed)
        return True, waits
    if end.kind == "cp" and end.gpu == sick.gpu and {node, node ^ 1} <= sick.nodes:
        return True, _rail_down()  # both ends are below the switch that took their rail down
    if end.kind == "tp":
        alone = job.nodes == 1 and here
        if end.gpu == sick.gpu:
            stopped = alone and sick.cause is Cause.PROCESS_STOPPED
            said = Diagnosis(Cause.PROCESS_STOPPED, ("it is stopped",), culprit=True, blamed_rank=sick.gpu)
            return False, said if stopped else None
        return True, replace(waits, blamed_rank=sick.gpu)
    return False, None


def _rail_down() -> Diagnosis:
    rail = str(_SICK_RAIL)
    return Diagnosis(Cause.RAIL_DOWN, ("the link is down",), culprit=True, rail=rail, device=f"mlx5_{rail}")


def _stall(end: _End, said: Diagnosis, since: float) -> Stall:
    return Stall(
        instance=1,
        comm=end.comm,
        rank=str(end.rank),
        nranks=str(end.nranks),
        pid=FIRST_PID + end.gpu,
        op="AllReduce",
        payload_bytes=None,
        since_ns=int(since * 1e9),
        flagged_ns=int((since + STALL_SECONDS) * 1e9),
        realtime_offset_ns=0,
        flight_strength="weak" if said.cause is Cause.UNKNOWN else "strong",
        diagnosis=said,
    )
