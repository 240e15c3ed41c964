"""Which queue pairs RDMA devices have, whose they are, and what is counted for single ones.

`rdma resource show qp`, `rdma resource show cm_id` and `rdma statistic qp show` tell the same.  The kernel asks the
device for each queue pair's state, which in mlx5 is a firmware command each: seldom, or when somebody wants to know.

The kernel names the thread that made a queue pair (rdma_restrack_attach_task takes `current`), and no thread where it
has ended.  Where the remote end is (GID, address) it knows of those that were connected by rdma_cm alone; NCCL, NVSHMEM
and UCX connect theirs themselves, and of these the remote number is all there is.  Counters of single queue pairs are
there where somebody has bound them (`rdma statistic qp set link DEVICE/PORT auto pid on`); nothing is bound here.

Sources: the kernel's include/uapi/rdma/rdma_netlink.h and ib_user_verbs.h, and in drivers/infiniband/core/nldev.c
fill_res_qp_entry_query, fill_res_cm_id_entry and fill_res_counter_entry.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.netdev.netlink import MalformedNetlink, attributes, messages
from railscope.probes.rdma.netlink import (
    HWCOUNTERS,
    NLDEV,
    NLDEV_STAT_GET,
    PORT_INDEX,
    RdmaNetlink,
    counters_of,
    number_of,
    text_of,
    u32_attribute,
)

NLDEV_RES_QP_GET: Final = NLDEV + 10
NLDEV_RES_CM_ID_GET: Final = NLDEV + 11

_QP: Final = 19
_QP_ENTRY: Final = 20
_LOCAL_NUMBER: Final = 21
_REMOTE_NUMBER: Final = 22
_TYPE: Final = 26
_STATE: Final = 27
_PID: Final = 28
_KERNEL_NAME: Final = 29
_CM_ID: Final = 30
_CM_ID_ENTRY: Final = 31
_SOURCE: Final = 33
_DESTINATION: Final = 34
_COUNTED_RESOURCE: Final = 75
_COUNTER: Final = 77
_COUNTER_ENTRY: Final = 78
_COUNTER_NUMBER: Final = 79

_TYPES: Final = {
    0: "SMI",
    1: "GSI",
    2: "RC",
    3: "UC",
    4: "UD",
    8: "RAW_PACKET",
    9: "XRC_INI",
    10: "XRC_TGT",
    255: "DRIVER",
}
"""enum ib_qp_type; the driver's own are mlx5's DC and EFA's SRD."""
_STATES: Final = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
"""enum ib_qp_state: a queue pair carries data from RTR (receive) and RTS (send) on."""
_ADDRESS: Final = struct.Struct("=H")
_SERVICE: Final = struct.Struct(">H")
_IPV4: Final = slice(4, 8)
_IPV6: Final = slice(8, 24)
"""Of sockaddr_in and sockaddr_in6."""


@dataclass(frozen=True, slots=True)
class QueuePair:
    """One queue pair; what the kernel does not tell is None or empty."""

    device: str
    port: int | None
    """None before it is tied to one."""
    number: int
    """On its device."""
    remote_number: int | None
    """Of the other end, once it is connected."""
    kind: str
    """`RC`, `UC`, `UD`, `DRIVER`, …"""
    state: str
    """`RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE`, `ERR`."""
    thread: int | None
    """That made it, in the reader's PID namespace; None: it has ended, or the kernel's own."""
    kernel_user: str
    """What in the kernel made it: `ib_core`, `nvme_rdma`, …; empty: a process did."""
    remote_address: str = ""
    """IP address of the other end, where rdma_cm connected it."""
    services: tuple[int, ...] = ()
    """Ports of rdma_cm at its own end and the other one, where that connected it."""


@dataclass(frozen=True, slots=True)
class BoundCounter:
    """What a device counts for some of its queue pairs, because somebody has bound a counter to them."""

    device: str
    port: int
    number: int
    queue_pairs: tuple[int, ...]
    counters: tuple[tuple[str, int], ...]
    """By name, as in hw_counters; the port's own counters contain them."""


@dataclass(frozen=True, slots=True)
class QueuePairReading:
    """All queue pairs that the kernel shows to this process."""

    queue_pairs: tuple[QueuePair, ...]
    bound: tuple[BoundCounter, ...]


def read_queue_pairs(netlink: RdmaNetlink) -> QueuePairReading:
    """Ask for everything about the queue pairs of all devices.

    Raises:
        OSError: the kernel refuses, or does not answer within five seconds.
        MalformedNetlink: an answer is not what it should be.
    """
    pairs: list[QueuePair] = []
    bound: list[BoundCounter] = []
    for device, index in netlink.device_indexes().items():
        addresses = parse_connections(_optional(netlink, NLDEV_RES_CM_ID_GET, index))
        pairs += parse_queue_pairs(netlink.dump(NLDEV_RES_QP_GET, index), device, addresses)
        about = u32_attribute(_COUNTED_RESOURCE, _QP)
        bound += parse_bound_counters(_optional(netlink, NLDEV_STAT_GET, index, about), device)
    return QueuePairReading(tuple(pairs), tuple(bound))


