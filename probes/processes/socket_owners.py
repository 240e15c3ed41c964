"""Which sockets belong to given processes: the links `socket:[inode]` of /proc/PID/fd (proc_pid_fd(5)).

Looking through every descriptor of a process is the costly part of relating connections to it, so that what a socket
was found to be is kept.  Descriptors are looked at again when a socket turns up that is not known, when the processes
are others than before, and now and then, as a process can be handed a socket.  A process may have any number of them:
a look is bounded, and after one that took long the next is put off.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.clock import Clock

MAXIMUM_DESCRIPTORS: Final = 32_768
"""Looked at in one process."""
MOST_IN_ALL: Final = 98_304
"""Looked at in one look, of all processes: less than a second."""
_CHEAP_NS: Final = 100_000_000
_REST: Final = 10
"""Times what a look took beyond that, until the next: many new connections hold up no other look."""
_LOOK_PERIOD_NS: Final = 30_000_000_000
_LINK: Final = re.compile(r"socket:\[([0-9]{1,10})\]")
_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})


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
    folder = f"{procfs}/{pid}/fd"
    found: set[int] = set()
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number == MAXIMUM_DESCRIPTORS:
                    raise OSError(errno.EMFILE, f"process {pid} has more than {MAXIMUM_DESCRIPTORS} descriptors")
                try:
                    match = _LINK.fullmatch(os.readlink(entry.path))  # noqa: PTH115 - a Path costs more than the call
                except OSError as error:
                    if error.errno in _GONE:
                        continue  # closed since it was listed
                    raise
                if match is not None:
                    found.add(int(match[1]))
    except OSError as error:
        if error.errno in _GONE:
            return set()
        if error.errno in _REFUSED:
            raise PermissionError(
                error.errno,
                f"the sockets of process {pid} cannot be listed (no permission): grant railscope CAP_SYS_PTRACE",
            ) from None
        raise
    return found


class SocketOwners:
    """Maps given sockets to given processes."""

    def __init__(self, procfs: Path, clock: Clock) -> None:
        self._procfs = procfs
        self._clock = clock
        self._pids: frozenset[int] = frozenset()
        self._owners: dict[int, int] = {}
        self._others: set[int] = set()
        self._looked_ns = 0
        self._rests_until_ns = 0
        self.looks = 0
        """How often descriptors were looked through."""
        self.unreadable: tuple[UnreadableProcess, ...] = ()
        """Of the last look."""

    def owners(self, pids: Collection[int], inodes: Iterable[int]) -> dict[int, int]:
        """The owner's pid of those of `inodes` that one of `pids` holds; of several holders any one."""
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
            self._read_owners(listed)
            took_ns = self._clock.monotonic_ns() - now_ns
            self._rests_until_ns = now_ns + took_ns + _REST * max(0, took_ns - _CHEAP_NS)
        self._owners = {inode: pid for inode, pid in self._owners.items() if inode in listed}
        return {inode: pid for inode, pid in self._owners.items() if pid in wanted}

    def _read_owners(self, listed: set[int]) -> None:
        self.looks += 1
        owners: dict[int, int] = {}
        unreadable: list[UnreadableProcess] = []
        left = MOST_IN_ALL
        # Those with few descriptors first: who holds very many is the one whose sockets stay unknown.
        for number, pid in sorted((_descriptors(self._procfs, pid), pid) for pid in self._pids):
            left -= number
            if left < 0:
                unreadable.append(UnreadableProcess(pid, f"all processes have more than {MOST_IN_ALL} descriptors"))
                continue
            try:
                owners |= dict.fromkeys(socket_inodes(self._procfs, pid) & listed, pid)
            except OSError as error:
                unreadable.append(UnreadableProcess(pid, error.strerror or str(error)))
        self._owners = owners
        self._others = listed - owners.keys()
        self.unreadable = tuple(unreadable)


def _descriptors(procfs: Path, pid: int) -> int:
    """How many a process has; before Linux 6.2 this is not told without listing them, and is 0."""
    try:
        return min(os.stat(f"{procfs}/{pid}/fd").st_size, MAXIMUM_DESCRIPTORS)  # noqa: PTH116 - as above
    except OSError:
        return 0
