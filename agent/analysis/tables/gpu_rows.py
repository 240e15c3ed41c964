"""The rows of one GPU: which of a table's rows are its own, and its calls as series of small numbers.

Only one GPU's calls are in memory at a time, as numpy columns.  They come in order of time; calls of the same
nanosecond come in an order that does not depend on how they were stored.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from railscope.agent.analysis.tables.gpus import Gpus, Instance
from railscope.agent.dataset.reader import Dataset
from railscope.agent.dataset.schema import TIME_OF
from railscope.agent.rhythm.series import CallSeries, Codes, Integers

SOURCES: Final = ("kernel", "cuda", "proxy")
"""Where an operation's times may be from, the best first: of the GPU, of its events, of NCCL's network threads."""
CALLS: Final = "calls"
OPERATIONS: Final = "operations"
KERNELS: Final = "kernels"
"""What a series is made of."""
_NO_PEER: Final = -1
_NOT_KNOWN: Final = -1
_APART: Final = 3
"""Times as long: so far lie lengths apart that are of different sizes."""
_MOST_LENGTHS: Final = 8


def rows_of_gpu(table: Any, gpus: Gpus, number: int) -> Any:
    """The rows of a table with `recording` and `instance` that belong to one GPU."""
    return rows_of_instances(table, [one for one, gpu in gpus.gpu_of.items() if gpu == number])


def rows_of_instances(table: Any, instances: list[Instance]) -> Any:
    """The rows of a table with `recording` and `instance` of these ends of communicators."""
    return table.filter(is_of_instances(table, instances)) if instances else table.limit(0)


def is_of_instances(table: Any, instances: list[Instance]) -> Any:
    """Whether a row is of one of these ends, of which there must be some."""
    by_recording: defaultdict[int, list[int]] = defaultdict(list)
    for recording, instance in sorted(instances):
        by_recording[recording].append(instance)
    return ibis.or_(
        *((table.recording == recording) & table.instance.isin(found) for recording, found in by_recording.items())
    )


def instances_table(gpus: Gpus, **columns: tuple[pa.DataType, dict[Instance, Any]]) -> Any:
    """A small table by `recording` and `instance` with a GPU's number and these columns, to be joined with."""
    ends = sorted(gpus.gpu_of)
    return ibis.memtable(
        pa.table(
            {
                "recording": pa.array([end[0] for end in ends], pa.int64()),
                "instance": pa.array([end[1] for end in ends], pa.int64()),
                "gpu": pa.array([gpus.gpu_of[end] for end in ends], pa.int32()),
                **{name: pa.array([of.get(end) for end in ends], kind) for name, (kind, of) in columns.items()},
            }
        )
    )


def rows_by_gpu(dataset: Dataset, table: str, gpus: Gpus) -> dict[int, int]:
    """How many rows of a table with a time each GPU has; GPUs without any are left out.

    `table` is `calls`, `operations`, or `KERNELS`: the operations whose times a trace of the GPU has.
    """
    rows = _timed(dataset, table)
    counted = dataset.rows(rows.group_by(["recording", "instance"]).agg(rows=rows.count())).to_pylist()
    totals: defaultdict[int, int] = defaultdict(int)
    for row in counted:
        number = gpus.gpu_of.get((row["recording"], row["instance"]))
        if number is not None:
            totals[number] += row["rows"]
    return dict(totals)


def _timed(dataset: Dataset, table: str) -> Any:
    """The rows with a time: the order of others is unknown."""
    rows = dataset[CALLS if table == CALLS else OPERATIONS]
    if table == KERNELS:
        rows = rows.filter(rows["source"] == SOURCES[0])
    return rows.filter(_begin(rows, table).notnull())


def _begin(rows: Any, table: str) -> Any:
    return rows[TIME_OF[CALLS if table == CALLS else OPERATIONS]]


