"""What is known of the Ethernet side of one rail, as facts: a driver's counters, a queue, TCP connections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from railscope.agent.facts.snapshot import RailQueue, RailTcp
from railscope.agent.node.attribution.evidence import PortAndConnections
from railscope.agent.node.rails.counter_rules import Severity
from railscope.agent.node.rails.ethernet_rules import (
    Direction,
    StatisticKind,
    StatisticRules,
    lossless_priorities,
    statistic_rule,
)
from railscope.agent.node.sampling.state import DeviceTotals
from railscope.probes.netdev.connection_accounts import DeviceConnections
from railscope.probes.netdev.ethtool_stats import DeviceStatistics
from railscope.probes.netdev.qdisc import DeviceQueue


@dataclass(frozen=True, slots=True)
class EthernetCounter:
    """One counter of a driver."""

    name: str
    """As the driver calls it."""
    kind: StatisticKind
    severity: Severity
    unit: str
    direction: Direction
    priority: int | None
    count: int
    """As the driver counts, and going on when that begins again: never falls."""


@dataclass(frozen=True, slots=True)
class EthernetGauge:
    """One value of a driver as it is now."""

    name: str
    unit: str
    value: int


@dataclass(frozen=True, slots=True)
class RailEthernet:
    """One rail; a part is None where it is not known, or not yet."""

    netns: int
    """Inode of the network namespace."""
    rail: str
    device: str
    counters: tuple[EthernetCounter, ...]
    gauges: tuple[EthernetGauge, ...]
    queue: RailQueue | None
    tcp: RailTcp | None
    together: PortAndConnections | None = None
    """The port and its connections at one moment."""
    awaited: bool = False
    """Whether connections are to be read and have not been yet."""


def ethernet_counters(
    shown: DeviceStatistics, counted: DeviceTotals, rules: StatisticRules
) -> tuple[EthernetCounter, ...]:
    """The driver's statistics of one Ethernet device as facts, in the driver's order."""
    lossless = lossless_priorities(shown)
    counts = dict(counted.counters)
    found = []
    for name in shown.names:
        rule = rules.rule(name)
        if rule is not None and name in counts:
            severity = rules.severity(name, rule, lossless)
            found.append(
                EthernetCounter(name, rule.kind, severity, rule.unit, rule.direction, rule.priority, counts[name])
            )
    return tuple(found)


def ethernet_gauges(shown: DeviceStatistics) -> tuple[EthernetGauge, ...]:
    """What a driver of an Ethernet device shows that is no counter, by its value of now."""
    rules = [(name, statistic_rule(name), value) for name, value in zip(shown.names, shown.values, strict=True)]
    return tuple(EthernetGauge(name, rule.unit, value) for name, rule, value in rules if rule and rule.gauge)


def pci_stalled(gauges: Iterable[EthernetGauge]) -> tuple[tuple[str, float], ...]:
    """(`read` or `write`, part of the last second) in which a card waited for the PCIe bus; mlx5 alone shows it."""
    directions = {"outbound_pci_stalled_rd": "read", "outbound_pci_stalled_wr": "write"}
    return tuple((directions[gauge.name], gauge.value / 100) for gauge in gauges if gauge.name in directions)


def rail_queue(waiting: DeviceQueue, counted: DeviceTotals) -> RailQueue:
    """Bring together what waits now in a rail's queue and what was counted."""
    total = dict(counted.counters)
    return RailQueue(
        discipline=waiting.kind,
        backlog_bytes=waiting.backlog_bytes,
        queued_packets=waiting.queued_packets,
        drops=total["drops"],
        overlimits=total["overlimits"],
        requeues=total["requeues"],
    )


def rail_tcp(faring: DeviceConnections, counted: DeviceTotals) -> RailTcp:
    """Combine the state of a rail's TCP connections with what they carried."""
    total = dict(counted.counters)
    mean_us, maximum_us = faring.round_trip_mean_us, faring.round_trip_maximum_us
    deviation_us = faring.round_trip_deviation_us
    return RailTcp(
        connections=faring.connections,
        sending=faring.sending,
        round_trip_mean_seconds=None if mean_us is None else mean_us / 1e6,
        round_trip_maximum_seconds=None if maximum_us is None else maximum_us / 1e6,
        round_trip_deviation_seconds=None if deviation_us is None else deviation_us / 1e6,
        delivery_rate_bytes_per_second=faring.delivery_rate_bytes_per_second,
        application_limited=faring.application_limited,
        unacknowledged_segments=faring.unacknowledged_segments,
        not_sent_bytes=faring.not_sent_bytes,
        sent_bytes=counted.transmit_bytes,
        acknowledged_bytes=total["acked_bytes"],
        received_bytes=counted.receive_bytes,
        retransmitted_bytes=total["retransmitted_bytes"],
        retransmitted_segments=total["retransmitted_segments"],
        data_segments=total["data_segments"],
        busy_seconds=total["busy_us"] / 1e6,
        receive_window_limited_seconds=total["receive_window_limited_us"] / 1e6,
        send_buffer_limited_seconds=total["send_buffer_limited_us"] / 1e6,
    )
