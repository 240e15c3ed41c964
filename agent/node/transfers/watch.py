"""Follows transfers of libraries other than NCCL, in every process that maps one.

The programs are loaded when the first such library is mapped: a host without them pays nothing.  A file is probed when
its first mapper appears, and until a while after its last one has gone.  What probes cost is held against the budget of
all probes (agent/node/overhead/control.py), which may have these detached for a while; what happens meanwhile is not
counted.  What is under way when they are detached, or when its process ends, counts as not followed: whether it
completes is not seen.

Threads that have not transferred for long are taken out of the kernel's table, as are those of processes that ended.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from railscope.agent.facts.transfers import NodeTransfers, TransferUnderWay
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.pages import load_pages
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.transfers.files import AreComplete, AreUnfinished, OpenTransferLibrary, TransferFile
from railscope.agent.node.transfers.pairs import MOST_PEERS, Pairs, pairs_of
from railscope.agent.node.transfers.totals import Sums
from railscope.agent.node.transfers.waits import waited_for
from railscope.probes.clock import Clock
from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.libraries.files import file_stamp, same_library
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.libbpf import LoadError
from railscope.probes.loading.links import Links, ProbePoint, close_together
from railscope.probes.loading.maps import Records
from railscope.probes.printable import printable
from railscope.probes.processes.processes import FileKey, ProcessIdentity
from railscope.probes.processes.processes import Mapping as ExecutableMapping
from railscope.probes.shares import FairMemory
from railscope.probes.transfers.functions import OPERATIONS, TransferPoints
from railscope.probes.transfers.programs import Numbers, PeerNames, TransferTables
from railscope.probes.transfers.records import TransferStat

_log = logging.getLogger("railscope.transfers")

LINGER_NS: Final = 60_000_000_000
MOST_FILES: Final = 256
"""That are probed at once, of all tenants."""
_TENANTS_FILES: Final = MOST_FILES // 4
"""Of one tenant, as long as as many are free."""
_IDLE_NS: Final = 60_000_000_000
"""A thread that has not transferred for so long is taken out of the table."""
_SWEEP_NS: Final = 10_000_000_000
MOST_LOOKED_AT: Final = 256
"""Requests of one process that were let go and are looked at in its memory."""
MOST_BATCHES: Final = 16
"""Of one process that are looked at in its memory: the oldest."""
BATCH_PATIENCE_NS: Final = 1_000_000_000
"""Before that nobody looks whether a batch is complete."""
_PERIOD_NS: Final = 3_000_000_000
"""Of looking at batches."""
MOST_ENDED: Final = 512
"""Pairs of processes that have ended: the latest ones are told of until others take their place, of whoever has most of
them first."""


class Programs(Protocol):
    """What is needed of the loaded programs (probes/transfers/programs.py)."""

    def attach(self, path: str, points: TransferPoints) -> Links: ...
    def read(self) -> TransferTables: ...
    def overflow(self) -> Records: ...
    def end(self, requests: Iterable[tuple[int, int, int]]) -> Set[tuple[int, int, int]]: ...
    def take_ended(self, tgids: Collection[int]) -> tuple[Records, Records, Numbers, PeerNames]: ...
    def give_up(self) -> Numbers: ...
    def drop(self, threads: Iterable[tuple[int, int]]) -> None: ...
    def peer_name(self, tgid: int, peer: int) -> str: ...
    def waited_for(self, tid: int, count: int, request_bytes: int) -> tuple[int, ...]: ...
    def stats(self) -> Mapping[TransferStat, int]: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class ProbedFile:
    """A file with such libraries in it that some process maps."""

    path: str
    descriptor: int
    tenant: Tenant
    """Who mapped it first."""
    found: TransferFile
    mappers: set[ProcessIdentity] = field(default_factory=set)
    names: set[FileKey] = field(default_factory=set)
    """The file, by every mount that it was mapped through."""
    links: Links | None = None
    unmapped_ns: int | None = None
    """Since when nobody maps it."""

    @property
    def points(self) -> tuple[ProbePoint, ...]:
        return self.found.points.every

    @property
    def local(self) -> bool:
        return self.found.local


@dataclass(frozen=True, slots=True)
class UnderWay:
    """An operation that is not complete."""

    pid: int
    number: int
    """A request's address, or the number of the thread that is inside a call."""
    function: int
    since_ns: int
    payload_bytes: int
    peer: int
    tid: int
    uid: int
    let_go: int = 0
    """Its program will not ask for it again: from the request back to where its status is; 0: it will."""
    waited_ns: int | None = None
    """Since when it has been waited for; None: its program does something else meanwhile, as far as is known, or it may
    be complete."""


