"""Connections that NCCL moved off a port that failed, for as long as it keeps off it.

NCCL tells of it through probes (probes/bpf/failover.h).  How a port fares afterwards stands in the process's memory: it
is read there until NCCL has taken the port back or has closed the connection.  Whose a connection is, what was handed
to its proxy tells: at level *counts* nobody knows.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Protocol

import numpy as np

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import FailedOver
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.memory import PortStates, ProcessMemory
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.memory.net_devices import NetDevice
from railscope.probes.nccl.records.failover import STATUSES, SURVIVED, FailoverLayout, PortState, status_name
from railscope.probes.shares import Places

_log = logging.getLogger("railscope.failover")

_MOST_KEPT: Final = 4096
"""Connections that keep off a port, which users share; beyond, each is counted, and nothing else is known of it."""
_MOST_SEARCHES: Final = 64
"""Of a connection that is in use the owner is known with the next operation; each search reads the whole table."""


class FailoverLevels(Protocol):
    """Which libraries tell of it (agent/node/completion/levels.py)."""

    @property
    def watches_failover(self) -> bool: ...
    def failover_layout_of(self, library: int) -> FailoverLayout | None: ...


class FailoverSource(Protocol):
    """What is needed of what lies below NCCL's calls (agent/node/completion/completion.py)."""

    def failover_events(self) -> Records: ...
    def connections(self) -> tuple[Records, Records]: ...
    def forget_failed_over(self, connections: Iterable[tuple[int, int]]) -> None: ...
    def device_of(self, tgid: int, library: int, number: int) -> NetDevice | None: ...
    @property
    def levels(self) -> FailoverLevels: ...


@dataclass(slots=True)
class _Connection:
    """One that keeps off some of its ports."""

    resiliency: int
    library: int
    devices: tuple[int, ...]
    """Its ports, as NCCL numbers devices."""
    tenant: Tenant
    """Whose it is."""
    failures: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Of each port that failed, by its place: the first completion's status and its vendor error."""
    instance: int = 0
    """Of its communicator; 0: not known."""
    searches: int = 0
    """How often it was looked for in vain."""

    def next_of(self, place: int) -> int:
        """The place of the port that carries another one's share: the next that did not fail."""
        count = len(self.devices)
        return next((at % count for at in range(place + 1, place + count) if at % count not in self.failures), place)


