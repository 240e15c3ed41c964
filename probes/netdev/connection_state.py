"""Reads the TCP connections of given processes one by one, on demand for a suspect.

The counters of probes/netdev/tcp_counters.py tell how a rail does over time; this tells which process's connections
wait for what: for an answer of the network (retransmissions without acknowledgement), for the peer (a closed window),
or for nothing (all is acknowledged: this side waits to receive).

Collectives connect ports that the kernel chose, at both ends.  A connection with a port of another kind leads to some
service (storage, a web server, a job's rendezvous) and is left out: it may lie closed or unread for days.  What is sent
there is summed up, as a checkpoint may go to storage that way.

Source: `struct tcp_info`, Linux include/uapi/linux/tcp.h; sock_diag(7); ip_local_port_range in ip(7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.probes.clock import Clock
from railscope.probes.netdev.addresses import MOST_TABLE_BYTES, read_addresses
from railscope.probes.netdev.links import read_links
from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket
from railscope.probes.netdev.tcp_info import NETLINK_SOCK_DIAG, Rows, local_addresses, read_table
from railscope.probes.processes.socket_owners import SocketOwners
from railscope.probes.shares import shared_out

MOST_CONNECTIONS: Final = 4096
"""That are looked at; of more as many of each user, as the kernel lists those of the whole namespace."""
_CLOSE_WAIT: Final = 8
_TIMER_PERSIST: Final = 4
_USUAL_PORTS: Final = (32768, 60999)
"""Linux' own choice, where the file that tells cannot be read."""
_NO_ACCIDENT: Final = 2
"""Vain attempts: the first segment that is sent again comes after 0.2 s, and one may get lost at any time."""
_FIELDS: Final = [
    "unanswered_retransmissions",
    "unanswered_probes",
    "unacknowledged_segments",
    "last_acknowledged_ms",
    "round_trip_us",
    "round_trip_deviation_us",
    "bytes_acked",
    "bytes_received",
    "not_sent_bytes",
    "minimum_round_trip_us",
    "busy_us",
    "receive_window_limited_us",
    "bytes_sent",
    "retransmitted_bytes",
    "peer_window_bytes",
    "segment_bytes",
    "arrived_beyond_segments",
]
"""The last ones of `ConnectionState`, as a `TcpTable` calls them.  Before Linux 5.4 the peer's window is not told: no
probe is then taken for a failure of ours."""


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
    segment_bytes: int
    """The longest segment that it sends, payload alone."""
    arrived_beyond_segments: int
    """Of those that are not acknowledged, what the peer has received behind the missing one."""

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
    def only_small_arrive(self) -> bool:
        """Whether the path drops a full segment again and again, and lets what is behind it through.

        A path that loses any packet alike would have to lose the same one each time.
        """
        return self.unanswered and self.unacknowledged_segments > self.arrived_beyond_segments > 0

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
        self._acknowledged: dict[int, int] = {}
        """By cookie, of connections to services, as read last."""
        self._asked: frozenset[int] = frozenset()
        """Pids at the last reading."""
        self.sent_to_services: Counter[int] = Counter()
        """By pid: bytes that services acknowledged since it was first asked about."""
        self._route = NetlinkSocket(most_bytes=MOST_TABLE_BYTES)
        try:
            self._diag = NetlinkSocket(protocol=NETLINK_SOCK_DIAG)
        except OSError:
            self._route.close()
            raise

    def read(self, pids: Collection[int], parents: Mapping[int, int]) -> tuple[ConnectionState, ...]:
        """Connections of these processes, with ports that the kernel chose, on any device but the loopback.

        Args:
            pids: of processes.
            parents: by pid of a descendant, which of them it belongs to: who is forked holds its parent's sockets.

        Raises:
            OSError: the kernel refuses.
        """
        names = {link.index: link.name for link in read_links(self._route).values() if link.name != "lo"}
        places = {local.address: names[local.index] for local in read_addresses(self._route) if local.index in names}
        if not places:
            return ()
        table = read_table(self._diag, list(places))
        ports = table.rows["ports"]
        between = ((ports >= self._lowest_port) & (ports <= self._highest_port)).all(axis=1)
        chosen = _some(table.rows, np.flatnonzero(between))
        services = table.rows[_some(table.rows, np.flatnonzero(~between))]
        rows = table.rows[chosen]
        inodes = rows["inode"].tolist()
        holders = self._owners.owners({*pids, *parents}, [*inodes, *services["inode"].tolist()])
        owners = {inode: parents.get(pid, pid) for inode, pid in holders.items()}
        self._sum_up_services(services, owners, frozenset(pids))
        found = []
        for place, (inode, interface, address) in enumerate(
            zip(inodes, rows["interface"].tolist(), local_addresses(rows), strict=True)
        ):
            pid = owners.get(inode)
            device = names.get(interface) or places.get(address)
            if pid is None or device is None:
                continue
            untold = table.untold.get(int(chosen[place]))
            if untold is None:
                found.append(_state(pid, device, rows[place]))
            elif isinstance(untold, MalformedNetlink):
                raise untold  # otherwise the kernel told too little (before Linux 4.19)
        return tuple(found)

    def _sum_up_services(self, rows: Rows, owners: Mapping[int, int], pids: frozenset[int]) -> None:
        now = {}
        columns = (rows[name].tolist() for name in ("inode", "cookie", "bytes_acked"))
        for inode, cookie, acknowledged in zip(*columns, strict=True):
            pid = owners.get(inode)
            if pid is None:
                continue
            # What is new of a process that was asked about before was opened since.
            before = self._acknowledged.get(cookie, 0 if pid in self._asked else acknowledged)
            self.sent_to_services[pid] += max(0, acknowledged - before)
            now[cookie] = acknowledged
        self._acknowledged, self._asked = now, pids

    def close(self) -> None:
        self._route.close()
        self._diag.close()


def _some(rows: Rows, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """No more of these rows than are looked at."""
    if len(places) <= MOST_CONNECTIONS:
        return places
    return places[shared_out(rows["user"][places], MOST_CONNECTIONS)]


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


def _state(pid: int, device: str, row: np.void) -> ConnectionState:
    """One row of a `TcpTable`."""
    peer_closed = bool(row["state"] == _CLOSE_WAIT)
    return ConnectionState(
        pid,
        device,
        int(row["cookie"]),
        peer_closed,
        bool(row["timer"] == _TIMER_PERSIST),
        # The end of the peer's data takes a place in the sequence, and the kernel counts it among what is not read.
        max(0, int(row["unread_bytes"]) - peer_closed),
        *row[_FIELDS].item(),
    )
