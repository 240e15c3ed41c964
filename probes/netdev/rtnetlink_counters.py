"""Counters of all devices of a network namespace in one RTM_GETSTATS dump.

Source: `struct if_stats_msg` and `struct rtnl_link_stats64` in the kernel's include/uapi/linux/if_link.h.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.native.beats import Answer, TableQuestion
from railscope.probes.netdev.counters import CounterBlock, CounterReading, Values
from railscope.probes.netdev.links import answer_bytes, read_links
from railscope.probes.netdev.netlink import NLMSG_DONE, MalformedNetlink, NetlinkSocket, attributes, messages

LINK_STATS_FIELDS: Final = (
    "rx_packets",
    "tx_packets",
    "rx_bytes",
    "tx_bytes",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "multicast",
    "collisions",
    "rx_length_errors",
    "rx_over_errors",
    "rx_crc_errors",
    "rx_frame_errors",
    "rx_fifo_errors",
    "rx_missed_errors",
    "tx_aborted_errors",
    "tx_carrier_errors",
    "tx_fifo_errors",
    "tx_heartbeat_errors",
    "tx_window_errors",
)
"""The head of struct rtnl_link_stats64, in its order; newer kernels append more."""

_RTM_NEWSTATS: Final = 92
_RTM_GETSTATS: Final = 94
_IFLA_STATS_LINK_64: Final = 1
_STATS: Final = struct.Struct("=BxxxII")
"""struct if_stats_msg: family, index, mask of wanted attributes."""
_STATS_REQUEST: Final = _STATS.pack(0, 0, 1 << (_IFLA_STATS_LINK_64 - 1))
_ROW_BYTES: Final = len(LINK_STATS_FIELDS) * 8


class NetlinkCounters:
    """Counters of the network namespace of the thread that makes it, from RTM_GETSTATS."""

    def __init__(self, clock: Clock, most_devices: int | None = None) -> None:
        """`most_devices`: as of `NetlinkInventory`.

        Raises:
            OSError: the kernel refuses a socket.
        """
        self._monotonic_ns = clock.monotonic_ns
        most_bytes = answer_bytes(most_devices)
        self._netlink = NetlinkSocket(most_bytes=most_bytes)
        try:
            self._lent = NetlinkSocket(most_bytes=most_bytes)  # for those who ask this source's question themselves
        except OSError:
            self._netlink.close()
            raise
        self._question: TableQuestion | None = None
        self._names: tuple[str, ...] = ()
        self._indexes: tuple[int, ...] = ()

    def close(self) -> None:
        self._netlink.close()
        self._lent.close()

    def refresh(self) -> None:
        """See `CounterSource.refresh`."""
        self._indexes = ()
        self._question = None

    def question(self) -> TableQuestion | None:
        """See `DeferringSource.question`; None where there are more devices than one datagram holds."""
        if self._question is None:
            self._question = self._lent.table_question(_RTM_GETSTATS, _STATS_REQUEST)
        return self._question

    def read(self) -> CounterReading:
        """See `CounterSource.read`."""
        answer = self.read_raw()
        indexes, values = parse_statistics(answer.datagrams)
        return self._named([answer], indexes, values[np.newaxis]).reading(0)

    def read_raw(self) -> Answer:
        """See `DeferringSource.read_raw`."""
        self._question = None  # asked directly: the other thread's request has ended
        before_ns = self._monotonic_ns()
        datagrams = self._netlink.dump(_RTM_GETSTATS, _STATS_REQUEST)
        return Answer(before_ns, self._monotonic_ns(), datagrams)

    def parse_raw(self, answers: Sequence[Answer]) -> list[CounterBlock]:
        """See `DeferringSource.parse_raw`."""
        alike = parse_alike([answer.datagrams for answer in answers])
        if alike is not None:
            return [self._named(answers, *alike)]
        blocks = []
        for answer in answers:  # devices came or went, or there are very many
            indexes, values = parse_statistics(answer.datagrams)
            blocks.append(self._named([answer], indexes, values[np.newaxis]))
        return blocks

    def _named(self, answers: Sequence[Answer], indexes: tuple[int, ...], values: Values) -> CounterBlock:
        """Readings with the devices' names, which are asked for when the devices are others than before."""
        times_ns = tuple((answer.before_ns, answer.after_ns) for answer in answers)
        if indexes != self._indexes:
            links = read_links(self._netlink)
            # A device may have come or gone between the two questions: what has no name now gets one at the next
            # read, and the stored indexes stay different until then.
            known = [row for row, index in enumerate(indexes) if index in links]
            names = tuple(links[indexes[row]].name for row in known)
            if len(known) < len(indexes):
                generations = tuple(indexes[row] for row in known)
                return CounterBlock(times_ns, names, generations, LINK_STATS_FIELDS, values[:, known])
            self._names, self._indexes = names, indexes
        return CounterBlock(times_ns, self._names, self._indexes, LINK_STATS_FIELDS, values)


