"""Reads the backlog and drops of a network device's queueing discipline.

In a lock-step collective every rail slows down with the slowest, so bytes do not name it; the queue does: bytes wait
on the slow rail and nowhere else.  Of the tree of disciplines that a device may have, the root counts for all.  What
a card has taken into its own rings, and RDMA traffic, never stands in this queue.

Source: RTM_GETQDISC, the kernel's include/uapi/linux/rtnetlink.h, pkt_sched.h and gen_stats.h, and tc(8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.netdev.counters import CounterReading, CounterShape, DeviceFailure, Flags, Values
from railscope.probes.netdev.links import device_indexes
from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket, attributes, messages

_RTM_NEWQDISC: Final = 36
_RTM_GETQDISC: Final = 38
_QUEUE_MESSAGE: Final = struct.Struct("=B3xiIII")
"""struct tcmsg: family, index, handle, parent, info."""
_REQUEST: Final = _QUEUE_MESSAGE.pack(0, 0, 0, 0, 0)
_TC_H_ROOT: Final = 0xFFFFFFFF
_TCA_KIND: Final = 1
_TCA_STATS2: Final = 7
_TCA_STATS_BASIC: Final = 1
_TCA_STATS_QUEUE: Final = 3
_TCA_STATS_PACKETS_64: Final = 8
"""Only there once 32 bits are not enough."""
_BASIC: Final = struct.Struct("=QI")
"""struct gnet_stats_basic: bytes, packets."""
_QUEUE: Final = struct.Struct("=5I")
"""struct gnet_stats_queue: length, backlog, drops, requeues, overlimits."""
_WIDE: Final = struct.Struct("=Q")

QUEUE_FIELDS: Final = ("tx_bytes", "rx_bytes", "tx_packets", "drops", "overlimits", "requeues")
_FIELD_BITS: Final = (64, 64, 64, 32, 32, 32)
_FIELD_KNOWN: Final = (True, False, True, True, True, True)


@dataclass(frozen=True, slots=True)
class QueueDiscipline:
    """One queueing discipline of one device."""

    index: int
    """Number of the device."""
    kind: str
    """`fq_codel`, `mq`, `tbf`, `noqueue`, …"""
    handle: int
    """0 for the one that the kernel made by itself."""
    parent: int
    transmit_bytes: int
    """Left the queue since it was made."""
    transmit_packets: int
    queued_packets: int
    backlog_bytes: int
    """Waiting now."""
    drops: int
    """Packets; this and the next two begin again at 2^32."""
    requeues: int
    """Packets that the device did not take and that were put back."""
    overlimits: int
    """How often a packet had to wait for its turn by rate."""

    @property
    def root(self) -> bool:
        return self.parent == _TC_H_ROOT


@dataclass(frozen=True, slots=True)
class DeviceQueue:
    """What stood in front of one device at the last read."""

    device: str
    kind: str
    backlog_bytes: int
    queued_packets: int


class QueueCounters:
    """A `CounterSource` of the devices that `watch` names: `QUEUE_FIELDS` of the root; `last` holds what waits now."""

    def __init__(self, clock: Clock) -> None:
        """Works in the network namespace of the thread that constructs it.

        Raises:
            OSError: the kernel refuses a socket.
        """
        self._clock = clock
        self._netlink = NetlinkSocket()
        self._devices: tuple[str, ...] = ()
        self.last: tuple[DeviceQueue, ...] = ()
        """Of the last read, replaced as a whole."""

    def close(self) -> None:
        self._netlink.close()

    def watch(self, devices: Sequence[str]) -> None:
        """Read these from now on; safe from any thread."""
        self._devices = tuple(devices)

    def refresh(self) -> None:
        """See `CounterSource.refresh`: names are read with every table, so that nothing is to be forgotten."""

    def read(self) -> CounterReading:
        """See `CounterSource.read`.  A device that shows no root has no row."""
        devices = self._devices
        before_ns = self._clock.monotonic_ns()
        if not devices:
            self.last = ()
            return queue_reading(before_ns, before_ns, [], ())
        datagrams = self._netlink.dump(_RTM_GETQDISC, _REQUEST)
        after_ns = self._clock.monotonic_ns()
        roots = {queue.index: queue for queue in parse_queues(datagrams) if queue.root}
        indexes = device_indexes(self._netlink, devices)
        rows: list[tuple[str, QueueDiscipline]] = []
        failed: list[DeviceFailure] = []
        for device in devices:
            if device not in indexes:
                failed.append(DeviceFailure(device, "no such device"))
            elif (root := roots.get(indexes[device])) is not None:
                rows.append((device, root))
        self.last = tuple(
            DeviceQueue(device, root.kind, root.backlog_bytes, root.queued_packets) for device, root in rows
        )
        return queue_reading(before_ns, after_ns, rows, tuple(failed))


def queue_reading(
    before_ns: int, after_ns: int, rows: Sequence[tuple[str, QueueDiscipline]], failed: tuple[DeviceFailure, ...]
) -> CounterReading:
    """The counters of root queueing disciplines by device, in the form that all sources share."""
    size = (len(rows), len(QUEUE_FIELDS))
    values: Values = np.zeros(size, dtype=np.uint64)
    maxima: Values = np.empty(size, dtype=np.uint64)
    maxima[:] = [2**bits - 1 for bits in _FIELD_BITS]
    known: Flags = np.empty(size, dtype=np.bool_)
    known[:] = _FIELD_KNOWN
    for row, (_device, root) in enumerate(rows):
        values[row] = (root.transmit_bytes, 0, root.transmit_packets, root.drops, root.overlimits, root.requeues)
    return CounterReading(
        before_ns,
        after_ns,
        tuple(device for device, _root in rows),
        # Another discipline has another handle and begins at 0.
        tuple(root.index << 32 | root.handle for _device, root in rows),
        QUEUE_FIELDS,
        values,
        failed,
        CounterShape(known, maxima, np.zeros(size, dtype=np.bool_)),
    )


def parse_queues(datagrams: Iterable[bytes]) -> list[QueueDiscipline]:
    """Queueing disciplines in an answer to RTM_GETQDISC; other messages, or without statistics, are passed over.

    Raises:
        MalformedNetlink: a message is cut short.
    """
    return [
        queue
        for data in datagrams
        for kind, _flags, _sequence, payload in messages(data)
        if kind == _RTM_NEWQDISC and (queue := _queue(payload)) is not None
    ]


def _queue(payload: memoryview) -> QueueDiscipline | None:
    if len(payload) < _QUEUE_MESSAGE.size:
        raise MalformedNetlink(f"netlink: a queue message of {len(payload)} bytes, expected {_QUEUE_MESSAGE.size}")
    _family, index, handle, parent, _info = _QUEUE_MESSAGE.unpack_from(payload)
    if index <= 0:
        raise MalformedNetlink(f"netlink: a queue message with index {index}")
    found = dict(attributes(payload[_QUEUE_MESSAGE.size :]))
    nested = found.get(_TCA_STATS2)
    if nested is None:
        return None
    statistics = dict(attributes(nested))
    basic, queue, wide = (statistics.get(kind) for kind in (_TCA_STATS_BASIC, _TCA_STATS_QUEUE, _TCA_STATS_PACKETS_64))
    if basic is None or queue is None:
        return None
    if len(basic) < _BASIC.size or len(queue) < _QUEUE.size or (wide is not None and len(wide) < _WIDE.size):
        raise MalformedNetlink(f"netlink: queue statistics of {len(basic)} and {len(queue)} bytes")
    transmit_bytes, transmit_packets = _BASIC.unpack_from(basic)
    length, backlog, drops, requeues, overlimits = _QUEUE.unpack_from(queue)
    return QueueDiscipline(
        index=index,
        kind=bytes(found.get(_TCA_KIND, b"")).split(b"\0", 1)[0].decode("ascii", "replace"),
        handle=handle,
        parent=parent,
        transmit_bytes=transmit_bytes,
        transmit_packets=transmit_packets if wide is None else _WIDE.unpack_from(wide)[0],
        queued_packets=length,
        backlog_bytes=backlog,
        drops=drops,
        requeues=requeues,
        overlimits=overlimits,
    )
