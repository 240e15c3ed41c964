"""Tables and rings that are shared out (probes/bpf/shares.h): who takes an entry or a record out gives its place back.

Each entry says in whose share it is, by uid and tgid; a record does so, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.programs.shares import Shares
from railscope.probes.nccl.records.calls import owned
from railscope.probes.rings.ring_buffer import Ring


class SharedMap(Map):
    """A map whose values have a `uid`; a `tgid` has the value or, where it has none, the key."""

    def __init__(
        self,
        fd: int,
        name: str,
        key: np.dtype[Any],
        value: np.dtype[Any],
        shares: Shares,
        *,
        cpus: int = 1,
        per_cpu: bool = False,
    ) -> None:
        """`name`: one of SHARED_TABLES."""
        super().__init__(fd, name, key, value, cpus=cpus, per_cpu=per_cpu)
        self._shares = shares

    def take(self, key: bytes) -> Records | None:
        """See `Map.take`."""
        entry = super().take(key)
        # The programs take entries out, too: only who does so gives the place back.
        if entry is not None:
            self._shares.free(self.name, *self._owner(key, entry))
        return entry

    def delete(self, key: bytes) -> bool:
        """See `Map.delete`."""
        return self.take(key) is not None

    def _owner(self, key: bytes, entry: Records) -> tuple[int, int]:
        """In whose share an entry is: uid and tgid.  On other processors than where it was made both are 0."""
        whose = entry if "tgid" in (entry.dtype.names or ()) else np.frombuffer(key, self._key)
        return int(entry["uid"].max()), int(whose["tgid"].max())


class OwnedMap(SharedMap):
    """A map whose values have their owner behind them (`owned`); who reads gets them without."""

    def __init__(
        self,
        fd: int,
        name: str,
        key: np.dtype[Any],
        value: np.dtype[Any],
        shares: Shares,
        *,
        cpus: int = 1,
        per_cpu: bool = False,
    ) -> None:
        """See `SharedMap`."""
        super().__init__(fd, name, key, owned(value), shares, cpus=cpus, per_cpu=per_cpu)

    def read(self) -> tuple[Records, Records]:
        """See `Map.read`."""
        keys, entries = super().read()
        return keys, np.ascontiguousarray(entries["value"])

    def lookup(self, key: bytes) -> Records | None:
        """See `Map.lookup`."""
        entry = super().lookup(key)
        return None if entry is None else np.ascontiguousarray(entry["value"])

    def take(self, key: bytes) -> Records | None:
        """See `Map.take`."""
        entry = super().take(key)
        return None if entry is None else np.ascontiguousarray(entry["value"])

    def _owner(self, key: bytes, entry: Records) -> tuple[int, int]:
        return super()._owner(key, entry["owner"])


class SharedRing(Ring):
    """A ring whose records have their owner behind them (`owned`); who reads gets them without."""

    def __init__(self, fd: int, size_bytes: int, record: np.dtype[Any], name: str, shares: Shares) -> None:
        """`name`: one of SHARED_TABLES.

        Raises:
            OSError: see `Ring`.
        """
        super().__init__(fd, size_bytes, owned(record))
        self._name = name
        self._shares = shares

    def fullness(self) -> float:
        """How much waits of what one process may fill: over 1 where several do."""
        return 3 * super().fullness()

    @contextmanager
    def batch(self) -> Iterator[Records]:
        """See `Ring.batch`."""
        owners = np.empty(0, np.uint64)
        try:
            with super().batch() as records:
                whose = records["owner"]
                owners = whose["uid"].astype(np.uint64) << np.uint64(32) | whose["tgid"]
                yield records["value"]
        finally:
            if len(owners):
                found, counts = np.unique(owners, return_counts=True)
                for owner, count in zip(found.tolist(), counts.tolist(), strict=True):
                    self._shares.free(self._name, owner >> 32, owner & 0xFFFFFFFF, count)
                with suppress(KernelRefusal):  # what could not be given back is tried again
                    self._shares.give_back()
