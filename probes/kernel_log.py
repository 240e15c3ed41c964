"""Hardware events in the kernel's log: XIDs of GPUs and NVSwitches, PCIe errors, and what network drivers complain of.

`/dev/kmsg` gives one record a read: `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT`, then lines of properties (Linux
Documentation/ABI/testing/dev-kmsg).  Any program that may open the device can write records too, but the kernel never
lets it have facility 0, which is the kernel's own: only those are looked at.  Texts are matched whole from their
beginning, and what is kept of them is a code and a PCI address.

Sources of the texts: NVIDIA's "XID Errors", and of Linux drivers/pci/pcie/aer.c, drivers/net/ethernet/mellanox/mlx5/
core/{health,events}.c, drivers/net/ethernet/{broadcom/bnxt/bnxt.c,intel/ice/ice_main.c,amazon/ena/ena_netdev.c} and
net/sched/sch_generic.c.  The texts are no interface of the kernel's: what is not recognised is passed over.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

EventKind = Literal["xid", "sxid", "pcie", "nic", "machine_check"]

_RECORD_BYTES: Final = 8192
"""The longest record; a shorter buffer would be refused."""
_MOST_RECORDS: Final = 4096
"""Of one reading: what is left comes with the next."""
_HEADER: Final = re.compile(rb"(\d{1,10}),(\d{1,20}),(\d{1,20}),[^;]{0,64};")
_FACILITY_SHIFT: Final = 3

_PCI: Final = r"(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_DRIVER: Final = rf"(?:mlx5_core|bnxt_en|ice|ena|efa|ionic|hns3|mana|gve) {_PCI}"

_BUS_ERROR: Final = rf"\w{{1,32}} {_PCI}: (?:AER: )?PCIe Bus Error: severity="

_TEXTS: Final[tuple[tuple[EventKind, str, re.Pattern[str]], ...]] = (
    ("xid", "", re.compile(rf"NVRM: Xid \(PCI:{_PCI}\): (?P<code>\d{{1,4}})(?:,|$)")),
    ("sxid", "", re.compile(rf"nvidia-nvswitch\d{{1,3}}: SXid \(PCI:{_PCI}\): (?P<code>\d{{1,6}}), (?P<fatal>Fatal)?")),
    ("pcie", "fatal", re.compile(_BUS_ERROR + r"Uncorrect(?:ed|able) \(Fatal\)")),
    ("pcie", "non_fatal", re.compile(_BUS_ERROR + r"Uncorrect(?:ed|able) \(Non-Fatal\)")),
    ("pcie", "correctable", re.compile(_BUS_ERROR + r"Correct(?:ed|able)")),
    ("nic", "firmware", re.compile(_DRIVER + r": .{0,120}(?:health compromised|in fatal state|[Ff]atal error)")),
    ("nic", "module", re.compile(_DRIVER + r": .{0,80}Port module event\[error\]")),
    ("nic", "transmit_timeout", re.compile(_DRIVER + r" \S{1,16}: (?:NETDEV WATCHDOG|TX timeout|transmit queue)")),
    ("nic", "reset", re.compile(_DRIVER + r": .{0,80}(?:device will reset|resetting|PF reset|Keep alive watchdog)")),
    ("machine_check", "hardware_error", re.compile(r"mce: \[Hardware Error\]: ")),
)  # fmt: skip
"""(kind, code where the text has none, beginning of the text)."""
_LONGEST_TEXT: Final = 512


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One line of the kernel about ill hardware."""

    kind: EventKind
    code: str
    """The number of an XID, else a word of ours: `fatal`, `firmware`, `module`."""
    pci: str
    """As sysfs writes it, 0000:18:00.0; empty: the line has none."""
    fatal: bool
    """Whether an SXid says so of itself."""
    monotonic_ns: int
    """When the kernel wrote it; its log's clock is within milliseconds of the monotonic one."""


@dataclass(frozen=True, slots=True)
class LogReading:
    """What came since the last reading."""

    events: tuple[KernelEvent, ...]
    lost: int
    """Times that records were overwritten before they were read."""


def parse_record(record: bytes) -> KernelEvent | None:
    """The event that a record of /dev/kmsg tells of; None: of none, or a program wrote it."""
    header = _HEADER.match(record)
    if header is None or int(header[1]) >> _FACILITY_SHIFT != 0:
        return None
    text = record[header.end() : header.end() + _LONGEST_TEXT].partition(b"\n")[0].decode("ascii", "replace")
    for kind, code, expression in _TEXTS:
        match = expression.match(text)
        if match is not None:
            found = match.groupdict()
            pci = _address(found.get("pci") or "")
            return KernelEvent(kind, found.get("code") or code, pci, bool(found.get("fatal")), int(header[3]) * 1000)
    return None


def _address(text: str) -> str:
    """A PCI address as sysfs writes it; NVIDIA's driver leaves out the function, and may write a long domain."""
    if not text:
        return ""
    domain, bus, rest = text.lower().split(":")
    device, _, function = rest.partition(".")
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or '0'}"


class KernelLog:
    """Reads a log device without blocking, from its beginning on; not thread-safe."""

    def __init__(self, device: Path = Path("/dev/kmsg")) -> None:
        """Raises OSError: EPERM or EACCES without CAP_SYSLOG, ENOENT where there is no such device."""
        self._descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self) -> LogReading:
        """Everything that came since, up to a limit.

        Raises:
            OSError: the device cannot be read.
        """
        events = []
        lost = 0
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    lost += 1
                    continue
                raise
            if not record:
                break
            event = parse_record(record)
            if event is not None:
                events.append(event)
        return LogReading(tuple(events), lost)
