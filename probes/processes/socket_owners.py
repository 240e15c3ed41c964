"""Which sockets belong to which processes: the links `socket:[inode]` of /proc/PID/fd (proc_pid_fd(5)).

Looking through every descriptor of a process is the costly part of relating connections to it, so that what a socket
was found to be is kept.  Descriptors are looked at again when a socket turns up that is not known, when the processes
are others than before, and now and then, as a process can be handed a socket.  A process may have any number of them:
a look is bounded, and after one that took long the next is put off.

Where a process waits for a socket with epoll(7), /proc/PID/fdinfo tells so, with what the program gave along to know it
again: the number of the descriptor (event loops of languages, libevent), or a pointer (libraries of C and C++).
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from railscope.probes.clock import Clock
from railscope.probes.processes.processes import pid_namespace, process_ids

MAXIMUM_DESCRIPTORS: Final = 32_768
"""Looked at in one process."""
MOST_IN_ALL: Final = 98_304
"""Looked at in one look, of all processes: less than a second."""
_CHEAP_NS: Final = 100_000_000
_REST: Final = 10
"""Times the processor time that a look took beyond that, until the next: many new connections hold up no other look.
How long it waited for a processor does not count: on a busy host connections would be nobody's for want of a look."""
_LOOK_PERIOD_NS: Final = 30_000_000_000
_LINK: Final = re.compile(r"socket:\[([0-9]{1,10})\]")
_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})


_EPOLL_LINK: Final = "anon_inode:[eventpoll]"
_MOST_EPOLLS: Final = 64
"""Whose sockets are read of one process, …"""
_MOST_EPOLL_BYTES: Final = 1 << 20
"""… and the text of each: some 10,000 sockets."""
_WAITED_FOR: Final = re.compile(
    rb"^tfd: +([0-9]+) events: +[0-9a-f]+ data: +([0-9a-f]+) .*ino:([0-9a-f]+)", re.MULTILINE
)


class Polled(Enum):
    """How a process waits for a socket."""

    NOT = "not"
    """Not with epoll."""
    BY_NUMBER = "number"
    """With epoll, and knows it again by the number of its descriptor."""
    BY_POINTER = "pointer"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a socket."""

    pid: int | None
    """None: no process of the host does; it is the kernel's own."""
    polled: Polled = Polled.NOT


NO_PROCESS: Final = Holder(None)


@dataclass(frozen=True, slots=True)
class UnreadableProcess:
    """A process whose sockets are not all known."""

    pid: int
    reason: str


def socket_inodes(procfs: Path, pid: int) -> set[int]:
    """Inodes of all sockets that a process holds; empty when it has ended.

    Raises:
        PermissionError: CAP_SYS_PTRACE is missing.
        OSError: it has more descriptors than are looked at.
    """
    return _descriptors_of(procfs, pid)[0]


def sockets_of(procfs: Path, pid: int) -> dict[int, Holder]:
    """The sockets that a process holds, by inode, and how it waits for them.  Raises as `socket_inodes`."""
    inodes, epolls = _descriptors_of(procfs, pid)
    found = dict.fromkeys(inodes, Holder(pid))
    for descriptor in epolls[:_MOST_EPOLLS]:
        for number, data, inode in _WAITED_FOR.findall(_epoll_text(procfs, pid, descriptor)):
            if int(inode, 16) in found:
                how = Polled.BY_NUMBER if int(data, 16) & 0xFFFFFFFF == int(number) else Polled.BY_POINTER
                found[int(inode, 16)] = Holder(pid, how)
    return found


def _epoll_text(procfs: Path, pid: int, descriptor: str) -> bytes:
    try:
        with open(f"{procfs}/{pid}/fdinfo/{descriptor}", "rb") as file:
            return file.read(_MOST_EPOLL_BYTES)
    except OSError:  # closed since it was listed
        return b""


def _descriptors_of(procfs: Path, pid: int) -> tuple[set[int], list[str]]:
    """(inodes of sockets, descriptors of epoll)."""
    folder = f"{procfs}/{pid}/fd"
    found: set[int] = set()
    epolls: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number == MAXIMUM_DESCRIPTORS:
                    raise OSError(errno.EMFILE, f"process {pid} has more than {MAXIMUM_DESCRIPTORS} descriptors")
                try:
                    link = os.readlink(entry.path)  # noqa: PTH115 - a Path costs more than the call
                except OSError as error:
                    if error.errno in _GONE:
                        continue  # closed since it was listed
                    raise
                if (match := _LINK.fullmatch(link)) is not None:
                    found.add(int(match[1]))
                elif link == _EPOLL_LINK:
                    epolls.append(entry.name)
    except OSError as error:
        if error.errno in _GONE:
            return set(), []
        if error.errno in _REFUSED:
            raise PermissionError(
                error.errno,
                f"the sockets of process {pid} cannot be listed (no permission): grant railscope CAP_SYS_PTRACE",
            ) from None
        raise
    return found, epolls


