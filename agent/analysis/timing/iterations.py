"""The iterations of a job, without hints, and which rows lie in which (regularity; paper B: on-off regularity).

The calls of one GPU, the one that makes most, are cut where they repeat (`repetition`).  An iteration is known once the
next one has begun: calls before the first and from the last start on are in none.

- period: median of the times from an iteration's first call to the next one's.
- duty cycle: part of the time in which the GPU communicates: the union of its recorded operations, gaps shorter than a
  twentieth of the period included.  None where no operation has times: calls tell when something was enqueued, and
  nothing of how long the network was busy with it.
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

from railscope.agent.analysis.facts.report import Iteration, Regularity, Unknown
from railscope.agent.analysis.tables.gpu_rows import dense_codes, read_series, rows_by_gpu, rows_of_gpu
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.intervals import BURST_GAP, Intervals, union
from railscope.agent.dataset.reader import Dataset
from railscope.agent.rhythm.repetition import Repetition, find_most_frequent, find_repetition, relative_spread
from railscope.agent.rhythm.series import CallSeries, Integers

ROW: Final = 9
_LONG_NS: Final = 1 << 62
_MOST_SLOTS: Final = 64
"""Of an iteration."""


def find_iterations(
    dataset: Dataset, gpus: Gpus
) -> tuple[Regularity | None, tuple[Iteration, ...], tuple[Unknown, ...]]:
    """How regular the job is, and its iterations in order of time, without the figures of other modules."""
    table = "calls"
    rows = rows_by_gpu(dataset, table, gpus)
    if not rows:
        table = "operations"
        rows = rows_by_gpu(dataset, table, gpus)
    if not rows:
        return None, (), (Unknown(ROW, "No call was recorded: record while the job runs, or import a trace of it."),)
    gpu = min(rows, key=lambda number: (-rows[number], number))
    series = read_series(dataset, gpus, gpu, table)
    repetition = find_repetition(series, dense_codes)
    if repetition is None:
        return None, (), (Unknown(ROW, _declined(series, gpus.gpus[gpu].number)),)
    time_ns, starts = series.time_ns, repetition.starts
    period_ns = float(np.median(np.diff(time_ns[starts])))
    covered = communication_intervals(dataset, gpus, gpu, period_ns)
    recurrence, calls = find_most_frequent(series, starts, series.symbol)
    regularity = Regularity(
        period_seconds=period_ns / 1e9,
        duty_cycle=None if covered is None else _covered_part(covered, time_ns[starts]),
        recurrence=recurrence,
        iterations=len(starts) - 1,
        calls_per_iteration=calls,
        gpu=gpu,
        recurrence_without_sizes=find_most_frequent(series, starts, series.kind)[0],
        spread=relative_spread(np.diff(time_ns[starts])),
        basis=_basis(repetition),
    )
    return regularity, _iterations(time_ns, starts), ()


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


def _covered_part(covered: Intervals, starts_ns: Integers) -> float:
    """From the first iteration's start to the last one's."""
    return int(covered.length_in(starts_ns[:1], starts_ns[-1:])[0]) / int(starts_ns[-1] - starts_ns[0])


def _iterations(time_ns: Integers, starts: Integers) -> tuple[Iteration, ...]:
    first = time_ns[starts]
    silence = first - time_ns[np.maximum(starts - 1, 0)]
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
            first[:-1].tolist(), first[1:].tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True
        )
    )


def _basis(repetition: Repetition) -> str:
    if repetition.by_gaps:
        return "Equal calls come in bursts of the same number, with silence between them."
    if repetition.sizes_vary:
        return "Calls repeat in their order, but for the sizes of some."
    return "Calls repeat in their order."


def _declined(series: CallSeries, gpu: int) -> str:
    kinds, symbols = (int(numbers.max()) + 1 for numbers in (series.kind, series.symbol))
    return (
        f"The {len(series):,} calls of GPU {gpu} ({kinds} kinds of call, {symbols:,} with their sizes) repeat neither "
        "in order nor regularly in time, as with requests at random times: there is no period. For a job with "
        "iterations, record at least three of them."
    )
