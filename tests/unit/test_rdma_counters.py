"""Counters of RDMA ports, from simulated sysfs trees."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.netdev.counters import CounterReading
from railscope.probes.rdma.counters import RdmaCounters
from railscope.probes.rdma.netlink import RdmaNetlink
from railscope.probes.rdma.port import COUNTERS_LIMIT, Wanted, choose_all, choose_byte_counters
from railscope.probes.rdma.widths import Width
from tests.trees import rdma
from tests.trees.rdma import MLX5_COUNTERS, MLX5_HW_COUNTERS, RdmaTree, break_kind, break_open
from tests.unit.netdev_messages import SteppedClock

Scenario = Callable[[Path], RdmaTree]


class RecordedNetlink(RdmaNetlink):
    """Simulated answers of the kernel's RDMA netlink."""

    def __init__(self, indexes: Mapping[str, int], counters: Mapping[tuple[int, int], dict[str, int]]) -> None:
        self.indexes = dict(indexes)
        self.counters = dict(counters)
        self.asked: list[tuple[int, int]] = []
        self.closed = False

    def device_indexes(self) -> dict[str, int]:
        return self.indexes

    def port_counters(self, device_index: int, port: int) -> dict[str, int]:
        self.asked.append((device_index, port))
        if (device_index, port) not in self.counters:
            raise OSError(22, "netlink: Invalid argument")
        return self.counters[device_index, port]

    def close(self) -> None:
        self.closed = True


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def opened(
    tree: RdmaTree,
    *,
    clock: SteppedClock | None = None,
    netlink: RdmaNetlink | None = None,
    wanted: Wanted = choose_all,
    excluded: tuple[str, ...] = (),
) -> Iterator[RdmaCounters]:
    """A source that must leave no descriptor behind."""
    before = open_descriptors()
    source = RdmaCounters(tree.sysfs, clock or SteppedClock(), netlink=netlink, wanted=wanted, excluded=excluded)
    try:
        yield source
    finally:
        source.close()
        assert open_descriptors() == before


def row(reading: CounterReading, name: str) -> dict[str, int]:
    """What one port counts: known columns only."""
    assert reading.shape is not None
    at = reading.names.index(name)
    columns = zip(reading.fields, reading.values[at].tolist(), reading.shape.known[at].tolist(), strict=True)
    return {field: value for field, value, known in columns if known}


def width(reading: CounterReading, name: str, field: str) -> Width:
    assert reading.shape is not None
    at, column = reading.names.index(name), reading.fields.index(field)
    maximum = int(reading.shape.maxima[at, column])
    return Width(maximum.bit_length(), bool(reading.shape.saturating[at, column]))


def test_mlx5_counts_bytes_in_units_of_four_and_everything_else_as_it_is(tmp_path: Path) -> None:
    tree = rdma.mlx5_roce_8rails(tmp_path)
    with opened(tree, clock=SteppedClock(cost_ns=5)) as source:
        reading = source.read()
    assert reading.names == tuple(f"mlx5_{number}/1" for number in (0, 1, 3, 4, 5, 6, 9, 10, 11))
    assert reading.failed == ()
    assert reading.after_ns > reading.before_ns
    others = MLX5_COUNTERS | MLX5_HW_COUNTERS
    del others["port_xmit_data"], others["port_rcv_data"]
    assert row(reading, "mlx5_11/1") == {"tx_bytes": 4 * 1_011, "rx_bytes": 4 * 2_011, **others}
    assert "lifespan" not in reading.fields