class SocketOwners:
    """Maps given sockets to given processes."""

    def __init__(self, procfs: Path, clock: Clock, *, spent_ns: Callable[[], int] = time.thread_time_ns) -> None:
        """`spent_ns`: the processor time that this thread has had."""
        self._procfs = procfs
        self._clock = clock
        self._spent_ns = spent_ns
        self._pids: frozenset[int] = frozenset()
        self._owners: dict[int, Holder] = {}
        self._others: set[int] = set()
        self._looked_ns = 0
        self._rests_until_ns = 0
        self.looks = 0
        """How often descriptors were looked through."""
        self.unreadable: tuple[UnreadableProcess, ...] = ()
        """Of the last look."""

    def owners(self, pids: Collection[int], inodes: Iterable[int]) -> dict[int, int]:
        """The owner's pid of those of `inodes` that one of `pids` holds; of several holders any one."""
        return {inode: holder.pid for inode, holder in self.holders(pids, inodes).items() if holder.pid is not None}

    def holders(self, pids: Collection[int], inodes: Iterable[int]) -> dict[int, Holder]:
        """As `owners`, and how they wait for them."""
        listed = set(inodes)
        listed.discard(0)  # closed by its process, or not yet accepted
        wanted = frozenset(pids)
        now_ns = self._clock.monotonic_ns()
        self._others &= listed
        unknown = listed - self._owners.keys() - self._others
        due = wanted != self._pids or (listed and now_ns - self._looked_ns >= _LOOK_PERIOD_NS) or unknown
        if due and now_ns >= self._rests_until_ns:
            self._pids = wanted
            self._looked_ns = now_ns
            began_ns = self._spent_ns()
            self._read_owners(listed)
            spent_ns = self._spent_ns() - began_ns
            self._rests_until_ns = self._clock.monotonic_ns() + _REST * max(0, spent_ns - _CHEAP_NS)
        self._owners = {inode: holder for inode, holder in self._owners.items() if inode in listed}
        return {inode: holder for inode, holder in self._owners.items() if holder.pid in wanted}

    def _read_owners(self, listed: set[int]) -> None:
        self.looks += 1
        owners: dict[int, Holder] = {}
        unreadable: list[UnreadableProcess] = []
        left = MOST_IN_ALL
        # Those with few descriptors first: who holds very many is the one whose sockets stay unknown.
        for number, pid in sorted((_descriptors(self._procfs, pid), pid) for pid in self._pids):
            left -= number
            if left < 0:
                unreadable.append(UnreadableProcess(pid, f"all processes have more than {MOST_IN_ALL} descriptors"))
                continue
            try:
                held = sockets_of(self._procfs, pid)
                owners |= {inode: held[inode] for inode in held.keys() & listed}
            except OSError as error:
                unreadable.append(UnreadableProcess(pid, error.strerror or str(error)))
        self._owners = owners
        self._others = listed - owners.keys()
        self.unreadable = tuple(unreadable)


@dataclass(frozen=True, slots=True)
class _Look:
    found: Mapping[int, Holder]
    missed: Mapping[int, bool]
    """Sockets that were not found, and whether all processes were looked at."""
    spent_ns: int
    ended_ns: int


