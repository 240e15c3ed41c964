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

from railscope.agent.node.rails.ethernet_facts import ethernet_counters, ethernet_gauges, pci_stalled
from railscope.agent.node.rails.ethernet_rules import lossless_priorities, severity_of, statistic_rule, statistic_use
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


def reader(driver: SimulatedDriver) -> EthtoolStatistics:
    made = EthtoolStatistics(SteppedClock(), statistic_use, driver)
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
        counters = {counter.name: counter for counter in ethernet_counters(source.last[0], found)}
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


def test_a_discard_pages_only_on_a_priority_that_is_seen_to_pause() -> None:
    statistics = DeviceStatistics("eth0", tuple(MLX5), tuple(MLX5.values()))
    lossless = lossless_priorities(statistics)
    assert lossless == {3}
    found = {name: rule for name in MLX5 if (rule := statistic_rule(name)) is not None}
    assert severity_of(found["rx_prio3_buf_discard"], lossless) == "page"
    assert severity_of(found["rx_prio0_buf_discard"], lossless) == "warn"
    assert severity_of(found["link_down_events_phy"], frozenset()) == "page"
    assert severity_of(found["rx_prio3_pause"], lossless) == "context"


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
    assert (rule is None) == (statistic_use(name) is StatisticUse.IGNORED)
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
        device: {name: value for name, value in values.items() if statistic_use(name) is StatisticUse.COUNTER}
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
