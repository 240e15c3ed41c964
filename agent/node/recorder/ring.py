"""The last records of one kind, in bounded memory.

The room is reserved at once and becomes resident as it is filled: an anonymous mapping costs address space until it
is written to.  A batch is copied in with at most two assignments, so that no Python runs per record.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np

from railscope.probes.loading.maps import Records


class RecordRing:
    """May be used from several threads."""

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        """Room for `capacity` records, at least one."""
        if capacity < 1:
            raise ValueError(f"a ring holds at least one record, not {capacity}")
        # Pages of the usual size: numpy would ask for huge ones, of which one record makes 2 MiB resident.
        room = mmap.mmap(-1, capacity * dtype.itemsize)
        self._records = np.frombuffer(room, dtype)
        # As plain bytes: structured arrays are copied field by field.
        self._slots = np.frombuffer(room, np.dtype((np.void, dtype.itemsize)))
        self._lock = threading.Lock()
        self._added = 0

    @property
    def capacity(self) -> int:
        return len(self._records)

    @property
    def added(self) -> int:
        """Records given so far; those beyond the capacity have been overwritten."""
        return self._added

    def add(self, batch: Records) -> None:
        """Add records of the ring's dtype, oldest first, with or without gaps; they overwrite the oldest."""
        count = len(batch)
        capacity = len(self._records)
        if count > capacity:
            batch = batch[count - capacity :]
        with self._lock:
            self._added += count
            at = (self._added - len(batch)) % capacity
            content = batch.view(self._slots.dtype)
            first = min(len(content), capacity - at)
            self._slots[at : at + first] = content[:first]
            if first < len(content):
                self._slots[: len(content) - first] = content[first:]

    def read_after(self, count: int) -> tuple[Records, int]:
        """A copy of what was added after the first `count` records, in the order in which it was added.

        The second is how many of those have been overwritten; with them and the copy, `count` rises to `added`.

        Raises:
            ValueError: so many records have not been added yet.
        """
        with self._lock:
            fresh = self._added - count
            if count < 0 or fresh < 0:
                raise ValueError(f"{self._added} records have been added, not {count}")
            capacity = len(self._records)
            kept = min(fresh, capacity)
            at = (self._added - kept) % capacity
            behind = max(0, at + kept - capacity)
            parts = [self._records[at : at + kept - behind], self._records[:behind]]
            return _together(parts), fresh - kept

    def read_since(self, time_ns: int) -> tuple[Records, int | None]:
        """A copy of what is held from `time_ns` on, oldest first (records need a field of that name).

        The second is None, or the time of the oldest record held, where older ones have been overwritten.
        """
        with self._lock:
            at = self._added % len(self._records)
            overwritten = self._added > len(self._records)
            held = (self._records[at:], self._records[:at]) if overwritten else (self._records[: self._added],)
            oldest_ns = int(held[0]["time_ns"][0]) if overwritten else None
            copy = _together([_from(part, time_ns) for part in held])
        # Processors do not write in the order of their clocks: some of the first ones may be a little older.
        late = copy["time_ns"] >= time_ns
        return copy if late.all() else copy[late], oldest_ns


def _from(records: Records, time_ns: int) -> Records:
    """Records from the first one on that is not older than `time_ns`."""
    late = records["time_ns"] >= time_ns
    return records[int(late.argmax()) :] if late.any() else records[:0]


def _together(parts: list[Records]) -> Records:
    """A copy of all parts in memory of its own, all of which goes back to the system with the copy."""
    contents = [part.view(np.uint8) for part in parts if len(part)]
    size = sum(len(content) for content in contents)
    if not size:
        return parts[0][:0].copy()
    copy = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    np.concatenate(contents, out=copy)
    return copy.view(parts[0].dtype)
