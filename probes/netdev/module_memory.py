"""What a network module says of itself: temperature, light of each lane, and which of its own limits it passed.

Two forms: SFF-8636 (QSFP+, QSFP28) and CMIS (QSFP-DD, OSFP).  Both have a lower half of 128 bytes that is always there
and pages of 128 bytes above it; copper cables have no more than the lower half, and no light.  Sources: SNIA SFF-8636
revision 2.11, OIF CMIS 5.2; as `ethtool -m` shows them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

HALF: Final = 128
"""Bytes of the lower half, and of each page."""

ReadPage = Callable[[int, int, int], bytes]
"""(page, offset, bytes) -> memory; raises OSError."""

_QSFP: Final = {0x0C: "qsfp", 0x0D: "qsfp+", 0x11: "qsfp28"}
_CMIS: Final = {0x18: "qsfp-dd", 0x19: "osfp", 0x1E: "qsfp+cmis", 0x1F: "sfp-dd cmis"}
_QSFP_LANES: Final = 4
_CMIS_LANES: Final = 8
_TEMPERATURE_UNIT: Final = 1 / 256
_VOLTAGE_UNIT: Final = 1e-4
_POWER_UNIT: Final = 1e-7
"""0.1 µW."""


@dataclass(frozen=True, slots=True)
class ModuleReading:
    """One module at one moment; None and empty: it does not tell."""

    form: str
    """`qsfp28`, `qsfp-dd`, `osfp`, …"""
    temperature_celsius: float | None
    volts: float | None
    receive_watts: tuple[float, ...]
    """By lane."""
    transmit_watts: tuple[float, ...]
    alarms: tuple[tuple[str, str], ...]
    """(lane, or empty for the whole module; what passed which of the module's own limits: `temperature_high`,
    `receive_power_low`, `receive_lost`, `transmit_fault`, …)."""


def read_module(read: ReadPage) -> ModuleReading | None:
    """Read a module; None where it is of another form, or tells nothing.

    Raises:
        OSError: it cannot be read.
    """
    lower = read(0, 0, HALF)
    if len(lower) < HALF:
        return None
    if lower[0] in _QSFP:
        return parse_sff8636(lower)
    if lower[0] in _CMIS:
        # A module without pages, a copper cable, has bit 7 of byte 2 set: "flat".
        return parse_cmis(lower, b"" if lower[2] & 0x80 else read(0x11, HALF, HALF))
    return None


def parse_sff8636(lower: bytes) -> ModuleReading | None:
    """The lower half of a QSFP module's memory (SFF-8636, tables 6-1 to 6-8); None: too short, or another form."""
    if len(lower) < HALF or lower[0] not in _QSFP:
        return None
    receive = _powers(lower, 34, _QSFP_LANES)
    transmit = _powers(lower, 50, _QSFP_LANES)
    alarms = [*_module_alarms(lower[6], lower[7] >> 4)]
    for lane in range(_QSFP_LANES):
        number = str(lane + 1)
        if lower[3] >> lane & 1:
            alarms.append((number, "receive_lost"))
        if lower[3] >> 4 + lane & 1:
            alarms.append((number, "transmit_lost"))
        if lower[4] >> lane & 1:
            alarms.append((number, "transmit_fault"))
        # Two lanes a byte, the first in the high half: high alarm, low alarm, high warning, low warning.
        for name, first in (("receive_power", 9), ("transmit_power", 13)):
            flags = lower[first + lane // 2] >> (4 if lane % 2 == 0 else 0)
            alarms += [(number, f"{name}_{way}") for way in _ways(flags)]
    # A copper cable shows nought for light and temperature alike, and its flags are left from nothing.
    if not any((*receive, *transmit)):
        receive = transmit = ()
        alarms = [one for one in alarms if not one[0]]
    temperature, volts = _temperature(lower, 22), _volts(lower, 26)
    return ModuleReading(_QSFP[lower[0]], temperature, volts, receive, transmit, tuple(alarms))


def parse_cmis(lower: bytes, lanes: bytes) -> ModuleReading | None:
    """The lower half and page 11h of a module with CMIS (tables 8-5 to 8-9, 8-75 to 8-83); None: another form.

    `lanes` is the page's 128 bytes; empty: the module has no pages.
    """
    if len(lower) < HALF or lower[0] not in _CMIS:
        return None
    flags = lower[9]
    # High alarm, low alarm, high warning, low warning from bit 0 on: the other way round than in a QSFP module.
    alarms = [*_module_alarms(_mirrored(flags & 0xF) << 4, _mirrored(flags >> 4))]
    receive: tuple[float, ...] = ()
    transmit: tuple[float, ...] = ()
    if len(lanes) >= HALF:
        receive, transmit = _powers(lanes, 186 - HALF, _CMIS_LANES), _powers(lanes, 154 - HALF, _CMIS_LANES)
        if any((*receive, *transmit)):
            alarms += _cmis_lane_alarms(lanes)
        else:
            receive = transmit = ()
    return ModuleReading(_CMIS[lower[0]], _temperature(lower, 14), _volts(lower, 16), receive, transmit, tuple(alarms))


_CMIS_FLAGS: Final = (
    (135, "transmit_fault"),
    (136, "transmit_lost"),
    (139, "transmit_power_high"),
    (140, "transmit_power_low"),
    (141, "transmit_power_high_warning"),
    (142, "transmit_power_low_warning"),
    (147, "receive_lost"),
    (149, "receive_power_high"),
    (150, "receive_power_low"),
    (151, "receive_power_high_warning"),
    (152, "receive_power_low_warning"),
)
"""Byte of page 11h with a bit for each lane."""


def _cmis_lane_alarms(page: bytes) -> Iterator[tuple[str, str]]:
    for lane in range(_CMIS_LANES):
        for at, name in _CMIS_FLAGS:
            if page[at - HALF] >> lane & 1:
                yield str(lane + 1), name


def _module_alarms(temperature: int, volts: int) -> Iterator[tuple[str, str]]:
    """Temperature in the high half of its byte; voltage in the low half."""
    yield from (("", f"temperature_{way}") for way in _ways(temperature >> 4))
    yield from (("", f"voltage_{way}") for way in _ways(volts))


def _ways(flags: int) -> Iterator[str]:
    """Of four bits: high alarm, low alarm, high warning, low warning, the highest first."""
    for bit, way in ((8, "high"), (4, "low"), (2, "high_warning"), (1, "low_warning")):
        if flags & bit:
            yield way


def _mirrored(flags: int) -> int:
    return (flags & 1) << 3 | (flags & 2) << 1 | (flags & 4) >> 1 | (flags & 8) >> 3


def _powers(memory: bytes, at: int, lanes: int) -> tuple[float, ...]:
    return tuple(one * _POWER_UNIT for one in struct.unpack_from(f">{lanes}H", memory, at))


def _temperature(memory: bytes, at: int) -> float | None:
    raw = struct.unpack_from(">h", memory, at)[0]
    return float(raw * _TEMPERATURE_UNIT) if raw else None


def _volts(memory: bytes, at: int) -> float | None:
    raw = struct.unpack_from(">H", memory, at)[0]
    return float(raw * _VOLTAGE_UNIT) if raw else None