@pytest.mark.parametrize(
    ("scenario", "name", "transmit", "receive"),
    [
        (rdma.mlx5_ib_ndr, "ibp24s0/1", 4_000, 8_000),
        (rdma.bnxt_re, "bnxt_re0/1", 111, 222),
        (rdma.irdma, "rocep202s0/1", 2_020, 1_010),
        (rdma.efa, "rdmap16s27/1", 50, 60),
        (rdma.vf, "mlx5_2/1", 4_000, 8_000),
        (rdma.bond, "mlx5_bond_0/1", 4_000, 8_000),
        (rdma.two_ports, "mlx4_0/2", 20, 8_000),
        (rdma.hfi1, "hfi1_0/1", 4_000, 8_000),
        (rdma.rxe, "rxe0/1", None, None),
    ],
)
def test_every_driver_has_its_bytes_in_bytes_and_soft_roce_has_none(
    tmp_path: Path, scenario: Scenario, name: str, transmit: int | None, receive: int | None
) -> None:
    with opened(scenario(tmp_path)) as source:
        counted = row(source.read(), name)
    assert (counted.get("tx_bytes"), counted.get("rx_bytes")) == (transmit, receive)


def test_numbers_of_what_exists_now_are_no_counters(tmp_path: Path) -> None:
    with opened(rdma.bnxt_re(tmp_path)) as source:
        fields = source.read().fields
    assert not [field for field in fields if field.startswith(("active_", "watermark_"))]


def test_what_is_counted_for_a_device_as_a_whole_belongs_to_its_first_port(tmp_path: Path) -> None:
    with opened(rdma.efa(tmp_path / "efa")) as source:
        assert row(source.read(), "rdmap16s27/1")["cmds_err"] == 9
    with opened(rdma.switchdev(tmp_path / "mlx5")) as source:
        reading = source.read()
    assert row(reading, "mlx5_0/1")["vport_np_cnp_sent"] == 1
    assert width(reading, "mlx5_0/1", "vport_out_of_buffer") == Width(32, False)
    assert width(reading, "mlx5_0/1", "vport_np_cnp_sent") == Width(64, False)


def test_the_same_name_has_the_width_of_its_own_driver_and_folder(tmp_path: Path) -> None:
    tree = rdma.rxe(tmp_path)
    other = rdma.mlx5_ib_ndr(tmp_path)
    with opened(other) as source:
        reading = source.read()
    assert tree.sysfs == other.sysfs
    assert width(reading, "rxe0/1", "link_downed") == Width(64, False)
    assert width(reading, "ibp24s0/1", "link_downed") == Width(8, True)
    assert width(reading, "rxe0/1", "duplicate_request") == Width(64, False)
    assert width(reading, "ibp24s0/1", "duplicate_request") == Width(32, False)
    assert width(reading, "ibp24s0/1", "port_xmit_wait") == Width(32, True)
    assert "rx_write_requests" not in row(reading, "rxe0/1")


def test_one_name_in_both_folders_of_a_port_makes_two_columns(tmp_path: Path) -> None:
    tree = RdmaTree(tmp_path)
    device = tree.device("mlx5_0", pci="0000:18:00.0")
    tree.port(device, counters={"link_downed": 1, "tx_bytes": 5}, hw_counters={"link_downed": 300, "rx_bytes": 6})
    with opened(tree) as source:
        reading = source.read()
    expected = {"link_downed": 1, "hw_counters/link_downed": 300, "counters/tx_bytes": 5, "rx_bytes": 6}
    assert row(reading, "mlx5_0/1") == expected
    assert width(reading, "mlx5_0/1", "hw_counters/link_downed") == Width(64, False)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_largest_numbers_are_read_exactly(tmp_path_factory: pytest.TempPathFactory, data: int, other: int) -> None:
    tree = RdmaTree(tmp_path_factory.mktemp("tree"))
    device = tree.device("mlx5_0", pci="0000:18:00.0")
    tree.port(device, counters={"port_xmit_data": data, "port_rcv_data": 0}, hw_counters={"np_cnp_sent": other})
    with opened(tree) as source:
        counted = row(source.read(), "mlx5_0/1")
    assert counted == {"tx_bytes": data * 4 % 2**64, "rx_bytes": 0, "np_cnp_sent": other}


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=40))
def test_whatever_a_file_holds_only_its_own_counter_is_missing(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    tree = rdma.rxe(tmp_path_factory.mktemp("tree"))
    tree.counter("rxe0/1", "hw_counters/sent_pkts").write_bytes(content)
    text = content.strip()
    good = text.isdigit() and len(text) <= 20 and int(text) < 2**64
    with opened(tree) as source:
        reading = source.read()
    counted = row(reading, "rxe0/1")
    assert counted.get("sent_pkts") == (int(text) if good else None)
    assert counted["rcvd_pkts"] == 20
    assert bool(reading.failed) == (not good and not text.startswith(b"N/A"))


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "N/A (no PMA)"])
def test_what_a_port_does_not_support_is_left_out_without_a_word(tmp_path: Path, kind: str) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    file = tree.counter("ibp24s0/1", "counters/symbol_error")
    if kind == "loop":
        break_open(file)
    elif kind.startswith("N/A"):
        file.write_text(kind)
    else:
        break_kind(file, kind)
    with opened(tree) as source:
        reading = source.read()
    assert reading.failed == ()
    assert "symbol_error" not in reading.fields
    assert row(reading, "ibp24s0/1")["tx_bytes"] == 4_000


