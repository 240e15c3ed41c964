"""The testbed's library through ctypes: two ranks in one process, on the loopback, without root.

NCCL's functions are called from Python as a job would call them; arrays are numpy's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from railscope.testbed.job import LIBRARY

Array = NDArray[np.generic]

SUM, PROD, MAX, MIN, AVG = range(5)
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8 = range(11)
OK, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 4, 5, 6

os.environ["NCCL_SOCKET_IFNAME"] = "lo"


@dataclass(frozen=True, slots=True)
class Ranks:
    """A communicator's ranks, all of this process."""

    library: ctypes.CDLL
    handles: tuple[int, ...]

    def all_reduce(
        self, arrays: list[Array], dtype: int, reduction: int, stream: int = 1, count: int | None = None
    ) -> list[Array]:
        """Every rank's result; rank r contributes `arrays[r]`.  Stream numbers differ by rank."""
        results = [np.zeros_like(array) for array in arrays]
        for rank, (handle, array, result) in enumerate(zip(self.handles, arrays, results, strict=True)):
            assert self.library.ncclAllReduce(
                pointer(array), pointer(result), size(count or array.size), dtype, reduction,
                ctypes.c_void_p(handle), ctypes.c_void_p(100 * rank + stream),
            ) == OK  # fmt: skip
        for handle in self.handles:
            assert self.synchronize(handle) == OK
        return results

    def synchronize(self, handle: int) -> int:
        return int(self.library.workload_comm_synchronize(ctypes.c_void_p(handle)))


def pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def load() -> ctypes.CDLL:
    """The built library; `make build` makes it."""
    library = ctypes.CDLL(str(LIBRARY))
    library.workload_comm_hash.restype = ctypes.c_uint64
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    return library


@contextmanager
def ranks(count: int) -> Iterator[Ranks]:
    """A communicator of `count` ranks for as long as the block lasts."""
    library = load()
    handles = (ctypes.c_void_p * count)()
    assert library.ncclCommInitAll(handles, count, None) == OK, library.ncclGetLastError(None)
    values = tuple(handle or 0 for handle in handles)
    try:
        yield Ranks(library, values)
    finally:
        for value in values:
            assert library.ncclCommDestroy(ctypes.c_void_p(value)) == OK
