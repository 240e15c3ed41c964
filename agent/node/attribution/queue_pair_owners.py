"""Whose the bytes of RDMA ports are, as far as queue pairs tell.

A port counts all bytes together.  Two things tell whose they are besides collectives':

* Counters that somebody has bound to queue pairs (`rdma statistic qp`), where the driver counts bytes in them (mlx5
  with optional counters, Linux 6.15).  They are the bytes of who made these queue pairs.
* Who has connected queue pairs there at all.  Where one owner has them all, what else the port counted is that owner's.

A process that maps several libraries may be any of them.  The kernel's own queue pairs are storage's where they are of
its protocols; those of IP over InfiniBand carry anybody's packets.  Queue pairs that a program made past the kernel
(DevX, as GIN and IBGDA do) are in no list.

Queue pairs are read seldom (agent/node/fabric/queue_pairs.py): who came since the last time is not known yet.

Soft-RoCE counts no bytes (Linux 6.1 and 6.12): its ports have packets alone, no counter can be bound to one of its
queue pairs, and where all of a process are to be counted, none is.  Whose queue pairs are is known there, and of bytes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.hardware import BoundCounterFacts, NodeQueuePairs, QueuePairFacts
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.node.attribution.ledger import HeaderSizes, Sockets
from railscope.agent.node.attribution.parties import STORAGE_PORTS, MappedBy, Unlooked, libraries_above
from railscope.probes.libraries.communication import CommunicationLibrary

Owners = frozenset[TrafficOwner]

NOBODY_KNOWS: Final[Owners] = frozenset({TrafficOwner.UNKNOWN})
_CARRIES_DATA: Final = frozenset({"RTR", "RTS", "SQD"})
_MANAGEMENT: Final = frozenset({"SMI", "GSI"})
_STORAGE_USERS: Final = frozenset(
    {
        *("nvme_rdma", "nvmet_rdma", "rpcrdma", "ib_iser", "ib_isert", "ib_srp", "ib_srpt", "ko2iblnd"),
        *("rtrs_client", "rtrs_server", "ksmbd", "cifs"),
    }
)
"""Modules of the kernel that make queue pairs for storage."""
_RDMA_CM: Final = "rdma_cm"
"""As which the kernel names those that rdma_create_qp() made for any module."""
_STORAGE_SERVICES: Final = STORAGE_PORTS | {20_049}
"""NFS over RDMA has a port of its own."""
_IPOIB: Final = "ib_ipoib"
_COLUMNS: Final = (
    *(("rdma_tx_bytes", "tx_bytes"), ("rdma_tx_packets", "tx_pkts")),
    *(("rdma_rx_bytes", "rx_bytes"), ("rdma_rx_packets", "rx_pkts")),
)
"""Bytes and packets sent, bytes and packets received, by driver."""
_BYTES: Final = frozenset(name for names in (_COLUMNS[0], _COLUMNS[2]) for name in names)
MOST_LOOKS: Final = 5
"""After a reading: processes that came with it have been looked at by then, or their user has far too many."""
MOST_ABSENT: Final = 1024
"""Bound counters that are remembered though the last reading lacked them, the latest ones."""


@dataclass(frozen=True, slots=True)
class PortClaims:
    """What queue pairs tell of a port; totals never fall."""

    claimants: Owners
    """Who may have moved what nothing else explains."""
    sent: Mapping[TrafficOwner, Sockets] = field(default_factory=dict)
    """As bound counters have it; what a queue pair sent counts like what a connection did."""
    received: Mapping[TrafficOwner, Sockets] = field(default_factory=dict)
    counted: bool = False
    """Whether counters that are bound there count bytes: what they do comes with the next reading."""
    read_ns: int | None = None
    """When queue pairs were read last; None: never."""


NO_CLAIMS: Final = PortClaims(NOBODY_KNOWS)

_Port = tuple[str, int]
_Counter = tuple[str, int, int]
"""Device, port and number."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a bound counter had when it was read last."""

    values: tuple[int, ...]
    """As _COLUMNS."""
    queue_pairs: frozenset[int]

    def growth(self, before: _Counted | None, *, absent: bool) -> tuple[int, ...]:
        """What it counted since `before`; of a new one all, also where that had the same number.

        Drivers give numbers again.  A number that was gone meanwhile (`absent`) is the same counter's where that still
        counts one of its queue pairs: a reading may lack one that is there.
        """
        if before is None or (absent and self.queue_pairs.isdisjoint(before.queue_pairs)):
            return self.values
        more = tuple(new - old for new, old in zip(self.values, before.values, strict=True))
        return self.values if min(more) < 0 else more


