"""Who holds how much of the tables that are shared out: what the programs count as taken, and this process as freed.

The rule stands in probes/bpf/shares.h: a user may hold as many entries as are free.  An entry that is taken out of a
table is given back by `flush`, which the tables call when they are read: many entries that end cost few system calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from railscope.probes.loading.maps import Map
from railscope.probes.nccl.records import calls as records

_EVERYBODY: Final = (records.NOBODY, 0)
_LATE_USERS: Final = (records.NOBODY, 1)
"""Users for whom there was no room."""


class Shares:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, taken: Map, freed: Map) -> None:
        """The maps `shares` and `shares_freed`."""
        self._taken = taken
        self._freed = freed
        self._pending: Counter[tuple[int, int, int]] = Counter()
        """Entries that were taken out since the last flush, by uid, tgid and the table's number."""

    def free(self, table: str, uid: int, tgid: int) -> None:
        """An entry of a table, of a user's process, was taken out."""
        number = records.SHARED_TABLES.index(table)
        owners = (_LATE_USERS,) if uid == records.NOBODY else ((uid, 0), (uid, tgid))
        for owner in (_EVERYBODY, *owners):
            self._pending[(*owner, number)] += 1

    def flush(self) -> None:
        """Give back what was taken out.

        Raises:
            KernelRefusal: a map cannot be changed; what was not given back is tried again next time.
        """
        for owner in {(uid, tgid) for uid, tgid, _ in self._pending}:
            self._give_back(*owner)

    def _give_back(self, uid: int, tgid: int) -> None:
        key = _key(uid, tgid)
        numbers = range(len(records.SHARED_TABLES))
        known = self._freed.lookup(key)
        value = np.zeros(1, records.SHARE_FREED) if known is None else known.copy()
        for number in numbers:
            value["freed"][0, number] += self._pending[uid, tgid, number]
        taken = self._taken.lookup(key)
        # A process that holds nothing any more has mostly ended: its number would stand here for ever.
        if tgid and uid != records.NOBODY and (taken is None or (value["freed"][0] >= taken["taken"][0]).all()):
            self._taken.delete(key)
            self._freed.delete(key)
        else:
            self._freed.update(key, value.tobytes())
        for number in numbers:
            self._pending.pop((uid, tgid, number), None)

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
