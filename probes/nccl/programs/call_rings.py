"""The rings that calls come through (probes/bpf/call_slots.h): how large the loader makes them, and their reader."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from railscope.probes.loading.libbpf import LoadedObject
from railscope.probes.nccl.records.calls import CALL_EVENT, CALL_SLOT
from railscope.probes.rings.ring_buffer import Ring
from railscope.probes.rings.slots import SlotRings, rings_for

_WAKEUPS_BYTES: Final = 4096  # as in call_slots.h


@dataclass(frozen=True, slots=True)
class CallRings:
    """What both sides must agree on."""

    rings: int
    ring_bytes: int

    @classmethod
    def of_this_host(cls, ring_bytes: int) -> Self:
        """As many rings of `ring_bytes`, a power of two, as its processors get."""
        return cls(rings_for(os.cpu_count() or 1, ring_bytes), ring_bytes)

    @property
    def map_entries(self) -> Mapping[str, int]:
        """`max_entries` by map."""
        return {"call_rings": self.rings, "call_slots": self.rings * self.ring_bytes // CALL_SLOT.itemsize}

    @property
    def constants(self) -> bytes:
        """The variables `call_ring_mask` and `call_slot_bits`, one behind the other."""
        return struct.pack("<II", self.rings - 1, (self.ring_bytes // CALL_SLOT.itemsize).bit_length() - 1)

    def open(self, loaded: LoadedObject) -> SlotRings:
        """The reader of records of dtype CALL_EVENT.

        Raises:
            OSError: a map cannot be mapped.
        """
        maps = loaded.map_fds
        return SlotRings(
            maps["call_rings"],
            maps["call_slots"],
            Ring(maps["call_wakeups"], _WAKEUPS_BYTES, np.dtype("<u8")),
            rings=self.rings,
            ring_bytes=self.ring_bytes,
            record=CALL_EVENT,
        )
