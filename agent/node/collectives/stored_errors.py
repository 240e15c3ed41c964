"""Errors that communicators keep and nobody asks for: read once in a while from outside, without a probe.

A job that does not poll ncclCommGetAsyncError, or that is killed while it hangs, never tells of its error; the
communicator's struct holds it all the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from railscope.probes.loading.maps import Records
from railscope.probes.nccl.records.errors import NO_ERRORS, ErrorLayout, stored_result

_log = logging.getLogger("railscope.errors")

_MOST_AT_ONCE: Final = 512
"""Communicators looked at in one reading, at about 10 µs each; with more of them it takes several to come round."""


class StoredErrors:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, procfs: Path, layout_of: Callable[[int], ErrorLayout | None]) -> None:
        """`layout_of` knows the layout of a library by its number."""
        self._procfs = procfs
        self._layout_of = layout_of
        self._next = 0

    def read(self, rows: tuple[Records, Records]) -> Iterator[tuple[int, int]]:
        """Instances of living communicators that have an error, with its result.

        `rows` is the table of communicators (keys, values) as it was read a moment ago.
        """
        keys, values = rows
        living = [
            (int(key["tgid"]), int(key["comm"]), int(value["instance"]), int(value["library"]))
            for key, value in zip(keys, values, strict=True)
            if value["confirmed"] and not value["destroyed_ns"]
        ]
        living.sort()
        if len(living) > _MOST_AT_ONCE:
            self._next %= len(living)
            living = (living[self._next :] + living[: self._next])[:_MOST_AT_ONCE]
            self._next += _MOST_AT_ONCE
        for tgid, communicators in groupby(living, lambda one: one[0]):
            try:
                memory = os.open(self._procfs / str(tgid) / "mem", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                _log.debug("process %d: its communicators' errors cannot be read: %s", tgid, error.strerror)
                continue
            try:
                for _, comm, instance, library in communicators:
                    layout = self._layout_of(library)
                    result = stored_result(memory, comm, layout) if layout is not None else None
                    if result is not None and result not in NO_ERRORS:
                        yield instance, result
            finally:
                os.close(memory)
