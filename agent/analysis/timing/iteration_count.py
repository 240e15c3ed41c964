"""Calls by iteration: which calls of a recording make up how many iterations, for figures of one iteration.

The iterations that a report lists end where the next one begins, so the last is not among them, and what came before
the first is in none.  Where the calls of the GPU whose iterations were found are a whole multiple of an iteration's,
all calls count, as so many iterations.  Where they are not, as in a recording that began in the middle of one, or
where other calls lie between iterations, as those of an evaluation, only the calls of complete iterations count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from railscope.agent.analysis.facts.report import Iteration, Regularity
from railscope.agent.analysis.tables.calls import CountedCalls, count_calls
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.timing.iterations import called_ns, rows_in_iterations
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count


@dataclass(frozen=True, eq=False)
class CountedIterations:
    """Calls that make up whole iterations."""

    number: int
    """At least 1."""
    counted: CountedCalls
    """All calls of these iterations."""
    note: str = ""
    """Which calls are left out, in one sentence; empty: none."""


def count_iterations(
    dataset: Dataset,
    gpus: Gpus,
    counted: CountedCalls,
    regularity: Regularity | None,
    iterations: Sequence[Iteration],
    said: int | None = None,
) -> CountedIterations | None:
    """The calls by iteration; `said` is how many there are, where the user knows.  None: no iterations were found."""
    if said is not None:
        return CountedIterations(said, counted)
    if regularity is None or not regularity.calls_per_iteration or not len(counted) or not iterations:
        return None
    of_gpu = np.array([gpus.gpu_of.get(end) == regularity.gpu for end in counted.ends])
    kinds = counted.kinds
    number, rest = divmod(int(kinds.calls[of_gpu[kinds.end]].sum()), regularity.calls_per_iteration)
    if number and not rest and not regularity.has_other_calls:
        return CountedIterations(number, counted)
    calls = dataset["calls"]
    moment = called_ns(calls)
    if regularity.between is None:
        inside = calls.filter((moment >= iterations[0].from_ns) & (moment < iterations[-1].to_ns))
    else:
        inside = rows_in_iterations(calls, moment, iterations).select(*calls.columns)
    complete = count_calls(replace(dataset, tables={**dataset.tables, "calls": inside}))
    left_out = counted.total_calls - complete.total_calls
    return CountedIterations(
        len(iterations),
        complete,
        f"{left_out:,} of {format_count(counted.total_calls, 'call')} "
        f"{'lies' if left_out == 1 else 'lie'} before{'' if regularity.between is None else ', between'} or after the "
        f"{format_count(len(iterations), 'complete iteration')} "
        f"that {'was' if len(iterations) == 1 else 'were'} found, and {'is' if left_out == 1 else 'are'} not in "
        "figures "
        "by iteration.",
    )
