"""Reads counters from `/proc/PID/net/dev`: the fallback without the right to enter a namespace.

Source: dev_seq_printf_stats in the kernel's net/core/net-procfs.c.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.netdev.counters import CounterReading, DeviceFailure, Values, is_counter

_PROC_COLUMNS: Final = {
    "rx_bytes": 0,
    "rx_packets": 1,
    "rx_errors": 2,
    "rx_dropped_or_missed": 3,
    "rx_fifo_errors": 4,
    "tx_bytes": 8,
    "tx_packets": 9,
    "tx_errors": 10,
    "tx_dropped": 11,
    "tx_fifo_errors": 12,
    "collisions": 13,
}
"""Columns of /proc/net/dev that mean one thing; the others are sums,
and so is "drop" on the receive side, which is named for what it is."""
_PROC_FIELDS: Final = tuple(_PROC_COLUMNS)
_PROC_COLUMN_NUMBERS: Final = tuple(_PROC_COLUMNS.values())
_READ_BYTES: Final = 64 * 1024
_READS_LIMIT: Final = 256


class ProcNetDevCounters:
    """Counters of the namespace of one process, from a kept descriptor on its `net/dev`.

    The open file shows the namespace of that process also after it has ended.
    """

    def __init__(self, process_folder: Path, clock: Clock) -> None:
        """Raises OSError when the process is gone."""
        self._clock = clock
        self._path = process_folder / "net" / "dev"
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._names: tuple[str, ...] = ()
        self._generations: tuple[int, ...] = ()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def refresh(self) -> None:
        """Nothing is kept but the last names, which every read compares."""

    def read(self) -> CounterReading:
        """See `CounterSource.read`."""
        before_ns = self._clock.monotonic_ns()
        text = self._text()
        after_ns = self._clock.monotonic_ns()
        names, values, failed = parse_proc_net_dev(text)
        if names != self._names:
            self._names, self._generations = names, (0,) * len(names)
        return CounterReading(before_ns, after_ns, self._names, self._generations, _PROC_FIELDS, values, failed)

    def _text(self) -> bytes:
        parts: list[bytes] = []
        at = 0
        for _ in range(_READS_LIMIT):
            part = os.pread(self._descriptor, _READ_BYTES, at)
            if not part:
                return b"".join(parts)
            parts.append(part)
            at += len(part)
        raise ValueError(f"{self._path}: longer than {at} bytes")


def parse_proc_net_dev(text: bytes) -> tuple[tuple[str, ...], Values, tuple[DeviceFailure, ...]]:
    """Devices, counters (columns as in `ProcNetDevCounters`) and lines that could not be understood.

    Raises:
        ValueError: the text does not begin like /proc/net/dev.
    """
    lines = text.split(b"\n")
    if len(lines) < 2 or not lines[0].startswith(b"Inter-|") or b"|bytes" not in lines[1]:
        raise ValueError(f"/proc/net/dev: unexpected beginning {text[:40]!r}")
    rows: dict[str, list[int]] = {}
    failed: list[DeviceFailure] = []
    for line in lines[2:]:
        if not line:
            continue
        # A device may have a colon in its name, never white space; the counters have no colon.
        head, colon, tail = line.rpartition(b":")
        name = head.strip().decode("utf-8", "replace")
        columns = tail.split()
        if not colon or not name or len(columns) != 16 or not all(is_counter(column) for column in columns):
            failed.append(DeviceFailure(name or "unknown", f"/proc/net/dev: not a line of counters: {line[:60]!r}"))
        elif name in rows:
            failed.append(DeviceFailure(name, "/proc/net/dev: listed twice"))
        else:
            rows[name] = [int(columns[number]) for number in _PROC_COLUMN_NUMBERS]
    values: Values = np.array(list(rows.values()), dtype=np.uint64).reshape(len(rows), len(_PROC_FIELDS))
    return tuple(rows), values, tuple(failed)