def _optional(netlink: RdmaNetlink, kind: int, device_index: int, about: bytes = b"") -> list[bytes]:
    """A table that a device or an older kernel may lack."""
    try:
        return netlink.dump(kind, device_index, about)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
            return []
        raise


@dataclass(frozen=True, slots=True)
class CmConnection:
    """What rdma_cm knows of a connection."""

    remote_address: str
    """IP address of the other end."""
    services: tuple[int, ...]
    """Ports of both ends."""


def parse_queue_pairs(datagrams: list[bytes], device: str, addresses: dict[int, CmConnection]) -> list[QueuePair]:
    """The queue pairs in the answer to RDMA_NLDEV_CMD_RES_QP_GET; `addresses` as of `parse_connections`.

    Raises:
        MalformedNetlink: a message is cut short, or a queue pair has no number, kind or state.
    """
    return [_queue_pair(entry, device, addresses) for entry in _entries(datagrams, NLDEV_RES_QP_GET, _QP, _QP_ENTRY)]


def parse_connections(datagrams: list[bytes]) -> dict[int, CmConnection]:
    """What rdma_cm connected, by the number of the queue pair, in the answer to RDMA_NLDEV_CMD_RES_CM_ID_GET.

    Raises:
        MalformedNetlink: a message is cut short.
    """
    found: dict[int, CmConnection] = {}
    for entry in _entries(datagrams, NLDEV_RES_CM_ID_GET, _CM_ID, _CM_ID_ENTRY):
        told = dict(attributes(entry))
        ends = [told.get(end, memoryview(b"")) for end in (_SOURCE, _DESTINATION)]
        if _LOCAL_NUMBER in told and (address := _ip_address(ends[1])):
            services = tuple(_SERVICE.unpack_from(end, _ADDRESS.size)[0] for end in ends if _ip_address(end))
            found[number_of(told[_LOCAL_NUMBER])] = CmConnection(address, services)
    return found


def parse_bound_counters(datagrams: list[bytes], device: str) -> list[BoundCounter]:
    """Counters of queue pairs in the answer to RDMA_NLDEV_CMD_STAT_GET about them.

    Raises:
        MalformedNetlink: a message is cut short, or a counter has no number, port or values.
    """
    found = []
    for entry in _entries(datagrams, NLDEV_STAT_GET, _COUNTER, _COUNTER_ENTRY):
        told = dict(attributes(entry))
        if not {PORT_INDEX, _COUNTER_NUMBER, HWCOUNTERS} <= told.keys():
            raise MalformedNetlink("netlink: a counter of queue pairs without number, port or values")
        of = [dict(attributes(one)) for kind, one in attributes(told.get(_QP, memoryview(b""))) if kind == _QP_ENTRY]
        found.append(
            BoundCounter(
                device,
                number_of(told[PORT_INDEX]),
                number_of(told[_COUNTER_NUMBER]),
                tuple(number_of(one[_LOCAL_NUMBER]) for one in of if _LOCAL_NUMBER in one),
                tuple(counters_of(told[HWCOUNTERS]).items()),
            )
        )
    return found


def process_of_thread(procfs: Path, thread: int) -> int | None:
    """The process that a thread belongs to; None: it has ended."""
    try:
        with (procfs / str(thread) / "status").open("rb") as file:
            text = file.read(4096)
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(b"Tgid:") and line[5:].strip().isdigit():
            return int(line[5:])
    return None


def _entries(datagrams: list[bytes], wanted: int, table: int, entry: int) -> Iterator[memoryview]:
    for data in datagrams:
        for kind, _flags, _sequence, payload in messages(data):
            if kind != wanted:
                continue
            for outer, value in attributes(payload):
                if outer == table:
                    yield from (inner for kind, inner in attributes(value) if kind == entry)


def _queue_pair(entry: memoryview, device: str, addresses: dict[int, CmConnection]) -> QueuePair:
    told = dict(attributes(entry))
    if not {_LOCAL_NUMBER, _TYPE, _STATE} <= told.keys() or not told[_TYPE] or not told[_STATE]:
        raise MalformedNetlink("netlink: a queue pair without number, type or state")
    number, code, state = number_of(told[_LOCAL_NUMBER]), told[_TYPE][0], told[_STATE][0]
    kind = _TYPES.get(code, f"type_{code}")
    connection = addresses.get(number)
    remote = number_of(told[_REMOTE_NUMBER]) if _REMOTE_NUMBER in told else None
    return QueuePair(
        device=device,
        port=number_of(told[PORT_INDEX]) if PORT_INDEX in told else None,
        number=number,
        remote_number=remote or None,
        kind=kind,
        state=_STATES[state] if state < len(_STATES) else f"state_{state}",
        thread=(number_of(told[_PID]) or None) if _PID in told else None,
        kernel_user=text_of(told[_KERNEL_NAME]) if _KERNEL_NAME in told else "",
        remote_address=connection.remote_address if connection is not None else "",
        services=connection.services if connection is not None else (),
    )


def _ip_address(address: memoryview) -> str:
    """Of a sockaddr; empty for other families, and for none."""
    if len(address) < _IPV6.stop:
        return ""
    (family,) = _ADDRESS.unpack_from(address)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, address[_IPV4])
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, address[_IPV6])
    return ""
