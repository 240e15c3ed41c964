"""What the counters of an RDMA port mean: of what, in which unit, and how much an increase matters.

Severities: `page` on any increase, `warn` on a rate that lasts, `context` to understand another finding.  Each driver
has words of its own for the same events, so the table is by driver, each row with its source:

* `page`: a requester gave up after all its retries (timeouts, or receiver not ready), a fatal error of the device, a
  link that went down, buffers that ran over on a network made to lose nothing.  A queue pair is broken, and its job.
* `warn`: timeouts, sequence errors, packets sent again or discarded.  They cost bandwidth, and a few of them happen.
* `context`: congestion control at work, traffic, and what applications do to each other.

A counter that no row names keeps its name and is `context`: nothing is known about it.  An operator adds to the table
with `rails.severities` (`OwnSeverities`).  A counter's end is a fact of the driver: probes/rdma/widths.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, Literal

from railscope.agent.config.counter_severity import CounterSeverity, Severity
from railscope.probes.rdma.widths import HW_COUNTERS, VPORT_PREFIX

__all__ = ["TABLES_ONLY", "CounterRule", "OwnSeverities", "Severity", "rule_of"]

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


@dataclass(frozen=True, slots=True)
class _Driver:
    """The words of one driver."""

    source: str
    """Where they are written: a file of Linux 6.17, or who publishes them."""
    rows: tuple[tuple[Kind, Severity, str, str], ...]
    """(kind, severity, unit, names); names are separated by spaces, or by commas where one holds a space."""


_TABLE: Final = (
    _Driver(
        "InfiniBand's own, of every driver: Documentation/ABI/stable/sysfs-class-infiniband",
        (
            ("link", "page", "events", "link_downed"),
            ("error", "page", "events", "local_link_integrity_errors excessive_buffer_overrun_errors"),
            ("link", "warn", "events", "link_error_recovery"),
            ("error", "warn", "events", "symbol_error"),
            ("error", "warn", "packets", "port_rcv_errors"),
            ("loss", "warn", "packets", "port_xmit_discards"),
            ("congestion", "context", "ticks", "port_xmit_wait"),
            ("loss", "context", "packets", "VL15_dropped"),
            # Packets damaged before they came here, and those that a partition's rules refuse.
            ("error", "context", "packets", "port_rcv_remote_physical_errors port_rcv_switch_relay_errors"),
            ("error", "context", "packets", "port_xmit_constraint_errors port_rcv_constraint_errors"),
            ("packets", "context", "packets", "port_xmit_packets port_rcv_packets"),
            ("packets", "context", "packets", "unicast_xmit_packets unicast_rcv_packets"),
            ("packets", "context", "packets", "multicast_xmit_packets multicast_rcv_packets"),
            ("bytes", "context", "4 octets", "port_xmit_data port_rcv_data"),
        ),
    ),
    _Driver(
        "mlx5: drivers/infiniband/hw/mlx5/counters.c, and NVIDIA's description of them",
        (
            ("error", "page", "events", "req_transport_retries_exceeded req_rnr_retries_exceeded"),
            ("loss", "warn", "events", "local_ack_timeout_err packet_seq_err out_of_sequence implied_nak_seq_err"),
            ("loss", "warn", "events", "rnr_nak_retry_err roce_adp_retrans roce_adp_retrans_to"),
            ("loss", "warn", "packets", "rx_icrc_encapsulated"),
            ("congestion", "context", "packets", "np_ecn_marked_roce_packets np_cnp_sent rp_cnp_handled"),
            ("congestion", "context", "packets", "rp_cnp_ignored cc_rx_ce_pkts cc_rx_cnp_pkts cc_tx_cnp_pkts"),
            ("congestion", "context", "events", "roce_slow_restart roce_slow_restart_cnps roce_slow_restart_trans"),
            ("loss", "context", "events", "duplicate_request out_of_buffer"),
            # What applications do to each other; queue pairs being torn down flush their requests.
            ("error", "context", "events", "resp_local_length_error resp_cqe_error req_cqe_error"),
            ("error", "context", "events", "req_remote_invalid_request req_remote_access_errors"),
            ("error", "context", "events", "resp_remote_access_errors resp_cqe_flush_error req_cqe_flush_error"),
            ("packets", "context", "requests", "rx_write_requests rx_read_requests rx_atomic_requests"),
            ("packets", "context", "requests", "rx_dct_connect"),
            ("packets", "context", "packets", "rdma_tx_packets rdma_rx_packets"),
            ("bytes", "context", "bytes", "rdma_tx_bytes rdma_rx_bytes"),
        ),
    ),
    _Driver(
        "mana_ib: drivers/infiniband/hw/mana/counters.c",
        (
            ("error", "page", "events", "requester_retries_exceeded requester_rnr_nak_retries_exceeded"),
            ("error", "page", "events", "total_fatal_error general_hw_error"),
            ("loss", "warn", "events", "requester_timeout requester_oos_nak requester_implicit_nak"),
            ("loss", "warn", "events", "requester_rnr_nak responder_rnr_nak responder_oos"),
            ("loss", "warn", "events", "requester_readresp_psn_mismatch"),
            ("congestion", "context", "packets", "received_cnps sent_cnps received_ecns received_cnp_count"),
            ("congestion", "context", "events", "qp_congested_events qp_recovered_events rate_inc_events"),
            ("loss", "context", "events", "responder_dup_request dup_rx_requests"),
            ("error", "context", "events", "nak_inv_req nak_access_error nak_opp_error nak_inv_read"),
            ("error", "context", "events", "responder_local_len_error requestor_local_prot_error"),
            ("error", "context", "events", "responder_rem_access_error responder_local_qp_error"),
            ("error", "context", "events", "responder_malformed_wqe"),
            ("packets", "context", "requests", "rx_send_requests"),
            ("packets", "context", "packets", "tx_packets rx_packets"),
        ),
    ),
    _Driver(
        "irdma: drivers/infiniband/hw/irdma/verbs.c, and the names that Intel's own releases of it have",
        (
            ("loss", "warn", "events", "RTO,Nak Sequence Error,Nak Sequence Error Implied"),
            ("loss", "warn", "events", "RNR sent,RNR received"),
            ("loss", "warn", "packets", "Rcvd Out of order packets,CRC errors"),
            ("loss", "warn", "packets", "tcpRetransSegs RetransSegs ip4InDiscards ip6InDiscards"),
            ("error", "warn", "packets", "ip4InTruncatedPkts ip6InTruncatedPkts tcpInProtoErrors InProtoErrors"),
            ("error", "warn", "packets", "tcpInOptErrors InOptErrors"),
            # No route: a peer's address is wrong.  A VLAN that is not this port's: the switch floods it.
            ("error", "context", "packets", "ip4OutNoRoutes ip6OutNoRoutes rxVlanErrors"),
            ("congestion", "context", "packets", "cnpHandled cnpIgnored cnpSent RxECNMrkd"),
            ("other", "context", "events", "ord limit count,ird limit count"),
            ("packets", "context", "requests", "Rx ATS,Tx ATS,Rx atomics,Tx atomics"),
            ("packets", "context", "requests", "InRdmaReads InRdmaSends InRdmaWrites RdmaBnd RdmaInv"),
            ("packets", "context", "requests", "OutRdmaReads OutRdmaSends OutRdmaWrites"),
            ("packets", "context", "requests", "iwInRdmaReads iwInRdmaSends iwInRdmaWrites iwRdmaBnd iwRdmaInv"),
            ("packets", "context", "requests", "iwOutRdmaReads iwOutRdmaSends iwOutRdmaWrites"),
            ("packets", "context", "packets", "ip4InPkts ip4OutPkts ip6InPkts ip6OutPkts RxUDP TxUDP"),
            ("packets", "context", "packets", "ip4InMcastPkts ip4OutMcastPkts ip6InMcastPkts ip6OutMcastPkts"),
            ("packets", "context", "packets", "ip4InReasmRqd ip4OutSegRqd ip6InReasmRqd ip6OutSegRqd"),
            ("packets", "context", "packets", "tcpInSegs tcpOutSegs"),
            ("bytes", "context", "bytes", "ip4InOctets ip4OutOctets ip6InOctets ip6OutOctets"),
            ("bytes", "context", "bytes", "ip4InMcastOctets ip4OutMcastOctets ip6InMcastOctets ip6OutMcastOctets"),
        ),
    ),
    _Driver(
        "bnxt_re: drivers/infiniband/hw/bnxt_re/hw_counters.c",
        (
            ("error", "page", "events", "max_retry_exceeded unrecoverable_err"),
            # The device could not reach the host's memory.
            ("error", "page", "events", "res_mem_err res_tx_pci_err res_rx_pci_err"),
            ("loss", "warn", "events", "to_retransmits seq_err_naks_rcvd rnr_naks_rcvd missing_resp"),
            ("loss", "warn", "packets", "oos_drop_count rx_roce_discards"),
            ("error", "warn", "events", "rx_roce_errors"),
            # The driver fills it from the count of broadcast packets that were sent.
            ("packets", "context", "packets", "recoverable_errors"),
            ("congestion", "context", "packets", "tx_cnp_pkts rx_cnp_pkts rx_ecn_marked_pkts np_cnp_pkts"),
            ("congestion", "context", "events", "pacing_reschedule pacing_complete pacing_alerts"),
            ("loss", "context", "events", "dup_req rx_out_of_buffer"),
            ("error", "context", "events", "bad_resp_err local_qp_op_err local_protection_err mem_mgmt_op_err"),
            ("error", "context", "events", "remote_invalid_req_err remote_access_err remote_op_err"),
            ("error", "context", "events", "res_exceed_max res_length_mismatch res_exceeds_wqe res_opcode_err"),
            ("error", "context", "events", "res_rx_invalid_rkey res_rx_domain_err res_rx_no_perm res_rx_range_err"),
            ("error", "context", "events", "res_tx_invalid_rkey res_tx_domain_err res_tx_no_perm res_tx_range_err"),
            ("error", "context", "events", "res_irrq_oflow res_unsup_opcode res_unaligned_atomic res_rem_inv_err"),
            ("error", "context", "events", "res_srq_err res_cmp_err res_invalid_dup_rkey res_wqe_format_err"),
            ("error", "context", "events", "res_cq_load_err res_srq_load_err"),
            ("packets", "context", "requests", "tx_atomic_req tx_read_req tx_read_resp tx_write_req tx_send_req"),
            ("packets", "context", "requests", "rx_atomic_req rx_read_req rx_read_resp rx_write_req rx_send_req"),
            ("packets", "context", "packets", "tx_pkts rx_pkts tx_roce_only_pkts rx_roce_only_pkts"),
            ("packets", "context", "packets", "rx_roce_good_pkts rx_good_pkts"),
            ("bytes", "context", "bytes", "tx_roce_only_bytes rx_roce_only_bytes rx_roce_good_bytes rx_good_bytes"),
        ),
    ),
    _Driver(
        "ionic: its firmware names them (drivers/infiniband/hw/ionic/ionic_hw_stats.c asks it); as RCCL and AMD's "
        "node-scraper list them",
        (
            # Named as the completion statuses of verbs: retries exceeded, and those for a receiver that is not ready.
            ("error", "page", "events", "req_tx_retry_excd_err req_rx_rnr_retry_err"),
            ("loss", "warn", "events", "tx_rdma_ack_timeout tx_rdma_ccl_cts_ack_timeout"),
            ("loss", "warn", "packets", "tx_rdma_retx_pkts tx_rdma_ccl_cts_retx_pkts"),
            ("bytes", "warn", "bytes", "tx_rdma_retx_bytes tx_rdma_ccl_cts_retx_bytes"),
            ("loss", "warn", "events", "req_rx_pkt_seq_err req_rx_impl_nak_seq_err resp_tx_pkt_seq_err"),
            ("loss", "warn", "events", "resp_rx_outouf_seq resp_rx_ccl_cts_outouf_seq resp_tx_rnr_retry_err"),
            ("loss", "warn", "packets", "rx_rdma_mtu_discard_pkts"),
            ("error", "warn", "events", "resp_rx_s0_table_err"),
            ("congestion", "context", "packets", "rx_rdma_cnp_pkts tx_rdma_cnp_pkts rx_rdma_ecn_pkts"),
            ("loss", "context", "events", "resp_rx_dup_request req_rx_dup_response resp_rx_outof_buf"),
            ("error", "context", "events", "req_rx_rmt_acc_err req_rx_rmt_req_err req_rx_oper_err req_rx_inval_pkts"),
            ("error", "context", "events", "req_rx_cqe_err req_rx_cqe_flush req_tx_loc_acc_err req_tx_loc_oper_err"),
            ("error", "context", "events", "req_tx_mem_mgmt_err req_tx_loc_sgl_inv_err resp_rx_cqe_err"),
            ("error", "context", "events", "resp_rx_cqe_flush resp_rx_loc_len_err resp_rx_inval_request"),
            ("error", "context", "events", "resp_rx_loc_oper_err resp_rx_outof_atomic resp_tx_rmt_inval_req_err"),
            ("error", "context", "events", "resp_tx_rmt_acc_err resp_tx_rmt_oper_err resp_tx_loc_sgl_inv_err"),
            ("packets", "context", "packets", "rx_rdma_ucast_pkts tx_rdma_ucast_pkts"),
            ("packets", "context", "packets", "rx_rdma_mcast_pkts tx_rdma_mcast_pkts"),
            ("packets", "context", "packets", "rx_rdma_ccl_cts_pkts tx_rdma_ccl_cts_pkts"),
            ("bytes", "context", "bytes", "rx_rdma_ucast_bytes tx_rdma_ucast_bytes"),
            ("bytes", "context", "bytes", "rx_rdma_mcast_bytes tx_rdma_mcast_bytes"),
            ("bytes", "context", "bytes", "rx_rdma_ccl_cts_bytes tx_rdma_ccl_cts_bytes"),
        ),
    ),
    _Driver(
        "hns: drivers/infiniband/hw/hns/hns_roce_main.c",
        (
            ("error", "warn", "packets", "rx_err_pkt tx_err_pkt"),
            ("error", "warn", "packets", "trp_get_mpt_err_pkt trp_get_irrl_err_pkt get_mpt_err_pkt get_irrl_err_pkt"),
            ("congestion", "context", "packets", "rx_cnp_pkt tx_cnp_pkt"),
            ("congestion", "context", "events", "ecn_db"),
            # Verbs that failed: their caller was told.
            ("error", "context", "events", "qp_create_err qp_modify_err cq_create_err cq_modify_err"),
            ("error", "context", "events", "srq_create_err srq_modify_err xrcd_alloc_err mr_rereg_err ah_create_err"),
            ("error", "context", "events", "uctx_alloc_err"),
            ("other", "context", "events", "aeqe ceqe cmds posted_mbx polled_mbx mbx_event cq_cqe cq_poe cq_notify"),
            ("packets", "context", "packets", "rx_rc_pkt rx_uc_pkt rx_ud_pkt rx_xrc_pkt rx_pkt"),
            ("packets", "context", "packets", "tx_rc_pkt tx_uc_pkt tx_ud_pkt tx_xrc_pkt tx_pkt"),
        ),
    ),
    _Driver(
        "efa: drivers/infiniband/hw/efa/efa_verbs.c",
        (
            ("loss", "warn", "packets", "rx_drops retrans_pkts"),
            ("loss", "warn", "events", "retrans_timeout_events unresponsive_remote_events impaired_remote_conn_events"),
            ("bytes", "warn", "bytes", "retrans_bytes"),
            # The device left a command of the driver unanswered.
            ("error", "warn", "events", "no_completion_cmds"),
            ("error", "context", "events", "rdma_read_wr_err rdma_write_wr_err cmds_err"),
            ("error", "context", "events", "alloc_pd_err create_qp_err create_cq_err reg_mr_err alloc_ucontext_err"),
            ("error", "context", "events", "create_ah_err mmap_err"),
            ("other", "context", "events", "submitted_cmds completed_cmds keep_alive_rcvd"),
            ("packets", "context", "requests", "send_wrs recv_wrs rdma_read_wrs rdma_write_wrs"),
            ("bytes", "context", "bytes", "tx_bytes rx_bytes send_bytes recv_bytes rdma_read_bytes rdma_write_bytes"),
            ("bytes", "context", "bytes", "rdma_read_resp_bytes rdma_write_recv_bytes"),
        ),
    ),
    _Driver(
        "rxe and erdma: drivers/infiniband/sw/rxe/rxe_hw_counters.c, drivers/infiniband/hw/erdma/erdma_verbs.c",
        (
            ("error", "page", "events", "retry_exceeded_err retry_rnr_exceeded_err"),
            ("loss", "warn", "events", "out_of_seq_request rcvd_seq_err rcvd_rnr_err send_rnr_err completer_retry_err"),
            ("error", "warn", "events", "send_err"),
            ("loss", "warn", "packets", "hw_disable_drop_cnt hw_bps_limit_drop_cnt hw_pps_limit_drop_cnt"),
            ("loss", "warn", "packets", "hw_rx_disable_drop_cnt hw_rx_bps_limit_drop_cnt hw_rx_pps_limit_drop_cnt"),
            ("packets", "context", "packets", "sent_pkts rcvd_pkts"),
        ),
    ),
)


def _names(text: str) -> list[str]:
    return text.split(",") if "," in text else text.split()


_RULES: Final = {
    name: CounterRule(kind, severity, unit)
    for driver in _TABLE
    for kind, severity, unit, names in driver.rows
    for name in _names(names)
}


@lru_cache(maxsize=4096)
def rule_of(name: str) -> CounterRule:
    """The rule of an RDMA counter under the name that RdmaCounters gives it, of a virtual port as of a real one."""
    return _RULES.get(_plain(name), _UNKNOWN)


def _plain(name: str) -> str:
    return name.removeprefix(f"{HW_COUNTERS}/").removeprefix(VPORT_PREFIX)


class OwnSeverities:
    """The severities that an operator gives to counters, which go before those of the tables."""

    def __init__(self, given: Sequence[CounterSeverity] = ()) -> None:
        """`given`: of several that match a name, the first counts."""
        self._given = tuple(given)
        self.find = lru_cache(maxsize=8192)(self._find)

    def of(self, name: str, usual: Severity) -> Severity:
        """How much an increase of a counter matters, which `usual` says where the operator does not."""
        return (self.find(name) or usual) if self._given else usual

    def _find(self, name: str) -> Severity | None:
        plain = _plain(name)
        return next((one.severity for one in self._given if fnmatchcase(plain, one.pattern)), None)


TABLES_ONLY: Final = OwnSeverities()
"""The operator gives none."""
