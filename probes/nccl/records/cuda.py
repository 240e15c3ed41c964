"""What the programs that watch CUDA share with us: probes/bpf/cuda_structs.h as numpy dtypes."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from railscope.probes.nccl.records.calls import owned

BEHIND: Final = 8
"""Communicators that are followed on one stream."""


class CudaKind(IntEnum):
    """What a CUDA function does, as the programs tell them apart."""

    RECORD = 0
    RECORD_FLAGS = 1
    ASK_EVENT = 2
    ASK_STREAM = 3
    DROP_EVENT = 4
    DROP_STREAM = 5


class CudaStat(IntEnum):
    """Slots of the programs' `cuda_stats`; probes/bpf/cuda_structs.h says what each counts."""

    NOTES = 0
    PLANS = 1
    FINISHES = 2
    CALLS = 3
    RETURNS = 4
    PROOFS = 5
    FORGOTTEN = 6
    FULL = 7
    UNREADABLE = 8


COMMUNICATOR: Final = np.dtype(
    [
        *((name, "<u8") for name in ("stream", "noted", "finished", "launched", "completed")),
        *((name, "<u8") for name in ("completed_sequence", "completed_ns")),
        *((name, "<u4") for name in ("instance", "number", "several_streams", "captured", "range", "reserved")),
    ]
)
CALL: Final = np.dtype([("owner", "<u8"), ("time_and_op", "<u8")])
_BEHIND: Final = np.dtype(
    [("comm", "<u8"), ("launched", "<u8"), ("sequence", "<u8"), ("number", "<u4"), ("reserved", "<u4")]
)
STREAM: Final = np.dtype(
    [
        *((name, "<u8") for name in ("launches", "proved", "stream", "generation")),
        *(("device", "<i4"), ("ambiguous", "<u4"), ("armed", "<u4"), ("number", "<u4")),
        ("behind", _BEHIND, BEHIND),
    ]
)
"""A stream, and an event's mark."""
UNDER_WAY: Final = np.dtype([("handle", "<u8"), ("generation", "<u8"), ("tgid", "<u4"), ("kind", "<u4")])
"""A call whose return matters, by its thread."""
HANDLE_KEY: Final = np.dtype([("handle", "<u8"), ("tgid", "<u4"), ("kind", "<u4")])
STREAM_KEY: Final = np.dtype([("stream", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])

SIZES: Final = {
    "cuda_communicator": (owned(COMMUNICATOR), 88),
    "cuda_call": (CALL, 16),
    "cuda_behind": (_BEHIND, 32),
    "cuda_stream": (owned(STREAM), 312),
    "cuda_handle_key": (HANDLE_KEY, 16),
    "cuda_stream_key": (STREAM_KEY, 16),
}
"""Every struct of the header: its dtype here, and its bytes."""
