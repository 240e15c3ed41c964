"""What TCP connections add up to, one at a time and with Python's own numbers: what the columns are compared with."""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from railscope.probes.netdev.addresses import plain_address
from railscope.probes.netdev.connection_accounts import ACCOUNT_FIELDS, MAXIMUM_CONNECTIONS, DeviceConnections
from railscope.probes.netdev.counters import DeviceFailure
from railscope.probes.netdev.netlink import MalformedNetlink, attributes, messages

OFFSETS = {
    "unanswered_retransmissions": (2, "B"),
    "unanswered_probes": (3, "B"),
    "unacknowledged_segments": (24, "I"),
    "options": (5, "B"),
    "last_sent_ms": (44, "I"),
    "last_acknowledged_ms": (56, "I"),
    "round_trip_us": (68, "I"),
    "round_trip_deviation_us": (72, "I"),
    "retransmitted_segments": (100, "I"),
    "bytes_acked": (120, "Q"),
    "bytes_received": (128, "Q"),
    "segments_sent": (136, "I"),
    "segments_received": (140, "I"),
    "not_sent_bytes": (144, "I"),
    "minimum_round_trip_us": (148, "I"),
    "data_segments_sent": (156, "I"),
    "delivery_rate_bytes_per_second": (160, "Q"),
    "busy_us": (168, "Q"),
    "receive_window_limited_us": (176, "Q"),
    "send_buffer_limited_us": (184, "Q"),
    "bytes_sent": (200, "Q"),
    "retransmitted_bytes": (208, "Q"),
}
"""Of struct tcp_info, from the kernel's include/uapi/linux/tcp.h."""
LEAST_INFO_BYTES = 216
COUNTERS = {
    "tx_bytes": "bytes_sent",
    "rx_bytes": "bytes_received",
    "acked_bytes": "bytes_acked",
    "retransmitted_bytes": "retransmitted_bytes",
    "retransmitted_segments": "retransmitted_segments",
    "data_segments": "data_segments_sent",
    "busy_us": "busy_us",
    "receive_window_limited_us": "receive_window_limited_us",
    "send_buffer_limited_us": "send_buffer_limited_us",
    "segments_sent": "segments_sent",
    "segments_received": "segments_received",
}


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """One connection as the kernel tells it."""

    bytes_sent: int = 0
    bytes_acked: int = 0
    bytes_received: int = 0
    retransmitted_bytes: int = 0
    retransmitted_segments: int = 0
    data_segments_sent: int = 0
    busy_us: int = 0
    receive_window_limited_us: int = 0
    send_buffer_limited_us: int = 0
    round_trip_us: int = 0
    round_trip_deviation_us: int = 0
    minimum_round_trip_us: int = 0
    delivery_rate_bytes_per_second: int = 0
    unacknowledged_segments: int = 0
    not_sent_bytes: int = 0
    last_sent_ms: int = 0
    last_acknowledged_ms: int = 0
    segments_sent: int = 0
    segments_received: int = 0
    options: int = 0
    unanswered_retransmissions: int = 0
    unanswered_probes: int = 0
    application_limited: bool = False

    def packed(self, size: int = 248) -> bytes:
        """As struct tcp_info of so many bytes."""
        data = bytearray(max(size, LEAST_INFO_BYTES))
        for name, (offset, form) in OFFSETS.items():
            struct.pack_into(f"={form}", data, offset, getattr(self, name))
        data[7] = int(self.application_limited) | 0x06
        return bytes(data[:size])


@dataclass(frozen=True, slots=True)
class Socket:
    """One listed socket."""

    inode: int
    cookie: int
    local: bytes
    interface: int
    attributes: bytes

    def info(self) -> TcpInfo:
        """Raises ValueError where it was not told."""
        data = next((value for kind, value in attributes(memoryview(self.attributes)) if kind == 2), memoryview(b""))
        if len(data) < LEAST_INFO_BYTES:
            raise ValueError(f"tcp_info of {len(data)} bytes, expected at least {LEAST_INFO_BYTES}")
        told = {
            field.name: struct.unpack_from("=" + OFFSETS[field.name][1], data, OFFSETS[field.name][0])[0]
            for field in fields(TcpInfo)
            if field.name in OFFSETS
        }
        return TcpInfo(**told, application_limited=bool(data[7] & 1))


def sockets_of(datagrams: Iterable[bytes]) -> list[Socket]:
    """The sockets in an answer."""
    found = []
    for data in datagrams:
        for kind, _flags, _sequence, payload in messages(data):
            if kind != 18:
                continue
            if len(payload) < 72:
                raise MalformedNetlink(f"netlink: a socket of {len(payload)} bytes, expected 72")
            address = bytes(payload[8:24])
            local = address[:4] if payload[0] == socket.AF_INET else plain_address(address)
            interface, low, high = struct.unpack_from("=III", payload, 40)
            (inode,) = struct.unpack_from("=I", payload, 68)
            found.append(Socket(inode, high << 32 | low, local, interface, bytes(payload[72:])))
    return found