class HostSockets:
    """Which processes of the host hold given sockets, whoever asks; asked by one thread at a time.

    Every process of the host may have to be looked at for one socket.  So looks are made aside, serve all who ask, and
    are bounded: of each user so many descriptors that others get as many.  A user with very many processes or
    descriptors hides his own sockets and no others.
    """

    def __init__(
        self,
        procfs: Path,
        clock: Clock,
        aside: Executor,
        *,
        every_process: bool,
        spent_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """`aside` runs looks, one at a time; the caller shuts it down.

        `every_process`: this /proc shows all processes of the host (`shows_every_process`).  `spent_ns`: the processor
        time that a thread has had.
        """
        self._spent_ns = spent_ns
        self._procfs = procfs
        self._clock = clock
        self._aside = aside
        self._every_process = every_process
        self._asked: dict[Hashable, Mapping[int, int]] = {}
        self._found: dict[int, Holder] = {}
        self._missed: dict[int, bool] = {}
        """Sockets that the last looks did not find, and whether all processes were looked at for them."""
        self._everyone_ns: int | None = None
        """When all users' processes were looked at last; None: never."""
        self._rests_until_ns = 0
        self._look_under_way: Future[_Look] | None = None
        self.looks = 0

    def holders(self, asker: Hashable, sockets: Mapping[int, int]) -> dict[int, Holder]:
        """Who holds these sockets, which are given as user by inode; one that is missing is not known (yet).

        `asker` asked for others the last time, and does not want them any more.
        """
        self._asked[asker] = sockets
        now_ns = self._clock.monotonic_ns()
        self._take_look()
        if self._look_under_way is None and now_ns >= self._rests_until_ns:
            everyone = self._everyone_ns is None or now_ns - self._everyone_ns >= _LOOK_PERIOD_NS
            if everyone:
                gone = {pid for pid in {one.pid for one in self._found.values()} if not self._runs(pid)}
                self._found = {inode: one for inode, one in self._found.items() if one.pid not in gone}
            wanted = {
                inode: user
                for asked in self._asked.values()
                for inode, user in asked.items()
                if inode not in self._found and (everyone or inode not in self._missed)
            }
            if wanted:
                self.looks += 1
                self._everyone_ns = now_ns if everyone else self._everyone_ns
                self._look_under_way = self._aside.submit(self._look, wanted, everyone=everyone)
                self._take_look()
        found = {inode: self._found[inode] for inode in sockets if inode in self._found}
        return found | {inode: NO_PROCESS for inode in sockets if self._missed.get(inode)}

    def looked_for(self, inode: int) -> bool:
        """Whether a look for this socket, which was asked for, is through."""
        return inode in self._found or inode in self._missed

    def forget(self, asker: Hashable) -> None:
        """This one does not ask any more."""
        self._asked.pop(asker, None)

    def _runs(self, pid: int | None) -> bool:
        return pid is not None and _user_of(self._procfs, pid) is not None

    def _take_look(self) -> None:
        if self._look_under_way is None or not self._look_under_way.done():
            return
        look, self._look_under_way = self._look_under_way.result(), None
        listed = {inode for asked in self._asked.values() for inode in asked}
        found, missed = {**self._found, **look.found}, {**self._missed, **look.missed}
        self._found = {inode: holder for inode, holder in found.items() if inode in listed}
        self._missed = {inode: whole for inode, whole in missed.items() if inode in listed and inode not in self._found}
        self._rests_until_ns = look.ended_ns + _REST * max(0, look.spent_ns - _CHEAP_NS)

    def _look(self, wanted: Mapping[int, int], *, everyone: bool) -> _Look:
        began_ns = self._spent_ns()
        by_user: dict[int, list[int]] = {}
        for pid in process_ids(self._procfs):
            if (user := _user_of(self._procfs, pid)) is not None:
                by_user.setdefault(user, []).append(pid)
        users = dict.fromkeys(wanted.values())
        left, found = dict(wanted), dict[int, Holder]()
        whole = self._look_at([by_user.get(user, []) for user in users], left, found)
        if left and everyone:
            # Of another user's process: a socket that was handed over, or one whose process changed its user since.
            whole &= self._look_at([pids for user, pids in by_user.items() if user not in users], left, found)
        missed = dict.fromkeys(left, everyone and whole and self._every_process)
        return _Look(found, missed, self._spent_ns() - began_ns, self._clock.monotonic_ns())

    def _look_at(self, groups: Collection[Collection[int]], left: dict[int, int], found: dict[int, Holder]) -> bool:
        """Look for sockets at groups of processes, and move what is found from `left`; whether all were looked at."""
        whole = True
        for pids in groups:
            budget = MOST_IN_ALL // len(groups)
            for number, pid in sorted((_descriptors(self._procfs, pid), pid) for pid in pids):
                budget -= max(1, number)
                if not left or budget < 0:
                    whole &= not left
                    break
                try:
                    held = sockets_of(self._procfs, pid)
                except OSError:
                    whole = False
                    continue
                for inode in held.keys() & left.keys():
                    found[inode] = held[inode]
                    del left[inode]
        return whole


_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""PROC_PID_INIT_INO (include/linux/proc_ns.h)."""


def shows_every_process(procfs: Path) -> bool:
    """Whether a /proc shows all processes of the host, and not only those of a container."""
    return pid_namespace(procfs, 1) == _FIRST_PID_NAMESPACE


def _user_of(procfs: Path, pid: int) -> int | None:
    """The effective user of a process, root where it may not be dumped; None: it has gone."""
    try:
        return os.stat(f"{procfs}/{pid}").st_uid  # noqa: PTH116 - a Path costs more than the call
    except OSError:
        return None


def _descriptors(procfs: Path, pid: int) -> int:
    """How many a process has; before Linux 6.2 this is not told without listing them, and is 0."""
    try:
        return min(os.stat(f"{procfs}/{pid}/fd").st_size, MAXIMUM_DESCRIPTORS)  # noqa: PTH116 - as above
    except OSError:
        return 0
