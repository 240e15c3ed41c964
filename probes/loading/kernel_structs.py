"""Where the fields of the running kernel's own structures are, from its BTF, through libbpf.

The programs themselves need no BTF, so that they load everywhere; what only some settings need is told to them as
offsets, and where a kernel has no BTF the offsets are not known.  Source: the kernel's Documentation/bpf/btf.rst.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

_STRUCT: Final = 4
_UNION: Final = 5
_DEEPEST: Final = 8


class _Type(ctypes.Structure):
    _fields_ = (("name", ctypes.c_uint32), ("info", ctypes.c_uint32), ("size", ctypes.c_uint32))


class _Member(ctypes.Structure):
    _fields_ = (("name", ctypes.c_uint32), ("type", ctypes.c_uint32), ("offset", ctypes.c_uint32))


class _Btf:
    """The functions of libbpf that are used, on the kernel's BTF."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
        library.btf__load_vmlinux_btf.restype = ctypes.c_void_p
        self._find = library.btf__find_by_name_kind
        self._find.restype = ctypes.c_int
        self._find.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32]
        self._type = library.btf__type_by_id
        self._type.restype = ctypes.c_void_p
        self._type.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
        self._name = library.btf__name_by_offset
        self._name.restype = ctypes.c_char_p
        self._name.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
        self._free = library.btf__free
        self._free.restype = None
        self._free.argtypes = [ctypes.c_void_p]
        self._handle = library.btf__load_vmlinux_btf()

    @property
    def is_there(self) -> bool:
        return bool(self._handle)

    def offset(self, struct: str, field: str) -> int | None:
        """Bytes from the start of a structure to a field, also one of an anonymous member."""
        number = self._find(self._handle, struct.encode(), _STRUCT)
        return self._within(number, field.encode(), _DEEPEST) if number > 0 else None

    def _within(self, number: int, field: bytes, deepest: int) -> int | None:
        address = self._type(self._handle, number)
        if not address or not deepest:
            return None
        found = _Type.from_address(address)
        if found.info >> 24 & 0x1F not in (_STRUCT, _UNION):
            return None
        bits = 0xFFFFFF if found.info >> 31 else 0xFFFFFFFF
        for at in range(found.info & 0xFFFF):
            member = _Member.from_address(address + ctypes.sizeof(_Type) + at * ctypes.sizeof(_Member))
            name = self._name(self._handle, member.name)
            start = (int(member.offset) & bits) // 8
            if name == field:
                return start
            if not name:
                inner = self._within(member.type, field, deepest - 1)
                if inner is not None:
                    return start + inner
        return None

    def close(self) -> None:
        self._free(self._handle)


def kernel_offsets(fields: Sequence[tuple[str, str]]) -> tuple[int, ...] | None:
    """Offsets in bytes of kernel structures' fields, each (structure, field); None: not all are known here."""
    try:
        btf = _Btf()
    except (OSError, AttributeError):
        return None
    if not btf.is_there:
        return None
    try:
        found = tuple(btf.offset(*field) for field in fields)
    finally:
        btf.close()
    known = tuple(offset for offset in found if offset is not None)
    return known if len(known) == len(found) else None
