"""What receives do: transfer, or wait for the sender (row 16; paper B: active and idle part of pipeline receives).

A Recv begins when the GPU is ready for the data and ends when it has them.  Part of that is transfer; how long that
takes is learned from the fastest receives of the same size: the 5th percentile of their durations.  Of each receive
the last so much is transfer, and what comes before is waiting.  Several receives of one GPU at a time count once: the
active time is the union of the transfers, the idle time the union of the waiting in which nothing is transferred.

The bubble ratio is the idle part of the iterations' time, to be held against (p−1)/(p−1+m) of a pipeline with p stages
and m micro-batches; of a GPU that waits in collectives, too, it is less than the true one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agent.analysis.gpu_rows import SOURCES, of_gpu, rows_by_gpu
from agent.analysis.gpus import Gpus
from agent.analysis.intervals import union
from agent.analysis.report_facts import Iteration, ReceiveUse, Unknown
from agent.dataset.reader import Dataset

ROW: Final = 16
_FASTEST: Final = 0.05


def find_receives(
    dataset: Dataset, gpus: Gpus, iterations: Sequence[Iteration] = ()
) -> tuple[tuple[ReceiveUse, ...], tuple[Unknown, ...]]:
    """What the receives of each GPU did, by GPU; GPUs without timed receives are left out."""
    operations = dataset["operations"]
    receives = operations.filter(
        (operations["op"] == "Recv") & (operations.end_ns >= operations.begin_ns) & operations.payload_bytes.notnull()
    )
    sources = dataset.rows(receives.group_by("source").agg(receives=receives.count()))["source"].to_pylist()
    if not sources:
        reason = (
            "No Recv has times: a job without pipeline stages has none; of others, record at the level 'completion', "
            "or import a trace of the GPU."
        )
        return (), (Unknown(ROW, reason),)
    source = min(sources, key=lambda name: (SOURCES.index(name) if name in SOURCES else len(SOURCES), str(name)))
    receives = receives.filter(receives.source.isnull() if source is None else receives.source == source)
    duration = receives.end_ns - receives.begin_ns
    fastest = dataset.rows(receives.group_by("payload_bytes").agg(fastest=duration.quantile(_FASTEST)))
    order = np.argsort(fastest["payload_bytes"].to_numpy())
    sizes, transfer = fastest["payload_bytes"].to_numpy()[order], fastest["fastest"].to_numpy()[order]
    from_ns = np.array([one.from_ns for one in iterations], np.int64)
    to_ns = np.array([one.to_ns for one in iterations], np.int64)
    uses = []
    for number in sorted(rows_by_gpu(dataset, "operations", gpus)):
        own = dataset.rows(of_gpu(receives, gpus, number).select("begin_ns", "end_ns", "payload_bytes"))
        if not len(own):
            continue
        begin_ns, end_ns = own["begin_ns"].to_numpy(), own["end_ns"].to_numpy()
        pace = transfer[np.searchsorted(sizes, own["payload_bytes"].to_numpy())]
        from_transfer_ns = np.maximum(begin_ns, end_ns - np.rint(pace).astype(np.int64))
        active = union(from_transfer_ns, end_ns)
        idle = union(begin_ns, from_transfer_ns).without(active)
        whole_ns = int((to_ns - from_ns).sum())
        uses.append(
            ReceiveUse(
                gpu=number,
                active_seconds=active.length_ns / 1e9,
                idle_seconds=idle.length_ns / 1e9,
                bubble_ratio=int(idle.length_in(from_ns, to_ns).sum()) / whole_ns if whole_ns else None,
            )
        )
    return tuple(uses), ()
