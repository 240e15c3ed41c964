"""How well a job scales over several runs (scaling factor; paper B: (throughput of n / n) / throughput of the base).

Throughput is work done a second, and how much work an iteration is depends on how the run was set up:

- *weak* scaling: every GPU brings its own part of the batch, and throughput is iterations a second × GPUs.  The factor
  is the pace of iterations against that of the first run.
- *strong* scaling: the batch stays the same, and throughput is iterations a second.  The factor is that of weak scaling
  × GPUs of the first run / GPUs of this one.

Which of the two it is shows in what a GPU hands to NCCL for its own part of the batch, an iteration: activations, in
tensor, pipeline and expert parallelism, of the same pipeline and tensor ranks as in the first run.  If that is the same
(within 5 %), scaling is weak; if it shrank as the number of GPUs grew, strong.  Gradients are as large as the model
either way, so that purely data-parallel runs do not tell; then both factors stand, each with its name.

All of it needs that the runs are one job on more GPUs.  They are not where their parallelism or its pipeline and tensor
ranks differ, where a GPU's part of the batch did not stay between that of weak and of strong scaling, or where the
gradients are of another size: it is another model, and the pace of its iterations says nothing (`why_not_comparable`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.analysis.facts.options import STRONG, WEAK
from railscope.agent.analysis.facts.quantities import format_bytes
from railscope.agent.analysis.facts.report import Regularity, Report, Scaling
from railscope.agent.analysis.pictures.pictures import ROLE_NAMES

_OF_THE_BATCH: Final = ("tp", "pp", "ep")
_ALIKE: Final = 0.05
_OTHER: Final = 1.25
"""Times as much: of routed tokens and of padding neither two runs have the same, of another model or batch they do."""
_SHARDED: Final = frozenset({"AllGather", "ReduceScatter"})
"""A rank hands over its own part only, which shrinks as replicas are added."""


@dataclass(frozen=True, slots=True)
class Run:
    """What scaling needs of one run."""

    name: str
    gpus: int
    regularity: Regularity | None
    grid: tuple[int, int] | None = None
    """Pipeline and tensor ranks; None: not known."""
    work_bytes: Mapping[str, float] = field(default_factory=dict)
    """By role: payload of a rank in an iteration, of what depends on its part of the batch."""
    gradient_bytes: float = 0.0
    """What a rank reduces with its replicas in an iteration, of shards the whole; 0: it has no replicas."""
    ops: frozenset[str] = frozenset()
    """What is called where no communicator shows what it is for."""


def run_of(name: str, report: Report) -> Run:
    """What the scaling factor needs of a report."""
    shape, regularity = report.composition.parallelism, report.regularity
    work: dict[str, float] = {}
    gradients = 0.0
    if regularity is not None and regularity.calls_per_iteration:
        calls = sum(use.calls for use in report.composition.ranks if use.gpu == regularity.gpu)
        # With those of an evaluation, the number of calls tells nothing; the last iteration has no end.
        others = regularity.has_other_calls
        iterations = regularity.iterations + 1.0 if others else calls / regularity.calls_per_iteration
        work = {
            role.role: role.rank_payload_bytes / iterations
            for role in report.composition.roles
            if role.role in _OF_THE_BATCH and role.rank_payload_bytes and iterations
        }
        gradients = _gradient_bytes(report) / iterations if iterations else 0.0
    told = work or gradients
    return Run(
        name=name,
        gpus=len(report.gpus),
        regularity=regularity,
        grid=None if shape is None else (shape.pipeline, shape.tensor),
        work_bytes=work,
        gradient_bytes=gradients,
        ops=frozenset() if told else frozenset(use.op for use in report.ops),
    )


def _gradient_bytes(report: Report) -> float:
    """Of a rank that has replicas, over the whole recording."""
    own = [use for use in report.communicators if use.role == "dp"]
    moved = sum(
        op.payload_bytes * ((use.nranks or len(use.gpus)) if op.op in _SHARDED else 1) for use in own for op in use.ops
    )
    takers = len({gpu for use in own for gpu in use.gpus})
    return moved / takers if takers else 0.0


def why_not_comparable(first: Run, run: Run) -> str:
    """Why a run is not the first one's job on another number of GPUs, the end of a sentence; empty: it may be."""
    return "" if run.gpus == first.gpus else why_unlike(first, run)


