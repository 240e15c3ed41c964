"""How fast operations are, by operation and size, and how much of the links they use (bandwidth utilisation; paper B).

The figures are nccl-tests' (doc/PERFORMANCE.md), of operations whose times were recorded:

- algbw: size / duration, where size is the buffer of all ranks: payload × ranks for AllGather, ReduceScatter, AllToAll,
  Gather and Scatter, whose payload is of one rank; payload for the others.
- busbw: what makes ranks of any number comparable: payload × factor / duration; AllReduce 2(n−1)/n, AllGather,
  ReduceScatter, AllToAll, Gather and Scatter n−1, all others 1.
- utilisation: busbw / rate of the links that it crosses.  Of a communicator with ranks on several servers that is the
  speed of all rails of the server together, as every ring enters and leaves a server once over all of them.  Where
  every rank sends for itself (AllToAll, and Send and Recv of communicators with one rank a server) it is that speed
  divided by the communicator's ranks on the server.  What stays inside a server crosses no rail: not known.

Each figure is the median over operations of one size, or of like sizes (`size_classes`).  Times of the GPU's kernels
are taken before those of CUDA events, and these before those of NCCL's network threads.  A Recv's duration contains its
waiting for the sender (receives).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import ibis
import pyarrow as pa

from railscope.agent.analysis.facts.report import BandwidthRow, Unknown
from railscope.agent.analysis.tables.gpu_rows import SOURCES
from railscope.agent.analysis.tables.gpus import Gpus, Instance
from railscope.agent.analysis.tables.size_classes import SizeClasses, find_size_classes
from railscope.agent.dataset.reader import Dataset
from railscope.agent.model.bus_factor import bus_factor
from railscope.probes.nccl.abi import Op

ROW: Final = 13
_OF_ALL_RANKS: Final = (Op.AllGather, Op.ReduceScatter, Op.AllToAll, Op.Gather, Op.Scatter)
_EACH_FOR_ITSELF: Final = (Op.AllToAll, Op.Send, Op.Recv)


def find_bandwidth(
    dataset: Dataset, gpus: Gpus, classes: SizeClasses | None = None
) -> tuple[tuple[BandwidthRow, ...], tuple[Unknown, ...]]:
    """Algorithm and bus bandwidth by operation and size, in this order.

    `classes` are the dataset's, if they are already computed.
    """
    classes = find_size_classes(dataset) if classes is None else classes
    known = sorted(op.name for op in Op if _factors(op, 2) is not None)
    operations = dataset["operations"]
    operations = operations.filter(
        operations["op"].isin(known) & (operations.payload_bytes > 0) & (operations.end_ns > operations.begin_ns)
    )
    timed = operations.join(_factor_table(dataset, gpus, known), ["recording", "instance", "op"])
    timed = timed.mutate(
        rate=timed.payload_bytes * 1e9 / (timed.end_ns - timed.begin_ns),
        payload_bytes=classes.class_of(timed["op"], timed.payload_bytes),
    )
    found = _medians(dataset, timed)
    if not found:
        reason = "No operation has a size and times, only calls: record at level completion, or import a GPU trace."
        return (), (Unknown(ROW, reason),)
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in sorted(
        found, key=lambda row: SOURCES.index(row["source"]) if row["source"] in SOURCES else len(SOURCES)
    ):
        best.setdefault((row["op"], row["payload_bytes"]), row)
    rows = tuple(
        BandwidthRow(
            op=op,
            payload_bytes=size,
            count=row["count"],
            algbw_bytes_per_second=row["algbw"],
            busbw_bytes_per_second=row["busbw"],
            utilisation=row["utilisation"],
            over_bytes=classes.lower_bound(op, size),
        )
        for (op, size), row in sorted(best.items())
    )
    if any(row.utilisation is not None for row in rows):
        return rows, ()
    reason = (
        "No utilisation: no timed operation is of a communicator between servers whose rails and their speed are known."
    )
    return rows, (Unknown(ROW, reason),)


def _medians(dataset: Dataset, timed: Any) -> list[dict[str, Any]]:
    """The figures by operation, size and source, in any order.

    A median costs far more than all the rest.  Where the factors are the same for all, as in most jobs, one is enough.
    """
    keys, factors = ("op", "payload_bytes", "source"), ("size_factor", "bus_factor", "link_rate")
    found = dataset.rows(
        timed.group_by([*keys, *factors]).agg(count=timed.count(), rate=timed["rate"].median())
    ).to_pylist()
    by_key: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        by_key[tuple(row[key] for key in keys)].append(row)
    medians = []
    mixed = []
    for (op, payload_bytes, source), rows in by_key.items():
        if len(rows) > 1:
            mixed.append((op, payload_bytes))
            continue
        row = rows[0]
        busbw = row["rate"] * row["bus_factor"]
        medians.append(
            {
                "op": op,
                "payload_bytes": payload_bytes,
                "source": source,
                "count": row["count"],
                "algbw": row["rate"] * row["size_factor"],
                "busbw": busbw,
                "utilisation": None if row["link_rate"] is None else busbw / row["link_rate"],
            }
        )
    if mixed:
        which = ibis.memtable(
            pa.table(
                {
                    "op": pa.array([op for op, _ in mixed], pa.string()),
                    "payload_bytes": pa.array([size for _, size in mixed], pa.int64()),
                }
            )
            .group_by(["op", "payload_bytes"])
            .aggregate([])
        )
        several = timed.semi_join(which, ["op", "payload_bytes"])
        busbw = several["rate"] * several.bus_factor
        together = dataset.rows(
            several.group_by(list(keys)).agg(
                count=several.count(),
                algbw=(several["rate"] * several.size_factor).median(),
                busbw=busbw.median(),
                utilisation=(busbw / several.link_rate).median(),
            )
        ).to_pylist()
        known = {(row["op"], row["payload_bytes"], row["source"]) for row in medians}
        medians += [row for row in together if (row["op"], row["payload_bytes"], row["source"]) not in known]
    return medians


def _factors(op: Op, nranks: int) -> tuple[float, float] | None:
    """(size, bus bytes) for each byte of payload; None: nccl-tests has none."""
    match op:
        case Op.Send | Op.Recv:
            return 1.0, 1.0
        case Op.Gather | Op.Scatter:
            return float(nranks), float(nranks - 1)
        case _:
            bus = bus_factor(op, nranks)
            if bus is None:
                return None
            return float(nranks) if op in _OF_ALL_RANKS else 1.0, float(bus)


def _factor_table(dataset: Dataset, gpus: Gpus, known: list[str]) -> Any:
    """Factors and the rate of links by end of communicator and operation, to be joined with operations."""
    speeds = server_speeds(dataset)
    ends = dataset["communicators"].select("recording", "instance", "node", "netns", "nranks", "local_ranks")
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for row in sorted(dataset.rows(ends).to_pylist(), key=lambda row: (row["recording"], row["instance"])):
        end: Instance = (row["recording"], row["instance"])
        if end not in gpus.gpu_of or not row["nranks"]:
            continue
        # RDMA devices are the host's also where a process lives in a namespace of its own.
        speed = speeds.get((row["node"], row["netns"])) or speeds.get((row["node"], None))
        local = row["local_ranks"]
        for name in known:
            op = Op[name]
            factors = _factors(op, row["nranks"])
            assert factors is not None
            rows["recording"].append(end[0])
            rows["instance"].append(end[1])
            rows["op"].append(name)
            rows["size_factor"].append(factors[0])
            rows["bus_factor"].append(factors[1])
            rows["link_rate"].append(_link_rate(op, speed, local, row["nranks"]))
    columns = (
        ("recording", pa.int64()),
        ("instance", pa.int64()),
        ("op", pa.string()),
        ("size_factor", pa.float64()),
        ("bus_factor", pa.float64()),
        ("link_rate", pa.float64()),
    )
    return ibis.memtable(pa.table({name: pa.array(rows[name], kind) for name, kind in columns}))


def _link_rate(op: Op, speed: int | None, local_ranks: int | None, nranks: int) -> float | None:
    """Bytes per second of the links that an operation crosses; None: not known, or it crosses no rail."""
    if not speed or not local_ranks or local_ranks >= nranks:
        return None
    if op in (Op.Send, Op.Recv) and local_ranks > 1:
        return None  # the peer may be on the same server
    return speed / local_ranks if op in _EACH_FOR_ITSELF else float(speed)


def server_speeds(dataset: Dataset) -> dict[tuple[str, str | None], int]:
    """Bytes per second of all rails together, by node and network namespace (None: the host's)."""
    speeds: defaultdict[tuple[str, str | None], dict[str, int]] = defaultdict(dict)
    for row in dataset.rows(dataset["rails"]).to_pylist():
        if row["speed_bytes_per_second"]:
            # A rail's RDMA device and its network device are one link.
            rail = row["rail"] or row["device"]
            of_server = speeds[row["node"], row["netns"]]
            of_server[rail] = max(of_server.get(rail, 0), row["speed_bytes_per_second"])
    return {server: sum(rails.values()) for server, rails in speeds.items()}
