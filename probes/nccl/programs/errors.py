"""The loaded programs that see NCCL's errors: attaches them and reads their events.

They are on the calls that finalize, revoke, suspend, resume, abort or destroy a communicator: what each of them
returned, and the asynchronous error that the communicator had by then.  These are few, so the probes may always stay.
In between, `railscope.probes.nccl.records.errors.stored_result` reads the same from outside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import possible_cpus
from railscope.probes.loading.links import AttachKind, Links, ProbePoint
from railscope.probes.loading.maps import Map
from railscope.probes.nccl.functions.entry_points import END_FUNCTIONS
from railscope.probes.nccl.programs.readings import delete_where, have_ended
from railscope.probes.nccl.programs.shared import OwnedMap, SharedRing
from railscope.probes.nccl.programs.shares import Shares
from railscope.probes.nccl.records.calls import COMMUNICATOR_KEY, SLOT, STAT
from railscope.probes.nccl.records.errors import (
    ASYNC_RESULT,
    ERROR_CALL,
    ERROR_CALL_KEY,
    ERROR_EVENT,
    ERROR_LAYOUT,
    ErrorLayout,
    ErrorStat,
)

PROGRAMS: Final = ("async_error_entry", "async_error_return")
"""Programs of the object that `Internals` loads."""
_RING_BYTES: Final = 128 << 10  # as in errors.h


def error_points(elf: Elf, library: int) -> tuple[ProbePoint, ...]:
    """Where programs for NCCL's errors attach, at entry and return, in one library, `library` by their number.

    Raises:
        ElfError: the file is damaged.
    """
    symbols = elf.symbols([function.symbol for function in END_FUNCTIONS])
    return tuple(
        ProbePoint(f.symbol, symbols[f.symbol].file_offset, int(f.kind) | library << 32)
        for f in END_FUNCTIONS
        if f.symbol in symbols
    )


class Errors:
    """The programs and their maps, within an object whose owner loads and closes it."""

    def __init__(
        self, loaded: libbpf.LoadedObject, attach: AttachKind, shares: Shares, pids: Sequence[int] = ()
    ) -> None:
        """`pids`: see `Links`."""
        self._attach_kind = attach
        self._pids = pids
        self._entry, self._return = (loaded.program_fds[program] for program in PROGRAMS)
        self._layouts = Map(loaded.map_fds["error_layouts"], "error_layouts", SLOT, ERROR_LAYOUT)
        self._stats = Map(loaded.map_fds["error_stats"], "error_stats", SLOT, STAT, cpus=possible_cpus(), per_cpu=True)
        self._calls = OwnedMap(loaded.map_fds["error_calls"], "error_calls", ERROR_CALL_KEY, ERROR_CALL, shares)
        self._results = OwnedMap(
            loaded.map_fds["async_results"], "async_results", COMMUNICATOR_KEY, ASYNC_RESULT, shares
        )
        self.events = SharedRing(loaded.map_fds["error_events"], _RING_BYTES, ERROR_EVENT, "error_events", shares)

    def describe(self, library: int, layout: ErrorLayout | None) -> None:
        """Set where communicators of a library keep their result; None: unknown."""
        record = np.zeros(1, ERROR_LAYOUT) if layout is None else layout.record()
        self._layouts.update(library.to_bytes(4, "little"), record.tobytes())

    def attach(self, path: str, points: Sequence[ProbePoint], *, pid: int = 0) -> Links:
        """Attach to the file at `path`; no links where there are no points.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links(self._pids)
        links.attach_calls(self._attach_kind, self._entry, self._return, path, points, pid=pid)
        return links

    def forget_processes(self, tgids: Collection[int]) -> None:
        """Drop what processes left that have ended, these or others: unfinished calls, and errors of communicators.

        Raises:
            KernelRefusal: the tables cannot be read or written.
        """
        delete_where(self._calls, lambda _, calls: have_ended(calls["tgid"], tgids))
        delete_where(self._results, lambda keys, _: have_ended(keys["tgid"], tgids))

    def stats(self) -> Mapping[ErrorStat, int]:
        """What the programs counted about themselves, since load."""
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {ErrorStat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def close(self) -> None:
        """Unmap the ring; the programs stay loaded."""
        self.events.close()
