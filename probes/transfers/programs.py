"""The loaded programs of probes/bpf/transfers.bpf.c: attaches them to libraries and reads what those transferred.

An object of its own, loaded when the first such library is mapped, on every kernel that the programs that count NCCL's
calls are for.  The table of shares is common to both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import BPF_TRACE_UPROBE_SESSION, KernelRefusal, possible_cpus
from railscope.probes.loading.links import Links, plain_attach_type
from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, constants
from railscope.probes.nccl.programs.readings import have_ended
from railscope.probes.nccl.programs.shared import SharedMap
from railscope.probes.nccl.records.calls import SLOT, STAT
from railscope.probes.transfers.functions import TransferPoints
from railscope.probes.transfers.records import (
    MOST_SPARE,
    PEER,
    PEER_KEY,
    REQUEST,
    REQUEST_KEY,
    THREAD,
    TRANSFER_KEY,
    TRANSFER_TOTAL,
    WAITED,
    TransferStat,
)

_SESSION: Final = "transfer_session"
_ENTRY: Final = "transfer_entry"
_RETURN: Final = "transfer_return"
_END: Final = "transfer_end"
_WAIT_SESSION: Final = "wait_session"
_WAIT_ENTRY: Final = "wait_entry"
_WAIT_RETURN: Final = "wait_return"
_TABLES: Final = ("transfer_threads", "transfer_totals", "transfer_requests", "transfer_peers", "transfer_waited")
MOST_ENTRIES: Final = 16384
"""Of each table."""

Numbers = npt.NDArray[np.uint32]
"""Of functions; of those that transfer nothing it is none of `OPERATIONS`."""
PeerNames = Mapping[tuple[int, int], str]
"""By process, and by the number that stands for a peer of it."""


def _name_of(peer: Records) -> str:
    """Of an entry of dtype PEER."""
    return bytes(peer["name"]).rstrip(b"\0").decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TransferTables:
    """What the kernel's tables hold."""

    keys: Records
    """dtype TRANSFER_KEY."""
    totals: Records
    """dtype TRANSFER_TOTAL, in the order of `keys`."""
    request_keys: Records
    requests: Records
    """dtype REQUEST, in the order of `request_keys`: what goes on after its call."""
    tids: Records
    threads: Records
    """dtype THREAD, in the order of `tids`."""


