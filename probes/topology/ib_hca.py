"""Parses NCCL_IB_HCA: the RDMA ports that a job may use, with rail and plane.

The form is `[^][=]DEVICE[:PORT[:RAIL[:PLANE]]],…`: `^` all but these, `=` exact names instead of beginnings (`mlx5_1`
without it is `mlx5_10` as well).  Read as NCCL reads it: `parseStringList` and `matchIfList` in src/misc/utils.cc,
ncclIbInit in src/transport/net_ib; rail and plane since 2.30, where they are passed over before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_MOST_ENTRIES: Final = 32
"""MAX_IB_DEVS: NCCL passes over what follows."""
_LONGEST_NAME: Final = 63
_MOST_RAILS: Final = 1 << 15
_INTEGER: Final = re.compile(r"\s*([+-]?[0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class HcaEntry:
    name: str
    """A device's name, or its beginning."""
    port: int | None
    """None: every port."""
    rail: int | None
    plane: int | None


@dataclass(frozen=True, slots=True)
class HcaList:
    text: str
    """The variable's value."""
    exclude: bool
    exact: bool
    entries: tuple[HcaEntry, ...]

    def find(self, device: str, port: int | None) -> HcaEntry | None:
        """The first entry that means this port, whether it is to be used or not; `port` None: not known."""
        for entry in self.entries:
            named = device == entry.name if self.exact else device.startswith(entry.name)
            if named and (port is None or entry.port is None or port == entry.port):
                return entry
        return None

    def allows(self, device: str, port: int | None) -> bool:
        """Whether NCCL uses this port."""
        named = not self.entries or self.find(device, port) is not None
        return named != self.exclude


def parse_hca_list(text: str) -> HcaList:
    """Understand a value of NCCL_IB_HCA, which chooses RDMA devices; never raises, as NCCL never refuses one."""
    rest = text
    exclude = rest.startswith("^")
    rest = rest[1:] if exclude else rest
    exact = rest.startswith("=")
    rest = rest[1:] if exact else rest
    entries: list[HcaEntry] = []
    for token in rest.split(","):
        name, *numbers = token.split(":", 4)
        if name and len(entries) < _MOST_ENTRIES:
            port, rail, plane = (_number(numbers[at] if at < len(numbers) else "") for at in range(3))
            entries.append(HcaEntry(name[:_LONGEST_NAME], port, _bounded(rail), _bounded(plane)))
    return HcaList(text, exclude, exact, tuple(entries))


def _number(text: str) -> int | None:
    """As atoi reads it: what is no number is 0; empty and -1 mean unset."""
    if not text:
        return None
    match = _INTEGER.match(text)
    number = int(match[1]) if match else 0
    return None if number == -1 else number


def _bounded(number: int | None) -> int | None:
    """What fits NCCL's int16_t and is not negative."""
    return number if number is not None and 0 <= number < _MOST_RAILS else None
