"""How long operations take, and which took far longer than their like (latency; paper A: microseconds against seconds).

A duration is from begin to end of a recorded operation; what begins and ends is said by its source: NCCL's network
threads (`proxy`), events of the GPU (`cuda`) or a trace's kernels (`kernel`).  Quantiles are interpolated linearly
between the two nearest operations.  Where hardly two operations are of one size, like sizes go together
(`size_classes`).

An operation is an anomaly if it took longer than ten times the median of its like — same communicator, operation, size
and source — and longer than a millisecond: below that, what looks slow is mostly the clock.  One of unknown operation
or size has no like: a gradient bucket of a gigabyte takes long beside small ones, and nothing is wrong.  Stalls that
railscope reported while it recorded are anomalies as well, with their cause; an operation that a stall of its
communicator falls into has that stall's cause.
"""

from __future__ import annotations

from typing import Any, Final

import ibis

from railscope.agent.analysis.facts.report import Anomaly, Latency, LatencyRow, Unknown
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.size_classes import SizeClasses, find_size_classes
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count

TIMES_OF_MEDIAN: Final = 10
FLOOR_NS: Final = 1_000_000
WORST: Final = 20
"""Anomalies that are listed; all are counted."""
UNKNOWN_OP: Final = "unknown"
"""What stands for an operation that a recording does not tell."""
_NOT_KNOWN: Final = -1
_QUANTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
_NS: Final = 1e9


def find_latency(
    dataset: Dataset, gpus: Gpus, most: int = WORST, classes: SizeClasses | None = None
) -> tuple[Latency, tuple[Unknown, ...]]:
    """Latency of operations by operation, size and source, and at most so many anomalies, the worst first.

    `classes` are the dataset's, if they are already computed.
    """
    classes = find_size_classes(dataset) if classes is None else classes
    timed = _timed(dataset, classes)
    rows = _rows(dataset, timed, classes)
    slow, slow_count = _slow(dataset, timed, gpus, most)
    stalls = _stalls(dataset)
    anomalies = [*(_with_cause(anomaly, stalls) for anomaly in slow), *stalls]
    anomalies.sort(key=lambda one: (-one.seconds, one.time_seconds, one.comm, _rank(one.rank), one.op))
    latency = Latency(rows, tuple(anomalies[:most]), slow_count + len(stalls))
    if rows:
        alone = sum(row.count for row in rows if row.payload_bytes is None or row.op == UNKNOWN_OP)
        if not alone:
            return latency, ()
        return latency, (
            Unknown(
                6,
                f"Whether {format_count(alone, 'operation')} of unknown kind or size took longer than usual is "
                "unknown, as there is "
                "nothing to compare with.",
            ),
        )
    return latency, (
        Unknown(
            6,
            "No operation has times: record NCCL 2.23 or newer between hosts at level completion or above "
            "('railscope doctor' reports what can be observed of a library), or import a trace that has them.",
        ),
    )


def _timed(dataset: Dataset, classes: SizeClasses) -> Any:
    """Operations with a duration; an unknown payload is −1, so that it joins and groups as a value.

    `like` is the size of those that an operation is put together with.
    """
    operations = dataset["operations"]
    took = operations["end_ns"] - operations["begin_ns"]
    op, payload = operations["op"].fill_null(UNKNOWN_OP), operations["payload_bytes"].fill_null(_NOT_KNOWN)
    return operations.filter(took >= 0).select(
        "recording",
        "instance",
        "begin_ns",
        op=op,
        payload=payload,
        like=classes.class_of(op, payload),
        source=operations["source"].fill_null(""),
        took_ns=took,
    )


def _rows(dataset: Dataset, timed: Any, classes: SizeClasses) -> tuple[LatencyRow, ...]:
    took = timed["took_ns"]
    found = dataset.rows(
        timed.group_by("op", "like", "source").agg(
            count=took.count(), max=took.max(), **{name: took.quantile(share) for name, share in _QUANTILES}
        )
    ).to_pylist()
    rows = [
        LatencyRow(
            op=row["op"],
            payload_bytes=_payload(row["like"]),
            source=row["source"],
            count=row["count"],
            p50_seconds=_seconds(row["p50"]),
            p90_seconds=_seconds(row["p90"]),
            p99_seconds=_seconds(row["p99"]),
            max_seconds=_seconds(row["max"]),
            over_bytes=classes.lower_bound(row["op"], _payload(row["like"])),
        )
        for row in found
    ]
    return tuple(sorted(rows, key=lambda row: (row.op, row.payload_bytes is None, row.payload_bytes or 0, row.source)))


