"""The TCP connections of one process with both of their ends, and which of them wait for the other one.

Asked for a process that is suspected, and seldom.  A connection waits where data lies in its socket that the other side
has not acknowledged or taken.  Source: sock_diag(7); struct tcp_info in the kernel's include/uapi/linux/tcp.h.
"""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket
from railscope.probes.netdev.tcp_info import (
    NETLINK_SOCK_DIAG,
    Rows,
    local_addresses,
    read_table,
    remote_addresses,
)
from railscope.probes.processes.namespaces import NamespaceError, NetworkNamespace, run_inside
from railscope.probes.processes.socket_owners import socket_inodes

MOST_CONNECTIONS: Final = 1024
"""Of one process that are looked at."""


@dataclass(frozen=True, slots=True)
class End:
    """One end of a TCP connection."""

    address: bytes
    """4 bytes of IPv4, or 16 of IPv6."""
    port: int

    def __str__(self) -> str:
        if len(self.address) == 4:
            return f"{socket.inet_ntop(socket.AF_INET, self.address)}:{self.port}"
        return f"[{socket.inet_ntop(socket.AF_INET6, self.address)}]:{self.port}"


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection of a process, and what its other end owes."""

    local: End
    remote: End
    unsent_bytes: int
    """Given to the socket, and not sent yet."""
    unacknowledged_segments: int
    peer_window_bytes: int
    """What the other end said it would take; 0: nothing, or the kernel does not tell."""

    @property
    def waits(self) -> bool:
        """Whether the other end has not taken all of what was given to it."""
        return self.unsent_bytes > 0 or self.unacknowledged_segments > 0


def read_connections(procfs: Path, pid: int, namespace: NetworkNamespace) -> tuple[Connection, ...]:
    """Connections of a process, those first that have most to send; empty: none, or they cannot be read."""
    try:
        inodes = socket_inodes(procfs, pid)
        rows = run_inside(namespace, _read)
    except (OSError, NamespaceError, MalformedNetlink):
        return ()
    own = rows[np.isin(rows["inode"], np.array(sorted(inodes), np.uint32))][:MOST_CONNECTIONS]
    connections = [
        Connection(End(local, ports[0]), End(remote, ports[1]), unsent, unacknowledged, window)
        for local, remote, ports, unsent, unacknowledged, window in zip(
            local_addresses(own),
            remote_addresses(own),
            own["ports"].tolist(),
            own["not_sent_bytes"].tolist(),
            own["unacknowledged_segments"].tolist(),
            own["peer_window_bytes"].tolist(),
            strict=True,
        )
    ]
    return tuple(sorted(connections, key=lambda one: (not one.waits, -one.unsent_bytes)))


def _read() -> Rows:
    with closing(NetlinkSocket(protocol=NETLINK_SOCK_DIAG)) as netlink:
        return read_table(netlink, ()).rows