class TransferPrograms:
    """The programs and their maps; closing it frees everything but the links made through it."""

    def __init__(self, loaded: libbpf.LoadedObject, programs: NcclPrograms) -> None:
        self._loaded = loaded
        self._attach_kind = programs.attach_kind
        self._pids = programs.pids
        self._shares = programs.shares

        def shared(name: str, key: np.dtype[Any], value: np.dtype[Any]) -> SharedMap:
            return SharedMap(loaded.map_fds[name], name, key, value, programs.shares)

        self._totals = shared("transfer_totals", TRANSFER_KEY, TRANSFER_TOTAL)
        self._requests = shared("transfer_requests", REQUEST_KEY, REQUEST)
        self._threads = shared("transfer_threads", SLOT, THREAD)
        self._peers = shared("transfer_peers", PEER_KEY, PEER)
        self._waited = Map(loaded.map_fds["transfer_waited"], "transfer_waited", SLOT, WAITED)
        self._overflow = Map(loaded.map_fds["transfer_overflow"], "transfer_overflow", SLOT, TRANSFER_TOTAL)
        self._stats = Map(
            loaded.map_fds["transfer_stats"], "transfer_stats", SLOT, STAT, cpus=possible_cpus(), per_cpu=True
        )

    @classmethod
    def load(cls, programs: NcclPrograms, *, most_entries: int = MOST_ENTRIES) -> Self:
        """Load the programs beside those that count NCCL's calls.

        Args:
            programs: those.
            most_entries: of each table, of all users together.

        Raises:
            LoadError: this kernel does not take them.
        """
        plain = plain_attach_type(programs.attach_kind)
        if programs.enqueue_time is EnqueueTime.SESSION:
            types = dict.fromkeys((_SESSION, _WAIT_SESSION), BPF_TRACE_UPROBE_SESSION) | {_END: plain}
        else:
            types = dict.fromkeys((_ENTRY, _RETURN, _WAIT_ENTRY, _WAIT_RETURN, _END), plain)
        loaded = libbpf.load(
            libbpf.object_path("transfers"),
            attach_types=types,
            map_entries=dict.fromkeys(_TABLES, most_entries),
            constants=constants(programs.settings, programs.enqueue_time) + struct.pack("<I", most_entries),
            shared_maps=programs.shared_maps(),
        )
        return cls(loaded, programs)

    def attach(self, path: str, points: TransferPoints) -> Links:
        """Attach to the library at `path` (`/proc/self/fd/N` serves).

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        links = Links(self._pids)
        kind, programs = self._attach_kind, self._loaded.program_fds
        try:
            # Ends first: a request without its end would never be taken out.
            links.attach(kind, programs[_END], path, points.ends)
            if _SESSION in programs:
                # It asks for no return where the entry alone matters.
                links.attach(kind, programs[_WAIT_SESSION], path, points.waits, session=True)
                links.attach(kind, programs[_SESSION], path, (*points.calls, *points.entries), session=True)
            else:
                links.attach(kind, programs[_WAIT_RETURN], path, points.waits, on_return=True)
                links.attach(kind, programs[_WAIT_ENTRY], path, points.waits)
                links.attach(kind, programs[_RETURN], path, points.calls, on_return=True)
                links.attach(kind, programs[_ENTRY], path, (*points.calls, *points.entries))
        except KernelRefusal:
            links.close()
            raise
        return links

    def read(self) -> TransferTables:
        """What processes did, and what is under way.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        return TransferTables(*self._totals.read(), *self._requests.read(), *self._threads.read())

    def end(self, requests: Iterable[tuple[int, int, int]]) -> Set[tuple[int, int, int]]:
        """Take out requests that are over: (process, request, when it began), as they were read; returns those taken.

        One that has begun anew meanwhile stays: the programs have counted the former one.

        Raises:
            KernelRefusal: the table cannot be changed.
        """
        taken = set()
        for tgid, request, start_ns in requests:
            key = np.array((request, tgid, 0), REQUEST_KEY).tobytes()
            found = self._requests.lookup(key)
            if found is not None and found["start_ns"][0] == start_ns and self._requests.delete(key):
                taken.add((tgid, request, start_ns))
        self._shares.flush()
        return taken

    def waited_for(self, tid: int, count: int, request_bytes: int) -> tuple[int, ...]:
        """The first `count` of the requests of MPI, of so many bytes each, that a thread's call was given.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        found = self._waited.lookup(tid.to_bytes(4, "little"))
        if found is None:
            return ()
        return tuple(found["requests"][0].view(f"<u{request_bytes}")[:count].tolist())

    def overflow(self) -> Records:
        """By number of the function, dtype TRANSFER_TOTAL: what found no room among the totals.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        return self._overflow.read()[1]

    def peer_name(self, tgid: int, peer: int) -> str:
        """What the library calls a peer of a process; empty where it has no name.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        found = self._peers.lookup(np.array((peer, tgid, 0), PEER_KEY).tobytes())
        return "" if found is None else _name_of(found[0])

    def take_ended(self, tgids: Collection[int]) -> tuple[Records, Records, Numbers, PeerNames]:
        """Take out what the tables hold of these processes, and of others that are no more.

        Returns:
            The totals that were taken out, dtypes TRANSFER_KEY and TRANSFER_TOTAL; of each operation that was not
            complete the number of its function; and the names of peers that were taken out.

        Raises:
            KernelRefusal: a table cannot be read or changed.
        """
        keys, totals = self._totals.read()
        ended = have_ended(keys["tgid"], tgids)
        for key in keys[ended]:
            self._totals.delete(key.tobytes())
        peers, values = self._peers.read()
        gone = have_ended(peers["tgid"], tgids)
        names = {}
        for key, value in zip(peers[gone], values[gone], strict=True):
            names[int(key["tgid"]), int(key["peer"])] = _name_of(value)
            self._peers.delete(key.tobytes())
        unfinished = self._take_under_way(lambda found: have_ended(found, tgids), and_resting=True)
        self._shares.flush()
        return keys[ended], totals[ended], unfinished, names

    def give_up(self) -> Numbers:
        """Take out everything that is not complete: without probes its end is not seen.

        Returns:
            Of each operation the number of its function.

        Raises:
            KernelRefusal: a table cannot be read or changed.
        """
        unfinished = self._take_under_way(lambda tgids: np.ones(len(tgids), bool))
        self._shares.flush()
        return unfinished

    def _take_under_way(self, chosen: Callable[[Records], Any], *, and_resting: bool = False) -> Numbers:
        """`chosen` picks processes by `tgid`; `and_resting`: threads that are in no call, too."""
        unfinished: list[int] = []
        keys, requests = self._requests.read()
        mine = chosen(keys["tgid"])
        begun = requests["start_ns"] != 0
        for key, function, goes_on in zip(
            keys[mine], requests["function"][mine].tolist(), begun[mine].tolist(), strict=True
        ):
            if self._requests.delete(key.tobytes()) and goes_on:
                unfinished.append(function)
        tids, threads = self._threads.read()
        inside = threads["start_ns"] != 0
        mine = chosen(threads["tgid"]) & (inside | and_resting)
        for tid, function, calls in zip(
            tids[mine], threads["function"][mine].tolist(), inside[mine].tolist(), strict=True
        ):
            if self._forget_thread(tid.tobytes()) and calls:
                unfinished.append(function)
        return np.array(unfinished, np.uint32)

    def drop(self, threads: Iterable[tuple[int, int]]) -> None:
        """Take out threads that are not needed: their numbers, and `last_ns` as it was read.

        One that has made a call since stays.  One that begins a call at this very moment is taken out with it.

        Raises:
            KernelRefusal: the table cannot be changed.
        """
        for tid, last_ns in threads:
            key = tid.to_bytes(4, "little")
            found = self._threads.lookup(key)
            if found is not None and found["last_ns"][0] == last_ns:
                self._forget_thread(key)
        self._shares.flush()

    def _forget_thread(self, key: bytes) -> bool:
        """Take out a thread with what goes with it; returns whether it was there."""
        found = self._threads.take(key)
        if found is None:
            return False
        if spare := min(int(found["spare"][0]), MOST_SPARE):
            self._shares.free("transfer_requests", int(found["spare_uid"][0]), int(found["tgid"][0]), spare)
        self._waited.delete(key)
        return True

    def stats(self) -> Mapping[TransferStat, int]:
        """What the programs counted about themselves, since load.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        keys, values = self._stats.read()
        totals = values.sum(axis=1)
        return {TransferStat(int(key)): int(total) for key, total in zip(keys, totals, strict=True)}

    def close(self) -> None:
        self._loaded.close()
