"""When a GPU computed: the union of its kernels that are no communication, and kernels that may be communication.

A kernel is a GPU's own by the process that drives the GPU, and by the GPU's index where a process drives several.
Copies and memsets are no computation.  Kernels of which nobody knows whether they communicate (*suspects*, so marked
when they were imported) make figures of both unknown as soon as they take a thousandth of the time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import ibis
import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts.quantities import format_integer, format_seconds, shorten
from railscope.agent.analysis.tables.gpu_rows import dense_codes
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.dataset.reader import Dataset
from railscope.agent.rhythm.intervals import Intervals, union
from railscope.agent.rhythm.series import CallSeries

_NEGLIGIBLE: Final = 1000
"""What takes less than this part of the time (1/1000) changes no figure."""
_NAMED: Final = 3
_NAME_LETTERS: Final = 60
_NO_COMPUTE: Final = (
    "Compute kernels were not recorded, so the compute time and the communication that it hides are unknown: import "
    "a GPU trace (PyTorch's Kineto) of the same job."
)
_NO_PROCESS: Final = (
    "The process that drives the GPU is unknown, so its own kernels are unknown: trace CPU activity too, or keep the "
    "file names of PyTorch's profiler."
)
_SHARED_PROCESS: Final = (
    "A process drives several GPUs, and the GPU of each of its kernels is unknown: run one process per GPU."
)


def find_computation(dataset: Dataset, gpus: Gpus, number: int) -> Intervals | str:
    """When a GPU computed, or why that is unknown."""
    own = _own_kernels(dataset, gpus, number)
    if isinstance(own, str):
        return own
    kernels = own.filter(own.copies.isnull() | ~own.copies)
    found = dataset.rows(kernels.select("begin_ns", "end_ns"))
    return union(found["begin_ns"].to_numpy(), found["end_ns"].to_numpy())


def find_suspects(dataset: Dataset, gpus: Gpus, number: int, from_ns: int, to_ns: int) -> tuple[str, ...]:
    """Kernels of a GPU that may be communication, with their number and time, the longest first.

    Empty: there are none between the two moments, or they take too little of that time to change a figure.
    """
    compute = dataset["compute"]
    suspected = compute.filter(compute.suspected & (compute.end_ns > from_ns) & (compute.begin_ns < to_ns))
    if not dataset.rows(suspected.aggregate(rows=suspected.count()))["rows"][0].as_py():
        return ()
    own = _own_kernels(dataset, gpus, number)
    if not isinstance(own, str):
        suspected = own.filter(own.suspected & (own.end_ns > from_ns) & (own.begin_ns < to_ns))
    times = dataset.rows(suspected.select("begin_ns", "end_ns"))
    edges = np.array([from_ns], np.int64), np.array([to_ns], np.int64)
    spent_ns = int(union(times["begin_ns"].to_numpy(), times["end_ns"].to_numpy()).length_in(*edges)[0])
    if spent_ns * _NEGLIGIBLE < to_ns - from_ns:
        return ()
    named = suspected.group_by("name").agg(
        kernels=suspected.count(), spent_ns=(suspected.end_ns - suspected.begin_ns).sum()
    )
    rows = sorted(dataset.rows(named).to_pylist(), key=lambda row: (-row["spent_ns"], row["name"] or ""))
    told = tuple(
        f"{shorten(row['name'] or '', _NAME_LETTERS)} ({format_integer(row['kernels'])}, "
        f"{format_seconds(row['spent_ns'] / 1e9)})"
        for row in rows[:_NAMED]
    )
    return (*told, f"{len(rows) - _NAMED} more") if len(rows) > _NAMED else told


def add_computation(series: CallSeries, dataset: Dataset, gpus: Gpus, number: int) -> CallSeries | None:
    """The operations of a GPU among its other kernels, each of which counts as a call without size.

    Streams stand for communicators, as the order on a stream is the same each time.  None: there are no such kernels.
    """
    own = _own_kernels(dataset, gpus, number)
    if isinstance(own, str):
        return None
    kernels = own.filter(own.copies.isnull() | ~own.copies)
    kernels = kernels.select(
        "begin_ns", "end_ns", stream=kernels.stream.fill_null(-1), name=kernels["name"].fill_null("")
    )
    found = dataset.rows(kernels)
    if not len(found):
        return None
    streams = dense_codes(found["stream"].to_numpy())
    names = found["name"].combine_chunks().cast("string").dictionary_encode()
    # By the names themselves: engines give them in any order.
    order = np.argsort(np.array(names.dictionary.to_pylist(), dtype=object), kind="stable")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    kinds = dense_codes(streams.astype(np.int64), places[names.indices.to_numpy()])
    first_kind, first_symbol = int(series.kind.max(initial=-1)) + 1, int(series.symbol.max(initial=-1)) + 1
    first_stream = int(series.communicator.max(initial=-1)) + 1
    nothing = np.zeros(len(found), np.int64)
    columns: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {
        "time_ns": (series.time_ns, found["begin_ns"].to_numpy()),
        "end_ns": (series.time_ns if series.end_ns is None else series.end_ns, found["end_ns"].to_numpy()),
        "kind": (series.kind, kinds + np.int32(first_kind)),
        "symbol": (series.symbol, kinds + np.int32(first_symbol)),
        "communicator": (series.communicator, streams + np.int32(first_stream)),
        "payload_bytes": (series.payload_bytes, nothing),
        "sized": (np.ones(len(series), np.bool_) if series.sized is None else series.sized, nothing.astype(np.bool_)),
    }
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.lexsort((joined["symbol"], joined["time_ns"]))
    return CallSeries(**{name: column[order] for name, column in joined.items()})


def _own_kernels(dataset: Dataset, gpus: Gpus, number: int) -> Any:
    """The rows of `compute` of one GPU, or in a sentence why they are unknown."""
    recordings = {recording for (recording, _), gpu in gpus.gpu_of.items() if gpu == number}
    told = dataset.rows(dataset["recordings"].select("recording", "compute_recorded")).to_pylist()
    if not all(row["compute_recorded"] for row in told if row["recording"] in recordings):
        return _NO_COMPUTE
    drives: defaultdict[tuple[int, int | None], set[int]] = defaultdict(set)
    holders: defaultdict[tuple[int, int | None, str | None], set[int]] = defaultdict(set)
    ends = dataset["communicators"].select("recording", "instance", "pid", "gpu")
    for row in dataset.rows(ends).to_pylist():
        gpu = gpus.gpu_of.get((row["recording"], row["instance"]))
        if gpu is not None:
            drives[row["recording"], row["pid"]].add(gpu)
            holders[row["recording"], row["pid"], row["gpu"]].add(gpu)
    compute = dataset["compute"]
    own: list[Any] = []
    for recording, pid in sorted((process for process, driven in drives.items() if number in driven), key=str):
        of_process = (compute.recording == recording) & (compute.pid.isnull() if pid is None else compute.pid == pid)
        if pid is not None and len(drives[recording, pid]) == 1:
            own.append(of_process)
            continue
        indices = [
            index for (*process, index), held in holders.items() if process == [recording, pid] and number in held
        ]
        kernels = compute.filter(of_process)
        counted = dataset.rows(kernels.aggregate(rows=kernels.count(), placed=kernels.gpu.count())).to_pylist()[0]
        if (
            any(index is None or holders[recording, pid, index] != {number} for index in indices)
            or not counted["rows"]
            or counted["placed"] < counted["rows"]
        ):
            return _NO_PROCESS if pid is None else _SHARED_PROCESS
        own.append(of_process & compute.gpu.isin(indices))
    known = compute.begin_ns.notnull() & compute.end_ns.notnull()
    return compute.filter(ibis.or_(*own) & known)
