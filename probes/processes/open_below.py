"""Opening a file that another process names, without leaving the folder that is its root.

Links on the way are followed as that process would follow them: what is absolute begins at the folder, `..` ends there,
and no link of /proc (to another process's files, memory or root) leads anywhere.  Source: openat2(2), Linux 5.6.

systemd forbids openat2 (ENOSYS) to every service with DynamicUser= or RestrictSUIDSGID=, whose filter cannot look into
its argument (seccomp_restrict_suid_sgid in src/shared/seccomp-util.c).  There the same walk is made name by name: each
one is opened in the folder that is held open, and never followed by the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from typing import Final

_SYS_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10
_OPEN_HOW: Final = struct.Struct("<QQQ")

_PROC_SUPER_MAGIC: Final = 0x9FA0
"""Of procfs; source: include/uapi/linux/magic.h."""
_MOST_LINKS: Final = 40
"""As many as the kernel follows; source: MAXSYMLINKS in include/linux/namei.h."""
_LONGEST_PATH: Final = 4095

_libc = ctypes.CDLL(None, use_errno=True)


def open_below(folder: int, path: str, flags: int) -> int:
    """Open `path` with the folder behind a descriptor as root; the caller closes the descriptor.

    Raises:
        OSError: there is none, or it may not be opened.
        ValueError: there is a NUL in the path.
    """
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError("there is a NUL in its path")
    how = _OPEN_HOW.pack(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    descriptor: int = _libc.syscall(_SYS_OPENAT2, folder, name, how, len(how))
    if descriptor < 0:
        number = ctypes.get_errno()
        if number == errno.ENOSYS:
            return walk_below(folder, path, flags)
        raise OSError(number, os.strerror(number))
    return descriptor


def walk_below(folder: int, path: str, flags: int) -> int:
    """As `open_below`, without openat2.

    Raises:
        OSError: there is none, or it may not be opened.
    """
    if not path or len(os.fsencode(path)) > _LONGEST_PATH:
        raise _error(errno.ENAMETOOLONG if path else errno.ENOENT)
    folders = [folder]
    """From the root on; all but the first are closed here."""
    names, links = _names(path), 0
    try:
        while names:
            name = names.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(folders) > 1:
                    os.close(folders.pop())
                continue
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folders[-1])
            folders.append(found)
            kind = os.fstat(found).st_mode
            if stat.S_ISLNK(kind):
                links += 1
                if links > _MOST_LINKS or _is_of_proc(found):
                    raise _error(errno.ELOOP)
                target = os.readlink("", dir_fd=found)
                os.close(folders.pop())
                if target.startswith("/"):
                    while len(folders) > 1:
                        os.close(folders.pop())
                names += _names(target)
            elif not stat.S_ISDIR(kind):
                if names:
                    raise _error(errno.ENOTDIR)
                if flags & os.O_PATH:
                    return os.dup(found)
                # Its name may have become a link's meanwhile, which is not followed.
                return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folders[-2])
        return os.open(".", flags, dir_fd=folders[-1])
    finally:
        for opened in folders[1:]:
            os.close(opened)


def _names(path: str) -> list[str]:
    """What stands between the slashes, the last first; a slash at the end asks for a folder, as `/.` does."""
    names = path.split("/")
    if not names[-1]:
        names[-1] = "."
    return names[::-1]


def _is_of_proc(descriptor: int) -> bool:
    """Whether it lies in procfs, some of whose links lead where their text does not say."""
    state = ctypes.create_string_buffer(256)
    if _libc.fstatfs(descriptor, state) != 0:
        number = ctypes.get_errno()
        raise _error(number)
    kind: int = ctypes.c_long.from_buffer(state).value
    return kind == _PROC_SUPER_MAGIC


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
