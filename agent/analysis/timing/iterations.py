"""The iterations of a job, without hints, and which rows lie in which (regularity; paper B: on-off regularity).

The calls of one GPU, the one that makes most, are cut where they repeat (`repetition`).  An iteration is known once the
next one has begun: calls before the first and from the last start on are in none.

Where a trace of the GPU has kernels that communicate, these are cut, and not their calls: a host runs ahead of its GPU,
enqueues several iterations at once and waits then, so that its clock says nothing of how long they take.  Where these
kernels alone do not repeat, as equal ones of unknown size do not, they are looked at among the GPU's other kernels.  A
call is in the iteration in which its kernel began, where the trace tells which one that is.

An iteration that other calls interrupt (an evaluation, a checkpoint) is counted, and in no figure below: what it took
itself is not known.  What it took beyond the median is told apart, as what lies between iterations.

- period: median of the times from an iteration's first call to the next one's.
- duty cycle: part of the time in which the GPU communicates: the union of its recorded operations, gaps shorter than a
  twentieth of the period included.  None where no operation has times: calls tell when something was enqueued, and
  nothing of how long the network was busy with it.  None as well where nobody knows of kernels whether they
  communicate (`suspects`).
- recurrence: part of iterations that make the same calls (operation, data type, payload, peer, communicator) as the
  most frequent iteration, in the same order on every communicator.
- recurrence without sizes: the same where payload is not looked at; uneven all-to-alls of a mixture of experts (MoE)
  repeat so, and not with sizes ("semi-predictable").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import ibis
import numpy as np
import pyarrow as pa

from railscope.agent.analysis.facts.report import Iteration, OtherCalls, Regularity, Unknown
from railscope.agent.analysis.tables.gpu_rows import (
    CALLS,
    KERNELS,
    OPERATIONS,
    dense_codes,
    read_series,
    rows_by_gpu,
    rows_of_gpu,
)
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.timing.computation import add_computation, find_suspects
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count
from railscope.agent.rhythm.cuts import Flags
from railscope.agent.rhythm.intervals import BURST_GAP, Intervals, union
from railscope.agent.rhythm.repetition import (
    INTERRUPTED,
    Repetition,
    find_most_frequent,
    find_repetition,
    relative_spread,
)
from railscope.agent.rhythm.series import CallSeries, Integers

ROW: Final = 9
_LONG_NS: Final = 1 << 62
_MOST_SLOTS: Final = 64
"""Of an iteration."""


def find_iterations(
    dataset: Dataset, gpus: Gpus
) -> tuple[Regularity | None, tuple[Iteration, ...], tuple[Unknown, ...]]:
    """How regular the job is, and its iterations in order of time, without the figures of other modules."""
    table, rows = _most_telling(dataset, gpus)
    if not rows:
        return None, (), (Unknown(ROW, "No call was recorded: record while the job runs, or import a trace of it."),)
    gpu = min(rows, key=lambda number: (-rows[number], number))
    operations = series = read_series(dataset, gpus, gpu, table)
    repetition = find_repetition(series, dense_codes)
    among = None
    if repetition is None and table == KERNELS:
        among = add_computation(series, dataset, gpus, gpu)
        repetition = None if among is None else find_repetition(among, dense_codes)
    if repetition is None:
        return None, (), (Unknown(ROW, _declined(series, gpus.gpus[gpu].number, table)),)
    series = series if among is None else among
    time_ns, starts, whole = series.time_ns, repetition.starts, ~repetition.interrupted
    iterations = _iterations(series, starts, whole)
    lengths_ns = np.diff(time_ns[starts])
    period_ns = float(np.median(lengths_ns[whole]))
    covered = communication_intervals(dataset, gpus, gpu, period_ns)
    if covered is not None and find_suspects(dataset, gpus, gpu, int(time_ns[starts[0]]), int(time_ns[starts[-1]])):
        covered = None
    own_starts = starts if among is None else np.searchsorted(operations.time_ns, time_ns[starts])
    if (np.diff(own_starts) <= 0).any():
        # Some iterations have no operation: their other kernels tell whether they are alike.
        operations, own_starts = series, starts
    recurrence, calls = find_most_frequent(operations, own_starts, operations.symbol, whole)
    between = _between(lengths_ns, np.diff(own_starts) - calls, whole, period_ns)
    if table == KERNELS:
        calls = _usual_calls(dataset, gpus, gpu, iterations) or calls
    regularity = Regularity(
        period_seconds=period_ns / 1e9,
        duty_cycle=None if covered is None else _covered_part(covered, time_ns[starts], whole),
        recurrence=recurrence,
        iterations=len(starts) - 1,
        calls_per_iteration=calls,
        gpu=gpu,
        recurrence_without_sizes=find_most_frequent(operations, own_starts, operations.kind, whole)[0],
        spread=relative_spread(lengths_ns[whole]),
        basis=_basis(repetition, table, computing=among is not None),
        cut_by=table,
        between=between,
        before_seconds=_other_seconds(int(time_ns[starts[0]] - time_ns[0]), 0.0, period_ns),
        behind_seconds=_other_seconds(int(time_ns[-1] - time_ns[starts[-1]]), period_ns, period_ns),
    )
    return regularity, iterations, ()


def _most_telling(dataset: Dataset, gpus: Gpus) -> tuple[str, dict[int, int]]:
    """What iterations are cut by, and how many of them each GPU has."""
    for table in (KERNELS, CALLS, OPERATIONS):
        rows = rows_by_gpu(dataset, table, gpus)
        if rows:
            return table, rows
    return CALLS, {}


def called_ns(calls: Any) -> Any:
    """When a call counts: when its kernel began, or where that is not known, when it was made."""
    return calls.gpu_begin_ns.fill_null(calls.time_ns)


def _usual_calls(dataset: Dataset, gpus: Gpus, number: int, iterations: Sequence[Iteration]) -> int:
    """The most frequent number of calls of a GPU in an iteration; 0: there are no calls."""
    calls = rows_of_gpu(dataset[CALLS], gpus, number)
    times = dataset.rows(calls.select(moment=called_ns(calls)).filter(lambda row: row.moment.notnull()))
    moments = np.sort(times["moment"].to_numpy()) if len(times) else np.zeros(0, np.int64)
    from_ns, to_ns = (np.array([getattr(one, edge) for one in iterations]) for edge in ("from_ns", "to_ns"))
    counts = np.searchsorted(moments, to_ns) - np.searchsorted(moments, from_ns)
    found, often = np.unique(counts, return_counts=True)
    return int(found[np.argmax(often)])


def operation_intervals(dataset: Dataset, gpus: Gpus, number: int) -> Intervals:
    """When operations of a GPU were under way, as far as their times were recorded."""
    operations = rows_of_gpu(dataset["operations"], gpus, number)
    operations = operations.filter(operations.begin_ns.notnull() & operations.end_ns.notnull())
    found = dataset.rows(operations.select("begin_ns", "end_ns"))
    return union(found["begin_ns"].to_numpy(), found["end_ns"].to_numpy())


def communication_intervals(dataset: Dataset, gpus: Gpus, number: int, period_ns: float) -> Intervals | None:
    """When a GPU communicates, gaps within a burst included; None: no operation of it has times."""
    measured = operation_intervals(dataset, gpus, number)
    return measured.fill_gaps(round(period_ns / BURST_GAP)) if len(measured.begin_ns) else None


def rows_in_iterations(rows: Any, time_ns: Any, iterations: Sequence[Iteration]) -> Any:
    """The rows that lie in an iteration, with its place in the column `iteration`.

    Iterations are joined by slots of time as long as the usual one, so that engines need compare a row with very few
    of them.  One that is much longer, as there was a pause in it, is joined by longer slots: an hour has hundreds of
    thousands of short ones.
    """
    from_ns = np.array([one.from_ns for one in iterations], np.int64)
    to_ns = np.array([one.to_ns for one in iterations], np.int64)
    origin = int(from_ns[0])
    within = rows.mutate(moment=time_ns).filter(lambda row: (row.moment >= origin) & (row.moment < int(to_ns[-1])))
    joined = []
    slot_ns = max(1, int(np.median(to_ns - from_ns)))
    left = np.arange(len(iterations))
    while len(left):
        first, last = (from_ns[left] - origin) // slot_ns, (to_ns[left] - 1 - origin) // slot_ns
        few = last - first < _MOST_SLOTS
        if few.any():
            slots = ibis.memtable(_slots(left[few], first[few], last[few], from_ns, to_ns))
            own = within.mutate(slot=((within.moment - origin) // slot_ns).cast("int64")).join(slots, "slot")
            joined.append(own.filter((own.moment >= own.iteration_from) & (own.moment < own.iteration_to)))
        left, slot_ns = left[~few], slot_ns * _MOST_SLOTS
    return ibis.union(*joined) if len(joined) > 1 else joined[0]


def _slots(places: Integers, first: Integers, last: Integers, from_ns: Integers, to_ns: Integers) -> pa.Table:
    """Each slot from the first to the last of each iteration."""
    many = last - first + 1
    place = np.repeat(places, many)
    slot = np.repeat(first - (np.cumsum(many) - many), many) + np.arange(len(place))
    return pa.table({"slot": slot, "iteration": place, "iteration_from": from_ns[place], "iteration_to": to_ns[place]})


def _covered_part(covered: Intervals, starts_ns: Integers, whole: Flags) -> float:
    """Of the iterations that were not interrupted."""
    from_ns, to_ns = starts_ns[:-1][whole], starts_ns[1:][whole]
    return int(covered.length_in(from_ns, to_ns).sum()) / int((to_ns - from_ns).sum())


def _between(lengths_ns: Integers, more_calls: Integers, whole: Flags, period_ns: float) -> OtherCalls | None:
    """What interrupts iterations; `more_calls` are those of each beyond the usual ones."""
    if whole.all():
        return None
    seconds = float((lengths_ns[~whole] - period_ns).sum()) / 1e9
    stretches = int((~whole).sum())
    return OtherCalls(
        stretches=stretches,
        calls=int(np.maximum(more_calls[~whole], 0).sum()),
        seconds=seconds,
        mean_seconds=seconds / stretches,
        share=seconds * 1e9 / int(lengths_ns.sum()),
    )


def _other_seconds(time_ns: int, own_ns: float, period_ns: float) -> float:
    """How much of a time at the edge of a recording, in which calls were made, no iteration can have taken."""
    return (time_ns - own_ns) / 1e9 if time_ns > INTERRUPTED * period_ns else 0.0


def _iterations(series: CallSeries, starts: Integers, whole: Flags) -> tuple[Iteration, ...]:
    """Those that were not interrupted."""
    first = series.time_ns[starts]
    silence = series.silence_ns[starts]
    if starts[0] == 0:
        silence[0] = _LONG_NS  # what came before was not recorded
    # No more than usual, lest a pause makes the iteration behind it longer.
    edges = first - np.minimum(silence, int(np.median(silence))) // 2
    return tuple(
        Iteration(
            start=start / 1e9,
            period_seconds=(following - start) / 1e9,
            comm_seconds=None,
            comm_ratio=None,
            non_overlapped_seconds=None,
            non_overlapped_ratio=None,
            all_to_all=None,
            from_ns=low,
            to_ns=high,
        )
        for start, following, low, high in zip(
            *(column[whole].tolist() for column in (first[:-1], first[1:], edges[:-1], edges[1:])), strict=True
        )
    )


def _basis(repetition: Repetition, table: str, *, computing: bool) -> str:
    what = "Kernels that communicate" if table == KERNELS else "Calls"
    what = "Kernels, also those that compute," if computing else what
    doubt = (
        f" Each iteration holds {repetition.parts:,} equal stretches of them, each after a silence: micro-batches, or "
        "steps, if what lies between is no gradients."
        if repetition.parts
        else ""
    )
    if repetition.by_gaps:
        return f"Equal {what[:1].lower()}{what[1:]} come in bursts of the same number, with silence between them."
    if repetition.sizes_vary:
        return f"{what} repeat in their order, but for the sizes of some.{doubt}"
    return f"{what} repeat in their order.{doubt}"


def _declined(series: CallSeries, gpu: int, table: str) -> str:
    kinds, symbols = (int(numbers.max()) + 1 for numbers in (series.kind, series.symbol))
    what, kind = ("communication kernel", "kernel") if table == KERNELS else ("call", "call")
    with_sizes = f", {symbols:,} with their sizes" if symbols != kinds else ""
    many = len(series)
    return (
        f"The {many if many != 1 else 'only'} {what}{'s' * (many != 1)} of GPU {gpu} "
        f"({format_count(kinds, 'kind')} of {kind}{with_sizes}) {'repeat' if many != 1 else 'repeats'} "
        "neither in order nor regularly in time, as with requests at random times: there is no period. For a job with "
        "iterations, record at least three of them, and at least ten between two evaluations or checkpoints."
    )
