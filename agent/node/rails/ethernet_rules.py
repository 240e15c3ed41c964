"""What the statistics of Ethernet drivers mean: of what, of which priority, and how much an increase matters.

Every driver has names of its own; what is not named here, nor by the operator (`rails.severities`), is not taken in,
the counters of single queues above all.  The name stays the counter's label.

* `page`: the link went down.
* `warn`: frames damaged or dropped, a queue that had to be reset, a peer that pauses without end (PFC watchdog).  A
  packet dropped for want of buffer is normal for a priority that may lose packets, and so `context`; one of a priority
  that may not is `warn`, and priorities whose pauses were ever counted are taken for lossless.
* `context`: flow control, marks and error correction at work, and traffic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from railscope.agent.node.rails.counter_rules import TABLES_ONLY, OwnSeverities, Severity
from railscope.probes.netdev.ethtool_stats import DeviceStatistics, StatisticUse

StatisticKind = Literal[
    "allowance",
    "discard",
    "ecn",
    "fec",
    "link",
    "module",
    "own",
    "pause",
    "pci",
    "physical",
    "port_bytes",
    "rdma_bytes",
    "rdma_packets",
    "reset",
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
_Row = tuple[StatisticKind, Severity, str, str]
"""(kind, severity, unit, expressions); in these `WAY` stands for rx or tx, `N` for a priority."""

_TABLE: Final[tuple[tuple[str, tuple[_Row, ...]], ...]] = (
    (
        "mlx5: Linux Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst",
        (
            ("link", "page", "events", "link_down_events(_phy)?"),
            ("link", "warn", "events", "total_success_recovery_phy"),
            ("pause", "warn", "events", "WAY_pause_storm_(warning|error)_events"),
            ("module", "warn", "events", "module_(unplug|bus_stuck|bad_shorted|high_temp)"),
            ("pause", "context", "frames", "WAY_(prioN|global)_pause(_transition)? WAY_pause_ctrl_phy"),
            ("pause", "context", "microseconds", "WAY_(prioN|global)_pause_duration"),
            ("discard", "warn", "packets", "WAY_prioN_(buf_discard|cong_discard|discards) WAY_discards_phy"),
            ("discard", "warn", "packets", "WAY_(queue_dropped|out_of_buffer|steer_missed_packets)"),
            ("discard", "warn", "packets", "dev_out_of_buffer dev_internal_queue_oob"),
            ("ecn", "context", "packets", "WAY_prioN_marked WAY_ecn_mark(ed)?(_pkts)?"),
            ("fec", "context", "bits", "WAY_corrected_bits(_phy)?"),
            ("fec", "context", "events", "WAY_err_lane_[0-9]+_phy"),
            ("fec", "warn", "events", "WAY_pcs_symbol_err(_phy)?"),
            ("physical", "warn", "packets", "WAY_(crc_errors|symbol_err|errors)_phy"),
            ("physical", "warn", "packets", "WAY_(fragments|jabbers|unsupported_op)_phy"),
            ("physical", "warn", "packets", "WAY_(in_range_len_errors|out_of_range_len)_phy"),
            ("physical", "warn", "packets", "WAY_(undersize|oversize)_pkts_phy"),
            # The way between card and memory.
            ("pci", "warn", "events", "WAY_pci_signal_integrity"),
            ("pci", "context", "percent", "outbound_pci_stalled_(rd|wr)"),
            ("pci", "context", "events", "outbound_pci_stalled_(rd|wr)_events"),
            # All bytes of the physical port, RDMA and other functions included; and this function's RDMA.
            ("port_bytes", "context", "bytes", "WAY_bytes_phy"),
            ("rdma_bytes", "context", "bytes", "WAY_vport_rdma_(unicast|multicast)_bytes"),
            ("rdma_packets", "context", "packets", "WAY_vport_rdma_(unicast|multicast)_packets"),
        ),
    ),
    (
        "bnxt_en: drivers/net/ethernet/broadcom/bnxt/bnxt_ethtool.c",
        (
            # A peer pauses this port, of all traffic or of RoCE alone, for longer than the card allows.
            ("pause", "warn", "events", "continuous_(roce_)?pause_events"),
            ("pause", "context", "events", "resume_(roce_)?pause_events"),
            ("pause", "context", "frames", "WAY_(pause|pfc)_frames WAY_pfc_ena_frames_priN"),
            ("pause", "context", "microseconds", "pfc_priN_WAY_duration_us"),
            ("pause", "context", "events", "pfc_priN_WAY_transitions"),
            ("discard", "warn", "packets", "WAY_(total_)?discard_pkts WAY_discard_packets_cos[0-7]"),
            ("discard", "warn", "packets", "WAY_total_(ring|oom|netpoll)_discards WAY_stat_discard"),
            ("discard", "warn", "events", "WAY_total_buf_errors WAY_buffer_passed_threshold WAY_fifo_underruns"),
            ("reset", "warn", "events", "WAY_total_resets"),
            ("fec", "context", "blocks", "WAY_fec_corrected_blocks"),
            ("fec", "warn", "blocks", "WAY_fec_uncorrectable_blocks"),
            ("physical", "warn", "packets", "WAY_(fcs_err|align_err|code_err|mtu_err|sch_crc_err)_frames"),
            ("physical", "warn", "packets", "WAY_(jabber|jbr|ovrsz|runt|false_carrier)_frames WAY_(err|stat_err(or)?)"),
        ),
    ),
    (
        "ice and i40e: drivers/net/ethernet/intel/ice/ice_ethtool.c, drivers/net/ethernet/intel/i40e/i40e_ethtool.c",
        (
            ("link", "warn", "events", r"(port\.)?mac_(local|remote)_faults(\.nic)?"),
            ("pause", "context", "frames", r"(port\.)?WAY_priority_N_xo(n|ff)(_2_xoff)?(\.nic)?"),
            ("pause", "context", "frames", r"(port\.)?link_xo(n|ff)_WAY(\.nic)?"),
            ("discard", "warn", "packets", r"(port\.)?WAY_(dropped|drops|dropped_link_down)(\.nic)?"),
            ("reset", "warn", "events", r"(port\.)?tx_timeout(\.nic)?"),
            (
                "physical",
                "warn",
                "packets",
                r"(port\.)?WAY_(crc_errors|symbol_err|errors|length_errors|len_errors)(\.nic)?",
            ),
            ("physical", "warn", "packets", r"(port\.)?WAY_(undersize|oversize|fragments|jabber)(\.nic)?"),
            ("physical", "warn", "bytes", r"(port\.)?illegal_bytes(\.nic)?"),
        ),
    ),
    (
        "ena: drivers/net/ethernet/amazon/ena/ena_ethtool.c",
        (
            # A limit of the cloud, reached.
            ("allowance", "warn", "packets", "(bw_in|bw_out|pps|conntrack|linklocal)_allowance_exceeded"),
            ("discard", "warn", "packets", "WAY_overruns"),
            # The device did not answer, and was reset.
            ("reset", "warn", "events", "wd_expired total_resets reset_fail admin_q_pause ena_admin_q_no_completion"),
        ),
    ),
    (
        "gve: drivers/net/ethernet/google/gve/gve_ethtool.c",
        (
            ("discard", "warn", "packets", "rx_(skb|buf)_alloc_fail rx_desc_err_dropped_pkt"),
            ("discard", "warn", "events", "page_alloc_fail dma_mapping_error"),
            ("reset", "warn", "events", "tx_timeouts reset_cnt adminq_timeouts adminq_cmd_fail"),
        ),
    ),
    (
        "mana: drivers/net/ethernet/microsoft/mana/mana_ethtool.c",
        (
            ("discard", "warn", "packets", "hc_rx_discards_no_wqe hc_WAY_pkt_drop_phy"),
            ("discard", "warn", "packets", "hc_rx_err_vport_disabled hc_tx_err_(gf|vport)_disabled"),
            ("discard", "warn", "packets", "hc_tx_err_(inval_vportoffset_pkt|inval_oob|mtu_violation|gdma)"),
            ("discard", "warn", "packets", "hc_tx_err_(vlan|eth_type|sa|sqpdid|cqpdid)_enforcement"),
            ("reset", "warn", "events", "tx_cqe?_err WAY_cqe_unknown_type"),
            ("pause", "context", "frames", "hc_tcN_WAY_pause_phy"),
        ),
    ),
    (
        "ionic: drivers/net/ethernet/pensando/ionic/ionic_stats.c",
        (
            ("discard", "warn", "packets", "hw_WAY_dropped frames_WAY_dropped"),
            ("discard", "warn", "packets", "hw_rx_(over|missed)_errors hw_tx_aborted_errors"),
            ("pause", "context", "frames", "frames_WAY_(pause|pripause)"),
            ("pause", "context", "microseconds", "WAY_pripause_N_1us_count"),
            ("physical", "warn", "packets", "frames_rx_bad_(fcs|all|length) frames_tx_bad"),
            ("physical", "warn", "packets", "frames_rx_(undersized|oversized|fragments|jabber|too_long)"),
            # Damaged before: a switch that cuts through passed it on with a spoilt checksum.
            ("physical", "context", "packets", "frames_rx_stomped_crc"),
        ),
    ),
    (
        "hns3: drivers/net/ethernet/hisilicon/hns3/hns3pf/hclge_main.c",
        (
            ("pause", "context", "frames", "mac_WAY_pfc_priN_pkt_num mac_WAY_mac_pause_num"),
            ("physical", "warn", "packets", "mac_rx_fcs_err_pkt_num mac_WAY_bad_pkt_num mac_tx_err_all_pkt_num"),
        ),
    ),
)


def _patterns() -> tuple[_Pattern, ...]:
    return tuple(
        (
            re.compile(text.replace("WAY", "(?P<way>rx|tx)").replace("N", "(?P<priority>[0-7])")),
            StatisticRule(kind, severity, unit),
        )
        for _driver, rows in _TABLE
        for kind, severity, unit, texts in rows
        for text in texts.split()
    )


_PATTERNS: Final = _patterns()
_OF_A_QUEUE: Final = re.compile(r"(\[[0-9]+\]: |(rx|tx|ch|ring|rxq|txq|queue)_?[0-9]|(rx|tx)_queue_).*|.*\[[0-9]+\]")
"""A name that a queue's number is in: there are thousands of them."""
_DIRECTIONS: Final[dict[str, Direction]] = {"rx": "receive", "tx": "transmit"}
_OWN: Final = StatisticRule("own", "context", "events")


