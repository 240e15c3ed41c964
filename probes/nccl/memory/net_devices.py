"""Resolves NCCL's numbers of network devices to names, from a process's memory.

NCCL numbers the devices that it found when the process first made a communicator, each network kind for itself: a
message goes to `ncclNetSocketDevs[n]` or `ncclIbDevs[n]`, and what `n` is depends on the process (NCCL_SOCKET_IFNAME,
NCCL_IB_HCA, its network namespace).  The names stand in those two arrays for the life of the process: they are filled
once, before the first message, and never again (src/transport/net_socket.cc, net_ib, 2.20 to 2.32).  They are read
from `/proc/PID/mem` once; nothing is stopped and nothing is written.

No name is guessed.  The arrays' addresses come from the `.symtab` of the very file that the process maps, their
layout from the table of known builds, and both must agree on the size of an array; a name must look like one.  What
does not pass is left out, and its number stays unresolved.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.libraries.elf import Elf, Segment
from railscope.probes.libraries.elf_variables import Variable, find_variables
from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.records.internals import NetworkKind
from railscope.probes.processes.processes import MAX_MAPS_BYTES, FileKey, ProcessIdentity, identity_of

_INTERFACE_NAME: Final = re.compile(rb"(?!\.{1,2}\0)([!-.0-9;-~]{1,15})\0")
"""IFNAMSIZ is 16 with the NUL; no blank, slash or colon (`dev_valid_name` in net/core/dev.c)."""
_RDMA_NAME: Final = re.compile(rb"(?!\.{1,2}\0)([!-.0-~]{1,63})\0")
"""IB_DEVICE_NAME_MAX is 64 with the NUL (rdma_netlink.h)."""
_DATA_DIRECT: Final = "_dma"
"""What NCCL 2.27 and later append to a device's name where it reaches the same port by a shorter way to memory."""
_MOST_ARRAY_BYTES: Final = 1 << 20
_PT_LOAD: Final = 1
_PF_X: Final = 1
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_EXECUTABLE: Final = re.compile(
    rb"^([0-9a-f]+)-[0-9a-f]+ ..x. ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([1-9][0-9]*) ", re.MULTILINE
)
_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.ENOTDIR})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})


class NetDeviceError(Exception):
    """A process's devices cannot be named; the message is one line that says why and what would help."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone: Final = gone
        """The process has ended or unmapped the library: nothing is wrong."""


@dataclass(frozen=True, slots=True)
class NetDevice:
    """One of NCCL's network devices."""

    network: NetworkKind
    number: int
    """As NCCL counts this kind of device in this process."""
    name: str
    """The network interface (`eth0`), or the RDMA device (`mlx5_0`), as the process's own namespace names it."""
    port: int | None
    """Port of the RDMA device, from 1; None for an interface."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Where one library keeps the devices of one network kind; addresses are virtual, as linked."""

    network: NetworkKind
    address: int
    capacity: int
    """Devices that there is room for."""
    device_bytes: int
    name_offset: int
    port_offset: int | None
    count_address: int
    """An int: how many there are; -1 before NCCL has looked."""


@dataclass(frozen=True, slots=True)
class DeviceArrays:
    """All that is needed of a library, so that it need not be open when a process is read."""

    segments: tuple[Segment, ...]
    arrays: tuple[DeviceArray, ...]
    """Empty: the library does not tell, because it is stripped or its build is unknown."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Names of one array: of symbols, without and with the mark of a file-local name, and in the table of builds."""

    network: NetworkKind
    array: tuple[str, ...]
    count: tuple[str, ...]
    structure: str
    has_port: bool


_SOURCES: Final = (
    _Source(
        NetworkKind.SOCKET,
        ("ncclNetSocketDevs", "_ZL17ncclNetSocketDevs"),
        ("ncclNetIfs", "_ZL10ncclNetIfs"),
        "ncclNetSocketDev",
        False,
    ),
    _Source(
        NetworkKind.IB,
        ("ncclIbDevs", "_ZL10ncclIbDevs"),
        ("ncclNIbDevs", "_ZL11ncclNIbDevs"),
        "ncclIbDev",
        True,
    ),
)


def device_arrays(elf: Elf, structures: Mapping[str, Structure]) -> DeviceArrays:
    """Where an NCCL library keeps its network devices; `structures` is what the table of known builds has of it.

    Raises:
        ElfError: the file is damaged.
    """
    known = [source for source in _SOURCES if source.structure in structures]
    found = find_variables(elf, {name for source in known for name in (*source.array, *source.count)}) if known else {}
    arrays = (_device_array(source, structures[source.structure], found) for source in known)
    loaded = tuple(segment for segment in elf.segments if segment.type == _PT_LOAD)
    return DeviceArrays(loaded, tuple(array for array in arrays if array is not None))


