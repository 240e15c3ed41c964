"""How well a PCI function's link is: its lanes and speed against what both ends can, and its errors (AER).

Source: Linux Documentation/ABI/testing/sysfs-bus-pci (`current_link_width`, `max_link_width`, `current_link_speed`,
`max_link_speed`) and sysfs-bus-pci-devices-aer (`aer_dev_correctable`, `aer_dev_nonfatal`, `aer_dev_fatal`: a name and
a count on each line, the last the total).  A card that can more than its slot is not degraded: what is possible is the
less of the card's maximum and that of the port above it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from railscope.probes.netdev.counters import is_counter
from railscope.probes.netdev.ethtool import PCI_ADDRESS
from railscope.probes.netdev.sysfs import read_text

_Number = TypeVar("_Number", int, float)

_SPEED: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?) GT/s", re.ASCII)
_SEVERITIES: Final = {"correctable": "aer_dev_correctable", "non_fatal": "aer_dev_nonfatal", "fatal": "aer_dev_fatal"}
_ERROR: Final = re.compile(r"(\w{1,32}) (\d{1,20})", re.ASCII)
_MOST_KINDS: Final = 64
_UNKNOWN_WIDTHS: Final = frozenset({0, 255})
"""The kernel's for a link that it cannot tell of."""


@dataclass(frozen=True, slots=True)
class PciCondition:
    """One PCI function; None: cannot be known."""

    address: str
    lanes: int | None
    lanes_possible: int | None
    speed_gigatransfers: float | None
    """10^9 transfers a second and lane."""
    speed_possible_gigatransfers: float | None
    errors: tuple[tuple[str, str, int], ...]
    """(`correctable`, `non_fatal` or `fatal`, name of the error as in the PCIe specification, count since boot)."""
    upstream: str
    """Address of the port above; empty for none."""
    upstream_errors: tuple[tuple[str, str, int], ...]
    """Those that the port above counts: of the same link."""


def read_condition(sysfs: Path, address: str) -> PciCondition | None:
    """The condition of one PCI function; None where there is none of this address.  Raises nothing."""
    folder = f"{sysfs}/bus/pci/devices/{address}"
    if not PCI_ADDRESS.fullmatch(address) or not os.path.isdir(folder):  # noqa: PTH112
        return None
    above = os.path.dirname(os.path.realpath(folder))  # noqa: PTH120
    upstream = os.path.basename(above)  # noqa: PTH119
    if not PCI_ADDRESS.fullmatch(upstream):
        above = upstream = ""
    return PciCondition(
        address=address,
        lanes=_width(f"{folder}/current_link_width"),
        lanes_possible=_least(_width(f"{folder}/max_link_width"), _width(f"{above}/max_link_width") if above else None),
        speed_gigatransfers=_speed(f"{folder}/current_link_speed"),
        speed_possible_gigatransfers=_least(
            _speed(f"{folder}/max_link_speed"), _speed(f"{above}/max_link_speed") if above else None
        ),
        errors=_errors(folder),
        upstream=upstream,
        upstream_errors=_errors(above) if above else (),
    )


@lru_cache(maxsize=256)
def parse_aer(text: str) -> tuple[tuple[str, int], ...]:
    """(name, count) of an `aer_dev_*` file, without the total; lines that are none are left out.

    Remembered, as nearly all files of a host are the same: nothing but zeros.
    """
    found = []
    for line in text.splitlines()[:_MOST_KINDS]:
        match = _ERROR.fullmatch(line.strip())
        if match is not None and not match[1].startswith("TOTAL_ERR"):
            found.append((match[1], int(match[2])))
    return tuple(found)


def _errors(folder: str) -> tuple[tuple[str, str, int], ...]:
    return tuple(
        (severity, name, count)
        for severity, file in _SEVERITIES.items()
        for name, count in parse_aer(read_text(f"{folder}/{file}"))
    )


def _width(file: str) -> int | None:
    text = read_text(file)
    width = int(text) if is_counter(text.encode()) else 0
    return None if width in _UNKNOWN_WIDTHS else width


def _speed(file: str) -> float | None:
    match = _SPEED.match(read_text(file))
    return float(match[1]) if match else None


def _least(*values: _Number | None) -> _Number | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None