@pytest.mark.parametrize("kind", ["endless", "huge"])
def test_a_file_without_an_end_is_named_and_the_rest_is_read(tmp_path: Path, kind: str) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    break_kind(tree.counter("ibp24s0/1", "hw_counters/out_of_buffer"), kind)
    with opened(tree) as source:
        reading = source.read()
    assert [failure.device for failure in reading.failed] == ["ibp24s0/1"]
    assert reading.failed[0].reason.startswith("out_of_buffer: expected a counter")
    assert "out_of_buffer" not in row(reading, "ibp24s0/1")
    assert row(reading, "ibp24s0/1")["out_of_sequence"] == 0


def test_a_counter_that_fails_is_left_alone_longer_and_longer_and_comes_back(tmp_path: Path) -> None:
    tree = rdma.mlx5_roce_8rails(tmp_path)
    clock = SteppedClock()
    with opened(tree, clock=clock) as source:
        source.read()
        tree.set("mlx5_3/1", "hw_counters/out_of_buffer", "?")
        assert [failure.device for failure in source.read().failed] == ["mlx5_3/1"]
        tree.set("mlx5_3/1", "hw_counters/out_of_buffer", 7)
        clock.sleep(1.9)
        reading = source.read()
        assert reading.failed  # not tried yet, still known to be broken
        assert "out_of_buffer" not in row(reading, "mlx5_3/1")
        assert row(reading, "mlx5_4/1")["out_of_buffer"] == 0
        clock.sleep(0.2)
        reading = source.read()
    assert reading.failed == ()
    assert row(reading, "mlx5_3/1")["out_of_buffer"] == 7


def test_bytes_of_which_a_part_fails_are_unknown_not_smaller(tmp_path: Path) -> None:
    tree = rdma.irdma(tmp_path)
    with opened(tree) as source:
        source.read()
        tree.set("rocep202s0/1", "hw_counters/ip6OutOctets", "?")
        counted = row(source.read(), "rocep202s0/1")
    assert "tx_bytes" not in counted
    assert counted["rx_bytes"] == 1_010


def test_values_are_read_again_through_kept_descriptors(tmp_path: Path) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    with opened(tree) as source:
        first = source.read()
        during = open_descriptors()
        tree.set("ibp24s0/1", "counters/port_xmit_data", 1_500)
        second = source.read()
        assert open_descriptors() == during
    assert row(second, "ibp24s0/1")["tx_bytes"] == 6_000
    assert second.names is first.names
    assert second.fields is first.fields


def test_devices_that_come_and_go_are_noticed_within_a_second(tmp_path: Path) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    clock = SteppedClock()
    with opened(tree, clock=clock) as source:
        first = source.read()
        rdma.bnxt_re(tmp_path)
        clock.sleep(1)
        second = source.read()
        assert second.names == ("bnxt_re0/1", "ibp24s0/1")
        assert second.fields[: len(first.fields)] == first.fields
        tree.unplug("ibp24s0")
        clock.sleep(1)
        third = source.read()
    assert third.names == ("bnxt_re0/1",)
    assert third.fields == second.fields


