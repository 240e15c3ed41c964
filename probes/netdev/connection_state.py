"""How the TCP connections of given processes stand right now, one by one: asked when something is suspected.

The counters of probes/netdev/tcp_counters.py tell how a rail does over time; this tells which process's connections
wait for what: for an answer of the network (retransmissions that nobody acknowledges), for the peer (a closed window),
or for nothing (all is acknowledged: this side waits to receive).

Collectives connect ports that the kernel chose, at both ends.  A connection with a port of another kind leads to some
service (storage, a web server, a job's rendezvous) and is left out: it may lie closed or unread for days.

Source: `struct tcp_info`, Linux include/uapi/linux/tcp.h; sock_diag(7); ip_local_port_range in ip(7).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from probes.clock import Clock
from probes.netdev.addresses import read_addresses
from probes.netdev.links import read_links
from probes.netdev.netlink import NetlinkSocket, attributes
from probes.netdev.tcp_info import NETLINK_SOCK_DIAG, TcpSocket, read_sockets
from probes.socket_owners import SocketOwners

MOST_CONNECTIONS: Final = 4096
_INET_DIAG_INFO: Final = 2
_CLOSE_WAIT: Final = 8
_TIMER_PERSIST: Final = 4
_USUAL_PORTS: Final = (32768, 60999)
"""Linux' own choice, where the file that tells cannot be read."""
_NO_ACCIDENT: Final = 2
"""Vain attempts: the first segment that is sent again comes after 0.2 s, and one may get lost at any time."""
_FIELDS: Final = {
    "unanswered_retransmissions": (2, "u1"),
    "unanswered_probes": (3, "u1"),
    "unacknowledged_segments": (24, "u4"),
    "last_acknowledged_ms": (56, "u4"),
    "round_trip_us": (68, "u4"),
    "round_trip_deviation_us": (72, "u4"),
    "bytes_acked": (120, "u8"),
    "bytes_received": (128, "u8"),
    "not_sent_bytes": (144, "u4"),
    "minimum_round_trip_us": (148, "u4"),
    "busy_us": (168, "u8"),
    "receive_window_limited_us": (176, "u8"),
    "bytes_sent": (200, "u8"),
    "retransmitted_bytes": (208, "u8"),
    "peer_window_bytes": (228, "u4"),
}
"""Offsets in struct tcp_info; the last field came with Linux 5.4."""
_LEAST_BYTES: Final = 216
_INFO: Final = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [form for _, form in _FIELDS.values()],
        "offsets": [offset for offset, _ in _FIELDS.values()],
        "itemsize": 232,
    }
)


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """One TCP connection at one moment; the counters since it was opened."""

    pid: int
    device: str
    cookie: int
    """The kernel's number for the socket, never used again."""
    peer_closed: bool
    probing: bool
    """Its timer is the one of a peer that takes nothing."""
    unread_bytes: int
    """Received, and not read by the process."""
    unanswered_retransmissions: int
    """Of the oldest segment: how often it was sent again without an answer."""
    unanswered_probes: int
    """How often the peer was asked in vain whether it takes more."""
    unacknowledged_segments: int
    last_acknowledged_ms: int
    """Time since the peer acknowledged anything."""
    round_trip_us: int
    """Smoothed; 0: not measured yet."""
    round_trip_deviation_us: int
    """Mean deviation from it, smoothed as well."""
    bytes_acked: int
    bytes_received: int
    not_sent_bytes: int
    minimum_round_trip_us: int
    busy_us: int
    """Time with data under way."""
    receive_window_limited_us: int
    """Of that, waiting because the peer did not read fast enough."""
    bytes_sent: int
    """Retransmissions included."""
    retransmitted_bytes: int
    peer_window_bytes: int
    """What the peer said it would take."""

    @property
    def unanswered(self) -> bool:
        """Whether the network, and not the peer's process, keeps it waiting.

        A peer whose process does not read goes on acknowledging and closes its window.  Where the window is open and
        nothing is under way, this host's own sends fail: its link is down, or a filter drops them.
        """
        if self.unacknowledged_segments:
            return self.unanswered_retransmissions >= _NO_ACCIDENT
        vain = self.probing and self.unanswered_probes >= _NO_ACCIDENT
        return vain and self.not_sent_bytes > 0 and self.peer_window_bytes > 0

    @property
    def moved_bytes(self) -> int:
        """What came to the other side for sure, and what came from it."""
        return self.bytes_acked + self.bytes_received


class ProcessConnections:
    """Asks the kernel of one network namespace, that of the thread which makes it."""

    def __init__(self, clock: Clock, procfs: Path) -> None:
        """
        Raises:
            OSError: the kernel refuses a socket.
        """
        self._owners = SocketOwners(procfs, clock)
        self._lowest_port, self._highest_port = _chosen_ports(procfs)
        self._route = NetlinkSocket()
        try:
            self._diag = NetlinkSocket(protocol=NETLINK_SOCK_DIAG)
        except OSError:
            self._route.close()
            raise

    def read(self, pids: Collection[int]) -> tuple[ConnectionState, ...]:
        """Connections of these processes, with ports that the kernel chose, on any device but the loopback.

        Raises:
            OSError: the kernel refuses.
        """
        names = {link.index: link.name for link in read_links(self._route).values() if link.name != "lo"}
        places = {local.address: names[local.index] for local in read_addresses(self._route) if local.index in names}
        if not places:
            return ()
        lowest, highest = self._lowest_port, self._highest_port
        sockets = [
            socket
            for socket in read_sockets(self._diag, list(places))
            if all(lowest <= port <= highest for port in socket.ports)
        ][:MOST_CONNECTIONS]
        owners = self._owners.owners(pids, (socket.inode for socket in sockets))
        found = []
        for socket in sockets:
            pid = owners.get(socket.inode)
            device = names.get(socket.interface) or places.get(socket.local)
            if pid is not None and device is not None and (state := _state(pid, device, socket)) is not None:
                found.append(state)
        return tuple(found)

    def close(self) -> None:
        self._route.close()
        self._diag.close()


def _chosen_ports(procfs: Path) -> tuple[int, int]:
    """The range that the kernel takes ports from, in the network namespace of the calling thread."""
    lowest, highest = _USUAL_PORTS
    try:
        text = (procfs / "sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return _USUAL_PORTS
    own = [int(word) for word in text.split()]
    # The other end has a range of its own.
    return min(lowest, *own), max(highest, *own)


def _state(pid: int, device: str, socket: TcpSocket) -> ConnectionState | None:
    """None: the kernel told too little (before Linux 4.19)."""
    info = next((data for kind, data in attributes(memoryview(socket.attributes)) if kind == _INET_DIAG_INFO), b"")
    if len(info) < _LEAST_BYTES:
        return None
    # An older kernel does not tell the peer's window: none of its probes is then taken for a failure of ours.
    fields = np.frombuffer(bytes(info).ljust(_INFO.itemsize, b"\0"), dtype=_INFO, count=1)[0].item()
    return ConnectionState(
        pid,
        device,
        socket.cookie,
        socket.state == _CLOSE_WAIT,
        socket.timer == _TIMER_PERSIST,
        socket.unread_bytes,
        *fields,
    )