def _device_array(source: _Source, structure: Structure, found: Mapping[str, Variable]) -> DeviceArray | None:
    array = _only(source.array, found)
    count = _only(source.count, found)
    name_offset, port_offset = structure.offsets.get("devName"), structure.offsets.get("portNum")
    if array is None or count is None or count.size_bytes != 4 or name_offset is None:
        return None
    if source.has_port and port_offset is None:
        return None
    capacity, rest = divmod(array.size_bytes, structure.size_bytes)
    if rest or not 0 < array.size_bytes <= _MOST_ARRAY_BYTES:
        return None
    return DeviceArray(
        network=source.network,
        address=array.address,
        capacity=capacity,
        device_bytes=structure.size_bytes,
        name_offset=name_offset,
        port_offset=port_offset if source.has_port else None,
        count_address=count.address,
    )


def _only(names: tuple[str, ...], found: Mapping[str, Variable]) -> Variable | None:
    several = [found[name] for name in names if name in found]
    return several[0] if len(several) == 1 else None


def net_devices(
    procfs: Path, process: ProcessIdentity, library: FileKey, arrays: DeviceArrays
) -> tuple[NetDevice, ...]:
    """The network devices that NCCL uses in one process; those whose name cannot be told are left out.

    `library` is the mapped file that `arrays` was made from.  To be called after the process has sent something, or
    has made a communicator: while NCCL still fills the arrays a name may be half written.

    Raises:
        NetDeviceError: the process has gone, may not be read, or has the library mapped in more than one place.
    """
    if not arrays.arrays:
        return ()
    name = f"process {process.pid}"
    try:
        folder = os.open(procfs / str(process.pid), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _explained(error, name) from None
    # From here on everything goes through the folder, which belongs to one process for ever: if this is not the one
    # that was asked for, then it has ended, and reading fails.
    try:
        if identity_of(procfs, process.pid) != process:
            raise NetDeviceError(f"{name} has ended", gone=True)
        biases = load_biases(_maps(folder), library, arrays.segments)
        if not biases:
            raise NetDeviceError(f"{name}: its NCCL library is no longer mapped", gone=True)
        if len(biases) > 1:
            copies = f"its NCCL library is loaded {len(biases)} times (dlmopen)"
            raise NetDeviceError(f"{name}: {copies}, and the sending copy is unknown: load NCCL once to observe rails")
        (bias,) = biases
        memory = os.open("mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            return tuple(device for array in arrays.arrays for device in _devices(memory, bias, array, name))
        finally:
            os.close(memory)
    except OSError as error:
        raise _explained(error, name) from None
    finally:
        os.close(folder)


def load_biases(maps: bytes, library: FileKey, segments: tuple[Segment, ...]) -> frozenset[int]:
    """What to add to an address of the library file to have it in the process, once for each time it is loaded.

    `maps` is the text of /proc/PID/maps.  Only what is mapped executable counts: any program may map a library's file
    to look into it.
    """
    found = set()
    for match in _EXECUTABLE.finditer(maps):
        start, offset, major, minor = (int(word, 16) for word in match.groups()[:4])
        if FileKey((major, minor), int(match[5])) != library:
            continue
        for segment in segments:
            # Segments are mapped in whole pages, and a mapping may have been split since.
            if segment.flags & _PF_X and _page(segment.offset) <= offset < segment.offset + segment.file_bytes:
                found.add(start - offset + segment.offset - segment.address)
    return frozenset(found)


def devices_in(content: bytes, array: DeviceArray) -> Iterator[NetDevice]:
    """The network devices in the used part of NCCL's array; those without a proper name or port are left out."""
    pattern = _RDMA_NAME if array.network is NetworkKind.IB else _INTERFACE_NAME
    for number in range(len(content) // array.device_bytes):
        at, end = number * array.device_bytes, (number + 1) * array.device_bytes
        match = pattern.match(content, at + array.name_offset, end)
        port = None if array.port_offset is None else content[at + array.port_offset]
        if match is None or port == 0:
            continue
        name = match[1].decode("ascii")
        if array.network is NetworkKind.IB and len(name) > len(_DATA_DIRECT):
            name = name.removesuffix(_DATA_DIRECT)
        yield NetDevice(array.network, number, name, port)


def _devices(memory: int, bias: int, array: DeviceArray, process: str) -> Iterator[NetDevice]:
    count = int.from_bytes(_read(memory, bias + array.count_address, 4, process), "little", signed=True)
    if 0 < count <= array.capacity:
        yield from devices_in(_read(memory, bias + array.address, count * array.device_bytes, process), array)


def _read(memory: int, address: int, length: int, process: str) -> bytes:
    try:
        content = os.pread(memory, length, address)
    except OverflowError:  # no process has memory there
        raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
    if not content:
        raise NetDeviceError(f"{process} has ended", gone=True)
    if len(content) < length:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return content


def _maps(folder: int) -> bytes:
    descriptor = os.open("maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        return file.read(MAX_MAPS_BYTES)


def _page(offset: int) -> int:
    return offset & ~(_PAGE_BYTES - 1)


def _explained(error: OSError, process: str) -> NetDeviceError:
    if error.errno in _GONE:
        return NetDeviceError(f"{process} has ended", gone=True)
    if error.errno in _REFUSED:
        return NetDeviceError(f"{process}: its memory cannot be read (no permission): grant railscope CAP_SYS_PTRACE")
    return NetDeviceError(f"{process}: its memory cannot be read: {error.strerror}")
