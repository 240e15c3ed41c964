"""NCCL's results, and what the programs of probes/bpf/errors.h write, as numpy dtypes.

An asynchronous error lies in the communicator or in its proxy's state until the job asks for it.  `stored_result` reads
it there from outside, which costs the job nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.records.calls import NO_OFFSET, LifecycleKind, owned
from railscope.probes.processes.memory import read_memory

Records = npt.NDArray[Any]

ERROR_EVENT: Final = np.dtype(
    [
        *(("time_ns", "<u8"), ("comm", "<u8"), ("tgid", "<u4"), ("tid", "<u4"), ("instance", "<u4")),
        *(("result", "<i4"), ("source", "<u4"), ("reserved", "<u4")),
    ]
)
"""`instance` 0: the communicator is not known.  `source`: an `ErrorSource`."""
ERROR_LAYOUT: Final = np.dtype(
    [(name, "<u4") for name in ("known", "comm_async_result", "comm_proxy_state", "state_async_result")]
)
ERROR_CALL_KEY: Final = np.dtype([("tid", "<u4"), ("source", "<u4")])
ERROR_CALL: Final = np.dtype(
    [("comm", "<u8"), ("tgid", "<u4"), ("tid", "<u4"), ("instance", "<u4"), ("reserved", "<u4")]
)
ASYNC_RESULT: Final = np.dtype([("instance", "<u4"), ("result", "<i4")])
SIZES: Final = {
    "error_event": (owned(ERROR_EVENT), 48),
    "error_layout": (ERROR_LAYOUT, 16),
    "error_call": (owned(ERROR_CALL), 32),
    "async_result": (owned(ASYNC_RESULT), 16),
}
"""Each struct's dtype and the size that errors.h asserts, bytes."""

assert all(dtype.itemsize == size for dtype, size in SIZES.values())

COMMUNICATOR_MAGIC: Final = 0x0280028002800280
"""What a `struct ncclComm` begins with, from 2.21 on."""
_U64: Final = struct.Struct("<Q")
_S32: Final = struct.Struct("<i")


class Result(IntEnum):
    """`ncclResult_t` (nccl.h of 2.32.3)."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


NO_ERRORS: Final = frozenset((Result.SUCCESS, Result.IN_PROGRESS))


class ErrorSource(IntEnum):
    """Where an error was met; all but the first are a `LifecycleKind`, whose call returned the error."""

    ASYNC = 0
    """It was stored in the communicator: something failed outside a call."""
    INIT = LifecycleKind.INIT
    INIT_ALL = LifecycleKind.INIT_ALL
    SPLIT = LifecycleKind.SPLIT
    SHRINK = LifecycleKind.SHRINK
    GROW = LifecycleKind.GROW
    FINALIZE = LifecycleKind.FINALIZE
    DESTROY = LifecycleKind.DESTROY
    ABORT = LifecycleKind.ABORT
    REVOKE = LifecycleKind.REVOKE
    SUSPEND = LifecycleKind.SUSPEND
    RESUME = LifecycleKind.RESUME


class ErrorStat(IntEnum):
    """Slots of the programs' `error_stats`; probes/bpf/errors.h says what each counts."""

    CALLS = 0
    RING_FULL = 1
    UNREADABLE = 2


@dataclass(frozen=True, slots=True)
class ErrorLayout:
    """Where the communicators of one build keep their asynchronous result: offsets in bytes."""

    comm_async_result: int
    comm_proxy_state: int | None
    state_async_result: int | None
    """Both None: only the communicator's own result can be read."""

    def record(self) -> Records:
        """One record of dtype ERROR_LAYOUT."""
        offsets = (self.comm_async_result, self.comm_proxy_state, self.state_async_result)
        return np.array([(1, *(NO_OFFSET if offset is None else offset for offset in offsets))], ERROR_LAYOUT)


def error_layout(structures: Mapping[str, Structure]) -> ErrorLayout | None:
    """Where a build's communicators keep their asynchronous result; None: that is not known, or they bear no mark."""
    comm = structures.get("ncclComm")
    if comm is None or "asyncResult" not in comm.offsets or comm.offsets.get("startMagic") != 0:
        return None
    result = comm.offsets["asyncResult"]
    proxy_state = comm.offsets.get("proxyState")
    state = structures.get("ncclProxyState")
    if proxy_state is None or state is None or "asyncResult" not in state.offsets:
        return ErrorLayout(result, None, None)
    return ErrorLayout(result, proxy_state, state.offsets["asyncResult"])


def stored_result(memory: int, comm: int, layout: ErrorLayout) -> int | None:
    """The asynchronous result that a communicator and its proxy's state tell, the communicator's own first.

    NCCL asks further places (ncclGinState), so success does not prove that there is no error.  `memory` is a descriptor
    of the process's /proc/PID/mem.  None: there is no communicator at this address (any more).
    """
    try:
        if _read(_U64, memory, comm) != COMMUNICATOR_MAGIC:
            return None
        result = _read(_S32, memory, comm + layout.comm_async_result)
        if result == Result.SUCCESS and layout.comm_proxy_state is not None and layout.state_async_result is not None:
            state = _read(_U64, memory, comm + layout.comm_proxy_state)
            if state:
                result = _read(_S32, memory, state + layout.state_async_result)
    except OSError:
        return None
    return result


def _read(number: struct.Struct, memory: int, address: int) -> int:
    """Raises OSError where nothing is mapped."""
    data = read_memory(memory, number.size, address)
    if data is None:
        raise OSError(f"nothing is mapped at {address:#x}")
    return int(number.unpack(data)[0])