def why_unlike(first: Run, run: Run) -> str:
    """Why two runs are not one job, on however many GPUs, the end of a sentence; empty: they may be.

    Of runs without iterations only what is called can tell, and one with and one without show nothing in common.
    """
    if (first.regularity is None) != (run.regularity is None):
        return ""
    if run.work_bytes.keys() != first.work_bytes.keys():
        return " and ".join(f"{one.name} has {_parallelism(one)}" for one in (first, run))
    if None not in (first.grid, run.grid) and run.grid != first.grid:
        return " and ".join(
            f"{one.name} has {one.grid[0]} × {one.grid[1]} pipeline and tensor ranks"
            for one in (first, run)
            if one.grid is not None
        )
    grown = run.gpus / first.gpus if first.gpus else 1.0
    least, most = min(1.0, 1 / grown) / _OTHER, max(1.0, 1 / grown) * _OTHER
    for role, before in first.work_bytes.items():
        if not least <= run.work_bytes[role] / before <= most:
            return (
                f"a rank of {first.name} hands over {format_bytes(before)} an iteration for {ROLE_NAMES[role]}, one of "
                f"{run.name} {format_bytes(run.work_bytes[role])}"
                f"{'' if grown == 1 else ', neither as much nor less by the number of GPUs'}"
            )
    gradients = sorted((first.gradient_bytes, run.gradient_bytes))
    if gradients[0] and gradients[1] / gradients[0] > _OTHER:
        return (
            f"a rank of {first.name} reduces {format_bytes(first.gradient_bytes)} of gradients an iteration, one of "
            f"{run.name} "
            f"{format_bytes(run.gradient_bytes)}, so that the models differ"
        )
    if run.ops != first.ops:
        return " and ".join(f"{one.name} calls {', '.join(sorted(one.ops)) or 'other things'}" for one in (first, run))
    return ""


def _parallelism(run: Run) -> str:
    names = [ROLE_NAMES[role] for role in _OF_THE_BATCH if role in run.work_bytes]
    return f"{' and '.join(names)} communication" if names else "no tensor, pipeline or expert parallel communication"


def find_scaling(runs: Sequence[Run], said: str | None = None) -> tuple[Scaling, ...]:
    """The scaling factor of each run with iterations, against the first; none if those of the first were not found.

    `said` is `WEAK` or `STRONG`, where the user knows.
    """
    known = [
        (run, 1 / run.regularity.period_seconds)
        for run in runs
        if run.regularity is not None and run.regularity.period_seconds > 0 and run.gpus
    ]
    if not known or known[0][0] is not runs[0]:
        return ()
    first, base = known[0]
    return tuple(_scaling(run, pace, first, base, said or _kind(first, run)) for run, pace in known)


def _scaling(run: Run, pace: float, first: Run, base: float, kind: str | None) -> Scaling:
    weak = pace / base
    strong = weak * first.gpus / run.gpus
    known = {WEAK: weak, STRONG: strong}
    # Of as many GPUs both are the same.
    factor = weak if run.gpus == first.gpus else known.get(kind or "")
    return Scaling(run.name, run.gpus, pace, kind, factor, weak, strong)


def _kind(first: Run, run: Run) -> str | None:
    if run.gpus == first.gpus or run.grid is None or run.grid != first.grid or not run.work_bytes:
        return None
    if run.work_bytes.keys() != first.work_bytes.keys():
        return None
    parts = [run.work_bytes[role] / first.work_bytes[role] for role in run.work_bytes]
    grown = run.gpus / first.gpus
    if all(abs(part - 1) <= _ALIKE for part in parts):
        return WEAK
    return STRONG if all(abs(part * grown - 1) <= _ALIKE for part in parts) else None
