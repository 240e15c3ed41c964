"""What the programs that follow transfers share with us: probes/bpf/transfers.h as numpy dtypes."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np

BUCKETS: Final = 28
FIRST_BUCKET_NS: Final = 1 << 10
"""Bound of the first bucket of durations; each bound is twice the one before, and the last bucket has none."""
PEER_NAME_BYTES: Final = 64
MOST_WAITED: Final = 120
"""Words of requests that a call waits for, as it was given them."""
MOST_SPARE: Final = 4
"""Places of requests that a thread keeps."""
MOST_FUNCTIONS: Final = 256
"""Numbers of functions that the programs tell apart."""

Dtype = np.dtype[Any]

TRANSFER_KEY: Final[Dtype] = np.dtype([("peer", "<u8"), ("tgid", "<u4"), ("function", "<u4")])
TRANSFER_TOTAL: Final[Dtype] = np.dtype(
    [
        *(
            (name, "<u8")
            for name in ("operations", "bytes", "unsized", "completed", "failed", "lost", "last_ns", "sum_ns")
        ),
        ("buckets", "<u8", (BUCKETS,)),
        ("uid", "<u4"),
        ("reserved", "<u4"),
    ]
)
REQUEST_KEY: Final[Dtype] = np.dtype([("request", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
REQUEST: Final[Dtype] = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "bytes", "peer", "next", "asked_ns", "asked_last_ns")),
        *((name, "<u4") for name in ("function", "tid", "uid", "let_go")),
        *((name, "<u2") for name in ("persistent", "unsized")),
        ("reserved", "<u4"),
    ]
)
THREAD: Final[Dtype] = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "last_ns", "bytes", "peer", "request", "stack", "task")),
        *((name, "<u4") for name in ("tgid", "uid", "function")),
        *((name, "<u2") for name in ("probed", "followed")),
        *((name, "<u8") for name in ("flag", "which", "list")),
        *((name, "<u2") for name in ("waited", "unsized")),
        *((name, "<u4") for name in ("request_bytes", "spare_uid", "spare")),
    ]
)
WAITED: Final[Dtype] = np.dtype([("requests", "<u8", (MOST_WAITED,))])
PEER_KEY: Final[Dtype] = np.dtype([("peer", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
PEER: Final[Dtype] = np.dtype([("name", "u1", (PEER_NAME_BYTES,)), ("uid", "<u4"), ("reserved", "<u4")])

SIZES: Final = {
    "transfer_key": (TRANSFER_KEY, 16),
    "transfer_total": (TRANSFER_TOTAL, 296),
    "transfer_request_key": (REQUEST_KEY, 16),
    "transfer_request": (REQUEST, 72),
    "transfer_thread": (THREAD, 112),
    "transfer_waited": (WAITED, 960),
    "transfer_peer_key": (PEER_KEY, 16),
    "transfer_peer": (PEER, 72),
}
"""Every struct of the header: its dtype here, and its bytes."""


class Size(IntEnum):
    """`enum transfer_size` of transfers.h: how a call's bytes follow from its arguments."""

    NONE = 0
    ELEMENTS = 1
    UCX = 2
    MPICH = 3
    OPEN_MPI = 4
    NIXL = 5
    MOONCAKE = 6


class Completion(IntEnum):
    """`enum transfer_completion` of transfers.h: how it is known that what a call began is complete."""

    UNSEEN = 0
    RETURN = 1
    UCX = 2
    STATUS = 3
    ENDS_UCX = 4
    ENDS_STATUS = 5
    ENDS_CANCELS = 6
    ENDED = 7
    MPI = 8
    MPI_PREPARES = 9
    MPI_STARTS = 10
    MPI_ONE = 11
    MPI_ALL = 12
    MPI_ANY = 13
    MPI_SOME = 14
    MPI_FREES = 15


class TransferStat(IntEnum):
    """Slots of the programs' `transfer_stats`; transfers.h says what each counts."""

    ENTRIES = 0
    RETURNS = 1
    ENDS = 2
    FULL = 3
    UNREADABLE = 4