def test_a_device_registered_anew_is_another_generation(tmp_path: Path) -> None:
    tree = RdmaTree(tmp_path)
    rdma.reload_driver(tree)
    clock = SteppedClock()
    with opened(tree, clock=clock) as source:
        first = source.read()
        rdma.reload_driver(tree)
        tree.set("mlx5_0/1", "counters/port_xmit_data", 3)
        clock.sleep(1)
        second = source.read()
    assert first.names == second.names == ("mlx5_0/1",)
    assert first.generations != second.generations
    assert row(second, "mlx5_0/1")["tx_bytes"] == 12


def test_a_folder_of_counters_that_vanishes_takes_only_its_counters(tmp_path: Path) -> None:
    tree = rdma.mlx5_roce_8rails(tmp_path)
    shutil.rmtree(tree.counter("mlx5_3/1", "counters"))
    with opened(tree) as source:
        reading = source.read()
    assert "tx_bytes" not in row(reading, "mlx5_3/1")
    assert row(reading, "mlx5_3/1")["np_cnp_sent"] == 5
    assert reading.failed == ()


def test_no_rdma_is_an_error_at_once_and_when_it_goes_later(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RdmaCounters(tmp_path, SteppedClock())
    tree = rdma.mlx5_ib_ndr(tmp_path)
    clock = SteppedClock()
    with opened(tree, clock=clock) as source:
        source.read()
        shutil.move(tmp_path / "class", tmp_path / "away")
        clock.sleep(1)
        with pytest.raises(FileNotFoundError):
            source.read()
        shutil.move(tmp_path / "away", tmp_path / "class")
        source.refresh()
        assert source.read().names == ("ibp24s0/1",)


def test_a_source_of_which_nothing_can_be_read_fails_as_a_whole(tmp_path: Path) -> None:
    tree = RdmaTree(tmp_path)
    tree.port(tree.device("mlx5_0", pci="0000:18:00.0"), counters={"port_xmit_data": "?", "port_rcv_data": "?"})
    with opened(tree) as source, pytest.raises(OSError, match=r"mlx5_0/1: port_rcv_data: expected a counter"):
        source.read()


def test_excluded_counters_are_never_opened_and_the_others_are_read_from_files(tmp_path: Path) -> None:
    tree = rdma.reset(tmp_path)
    break_open(tree.counter("mlx5_0/1", "counters/port_xmit_wait"))
    break_open(tree.counter("mlx5_0/1", "hw_counters/out_of_sequence"))
    # RDMA netlink reads all hw_counters of a port at once: it is not asked.
    netlink = RecordedNetlink({"mlx5_0": 4}, {(4, 1): {"out_of_sequence": 9}})
    patterns = ("mlx5_*/port_xmit_wait", "mlx5_0/hw_counters/out_of_*", "mlx5_1/rx_write_requests")
    with opened(tree, netlink=netlink, excluded=patterns) as source:
        reading = source.read()
    assert reading.failed == ()
    found = row(reading, "mlx5_0/1")
    assert not {"port_xmit_wait", "out_of_sequence", "out_of_buffer"} & found.keys()
    assert found["rx_write_requests"] == 2**32 - 10
    assert netlink.asked == []


def test_excluded_devices_are_never_opened(tmp_path: Path) -> None:
    tree = rdma.mlx5_roce_8rails(tmp_path)
    with opened(tree, excluded=("mlx5_1", "mlx5_1?")) as source:
        assert source.read().names == tuple(f"mlx5_{number}/1" for number in (0, 3, 4, 5, 6, 9))


def test_bytes_alone_are_two_files_a_port(tmp_path: Path) -> None:
    tree = rdma.mlx5_roce_8rails(tmp_path)
    before = open_descriptors()
    with opened(tree, wanted=choose_byte_counters) as source:
        reading = source.read()
        assert open_descriptors() == before + 2 * 9
    assert reading.fields == ("tx_bytes", "rx_bytes")
    assert row(reading, "mlx5_3/1") == {"tx_bytes": 4_012, "rx_bytes": 8_012}


def test_more_counters_than_anyone_has_are_cut_and_said(tmp_path: Path) -> None:
    tree = RdmaTree(tmp_path)
    many = {f"counter{number:04}": number for number in range(COUNTERS_LIMIT + 5)}
    tree.port(tree.device("mlx5_0", pci="0000:18:00.0"), hw_counters=many)
    with opened(tree) as source:
        reading = source.read()
    assert len(row(reading, "mlx5_0/1")) == COUNTERS_LIMIT
    assert "more than 512 counters" in reading.failed[0].reason


def test_netlink_gives_all_hw_counters_at_once_and_optional_ones_too(tmp_path: Path) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    netlink = RecordedNetlink({"ibp24s0": 4}, {(4, 1): {"out_of_sequence": 77, "active_x": 1}})
    before = open_descriptors()
    with opened(tree, netlink=netlink) as source:
        first = row(source.read(), "ibp24s0/1")
        assert open_descriptors() == before + len(MLX5_COUNTERS)
        netlink.counters[4, 1] = {"out_of_sequence": 78, "cc_rx_cnp_pkts": 2}
        second = source.read()
    assert netlink.asked == [(4, 1), (4, 1)]
    assert netlink.closed
    assert first["tx_bytes"] == 4_000
    assert first["out_of_sequence"] == 77
    assert "active_x" not in first
    assert row(second, "ibp24s0/1")["cc_rx_cnp_pkts"] == 2
    assert width(second, "ibp24s0/1", "out_of_sequence") == Width(32, False)


def test_bytes_that_come_over_netlink_count_as_bytes(tmp_path: Path) -> None:
    netlink = RecordedNetlink({"bnxt_re0": 0}, {(0, 1): {"tx_bytes": 5, "rx_bytes": 6, "tx_pkts": 1}})
    with opened(rdma.bnxt_re(tmp_path), netlink=netlink) as source:
        assert row(source.read(), "bnxt_re0/1") == {"tx_bytes": 5, "rx_bytes": 6, "tx_pkts": 1}


@pytest.mark.parametrize("indexes", [{"ibp24s0": 4}, {}])
def test_files_are_read_where_netlink_refuses_or_knows_no_such_device(tmp_path: Path, indexes: dict[str, int]) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    netlink = RecordedNetlink(indexes, {})
    with opened(tree, netlink=netlink) as source:
        for _ in range(2):
            reading = source.read()
            assert row(reading, "ibp24s0/1")["np_cnp_sent"] == 5
    assert len(netlink.asked) == len(indexes)
    assert reading.failed == ()


def test_an_input_output_error_is_named_and_the_rest_of_the_port_is_read(tmp_path: Path) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    file = tree.counter("ibp24s0/1", "counters/symbol_error")
    file.unlink()
    file.symlink_to("/proc/self/mem")  # nothing is mapped at 0: EIO
    with opened(tree) as source:
        reading = source.read()
    assert [failure.reason for failure in reading.failed] == ["symbol_error: Input/output error"]
    assert row(reading, "ibp24s0/1")["tx_bytes"] == 4_000


def test_a_device_that_is_gone_fails_alone_and_is_opened_again_after_a_pause(tmp_path: Path) -> None:
    tree = rdma.mlx5_roce_8rails(tmp_path)
    file = tree.counter("mlx5_4/1", "counters/symbol_error")
    file.unlink()
    folder = os.open(file.parent, os.O_RDONLY)  # a socket's path must be short
    with closing(socket.socket(socket.AF_UNIX)) as nobody:
        nobody.bind(f"/proc/self/fd/{folder}/{file.name}")  # opening a socket's file is ENXIO
    os.close(folder)
    clock = SteppedClock()
    with opened(tree, clock=clock) as source:
        reading = source.read()
        assert len(reading.names) == 8
        assert [(failure.device, failure.reason) for failure in reading.failed] == [
            ("mlx5_4/1", "No such device or address")
        ]
        file.unlink()
        file.write_text("0\n")
        clock.sleep(1.5)
        assert [failure.device for failure in source.read().failed] == ["mlx5_4/1"]
        clock.sleep(1.0)
        reading = source.read()
    assert reading.failed == ()
    assert row(reading, "mlx5_4/1")["tx_bytes"] == 4_016
