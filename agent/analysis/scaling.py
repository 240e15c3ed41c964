"""How well a job scales over several runs (row 14; paper B: (throughput of n / n) / throughput of the base).

Throughput is work done a second, and how much work an iteration is depends on how the run was set up:

- *weak* scaling: every GPU brings its own part of the batch, and throughput is iterations a second × GPUs.  The factor
  is the pace of iterations against that of the first run.
- *strong* scaling: the batch stays the same, and throughput is iterations a second.  The factor is that of weak scaling
  × GPUs of the first run / GPUs of this one.

Which of the two it is shows in what a GPU hands to NCCL for its own part of the batch, an iteration: activations, in
tensor, pipeline and expert parallelism, of the same pipeline and tensor ranks as in the first run.  If that is the same
(within 5 %), scaling is weak; if it shrank as the number of GPUs grew, strong.  Gradients are as large as the model
either way, so that purely data-parallel runs do not tell; then both factors stand, each with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.analysis.report_facts import Regularity, Report, Scaling
from agent.analysis.report_options import STRONG, WEAK

_OF_THE_BATCH: Final = ("tp", "pp", "ep")
_ALIKE: Final = 0.05


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


def run_of(name: str, report: Report) -> Run:
    """What scaling needs of a report."""
    shape, regularity = report.composition.parallelism, report.regularity
    work: dict[str, float] = {}
    if regularity is not None and regularity.calls_per_iteration:
        calls = sum(use.calls for use in report.composition.ranks if use.gpu == regularity.gpu)
        iterations = calls / regularity.calls_per_iteration
        work = {
            role.role: role.rank_payload_bytes / iterations
            for role in report.composition.roles
            if role.role in _OF_THE_BATCH and role.rank_payload_bytes and iterations
        }
    return Run(name, len(report.gpus), regularity, None if shape is None else (shape.pipeline, shape.tensor), work)


def find_scaling(runs: Sequence[Run], said: str | None = None) -> tuple[Scaling, ...]:
    """Every run whose iterations were found, against the first; none if those of the first were not found.

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
