"""How far an import is, on one line of a terminal: bytes read, how many a second, and the time that is left.

Bytes are those of the files as they lie on disk, compressed ones too; other processes count what they read themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TextIO

_LEAST_S: Final = 0.5
"""Between two lines, and before the first one: what is done sooner shows none."""
_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_CLEAR: Final = "\r\x1b[K"


class Progress:
    """Shows how many of `total_bytes` are read; `out` None: nobody looks."""

    def __init__(self, total_bytes: int, out: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.others: Callable[[], int] = int
        """How many bytes other processes have read."""
        self._bytes = 0
        self._total_bytes = max(total_bytes, 1)
        self._out = out
        self._clock = clock
        self._began_s = self._shown_s = clock()
        self._is_shown = False

    def add(self, size_bytes: int) -> None:
        """So many more bytes are read."""
        self._bytes += size_bytes
        self.show()

    def show(self) -> None:
        """Draw the line anew, if it is time to."""
        now_s = self._clock()
        if self._out is None or now_s - self._shown_s < _LEAST_S:
            return
        self._shown_s = now_s
        self._is_shown = True
        done = min(self._bytes + self.others(), self._total_bytes)
        rate = done / (now_s - self._began_s)
        left = f", {_duration((self._total_bytes - done) / rate)} left" if rate else ""
        self._out.write(f"{_CLEAR}{_size(done)} of {_size(self._total_bytes)}, {_size(rate)}/s{left}")
        self._out.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._out is not None and self._is_shown:
            self._out.write(_CLEAR)
            self._out.flush()
            self._is_shown = False


def _size(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"