@dataclass(slots=True)
class _Mapper:
    tenant: Tenant
    files: Mapping[FileKey, ExecutableMapping]
    awaited: set[FileKey]
    """Those that are not opened yet."""


class TransferWatch:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        load: Callable[[], Programs],
        procfs: Path,
        inspection: Inspection,
        clock: Clock,
        *,
        linger_ns: int = LINGER_NS,
    ) -> None:
        """`load` loads the programs; raises LoadError where this kernel does not take them.

        `linger_ns`: how long probes stay on a file that nobody maps any more: the next process maps it before anybody
        could tell.
        """
        self._linger_ns = linger_ns
        self._load = load
        self._procfs = procfs
        self._inspection = inspection
        self._clock = clock
        self._programs: Programs | None = None
        self._unloadable = False
        self._files: list[ProbedFile] = []
        self._mappers: dict[ProcessIdentity, _Mapper] = {}
        self._ended = Sums()
        """Of processes whose rows were taken out."""
        self._ended_pairs = FairMemory[int, int, Pairs](MOST_ENDED, len)
        """Of each user's share (probes/bpf/answerable.h), by how many there were before."""
        self._ended_count = 0
        self._netns: dict[int, str] = {}
        """Of processes that map such a library, by pid."""
        self._lives: dict[int, int] = {}
        """By pid, of those that have transferred: which of its processes."""
        self._lives_count = 0
        self._attached = True
        """Whether the budget allows it."""
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="detach transfers")
        self._detaching: Future[None] | None = None
        self._swept_ns = 0
        self._unfinished: Mapping[tuple[int, int], int] = {}
        """Batches of Mooncake that were not complete when last looked at, by pid and number: since when under way."""
        self._names: dict[tuple[int, int], str] = {}
        """Of peers, by pid and the number that stands for each."""
        self.left_out: Counter[int | None] = Counter()
        """Files that were not probed for want of room, by uid."""
        self._refused: set[FileKey] = set()
        """Those of them that some process maps."""

    @property
    def follows(self) -> bool:
        """Whether a library is probed now."""
        return any(file.links is not None and file.mappers for file in self._files)

    @property
    def mappers(self) -> frozenset[ProcessIdentity]:
        """Processes that map such a library."""
        return frozenset(self._mappers)

    @property
    def probed(self) -> tuple[ProbedFile, ...]:
        return tuple(file for file in self._files if file.links is not None)

    def sighted(
        self, identity: ProcessIdentity, tenant: Tenant, mappings: Iterable[ExecutableMapping], netns: str = ""
    ) -> None:
        """A process was looked at: these are the files with such libraries that it maps, and no others.

        `netns`: its network namespace, as communicators have it.
        """
        files = {mapping.file: mapping for mapping in mappings}
        awaited = set(files)
        for file in self._files:
            if file.names.isdisjoint(files):
                file.mappers.discard(identity)
            else:
                file.mappers.add(identity)
                awaited -= file.names
        if files:
            self._mappers[identity] = _Mapper(tenant, files, awaited)
            self._netns[identity.pid] = netns
        else:
            self._mappers.pop(identity, None)

    def process_gone(self, identity: ProcessIdentity) -> None:
        """A process has ended, or executes another program."""
        if self._mappers.pop(identity, None) is None:
            self._netns.pop(identity.pid, None)
            return
        for file in self._files:
            file.mappers.discard(identity)
        self._take_ended({identity.pid})
        self._netns.pop(identity.pid, None)
        self._names = {key: name for key, name in self._names.items() if key[0] != identity.pid}

    def follow(self) -> list[str]:
        """Open what is mapped anew, and attach to it; returns what went wrong, one line each."""
        errors = self._finish_detaching()
        if self._unloadable or not (self._mappers or self._files):
            return errors
        self._drop_overwritten()
        if self._refused:
            self._refused &= {file for mapper in self._mappers.values() for file in mapper.files}
        for identity, mapper in self._mappers.items():
            for key in tuple(mapper.awaited):
                try:
                    self._open(identity, mapper.tenant, mapper.files[key])
                except NotYet:
                    continue
                except Refused as refused:
                    if not refused.gone:
                        errors.append(str(refused))
                mapper.awaited.discard(key)
        self._expire()
        if self._attached and self._detaching is None:
            self._attach(errors)
        return errors

    def set_attached(self, attached: bool) -> list[str]:
        """Attach or detach everywhere, as the budget allows; returns what went wrong, one line each."""
        if attached is self._attached:
            return []
        self._attached = attached
        if attached:
            return self.follow()
        links = [file.links for file in self._files if file.links is not None]
        for file in self._files:
            file.links = None
        if links:
            self._detaching = self._aside.submit(close_together, links)
        return []

    def hits(self) -> int:
        """How often the programs ran in processes that are observed, since load.

        Raises:
            KernelRefusal: it cannot be read.
        """
        if self._programs is None:
            return 0
        stats = self._programs.stats()
        return stats[TransferStat.ENTRIES] + stats[TransferStat.RETURNS] + stats[TransferStat.ENDS]

    def update(self) -> list[str]:
        """Now and then: take out what the kernel's tables hold for nobody; returns what went wrong, one line each."""
        # Probes that come off aside are through at one of these times, and may be wanted back by then.
        errors = self.follow() if self._detaching is not None else []
        now_ns = self._clock.monotonic_ns()
        if self._programs is None or now_ns - self._swept_ns < _SWEEP_NS:
            return errors
        self._swept_ns = now_ns
        self._take_ended(())
        self._expire()
        try:
            tables = self._programs.read()
            idle = (tables.threads["start_ns"] == 0) & (tables.threads["last_ns"] + np.uint64(_IDLE_NS) < now_ns)
            some = tables.threads["last_ns"][idle].tolist()
            self._programs.drop(zip(tables.tids[idle].tolist(), some, strict=True))
        except KernelRefusal as refusal:
            errors.append(f"transfers: threads that rest cannot be forgotten: {refusal.strerror}")
        return errors

    def under_way(self) -> tuple[UnderWay, ...]:
        """What is not complete, oldest first; nothing while the budget has the probes off, which would see it end.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        if self._programs is None or not self._sees_ends:
            return ()
        tables = self._programs.read()
        now_ns = self._clock.monotonic_ns()
        found = self._not_over(self._programs, _under_way(tables))
        waited = waited_for(tables, self._programs.waited_for, now_ns) | self._unfinished_batches(found, now_ns)
        return tuple(
            replace(one, waited_ns=waited.get((one.pid, one.number))) if one.waited_ns is None else one for one in found
        )

    def name_of_peer(self, one: UnderWay) -> str:
        """What the library calls an operation's peer; empty: it has no name, or none is known.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        return self._peer(one.pid, one.function, one.peer)

    def facts(self, *, most_peers: int = MOST_PEERS) -> NodeTransfers:
        """What processes did, and have under way; `most_peers` of each process become series.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        probed = tuple(
            (file.path, library.value, file.links is not None)
            for file in self._files
            for library in file.found.points.libraries
        )
        sums = self._ended.copy()
        if self._programs is None:
            return NodeTransfers(probed=probed)
        tables = self._programs.read()
        sums.add(tables.keys["function"], tables.totals)
        overflow = self._programs.overflow()
        sums.add(np.arange(len(overflow), dtype=np.uint32), overflow)
        now_ns = self._clock.monotonic_ns()
        grouped: defaultdict[tuple[int, int, str], list[UnderWay]] = defaultdict(list)
        for one in self._not_over(self._programs, _under_way(tables)) if self._sees_ends else ():
            grouped[one.pid, one.function, self.name_of_peer(one)].append(one)
        under_way = tuple(
            TransferUnderWay(
                OPERATIONS[function].library.value,
                OPERATIONS[function].op,
                pid,
                len(several),
                max(0, now_ns - several[0].since_ns) / 1e9,
                peer,
            )
            for (pid, function, peer), several in grouped.items()
        )
        living = chain.from_iterable(several for _, several in self._pairs(tables.keys, tables.totals))
        return NodeTransfers(
            totals=sums.totals(),
            under_way=under_way,
            by_peer=tuple(sorted(living, key=lambda one: -(one.payload_bytes or 0))),
            ended=dict(self._ended_pairs.items()),
            ended_count=self._ended_count,
            most_peers=most_peers,
            probed=probed,
        )

    def close(self) -> None:
        """Detach everywhere and free the programs."""
        close_together(file.links for file in self._files if file.links is not None)
        self._aside.shutdown()
        for file in self._files:
            os.close(file.descriptor)
        self._files.clear()
        if self._programs is not None:
            self._programs.close()
            self._programs = None

    @property
    def _sees_ends(self) -> bool:
        return self._attached and self._detaching is None

    def _finish_detaching(self) -> list[str]:
        """Once the probes have come off aside, give up what they would have seen end; returns what went wrong."""
        if self._detaching is None or not self._detaching.done():
            return []
        self._detaching.result()
        try:
            if self._programs is not None:
                self._ended.give_up(self._programs.give_up())
        except KernelRefusal as refusal:
            return [f"transfers: what was under way cannot be given up: {refusal.strerror}"]
        self._detaching = None
        return []

    def _not_over(self, programs: Programs, several: Sequence[UnderWay]) -> tuple[UnderWay, ...]:
        """Without those that their programs let go and that are complete by now: UCX's own flags tell.

        What their outcome was, and when, nobody saw: they count as not followed.
        """
        asked: defaultdict[int, list[UnderWay]] = defaultdict(list)
        for one in several:
            if one.let_go and len(asked[one.pid]) < MOST_LOOKED_AT:
                asked[one.pid].append(one)
        over: set[UnderWay] = set()
        tenants = {identity.pid: mapper.tenant for identity, mapper in self._mappers.items()} if asked else {}
        for pid, requests in asked.items():
            if requests:
                over.update(self._complete(tenants.get(pid), pid, requests))
        if over:
            taken = programs.end((one.pid, one.number, one.since_ns) for one in over)
            functions = [one.function for one in over if (one.pid, one.number, one.since_ns) in taken]
            self._ended.give_up(np.array(functions, np.uint32))
        return tuple(one for one in several if one not in over)

    def _unfinished_batches(self, several: Iterable[UnderWay], now_ns: int) -> dict[tuple[int, int], int]:
        """Batches of Mooncake that are not complete, by process and number: since when they are under way.

        A program may free one long after it is complete; the process's memory tells.
        """
        asked: defaultdict[int, list[UnderWay]] = defaultdict(list)
        for one in several:
            old = one.function in _MOONCAKE and now_ns - one.since_ns >= BATCH_PATIENCE_NS
            if old and len(asked.get(one.pid, ())) < MOST_BATCHES:
                asked[one.pid].append(one)
        tenants = {identity.pid: mapper.tenant for identity, mapper in self._mappers.items()} if asked else {}
        found: dict[tuple[int, int], int] = {}
        for pid, batches in asked.items():
            known = {(pid, one.number): one.since_ns for one in batches}
            if pid not in tenants:
                continue
            # An answer that comes late is taken by who asks again within the period; until then the last one holds.
            question = AreUnfinished(str(self._procfs), pid, tuple(one.number for one in batches), now_ns // _PERIOD_NS)
            try:
                unfinished = self._inspection.ask(tenants[pid], question).answer
            except NotYet:
                found |= {key: since for key, since in known.items() if self._unfinished.get(key) == since}
                continue
            except Refused:
                continue
            found |= {key: known[key] for key, so in zip(known, unfinished, strict=True) if so}
        self._unfinished = found
        return found

    def _complete(self, tenant: Tenant | None, pid: int, requests: Sequence[UnderWay]) -> Iterable[UnderWay]:
        if tenant is None:
            return requests  # it has ended
        addresses = tuple(one.number - one.let_go for one in requests)
        # One that comes late is taken by who asks again within the second.
        moment = self._clock.monotonic_ns() // 1_000_000_000
        question = AreComplete(str(self._procfs), pid, addresses, moment)
        try:
            complete = self._inspection.ask(tenant, question).answer
        except (NotYet, Refused):
            return ()
        return (one for one, over in zip(requests, complete, strict=True) if over)

    def _peer(self, pid: int, function: int, peer: int) -> str:
        library = OPERATIONS[function].library
        if library in (CommunicationLibrary.MPI, CommunicationLibrary.NVSHMEM, CommunicationLibrary.GLOO):
            # Ranks of a communicator or team that is not known; below 0 are none, or any.
            rank = int(np.int32(np.uint32(peer & 0xFFFFFFFF)))
            takes_rank = OPERATIONS[function].op in _WITH_RANKS
            return f"rank {rank}" if takes_rank and rank >= 0 else ""
        if library is not CommunicationLibrary.NIXL or not peer or self._programs is None:
            return ""
        name = self._names.get((pid, peer), "")
        # A process may pass any number for a peer: only those of which there is a name are remembered.
        if not name and (name := printable(self._programs.peer_name(pid, peer))):
            self._names[pid, peer] = name
        return name

    def _pairs(self, keys: Records, totals: Records) -> Iterator[tuple[int, Pairs]]:
        """As `pairs_of`, with the processes' network namespaces."""
        for user, several in pairs_of(keys, totals, self._peer, self._life_of):
            yield user, tuple(replace(one, netns=self._netns.get(one.pid, "")) for one in several)

    def _life_of(self, pid: int) -> int:
        if pid not in self._lives:
            self._lives[pid] = self._lives_count
            self._lives_count += 1
        return self._lives[pid]

    def _take_ended(self, pids: Collection[int]) -> None:
        if self._programs is None:
            return
        try:
            keys, totals, unfinished, names = self._programs.take_ended(pids)
        except KernelRefusal as refusal:
            _log.error("transfers of ended processes cannot be taken out: %s", refusal.strerror)
            return
        self._names.update((key, printable(name)) for key, name in names.items())
        for user, several in self._pairs(keys, totals):
            self._ended_pairs.put(user, self._ended_count, several)
            self._ended_count += 1
        if gone := {*keys["tgid"].tolist(), *(pid for pid, _ in names)}:
            self._names = {key: name for key, name in self._names.items() if key[0] not in gone}
            self._lives = {pid: life for pid, life in self._lives.items() if pid not in gone}
        self._ended.add(keys["function"], totals)
        self._ended.give_up(unfinished)

    def _open(self, identity: ProcessIdentity, tenant: Tenant, mapping: ExecutableMapping) -> None:
        """Raises NotYet, Refused where it is not known what is in it, or there is no room for it."""
        opened = self._inspection.ask(tenant, OpenTransferLibrary(str(self._procfs), identity.pid, mapping))
        (descriptor,) = opened.descriptors
        known = next((one for one in self._files if same_library(one.found.key, opened.answer.key)), None)
        if known is not None:
            os.close(descriptor)
            known.mappers.add(identity)
            known.names.add(mapping.file)
            return
        own = [one for one in self._files if one.tenant == tenant]
        held = sum(bool(one.mappers) for one in own)
        # As the kernel's tables are shared out (probes/bpf/shares.h); what lingers makes room.
        free = MOST_FILES - sum(bool(one.mappers) for one in self._files)
        if held < min(_TENANTS_FILES, free):
            crowded = own if len(own) >= _TENANTS_FILES else self._files if len(self._files) >= MOST_FILES else ()
            if crowded:
                self._drop_lingering(crowded)
        else:
            os.close(descriptor)
            if mapping.file not in self._refused:
                self._refused.add(mapping.file)
                self.left_out[tenant.uid] += 1
            raise Refused(f"{mapping.path}: not followed: uid {tenant.label} has {held} such libraries mapped already")
        file = ProbedFile(mapping.path, descriptor, tenant, opened.answer, {identity}, {mapping.file})
        self._files.append(file)
        for symbol in file.found.points.refused:
            _log.info("%s: %s is not probed: its first instructions would be single-stepped", file.path, symbol)

    def _attach(self, errors: list[str]) -> None:
        for file in self._files:
            if file.links is not None:
                continue
            programs = self._loaded()
            if programs is None:
                return
            try:
                load_pages(self._inspection, file, file.points, next((one.pid for one in file.mappers), 0))
                file.links = programs.attach(f"/proc/self/fd/{file.descriptor}", file.found.points)
            except NotYet:
                continue
            except (Refused, KernelRefusal) as refusal:
                errors.append(f"{file.path}: {refusal.strerror if isinstance(refusal, OSError) else refusal}")
                continue
            _log.info(
                "attached to %s: %d functions of %s",
                file.path, len(file.points), ", ".join(one.value for one in file.found.points.libraries),
            )  # fmt: skip

    def _loaded(self) -> Programs | None:
        if self._programs is None and not self._unloadable:
            try:
                self._programs = self._load()
            except LoadError as error:
                self._unloadable = True
                _log.warning("transfers of other libraries than NCCL are not observed: %s", error)
        return self._programs

    def _drop_overwritten(self) -> None:
        """Take the probes off files that were written over in place; they are found anew."""
        for file in list(self._files):
            if file.local and file_stamp(file.descriptor) != file.found.key.stamp:
                self._drop(file, "it was changed while processes had it mapped")
                for identity in file.mappers & self._mappers.keys():
                    mapper = self._mappers[identity]
                    mapper.awaited |= file.names & mapper.files.keys()

    def _expire(self) -> None:
        """Take the probes off files that nobody has mapped for long enough."""
        now_ns = self._clock.monotonic_ns()
        for file in list(self._files):
            if file.mappers:
                file.unmapped_ns = None
            elif file.unmapped_ns is None:
                file.unmapped_ns = now_ns
            elif now_ns - file.unmapped_ns >= self._linger_ns:
                self._drop(file, "no process maps it any longer")

    def _drop_lingering(self, files: Iterable[ProbedFile]) -> None:
        """Take the probes off one that nobody maps: of the tenant with most of these the one unmapped for longest.

        The others stay: what maps them next is to be seen from its first call on, and each takes time to detach.
        """
        now_ns = self._clock.monotonic_ns()
        lingering = [one for one in files if not one.mappers]
        of_tenant = Counter(one.tenant for one in lingering)
        longest = min(lingering, key=lambda one: (-of_tenant[one.tenant], one.unmapped_ns or now_ns))
        self._drop(longest, "its place is needed")

    def _drop(self, file: ProbedFile, why: str) -> None:
        if file.links is not None:
            file.links.close()
            _log.info("detached from %s: %s", file.path, why)
        os.close(file.descriptor)
        self._files.remove(file)


