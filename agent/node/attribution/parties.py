"""Whose a TCP connection is: by the process that holds its socket, what that maps, and how it waits for the socket.

A process of a job maps several communication libraries, and nobody tells which of them opened a socket.  It is known:

* NCCL reads its sockets again and again, and never waits for them with epoll(7) (transport/net_socket.cc).  UCX, Gloo
  and Mooncake do (uct/tcp, gloo/transport/tcp/loop.cc, asio), and give epoll a pointer along to know a socket again.
  Event loops of languages (asyncio, libuv) give the number of its descriptor, as libevent does, which Open MPI uses.
* A library that sends through another one owns the bytes: NIXL and MPI through UCX.
* Gloo comes with every PyTorch: that a process maps it says little where there is another library.

Where two libraries are left, it is `unknown`, and where none is, of no library.  A socket that no process holds is the
kernel's own; it is storage if one of its ports is that of a protocol of storage.

Sources: the files named, and the registry of ports (NFS 2049, iSCSI 3260, NVMe/TCP 4420 and 8009, Lustre 988, Ceph 3300
and 6789).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.netdev.connection_accounts import Party
from railscope.probes.processes.socket_owners import Holder, Polled

STORAGE_PORTS: Final = frozenset({988, 2049, 3260, 3300, 4420, 6789, 8009})
_BELOW: Final = {
    CommunicationLibrary.NIXL: CommunicationLibrary.UCX,
    CommunicationLibrary.MPI: CommunicationLibrary.UCX,
    CommunicationLibrary.NVSHMEM: CommunicationLibrary.UCX,
}
_OWN: Final = "own_"
_OWN_PARTIES: Final = frozenset({TrafficOwner.NCCL, TrafficOwner.TCP_OTHER, TrafficOwner.UNKNOWN})

Mapped = frozenset[CommunicationLibrary]


class Unlooked(Enum):
    """Why it is not known what a process maps."""

    YET = "yet"
    """It is going to be looked at."""
    NEVER = "never"
    """It is none of those that this agent looks at, or has gone."""


MappedBy = Callable[[int], Mapped | Unlooked]
"""What a process maps, by pid."""


def not_looked_at(pid: int) -> Unlooked:
    """A `MappedBy` of who looks at no process."""
    del pid
    return Unlooked.NEVER


class Parties:
    """Names those whose connections are added up apart.  Safe from any thread as far as `mapped_by` is."""

    def __init__(self, mapped_by: MappedBy) -> None:
        self._mapped_by = mapped_by

    def party_of(self, holder: Holder, observed: bool, ports: tuple[int, int]) -> Party | None:
        """See `railscope.probes.netdev.tcp_counters.PartyOf`."""
        if holder.pid is None:
            return party(TrafficOwner.STORAGE if STORAGE_PORTS.intersection(ports) else TrafficOwner.TCP_OTHER)
        mapped = self._mapped_by(holder.pid)
        if mapped is Unlooked.YET:
            return None
        if isinstance(mapped, Unlooked):
            return party(TrafficOwner.UNKNOWN, observed=observed)
        return party(owner_of(mapped, holder.polled), observed=observed)


def party(owner: TrafficOwner, *, observed: bool = False) -> Party:
    """What connections of an owner are added up as; of processes that map NCCL apart from others' (`observed`)."""
    own = observed and owner in _OWN_PARTIES
    return Party(f"{_OWN}{owner.value}" if own else owner.value, observed)


def owner_of_party(name: str) -> tuple[TrafficOwner, bool]:
    """(owner, whether it is a part of what observed processes carry that is no other library's)."""
    return TrafficOwner(name.removeprefix(_OWN)), name.startswith(_OWN)


def owner_of(mapped: Mapped, polled: Polled) -> TrafficOwner:
    """Whose a socket is that a process holds which maps these libraries."""
    nccl = CommunicationLibrary.NCCL in mapped
    if nccl and polled is Polled.NOT:
        return TrafficOwner.NCCL
    others = libraries_above(mapped) - {CommunicationLibrary.NCCL}
    if others != {CommunicationLibrary.GLOO}:
        others -= {CommunicationLibrary.GLOO}
    elif nccl:
        return TrafficOwner.TCP_OTHER if polled is Polled.BY_NUMBER else TrafficOwner.UNKNOWN
    mpi = CommunicationLibrary.MPI in others
    if not others or (polled is Polled.BY_NUMBER and not mpi):
        return TrafficOwner.TCP_OTHER
    if len(others) > 1 or (nccl and mpi and polled is Polled.BY_NUMBER):
        return TrafficOwner.UNKNOWN
    return TrafficOwner(next(iter(others)).value)


def libraries_above(mapped: Mapped) -> Mapped:
    """Without those that another one sends through, which owns the bytes."""
    return mapped - {below for above, below in _BELOW.items() if above in mapped}
