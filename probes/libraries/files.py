"""Decides whether two descriptors are one library on disk, and whether a file was or is being overwritten.

A uprobe belongs to the inode that holds the code.  Through overlayfs the same inode shows another device, so two
files that look different may share their probes, and a second attachment would count every call twice.  The other way
round a file that a container changed was copied up: it has the number of the original and a code inode of its own, and
without probes of its own its calls would be missed.  Sources: overlayfs.rst and fs/overlayfs/inode.c (`ovl_getattr`
gives the times of the real file, `ovl_fiemap` the extents of the inode with the data), fiemap.rst of Linux 6.18.

A uprobe keeps the instruction that stood where its breakpoint went.  When the file is written over in place, a process
that maps it anew gets breakpoints in the middle of other instructions, and taking the probe off puts the old bytes
there: such a job dies.  So an agent that probes a file must detach before the next process maps it, and inotify(7)
tells of the first byte that changes.  Writes through a shared mapping, and those of another host, are not told.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Final

from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.processes.processes import filesystem_magic, on_overlayfs

_FS_IOC_FIEMAP: Final = 0xC020660B
_FIEMAP: Final = struct.Struct("<QQIIII")
_EXTENT: Final = struct.Struct("<QQQ16xI12x")
_LOCAL_MAGICS: Final = frozenset(
    {0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994, 0x858458F6, 0x73717368, 0xE0F5E1E2}
)
"""ext4, XFS, Btrfs, F2FS, ZFS, tmpfs, ramfs, squashfs, EROFS (linux/magic.h; ZFS's own)."""
_IN_MODIFY: Final = 0x2
_TOLD: Final = _IN_MODIFY | 0x4000
"""With IN_Q_OVERFLOW: not the end of a watch."""
SOME_DROPPED: Final = -1
"""The watch that the kernel names where it has dropped events."""
_READ_BYTES: Final = 1 << 16
_EVENT: Final = struct.Struct("<iIII")
"""Watch, mask, cookie and the length of a name, which is 0: files are watched, not folders (inotify(7))."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes when a file is written over in place, or when a path leads to another file."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """When content, name or rights last changed; a writer cannot set it back."""

    def same_content(self, other: FileStamp) -> bool:
        """Whether two stamps give no sign that the file was written between them."""
        return (self.size_bytes, self.modified_ns) == (other.size_bytes, other.modified_ns)


def file_stamp(file: int | str) -> FileStamp:
    """The stamp of a file by path or descriptor: device, inode, size and times, which change with its content.

    Raises:
        OSError: the path leads nowhere, or may not be followed.
    """
    # A Path takes seven times as long, and a new process has a hundred files.
    status = os.stat(file)  # noqa: PTH116
    return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class LibraryKey:
    """A library file, in enough detail to know it again through another mount."""

    stamp: FileStamp
    build_id: str | None
    overlay: bool
    """Seen through overlayfs."""
    first_extent: tuple[int, int] | None
    """Where its data begin on the disk (bytes) and the flags of that; None where the file system does not tell."""


def library_key(fd: int, build_id: str | None) -> LibraryKey:
    """The key of an open library file. Only keys taken at one time are comparable: a change of name changes the stamp.

    Raises:
        OSError: the descriptor cannot be queried.
    """
    return LibraryKey(file_stamp(fd), build_id, on_overlayfs(fd), _first_extent(fd))


def same_library(one: LibraryKey, other: LibraryKey) -> bool:
    """Whether two library files are one on disk, so that probes on the first already see the users of the second.

    Overlayfs reports a device of its own for a file of its lower layer, and may put a layer number into the upper bits
    of the inode number (its `xino` option).  A file that was copied up keeps its number, size and time of modification
    but has changed since; where only its rights were copied up (`metacopy`) the data are still the original's.
    """
    mine, theirs = one.stamp, other.stamp
    if (mine.device, mine.inode) == (theirs.device, theirs.inode):
        return True
    if not (one.overlay or other.overlay) or (mine.inode ^ theirs.inode) & 0xFFFFFFFF:
        return False
    if (mine.size_bytes, mine.modified_ns, one.build_id) != (theirs.size_bytes, theirs.modified_ns, other.build_id):
        return False
    # Where nothing tells (and for a reflink copy, which shares its original's place) it is taken for the original.
    return mine.changed_ns == theirs.changed_ns or one.first_extent == other.first_extent


def on_local_storage(fd: int) -> bool:
    """Whether the kernel itself keeps a file's facts, so that asking for them waits for no server of files.

    Not so through overlayfs, whose layers may be anything.
    """
    return filesystem_magic(fd) in _LOCAL_MAGICS


def place_of(fd: int) -> int:
    """A descriptor that leads to an open file and does not hold it open: a server of files hears nothing of its end.

    Closing another one tells the server, and waits for its answer (fs/fuse/file.c, fuse_flush).  It serves for
    `/proc/self/fd/N`, fstat(2) and `reopened`.  The caller closes it.

    Raises:
        OSError: too many open files.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC)


def reopened(fd: int) -> int:
    """Open the file that a descriptor leads to once more, for reading; the caller closes it.

    Raises:
        OSError: it may not be opened, or would have to be waited for.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _first_extent(fd: int) -> tuple[int, int] | None:
    request = bytearray(_FIEMAP.size + _EXTENT.size)
    _FIEMAP.pack_into(request, 0, 0, 1, 0, 0, 1, 0)
    try:
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, request)
    except OSError:
        return None
    if _FIEMAP.unpack_from(request)[3] == 0:
        return None
    _, physical, _, flags = _EXTENT.unpack_from(request, _FIEMAP.size)
    return int(physical), int(flags)


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

    def drain(self) -> frozenset[int]:
        """Read all pending events; returns the watches of files that were written to, and perhaps SOME_DROPPED."""
        written: set[int] = set()
        while True:
            try:
                events = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return frozenset(written)
            written.update(watch for watch, mask, _, _ in _EVENT.iter_unpack(events) if mask & _TOLD)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
