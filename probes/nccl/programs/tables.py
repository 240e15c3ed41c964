"""The two tables that the programs keep in two places, each read as one.

What a collective's probe needs at every call lies in arrays of slots, which it finds by one multiplication; what finds
its slot taken, and all that is needed rarely, lies in hashes (probes/bpf/nccl.bpf.c and communicators.h).  The slots
are freed here, when an entry is deleted: the programs never take a slot from a process that merely ended.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.programs.shapes import ShapeTable
from railscope.probes.nccl.programs.shared import SharedMap
from railscope.probes.nccl.programs.shares import Shares
from railscope.probes.nccl.records import calls as records

_WORDS: Final = np.dtype([("owner", "<u8"), ("kind", "<u8")])
"""An AGGREGATE_KEY as a slot has it."""
_HASH_FACTOR: Final = 0x9E3779B97F4A7C15
"""HASH_FACTOR of nccl.h."""
_WORD: Final = (1 << 64) - 1


class AggregateTable(SharedMap):
    """Exact counts: keys of dtype AGGREGATE_KEY, each once; values of dtype AGGREGATE, a column for each CPU.

    Counts from slots, which all CPUs share, stand in the first column.
    """

    def __init__(self, fd: int, *, cpus: int, slots: Map, shares: Shares) -> None:
        super().__init__(
            fd, "aggregates", records.AGGREGATE_KEY, records.HASHED_AGGREGATE, shares, cpus=cpus, per_cpu=True
        )
        self._slot_table = slots
        self._taken: dict[bytes, int] = {}
        """Slots by key, as of the last reading."""

    def read(self) -> tuple[Records, Records]:
        """See `Map.read`."""
        self._shares.flush()
        hashed_keys, entries = super().read()
        hashed = entries["total"]
        numbers, slots = self._slot_table.read()
        taken = (slots["owner"] != 0) & (slots["kind"] != 0)
        numbers, slots = numbers[taken], slots[taken]
        keys = _keys_of(slots)
        raw, size = keys.tobytes(), keys.dtype.itemsize
        self._taken = {raw[at * size : (at + 1) * size]: int(number) for at, number in enumerate(numbers)}
        values = np.zeros((len(slots), hashed.shape[1]), records.AGGREGATE)
        for name in ("calls", "payload_bytes"):
            values[name][:, 0] = slots[name]
        again = np.zeros(len(hashed_keys), bool)
        if len(slots):
            # Threads that raced for a slot, and calls before it was freed, may have counted in the hash.
            place = {key: at for at, key in enumerate(self._taken)}
            for at, key in enumerate(hashed_keys.view(f"V{size}").tolist()):
                found = place.get(key)
                if found is not None:
                    again[at] = True
                    for name in ("calls", "payload_bytes"):
                        values[name][found] += hashed[name][at]
        return np.concatenate((keys, hashed_keys[~again])), np.concatenate((values, hashed[~again]))

    def lookup(self, key: bytes) -> Records | None:
        """See `Map.lookup`."""
        entry = super().lookup(key)
        hashed = None if entry is None else entry["total"]
        slot = self._slot_of(key)
        if slot is None:
            return hashed
        values = np.zeros(self._slots, records.AGGREGATE) if hashed is None else hashed.copy()
        for name in ("calls", "payload_bytes"):
            values[name][0] += slot[1][name]
        return values

    def delete(self, key: bytes) -> bool:
        """See `Map.delete`."""
        slot = self._slot_of(key)
        if slot is not None:
            self._slot_table.update(slot[0], bytes(records.AGGREGATE_SLOT.itemsize))
            del self._taken[key]
        return super().delete(key) or slot is not None

    def _slot_of(self, key: bytes) -> tuple[bytes, Any] | None:
        number = self._taken.get(key)
        if number is None:
            return None
        at = number.to_bytes(4, "little")
        slot = self._slot_table.lookup(at)
        return (at, slot[0]) if slot is not None and _keys_of(slot).tobytes() == key else None


class CommunicatorTable(SharedMap):
    """Communicators by process and address: keys of dtype COMMUNICATOR_KEY, values of dtype COMMUNICATOR."""

    def __init__(self, fd: int, *, slots: Map, shapes: ShapeTable, shares: Shares) -> None:
        super().__init__(fd, "communicators", records.COMMUNICATOR_KEY, records.COMMUNICATOR, shares)
        self._slot_table = slots
        self._shapes = shapes

    def read(self) -> tuple[Records, Records]:
        """See `Map.read`."""
        self._shares.flush()
        keys, values = super().read()
        _, slots = self._slot_table.read()
        slots = slots[slots["instance"] != 0]
        values = values.copy()
        order = np.argsort(slots["instance"])
        numbers = slots["instance"][order]
        places = np.searchsorted(numbers, values["instance"])
        found = np.flatnonzero(places < len(numbers))
        found = found[numbers[places[found]] == values["instance"][found]]
        for name in ("sequence", "last_ns"):
            values[name][found] = slots[name][order[places[found]]]
        return keys, values

    def entries(self) -> tuple[Records, Records]:
        """Keys and values without what stands in slots (`sequence`, `last_ns`), which costs a part of `read`.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        return super().read()

    def calls_of(self, key: bytes, instance: int) -> int | None:
        """Calls that one communicator has seen by now; None: its entry is another's, or gone.

        Two system calls at most, for a caller that needs the current number.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        slot = self._slot_table.lookup(_slot_of(key).to_bytes(4, "little"))
        if slot is None or slot["instance"][0] != instance:
            slot = self.lookup(key)
        return None if slot is None or slot["instance"][0] != instance else int(slot["sequence"][0])

    def delete(self, key: bytes) -> bool:
        """See `Map.delete`."""
        entry = self.lookup(key)
        if entry is None:
            return False
        number = _slot_of(key).to_bytes(4, "little")
        slot = self._slot_table.lookup(number)
        if slot is not None and slot["instance"][0] == entry["instance"][0]:
            self._slot_table.update(number, bytes(records.COMMUNICATOR_SLOT.itemsize))
        self._shapes.free(int(entry["instance"][0]))
        return super().delete(key)


def _slot_of(key: bytes) -> int:
    """Where a communicator counts, if the slot is its own: `slot_of` in communicators.h."""
    entry = np.frombuffer(key, records.COMMUNICATOR_KEY)[0]
    mixed = (int(entry["comm"]) ^ int(entry["tgid"]) << 32) * _HASH_FACTOR & _WORD
    return mixed >> 64 - (records.COMMUNICATOR_SLOTS.bit_length() - 1)


def _keys_of(slots: Records) -> Records:
    words = np.empty(len(slots), _WORDS)
    words["owner"], words["kind"] = slots["owner"], slots["kind"]
    keys = words.view(records.AGGREGATE_KEY)
    keys["reserved"] = 0
    return keys