_WITH_RANKS: Final = frozenset({"Send", "Recv", "SendRecv", "Put", "Get"})
"""Operations of MPI and NVSHMEM that name a peer."""


def _numbers_of(library: CommunicationLibrary) -> frozenset[int]:
    return frozenset(number for number, one in enumerate(OPERATIONS) if one.library is library)


_MOONCAKE: Final = _numbers_of(CommunicationLibrary.MOONCAKE)
_AWAITED_LATER: Final = _MOONCAKE | _numbers_of(CommunicationLibrary.MPI)
"""Of their requests it is found out whether, and since when, somebody waits."""


def _under_way(tables: TransferTables) -> tuple[UnderWay, ...]:
    begun = tables.requests["start_ns"] != 0
    keys = (tables.request_keys[name][begun].tolist() for name in ("tgid", "request"))
    names = ("function", "start_ns", "bytes", "peer", "tid", "uid", "let_go")
    columns = (tables.requests[name][begun].tolist() for name in names)
    found = [
        UnderWay(
            *(pid, request, function, since_ns, payload_bytes, peer, tid, uid, let_go),
            waited_ns=None if function in _AWAITED_LATER else since_ns,
        )
        for pid, request, function, since_ns, payload_bytes, peer, tid, uid, let_go in zip(*keys, *columns, strict=True)
    ]
    inside = tables.threads["start_ns"] != 0
    tids = tables.tids[inside].tolist()
    columns = (
        tables.threads[name][inside].tolist() for name in ("tgid", "function", "start_ns", "bytes", "peer", "uid")
    )
    found += [
        UnderWay(tgid, tid, function, start_ns, payload_bytes, peer, tid, uid, waited_ns=start_ns)
        for tid, tgid, function, start_ns, payload_bytes, peer, uid in zip(tids, *columns, strict=True)
    ]
    known = (one for one in found if one.function < len(OPERATIONS))
    return tuple(sorted(known, key=lambda one: one.since_ns))
