"""Opening a file that another process names, without leaving the folder that is its root.

Links on the way are followed as that process would follow them: what is absolute begins at the folder, `..` ends there,
and no link of /proc (to another process's files, memory or root) leads anywhere.  Source: openat2(2), Linux 5.6.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

_SYS_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10
_OPEN_HOW: Final = struct.Struct("<QQQ")

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
        raise OSError(number, os.strerror(number))
    return descriptor
