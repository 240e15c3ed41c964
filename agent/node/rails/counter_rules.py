"""What the counters of an RDMA port mean: of what, in which unit, and how much an increase matters.

Severities: `page` on any increase, `warn` on a rate that lasts, `context` to understand another finding.  A counter
that is not named here keeps its name and is `context`: nothing is known about it.

Sources: Linux Documentation/ABI/stable/sysfs-class-infiniband, the counters of the drivers in drivers/infiniband/hw,
and NVIDIA's description of mlx5's counters.  A counter's end is a fact of the driver: probes/rdma/widths.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from railscope.probes.rdma.widths import HW_COUNTERS, VPORT_PREFIX

Severity = Literal["page", "warn", "context"]
Kind = Literal["bytes", "packets", "congestion", "loss", "error", "link", "other"]


@dataclass(frozen=True, slots=True)
class CounterRule:
    """What one counter means."""

    kind: Kind
    severity: Severity
    unit: str
    """`bytes`, `packets`, `events`, `requests`, `ticks`, `4 octets`."""
    known: bool = True
    """False: nobody told us what this counts."""


_UNKNOWN: Final = CounterRule("other", "context", "events", known=False)


def _rules(kind: Kind, severity: Severity, unit: str, names: str) -> dict[str, CounterRule]:
    return dict.fromkeys(names.split(), CounterRule(kind, severity, unit))


_RULES: Final = (
    # A link that went down, and buffers that ran over on a network made to lose nothing.
    _rules("link", "page", "events", "link_downed")
    | _rules("error", "page", "events", "local_link_integrity_errors excessive_buffer_overrun_errors")
    # A sender gave up: the queue pair is broken, and with it the job.  By driver: mlx5, bnxt_re, rxe.
    | _rules("error", "page", "events", "req_transport_retries_exceeded req_rnr_retries_exceeded")
    | _rules("error", "page", "events", "max_retry_exceeded retry_exceeded_err retry_rnr_exceeded_err")
    # Packets that were lost or came twice or late: they cost bandwidth, and a few of them happen.
    | _rules("loss", "warn", "events", "local_ack_timeout_err packet_seq_err out_of_sequence implied_nak_seq_err")
    | _rules("loss", "warn", "events", "rnr_nak_retry_err roce_adp_retrans roce_adp_retrans_to")
    | _rules("loss", "warn", "packets", "port_xmit_discards rx_icrc_encapsulated")
    | _rules("loss", "warn", "events", "to_retransmits seq_err_naks_rcvd rnr_naks_rcvd missing_resp")
    | _rules("loss", "warn", "packets", "oos_drop_count rx_roce_discards rx_drops retrans_pkts")
    | _rules("loss", "warn", "events", "retrans_timeout_events unresponsive_remote_events impaired_remote_conn_events")
    | _rules("loss", "warn", "events", "out_of_seq_request rcvd_seq_err rcvd_rnr_err send_rnr_err completer_retry_err")
    | _rules("bytes", "warn", "bytes", "retrans_bytes")
    | _rules("error", "warn", "packets", "port_rcv_errors")
    | _rules("error", "warn", "events", "symbol_error rx_roce_errors unrecoverable_err send_err")
    | _rules("link", "warn", "events", "link_error_recovery")
    # Congestion control at work, and what a healthy port under load shows too.
    | _rules("congestion", "context", "packets", "np_ecn_marked_roce_packets np_cnp_sent rp_cnp_handled rp_cnp_ignored")
    | _rules("congestion", "context", "events", "roce_slow_restart roce_slow_restart_cnps roce_slow_restart_trans")
    | _rules("congestion", "context", "ticks", "port_xmit_wait")
    | _rules("congestion", "context", "packets", "cc_rx_ce_pkts cc_rx_cnp_pkts cc_tx_cnp_pkts")
    | _rules("congestion", "context", "packets", "tx_cnp_pkts rx_cnp_pkts rx_ecn_marked_pkts")
    | _rules("congestion", "context", "packets", "cnpHandled cnpIgnored cnpSent RxECNMrkd")
    | _rules("loss", "context", "events", "duplicate_request dup_req out_of_buffer rx_out_of_buffer")
    | _rules("loss", "context", "packets", "VL15_dropped")
    # Packets damaged before they came here, and those that a partition's rules refuse.
    | _rules("error", "context", "packets", "port_rcv_remote_physical_errors port_rcv_switch_relay_errors")
    | _rules("error", "context", "packets", "port_xmit_constraint_errors port_rcv_constraint_errors")
    # What applications do to each other; queue pairs being torn down flush their requests.
    | _rules("error", "context", "events", "resp_local_length_error resp_cqe_error req_cqe_error")
    | _rules("error", "context", "events", "req_remote_invalid_request req_remote_access_errors")
    | _rules("error", "context", "events", "resp_remote_access_errors resp_cqe_flush_error req_cqe_flush_error")
    | _rules("error", "context", "events", "rdma_read_wr_err rdma_write_wr_err")
    | _rules("packets", "context", "packets", "port_xmit_packets port_rcv_packets sent_pkts rcvd_pkts")
    | _rules("packets", "context", "packets", "unicast_xmit_packets unicast_rcv_packets")
    | _rules("packets", "context", "packets", "multicast_xmit_packets multicast_rcv_packets")
    | _rules("packets", "context", "packets", "tx_pkts rx_pkts rdma_tx_packets rdma_rx_packets rx_roce_good_pkts")
    | _rules("packets", "context", "requests", "rx_write_requests rx_read_requests rx_atomic_requests rx_dct_connect")
    | _rules("bytes", "context", "4 octets", "port_xmit_data port_rcv_data")
    | _rules("bytes", "context", "bytes", "tx_bytes rx_bytes send_bytes recv_bytes rdma_read_bytes rdma_write_bytes")
    | _rules("bytes", "context", "bytes", "rdma_read_resp_bytes rdma_write_recv_bytes rdma_tx_bytes rdma_rx_bytes")
    | _rules("bytes", "context", "bytes", "rx_roce_good_bytes")
)


@lru_cache(maxsize=4096)
def rule_of(name: str) -> CounterRule:
    """The rule of an RDMA counter under the name that RdmaCounters gives it, of a virtual port as of a real one."""
    return _RULES.get(name.removeprefix(f"{HW_COUNTERS}/").removeprefix(VPORT_PREFIX), _UNKNOWN)
