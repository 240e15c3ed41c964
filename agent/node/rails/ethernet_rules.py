"""What the statistics of Ethernet drivers mean: of what, of which priority, and how much an increase matters.

Every driver has names of its own; what is not named here is not taken in, the counters of single queues above all.
The name stays the counter's label.  A packet dropped for want of buffer is normal for a priority that may lose
packets, and an alarm for one that may not: priorities whose pauses were ever counted are taken for lossless.

Sources: NVIDIA's description of mlx5's counters (Linux Documentation/networking/device_drivers/ethernet/mellanox/
mlx5/counters.rst), and the statistics of bnxt_en, ice, i40e and ena in Linux drivers/net/ethernet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from railscope.agent.node.rails.counter_rules import Severity
from railscope.probes.netdev.ethtool_stats import DeviceStatistics, StatisticUse

StatisticKind = Literal[
    "allowance",
    "discard",
    "ecn",
    "fec",
    "link",
    "module",
    "pause",
    "pci",
    "physical",
    "port_bytes",
    "rdma_bytes",
    "rdma_packets",
]
Direction = Literal["transmit", "receive", ""]


@dataclass(frozen=True, slots=True)
class StatisticRule:
    """What one statistic means."""

    kind: StatisticKind
    severity: Severity
    unit: str
    """`bytes`, `packets`, `frames`, `events`, `bits`, `blocks`, `microseconds`, `percent`."""
    direction: Direction = ""
    """Empty for what has none."""
    priority: int | None = None
    """0 to 7; None: of the whole port."""

    @property
    def gauge(self) -> bool:
        """A value of now, and no counter."""
        return self.unit == "percent"


_Pattern = tuple[re.Pattern[str], StatisticRule]


def _patterns(kind: StatisticKind, severity: Severity, unit: str, *expressions: str) -> tuple[_Pattern, ...]:
    """In an expression `WAY` stands for rx or tx, `N` for a priority."""
    rule = StatisticRule(kind, severity, unit)
    return tuple(
        (re.compile(text.replace("WAY", "(?P<way>rx|tx)").replace("N", "(?P<priority>[0-7])")), rule)
        for text in expressions
    )


_PATTERNS: Final = (
    # A link that went down, and a card that gave up on a peer which pauses it without end.
    *_patterns("link", "page", "events", "link_down_events(_phy)?"),
    *_patterns("pause", "page", "events", "WAY_pause_storm_error_events"),
    *_patterns("pause", "warn", "events", "WAY_pause_storm_warning_events"),
    *_patterns("module", "warn", "events", "module_(unplug|bus_stuck|bad_shorted|high_temp)"),
    # Flow control at work, normal under load.  By driver: mlx5, bnxt_en, ice and i40e.
    *_patterns("pause", "context", "frames", "WAY_prioN_pause(_transition)?", "WAY_global_pause(_transition)?"),
    *_patterns("pause", "context", "microseconds", "WAY_prioN_pause_duration", "WAY_global_pause_duration"),
    *_patterns("pause", "context", "frames", "WAY_pause_ctrl_phy", "WAY_pause_frames", "WAY_pfc_ena_frames_priN"),
    *_patterns("pause", "context", "frames", r"(port\.)?WAY_priority_N_xo(n|ff)(\.nic)?"),
    *_patterns("pause", "context", "frames", r"(port\.)?link_xo(n|ff)_WAY(\.nic)?"),
    # Lost for want of room; `lossless` tells more of those of one priority.
    *_patterns("discard", "warn", "packets", "WAY_prioN_(buf_discard|cong_discard|discards)", "WAY_discards_phy"),
    *_patterns("discard", "warn", "packets", "WAY_(total_)?discard_pkts", r"(port\.)?WAY_(dropped|drops)(\.nic)?"),
    *_patterns("discard", "warn", "packets", "WAY_(queue_dropped|out_of_buffer|steer_missed_packets)"),
    *_patterns("discard", "warn", "packets", "dev_out_of_buffer"),
    # A limit of the cloud, reached: ena.
    *_patterns("allowance", "warn", "packets", "(bw_in|bw_out|pps|conntrack|linklocal)_allowance_exceeded"),
    *_patterns("ecn", "context", "packets", "WAY_prioN_marked", "WAY_ecn_mark(ed)?(_pkts)?"),
    # What forward error correction mended, and what it could not.
    *_patterns("fec", "context", "bits", "WAY_corrected_bits(_phy)?"),
    *_patterns("fec", "context", "blocks", "WAY_fec_corrected_blocks"),
    *_patterns("fec", "context", "events", "WAY_err_lane_[0-9]+_phy"),
    *_patterns("fec", "warn", "blocks", "WAY_fec_uncorrectable_blocks"),
    *_patterns("fec", "warn", "events", "WAY_pcs_symbol_err(_phy)?"),
    # Frames that came damaged.
    *_patterns("physical", "warn", "packets", r"(port\.)?WAY_(crc_errors|symbol_err|errors)(_phy|\.nic)?"),
    *_patterns("physical", "warn", "packets", "WAY_fcs_err_frames", "WAY_(fragments|jabbers|unsupported_op)_phy"),
    *_patterns("physical", "warn", "packets", "WAY_(in_range_len_errors|out_of_range_len)_phy"),
    *_patterns("physical", "warn", "packets", "WAY_(undersize|oversize)_pkts_phy"),
    # The way between card and memory.
    *_patterns("pci", "warn", "events", "WAY_pci_signal_integrity"),
    *_patterns("pci", "context", "percent", "outbound_pci_stalled_(rd|wr)"),
    *_patterns("pci", "context", "events", "outbound_pci_stalled_(rd|wr)_events"),
    # All bytes of the physical port, RDMA and other functions included; and this function's RDMA.
    *_patterns("port_bytes", "context", "bytes", "WAY_bytes_phy"),
    *_patterns("rdma_bytes", "context", "bytes", "WAY_vport_rdma_(unicast|multicast)_bytes"),
    *_patterns("rdma_packets", "context", "packets", "WAY_vport_rdma_(unicast|multicast)_packets"),
)
_DIRECTIONS: Final[dict[str, Direction]] = {"rx": "receive", "tx": "transmit"}


@lru_cache(maxsize=8192)
def statistic_rule(name: str) -> StatisticRule | None:
    """The rule of an Ethernet driver's statistic; None: it is not taken in."""
    for expression, rule in _PATTERNS:
        match = expression.fullmatch(name)
        if match is not None:
            found = match.groupdict()
            priority = found.get("priority")
            return replace(
                rule,
                direction=_DIRECTIONS.get(found.get("way", ""), ""),
                priority=None if priority is None else int(priority),
            )
    return None


def statistic_use(name: str) -> StatisticUse:
    """What a reader of an Ethernet driver's statistics is to do with this one."""
    rule = statistic_rule(name)
    if rule is None:
        return StatisticUse.IGNORED
    return StatisticUse.GAUGE if rule.gauge else StatisticUse.COUNTER


def lossless_priorities(statistics: DeviceStatistics) -> frozenset[int]:
    """Priorities for which a pause was sent or received since the driver was loaded."""
    found = set()
    for name, value in zip(statistics.names, statistics.values, strict=True):
        rule = statistic_rule(name)
        if value and rule is not None and rule.kind == "pause" and rule.priority is not None:
            found.add(rule.priority)
    return frozenset(found)


def severity_of(rule: StatisticRule, lossless: frozenset[int]) -> Severity:
    """How much an increase of an Ethernet statistic matters on a port with these lossless priorities."""
    return "page" if rule.kind == "discard" and rule.priority in lossless else rule.severity
