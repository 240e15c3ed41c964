"""Reading another process's memory through `/proc/PID/mem`, wherever its pointers may lead."""

from __future__ import annotations

import os
from typing import Final

_END_OF_ADDRESSES: Final = 1 << 63
"""pread(2) takes signed offsets; no user memory lies beyond on x86-64 and arm64."""


def read_memory(memory: int, size_bytes: int, address: int) -> bytes | None:
    """So many bytes at an address, by a descriptor of `/proc/PID/mem`; None where they are not mapped."""
    if not 0 <= address < _END_OF_ADDRESSES - size_bytes:
        return None
    try:
        data = os.pread(memory, size_bytes, address)
    except OSError:
        return None
    return data if len(data) == size_bytes else None
