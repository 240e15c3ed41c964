"""The rails of every network namespace with observed processes: finds, samples and correlates them.

A namespace is opened with its first process and closed shortly after its last one, since an open socket keeps it
alive; what its rails had carried stays readable for a while.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.config.unmatched import patterns_without_device
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import RailKey, RailLedger
from railscope.agent.facts.remarks import Remark
from railscope.agent.facts.snapshot import CollectorResult, RailFacts
from railscope.agent.model.expected import ExpectedBytes
from railscope.agent.node.attribution.evidence import (
    NOT_OBSERVED,
    HandedBytes,
    RailEvidence,
    RailLedgers,
    bytes_of_nccl,
    evidence_of,
)
from railscope.agent.node.attribution.explained import Correlator, PortTotals, RailWire
from railscope.agent.node.inspection.tenants import ROOT, UNKNOWN_TENANT, Tenant
from railscope.agent.node.rails.carrier_changes import CarrierChanges
from railscope.agent.node.rails.counter_rules import TABLES_ONLY, OwnSeverities
from railscope.agent.node.rails.ethernet_facts import RailEthernet
from railscope.agent.node.rails.namespace_shares import Account, NamespaceShares
from railscope.agent.node.rails.netdev_facts import members_of_bond, netns_labels, rail_facts
from railscope.agent.node.rails.selection import (
    LINGER_PERIODS,
    NO_RDMA,
    RdmaPorts,
    decide_rails,
)
from railscope.agent.node.rails.siblings import NO_STATE, LinkState, compare_links, port_of_netdev
from railscope.agent.node.rails.watched_namespace import WatchedNamespace
from railscope.agent.node.sampling.sampler import OnReading, Sampler
from railscope.agent.node.sampling.state import SamplerState, SourceResult, join_troubles
from railscope.agent.node.sampling.utilization import Utilization
from railscope.probes.clock import Clock
from railscope.probes.netdev.events import LinkChange, LinkEvents
from railscope.probes.netdev.netlink import AnswerTooLong, MalformedNetlink
from railscope.probes.netdev.sources import DeviceSources, open_namespace, recorded_sources
from railscope.probes.processes.namespaces import NamespaceError, NetworkNamespace, named_namespaces
from railscope.probes.topology.machine import Nic
from railscope.probes.topology.pci import PciDevice, pci_device

_log = logging.getLogger("railscope.rails")

_INVENTORY_PERIOD_NS: Final = 10_000_000_000


@dataclass(frozen=True, slots=True)
class _Gone:
    facts: tuple[RailFacts, ...]
    until_ns: int
    account: Account


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A process whose namespace is to be opened at a later tick."""

    namespace: NetworkNamespace
    socket_interfaces: str
    sockets_only: bool
    tenant: Tenant
    account: Account
    """Of which it waits for time."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A namespace that was opened later than its first process came."""

    pid: int
    namespace: NetworkNamespace
    events: LinkEvents | None
    """To poll from now on."""


