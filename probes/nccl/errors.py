"""The probes that see NCCL's errors: attach them, read what they saw.

`Reach.ENDS` probes the calls that finalize, revoke, suspend, resume, abort or destroy a communicator: what each of them
returned, and the asynchronous error that the communicator had by then.  They are few, so these probes may always stay.
`Reach.POLLS` probes ncclCommGetAsyncError, which sees an error as soon as the job does, also in a library whose struct
layouts are not known; but NCCL calls that function at every collective as well (2.21 to 2.32), so it is for as long as
somebody looks into a stall.  In between, `probes.nccl.error_records.stored_result` reads the same from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from probes import libbpf
from probes.bpf_syscall import KernelRefusal, possible_cpus
from probes.elf import Elf
from probes.links import AttachKind, Links
from probes.maps import Map
from probes.nccl.error_records import ERROR_EVENT, ERROR_LAYOUT, ErrorLayout, ErrorSource, ErrorStat
from probes.nccl.functions import END_FUNCTIONS
from probes.nccl.library import ProbePoint
from probes.nccl.prologue import PROLOGUE_BYTES, probe_offset
from probes.nccl.records import SLOT, STAT
from probes.ring import Ring

POLL_FUNCTION: Final = "ncclCommGetAsyncError"
PROGRAMS: Final = ("async_error_entry", "async_error_return")
"""Programs of the object that `Internals` loads."""
_RING_BYTES: Final = 64 << 10  # as in errors.h


class Reach(Enum):
    """Which calls are probed for errors."""

    ENDS = "ends"
    POLLS = "polls"


@dataclass(frozen=True, slots=True)
class ErrorPoints:
    """Where the programs attach in one library, at entry and at return."""

    ends: tuple[ProbePoint, ...]
    polls: tuple[ProbePoint, ...]
    """Empty where the kernel would single-step every call."""

    def at(self, reach: Reach) -> tuple[ProbePoint, ...]:
        return self.ends if reach is Reach.ENDS else self.polls


def error_points(elf: Elf, library: int) -> ErrorPoints:
    """Choose the probes for one library that is known as number `library` to the BPF programs.

    Raises:
        ElfError: the file is damaged.
    """
    symbols = elf.symbols([POLL_FUNCTION, *(function.symbol for function in END_FUNCTIONS)])
    ends = tuple(
        ProbePoint(f.symbol, symbols[f.symbol].file_offset, _cookie(ErrorSource(int(f.kind)), library))
        for f in END_FUNCTIONS
        if f.symbol in symbols
    )
    polls: tuple[ProbePoint, ...] = ()
    if poll := symbols.get(POLL_FUNCTION):
        code = elf.read_at(poll.file_offset, min(PROLOGUE_BYTES, poll.size or PROLOGUE_BYTES))
        where = probe_offset(code, elf.machine)
        if where is not None and where.return_possible:
            offset = poll.file_offset + where.skip_bytes
            polls = (ProbePoint(POLL_FUNCTION, offset, _cookie(ErrorSource.ASYNC, library)),)
    return ErrorPoints(ends, polls)


class Errors:
    """The programs and their maps, within an object that somebody else loaded and closes."""

    def __init__(self, loaded: libbpf.LoadedObject, attach: AttachKind) -> None:
        self._attach_kind = attach
        self._entry, self._return = (loaded.program_fds[program] for program in PROGRAMS)
        self._layouts = Map(loaded.map_fds["error_layouts"], "error_layouts", SLOT, ERROR_LAYOUT)
        self._stats = Map(loaded.map_fds["error_stats"], "error_stats", SLOT, STAT, cpus=possible_cpus(), per_cpu=True)
        self.events = Ring(loaded.map_fds["error_events"], _RING_BYTES, ERROR_EVENT)

    def describe(self, library: int, layout: ErrorLayout | None) -> None:
        """Tell the programs where communicators of a library keep their result; None: unknown."""
        record = np.zeros(1, ERROR_LAYOUT) if layout is None else layout.record()
        self._layouts.update(library.to_bytes(4, "little"), record.tobytes())

    def attach(self, path: str, points: ErrorPoints, reach: Reach, *, pid: int = 0) -> Links:
        """Attach to the file at `path`; no links where the library lacks what `reach` needs.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links()
        try:
            # Return probes first: an entry without its return would leave a call under way behind.
            links.attach(self._attach_kind, self._return, path, points.at(reach), pid=pid, on_return=True)
            links.attach(self._attach_kind, self._entry, path, points.at(reach), pid=pid)
        except KernelRefusal:
            links.close()
            raise
        return links

    def stats(self) -> Mapping[ErrorStat, int]:
        """What the programs counted about themselves, since load."""
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {ErrorStat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def close(self) -> None:
        """Unmap the ring; the programs stay loaded."""
        self.events.close()


def _cookie(source: ErrorSource, library: int) -> int:
    return int(source) | library << 32
