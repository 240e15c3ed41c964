"""Attaching programs to functions of a file, and detaching them at once.

`uprobe_multi` (kernel 6.6) attaches one program to many offsets with one link: fewer privileges, and closing it takes
milliseconds.  Older kernels need one perf event and one link for each offset.  Closing a link of either kind waits for
the kernel's grace periods, so they are closed side by side.

A link may be for one process, with all of its threads and whatever it will map; the others that map the file meet no
probe then, and what the process forks loses it at the first hit.  Perf events would take one for each process and
function, so groups for some processes are for `uprobe_multi` alone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from railscope.probes.loading.bpf_syscall import (
    BPF_TRACE_UPROBE_MULTI,
    BPF_TRACE_UPROBE_SESSION,
    KernelRefusal,
    link_perf_uprobe,
    link_uprobe_multi,
)

_CLOSERS = 32
_NO_PID: Final = 0xFFFFFFFF
"""-1, as the kernel's attributes have it."""


class AttachKind(Enum):
    """How programs are attached."""

    MULTI = "multi"
    PERF = "perf"


def supports_multi(program_fd: int, *, session: bool = False) -> bool:
    """Whether the kernel has uprobe_multi links; `program_fd` was loaded for that attach type.

    Asks for a link on a folder: a kernel that knows the type finds that it is no file (EBADF), another one finds the
    request itself invalid (EINVAL).
    """
    attach_type = BPF_TRACE_UPROBE_SESSION if session else BPF_TRACE_UPROBE_MULTI
    try:
        os.close(link_uprobe_multi(program_fd, "/", [1], [0], attach_type=attach_type))
    except KernelRefusal as refusal:
        return refusal.errno == errno.EBADF
    return True


def tells_processes_apart(program_fd: int) -> bool:
    """Whether the kernel attaches to a process with uprobe_multi, and not to one thread of it.

    `program_fd` was loaded for that attach type.  Tried as libbpf does (its probe_uprobe_multi_link): the commit that
    put it right, 46ba0e49b642 of Linux 6.10, looks at the number of the process first, and finds -1 invalid (EINVAL);
    others find that a folder is no file (EBADF).
    """
    try:
        os.close(link_uprobe_multi(program_fd, "/", [1], [0], pid=_NO_PID))
    except KernelRefusal as refusal:
        return refusal.errno == errno.EINVAL and supports_multi(program_fd)
    return False


def perf_uprobe_type(sysfs: Path = Path("/sys")) -> int:
    """The perf event type of uprobes.

    Raises:
        KernelRefusal: this kernel has none.
    """
    file = sysfs / "bus/event_source/devices/uprobe/type"
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        raise KernelRefusal(errno.EOPNOTSUPP, f"{file} cannot be read: this kernel has no uprobe events") from None


def plain_attach_type(attach: AttachKind) -> int:
    """The expected attach type of a BPF program that runs at entries or at returns."""
    return BPF_TRACE_UPROBE_MULTI if attach is AttachKind.MULTI else 0


@dataclass(frozen=True, slots=True)
class ProbePoint:
    """One place for a uprobe."""

    symbol: str
    file_offset: int
    cookie: int


class Links:
    """Links that belong together, for one library say; they are gone after `close`, and when the process ends."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """`pids`: with `uprobe_multi`, for these processes alone, which the kernel must tell apart; empty: for all."""
        self._pids = pids
        self._descriptors: list[int] = []

    def __len__(self) -> int:
        return len(self._descriptors)

    def attach(
        self,
        kind: AttachKind,
        program_fd: int,
        path: str,
        points: Sequence[ProbePoint],
        *,
        pid: int = 0,
        on_return: bool = False,
        session: bool = False,
    ) -> None:
        """Attach one program to all points of the file at `path`; `pid` is for this call, in place of the group's.

        Raises:
            KernelRefusal: nothing of this call stays attached.
        """
        if not points:
            return
        made: list[int] = []
        if kind is AttachKind.MULTI:
            attach_type = BPF_TRACE_UPROBE_SESSION if session else BPF_TRACE_UPROBE_MULTI
            offsets, cookies = [point.file_offset for point in points], [point.cookie for point in points]
            for one in (pid,) if pid or not self._pids else self._pids:
                try:
                    made.append(
                        link_uprobe_multi(
                            program_fd, path, offsets, cookies, pid=one, on_return=on_return, attach_type=attach_type
                        )
                    )
                except KernelRefusal as refusal:
                    if refusal.errno == errno.ESRCH and one != pid:
                        continue  # one of several, and it has ended
                    _close_all(made)
                    raise
            self._descriptors += made
            return
        perf_type = perf_uprobe_type()
        try:
            for point in points:
                made += reversed(
                    link_perf_uprobe(
                        program_fd,
                        path,
                        point.file_offset,
                        point.cookie,
                        perf_type=perf_type,
                        on_return=on_return,
                        pid=pid,
                    )
                )
        except KernelRefusal:
            _close_all(made)
            raise
        self._descriptors += made

    def attach_calls(
        self, kind: AttachKind, entry_fd: int, return_fd: int, path: str, points: Sequence[ProbePoint], *, pid: int = 0
    ) -> None:
        """Attach one program to the entry and one to the return of the functions at these points; see `attach`.

        Raises:
            KernelRefusal: nothing of these links stays attached.
        """
        try:
            # Returns first: an entry without its return would leave a call under way behind.
            self.attach(kind, return_fd, path, points, pid=pid, on_return=True)
            self.attach(kind, entry_fd, path, points, pid=pid)
        except KernelRefusal:
            self.close()
            raise

    def close(self) -> None:
        """Detach; returns when no probe is left."""
        descriptors, self._descriptors = self._descriptors, []
        _close_all(descriptors)


def close_together(groups: Iterable[Links]) -> None:
    """Detach several groups of probes in the time of one: each close waits for the same grace periods of the kernel."""
    descriptors = []
    for group in groups:
        taken, group._descriptors = group._descriptors, []
        descriptors += taken
    _close_all(descriptors)


def _close_all(descriptors: list[int]) -> None:
    if len(descriptors) < 2:
        for descriptor in descriptors:
            os.close(descriptor)
        return
    with ThreadPoolExecutor(min(_CLOSERS, len(descriptors))) as pool:
        list(pool.map(os.close, descriptors))