class NetdevRails:
    """Not thread-safe: the daemon's lock guards it; the sampler has a thread of its own."""

    def __init__(
        self,
        clock: Clock,
        *,
        procfs: Path,
        sysfs: Path,
        sample_interval_ns: int,
        window_ns: int,
        lifetime_ns: int,
        patterns: Sequence[RailPattern],
        on_reading: OnReading | None = None,
        awaits_connections: bool = False,
        own_severities: OwnSeverities = TABLES_ONLY,
    ) -> None:
        """`on_reading` is shown what the sampler reads; `awaits_connections`: connections of rails will be known."""
        self._clock = clock
        self._procfs = procfs
        self._sysfs = sysfs
        self._interval_ns = sample_interval_ns
        self._lifetime_ns = lifetime_ns
        self._patterns = patterns
        self._own_severities = own_severities
        self._sampler = Sampler(clock, on_reading)
        self._correlator = Correlator(window_ns=window_ns)
        self._watched: dict[int, WatchedNamespace] = {}
        self.shares = NamespaceShares(clock)
        self._waiting: dict[int, _Waiting] = {}
        """By pid."""
        self._opened: list[Opened] = []
        self._undecided = False
        """Whether there is news that `update` has to decide about."""
        self._gone: dict[int, _Gone] = {}
        self._expired: dict[tuple[int, str], _Gone] = {}
        """Devices that were rails for jobs that have ended, by namespace and name."""
        self._handed_over = NOT_OBSERVED
        self._ethernet: Mapping[tuple[int, str], RailEthernet] = {}
        """What is known besides, by namespace and device."""
        self._awaits_connections = awaits_connections
        """Whether TCP connections of rails are going to be among it."""
        self._ledgers = RailLedgers()
        self._utilization = Utilization(window_ns)
        self._rdma = NO_RDMA
        self._functions: dict[str, PciDevice | None] = {}
        """By PCI address: what a card is does not change under it."""
        self._links: dict[tuple[int, str], LinkState] = {}
        self._sending: set[int] = set()
        """Namespaces in which collectives handed bytes to a network device: whatever RDMA rails are there."""
        self._numbers_of_jobs: set[str] = set()
        """Those that rails in namespaces of jobs have had: nothing else takes them again."""
        self._labels: dict[tuple[int, str], str] = {}
        """Labels of namespaces that devices had: they stay when the other device of the name goes."""
        self._to_close: list[DeviceSources] = []
        self._decisions: tuple[RailDecision, ...] = ()
        self._carrier_changes = CarrierChanges()
        self._patterns_remark = Remark(_log, "--rail.devices", "every pattern matches a device")
        self._wire: Mapping[tuple[int, str], RailWire] = {}

    def start(self) -> None:
        self._sampler.start()

    def set_ethernet(self, facts: Iterable[RailEthernet]) -> None:
        """Set what drivers, queues and connections tell of the devices; the last call replaces earlier ones."""
        self._ethernet = {(one.netns, one.device): one for one in facts}

    def set_rdma_ports(self, ports: RdmaPorts) -> None:
        """Set this host's RDMA ports, whose rail numbers other networks do not get."""
        if ports != self._rdma:
            self._rdma = ports
            self._decide()

    @property
    def alive(self) -> bool:
        return self._sampler.alive

    def ledgers(self) -> Mapping[RailKey, RailLedger]:
        """Whose the bytes of rails were, by network namespace and device; those gone lately are as they were last."""
        gone = {
            (netns, facts.device): facts.ledger
            for netns, one in self._gone.items()
            for facts in one.facts
            if facts.ledger is not None
        }
        return {**gone, **self._ledgers.known()}

    @property
    def all_sent(self) -> bool:
        """See `Correlator.all_sent`."""
        return self._correlator.all_sent

    def watch_recorded(self) -> None:
        """Read a recorded sysfs tree instead of a running host's devices."""
        try:
            sources = recorded_sources(self._sysfs, clock=self._clock)
        except OSError as error:
            _log.warning("network devices are not read: %s: %s", error.filename, error.strerror)
            return
        self._open(0, sources, "netdev", Account(0, ROOT, None), permanent=True)

    def watch_own(self, namespace: NetworkNamespace) -> LinkEvents | None:
        """Watch the agent's own namespace until `close`; returns its link events to poll."""
        return self._enter(namespace, Account(namespace.inode, ROOT, None), permanent=True)

    def watches(self, netns: int) -> bool:
        """Whether a network namespace is watched at present."""
        return netns in self._watched

    def add_process(
        self,
        pid: int,
        namespace: NetworkNamespace,
        socket_interfaces: str,
        *,
        sockets_only: bool = False,
        tenant: Tenant = UNKNOWN_TENANT,
    ) -> LinkEvents | None:
        """Watch the namespace of a process; returns link events to poll when the namespace is new.

        `sockets_only`: its settings keep it off RDMA.  Where its tenant's namespaces have taken their share of the
        time, the namespace is opened by a later `update`: see `take_opened`.
        """
        events = None
        # What it says now replaces what it waited with, whoever has opened the namespace meanwhile.
        self._waiting.pop(pid, None)
        if namespace.inode not in self._watched:
            if self.shares.is_avoided(namespace.inode):
                return None
            account = self.shares.account(namespace, tenant)
            if account.is_spent(self._clock.monotonic_ns()):
                self._waiting[pid] = _Waiting(namespace, socket_interfaces, sockets_only, tenant, account)
                return None
            events = self._enter(namespace, account, permanent=False)
        watched = self._watched.get(namespace.inode)
        if watched is None or watched.crowded:
            return events
        if watched.add_process(pid, socket_interfaces, sockets_only=sockets_only, tenant=tenant):
            self._decide_for(tenant)
        return events

    def _decide_for(self, tenant: Tenant) -> None:
        """Decide now, as a process of this tenant brings news, or at the next tick, where that takes it too much."""
        account, began_ns = self.shares.account_of_tenant(tenant), self._clock.monotonic_ns()
        if tenant != ROOT and account.is_spent(began_ns):
            self._undecided = True
            return
        self._decide()
        account.pay(began_ns, self._clock.monotonic_ns())

    def remove_process(self, pid: int) -> None:
        self._waiting.pop(pid, None)
        until_ns = self._clock.monotonic_ns() + LINGER_PERIODS * self._interval_ns
        for watched in self._watched.values():
            watched.end_process(pid, until_ns)

    def _enter(self, namespace: NetworkNamespace, account: Account, *, permanent: bool) -> LinkEvents | None:
        began_ns = self._clock.monotonic_ns()
        try:
            room = account.room(namespace.inode)
            if room == 0:
                raise AnswerTooLong("its user has as many network devices or namespaces as are watched")
            sources = open_namespace(
                namespace, procfs=self._procfs, sysfs=self._sysfs, clock=self._clock, most_devices=room
            )
        except NamespaceError as error:
            _log.info("network namespace %d is not watched: %s", namespace.inode, error)
            return None
        except AnswerTooLong as error:
            _log.info("network namespace %d is not watched: %s", namespace.inode, error)
            self.shares.refuse(namespace.inode, account.tenant)
            return None
        finally:
            account.pay(began_ns, self._clock.monotonic_ns())
        began_ns = self._clock.monotonic_ns()
        key = "netdev" if namespace.own else f"netdev net:[{namespace.inode}]"
        if sources.reason:
            _log.warning("%s: %s", key, sources.reason)
        events = self._open(namespace.inode, sources, key, account, permanent=permanent)
        account.pay(began_ns, self._clock.monotonic_ns())
        return events

    def _open(
        self, netns: int, sources: DeviceSources, key: str, account: Account, *, permanent: bool
    ) -> LinkEvents | None:
        self._gone.pop(netns, None)
        watched = WatchedNamespace(sources, key, account, permanent=permanent)
        self._watched[netns] = watched
        account.namespaces[netns] = 0
        self._sampler.add(key, netns, sources.counters, self._interval_ns / 1e9)
        self._read_inventory(netns, watched)
        self._decide()
        return sources.events

    def _refuse(self, netns: int, watched: WatchedNamespace) -> None:
        """A namespace has got more devices than its tenant may have: it is closed at the next `update`."""
        _log.info("network namespace %d is not watched any more: it has too many devices", netns)
        self.shares.refuse(netns, watched.account.tenant)
        watched.close_ns = self._clock.monotonic_ns()
        watched.crowded = True

    def _read_inventory(self, netns: int, watched: WatchedNamespace) -> None:
        watched.inventory_ns = self._clock.monotonic_ns()
        try:
            watched.devices = tuple(watched.sources.inventory.read())
            watched.account.namespaces[netns] = len(watched.devices)
        except AnswerTooLong:
            self._refuse(netns, watched)
        except (OSError, ValueError) as error:
            _log.warning("%s: the devices cannot be listed: %s", watched.key, error)
        self._carrier_changes.record(netns, watched.devices, watched.inventory_ns)

    def _decide(self) -> None:
        self._undecided = False
        now_ns = self._clock.monotonic_ns()
        known, held, settings = [], {}, {}
        for netns, watched in self._watched.items():
            known += [(netns, name) for name in watched.find_known(now_ns)]
            held.update({(netns, name): number for name, number in watched.held.items()})
            settings[netns], lost = watched.read_settings()
            self.shares.unread_by_user.update(tenant.uid for tenant in lost)
        self._decisions = decide_rails(
            [device for watched in self._watched.values() for device in watched.devices],
            patterns=self._patterns,
            socket_interfaces=settings,
            known=known,
            rdma=self._rdma,
            home={netns for netns, watched in self._watched.items() if watched.permanent},
            idle={netns for netns, watched in self._watched.items() if not watched.had_job},
            sockets=self._sending | {netns for netns, watched in self._watched.items() if watched.uses_sockets},
            numbers_of_jobs=self._numbers_of_jobs,
            held=held,
        )
        of_namespaces: defaultdict[int, list[RailDecision]] = defaultdict(list)
        for decision in self._decisions:
            of_namespaces[decision.device.netns].append(decision)
        for netns, watched in self._watched.items():
            watched.record_rails(of_namespaces[netns], now_ns)
            if watched.had_job:
                self._numbers_of_jobs.update(one.rail for one in of_namespaces[netns] if one.rail is not None)
        self._compare_links()
        names = [*(decision.device.name for decision in self._decisions), *self._rdma.names]
        self._patterns_remark.say(patterns_without_device(self._patterns, names))

    def _compare_links(self) -> None:
        """Compare the links of rails on cards; those of RDMA ports are compared there."""
        ports: dict[tuple[int, str], Nic] = {}
        for decision in self._decisions:
            device = decision.device
            home = device.netns in self._watched and self._watched[device.netns].permanent
            if decision.rail is not None and device.pci and not self._rdma.belongs(device, home=home):
                if device.pci not in self._functions:
                    self._functions[device.pci] = pci_device(self._sysfs, device.pci)
                ports[device.netns, device.name] = port_of_netdev(device, self._functions[device.pci])
        links = compare_links(ports.values())
        self._links = {key: links[port] for key, port in ports.items()}

    def handle_link_events(self, events: LinkEvents) -> frozenset[int]:
        """Act on what a namespace's link events say; what cannot be read now is read again at the next tick.

        Returns the processes of the namespace, by pid, where one of its rails has lost its carrier or was switched off.
        """
        found = next((entry for entry in self._watched.items() if entry[1].sources.events is events), None)
        if found is None:
            return frozenset()
        netns, watched = found
        began_ns = self._clock.monotonic_ns()
        watched.postponed = not watched.permanent and (watched.crowded or watched.account.is_spent(began_ns))
        try:
            if watched.postponed:
                events.postpone()
                return frozenset()
            changes = events.read()
        except AnswerTooLong:
            self._refuse(netns, watched)
            return frozenset()
        except (OSError, MalformedNetlink) as error:
            if watched.events_error != str(error):
                watched.events_error = str(error)
                _log.warning("%s: link events: %s", watched.key, error)
            return frozenset()
        watched.events_error = ""
        if changes:
            self._read_inventory(netns, watched)
            self._decide()
            if any(change.change is not LinkChange.CARRIER for change in changes):
                self._sampler.refresh(watched.key)
        watched.account.pay(began_ns, self._clock.monotonic_ns())
        lost = {
            change.name
            for change in changes
            if change.change in (LinkChange.CARRIER, LinkChange.ADMIN) and not (change.up and change.carrier)
        }
        rails = {one.device.name for one in self._decisions if one.rail is not None and one.device.netns == netns}
        return frozenset(watched.processes) if lost & rails else frozenset()

    def update(
        self, expected: Sequence[ExpectedBytes] | None, handed_over: HandedBytes = NOT_OBSERVED
    ) -> list[LinkEvents]:
        """Relate bytes, renew inventories, close what is due; returns events that must not be polled any more.

        `expected` None: bytes are not related now.
        """
        now_ns = self._clock.monotonic_ns()
        state = self._sampler.state()
        if expected is not None:
            self._relate(state, expected, handed_over)
        self._log_trouble(state)
        for sources in self._to_close:
            sources.close()
        self._to_close.clear()
        closed = []
        self._expire_settings(now_ns)
        self._open_waiting()
        self.shares.forget_idle()
        due = []
        for netns, watched in list(self._watched.items()):
            again = (watched.events_error or watched.postponed) and not watched.crowded
            if again and watched.sources.events is not None:
                self.handle_link_events(watched.sources.events)
            if watched.close_ns is not None and now_ns >= watched.close_ns:
                if watched.sources.events is not None:
                    closed.append(watched.sources.events)
                due.append(netns)
            elif (
                not watched.crowded
                and watched.sources.events is None
                and now_ns - watched.inventory_ns > _INVENTORY_PERIOD_NS
            ):
                self._read_inventory(netns, watched)
                self._undecided = True
        if due:
            self._close(due, now_ns)
        if self._undecided:
            self._decide()
        self._gone = {netns: gone for netns, gone in self._gone.items() if gone.until_ns > now_ns}
        self._expired = {device: gone for device, gone in self._expired.items() if gone.until_ns > now_ns}
        shown = self.namespaces
        self._labels = {device: label for device, label in self._labels.items() if device[0] in shown}
        return closed

    def _open_waiting(self) -> None:
        """Open namespaces for which there was no time so far."""
        for pid, waiting in list(self._waiting.items()):
            if waiting.account.is_spent(self._clock.monotonic_ns()) and waiting.namespace.inode not in self._watched:
                continue
            new = waiting.namespace.inode not in self._watched
            events = self.add_process(
                pid,
                waiting.namespace,
                waiting.socket_interfaces,
                sockets_only=waiting.sockets_only,
                tenant=waiting.tenant,
            )
            if pid not in self._waiting and waiting.namespace.inode in self._watched:
                self._opened.append(Opened(pid, waiting.namespace, events if new else None))

    def take_opened(self) -> list[Opened]:
        """What was opened later than `add_process`, since the last call."""
        opened, self._opened = self._opened, []
        return opened

    def _expire_settings(self, now_ns: int) -> None:
        """Drop the settings of ended processes; what only they made a rail is none any more, and stays readable."""
        changed = [watched.expire_settings(now_ns) for watched in self._watched.values()]
        if not any(changed):
            return
        before = {(one.device.netns, one.device.name) for one in self._decisions if one.rail and one.requested}
        facts = self._facts_by_place() if before else {}
        self._decide()
        rails = {(one.device.netns, one.device.name) for one in self._decisions if one.rail is not None}
        for key in before - rails:
            self._expired[key] = _Gone((facts[key],), now_ns + self._lifetime_ns, self._watched[key[0]].account)
        self._expired = _newest_of_accounts(self._expired)

    def _log_trouble(self, state: SamplerState) -> None:
        """One line when counters begin to be in trouble, when that changes, and when it ends."""
        for watched in self._watched.values():
            result = state.result(watched.key)
            if result is not None and result.reads:
                watched.remark.say(join_troubles(result.troubles))

    def unread_sources(self) -> tuple[str, ...]:
        """Sources that were not read yet, well or badly."""
        return self._sampler.state().unread_sources

    @property
    def namespaces(self) -> set[int]:
        """Network namespaces (inodes) whose rails are shown."""
        return {*self._watched, *self._gone}

    def correlate(self, expected: Sequence[ExpectedBytes], handed_over: HandedBytes = NOT_OBSERVED) -> None:
        """Bring expected wire bytes and port bytes together."""
        self._relate(self._sampler.state(), expected, handed_over)

    def _relate(self, state: SamplerState, expected: Sequence[ExpectedBytes], handed_over: HandedBytes) -> None:
        self._handed_over = handed_over
        if self._rdma.rails and handed_over.device_bytes:
            sent = {key for key, count in handed_over.device_bytes.items() if count}
            names = {(netns, one.name) for netns, watched in self._watched.items() for one in watched.devices}
            sending = {netns for netns, _name in sent & names}
            if sending != self._sending:
                self._sending = sending
                self._decide()
        keys, ports = [], []
        for decision in self._decisions:
            place = (decision.device.netns, decision.device.name)
            totals, ethernet = state.device(*place), self._ethernet.get(place)
            if decision.rail is None or totals is None:
                continue
            handed = handed_over.device_bytes if handed_over.whole else None
            nccl = bytes_of_nccl(
                None if handed is None else handed.get(place, 0), ethernet.together if ethernet is not None else None
            )
            keys.append(place)
            ports.append(
                PortTotals(
                    str(decision.device.netns),
                    decision.device.name,
                    "",
                    totals.transmit_bytes,
                    totals.receive_bytes,
                    decision.carries,
                    nccl,
                )
            )
        now_ns = self._clock.monotonic_ns()
        for key, carried in zip(keys, ports, strict=True):
            self._utilization.record(key, now_ns, carried.transmit_bytes, carried.receive_bytes)
        self._utilization.forget_others(keys)
        wire = self._correlator.update(now_ns, ports, expected)
        self._wire = dict(zip(keys, wire, strict=True))
        self._account(state)

    def _account(self, state: SamplerState) -> None:
        """Class the bytes of every rail."""
        handed_over = self._handed_over.device_bytes
        by_namespace: dict[int, list[RailEvidence]] = {}
        for decision in self._decisions:
            key = (decision.device.netns, decision.device.name)
            port, ethernet = state.device(*key), self._ethernet.get(key)
            if decision.rail is None or port is None:
                continue
            handed_over_bytes = None if handed_over is None else handed_over.get(key, 0)
            # Bytes that were classed before it is known whose they are would stay where they are.
            if self._awaits_connections_of(ethernet):
                self._ledgers.begin(key, self._wire.get(key), handed_over_bytes)
                continue
            by_namespace.setdefault(decision.device.netns, []).append(
                evidence_of(
                    key,
                    port,
                    self._wire.get(key),
                    handed_over_bytes,
                    ethernet.together if ethernet is not None else None,
                    complete=self._handed_over.whole,
                )
            )
        for rails in by_namespace.values():
            self._ledgers.update(rails)

    def rails(self) -> tuple[RailFacts, ...]:
        """Every rail, those of namespaces that have gone lately included."""
        living = self._facts(self._sampler.state(), None)
        rails = {(one.device.netns, one.device.name) for one in self._decisions if one.rail is not None}
        expired = [gone for key, gone in self._expired.items() if key not in rails and key[0] not in self._gone]
        return living + tuple(fact for gone in (*self._gone.values(), *expired) for fact in gone.facts)

    def _awaits_connections_of(self, ethernet: RailEthernet | None) -> bool:
        """Whether a rail's connections are to be read and have not been yet."""
        return self._awaits_connections if ethernet is None else ethernet.awaited

    def _facts(self, state: SamplerState, only_netns: int | None) -> tuple[RailFacts, ...]:
        named = named_namespaces()
        labels = netns_labels([decision.device for decision in self._decisions], named)
        handed_over = self._handed_over.device_bytes
        senders = {netns for netns, _ in handed_over or ()}
        for place, label in labels.items():
            # A namespace may lose its name before its processes.
            if label and (place[0] in named or place not in self._labels):
                self._labels[place] = label
        devices = {(decision.device.netns, decision.device.name): decision.device for decision in self._decisions}
        facts = []
        for decision in self._decisions:
            device = decision.device
            if decision.rail is None or (only_netns is not None and device.netns != only_netns):
                continue
            wire = self._wire.get((device.netns, device.name))
            ethernet = self._ethernet.get((device.netns, device.name))
            facts.append(
                rail_facts(
                    decision,
                    state.device(device.netns, device.name),
                    carrier_changes=self._carrier_changes.count(device.netns, device.name),
                    netns_label=self._labels.get((device.netns, device.name), ""),
                    transmit_wire_bytes=wire.transmit.wire_bytes if wire else None,
                    transmit_collective_bytes=None
                    if handed_over is None
                    else handed_over.get((device.netns, device.name), 0 if device.netns in senders else None),
                    receive_wire_bytes=wire.receive.wire_bytes if wire else None,
                    transmit_explained_ratio=wire.transmit.explained_ratio if wire else None,
                    receive_explained_ratio=wire.receive.explained_ratio if wire else None,
                    ethernet=ethernet,
                    connections_awaited=self._awaits_connections_of(ethernet),
                    own_severities=self._own_severities,
                    bond_members=members_of_bond(device, devices),
                    ledger=self._ledgers.get((device.netns, device.name)),
                    link=self._links.get((device.netns, device.name), NO_STATE),
                    utilization=self._utilization.ratios_of((device.netns, device.name), device.speed_bytes_per_second),
                )
            )
        return tuple(facts)

    def _facts_by_place(self) -> dict[tuple[int, str], RailFacts]:
        """Every rail that is watched, by namespace and device."""
        places = [(one.device.netns, one.device.name) for one in self._decisions if one.rail is not None]
        return dict(zip(places, self._facts(self._sampler.state(), None), strict=True))

    def rails_of_namespace(self, netns: int) -> tuple[tuple[RailFacts, int | None], ...]:
        """Rails of one network namespace, each with when it last gained or lost its carrier while watched."""
        return tuple(
            (facts, self._carrier_changes.changed_ns(netns, facts.device))
            for facts in self._facts(self._sampler.state(), netns)
        )

    def decisions(self) -> tuple[RailDecision, ...]:
        return self._decisions

    def source_results(self) -> tuple[SourceResult, ...]:
        """How reading each namespace's counters goes, in detail."""
        return self._sampler.state().results

    def collectors(self) -> tuple[CollectorResult, ...]:
        return self._sampler.state().collector_results()

    def _close(self, namespaces: Sequence[int], now_ns: int) -> None:
        """Let go of namespaces, all that are due at once: the others are decided about anew once."""
        facts: dict[int, list[RailFacts]] = {netns: [] for netns in namespaces}
        for (netns, _name), fact in self._facts_by_place().items():
            if netns in facts:
                facts[netns].append(replace(fact, netns=fact.netns or f"net:[{netns}]"))
        for netns, last in facts.items():
            watched = self._watched.pop(netns)
            del watched.account.namespaces[netns]
            self._gone[netns] = _Gone(tuple(last), now_ns + self._lifetime_ns, watched.account)
            self._sampler.remove(watched.key)
            # The daemon still polls the events: they are closed at the next update, after it has stopped polling.
            self._to_close.append(watched.sources)
            self._correlator.forget(str(netns))
            self._carrier_changes.forget(netns)
            self._ledgers.forget(netns)
        self._gone = _newest_of_accounts(self._gone)
        self._decide()

    def close(self) -> None:
        self._sampler.stop()
        for sources in [*self._to_close, *(watched.sources for watched in self._watched.values())]:
            sources.close()
        self._to_close.clear()
        self._watched.clear()


_Place = TypeVar("_Place")


def _newest_of_accounts(gone: dict[_Place, _Gone]) -> dict[_Place, _Gone]:
    """What is gone without the oldest of it, where an account has more than as many rails as it may have devices."""
    left: dict[Hashable, int] = {}
    kept = []
    for place, one in reversed(gone.items()):
        most = one.account.most_devices
        if most is not None:
            room = left.get(one.account.key, most)
            left[one.account.key] = room - max(1, len(one.facts))
            if room <= 0:
                continue
        kept.append((place, one))
    return dict(reversed(kept))
