"""Who holds how much of the tables and rings that are shared out: what programs count as taken, this process as freed.

The rule stands in probes/bpf/shares.h: a user may hold as many entries as are free.  An entry that is taken out of a
table is given back by `flush`, which the tables call when they are read: many entries that end cost few system calls.
Records of a ring are given back as soon as they are read, as the next may come within milliseconds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.records import calls as records

_EVERYBODY: Final = (records.NOBODY, 0)
_LATE_USERS: Final = (records.NOBODY, 1)
"""Users for whom there was no room."""


class Shares:
    """Thread-safe: rings are read without the daemon's lock."""

    def __init__(self, taken: Map, freed: Map) -> None:
        """The maps `shares` and `shares_freed`."""
        self._taken = taken
        self._freed = freed
        self._lock = threading.Lock()
        self._pending: dict[tuple[int, int], Counter[int]] = {}
        """Entries that were taken out and not given back, by uid and tgid, and by the table's number."""
        self._given: dict[tuple[int, int], Records] = {}
        """What stands in `freed`: nobody else writes there."""
        self._processes: set[tuple[int, int]] = set()
        """Who was given something back since the last flush."""

    def free(self, table: str, uid: int, tgid: int, count: int = 1) -> None:
        """Entries of a table, or records of a ring, of a user's process, were taken out."""
        number = records.SHARED_TABLES.index(table)
        owners = (_LATE_USERS,) if uid == records.NOBODY else ((uid, 0), (uid, tgid))
        with self._lock:
            for owner in (_EVERYBODY, *owners):
                self._pending.setdefault(owner, Counter())[number] += count

    def give_back(self) -> None:
        """Give back what was taken out.

        Raises:
            KernelRefusal: a map cannot be changed; what was not given back is tried again next time.
        """
        with self._lock:
            for owner in list(self._pending):
                known = self._given.get(owner)
                value = np.zeros(1, records.SHARE_FREED) if known is None else known.copy()
                for number, count in self._pending[owner].items():
                    value["freed"][0, number] += count
                self._freed.update(_key(*owner), value.tobytes())
                self._given[owner] = value
                del self._pending[owner]
                if owner[1] and owner[0] != records.NOBODY:
                    self._processes.add(owner)

    def flush(self) -> None:
        """Give back what was taken out, and forget processes that hold nothing any more: they have mostly ended.

        Raises:
            KernelRefusal: see `give_back`.
        """
        self.give_back()
        with self._lock:
            for owner in list(self._processes):
                key = _key(*owner)
                taken = self._taken.lookup(key)
                if taken is None or ((taken["taken"] - self._given[owner]["freed"]).view(np.int64) <= 0).all():
                    self._taken.delete(key)
                    self._freed.delete(key)
                    del self._given[owner]
                self._processes.discard(owner)

    def refused(self) -> Mapping[tuple[str, int | None], int]:
        """Calls that got no entry because a user's share was used up, by table and uid, of those that lost any.

        uid None: users for whom there was no room of their own.

        Raises:
            KernelRefusal: the map cannot be read.
        """
        keys, values = self._taken.read()
        users = (keys["tgid"] == 0) | (keys["uid"] == records.NOBODY)
        lost = users & values["refused"].any(axis=1)
        found = {}
        for uid, counts in zip(keys["uid"][lost].tolist(), values["refused"][lost].tolist(), strict=True):
            for table, calls in zip(records.SHARED_TABLES, counts[: len(records.SHARED_TABLES)], strict=True):
                if calls:
                    found[table, None if uid == records.NOBODY else uid] = calls
        return found


def _key(uid: int, tgid: int) -> bytes:
    key = np.zeros(1, records.SHARE_KEY)
    key["uid"], key["tgid"] = uid, tgid
    return key.tobytes()