def parse_statistics(datagrams: Sequence[bytes | memoryview]) -> tuple[tuple[int, ...], Values]:
    """Indexes and counters of every device in the answer to RTM_GETSTATS; other messages are passed over.

    Raises:
        MalformedNetlink: a message is cut short, or two speak of the same device.
    """
    indexes: list[int] = []
    parts: list[Values] = []
    for data in datagrams:
        block = _uniform_block(data)
        if block is not None:
            indexes += block[0]
            parts.append(block[1])
            data = data[block[2] :]
        for kind, _flags, _sequence, payload in messages(data):
            if kind == _RTM_NEWSTATS and (row := _row(payload)) is not None:
                indexes.append(row[0])
                parts.append(row[1])
    if len(set(indexes)) != len(indexes):
        raise MalformedNetlink("netlink: two statistics of one device in a dump")
    empty: Values = np.zeros((0, len(LINK_STATS_FIELDS)), dtype=np.uint64)
    return tuple(indexes), np.concatenate(parts) if parts else empty


def _row(payload: memoryview) -> tuple[int, Values] | None:
    """(index, one row of counters) of one message; None if it carries other statistics."""
    if len(payload) < _STATS.size:
        raise MalformedNetlink(f"netlink: statistics of {len(payload)} bytes, their header takes {_STATS.size}")
    _family, index, _mask = _STATS.unpack_from(payload)
    for kind, value in attributes(payload[_STATS.size :]):
        if kind == _IFLA_STATS_LINK_64:
            if len(value) < _ROW_BYTES:
                raise MalformedNetlink(f"netlink: counters of {len(value)} bytes, expected at least {_ROW_BYTES}")
            return index, np.frombuffer(value[:_ROW_BYTES], dtype=np.uint64).reshape(1, -1)
    return None


def parse_alike(answers: Sequence[Sequence[bytes | memoryview]]) -> tuple[tuple[int, ...], Values] | None:
    """Indexes and counters (answers by devices by fields) of RTM_GETSTATS answers that are alike: as a rule all are.

    Alike are answers of one datagram each, of the same devices in the same order.  None: they are not, or do not look
    as expected; `parse_statistics` says what is wrong.
    """
    size = len(answers[0][0]) if answers and answers[0] else 0
    if size < _HEADS + _ROW_BYTES + _DONE_BYTES or any(len(one) != 1 or len(one[0]) != size for one in answers):
        return None
    data = b"".join(one[0] for one in answers)
    length = int.from_bytes(data[:4], _BYTE_ORDER)
    used = size - _DONE_BYTES
    if length < _HEADS + _ROW_BYTES or length % 4 or used % length:
        return None
    lines = np.frombuffer(data, dtype=np.uint8).reshape(len(answers), size)
    if (lines[:, used : used + len(_DONE)] != np.frombuffer(_DONE, dtype=np.uint8)).any():
        return None
    block = np.ndarray((len(answers), used // length), _message_dtype(length), data, strides=(size, length))
    first = block[0, 0]
    if first["type"] != _RTM_NEWSTATS or first["attribute"].tobytes() != _attribute_header(length):
        return None
    if (block["head"] != first["head"]).any() or (block["attribute"] != first["attribute"]).any():
        return None
    indexes = tuple(block["index"][0].tolist())
    if (block["index"] != block["index"][0]).any() or len(set(indexes)) != len(indexes):
        return None
    return indexes, block["counters"]


_DONE_BYTES: Final = 20
_DONE: Final = struct.pack("=IH", _DONE_BYTES, NLMSG_DONE)
"""How the last message of a table begins; it ends with a number."""
_HEADS: Final = 16 + _STATS.size + 4
"""Bytes before the counters: message header, statistics header, attribute header."""


def _uniform_block(data: bytes | memoryview) -> tuple[list[int], Values, int] | None:
    """(indexes, counters, bytes used) of the equal messages a datagram starts with; None to go one by one.

    One kernel makes all its statistics messages alike, so that numpy can take them at once.
    """
    if len(data) < _HEADS + _ROW_BYTES:
        return None
    length = int.from_bytes(data[:4], _BYTE_ORDER)
    if length < _HEADS + _ROW_BYTES or length % 4 or length > len(data):
        return None
    block = np.frombuffer(data, dtype=_message_dtype(length), count=len(data) // length)
    first = block[0]
    if first["type"] != _RTM_NEWSTATS or first["attribute"].tobytes() != _attribute_header(length):
        return None
    alike = (block["head"] == first["head"]) & (block["attribute"] == first["attribute"])
    count = len(block) if alike.all() else int(alike.argmin())
    return block["index"][:count].tolist(), block["counters"][:count], count * length


@lru_cache(maxsize=4)
def _message_dtype(length: int) -> np.dtype[Any]:
    """One message: `head` is its length, type and flags in one number, `attribute` likewise length and type."""
    return np.dtype(
        {
            "names": ["head", "type", "index", "attribute", "counters"],
            "formats": ["u8", "u2", "u4", "u4", ("u8", (len(LINK_STATS_FIELDS),))],
            "offsets": [0, 4, 20, 28, _HEADS],
            "itemsize": length,
        }
    )


def _attribute_header(length: int) -> bytes:
    return struct.pack("=HH", length - 16 - _STATS.size, _IFLA_STATS_LINK_64)


_BYTE_ORDER: Final = "little" if struct.pack("=H", 1) == b"\x01\x00" else "big"
