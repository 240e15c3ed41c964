"""How well a job scales over several runs (row 14; paper B: (throughput of n / n) / throughput of the base).

Throughput is iterations a second × GPUs, as every GPU brings its own part of the batch (weak scaling): the factor is
then the pace of iterations against that of the first run.  Where the global batch stays the same, throughput is the
iterations alone, and the factor would be this one × GPUs of the first run / GPUs of this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.analysis.report_facts import Regularity, Scaling


@dataclass(frozen=True, slots=True)
class Run:
    """What scaling needs of one run."""

    name: str
    gpus: int
    regularity: Regularity | None


def find_scaling(runs: Sequence[Run]) -> tuple[Scaling, ...]:
    """Every run whose iterations were found, against the first; none if those of the first were not found."""
    known = [
        (run, run.gpus / run.regularity.period_seconds)
        for run in runs
        if run.regularity is not None and run.regularity.period_seconds > 0 and run.gpus
    ]
    if not known or known[0][0] is not runs[0]:
        return ()
    base = known[0][1] / known[0][0].gpus
    return tuple(Scaling(run.name, run.gpus, throughput, throughput / run.gpus / base) for run, throughput in known)
