"""One watched network namespace: which processes live there, and what they and its past say of its rails.

NCCL_SOCKET_IFNAME of a process counts from when it is known until shortly after the process's end, while its last bytes
are read; of more settings than a namespace may have, those count that `share_settings` leaves.  A device that was a
rail of its own stays known for minutes, so that it keeps its number when it comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.remarks import Remark
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.rails.namespace_shares import Account, share_settings
from railscope.agent.node.sampling.totals import FORGET_NS, MOST_GONE
from railscope.probes.netdev.inventory import NetworkDevice
from railscope.probes.netdev.sources import DeviceSources

_log = logging.getLogger("railscope.rails")


@dataclass(slots=True)
class WatchedNamespace:
    """Not thread-safe: the daemon's lock guards it."""

    sources: DeviceSources
    key: str
    """Of its counters among the sampler's sources."""
    account: Account
    permanent: bool = False
    """It is watched whether processes live there or not."""
    devices: tuple[NetworkDevice, ...] = ()
    inventory_ns: int = 0
    """When these were read last."""
    close_ns: int | None = None
    """From when on it is not watched any more; None: it is."""
    crowded: bool = False
    """Whether it has more devices than its tenant may have: it is about to be closed."""
    had_job: bool = False
    """Whether a process that uses NCCL was ever seen here."""
    events_error: str = ""
    """Why the link events could not be read; empty: they could."""
    postponed: bool = False
    """Whether changes were left for a later tick."""
    processes: set[int] = field(default_factory=set)
    held: dict[str, str] = field(default_factory=dict)
    """Numbers of devices that only jobs made rails."""
    remark: Remark = field(init=False)
    """What its counters are in trouble with."""
    _settings: dict[int, str] = field(default_factory=dict)
    """NCCL_SOCKET_IFNAME of the processes that run here and of those that have just ended; empty: NCCL's own choice."""
    _tenants: dict[int, Tenant] = field(default_factory=dict)
    """Whose these processes are."""
    _sockets: set[int] = field(default_factory=set)
    """Those of these processes whose settings keep them off RDMA."""
    _leaving: dict[int, int] = field(default_factory=dict)
    """Until when the settings of ended processes count, ns."""
    _unread: frozenset[tuple[Tenant, str]] = frozenset()
    """Settings that do not count, as there are too many."""
    _rails: dict[str, int] = field(default_factory=dict)
    """When each device was last seen as a rail by its own, ns: not by a job's setting alone."""

    def __post_init__(self) -> None:
        self.remark = Remark(_log, self.key, "is read again")

    @property
    def uses_sockets(self) -> bool:
        """Whether the settings of a process keep it off RDMA."""
        return bool(self._sockets)

    def add_process(self, pid: int, socket_interfaces: str, *, sockets_only: bool, tenant: Tenant) -> bool:
        """A process lives here, or more is known of it; whether that may change what are rails."""
        news = (
            self._tenants.get(pid) != tenant
            or not self.had_job
            or socket_interfaces not in self._settings.values()
            or self._settings.get(pid, socket_interfaces) != socket_interfaces
            or sockets_only != (pid in self._sockets)
        )
        self.processes.add(pid)
        self.close_ns = None
        self.had_job = True
        self._tenants[pid] = tenant
        self._settings[pid] = socket_interfaces
        (self._sockets.add if sockets_only else self._sockets.discard)(pid)
        self._leaving.pop(pid, None)
        return news

    def end_process(self, pid: int, until_ns: int) -> None:
        """A process has ended; its setting counts until this moment, and so long an empty namespace stays open."""
        if pid not in self.processes:
            return
        self.processes.discard(pid)
        self._leaving[pid] = until_ns
        if not self.processes and not self.permanent:
            self.close_ns = until_ns

    def expire_settings(self, now_ns: int) -> bool:
        """Drop the settings of ended processes; whether that may change what are rails."""
        changed = False
        for pid in [pid for pid, until_ns in self._leaving.items() if until_ns <= now_ns]:
            del self._leaving[pid]
            setting = self._settings.pop(pid, "")
            self._tenants.pop(pid, None)
            changed = changed or setting not in self._settings.values() or pid in self._sockets
            self._sockets.discard(pid)
        return changed

    def read_settings(self) -> tuple[tuple[str, ...], list[Tenant]]:
        """The values of NCCL_SOCKET_IFNAME that count here, and whose do not since the last call, one for each."""
        settings = sorted(self._settings.items(), key=lambda entry: bool(entry[1]))
        values, unread = share_settings((self._tenants.get(pid, UNKNOWN_TENANT), value) for pid, value in settings)
        lost = [tenant for tenant, _value in unread - self._unread]
        self._unread = unread
        return values, lost

    def find_known(self, now_ns: int) -> tuple[str, ...]:
        """Devices that are rails of their own, or were lately; how many there may be is bounded."""
        self._rails = {name: seen for name, seen in self._rails.items() if now_ns - seen < FORGET_NS}
        most = MOST_GONE + len(self.devices)
        if len(self._rails) > most:
            self._rails = dict(sorted(self._rails.items(), key=itemgetter(1))[-most:])
        return tuple(self._rails)

    def record_rails(self, decisions: Iterable[RailDecision], now_ns: int) -> None:
        """Remember what was decided about the devices here."""
        self.held.clear()
        for decision in decisions:
            if decision.rail is None:
                continue
            if decision.requested:
                self.held[decision.device.name] = decision.rail
            else:
                self._rails[decision.device.name] = now_ns