class QueuePairOwners:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, mapped_by: MappedBy, *, sees_everyone: Callable[[], bool]) -> None:
        """`sees_everyone`: whether the kernel shows us the queue pairs of all processes, and not only a container's."""
        self._mapped_by = mapped_by
        self._sees_everyone = sees_everyone
        self._read_ns: int | None = None
        self._claimants: dict[_Port, Owners] = {}
        self._of_device: dict[str, Owners] = {}
        """Of queue pairs that are tied to no port."""
        self._hidden = False
        self.owners: Mapping[tuple[str, int], Owners] = {}
        """Who may have moved what a queue pair carried, by device and number, of the last reading."""
        self._looks_left = 0
        """How often it is asked again whose the queue pairs of the last reading are."""
        self._counters: dict[_Counter, _Counted] = {}
        """At the last reading."""
        self._absent: dict[_Counter, _Counted] = {}
        """Those that it lacked; who was lacking longest comes first."""
        self._totals: dict[tuple[str, int, TrafficOwner], list[int]] = {}
        """As _COLUMNS."""
        self._counted: frozenset[_Port] = frozenset()

    def update(self, found: NodeQueuePairs) -> None:
        """Take a reading, once; whose its queue pairs are is asked again while processes are going to be looked at."""
        again = found.read_ns == self._read_ns
        if found.read_ns is None or (again and not self._looks_left):
            return
        first, self._read_ns = self._read_ns is None, found.read_ns
        self._looks_left = self._looks_left - 1 if again else MOST_LOOKS
        self._hidden = found.left_out > 0 or not self._sees_everyone()
        # A process may have made thousands, and to ask about it may read /proc.
        pids = {one.pid for one in found.queue_pairs if one.pid is not None}
        mapped = {pid: self._mapped_by(pid) for pid in pids}
        if Unlooked.YET not in mapped.values():
            self._looks_left = 0
        of_process = {
            pid: NOBODY_KNOWS if isinstance(one, Unlooked) else owners_of_queue_pairs(one)
            for pid, one in mapped.items()
        }
        owners = {(one.device, one.number): _owners_of(one, of_process) for one in found.queue_pairs}
        claimants: dict[_Port, Owners] = {}
        of_device: dict[str, Owners] = {}
        for pair in found.queue_pairs:
            if pair.state not in _CARRIES_DATA or pair.kind in _MANAGEMENT:
                continue
            mine = owners[pair.device, pair.number]
            if pair.port is None:
                of_device[pair.device] = of_device.get(pair.device, frozenset()) | mine
            else:
                port = pair.device, pair.port
                claimants[port] = claimants.get(port, frozenset()) | mine
        self._claimants, self._of_device, self.owners = claimants, of_device, owners
        if not again:
            self._count(found.bound, owners, first=first)

    def claims(self, device: str, port: int, headers: HeaderSizes) -> PortClaims:
        """What is known of a port, where a packet has such headers."""
        if self._read_ns is None:
            return NO_CLAIMS
        claimants = self._claimants.get((device, port), frozenset()) | self._of_device.get(device, frozenset())
        if self._hidden or not claimants:
            claimants |= NOBODY_KNOWS
        sent: dict[TrafficOwner, Sockets] = {}
        received: dict[TrafficOwner, Sockets] = {}
        for (one, number, owner), totals in self._totals.items():
            if (one, number) == (device, port):
                sent[owner] = _like_sockets(totals[0], totals[1], headers)
                received[owner] = _like_sockets(totals[2], totals[3], headers)
        return PortClaims(claimants, sent, received, (device, port) in self._counted, self._read_ns)

    def _count(
        self, bound: Sequence[BoundCounterFacts], owners: Mapping[tuple[str, int], Owners], *, first: bool
    ) -> None:
        """Add up what bound counters counted since the last reading; of the first one it is not known since when."""
        counters: dict[_Counter, _Counted] = {}
        counted: set[_Port] = set()
        for one in bound:
            told = dict(one.counters)
            if _BYTES.isdisjoint(told):
                continue
            counted.add((one.device, one.port))
            values = tuple(next((told[name] for name in names if name in told), 0) for names in _COLUMNS)
            key = one.device, one.port, one.number
            now = counters[key] = _Counted(values, frozenset(one.queue_pairs))
            if first:
                continue
            whose: Owners = frozenset()
            for number in one.queue_pairs:
                whose |= owners.get((one.device, number), NOBODY_KNOWS)
            owner = next(iter(whose)) if len(whose) == 1 else TrafficOwner.UNKNOWN
            totals = self._totals.setdefault((one.device, one.port, owner), [0] * len(values))
            absent = self._absent.get(key)
            for place, more in enumerate(now.growth(absent or self._counters.get(key), absent=absent is not None)):
                totals[place] += more
        lacking = {**self._absent, **self._counters}
        self._absent = {key: lacking[key] for key in [key for key in lacking if key not in counters][-MOST_ABSENT:]}
        self._counters, self._counted = counters, frozenset(counted)


def _owners_of(pair: QueuePairFacts, of_process: Mapping[int, Owners]) -> Owners:
    if pair.kernel_user == _IPOIB:
        return NOBODY_KNOWS
    if pair.kernel_user:
        storage = pair.kernel_user in _STORAGE_USERS or (
            pair.kernel_user == _RDMA_CM and not _STORAGE_SERVICES.isdisjoint(pair.services)
        )
        return frozenset({TrafficOwner.STORAGE if storage else TrafficOwner.RDMA_OTHER})
    return NOBODY_KNOWS if pair.pid is None else of_process[pair.pid]


def owners_of_queue_pairs(mapped: frozenset[CommunicationLibrary]) -> Owners:
    """Which owners a process may be that maps these libraries and has made queue pairs.

    Gloo, which comes with every PyTorch, makes none where another library is.
    """
    found = libraries_above(mapped)
    if found != {CommunicationLibrary.GLOO}:
        found -= {CommunicationLibrary.GLOO}
    return frozenset(TrafficOwner(one.value) for one in found) or frozenset({TrafficOwner.RDMA_OTHER})


def _like_sockets(count: int, packets: int, headers: HeaderSizes) -> Sockets:
    """Bytes of packets as a device counts them, headers included."""
    header_bytes = min(count, packets * headers.usual)
    return Sockets(count - header_bytes, 0, packets, header_bytes, 0)
