"""Hear at once when a file is written to.

A uprobe keeps the instruction that stood where its breakpoint went.  When the file is written over in place, a process
that maps it anew gets breakpoints in the middle of other instructions, and taking the probe off puts the old bytes
there: such a job dies.  So whoever probes a file must let go of it before the next process maps it, and inotify(7)
tells of the first byte that changes.  Writes through a shared mapping, and those of another host, are not told.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from railscope.probes.loading.bpf_syscall import KernelRefusal

_IN_MODIFY: Final = 0x2
_READ_BYTES: Final = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise KernelRefusal(number, f"{what}: {os.strerror(number)}")
    return result


class FileChanges:
    """Watches files; `fileno` becomes readable when one of them is written to."""

    def __init__(self) -> None:
        """Open an instance.

        Raises:
            KernelRefusal: too many of them, or too many open files.
        """
        self._fd = _checked(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "inotify_init1")

    def fileno(self) -> int:
        return self._fd

    def watch(self, descriptor: int) -> int:
        """Watch the file behind a descriptor; returns what `unwatch` takes.

        Raises:
            KernelRefusal: too many files are watched (fs.inotify.max_user_watches).
        """
        path = os.fsencode(f"/proc/self/fd/{descriptor}")
        return _checked(_libc.inotify_add_watch(self._fd, path, _IN_MODIFY), "inotify_add_watch")

    def unwatch(self, watch: int) -> None:
        _libc.inotify_rm_watch(self._fd, watch)

    def drain(self) -> bool:
        """Take what was told; whether there was anything."""
        told = False
        try:
            while os.read(self._fd, _READ_BYTES):
                told = True
        except BlockingIOError:
            return told
        return told

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
