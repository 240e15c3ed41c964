"""The bpf(2) and perf_event_open(2) system calls, as far as railscope needs them.

libbpf parses and loads objects (libbpf.py); everything that happens afterwards, reading maps in batches
and making links of kinds that Debian 12's libbpf 1.1 does not know, goes straight to the kernel.  Numbers and layouts
come from include/uapi/linux/bpf.h and perf_event.h of Linux 6.13.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path
from typing import Final

_NUMBERS: Final = {"x86_64": (321, 298), "aarch64": (280, 241)}
"""System call numbers of (bpf, perf_event_open) by machine."""

BPF_MAP_LOOKUP_ELEM: Final = 1
BPF_MAP_UPDATE_ELEM: Final = 2
BPF_MAP_DELETE_ELEM: Final = 3
BPF_OBJ_GET_INFO_BY_FD: Final = 15
BPF_RAW_TRACEPOINT_OPEN: Final = 17
BPF_MAP_LOOKUP_AND_DELETE_ELEM: Final = 21
"""Of hash maps since Linux 5.14: commit 3e87f192b405."""
BPF_MAP_LOOKUP_BATCH: Final = 24
BPF_LINK_CREATE: Final = 28

BPF_PERF_EVENT: Final = 41
BPF_TRACE_UPROBE_MULTI: Final = 48
BPF_TRACE_UPROBE_SESSION: Final = 57
_UPROBE_MULTI_RETURN: Final = 1

_PERF_FLAG_FD_CLOEXEC: Final = 8
_PERF_ATTR_BYTES: Final = 136


class KernelRefusal(OSError):
    """The kernel refused a system call; `str` says which and why."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _system_call(which: int, what: str, *arguments: object) -> int:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise KernelRefusal(errno.ENOSYS, f"railscope does not know this machine's system calls: {platform.machine()}")
    result: int = _libc.syscall(ctypes.c_long(numbers[which]), *arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise KernelRefusal(number, f"{what}: {os.strerror(number)}")
    return result


def bpf(command: int, attributes: bytes | bytearray, what: str) -> int:
    """Call bpf(2).  A `bytearray` is also written to, as the kernel does for batch counts.

    Raises:
        KernelRefusal: with the call's errno; `what` opens its message.
    """
    buffer = (ctypes.c_char * len(attributes)).from_buffer_copy(attributes)
    try:
        return _system_call(0, what, ctypes.c_int(command), ctypes.byref(buffer), ctypes.c_uint(len(attributes)))
    finally:
        if isinstance(attributes, bytearray):
            attributes[:] = buffer.raw


def possible_cpus(sysfs: Path = Path("/sys")) -> int:
    """Number of possible CPUs: per-CPU map values have one slot for each.

    Raises:
        ValueError: the kernel's list cannot be understood.
    """
    text = (sysfs / "devices/system/cpu/possible").read_text().strip()
    highest = 0
    for part in text.split(","):
        highest = max(highest, int(part.rsplit("-", 1)[-1]))
    return highest + 1


def open_raw_tracepoint(program_fd: int, name: str) -> int:
    """Attach a program to a tracepoint of the kernel, by its name alone; returns the link's descriptor.

    Unlike a perf event of the tracepoint it needs nothing of tracefs, which only root reads.

    Raises:
        KernelRefusal: ENOENT where there is no such tracepoint, EPERM without CAP_BPF and CAP_PERFMON.
    """
    buffer = ctypes.create_string_buffer(name.encode())
    attributes = struct.pack("<QII", ctypes.addressof(buffer), program_fd, 0)
    return bpf(BPF_RAW_TRACEPOINT_OPEN, attributes, f"attach to the tracepoint {name}")


def link_uprobe_multi(
    program_fd: int,
    path: str,
    offsets: list[int],
    cookies: list[int],
    *,
    pid: int = 0,
    on_return: bool = False,
    attach_type: int = BPF_TRACE_UPROBE_MULTI,
) -> int:
    """Attach one program to many offsets of one file; returns the link's descriptor.

    `pid` restricts it to one process (0: every process that maps the file).  Kernel 6.6 and newer; attach type
    session 6.13 and newer.

    Raises:
        KernelRefusal: EINVAL on kernels without uprobe_multi, EPERM without CAP_BPF and CAP_PERFMON.
    """
    if len(offsets) != len(cookies) or not offsets:
        raise ValueError("as many cookies as offsets are needed, and at least one")
    path_buffer = ctypes.create_string_buffer(os.fsencode(path))
    offset_array = (ctypes.c_uint64 * len(offsets))(*offsets)
    cookie_array = (ctypes.c_uint64 * len(cookies))(*cookies)
    attributes = struct.pack(
        "<IIIIQQQQIIII",
        program_fd,
        0,
        attach_type,
        0,
        ctypes.addressof(path_buffer),
        ctypes.addressof(offset_array),
        0,
        ctypes.addressof(cookie_array),
        len(offsets),
        _UPROBE_MULTI_RETURN if on_return else 0,
        pid,
        0,
    )
    return bpf(BPF_LINK_CREATE, attributes, f"attach to {len(offsets)} functions of {path}")


def link_perf_uprobe(
    program_fd: int, path: str, offset: int, cookie: int, *, perf_type: int, on_return: bool, pid: int = 0
) -> tuple[int, int]:
    """Attach one program to one offset through a perf event; returns (perf event, link) descriptors.

    `perf_type` is the number in /sys/bus/event_source/devices/uprobe/type; `pid` restricts the probe to one process
    (0: every process that maps the file).  Kernel 5.15 and newer.

    Raises:
        KernelRefusal: EACCES without CAP_SYS_ADMIN, EINVAL for an offset that is no instruction.
    """
    path_buffer = ctypes.create_string_buffer(os.fsencode(path))
    attributes = bytearray(_PERF_ATTR_BYTES)
    struct.pack_into("<IIQ", attributes, 0, perf_type, _PERF_ATTR_BYTES, int(on_return))
    struct.pack_into("<QQ", attributes, 56, ctypes.addressof(path_buffer), offset)
    # The program runs on every CPU; an event of no process must name one all the same.
    perf_fd = perf_event_open(
        bytes(attributes), pid=pid or -1, cpu=-1 if pid else 0, what=f"probe offset {offset:#x} of {path}"
    )
    try:
        link = struct.pack("<IIIIQQQQ", program_fd, perf_fd, BPF_PERF_EVENT, 0, cookie, 0, 0, 0)
        return perf_fd, bpf(BPF_LINK_CREATE, link, f"attach to offset {offset:#x} of {path}")
    except KernelRefusal:
        os.close(perf_fd)
        raise


def perf_event_open(attributes: bytes, *, pid: int, cpu: int, what: str) -> int:
    """Call perf_event_open(2) with a `struct perf_event_attr`; returns the descriptor.

    Raises:
        KernelRefusal: with the call's errno.
    """
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return _system_call(
        1,
        what,
        ctypes.byref(buffer),
        ctypes.c_int(pid),
        ctypes.c_int(cpu),
        ctypes.c_int(-1),
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )
