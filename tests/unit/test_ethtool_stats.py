"""Statistics of network drivers: the ioctl's buffers against a simulated driver, and what the names mean."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroute2.ethtool.ioctl import IoctlEthtool, NotSupportedError

from railscope.agent.config.counter_severity import parse_counter_severity
from railscope.agent.node.rails.counter_rules import OwnSeverities
from railscope.agent.node.rails.ethernet_facts import ethernet_counters, ethernet_gauges, pci_stalled
from railscope.agent.node.rails.ethernet_rules import StatisticRules, lossless_priorities, statistic_rule
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.ethtool_stats import DeviceStatistics, EthtoolStatistics, StatisticUse, parse_names
from tests.unit.netdev_messages import SteppedClock

RECORDED = Path(__file__).parents[3] / "shared/data/ethq-mlx5_core-ethtool-S.txt"
"""A third party's file, beside the checkout where it is there at all."""


class SimulatedDriver:
    """The kernel's ethtool ioctl for simulated devices; writes as many values as there are, whatever was expected."""

    def __init__(self, **devices: dict[str, int]) -> None:
        self.devices = devices
        self.indexes = {name: number for number, name in enumerate(devices, 2)}
        self.refused: dict[str, int] = {}
        self.asked: list[tuple[str, int]] = []
        self.grown_before_values: dict[str, int] = {}

    def _values(self, name: str) -> dict[str, int]:
        if name in self.refused:
            raise OSError(self.refused[name], "simulated")
        if name not in self.devices:
            raise OSError(errno.ENODEV, "simulated")
        return self.devices[name]

    def index(self, name: str) -> int:
        self._values(name)
        return self.indexes[name]

    def run(self, name: str, command: bytearray) -> None:
        values = self._values(name)
        (number,) = struct.unpack_from("=I", command)
        self.asked.append((name, number))
        if number == 0x37:
            struct.pack_into("=QI", command, 8, 2, len(values))
        elif number == 0x1B:
            struct.pack_into("=I", command, 8, len(values))
            for at, text in enumerate(values):
                struct.pack_into("32s", command, 12 + 32 * at, text.encode())
        elif number == 0x1D:
            for more in range(self.grown_before_values.pop(name, 0)):
                values[f"rx{more}_packets"] = 7
            struct.pack_into("=I", command, 4, len(values))
            struct.pack_into(f"={len(values)}Q", command, 8, *values.values())

    def close(self) -> None:
        """Nothing is open."""


RULES = StatisticRules()


def reader(driver: SimulatedDriver) -> EthtoolStatistics:
    made = EthtoolStatistics(SteppedClock(), RULES.use, driver)
    made.watch(tuple(driver.devices))
    return made


def shown(source: EthtoolStatistics) -> dict[str, dict[str, int]]:
    """Counters by device, of one reading."""
    reading = source.read()
    assert reading.shape is not None
    return {
        device: {
            field: int(reading.values[row, column])
            for column, field in enumerate(reading.fields)
            if reading.shape.known[row, column]
        }
        for row, device in enumerate(reading.names)
    }


MLX5 = {
    "rx_packets": 10,
    "link_down_events_phy": 1,
    "outbound_pci_stalled_rd": 40,
    "rx_prio3_pause": 5,
    "rx_prio3_buf_discard": 2,
    "rx_prio0_buf_discard": 9,
    "rx0_packets": 4,
    "tx_vport_rdma_unicast_bytes": 2**63,
}


def test_counters_are_taken_gauges_are_kept_apart_and_queue_counters_are_left_out() -> None:
    source = reader(SimulatedDriver(eth0=dict(MLX5)))
    assert shown(source)["eth0"] == {
        "link_down_events_phy": 1,
        "rx_prio3_pause": 5,
        "rx_prio3_buf_discard": 2,
        "rx_prio0_buf_discard": 9,
        "tx_vport_rdma_unicast_bytes": 2**63,
    }
    (last,) = source.last
    assert [(gauge.name, gauge.value) for gauge in ethernet_gauges(last)] == [("outbound_pci_stalled_rd", 40)]


def test_names_are_asked_for_once_and_again_when_the_device_is_another_one() -> None:
    driver = SimulatedDriver(eth0=dict(MLX5))
    source = reader(driver)
    for _ in range(3):
        source.read()
    assert driver.asked.count(("eth0", 0x1B)) == 1
    # The driver was loaded again: another device with as many statistics, in another order.
    driver.indexes["eth0"] = 77
    driver.devices["eth0"] = dict(reversed(list(MLX5.items())))
    assert shown(source)["eth0"]["rx_prio3_buf_discard"] == 2
    assert driver.asked.count(("eth0", 0x1B)) == 2
    assert source.read().generations == (77,)


def test_more_queues_move_the_statistics_and_none_is_mistaken_for_another() -> None:
    driver = SimulatedDriver(eth0=dict(MLX5))
    source = reader(driver)
    before = shown(source)
    driver.devices["eth0"] = {"rx1_packets": 8, **MLX5}
    assert shown(source) == before


def test_statistics_that_grow_between_the_two_questions_are_asked_for_again() -> None:
    driver = SimulatedDriver(eth0=dict(MLX5))
    source = reader(driver)
    before = shown(source)
    driver.grown_before_values["eth0"] = 300
    assert shown(source) == before
    assert len(driver.devices["eth0"]) > len(MLX5)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EIO, errno.EACCES, errno.EBUSY])
def test_a_device_that_fails_is_named_and_the_others_are_read(number: int) -> None:
    driver = SimulatedDriver(eth0=dict(MLX5), eth1=dict(MLX5))
    source = reader(driver)
    whole = shown(source)
    driver.refused["eth0"] = number
    reading = source.read()
    assert reading.names == ("eth1",)
    assert [(failure.device, failure.reason) for failure in reading.failed] == [
        ("eth0", f"ethtool: {os.strerror(number)}")
    ]
    del driver.refused["eth0"]
    assert shown(source) == whole


def test_a_device_without_statistics_has_no_row_and_is_no_failure() -> None:
    reading = reader(SimulatedDriver(br0={})).read()
    assert (reading.names, reading.failed) == ((), ())


def test_an_absurd_number_of_statistics_is_refused() -> None:
    reading = reader(SimulatedDriver(eth0={f"s{number}": 1 for number in range(32_769)})).read()
    assert "claims 32769 statistics" in reading.failed[0].reason


def test_counts_begin_with_the_driver_s_and_never_fall_when_it_is_loaded_again() -> None:
    driver = SimulatedDriver(eth0=dict(MLX5))
    source = reader(driver)
    clock = SteppedClock()
    sampler = Sampler(clock)
    sampler.add("ethtool", 1, source, 1.0)

    def discards() -> int:
        clock.sleep(1)
        sampler.read_due(clock.monotonic_ns())
        found = sampler.state().device_of_source("ethtool", "eth0")
        assert found is not None
        counters = {counter.name: counter for counter in ethernet_counters(source.last[0], found, RULES)}
        return counters["rx_prio0_buf_discard"].count

    before = MLX5["rx_prio0_buf_discard"]
    assert before > 0
    assert discards() == before
    driver.devices["eth0"]["rx_prio0_buf_discard"] += 6
    assert discards() == before + 6
    driver.indexes["eth0"] = 9
    driver.devices["eth0"] = dict.fromkeys(MLX5, 0)
    assert discards() == before + 6
    driver.devices["eth0"]["rx_prio0_buf_discard"] = 1
    assert discards() == before + 7


def test_the_part_of_the_time_that_a_card_waits_for_the_bus_is_a_ratio() -> None:
    shown = {"outbound_pci_stalled_rd": 25, "outbound_pci_stalled_wr": 0, "outbound_pci_stalled_rd_events": 3}
    gauges = ethernet_gauges(DeviceStatistics("eth0", tuple(shown), tuple(shown.values())))
    assert pci_stalled(gauges) == (("read", 0.25), ("write", 0.0))


def test_a_discard_warns_only_on_a_priority_that_is_seen_to_pause() -> None:
    statistics = DeviceStatistics("eth0", tuple(MLX5), tuple(MLX5.values()))
    lossless = lossless_priorities(statistics)
    assert lossless == {3}
    found = {name: rule for name in MLX5 if (rule := statistic_rule(name)) is not None}
    assert {name: RULES.severity(name, rule, lossless) for name, rule in found.items()} == {
        "link_down_events_phy": "page",
        "outbound_pci_stalled_rd": "context",
        "rx_prio3_pause": "context",
        "rx_prio3_buf_discard": "warn",
        "rx_prio0_buf_discard": "context",
        "tx_vport_rdma_unicast_bytes": "context",
    }