class Failovers:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        source: FailoverSource,
        memory: ProcessMemory,
        communicator_of: Callable[[int], Communicator | None],
        tenant_of: Callable[[int], Tenant] = lambda _pid: UNKNOWN_TENANT,
    ) -> None:
        """`communicator_of` knows communicators by instance, `tenant_of` whose a process is, by pid."""
        self._tenant_of = tenant_of
        self._source = source
        self._memory = memory
        self._communicator_of = communicator_of
        self._moved: dict[tuple[int, int], _Connection] = {}
        """By process and address."""
        self._places = Places[Tenant](_MOST_KEPT)
        self._totals = dict.fromkeys(SURVIVED, 0)
        self._watched = False

    def read(self) -> None:
        """Read what failed since the last time, and how the ports fare that failed before."""
        self._watched = self._watched or self._source.levels.watches_failover
        for event in self._source.failover_events():
            self._record(event)
        if not self._moved:
            return
        try:
            self._find_owners()
            self._read_states()
        except KernelRefusal as refusal:
            _log.error("connections that failed over cannot be followed: %s", refusal.strerror)

    def end_processes(self, tgids: Collection[int]) -> None:
        """Processes have ended, and their connections with them."""
        self._drop([one for one in self._moved if one[0] in tgids])

    def end_communicators(self, instances: Collection[int]) -> None:
        """Communicators have ended, and their connections with them."""
        self._drop([key for key, one in self._moved.items() if one.instance in instances])

    def totals(self) -> Mapping[str, int] | None:
        """Connections that moved so far, by the completion's status; None: no library was seen that tells."""
        return dict(self._totals) if self._watched else None

    def facts(self) -> tuple[FailedOver, ...]:
        """What keeps off a port now, by rank and port."""
        found: dict[FailedOver, int] = defaultdict(int)
        for (tgid, _), one in self._moved.items():
            owner = self._communicator_of(one.instance) if one.instance else None
            for place, (status, vendor_error) in one.failures.items():
                device, port = self._name(tgid, one, place)
                next_device, next_port = self._name(tgid, one, one.next_of(place))
                same_device = next_device == device != UNKNOWN
                carried_by = f"{next_device}/{next_port}" if same_device else next_device
                name = owner.name if owner is not None else UNKNOWN
                rank = format_label(owner.rank) if owner is not None else UNKNOWN
                found[FailedOver(name, rank, device, port, carried_by, status, vendor_error, 0)] += 1
        return tuple(replace(one, connections=count) for one, count in found.items())

    def _record(self, event: Records) -> None:
        tgid, place = int(event["tgid"]), int(event["place"])
        said, vendor_error = status_name(int(event["status"])), int(event["vendor_error"])
        # Any number may stand in a process's memory, and each status is a series for good.
        status = said if said in STATUSES else UNKNOWN
        said += f", vendor error {vendor_error:#x}, queue pair {int(event['queue_pair'])}"
        if event["result"]:
            # What becomes of it is an error of the communicator, and counted as such.
            _log.warning("process %d: NCCL gives a connection up: %s", tgid, said)
            return
        self._totals[status] = self._totals.get(status, 0) + 1
        key = (tgid, int(event["comm"]))
        devices = tuple(event["devices"][: int(event["count"])].tolist())
        known = self._moved.get(key)
        if known is None or known.resiliency != event["resiliency"]:
            tenant = self._tenant_of(tgid)
            if known is not None:
                self._forget(key)
            if not self._places.take(tenant):
                return
            known = self._moved[key] = _Connection(int(event["resiliency"]), int(event["library"]), devices, tenant)
        known.failures[place] = (status, vendor_error)
        device, port = self._name(tgid, known, place)
        _log.warning("process %d: NCCL moved a connection off %s port %s: %s", tgid, device, port, said)

    def _find_owners(self) -> None:
        """Whose the connections are, of which that is not known yet."""
        wanted = {key: one for key, one in self._moved.items() if not one.instance and one.searches < _MOST_SEARCHES}
        if not wanted:
            return
        for one in wanted.values():
            one.searches += 1
        keys, values = self._source.connections()
        for at in np.flatnonzero(np.isin(values["net_comm"], [comm for _, comm in wanted])).tolist():
            owned = wanted.get((int(keys["tgid"][at]), int(values["net_comm"][at])))
            if owned is not None:
                owned.instance = int(values["instance"][at])

    def _read_states(self) -> None:
        over = []
        for tgid, group in groupby(sorted(self._moved), lambda key: key[0]):
            followed = [
                (key, PortStates(key[1], self._moved[key].resiliency, layout))
                for key in group
                if (layout := self._source.levels.failover_layout_of(self._moved[key].library)) is not None
            ]
            try:
                states = self._memory.read(tgid, [reading for _, reading in followed], moment=0) if followed else ()
            except NotYet:
                continue
            except Refused as refused:
                _log.debug("process %d: its connections cannot be read: %s", tgid, refused)
                if refused.gone:
                    # Its last events may be read after its end.
                    over += [key for key, _ in followed]
                continue
            for (key, _), found in zip(followed, states, strict=True):
                if found is None:
                    over.append(key)
                    continue
                failures = self._moved[key].failures
                for place in [place for place in failures if found[place] == PortState.OK]:
                    device, port = self._name(tgid, self._moved[key], place)
                    _log.warning("process %d: NCCL uses %s port %s again on a connection", tgid, device, port)
                    del failures[place]
                if not failures:
                    over.append(key)
        self._drop(over)

    def _drop(self, keys: Collection[tuple[int, int]]) -> None:
        if not keys:
            return
        for key in keys:
            self._forget(key)
        try:
            self._source.forget_failed_over(keys)
        except KernelRefusal as refusal:
            _log.error("connections that failed over cannot be forgotten: %s", refusal.strerror)

    def _forget(self, key: tuple[int, int]) -> None:
        self._places.leave(self._moved.pop(key).tenant)

    def _name(self, tgid: int, connection: _Connection, place: int) -> tuple[str, str]:
        """Device and port, by its place among the connection's."""
        device = self._source.device_of(tgid, connection.library, connection.devices[place])
        return (UNKNOWN, "") if device is None else (device.name, str(device.port or ""))
