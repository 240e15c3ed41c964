"""Collectives of the real NCCL library, called directly, on the CUDA test double (testbed/nccl/double): no GPU.

The library, its sockets and its proxy threads are real; streams, events, graphs and kernels are the double's, reached
through its libcudart.so.12 as a job reaches CUDA's.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.gpu.backend import Call, Identity

_ID_BYTES: Final = 128
_TYPES: Final = {"u8": 1, "i32": 2, "f16": 6, "f32": 7, "bf16": 9}
"""ncclDataType_t."""
_SUM: Final = 0
_RANKS: Final = 2
_BUFFER_BYTES: Final = 1 << 20
_CAPTURE_GLOBAL: Final = 0
_NOT_READY: Final = 600
HANG: Final = "CUDA_DOUBLE_HANG"
"""The environment variable that names the switch of `occupy` (testbed/nccl/double/streams.c)."""

_Word = ctypes.c_void_p


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class DoubleBackend:
    """See tests/gpu/backend.py."""

    def __init__(self, rank: int, double: Path, nccl: Path) -> None:
        """Args:
        double: the folder of the built double; its libcuda-double.so is preloaded.
        nccl: libnccl.so.2.
        """
        self._rank = rank
        self._nccl = ctypes.CDLL(str(nccl))
        self._cuda = ctypes.CDLL(str(double / "libcudart.so.12"))
        self._nccl.ncclCommInitRank.argtypes = (_Word, ctypes.c_int, _UniqueId, ctypes.c_int)
        self._stream, self._comm = _Word(), _Word()
        self._check(self._cuda.cudaStreamCreate(ctypes.byref(self._stream)))
        self._graph = _Word()
        self._events = [_Word(), _Word()]
        for event in self._events:
            self._check(self._cuda.cudaEventCreate(ctypes.byref(event)))
        self._buffers: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._kept: list[object] = []

    def join(self, folder: str, address: str, port: int) -> None:  # noqa: ARG002
        file = Path(folder) / "unique-id"
        if self._rank == 0:
            made = _UniqueId()
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(made)))
            partial = file.with_suffix(".partial")
            partial.write_bytes(bytes(made))
            partial.rename(file)
        while not file.exists():
            time.sleep(0.01)
        identity = _UniqueId.from_buffer_copy(file.read_bytes())
        self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._comm), _RANKS, identity, self._rank))

    def identity(self) -> Identity:
        version = ctypes.c_int()
        self._check(self._nccl.ncclGetVersion(ctypes.byref(version)))
        number = version.value
        return Identity(f"{number // 10_000}.{number // 100 % 100}.{number % 100}", self._comm.value or 0)

    def enqueue(self, calls: Sequence[Call]) -> None:
        if len(calls) == 1:
            return self._call(calls[0])
        self._check(self._nccl.ncclGroupStart())
        for call in calls:
            self._call(call)
        return self._check(self._nccl.ncclGroupEnd())

    def synchronize(self) -> None:
        self._check(self._cuda.cudaStreamSynchronize(self._stream))

    def timed(self, call: Call) -> float:
        first, last = self._events
        self._check(self._cuda.cudaEventRecord(first, self._stream))
        self._call(call)
        self._check(self._cuda.cudaEventRecord(last, self._stream))
        self._check(self._cuda.cudaEventSynchronize(last))
        milliseconds = ctypes.c_float()
        self._check(self._cuda.cudaEventElapsedTime(ctypes.byref(milliseconds), first, last))
        return milliseconds.value

    def capture(self, calls: Sequence[Call]) -> None:
        graph = _Word()
        self._check(self._cuda.cudaStreamBeginCapture(self._stream, _CAPTURE_GLOBAL))
        for call in calls:
            self._call(call)
        self._check(self._cuda.cudaStreamEndCapture(self._stream, ctypes.byref(graph)))
        self._check(self._cuda.cudaGraphInstantiate(ctypes.byref(self._graph), graph, ctypes.c_uint64(0)))

    def replay(self) -> None:
        self._check(self._cuda.cudaGraphLaunch(self._graph, self._stream))

    def occupy(self, seconds: float) -> None:
        switch = Path(f"{os.environ[HANG]}.{os.getpid()}")
        switch.touch()
        threading.Timer(seconds, switch.unlink).start()

    def abort(self) -> None:
        if self._rank == 0:
            self._call(Call("AllReduce", 1024, "f32"))
            time.sleep(0.5)
        self._check(self._nccl.ncclCommAbort(self._comm))

    def pinned(self, content: bytes) -> int:
        memory = ctypes.create_string_buffer(content, len(content))
        self._kept.append(memory)
        return ctypes.addressof(memory)

    def ask(self, times: int) -> dict[str, int]:
        event = self._events[0]
        queries = 0
        for _ in range(times):
            self._call(Call("AllReduce", 256, "f32"))
            self._check(self._cuda.cudaEventRecord(event, self._stream))
            state = _NOT_READY
            while state == _NOT_READY:
                state = self._cuda.cudaEventQuery(event)
                queries += 1
                time.sleep(0.0005)
            self.synchronize()
        return {"cuEventQuery": queries, "cuStreamSynchronize": times}

    def build(self, kind: str) -> int:
        raise NotImplementedError(f"the double trains no model ({kind})")

    def train(self, steps: int) -> list[float]:
        raise NotImplementedError(f"the double trains no model ({steps} steps)")

    def _buffer(self, name: str, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
        if name not in self._buffers or ctypes.sizeof(self._buffers[name]) < size_bytes:
            # What was there may still be used by what is enqueued.
            self._kept.append(self._buffers.get(name))
            self._buffers[name] = ctypes.create_string_buffer(max(size_bytes, _BUFFER_BYTES))
        return self._buffers[name]

    def _call(self, call: Call) -> None:
        nccl, comm, stream = self._nccl, self._comm, self._stream
        count, kind = ctypes.c_size_t(call.count), _TYPES[call.data_type]
        one, every = self._buffer("one", call.payload_bytes), self._buffer("every", call.payload_bytes * _RANKS)
        changed = self._buffer("changed", call.payload_bytes * _RANKS)
        if call.operation == "AllReduce":
            return self._check(nccl.ncclAllReduce(one, one, count, kind, _SUM, comm, stream))
        if call.operation == "AllGather":
            return self._check(nccl.ncclAllGather(one, every, count, kind, comm, stream))
        if call.operation == "ReduceScatter":
            return self._check(nccl.ncclReduceScatter(every, one, count, kind, _SUM, comm, stream))
        if call.operation == "Broadcast":
            return self._check(nccl.ncclBroadcast(one, one, count, kind, 0, comm, stream))
        if call.operation == "Reduce":
            return self._check(nccl.ncclReduce(one, one, count, kind, _SUM, 0, comm, stream))
        if call.operation == "AllToAll":
            return self._check(nccl.ncclAlltoAll(every, changed, count, kind, comm, stream))
        self._check(nccl.ncclGroupStart())
        self._check(nccl.ncclSend(one, count, kind, 1 - self._rank, comm, stream))
        self._check(nccl.ncclRecv(changed, count, kind, 1 - self._rank, comm, stream))
        return self._check(nccl.ncclGroupEnd())

    def _check(self, result: int) -> None:
        if result != 0:
            self._nccl.ncclGetLastError.restype = ctypes.c_char_p
            raise RuntimeError(f"result {result}: {(self._nccl.ncclGetLastError(None) or b'').decode()}")
