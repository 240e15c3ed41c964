"""The loaded programs that see NCCL move a connection from a port that failed to another.

They are on a function that NCCL calls for a completion with an error and for nothing else, where a job asked for its
failover: they may always stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import possible_cpus
from railscope.probes.loading.links import AttachKind, Links, ProbePoint
from railscope.probes.loading.maps import Map
from railscope.probes.nccl.programs.readings import delete_where, have_ended
from railscope.probes.nccl.programs.shared import OwnedMap, SharedRing
from railscope.probes.nccl.programs.shares import Shares
from railscope.probes.nccl.records.calls import SLOT, STAT
from railscope.probes.nccl.records.failover import (
    FAILED_OVER,
    FAILED_OVER_KEY,
    FAILOVER_CALL,
    FAILOVER_EVENT,
    FailoverStat,
)

PROGRAMS: Final = ("failover_entry", "failover_return")
"""Programs of the object that `Internals` loads."""
SYMBOL: Final = "_Z37ncclIbResiliencyHandleCompletionErrorP16ncclIbResiliencyP6ibv_wci"
"""Not exported; in the `.symtab` of the published libraries from 2.29.7 on, which are the first to fail over."""
_RING_BYTES: Final = 128 << 10  # as in failover.h
_FIRST: Final = (0).to_bytes(4, "little")


def failover_points(elf: Elf, library: int) -> tuple[ProbePoint, ...]:
    """Where the programs attach, at entry and return, in one library, `library` by their number; empty: nowhere.

    Raises:
        ElfError: the file is damaged.
    """
    found = elf.symbols([SYMBOL]).get(SYMBOL)
    return () if found is None else (ProbePoint(SYMBOL, found.file_offset, library << 32),)


class Failover:
    """The programs and their maps, within an object whose owner loads and closes it."""

    def __init__(self, loaded: libbpf.LoadedObject, attach: AttachKind, shares: Shares, pids: Sequence[int]) -> None:
        """`pids`: see `Links`."""
        self._attach_kind = attach
        self._pids = pids
        self._entry, self._return = (loaded.program_fds[program] for program in PROGRAMS)
        self._failed_over = OwnedMap(loaded.map_fds["failed_over"], "failed_over", FAILED_OVER_KEY, FAILED_OVER, shares)
        self._calls = OwnedMap(loaded.map_fds["failover_calls"], "failover_calls", SLOT, FAILOVER_CALL, shares)
        self._any = Map(loaded.map_fds["any_failed_over"], "any_failed_over", SLOT, np.dtype("<u4"))
        self._stats = Map(
            loaded.map_fds["failover_stats"], "failover_stats", SLOT, STAT, cpus=possible_cpus(), per_cpu=True
        )
        self.events = SharedRing(
            loaded.map_fds["failover_events"], _RING_BYTES, FAILOVER_EVENT, "failover_events", shares
        )

    def attach(self, path: str, points: Sequence[ProbePoint], *, pid: int = 0) -> Links:
        """Attach to the file at `path`; no links where there are no points.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links(self._pids)
        links.attach_calls(self._attach_kind, self._entry, self._return, path, points, pid=pid)
        return links

    def forget(self, connections: Iterable[tuple[int, int]]) -> None:
        """These connections (pid, address) use all their ports again, or are closed: sends need not ask any more.

        Raises:
            KernelRefusal: the tables cannot be written.
        """
        for tgid, comm in connections:
            self._failed_over.delete(np.array([(comm, tgid, 0)], FAILED_OVER_KEY).tobytes())
        if len(self._failed_over.read()[0]):
            return
        self._any.update(_FIRST, _FIRST)
        if len(self._failed_over.read()[0]):  # one came in between
            self._any.update(_FIRST, (1).to_bytes(4, "little"))

    def forget_processes(self, tgids: Collection[int]) -> None:
        """Drop what processes left that have ended, these or others.

        Raises:
            KernelRefusal: the tables cannot be read or written.
        """
        delete_where(self._calls, lambda _, calls: have_ended(calls["tgid"], tgids))
        delete_where(self._failed_over, lambda keys, _: have_ended(keys["tgid"], tgids))

    def stats(self) -> Mapping[FailoverStat, int]:
        """What the programs counted about themselves, since load."""
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {FailoverStat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def close(self) -> None:
        """Unmap the ring; the programs stay loaded."""
        self.events.close()
