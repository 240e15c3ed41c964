"""What the BPF programs of probes/bpf/nccl.bpf.c write, as numpy dtypes.

Each dtype mirrors a struct of probes/bpf/nccl.h; that header asserts the same sizes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np

UNIQUE_ID_BYTES: Final = 128
NO_OFFSET: Final = 0xFFFFFFFF
"""An offset in `comm_layout` that is not known."""

Dtype = np.dtype[Any]

OWNER: Final[Dtype] = np.dtype([("uid", "<u4"), ("tgid", "<u4")])
"""In whose share an entry or a record is."""


def owned(value: Dtype) -> Dtype:
    """What a program writes where an entry or a record of dtype `value` is shared out."""
    return np.dtype([("value", value), ("owner", OWNER)])


CALL_EVENT: Final[Dtype] = np.dtype(
    [
        ("time_ns", "<u8"),
        ("comm", "<u8"),
        ("stream", "<u8"),
        ("payload_bytes", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("instance", "<u4"),
        ("sequence", "<u4"),
        ("peer", "<i4"),
        ("op", "u1"),
        ("data_type", "u1"),
        ("library", "<u2"),
    ]
)
CALL_SLOT: Final[Dtype] = np.dtype([("event", CALL_EVENT), ("stamp", "<u8")])
CALL_RING: Final[Dtype] = np.dtype([("reserved", "<u8"), ("taken", "<u8"), ("unused", "<u8", (6,))])
CROWD_KEY: Final[Dtype] = np.dtype([(name, "<u4") for name in ("uid", "tgid", "ring", "reserved")])
CROWD: Final[Dtype] = np.dtype([("taken", "<u8"), ("records", "<u8")])
AGGREGATE_KEY: Final[Dtype] = np.dtype(
    [
        ("tgid", "<u4"),
        ("instance", "<u4"),
        ("peer", "<i4"),
        ("op", "u1"),
        ("data_type", "u1"),
        ("size_bucket", "u1"),
        ("reserved", "u1"),
    ]
)
AGGREGATE: Final[Dtype] = np.dtype([("calls", "<u8"), ("payload_bytes", "<u8")])
HASHED_AGGREGATE: Final[Dtype] = np.dtype([("total", AGGREGATE), ("uid", "<u4"), ("reserved", "<u4")])
AGGREGATE_SLOT: Final[Dtype] = np.dtype([("owner", "<u8"), ("kind", "<u8"), ("calls", "<u8"), ("payload_bytes", "<u8")])
"""`owner` and `kind` hold an AGGREGATE_KEY whose `reserved` is 1."""
AGGREGATE_SLOTS: Final = 1 << 12
COMMUNICATOR_SLOTS: Final = 1 << 11
ENQUEUE_TIME: Final[Dtype] = np.dtype([("calls", "<u8"), ("sum_ns", "<u8"), ("buckets", "<u8", (32,))])
IDENTITY: Final[Dtype] = np.dtype(
    [
        ("comm_hash", "<u8"),
        ("bus_id", "<i8"),
        ("rank", "<i4"),
        ("nranks", "<i4"),
        ("cuda_dev", "<i4"),
        ("nvml_dev", "<i4"),
        ("node", "<i4"),
        ("n_nodes", "<i4"),
        ("local_rank", "<i4"),
        ("local_ranks", "<i4"),
    ]
)
COMMUNICATOR_KEY: Final[Dtype] = np.dtype([("comm", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
COMMUNICATOR: Final[Dtype] = np.dtype(
    [
        ("sequence", "<u8"),
        ("first_ns", "<u8"),
        ("last_ns", "<u8"),
        ("destroyed_ns", "<u8"),
        ("empty_first", "<u8"),
        ("empty_last", "<u8"),
        ("instance", "<u4"),
        ("library", "<u2"),
        ("confirmed", "u1"),
        ("attempts", "u1"),
        ("identity", IDENTITY),
        ("uid", "<u4"),
        ("reserved", "<u4"),
    ]
)
COMMUNICATOR_SLOT: Final[Dtype] = np.dtype(
    [("comm", "<u8"), ("tgid", "<u4"), ("instance", "<u4"), ("sequence", "<u8"), ("last_ns", "<u8")]
)
BLOCK_BITS: Final = 6
BLOCK_LEVELS: Final = 15
SHAPES: Final = 1 << 11
WITHOUT_SHAPES: Final = 1 << 30
"""In the number of a communicator whose collectives are not kept."""
SHAPES_PLACE: Final[Dtype] = np.dtype([("given", "<u4"), ("reserved", "<u4"), ("owner", OWNER)])
CALL_SHAPES: Final[Dtype] = np.dtype(
    [
        ("instance", "<u4"),
        ("unnumbered", "<u4"),
        ("closed", "<u8", (BLOCK_LEVELS,)),
        ("shapes", "<u8", (1 << BLOCK_BITS,)),
    ]
)
LIFECYCLE_EVENT: Final[Dtype] = np.dtype(
    [
        ("time_ns", "<u8"),
        ("comm", "<u8"),
        ("parent", "<u8"),
        ("tgid", "<u4"),
        ("tid", "<u4"),
        ("instance", "<u4"),
        ("kind", "<u4"),
        ("result", "<i4"),
        ("nranks", "<i4"),
        ("rank", "<i4"),
        ("library", "<u2"),
        ("confirmed", "u1"),
        ("has_unique_id", "u1"),
        ("identity", IDENTITY),
        ("unique_id", "u1", (UNIQUE_ID_BYTES,)),
    ]
)
COMM_LAYOUT: Final[Dtype] = np.dtype(
    [
        (name, "<u4")
        for name in (
            "known",
            "start_magic",
            "end_magic",
            "comm_hash",
            "rank",
            "nranks",
            "cuda_dev",
            "nvml_dev",
            "bus_id",
            "node",
            "n_nodes",
            "local_rank",
            "local_ranks",
        )
    ]
)
HOST_CALL: Final[Dtype] = np.dtype(
    [
        ("start_ns", "<u8"),
        ("stack", "<u8"),
        ("task", "<u8"),
        ("comm", "<u8"),
        ("new_comm", "<u8"),
        ("tgid", "<u4"),
        ("uid", "<u4"),
        ("instance", "<u4"),
        ("nranks", "<i4"),
        ("rank", "<i4"),
        ("library", "<u2"),
        ("kind", "u1"),
        ("has_unique_id", "u1"),
        ("unique_id", "u1", (UNIQUE_ID_BYTES,)),
    ]
)
CALL_UNDER_WAY: Final[Dtype] = np.dtype(
    [("start_ns", "<u8"), ("op", "<u4"), ("uid", "<u4"), ("tgid", "<u4"), ("reserved", "<u4")]
)
UNREADABLE_PROCESSES: Final = 1024
"""Of which unreadable calls are told."""
UNREADABLE: Final[Dtype] = np.dtype([("calls", "<u8"), ("uid", "<u4"), ("tgid", "<u4")])
SHARED_TABLES: Final = (
    *("communicators", "aggregates", "host_calls", "call_shapes"),
    *("connections", "operations", "parts", "histories", "sent_bytes", "launches"),
    *("cuda_communicators", "cuda_streams", "cuda_marks", "cuda_processes"),
    *("lifecycle_events", "completion_events", "error_events", "call_events", "cuda_ranges"),
    *("driver_threads", "failover_events"),
    *("error_calls", "async_results", "failover_calls", "failed_over", "cuda_calls_under_way"),
    "calls_under_way",
    *("transfer_threads", "transfer_totals", "transfer_requests", "transfer_peers"),
    "unreadable_calls",
)
"""Tables and rings that are shared out among users, by their number in `nccl.h`."""
_SHARE_PLACES: Final = 32
"""SHARED_TABLES of nccl.h, a power of two."""
NOBODY: Final = 0xFFFFFFFF
DEEPLY_NESTED: Final = NOBODY - 1
"""In whose share is who nests user namespaces deeper than the programs look (answerable.h)."""
SHARE_KEY: Final[Dtype] = np.dtype([("uid", "<u4"), ("tgid", "<u4")])
SHARE: Final[Dtype] = np.dtype(
    [("taken", "<u8", (_SHARE_PLACES,)), ("refused", "<u8", (_SHARE_PLACES,)), ("entries", "<u8")]
)
SHARE_FREED: Final[Dtype] = np.dtype([("freed", "<u8", (_SHARE_PLACES,))])
STAT: Final[Dtype] = np.dtype("<u8")
SLOT: Final[Dtype] = np.dtype("<u4")

SIZES: Final = {
    "owner": (OWNER, 8),
    "call_event": (CALL_EVENT, 56),
    "call_slot": (CALL_SLOT, 64),
    "call_ring": (CALL_RING, 64),
    "crowd_key": (CROWD_KEY, 16),
    "crowd": (CROWD, 16),
    "aggregate_key": (AGGREGATE_KEY, 16),
    "aggregate": (AGGREGATE, 16),
    "hashed_aggregate": (HASHED_AGGREGATE, 24),
    "unreadable": (UNREADABLE, 16),
    "share_key": (SHARE_KEY, 8),
    "share": (SHARE, 520),
    "share_freed": (SHARE_FREED, 256),
    "aggregate_slot": (AGGREGATE_SLOT, 32),
    "enqueue_time": (ENQUEUE_TIME, 272),
    "identity": (IDENTITY, 48),
    "communicator_key": (COMMUNICATOR_KEY, 16),
    "communicator": (COMMUNICATOR, 112),
    "communicator_slot": (COMMUNICATOR_SLOT, 32),
    "call_shapes": (CALL_SHAPES, 640),
    "shapes_place": (SHAPES_PLACE, 16),
    "lifecycle_event": (owned(LIFECYCLE_EVENT), 240),
    "host_call": (HOST_CALL, 192),
    "call_under_way": (CALL_UNDER_WAY, 24),
    "comm_layout": (COMM_LAYOUT, 52),
}
"""Each struct's dtype and the size that nccl.h asserts, bytes."""

assert all(dtype.itemsize == size for dtype, size in SIZES.values())


class LifecycleKind(IntEnum):
    """`enum lifecycle_kind` of nccl.h."""

    SEEN = 0
    CONFIRMED = 1
    INIT = 2
    INIT_ALL = 3
    SPLIT = 4
    SHRINK = 5
    GROW = 6
    FINALIZE = 7
    DESTROY = 8
    ABORT = 9
    REVOKE = 10
    SUSPEND = 11
    RESUME = 12
    CONNECT = 13
    """From here on kinds of calls under way only, that no event has."""
    INIT_WORK = 14
    WINDOW = 15
    DEVICE_COMM = 16
    """An event has it, too: once the call has returned well."""


class Stat(IntEnum):
    """`enum stat` of nccl.h: what the programs count about themselves."""

    CALLS = 0
    RETURNS = 1
    LIFECYCLE = 2
    RING_FULL = 3
    LIFECYCLE_RING_FULL = 4
    AGGREGATES_FULL = 5
    COMMUNICATORS_FULL = 6
    ARGUMENTS_UNREADABLE = 7
    FOREIGN_PID_NAMESPACE = 8
    FILTERED = 9
    HOST_CALLS_FULL = 10
    SHARE_USED_UP = 11
