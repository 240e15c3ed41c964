"""Reading and writing BPF maps in bulk, as numpy arrays.

A per-CPU value has one slot for every possible CPU, each rounded up to eight bytes; these readers add the slots up.
Batch look-ups (kernel 5.6) read thousands of keys per call.  They are no snapshot: an entry may change or move while
reading, but an entry that is not deleted is returned, and a counter never appears smaller than at an earlier reading.
"""

from __future__ import annotations

import errno
import mmap
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from railscope.probes.loading.bpf_syscall import (
    BPF_MAP_DELETE_ELEM,
    BPF_MAP_LOOKUP_AND_DELETE_ELEM,
    BPF_MAP_LOOKUP_BATCH,
    BPF_MAP_LOOKUP_ELEM,
    BPF_MAP_UPDATE_ELEM,
    KernelRefusal,
    bpf,
)

Records = npt.NDArray[Any]
"""A numpy structured array."""

_BATCH = 4096


class Map:
    """One map of fixed key and value dtypes; `cpus` > 1 or `per_cpu` says how values are laid out."""

    def __init__(
        self, fd: int, name: str, key: np.dtype[Any], value: np.dtype[Any], *, cpus: int = 1, per_cpu: bool = False
    ) -> None:
        self.fd = fd
        self.name = name
        self._key = key
        self._value = value
        self._slots = cpus if per_cpu else 1
        self._slot_bytes = (value.itemsize + 7) // 8 * 8 if per_cpu else value.itemsize
        self._per_cpu = per_cpu
        self._batch = _BATCH

    def read(self) -> tuple[Records, Records]:
        """All entries: keys of shape (n,), values of shape (n,), per-CPU values of shape (n, cpus).

        Raises:
            KernelRefusal: the map cannot be read.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        position: bytes | None = None
        value_bytes = self._slot_bytes * self._slots
        while True:
            key_buffer = np.empty(self._batch * self._key.itemsize, np.uint8)
            value_buffer = np.empty(self._batch * value_bytes, np.uint8)
            in_buffer = np.frombuffer(bytearray(position), np.uint8) if position is not None else None
            out_buffer = np.zeros(max(self._key.itemsize, 8), np.uint8)
            attributes = bytearray(
                struct.pack(
                    "<QQQQIIQQ",
                    0 if in_buffer is None else in_buffer.ctypes.data,
                    out_buffer.ctypes.data,
                    key_buffer.ctypes.data,
                    value_buffer.ctypes.data,
                    self._batch,
                    self.fd,
                    0,
                    0,
                )
            )
            done = False
            try:
                bpf(BPF_MAP_LOOKUP_BATCH, attributes, f"read map {self.name}")
            except KernelRefusal as refusal:
                if refusal.errno == errno.ENOSPC:  # one hash bucket holds more than fits
                    self._batch *= 2
                    continue
                if refusal.errno != errno.ENOENT:  # ENOENT: that was the last batch
                    raise
                done = True
            (count,) = struct.unpack_from("<I", attributes, 32)
            keys.append(key_buffer[: count * self._key.itemsize].tobytes())
            values.append(value_buffer[: count * value_bytes].tobytes())
            if done:
                break
            position = out_buffer.tobytes()
        return self._shape(b"".join(keys), b"".join(values))

    def _shape(self, keys: bytes, values: bytes) -> tuple[Records, Records]:
        key_array = np.frombuffer(keys, self._key)
        if not self._per_cpu:
            return key_array, np.frombuffer(values, self._value)
        slots = np.frombuffer(values, np.uint8).reshape(len(key_array), self._slots, self._slot_bytes)
        packed = np.ascontiguousarray(slots[:, :, : self._value.itemsize])
        return key_array, packed.reshape(-1).view(self._value).reshape(len(key_array), self._slots)

    def lookup(self, key: bytes) -> Records | None:
        """The value of one key: shape (1,), per-CPU (cpus,); None when there is no such key."""
        return self._value_of(key, BPF_MAP_LOOKUP_ELEM, f"look up in map {self.name}")

    def take(self, key: bytes) -> Records | None:
        """Remove one entry of a hash map and return the value that it had then, as `lookup`; None: it was not there."""
        return self._value_of(key, BPF_MAP_LOOKUP_AND_DELETE_ELEM, f"take from map {self.name}")

    def _value_of(self, key: bytes, command: int, what: str) -> Records | None:
        value_buffer = np.zeros(self._slot_bytes * self._slots, np.uint8)
        key_buffer = np.frombuffer(bytearray(key), np.uint8)
        attributes = struct.pack("<IIQQQ", self.fd, 0, key_buffer.ctypes.data, value_buffer.ctypes.data, 0)
        try:
            bpf(command, attributes, what)
        except KernelRefusal as refusal:
            if refusal.errno == errno.ENOENT:
                return None
            raise
        values = self._shape(key, value_buffer.tobytes())[1]
        return values.reshape(-1)

    def update(self, key: bytes, value: bytes) -> None:
        """Write one entry of a map that is not per-CPU."""
        key_buffer = np.frombuffer(bytearray(key), np.uint8)
        value_buffer = np.frombuffer(bytearray(value), np.uint8)
        attributes = struct.pack("<IIQQQ", self.fd, 0, key_buffer.ctypes.data, value_buffer.ctypes.data, 0)
        bpf(BPF_MAP_UPDATE_ELEM, attributes, f"write map {self.name}")

    def delete(self, key: bytes) -> bool:
        """Remove one entry; returns whether it was there."""
        key_buffer = np.frombuffer(bytearray(key), np.uint8)
        attributes = struct.pack("<IIQQQ", self.fd, 0, key_buffer.ctypes.data, 0, 0)
        try:
            bpf(BPF_MAP_DELETE_ELEM, attributes, f"delete from map {self.name}")
        except KernelRefusal as refusal:
            if refusal.errno != errno.ENOENT:
                raise
            return False
        return True


class MappedArray(Map):
    """An array whose memory is mapped (BPF_F_MMAPABLE, Linux 5.5): reading it is a copy, and no system call.

    A batch look-up takes 0.3 µs for each element, of which most are free.  No snapshot either: an element may be half
    written.
    """

    def __init__(self, fd: int, name: str, value: np.dtype[Any], entries: int) -> None:
        """
        Raises:
            OSError: the array cannot be mapped.
        """
        super().__init__(fd, name, np.dtype("<u4"), value)
        if value.itemsize % 8:
            raise ValueError(f"map {name}: values of {value.itemsize} bytes are not laid out one after another")
        size = -(-entries * value.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        self._numbers = np.arange(entries, dtype="<u4")

    def read(self) -> tuple[Records, Records]:
        """All elements: their numbers, and their values."""
        size = len(self._numbers) * self._value.itemsize
        return self._numbers, np.frombuffer(self._memory[:size], self._value)

    def elements(self, numbers: npt.NDArray[np.uint32]) -> Records:
        """Copies of some elements, by their numbers: what the others hold is not touched."""
        return np.frombuffer(self._memory, self._value, len(self._numbers))[numbers]

    def close(self) -> None:
        """Unmap the array; its descriptor belongs to whom it was made by."""
        self._memory.close()