WARNED = {
    "mlx5": "rx_discards_phy tx_pause_storm_error_events rx_pcs_symbol_err_phy total_success_recovery_phy "
    "rx_crc_errors_phy rx_out_of_buffer dev_internal_queue_oob module_high_temp",
    "bnxt_en": "continuous_roce_pause_events rx_total_discard_pkts rx_total_ring_discards tx_total_ring_discards "
    "rx_total_buf_errors rx_total_oom_discards tx_total_resets rx_fec_uncorrectable_blocks rx_fcs_err_frames "
    "rx_stat_discard tx_stat_error rx_discard_packets_cos4 tx_fifo_underruns",
    "ice": "tx_timeout.nic mac_local_faults.nic mac_remote_faults.nic rx_crc_errors.nic illegal_bytes.nic "
    "tx_dropped_link_down.nic rx_dropped.nic rx_jabber.nic rx_undersize.nic",
    "i40e": "port.tx_timeout port.mac_local_faults port.rx_crc_errors port.rx_length_errors port.tx_dropped_link_down",
    "ena": "tx_timeout wd_expired bw_in_allowance_exceeded conntrack_allowance_exceeded ena_admin_q_no_completion",
    "gve": "rx_skb_alloc_fail rx_buf_alloc_fail rx_desc_err_dropped_pkt tx_timeouts reset_cnt adminq_timeouts",
    "mana": "hc_rx_discards_no_wqe hc_tx_err_gdma hc_tx_err_vport_disabled hc_rx_pkt_drop_phy tx_cq_err",
    "ionic": "hw_rx_dropped hw_tx_dropped hw_rx_over_errors frames_rx_bad_fcs frames_rx_jabber frames_rx_dropped",
    "hns3": "mac_rx_fcs_err_pkt_num mac_tx_bad_pkt_num",
}


@pytest.mark.parametrize("driver", WARNED)
def test_what_a_driver_calls_lost_damaged_or_reset_warns(driver: str) -> None:
    names = WARNED[driver].split()
    assert {name: rule and rule.severity for name in names for rule in [statistic_rule(name)]} == dict.fromkeys(
        names, "warn"
    )


@pytest.mark.parametrize(
    "name",
    ["pfc_pri3_rx_duration_us", "hc_tc3_rx_pause_phy", "rx_pripause_3_1us_count", "mac_rx_pfc_pri3_pkt_num"],
)
def test_a_pause_is_context_and_makes_its_priority_lossless(name: str) -> None:
    rule = statistic_rule(name)
    assert rule is not None
    assert (rule.kind, rule.severity) == ("pause", "context")
    assert lossless_priorities(DeviceStatistics("eth0", (name,), (1,))) == {3}


def test_an_operator_takes_in_what_the_table_does_not_know_and_changes_what_it_does() -> None:
    given = ["fw_*_err=page", "rx_discards_phy=context", "rx0_packets=warn"]
    rules = StatisticRules(OwnSeverities([parse_counter_severity(text) for text in given]))
    driver = SimulatedDriver(eth0={"fw_heap_err": 2, "rx_discards_phy": 3, "rx0_packets": 4, "rx1_packets": 5})
    source = EthtoolStatistics(SteppedClock(), rules.use, driver)
    source.watch(("eth0",))
    clock = SteppedClock()
    sampler = Sampler(clock)
    sampler.add("ethtool", 1, source, 1.0)
    clock.sleep(1)
    sampler.read_due(clock.monotonic_ns())
    found = sampler.state().device_of_source("ethtool", "eth0")
    assert found is not None
    assert [(one.name, one.severity, one.count) for one in ethernet_counters(source.last[0], found, rules)] == [
        ("fw_heap_err", "page", 2),
        ("rx_discards_phy", "context", 3),
        ("rx0_packets", "warn", 4),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "unit", "direction", "priority"),
    [
        ("rx_prio5_pause_duration", "pause", "microseconds", "receive", 5),
        ("tx_global_pause", "pause", "frames", "transmit", None),
        ("rx_pfc_ena_frames_pri7", "pause", "frames", "receive", 7),
        ("tx_priority_2_xoff.nic", "pause", "frames", "transmit", 2),
        ("port.link_xoff_rx", "pause", "frames", "receive", None),
        ("rx_prio4_cong_discard", "discard", "packets", "receive", 4),
        ("tx_discards_phy", "discard", "packets", "transmit", None),
        ("rx_prio1_marked", "ecn", "packets", "receive", 1),
        ("rx_corrected_bits_phy", "fec", "bits", "receive", None),
        ("rx_pcs_symbol_err_phy", "fec", "events", "receive", None),
        ("rx_crc_errors_phy", "physical", "packets", "receive", None),
        ("rx_crc_errors.nic", "physical", "packets", "receive", None),
        ("tx_pci_signal_integrity", "pci", "events", "transmit", None),
        ("outbound_pci_stalled_wr", "pci", "percent", "", None),
        ("outbound_pci_stalled_wr_events", "pci", "events", "", None),
        ("rx_vport_rdma_multicast_bytes", "rdma_bytes", "bytes", "receive", None),
        ("tx_bytes_phy", "port_bytes", "bytes", "transmit", None),
        ("bw_out_allowance_exceeded", "allowance", "packets", "", None),
    ],
)
def test_a_name_says_what_it_counts(name: str, kind: str, unit: str, direction: str, priority: int | None) -> None:
    rule = statistic_rule(name)
    assert rule is not None
    assert (rule.kind, rule.unit, rule.direction, rule.priority) == (kind, unit, direction, priority)
    assert rule.gauge == (name == "outbound_pci_stalled_wr")