@lru_cache(maxsize=8192)
def statistic_rule(name: str) -> StatisticRule | None:
    """The rule of an Ethernet driver's statistic; None: the table has none, and it is not taken in."""
    if _OF_A_QUEUE.fullmatch(name):
        return None
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


class StatisticRules:
    """Which statistics of Ethernet drivers are taken in and what they mean, by the table and by the operator."""

    def __init__(self, own: OwnSeverities = TABLES_ONLY) -> None:
        self._own = own

    def rule(self, name: str) -> StatisticRule | None:
        """The rule of a statistic; None: it is not taken in."""
        rule = statistic_rule(name)
        return _OWN if rule is None and self._own.find(name) is not None else rule

    def use(self, name: str) -> StatisticUse:
        """What a reader of an Ethernet driver's statistics is to do with this one."""
        rule = self.rule(name)
        if rule is None:
            return StatisticUse.IGNORED
        return StatisticUse.GAUGE if rule.gauge else StatisticUse.COUNTER

    def severity(self, name: str, rule: StatisticRule, lossless: frozenset[int]) -> Severity:
        """How much an increase of a statistic matters on a port with these lossless priorities."""
        lossy = rule.kind == "discard" and rule.priority is not None and rule.priority not in lossless
        return self._own.of(name, "context" if lossy else rule.severity)


def lossless_priorities(statistics: DeviceStatistics) -> frozenset[int]:
    """Priorities for which a pause was sent or received since the driver was loaded."""
    found = set()
    for name, value in zip(statistics.names, statistics.values, strict=True):
        rule = statistic_rule(name)
        if value and rule is not None and rule.kind == "pause" and rule.priority is not None:
            found.add(rule.priority)
    return frozenset(found)
