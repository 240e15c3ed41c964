"""Where in arrays of one element each is what is kept of each communicator's kinds of operations.

The kernel's table of histories has a row for each communicator, operation and size, thousands on a busy host, and the
same ones from reading to reading: which element belongs to which row is found out once for each set of rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.probes.loading.maps import Records

Kind = tuple[int, int]
"""Op and size bucket."""
Slots = npt.NDArray[np.intp]

_NONE: Final[Mapping[Kind, int]] = MappingProxyType({})


class KindSlots:
    """Slots from 0 up, each free again when its communicator is forgotten."""

    def __init__(self) -> None:
        self.size = 0
        """Slots that were ever given away: arrays of so many elements hold all of them."""
        self._slots: defaultdict[int, dict[Kind, int]] = defaultdict(dict)
        self._free: list[int] = []
        self._last: tuple[bytes, Slots] = (b"", np.zeros(0, np.intp))
        """The keys that were asked for last, and their slots."""

    def __iter__(self) -> Iterator[int]:
        """Instances that have slots."""
        return iter(self._slots)

    @property
    def instances(self) -> Set[int]:
        """Instances that have slots."""
        return self._slots.keys()

    def of_instance(self, instance: int) -> Mapping[Kind, int]:
        """The slots of one communicator, by kind."""
        return self._slots.get(instance, _NONE)

    def of_keys(self, keys: Records) -> Slots:
        """A slot for each row of the kernel's table (HISTORY_KEY), by its key."""
        raw = keys.tobytes()
        if raw != self._last[0]:
            columns = (keys[name].tolist() for name in ("instance", "op", "size_bucket"))
            slots = [self.place(instance, (op, size)) for instance, op, size in zip(*columns, strict=True)]
            self._last = raw, np.array(slots, np.intp)
        return self._last[1]

    def place(self, instance: int, kind: Kind) -> int:
        """The slot of a kind of one communicator, which is given one where it has none."""
        of_instance = self._slots[instance]
        slot = of_instance.get(kind)
        if slot is None:
            if not self._free:
                self._free.append(self.size)
                self.size += 1
            slot = of_instance[kind] = self._free.pop()
        return slot

    def forget(self, instance: int) -> list[int]:
        """Free the slots of a communicator; returns them, for their elements to be cleared."""
        gone = list(self._slots.pop(instance, {}).values())
        if gone:
            self._free += gone
            self._last = b"", np.zeros(0, np.intp)
        return gone
