"""RDMA ports as rails: selects them and correlates collectives with port bytes.

Where a host has RDMA rails NCCL sends through them and leaves the network devices alone, unless a job switched that
off (NCCL_IB_DISABLE, NCCL_NET=Socket).  RDMA devices are the host's: the wire bytes of all network namespaces are
expected on them together.

What jobs say of ports and places is believed as far as agent/node/rails/job_settings.py tells, and dropped a few
readings after their processes: NCCL_IB_HCA adds ports, and NCCL_IB_DISABLE of one job moves no bytes of another's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rail_ledger import RailKey, RailLedger
from railscope.agent.facts.snapshot import CollectorResult, RailFacts
from railscope.agent.model.expected import ExpectedBytes, WireTotals
from railscope.agent.node.attribution.evidence import (
    NOT_OBSERVED,
    HandedBytes,
    RailEvidence,
    RailLedgers,
    port_without_others,
    rdma_evidence,
    rdma_headers,
)
from railscope.agent.node.attribution.explained import Correlator, NcclBytes, PortTotals, RailWire
from railscope.agent.node.attribution.queue_pair_owners import NO_CLAIMS, PortClaims, QueuePairOwners
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.rails.counter_rules import TABLES_ONLY, OwnSeverities
from railscope.agent.node.rails.gpu_affinity import MappedNic, map_rails, rdma_ports
from railscope.agent.node.rails.job_settings import Believed, JobSettings, TopologyFiles, believe, sockets_only
from railscope.agent.node.rails.rdma_machine import RdmaMachine
from railscope.agent.node.rails.rdma_ports import PortFacts, RdmaWatch
from railscope.agent.node.rails.selection import LINGER_PERIODS, RdmaPorts
from railscope.agent.node.sampling.sampler import OnReading, Sampler
from railscope.agent.node.sampling.totals import RATE_BOUNDS
from railscope.agent.node.sampling.utilization import Utilization
from railscope.agent.node.targets.processes import NOT_DESCRIBED, Description
from railscope.probes.clock import Clock
from railscope.probes.rdma.inventory import RdmaPort
from railscope.probes.topology.nccl_xml import DATA_DIRECT

_log = logging.getLogger("railscope.rdma")

_RAIL_SET: Final = "rdma"
_NO_RATES: Final = Histogram(RATE_BOUNDS, (0,) * (len(RATE_BOUNDS) + 1), 0.0)


class RdmaRails:
    """Not thread-safe: the daemon's lock guards it; the counters are read by a thread of their own."""

    def __init__(
        self,
        clock: Clock,
        *,
        sysfs: Path,
        sample_interval_ns: int,
        window_ns: int,
        patterns: Sequence[RailPattern],
        on_reading: OnReading | None = None,
        own_severities: OwnSeverities = TABLES_ONLY,
        excluded: Sequence[str] = (),
        queue_pairs: QueuePairOwners | None = None,
    ) -> None:
        """`on_reading` is shown what the sampler reads; None: nobody asks.

        `queue_pairs` tells whose the queue pairs of ports are, as others keep it up to date; None: it is not known.
        """
        self._clock = clock
        self._linger_ns = LINGER_PERIODS * sample_interval_ns
        self._patterns = patterns
        # Apart from the network devices' sampler: the firmware of a card may let one read take long.
        self._sampler = Sampler(clock, on_reading)
        self._watch = RdmaWatch(
            clock,
            self._sampler,
            sysfs=sysfs,
            bytes_period_seconds=sample_interval_ns / 1e9,
            netlink=str(sysfs) == "/sys",
            own_severities=own_severities,
            excluded=excluded,
        )
        self._correlator = Correlator(window_ns)
        self._said: dict[int, JobSettings | None] = {}
        """By process; None: it has not been read."""
        self._topology_files = TopologyFiles()
        self._leaving: dict[int, int] = {}
        """Until when the settings of ended processes count, ns."""
        self._mapped: dict[tuple[str, int | None], MappedNic] = {}
        self._mapped_from: tuple[RdmaMachine, Believed] | None = None
        self._wire: dict[tuple[str, str], RailWire] = {}
        self._handed_over = NOT_OBSERVED
        self._ledgers = RailLedgers()
        self._queue_pairs = queue_pairs
        self._claimed_at: dict[tuple[int, str], tuple[int | None, int, int]] = {}
        """By port: which reading of queue pairs was the last one, and what the port had sent and received then."""
        self._utilization = Utilization(window_ns)

    def start(self) -> None:
        """Find the ports there are, and begin to read."""
        self._watch.update()
        self._sampler.start()
        self._decide()

    @property
    def has_ports(self) -> bool:
        return bool(self._watch.ports)

    def add_process(self, pid: int, description: Description, tenant: Tenant = UNKNOWN_TENANT) -> None:
        """A process maps NCCL; called again when more is known of it."""
        if description.topology_trouble:
            _log.info("NCCL's topology file of process %d is not used: %s", pid, description.topology_trouble)
        self._leaving.pop(pid, None)
        if description is NOT_DESCRIBED:
            self._said.setdefault(pid, None)
            return
        topology = description.topology
        self._said[pid] = JobSettings(
            description.setting("NCCL_IB_HCA"),
            sockets_only(description.setting("NCCL_IB_DISABLE"), description.setting("NCCL_NET")),
            tenant,
            self._topology_files.file_with(topology, tenant) if topology is not None else None,
        )

    def remove_process(self, pid: int) -> None:
        if pid in self._said:
            self._leaving[pid] = self._clock.monotonic_ns() + self._linger_ns

    @property
    def carries_collectives(self) -> bool:
        """Whether collectives between hosts go through RDMA here."""
        if all(entry.rail is None for entry in self._mapped.values()):
            return False
        return not self._said or not all(said is not None and said.sockets_only for said in self._said.values())

    @property
    def all_sent(self) -> bool:
        """See `Correlator.all_sent`."""
        return self._correlator.all_sent

    def update(self) -> None:
        """Find devices that came or went, and decide which are rails."""
        now_ns = self._clock.monotonic_ns()
        for pid in [pid for pid, until_ns in self._leaving.items() if until_ns <= now_ns]:
            del self._leaving[pid], self._said[pid]
        self._watch.update()
        self._decide()

    def correlate(self, expected: Sequence[ExpectedBytes], handed_over: HandedBytes = NOT_OBSERVED) -> None:
        """Bring expected wire bytes and port bytes together."""
        self._handed_over = handed_over
        ports = [
            PortTotals(
                _RAIL_SET,
                facts.port.device,
                str(facts.port.port),
                facts.transmit_bytes,
                facts.receive_bytes,
                entry.carries,
                self._bytes_of_nccl(facts.port, (facts.transmit_bytes, facts.receive_bytes)),
            )
            for facts, entry in self._rails()
            if facts.transmit_bytes is not None and facts.receive_bytes is not None
        ]
        now_ns = self._clock.monotonic_ns()
        wire = self._correlator.update(now_ns, ports, [_together(expected)] if self.carries_collectives else [])
        self._wire = {(entry.device, entry.port): entry for entry in wire}
        for carried in ports:
            key = (carried.device, carried.port)
            self._utilization.record(key, now_ns, carried.transmit_bytes, carried.receive_bytes)
        self._ledgers.update([evidence for facts, _ in self._rails() for evidence in self._evidence(facts)])

    def _claims(self, port: RdmaPort, counted: tuple[int, int]) -> tuple[PortClaims, tuple[int, int]]:
        """What queue pairs tell of a port, and what it had sent and received when they were read last.

        `counted`: what it has sent and received by now.
        """
        claims = NO_CLAIMS
        if self._queue_pairs is not None:
            headers = rdma_headers(infiniband=port.link_layer == "InfiniBand")
            claims = self._queue_pairs.claims(port.device, port.port, headers)
        before = self._claimed_at.get(_key(port))
        if before is None or before[0] != claims.read_ns:
            before = self._claimed_at[_key(port)] = claims.read_ns, *counted
        return claims, before[1:]

    def _bytes_of_nccl(self, port: RdmaPort, counted: tuple[int, int]) -> NcclBytes:
        """What NCCL alone moved, as far as it is seen; `counted` as in `_claims`."""
        handed = self._handed(port) if self._handed_over.whole else None
        claims, (sent, received) = self._claims(port, counted)
        if not claims.counted:
            return NcclBytes(handed)
        return NcclBytes(handed, port_without_others(sent, claims.sent), port_without_others(received, claims.received))

    def _evidence(self, facts: PortFacts) -> Iterable[RailEvidence]:
        """What is known of where a port's bytes came from; nothing while its bytes are not known."""
        port = facts.port
        if facts.transmit_bytes is not None and facts.receive_bytes is not None:
            counted = facts.transmit_bytes, facts.receive_bytes
            claims, before = self._claims(port, counted)
            undecided = (counted[0] - before[0], counted[1] - before[1]) if claims.counted else (0, 0)
            yield rdma_evidence(
                _key(port),
                facts.transmit_bytes,
                facts.receive_bytes,
                {name: count for name, _severity, count in facts.counters},
                self._wire.get((port.device, str(port.port))),
                self._handed(port),
                complete=self._handed_over.whole,
                infiniband=port.link_layer == "InfiniBand",
                claims=claims,
                undecided=undecided,
                in_network=self._handed_over.in_network,
            )

    def _handed(self, port: RdmaPort) -> int | None:
        """Bytes that collectives handed to a device; None: not observed."""
        if self._handed_over.device_bytes is None:
            return None
        # Counted by the sending process's namespace, which need not be the device's.
        names = (port.device, f"{port.device}{DATA_DIRECT}")
        return sum(value for (_, device), value in self._handed_over.device_bytes.items() if device in names)

    def ledgers(self) -> Mapping[RailKey, RailLedger]:
        """Whose the bytes of rails were, by port as samplers call it (`mlx5_0/1`)."""
        known = self._ledgers.known()
        keys = {_key(facts.port): (0, f"{facts.port.device}/{facts.port.port}") for facts, _ in self._rails()}
        return {name: known[key] for key, name in keys.items() if key in known}

    def rails(self) -> tuple[RailFacts, ...]:
        """Every port that is a rail, by number."""
        return tuple(self._facts(facts, mapped) for facts, mapped in self._rails())

    @property
    def rail_ports(self) -> tuple[tuple[str, RdmaPort], ...]:
        """(rail, port) of every port that is a rail."""
        mapped = ((port, self._mapped.get((port.device, port.port))) for port in self._watch.ports)
        return tuple((entry.rail, port) for port, entry in mapped if entry is not None and entry.rail is not None)

    @property
    def names(self) -> RdmaPorts:
        """What the network devices' rails need to know of these."""
        return rdma_ports(self._watch.ports, self._mapped.values())

    def collectors(self) -> tuple[CollectorResult, ...]:
        """How reading goes; none on a host without RDMA."""
        return self._watch.collectors()

    def unread_sources(self) -> tuple[str, ...]:
        """Sources that were not read yet, well or badly."""
        return self._sampler.state().unread_sources

    def close(self) -> None:
        self._watch.close()
        self._sampler.stop()

    def _decide(self) -> None:
        machine = self._watch.machine
        believed = believe([said for said in self._said.values() if said is not None])
        mapped_from = machine, believed
        if self._mapped_from == mapped_from:
            return
        self._mapped_from = mapped_from
        if not machine.ports:
            self._mapped = {}
            return
        if machine.trouble:
            self._say_unmapped(machine.trouble)
            return
        known = [key for key, entry in self._mapped.items() if entry.rail is not None and not entry.requested]
        try:
            mapped = map_rails(
                machine.nics,
                machine.gpus,
                patterns=self._patterns,
                hca_lists=believed.hca_lists,
                numbered_by=believed.numbered_by,
                topology=believed.topology(machine.nics, machine.gpus),
                known=known,
            )
        except ValueError as error:
            self._say_unmapped(str(error))
            return
        before, self._mapped = self._mapped, {(entry.nic.device, entry.nic.port): entry for entry in mapped}
        for key, entry in self._mapped.items():
            earlier = before.get(key)
            if earlier is not None and (earlier.rail, earlier.reason) == (entry.rail, entry.reason):
                continue  # another port changed
            name = f"{entry.nic.device}:{entry.nic.port}"
            _log.info("%s is %s: %s", name, f"rail {entry.rail}" if entry.rail else "no rail", entry.reason)

    def _say_unmapped(self, why: str) -> None:
        _log.warning("cannot determine which RDMA ports are rails: %s", why)

    def _rails(self) -> list[tuple[PortFacts, MappedNic]]:
        found = []
        for facts in self._watch.facts():
            entry = self._mapped.get((facts.port.device, facts.port.port))
            if entry is not None and entry.rail is not None:
                found.append((facts, entry))
        return found

    def _facts(self, facts: PortFacts, mapped: MappedNic) -> RailFacts:
        port = facts.port
        wire = self._wire.get((port.device, str(port.port)))
        utilization = self._utilization.ratios_of((port.device, str(port.port)), port.rate_bytes_per_second)
        return RailFacts(
            rail=mapped.rail or UNKNOWN,
            device=port.device,
            port=str(port.port),
            netdev=port.netdev or UNKNOWN,
            netns="",
            pci=port.pci or UNKNOWN,
            numa=UNKNOWN if port.numa_node is None else str(port.numa_node),
            gpu=mapped.gpu_label,
            link_layer=port.link_layer,
            driver=port.driver or UNKNOWN,
            up=port.up,
            speed_bytes_per_second=port.rate_bytes_per_second,
            transmit_bytes=facts.transmit_bytes,
            receive_bytes=facts.receive_bytes,
            transmit_wire_bytes=wire.transmit.wire_bytes if wire else None,
            receive_wire_bytes=wire.receive.wire_bytes if wire else None,
            transmit_explained_ratio=wire.transmit.explained_ratio if wire else None,
            receive_explained_ratio=wire.receive.explained_ratio if wire else None,
            transmit_rate=facts.transmit_rate or _NO_RATES,
            receive_rate=facts.receive_rate or _NO_RATES,
            counters=facts.counters,
            gauges=facts.gauges,
            physical_state="" if port.physical_state == UNKNOWN else port.physical_state,
            firmware=port.firmware,
            board=port.board,
            transmit_collective_bytes=self._handed(port),
            pinned=facts.pinned,
            bond_members=tuple((member.name, member.up) for member in port.bond_members),
            ledger=self._ledgers.get(_key(port)),
            lanes=port.lanes if port.up is not False else None,
            speed_to_siblings=mapped.link.speed_ratio,
            lanes_to_siblings=mapped.link.lanes_ratio,
            transmit_utilization=utilization[0],
            receive_utilization=utilization[1],
        )


def _key(port: RdmaPort) -> tuple[int, str]:
    """What a port is called among ledgers."""
    return 0, f"{port.device}:{port.port}"


def _together(expected: Sequence[ExpectedBytes]) -> ExpectedBytes:
    """The bytes of all network namespaces as those of one set of rails."""

    def add(totals: Sequence[WireTotals]) -> WireTotals:
        return WireTotals(
            sum(one.spread_bytes for one in totals),
            sum(one.small_bytes for one in totals),
            next((one.unknown for one in totals if one.unknown), ""),
        )

    return ExpectedBytes(_RAIL_SET, add([one.transmit for one in expected]), add([one.receive for one in expected]))