@settings(deadline=None)
@given(
    st.integers(0, 63),
    st.sampled_from(["packets", "bytes", "drops", "errors", "dropped", "pause_frames", "crc_errors"]),
    st.sampled_from(["rx{}_{}", "tx{}_{}", "ch{}_{}", "queue_{}_{}", "rx_queue_{}_{}"]),
)
def test_what_a_single_queue_counted_is_never_taken_in(queue: int, what: str, form: str) -> None:
    assert statistic_rule(form.format(queue, what)) is None


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_name_has_a_rule_or_none(name: str) -> None:
    rule = statistic_rule(name)
    assert (rule is None) == (RULES.use(name) is StatisticUse.IGNORED)
    assert rule is None or rule.priority is None or 0 <= rule.priority <= 7


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 20))
def test_any_bytes_are_names_or_a_clean_error(data: bytes, count: int) -> None:
    if len(data) < 32 * count:
        with pytest.raises(ValueError, match="hold no"):
            parse_names(data, count)
    else:
        assert len(parse_names(data, count)) == count


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*MLX5, "rx_discards_phy", "x"]), st.integers(0, 2**64 - 1), min_size=1, max_size=9
        ),
        min_size=1,
        max_size=4,
    )
)
def test_every_device_gets_its_own_values_whatever_its_driver_has(devices: list[dict[str, int]]) -> None:
    named = {f"eth{number}": values for number, values in enumerate(devices)}
    assert shown(reader(SimulatedDriver(**named))) == {
        device: {name: value for name, value in values.items() if RULES.use(name) is StatisticUse.COUNTER}
        for device, values in named.items()
    }


@pytest.fixture
def kernel() -> Iterator[EthtoolStatistics]:
    made = EthtoolStatistics(SystemClock(), lambda _name: StatisticUse.GAUGE)
    yield made
    made.close()


def test_the_running_kernels_statistics_are_those_that_pyroute2_reads(kernel: EthtoolStatistics) -> None:
    names = [path.name for path in Path("/sys/class/net").iterdir() if path.is_dir()]
    kernel.watch(names)
    found = kernel.read()
    assert not found.failed
    compared = {statistics.device: statistics for statistics in kernel.last}
    for name in names:
        with contextlib.closing(IoctlEthtool(name)) as pyroute2:
            try:
                reference = dict(pyroute2.get_statistics())
            except NotSupportedError:
                reference = {}
        assert set(compared[name].names if name in compared else ()) == {key.strip() for key in reference}


def test_a_device_that_does_not_exist_is_a_failure_of_that_device(kernel: EthtoolStatistics) -> None:
    kernel.watch(["nowhere0"])
    assert kernel.read().failed[0].reason == "ethtool: No such device"


def test_a_real_connectx_is_understood() -> None:
    """751 statistics of a ConnectX-4, from isc-projects/ethq (MPL-2.0), which are not part of this repository."""
    if not RECORDED.is_file():
        pytest.skip(f"the statistics of a real mlx5 are not at {RECORDED}")
    pairs = re.findall(r"^\s*([^\s:]+): ([0-9]+)$", RECORDED.read_text(), re.MULTILINE)
    values = {name: int(value) for name, value in pairs}
    assert len(values) > 700
    source = reader(SimulatedDriver(eth0=values))
    counters = shown(source)["eth0"]
    assert counters["tx_pci_signal_integrity"] == 34
    assert "outbound_pci_stalled_rd" not in counters
    assert {rule.kind for name in counters if (rule := statistic_rule(name))} >= {
        *("discard", "fec", "link", "module", "pause", "pci", "physical", "rdma_bytes"),
    }
    assert len(counters) < 80
    assert not [name for name in counters if re.match(r"(rx|tx|ch)[0-9]", name)]
