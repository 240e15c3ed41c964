"""What RDMA counters mean, and the watch that brings them together, on simulated trees."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.node.rails.counter_rules import CounterRule, rule_of
from railscope.agent.node.rails.rdma_ports import BYTES_KEY, COUNTERS_KEY, PortFacts, RdmaWatch
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.rdma.widths import COUNTERS, HW_COUNTERS, Width, width_of
from tests.trees import rdma
from tests.trees.rdma import MLX5_COUNTERS, MLX5_HW_COUNTERS, RdmaTree
from tests.unit.netdev_messages import SteppedClock

PATIENCE_SECONDS = 30.0
"""For a reading of a tree, on a busy machine."""

PAGE = """link_downed req_transport_retries_exceeded req_rnr_retries_exceeded excessive_buffer_overrun_errors
local_link_integrity_errors""".split()
WARN = """local_ack_timeout_err packet_seq_err out_of_sequence implied_nak_seq_err rnr_nak_retry_err roce_adp_retrans
roce_adp_retrans_to rx_icrc_encapsulated symbol_error link_error_recovery port_xmit_discards""".split()
CONTEXT = """np_ecn_marked_roce_packets np_cnp_sent rp_cnp_handled roce_slow_restart roce_slow_restart_cnps
roce_slow_restart_trans port_xmit_wait duplicate_request""".split()


@pytest.mark.parametrize(("names", "severity"), [(PAGE, "page"), (WARN, "warn"), (CONTEXT, "context")])
def test_each_severity_has_its_counters_on_virtual_ports_too(names: list[str], severity: str) -> None:
    for name in names:
        assert rule_of(name).severity == severity, name
        assert rule_of(f"vport_{name}") == rule_of(name)
        assert rule_of(f"hw_counters/{name}") == rule_of(name)


def test_every_counter_of_the_simulated_mlx5_is_known() -> None:
    assert [name for name in MLX5_COUNTERS | MLX5_HW_COUNTERS if not rule_of(name).known] == []


GAVE_UP = {
    "mlx5": "req_transport_retries_exceeded req_rnr_retries_exceeded",
    "mana_ib": "requester_retries_exceeded requester_rnr_nak_retries_exceeded total_fatal_error general_hw_error",
    "bnxt_re": "max_retry_exceeded unrecoverable_err res_mem_err res_tx_pci_err res_rx_pci_err",
    "ionic": "req_tx_retry_excd_err req_rx_rnr_retry_err",
    "rxe": "retry_exceeded_err retry_rnr_exceeded_err",
}
WENT_WRONG = {
    "mana_ib": "requester_timeout requester_oos_nak requester_rnr_nak responder_rnr_nak responder_oos "
    "requester_implicit_nak requester_readresp_psn_mismatch",
    "irdma": "RTO,Nak Sequence Error,Nak Sequence Error Implied,RNR received,Rcvd Out of order packets,CRC errors,"
    "tcpRetransSegs,RetransSegs,ip4InDiscards",
    "bnxt_re": "to_retransmits seq_err_naks_rcvd rnr_naks_rcvd missing_resp oos_drop_count rx_roce_discards",
    "ionic": "tx_rdma_ack_timeout tx_rdma_retx_pkts tx_rdma_retx_bytes req_rx_pkt_seq_err req_rx_impl_nak_seq_err "
    "resp_tx_pkt_seq_err resp_rx_outouf_seq",
    "hns": "rx_err_pkt tx_err_pkt",
    "efa": "rx_drops retrans_pkts retrans_bytes retrans_timeout_events unresponsive_remote_events no_completion_cmds",
    "erdma": "hw_rx_disable_drop_cnt",
}


@pytest.mark.parametrize(("table", "severity"), [(GAVE_UP, "page"), (WENT_WRONG, "warn")])
def test_every_driver_s_words_have_their_severity(table: dict[str, str], severity: str) -> None:
    for driver, text in table.items():
        for name in text.split(",") if "," in text else text.split():
            assert rule_of(name).severity == severity, (driver, name)


def test_congestion_control_and_an_applications_mistakes_are_context_with_every_driver() -> None:
    names = "received_cnps cnpHandled rx_cnp_pkts rx_rdma_cnp_pkts rx_cnp_pkt nak_access_error remote_access_err"
    assert {rule_of(name).severity for name in names.split()} == {"context"}
    assert all(rule_of(name).known for name in names.split())
    # bnxt_re fills it from the broadcast packets that it sent.
    assert rule_of("recoverable_errors").severity == "context"


def test_kinds_tell_congestion_from_loss_and_a_dead_link() -> None:
    kinds = {name: rule_of(name).kind for name in ("np_cnp_sent", "out_of_sequence", "link_downed", "symbol_error")}
    assert kinds == {
        "np_cnp_sent": "congestion",
        "out_of_sequence": "loss",
        "link_downed": "link",
        "symbol_error": "error",
    }
    assert rule_of("port_xmit_wait").unit == "ticks"
    assert rule_of("port_xmit_data").unit == "4 octets"


@settings(deadline=None)
@given(st.text(max_size=30).filter(lambda name: not rule_of(name).known))
def test_a_counter_nobody_knows_is_context(name: str) -> None:
    assert rule_of(name) == CounterRule("other", "context", "events", known=False)


@pytest.mark.parametrize(
    ("names", "width"),
    [
        ("symbol_error port_rcv_errors port_rcv_remote_physical_errors port_rcv_switch_relay_errors", Width(16, True)),
        ("port_xmit_discards VL15_dropped", Width(16, True)),
        ("link_error_recovery link_downed port_xmit_constraint_errors port_rcv_constraint_errors", Width(8, True)),
        ("local_link_integrity_errors excessive_buffer_overrun_errors", Width(4, True)),
        ("port_xmit_wait", Width(32, True)),
        ("port_xmit_data port_rcv_data port_xmit_packets unicast_rcv_packets", Width(64, False)),
    ],
)
def test_the_counters_of_infiniband_end_where_the_standard_says(names: str, width: Width) -> None:
    for name in names.split():
        assert width_of("mlx5_core", COUNTERS, name) == width_of("hfi1", COUNTERS, name) == width


def test_only_mlx5_has_narrow_counters_of_its_own() -> None:
    assert width_of("mlx5_core", HW_COUNTERS, "vport_out_of_buffer") == Width(32, False)
    assert width_of("bnxt_en", HW_COUNTERS, "out_of_buffer") == Width(64, False)
    assert width_of("mlx5_core", HW_COUNTERS, "rp_cnp_handled") == Width(64, False)


class Watched:
    """A watch on a simulated tree, whose sampler is driven by hand."""

    def __init__(self, tree: RdmaTree, *, bytes_period_seconds: float | None = None) -> None:
        self.tree = tree
        self.clock = SteppedClock()
        self.sampler = Sampler(self.clock)
        self.watch = RdmaWatch(
            self.clock,
            self.sampler,
            sysfs=tree.sysfs,
            netlink=False,
            bytes_period_seconds=bytes_period_seconds,
            patience_seconds=PATIENCE_SECONDS,
        )
        self.watch.update()

    def beat(self, seconds: float = 1) -> None:
        self.sampler.read_due(self.clock.monotonic_ns())
        self.watch.update()
        self.clock.sleep(seconds)

    def port(self, name: str = "mlx5_0/1") -> PortFacts:
        return next(facts for facts in self.watch.facts() if facts.port.name == name)

    def counter(self, counter: str, name: str = "mlx5_0/1") -> tuple[str, int]:
        """Its severity and how much it counted."""
        return next((severity, count) for one, severity, count in self.port(name).counters if one == counter)


@pytest.fixture
def opened() -> Iterator[list[Watched]]:
    made: list[Watched] = []
    yield made
    for one in made:
        one.watch.close()
        one.sampler.stop()


def test_a_port_shows_bytes_and_counters_with_their_meaning(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.mlx5_roce_8rails(tmp_path))
    opened.append(host)
    host.beat()
    host.tree.set("mlx5_11/1", "counters/port_xmit_data", 1_011 + 250)
    host.tree.set("mlx5_11/1", "hw_counters/out_of_sequence", 3)
    host.beat()
    facts = host.port("mlx5_11/1")
    assert (facts.transmit_bytes, facts.receive_bytes) == ((1_011 + 250) * 4, 2_011 * 4)
    assert facts.transmit_rate is not None
    assert facts.transmit_rate.sum == 1_000
    assert host.counter("out_of_sequence", "mlx5_11/1") == ("warn", 3)
    assert facts.pinned == ()
    assert not {"tx_bytes", "rx_bytes", "port_xmit_data"} & {name for name, _severity, _count in facts.counters}
    assert host.port("mlx5_10/1").transmit_bytes == 1_010 * 4


def test_a_value_that_falls_is_a_gauge_and_starts_nothing_anew(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.mana_ib(tmp_path))
    opened.append(host)
    host.beat()
    assert host.port("mana_0/1").gauges == (("current_rate", 180), ("num_qps_congested", 4))
    host.tree.set("mana_0/1", "hw_counters/num_qps_congested", 1)
    host.tree.set("mana_0/1", "hw_counters/tx_bytes", 5_100)
    host.beat()
    facts = host.port("mana_0/1")
    assert facts.gauges == (("current_rate", 180), ("num_qps_congested", 1))
    assert facts.transmit_bytes == 5_100
    assert host.counter("requester_retries_exceeded", "mana_0/1") == ("page", 1)
    assert "num_qps_congested" not in {name for name, _severity, _count in facts.counters}


def test_a_gauge_that_falls_alone_is_no_new_beginning(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.bnxt_re(tmp_path))
    opened.append(host)
    host.beat()
    host.tree.set("bnxt_re0/1", "hw_counters/db_fifo_register", 5)
    host.beat()
    host.tree.set("bnxt_re0/1", "hw_counters/oos_drop_count", 9)
    host.beat()
    assert host.port("bnxt_re0/1").gauges == (("db_fifo_register", 5),)
    assert host.counter("oos_drop_count", "bnxt_re0/1") == ("warn", 9)
    assert host.sampler.state().resets == 0


def test_bytes_of_soft_roce_are_unknown_not_nought(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.rxe(tmp_path))
    opened.append(host)
    host.beat()
    host.tree.set("rxe0/1", "hw_counters/sent_pkts", 15)
    host.beat()
    facts = host.port("rxe0/1")
    assert (facts.transmit_bytes, facts.receive_bytes, facts.transmit_rate) == (None, None, None)
    assert host.counter("sent_pkts", "rxe0/1") == ("context", 15)
    assert host.counter("link_downed", "rxe0/1") == ("page", 255)
    assert facts.pinned == ()


def test_nothing_is_known_of_a_port_before_it_is_read(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.mlx5_ib_ndr(tmp_path))
    opened.append(host)
    facts = host.port("ibp24s0/1")
    assert (facts.transmit_bytes, facts.counters) == (None, ())
    assert [(result.collector, result.success) for result in host.watch.collectors()] == [("rdma", False)]


def test_pinned_counters_are_reported_as_pinned(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.pinned_counters(tmp_path))
    opened.append(host)
    host.beat()
    assert set(host.port().pinned) == {
        "symbol_error",
        "link_downed",
        "local_link_integrity_errors",
        "port_xmit_wait",
    }


def test_a_driver_reload_adds_nothing_and_goes_on_from_there(tmp_path: Path, opened: list[Watched]) -> None:
    tree = RdmaTree(tmp_path)
    port = tree.port(
        tree.device("mlx5_0", pci="0000:18:00.0"),
        counters=MLX5_COUNTERS | {"port_xmit_data": 10**12},
        hw_counters=MLX5_HW_COUNTERS | {"rx_write_requests": 3_000_000_000},
    )
    assert port.is_dir()
    host = Watched(tree)
    opened.append(host)
    host.beat()
    tree.set("mlx5_0/1", "counters/port_xmit_data", 10**12 + 25)
    host.beat()
    rdma.reload_driver(tree)
    host.beat()
    tree.set("mlx5_0/1", "counters/port_xmit_data", 5)
    tree.set("mlx5_0/1", "hw_counters/rx_write_requests", 6)
    host.beat()
    assert host.port().transmit_bytes == (10**12 + 25) * 4 + 5 * 4
    assert host.counter("rx_write_requests") == ("context", 3_000_000_000 + 6)
    assert host.sampler.state().resets == 1


def test_a_32_bit_counter_of_a_virtual_port_goes_through_its_end(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.switchdev(tmp_path))
    opened.append(host)
    host.beat()
    (host.tree.sysfs / "class/infiniband/mlx5_0/hw_counters/vport_out_of_buffer").write_text("3\n")
    host.tree.set("mlx5_0/1", "counters/port_xmit_data", 1_001)
    host.beat()
    assert host.counter("vport_out_of_buffer") == ("context", 2**32 + 3)


def test_bytes_read_more_often_take_precedence(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.mlx5_ib_ndr(tmp_path), bytes_period_seconds=0.1)
    opened.append(host)
    host.beat(0.1)
    for step in range(1, 6):
        host.tree.set("ibp24s0/1", "counters/port_xmit_data", 1_000 + step)
        host.beat(0.1)
    facts = host.port("ibp24s0/1")
    assert facts.transmit_bytes == 1_005 * 4
    assert facts.transmit_rate is not None
    assert sum(facts.transmit_rate.counts) == 5
    results = {key: host.sampler.state().result(key) for key in (COUNTERS_KEY, BYTES_KEY)}
    assert {key: result.reads for key, result in results.items() if result} == {COUNTERS_KEY: 1, BYTES_KEY: 6}


def test_a_host_without_rdma_says_nothing_and_finds_what_comes_later(
    tmp_path: Path, opened: list[Watched], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tree = RdmaTree(tmp_path)
    host = Watched(tree)
    opened.append(host)
    host.beat(5)
    assert host.watch.facts() == ()
    assert host.watch.collectors() == ()
    rdma.mlx5_ib_ndr(tmp_path)
    host.beat(5)
    host.beat()
    assert host.port("ibp24s0/1").transmit_bytes == 4_000
    assert caplog.text == ""


def test_trouble_with_one_port_is_one_line_and_its_end_another(
    tmp_path: Path, opened: list[Watched], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host = Watched(rdma.mlx5_roce_8rails(tmp_path))
    opened.append(host)
    host.beat()
    host.tree.set("mlx5_3/1", "hw_counters/np_cnp_sent", "?")
    for _ in range(4):
        host.beat()
    assert [(result.collector, result.success) for result in host.watch.collectors()] == [("rdma", False)]
    assert host.port("mlx5_4/1").transmit_bytes == 1_004 * 4
    host.tree.set("mlx5_3/1", "hw_counters/np_cnp_sent", 5)
    for _ in range(8):
        host.beat()
    assert [record.message for record in caplog.records] == [
        "RDMA counters: mlx5_3/1: np_cnp_sent: expected a counter, found b'?'",
        "RDMA counters: all ports are readable again",
    ]
    assert [result.success for result in host.watch.collectors()] == [True]


@pytest.mark.parametrize("bytes_period_seconds", [None, 0.1])
def test_a_port_that_counts_one_direction_is_told_of_once(
    tmp_path: Path, opened: list[Watched], caplog: pytest.LogCaptureFixture, bytes_period_seconds: float | None
) -> None:
    caplog.set_level(logging.INFO)
    host = Watched(rdma.degraded(tmp_path), bytes_period_seconds=bytes_period_seconds)
    opened.append(host)
    for _ in range(5):
        host.beat(5)
    assert [record.message for record in caplog.records if "does not count" in record.message] == [
        "mlx5_3/1: the device does not count the bytes that it sends: they are not shown"
    ]


def test_the_state_of_a_port_is_looked_at_again(tmp_path: Path, opened: list[Watched]) -> None:
    host = Watched(rdma.mlx5_ib_ndr(tmp_path))
    opened.append(host)
    assert host.port("ibp24s0/1").port.up is True
    host.tree.set("ibp24s0/1", "state", "1: DOWN")
    host.beat(5)
    host.beat()
    assert host.port("ibp24s0/1").port.up is False


def test_a_closed_watch_leaves_the_sampler_to_others(tmp_path: Path) -> None:
    host = Watched(rdma.mlx5_ib_ndr(tmp_path))
    host.beat()
    host.watch.close()
    assert host.sampler.state().results == ()
    host.sampler.stop()
