"""What the programs that follow calls of CUDA's driver share with us: probes/bpf/driver_calls.h as numpy dtypes."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np


class DriverKind(IntEnum):
    """The calls that are followed."""

    GRAPH_LAUNCH = 0
    STREAM_SYNC = 1
    EVENT_SYNC = 2
    CONTEXT_SYNC = 3


class DriverStat(IntEnum):
    """Slots of the programs' `driver_stats`; probes/bpf/driver_calls.h says what each counts."""

    ENTRIES = 0
    RETURNS = 1
    FULL = 2


THREAD: Final = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "last_ns", "stack", "task")),
        *((name, "<u4") for name in ("tgid", "uid", "kind", "reserved")),
    ]
)
PROCESS: Final = np.dtype(
    [(name, "<u8") for name in ("launches", "launched", "waits", "waited", "last_return_ns", "longest_ns")]
)

SIZES: Final = {"driver_thread": (THREAD, 48), "driver_process": (PROCESS, 48)}
"""Every struct of the header: its dtype here, and its bytes."""