@dataclass(slots=True)
class _Connection:
    device: str
    info: TcpInfo


class Accounts:
    """Adds up connections by device."""

    def __init__(self) -> None:
        self.connections: dict[int, _Connection] = {}
        self.left: dict[int, _Connection] = {}
        self.first: dict[int, TcpInfo] | None = None
        self.totals: dict[str, dict[str, int]] = {}
        self.last: tuple[DeviceConnections, ...] = ()

    def take(
        self,
        devices: Sequence[str],
        sockets: Sequence[Socket],
        owners: Collection[int],
        names: Mapping[int, str],
        places: Mapping[bytes, str],
    ) -> list[DeviceFailure]:
        """Every socket that there is now; returns what could not be counted."""
        failed = []
        found = []
        for listed in sockets:
            device = names.get(listed.interface) or places.get(listed.local)
            if device is not None and not listed.inode:  # closed by its process
                known = self.left.get(listed.cookie) or self.connections.get(listed.cookie)
                device = known.device if known is not None else None
            elif listed.inode not in owners:
                continue
            if device is not None:
                found.append((device, listed))
        if len(found) > MAXIMUM_CONNECTIONS:
            beyond = f"{len(found) - MAXIMUM_CONNECTIONS} beyond {MAXIMUM_CONNECTIONS} are not counted"
            failed.append(DeviceFailure("connections", beyond))
        if self.first is None:
            self.first = {listed.cookie: _info_or_nothing(listed) for listed in reversed(sockets)}
        first = self.first
        now: dict[int, _Connection] = {}
        infos: dict[str, list[TcpInfo]] = {device: [] for device in devices}
        for device, listed in found[:MAXIMUM_CONNECTIONS]:
            if listed.cookie in now:
                continue
            try:
                info = listed.info()
            except ValueError as error:
                failure = DeviceFailure(device, str(error))
                if failure not in failed:
                    failed.append(failure)
                continue
            infos[device].append(info)
            now[listed.cookie] = _Connection(device, info)
            before = self.connections.get(listed.cookie) or self.left.pop(listed.cookie, None)
            began = before.info if before is not None else first.pop(listed.cookie, TcpInfo())
            self._add(device, listed, began, info)
        for cookie in self.connections.keys() - now.keys():
            self.left[cookie] = self.connections[cookie]
        self.connections = now
        self.last = tuple(_fare(device, members) for device, members in infos.items())
        return failed

    def of(self, device: str) -> dict[str, int]:
        """ACCOUNT_FIELDS of a device."""
        return self.totals.setdefault(device, dict.fromkeys(ACCOUNT_FIELDS, 0))

    def _add(self, device: str, listed: Socket, before: TcpInfo, now: TcpInfo) -> None:
        total = self.of(device)
        header_bytes = 14 + 20 + (20 if len(listed.local) == 4 else 40) + (12 if now.options & 1 else 0)
        for name, source in COUNTERS.items():
            more = getattr(now, source) - getattr(before, source)
            more = more % 2**32 if "segments" in name else max(0, more)
            total[name] += more
            if name == "segments_sent":
                total["header_bytes_sent"] += more * header_bytes
            if name == "segments_received":
                total["header_bytes_received"] += more * header_bytes


def _info_or_nothing(listed: Socket) -> TcpInfo:
    try:
        return listed.info()
    except ValueError:
        return TcpInfo()


def _fare(device: str, infos: Sequence[TcpInfo]) -> DeviceConnections:
    sending = [
        info
        for info in infos
        if info.unacknowledged_segments
        or info.not_sent_bytes
        or (info.data_segments_sent and info.last_sent_ms <= 1000)
    ]
    timed = [info for info in sending if info.round_trip_us]
    rated = [info for info in sending if info.delivery_rate_bytes_per_second]
    return DeviceConnections(
        device=device,
        connections=len(infos),
        sending=len(sending),
        round_trip_mean_us=sum(info.round_trip_us for info in timed) / len(timed) if timed else None,
        round_trip_maximum_us=max((info.round_trip_us for info in timed), default=None),
        round_trip_deviation_us=sum(info.round_trip_deviation_us for info in timed) / len(timed) if timed else None,
        delivery_rate_bytes_per_second=sum(info.delivery_rate_bytes_per_second for info in rated) if rated else None,
        application_limited=sum(info.application_limited for info in rated),
        unacknowledged_segments=sum(info.unacknowledged_segments for info in infos),
        not_sent_bytes=sum(info.not_sent_bytes for info in infos),
    )