def read_series(dataset: Dataset, gpus: Gpus, number: int, table: str = CALLS) -> CallSeries:
    """The calls of one GPU, or its operations by their beginnings; `table` as of `rows_by_gpu`."""
    rows = rows_of_gpu(_timed(dataset, table), gpus, number)
    begin = _begin(rows, table)
    rows = rows.select(
        "recording",
        "instance",
        called_ns=begin,
        ended_ns=begin if table == CALLS else ibis.greatest(rows.end_ns.fill_null(begin), begin),
        operation=rows["op"].fill_null(""),
        dtype=rows.data_type.fill_null(""),
        payload=rows.payload_bytes.fill_null(_NOT_KNOWN),
        other=rows.peer.fill_null(_NO_PEER),
    )
    # Few: what one GPU calls differs in sizes at most.
    keys = ("recording", "instance", "operation", "dtype", "other")
    found = dataset.rows(rows.select(*keys).distinct()).to_pylist()
    comms = {end: one.comm for end, one in gpus.communicator_of.items()}
    names = {
        tuple(row.values()): (
            comms.get((row["recording"], row["instance"]), ""),
            row["operation"],
            row["dtype"],
            row["other"],
        )
        for row in found
    }
    kinds = {name: place for place, name in enumerate(sorted(set(names.values())))}
    communicators = {comm: place for place, comm in enumerate(sorted({name[0] for name in kinds}))}
    if not names:
        nothing, no_codes = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return CallSeries(nothing, no_codes, no_codes, no_codes, nothing)
    columns = dict(zip(keys, zip(*names, strict=True), strict=True))
    codes = ibis.memtable(
        pa.table(
            {
                "recording": pa.array(columns["recording"], pa.int64()),
                "instance": pa.array(columns["instance"], pa.int64()),
                "operation": pa.array(columns["operation"], pa.string()),
                "dtype": pa.array(columns["dtype"], pa.string()),
                "other": pa.array(columns["other"], pa.int32()),
                "kind": pa.array([kinds[name] for name in names.values()], pa.int32()),
            }
        )
    )
    result = dataset.rows(rows.join(codes, list(keys)).select("called_ns", "ended_ns", "kind", "payload"))
    time_ns, end_ns = result["called_ns"].to_numpy(), result["ended_ns"].to_numpy()
    kind, payload = result["kind"].to_numpy(), result["payload"].to_numpy()
    order = np.argsort(time_ns, kind="stable")
    if (np.diff(time_ns[order]) == 0).any():
        order = np.lexsort((end_ns, payload, kind, time_ns))
    time_ns, end_ns = time_ns[order], end_ns[order]
    kind, payload = kind[order].astype(np.int32), payload[order]
    of_kind = np.array([communicators[name[0]] for name in sorted(kinds)], np.int32)
    return CallSeries(
        time_ns=time_ns,
        kind=kind,
        symbol=dense_codes(kind.astype(np.int64), _size_or_length(kind, payload, end_ns - time_ns)),
        communicator=of_kind[kind],
        payload_bytes=np.maximum(payload, 0),
        end_ns=None if table == CALLS else end_ns,
        sized=payload != _NOT_KNOWN,
    )


def _size_or_length(kind: Codes, payload: Integers, took_ns: Integers) -> Integers:
    """The payload; where it is not known, a number below 0 that operations of a kind share if they take about as long.

    Operations of different sizes take times that lie well apart; waiting makes those of one size differ, too, but
    leaves no gap between them.
    """
    told = payload.copy()
    unsized = np.flatnonzero((payload == _NOT_KNOWN) & (took_ns > 0))
    for own in np.unique(kind[unsized]).tolist():
        places = unsized[kind[unsized] == own]
        lengths = np.sort(took_ns[places])
        edges = lengths[1:][lengths[1:] >= _APART * lengths[:-1]]
        if len(edges) <= _MOST_LENGTHS:
            told[places] = _NOT_KNOWN - np.searchsorted(edges, took_ns[places], side="right")
    return told


def dense_codes(*columns: Integers) -> Codes:
    """Equal rows get equal numbers, 0 … k−1 in the order of their values: np.unique's inverse, without sorting rows."""
    codes = _encoded(columns[0])[0]
    for column in columns[1:]:
        more, so_many = _encoded(column)
        codes = _encoded(codes.astype(np.int64) * so_many + more)[0]
    return codes


def _encoded(column: Integers) -> tuple[Codes, int]:
    encoded = pc.dictionary_encode(pa.array(column))
    values = encoded.dictionary.to_numpy()
    place = np.empty(len(values), np.int32)
    place[np.argsort(values, kind="stable")] = np.arange(len(values), dtype=np.int32)
    codes: Codes = place[encoded.indices.to_numpy()]
    return codes, len(values)
