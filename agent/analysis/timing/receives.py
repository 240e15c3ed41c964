"""Splits receives into transfer time and waiting for the sender (receives; paper B: pipeline receives).

A Recv begins when the GPU is ready for the data and ends when it has them.  Part of that is transfer; how long that
takes is learned from the fastest receives of the same size, or of like sizes (`size_classes`): the 5th percentile of
their durations by byte.  Of each receive
the last so much is transfer, and what comes before is waiting.  Several receives of one GPU at a time count once: the
active time is the union of the transfers, the idle time the union of the waiting in which nothing is transferred.

The bubble ratio is the idle part of the iterations' time, to be held against (p−1)/(p−1+m) of a pipeline with p stages
and m micro-batches; of a GPU that waits in collectives, too, it is less than the true one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from railscope.agent.analysis.facts.report import Iteration, ReceiveUse, Unknown
from railscope.agent.analysis.tables.gpu_rows import SOURCES, instances_table
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.size_classes import SizeClasses, find_size_classes
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count
from railscope.agent.rhythm.intervals import Intervals, Times, union

ROW: Final = 16
_FASTEST: Final = 0.05


def _without_times(dataset: Dataset) -> str:
    """Why no receive has times of its own."""
    calls, operations = dataset["calls"], dataset["operations"]
    called = calls.filter(calls["op"] == "Recv")
    grouped = operations.filter((operations["op"] == "SendRecv") & (operations.end_ns >= operations.begin_ns))
    many, together = (dataset.rows(rows.aggregate(rows=rows.count()))["rows"][0].as_py() for rows in (called, grouped))
    if together:
        return (
            f"{format_count(together, 'kernel')} sent and received at once (SendRecv): how long each Recv waited is "
            "unknown."
        )
    if many:
        verb = "was" if many == 1 else "were"
        return (
            f"{format_count(many, 'Recv')} {verb} called, and none has times: record at level completion, or import a "
            "GPU trace."
        )
    return "No Recv was called: a job without pipeline stages has none."


def find_receives(
    dataset: Dataset, gpus: Gpus, iterations: Sequence[Iteration] = (), classes: SizeClasses | None = None
) -> tuple[tuple[ReceiveUse, ...], tuple[Unknown, ...]]:
    """What the receives of each GPU did, by GPU; GPUs without timed receives are left out.

    `classes` are the dataset's, if they are already computed.
    """
    operations = dataset["operations"]
    receives = operations.filter(
        (operations["op"] == "Recv") & (operations.end_ns >= operations.begin_ns) & operations.payload_bytes.notnull()
    )
    sources = dataset.rows(receives.group_by("source").agg(receives=receives.count()))["source"].to_pylist()
    if not sources:
        timed = operations.filter((operations["op"] == "Recv") & (operations.end_ns >= operations.begin_ns))
        if dataset.rows(timed.aggregate(receives=timed.count()))["receives"][0].as_py():
            reason = (
                "Recvs have times, but their sizes were not observed at completion: import a GPU trace, which has both."
            )
        else:
            reason = _without_times(dataset)
        return (), (Unknown(ROW, reason),)
    source = min(sources, key=lambda name: (SOURCES.index(name) if name in SOURCES else len(SOURCES), str(name)))
    receives = receives.filter(receives.source.isnull() if source is None else receives.source == source)
    classes = find_size_classes(dataset) if classes is None else classes
    receives = receives.join(instances_table(gpus), ["recording", "instance"]).select(
        "gpu",
        "begin_ns",
        "end_ns",
        counts=receives.payload_bytes.clip(lower=1),
        like=classes.class_of(receives["op"], receives.payload_bytes),
    )
    per_byte = (receives.end_ns - receives.begin_ns) / receives.counts
    fastest = dataset.rows(receives.group_by("like").agg(fastest=per_byte.quantile(_FASTEST)))
    order = np.argsort(fastest["like"].to_numpy())
    sizes, pace = fastest["like"].to_numpy()[order], fastest["fastest"].to_numpy()[order]
    found = dataset.rows(receives)
    gpu, begin_ns, end_ns, counts, like = (found[name].to_numpy() for name in found.column_names)
    transfer_ns = np.rint(pace[np.searchsorted(sizes, like)] * counts).astype(np.int64)
    from_transfer_ns = np.maximum(begin_ns, end_ns - transfer_ns)
    from_ns = np.array([one.from_ns for one in iterations], np.int64)
    to_ns = np.array([one.to_ns for one in iterations], np.int64)
    whole_ns = int((to_ns - from_ns).sum())
    by_gpu = np.argsort(gpu, kind="stable")
    uses = []
    for own in np.split(by_gpu, np.flatnonzero(np.diff(gpu[by_gpu])) + 1):
        active = union(from_transfer_ns[own], end_ns[own])
        idle = union(begin_ns[own], from_transfer_ns[own]).difference(active)
        uses.append(
            ReceiveUse(
                gpu=int(gpu[own[0]]),
                active_seconds=active.length_ns / 1e9,
                idle_seconds=idle.length_ns / 1e9,
                bubble_ratio=int(idle.length_in(from_ns, to_ns).sum()) / whole_ns if whole_ns else None,
                iteration_active_seconds=_mean_seconds(active, from_ns, to_ns),
                iteration_idle_seconds=_mean_seconds(idle, from_ns, to_ns),
            )
        )
    return tuple(uses), ()


def _mean_seconds(intervals: Intervals, from_ns: Times, to_ns: Times) -> float | None:
    """What of the intervals lies in a window, on average."""
    return int(intervals.length_in(from_ns, to_ns).sum()) / len(from_ns) / 1e9 if len(from_ns) else None