def _slow(dataset: Dataset, timed: Any, gpus: Gpus, most: int) -> tuple[list[Anomaly], int]:
    """Operations that took far longer than similar ones."""
    ends = dataset["communicators"].select("recording", "instance", "comm").distinct()
    comparable = timed.filter((timed["op"] != UNKNOWN_OP) & (timed["payload"] != _NOT_KNOWN))
    named = comparable.join(ends, ["recording", "instance"])
    like = ["comm", "op", "like", "source"]
    typical = named.group_by(like).agg(typical_ns=named["took_ns"].median())
    with_typical = named.join(typical, like)
    slow = with_typical.filter(
        (with_typical["took_ns"] > FLOOR_NS) & (with_typical["took_ns"] > with_typical["typical_ns"] * TIMES_OF_MEDIAN)
    )
    count = dataset.rows(slow.agg(count=slow.count())).to_pylist()[0]["count"]
    if not count:
        return [], 0
    worst = slow.order_by(
        [ibis.desc("took_ns"), *(slow[name] for name in ("begin_ns", "comm", "op", "payload", "recording", "instance"))]
    ).limit(most)
    return [
        Anomaly(
            time_seconds=row["begin_ns"] / _NS,
            comm=row["comm"],
            rank=gpus.rank_of.get((row["recording"], row["instance"])),
            op=row["op"],
            payload_bytes=_payload(row["payload"]),
            seconds=_seconds(row["took_ns"]),
            typical_seconds=_seconds(row["typical_ns"]),
            cause="",
        )
        for row in dataset.rows(worst).to_pylist()
    ], count


def _stalls(dataset: Dataset) -> list[Anomaly]:
    """Stalls that were reported during the recording, each once, with the longest reported duration."""
    stalls = dataset["stalls"]
    found = dataset.rows(
        stalls.group_by("comm", "rank", "op", "cause", "since_ns").agg(seconds=stalls["seconds"].max())
    ).to_pylist()
    return [
        Anomaly(
            time_seconds=row["since_ns"] / _NS,
            comm=row["comm"] or "",
            rank=row["rank"],
            op=row["op"] or "",
            payload_bytes=None,
            seconds=row["seconds"],
            typical_seconds=None,
            cause=row["cause"] or "",
        )
        for row in found
        if row["since_ns"] is not None and row["seconds"] is not None
    ]


def _with_cause(slow: Anomaly, stalls: list[Anomaly]) -> Anomaly:
    """The anomaly with the cause of a stall of its communicator that it overlaps: of its own rank if there is one."""
    end = slow.time_seconds + slow.seconds
    during = [
        stall
        for stall in stalls
        if stall.comm == slow.comm
        and stall.cause
        and stall.time_seconds <= end
        and stall.time_seconds + stall.seconds >= slow.time_seconds
    ]
    if not during:
        return slow
    nearest = min(
        during, key=lambda stall: (stall.rank != slow.rank, stall.time_seconds, _rank(stall.rank), stall.cause)
    )
    return Anomaly(
        time_seconds=slow.time_seconds,
        comm=slow.comm,
        rank=slow.rank,
        op=slow.op,
        payload_bytes=slow.payload_bytes,
        seconds=slow.seconds,
        typical_seconds=slow.typical_seconds,
        cause=nearest.cause,
    )


def _rank(rank: int | None) -> int:
    return -1 if rank is None else rank


def _payload(value: int) -> int | None:
    return None if value == _NOT_KNOWN else value


def _seconds(nanoseconds: float) -> float:
    """Quantiles of whole nanoseconds are whole hundredths: what is beyond is the engine's rounding."""
    return round(float(nanoseconds), 2) / _NS
