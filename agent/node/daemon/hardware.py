"""The ports and GPUs of this host: network rails, RDMA rails, Ethernet details and NVLinks behind one interface.

Each of them may be switched off, and none knows of the others; what they have to tell each other passes here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.facts.hardware import NodeCondition, NodeFabric, NodeGpus
from railscope.agent.facts.rail_ledger import RailKey, RailLedger
from railscope.agent.facts.snapshot import CollectorResult, RailFacts
from railscope.agent.model.expected import ExpectedBytes
from railscope.agent.node.attribution.evidence import HandedBytes
from railscope.agent.node.attribution.parties import MappedBy, not_looked_at
from railscope.agent.node.attribution.queue_pair_owners import QueuePairOwners
from railscope.agent.node.condition import watch as condition
from railscope.agent.node.fabric.neighbours import Neighbours
from railscope.agent.node.fabric.queue_pairs import QueuePairs, ask_kernel
from railscope.agent.node.fabric.watch import FabricWatch
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.nvlink.watch import NvlinkWatch
from railscope.agent.node.rails.counter_rules import OwnSeverities
from railscope.agent.node.rails.ethernet import EthernetWatch
from railscope.agent.node.rails.job_settings import sockets_only
from railscope.agent.node.rails.netdev_rails import NetdevRails
from railscope.agent.node.rails.rdma_rails import RdmaRails
from railscope.agent.node.sampling.sampler import OnReading, Sampler
from railscope.agent.node.targets.processes import Description
from railscope.probes.clock import Clock
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.processes.namespaces import NamespaceError, NetworkNamespace, network_namespace
from railscope.probes.processes.socket_owners import shows_every_process

_log = logging.getLogger("railscope.hardware")

_NVLINK_PERIOD_SECONDS: Final = 5.0
"""Counters of bytes need no haste: nothing but whether a link is up gets older by it."""


class Hardware:
    """Not thread-safe: the daemon's lock guards it; the samplers have threads of their own."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        on_reading: OnReading | None,
        *,
        mapped_by: MappedBy = not_looked_at,
    ) -> None:
        """`on_reading` is called with every reading of byte counters.

        `mapped_by` tells from any thread which communication libraries a process maps.
        """
        self._config = config
        own_severities = OwnSeverities(config.severities)
        self.rails = NetdevRails(
            clock,
            procfs=config.procfs,
            sysfs=config.sysfs,
            sample_interval_ns=config.sample_interval_ns,
            window_ns=config.correlation_window_ns,
            lifetime_ns=config.comm_lifetime_ns,
            patterns=config.rails,
            on_reading=on_reading,
            awaits_connections="tcp" in config.collectors and not self.simulated,
            own_severities=own_severities,
        )
        self._queue_pairs = QueuePairOwners(mapped_by, sees_everyone=lambda: shows_every_process(config.procfs))
        self._rdma: RdmaRails | None = None
        if "rdma" in config.collectors:
            self._rdma = RdmaRails(
                clock,
                sysfs=config.sysfs,
                sample_interval_ns=config.sample_interval_ns,
                window_ns=config.correlation_window_ns,
                patterns=config.rails,
                on_reading=on_reading,
                own_severities=own_severities,
                excluded=config.excluded_counters,
                queue_pairs=self._queue_pairs,
            )
        self._ethernet: EthernetWatch | None = None
        wanted = {name: name in config.collectors for name in ("ethtool", "qdisc", "tcp")}
        if any(wanted.values()) and not self.simulated:
            # Apart from the byte counters: a driver may ask its firmware for long.
            self._ethernet_sampler = Sampler(clock)
            self._ethernet = EthernetWatch(
                clock,
                self._ethernet_sampler,
                procfs=config.procfs,
                lifetime_ns=config.comm_lifetime_ns,
                ethtool=wanted["ethtool"],
                queues=wanted["qdisc"],
                tcp=wanted["tcp"],
                own_severities=own_severities,
                excluded=config.excluded_counters,
                mapped_by=mapped_by,
            )
        self._nvlink: NvlinkWatch | None = None
        if "nvlink" in config.collectors and str(config.sysfs) == "/sys":
            self._nvlink = NvlinkWatch(
                clock,
                sysfs=config.sysfs,
                window_ns=config.correlation_window_ns,
                period_seconds=_NVLINK_PERIOD_SECONDS,
            )
        self._condition: condition.ConditionWatch | None = None
        wanted = {name: name in config.collectors for name in ("pcie", "kmsg", "module")}
        if self._nvlink is not None or (any(wanted.values()) and (wanted["pcie"] or not self.simulated)):
            self._condition = condition.ConditionWatch(
                clock,
                sysfs=config.sysfs,
                pcie=wanted["pcie"],
                log_device=Path("/dev/kmsg") if wanted["kmsg"] and not self.simulated else None,
                modules=condition.make_modules(clock) if wanted["module"] and not self.simulated else None,
            )
        self._fabric: FabricWatch | None = None
        wanted = {name: name in config.collectors for name in ("lldp", "qp")}
        if any(wanted.values()) and not self.simulated:
            self._fabric = FabricWatch(
                Neighbours(clock) if wanted["lldp"] else None,
                QueuePairs(clock, ask_kernel(config.procfs)) if wanted["qp"] else None,
            )
        self.own_namespace: int | None = None
        """Inode of the agent's own network namespace; None: it cannot be read."""
        try:
            self.own_namespace = network_namespace(config.procfs, "self").inode
        except NamespaceError as error:
            _log.debug("own network namespace: %s", error)

    @property
    def simulated(self) -> bool:
        return str(self._config.sysfs) != "/sys" or str(self._config.procfs) != "/proc"

    def start(self) -> list[LinkEvents]:
        """Begin to watch the host's own rails and GPUs; returns link events to poll."""
        if self._ethernet is not None:
            self._ethernet_sampler.start()
        if self._rdma is not None:
            self._rdma.start()
            self.rails.set_rdma_ports(self._rdma.names)
        if self._nvlink is not None:
            self._nvlink.start()
        if self._condition is not None:
            self._condition.start()
        if self._fabric is not None:
            self._fabric.start()
        if "netdev" not in self._config.collectors:
            return []
        events = None
        if str(self._config.sysfs) != "/sys":
            self.rails.watch_recorded()
        elif self.own_namespace is not None and self.own_namespace in (self._config.namespaces or [self.own_namespace]):
            # Where only some namespaces are observed, this one's devices are none of theirs.
            own = network_namespace(self._config.procfs, "self")
            events = self.rails.watch_own(own)
            if self._ethernet is not None:
                self._ethernet.watch_own(own)
        self.rails.start()
        return [events] if events is not None else []

    @property
    def wants_topology(self) -> bool:
        """Whether a process's topology file would say anything here: there are RDMA ports."""
        return self._rdma is not None and self._rdma.has_ports

    def add_process(
        self, pid: int, namespace: NetworkNamespace | None, description: Description, tenant: Tenant
    ) -> LinkEvents | None:
        """A process uses the rails of its namespace; returns link events to poll when that is new.

        Called again when more is known of the process.
        """
        if self._rdma is not None:
            self._rdma.add_process(pid, description, tenant)
        if namespace is None or "netdev" not in self._config.collectors or self.simulated:
            return None
        events = self.rails.add_process(
            pid,
            namespace,
            description.setting("NCCL_SOCKET_IFNAME"),
            sockets_only=sockets_only(description.setting("NCCL_IB_DISABLE"), description.setting("NCCL_NET")),
            tenant=tenant,
        )
        if self._ethernet is not None and self.rails.watches(namespace.inode):
            self._ethernet.add_process(pid, namespace)
        return events

    def take_opened(self) -> list[tuple[int, LinkEvents]]:
        """Link events to poll, of namespaces that the last `update` opened, with a process that lives there."""
        events = []
        for opened in self.rails.take_opened():
            if self._ethernet is not None and self.rails.watches(opened.namespace.inode):
                self._ethernet.add_process(opened.pid, opened.namespace)
            if opened.events is not None:
                events.append((opened.pid, opened.events))
        return events

    def lost_by_user(self) -> Mapping[str, Callable[[], Mapping[int | None, int]]]:
        """What users lost at limits of their own, by limit: how to read it."""
        shares = self.rails.shares
        return {"namespaces": lambda: shares.refused_by_user, "interfaces": lambda: shares.unread_by_user}

    def remove_process(self, pid: int) -> None:
        self.rails.remove_process(pid)
        if self._ethernet is not None:
            self._ethernet.remove_process(pid)
        if self._rdma is not None:
            self._rdma.remove_process(pid)

    @property
    def all_sent(self) -> bool:
        """See `Correlator.all_sent`."""
        return self.rails.all_sent and (self._rdma is None or self._rdma.all_sent)

    def refresh_devices(self, *, calm: bool = False) -> None:
        """Read which ports and links came or went, before `update`; `calm`: the result is not urgent."""
        if self._ethernet is not None:
            # Before what collectives handed over is read: no connection then seems to have carried more.
            self.rails.set_ethernet(self._ethernet.update(self.rails.decisions(), calm=calm))
        if self._rdma is not None:
            self._rdma.update()
            self.rails.set_rdma_ports(self._rdma.names)
        if self._condition is None and self._fabric is None:
            return
        watched = self._watched_hardware()
        if self._condition is not None:
            self._condition.set_hardware(watched)
            if self._nvlink is not None:
                self._condition.add_gpu_events(self._nvlink.take_events())
        if self._fabric is not None:
            self._fabric.set_ports(watched.ports, has_rdma=self._rdma is not None and self._rdma.has_ports)
            self._queue_pairs.update(self._fabric.facts().queue_pairs)

    def _watched_hardware(self) -> condition.Hardware:
        """Whose condition matters: devices of rails, and GPUs; ports in the agent's own network namespace."""
        rdma = self._rdma.rail_ports if self._rdma is not None else ()
        devices = [(one.rail, one.device) for one in self.rails.decisions() if one.rail is not None]
        functions = {port.pci: port.device for _rail, port in rdma if port.pci}
        for _rail, device in devices:
            if device.pci:
                functions.setdefault(device.pci, device.name)
        for gpu in self.gpu_facts().devices:
            functions[gpu.pci] = f"gpu{gpu.gpu}"
        ports = [(rail, port.netdev) for rail, port in rdma if port.netdev]
        ports += [(rail, device.name) for rail, device in devices if rail and device.netns == self.own_namespace]
        named = {netdev: rail for rail, netdev in reversed(ports)}
        return condition.Hardware(
            tuple((name, pci) for pci, name in functions.items()),
            tuple((rail, netdev) for netdev, rail in named.items()),
        )

    def condition(self) -> NodeCondition:
        """The condition of the hardware, as it was last read."""
        return self._condition.facts() if self._condition is not None else NodeCondition()

    def fabric(self) -> NodeFabric:
        """Switches and queue pairs, as they were last heard and read."""
        if self._fabric is None:
            return NodeFabric()
        return replace(self._fabric.facts(), queue_pair_owners=self._queue_pairs.owners)

    def update(self, expected: list[ExpectedBytes] | None, handed_over: Callable[[], HandedBytes]) -> list[LinkEvents]:
        """Correlate what collectives should have sent with what ports counted; `expected` None: not now.

        Returns link events that must not be polled any more.
        """
        if expected is None:
            closed = self.rails.update(None)
        else:
            handed = handed_over()
            closed = self.rails.update(self._relate_rdma(expected, handed), handed)
        if self._ethernet is not None:
            self._ethernet.forget_others(self.rails.namespaces)
        return closed

    def correlate(self, expected: list[ExpectedBytes], handed_over: Callable[[], HandedBytes]) -> None:
        """Correlate bytes of rails between two ticks, too.

        `handed_over` is asked after connections were: none seems to carry more.
        """
        if self._ethernet is not None:
            self.rails.set_ethernet(self._ethernet.facts())
        handed = handed_over()
        self.rails.correlate(self._relate_rdma(expected, handed), handed)

    def rails_of_namespace(self, netns: int) -> tuple[tuple[RailFacts, int | None], ...]:
        """Rails that processes of a network namespace can use, each with when it last changed its carrier.

        What is read of them is not older than a second or so, unless reading takes long.
        """
        if self._ethernet is not None:
            self._ethernet.read_again(netns)
            self.rails.set_ethernet(self._ethernet.facts())
        rdma = self._rdma.rails() if self._rdma is not None and self._rdma.carries_collectives else ()
        return (*self.rails.rails_of_namespace(netns), *((rail, None) for rail in rdma))

    def rail_facts(self) -> tuple[RailFacts, ...]:
        """RDMA ports, then network devices."""
        return (*(self._rdma.rails() if self._rdma is not None else ()), *self.rails.rails())

    def ledgers(self) -> Mapping[RailKey, RailLedger]:
        """Whose the bytes of rails were, by network namespace and device as samplers call them."""
        return {**self.rails.ledgers(), **(self._rdma.ledgers() if self._rdma is not None else {})}

    def gpu_facts(self) -> NodeGpus:
        """GPUs and NVLinks, as each was last read."""
        return self._nvlink.facts() if self._nvlink is not None else NodeGpus()

    def collectors(self) -> tuple[CollectorResult, ...]:
        """How reading went, source by source."""
        sources = (self.rails, self._ethernet, self._rdma, self._nvlink, self._condition, self._fabric)
        return tuple(result for source in sources if source is not None for result in source.collectors())

    def unread_sources(self) -> tuple[str, ...]:
        """Sources that were not read yet, well or badly, since what they are to read is known."""
        sources = (self.rails, self._rdma, self._ethernet, self._nvlink, self._condition)
        return tuple(name for source in sources if source is not None for name in source.unread_sources())

    def close(self) -> None:
        """Stop sampling."""
        self.rails.close()
        if self._ethernet is not None:
            self._ethernet.close()
            self._ethernet_sampler.stop()
        if self._rdma is not None:
            self._rdma.close()
        if self._nvlink is not None:
            self._nvlink.close()
        if self._condition is not None:
            self._condition.close()
        if self._fabric is not None:
            self._fabric.close()

    def _relate_rdma(self, expected: list[ExpectedBytes], handed_over: HandedBytes) -> list[ExpectedBytes]:
        """Relate what goes through RDMA; returns what is left for the network devices."""
        if self._rdma is None:
            return expected
        self._rdma.correlate(expected, handed_over)
        return [] if self._rdma.carries_collectives else expected
