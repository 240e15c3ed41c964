"""Counters from /proc/net/dev and sysfs, on simulated trees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.netdev.counters import CounterReading
from railscope.probes.netdev.procfs_counters import ProcNetDevCounters, parse_proc_net_dev
from railscope.probes.netdev.sysfs_counters import SYSFS_FIELDS, SysfsCounters
from tests.unit.netdev_messages import SteppedClock

HEAD = (
    b"Inter-|   Receive                                                |  Transmit\n"
    b" face |bytes    packets errs drop fifo frame compressed multicast"
    b"|bytes    packets errs drop fifo colls carrier compressed\n"
)


def proc_line(name: str, columns: list[int]) -> bytes:
    return f"{name:>6}: {' '.join(str(column) for column in columns)}\n".encode()


def value(reading: CounterReading, device: str, field: str) -> int:
    return int(reading.values[reading.names.index(device), reading.fields.index(field)])


def test_each_column_of_proc_net_dev_gets_its_name(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/dev").write_bytes(HEAD + proc_line("lo", [0] * 16) + proc_line("rail0", list(range(1, 17))))
    source = ProcNetDevCounters(tmp_path, SteppedClock(cost_ns=5))
    reading = source.read()
    source.close()
    assert reading.names == ("lo", "rail0")
    assert reading.after_ns - reading.before_ns == 5
    row = {field: value(reading, "rail0", field) for field in reading.fields}
    assert row == {
        "rx_bytes": 1,
        "rx_packets": 2,
        "rx_errors": 3,
        "rx_dropped_or_missed": 4,
        "rx_fifo_errors": 5,
        "tx_bytes": 9,
        "tx_packets": 10,
        "tx_errors": 11,
        "tx_dropped": 12,
        "tx_fifo_errors": 13,
        "collisions": 14,
    }


names = st.from_regex(r"[a-z][a-z0-9:.@-]{0,14}", fullmatch=True).filter(lambda name: not name.endswith(":"))


@settings(deadline=None)
@given(st.dictionaries(names, st.lists(st.integers(0, 2**64 - 1), min_size=16, max_size=16), max_size=12))
def test_every_line_of_proc_net_dev_is_read_exactly(devices: dict[str, list[int]]) -> None:
    text = HEAD + b"".join(proc_line(name, columns) for name, columns in devices.items())
    found, values, failed = parse_proc_net_dev(text)
    assert found == tuple(devices)
    assert failed == ()
    assert values[:, 0].tolist() == [columns[0] for columns in devices.values()]
    assert values[:, 5].tolist() == [columns[8] for columns in devices.values()]


@pytest.mark.parametrize(
    "line",
    [b"eth1: 1 2 3\n", b"eth1 no colon\n", b"eth1: " + b"-1 " * 16 + b"\n", b"eth1: " + b"99999999999999999999 " * 16],
)
def test_a_line_that_is_no_line_of_counters_drops_only_itself(line: bytes) -> None:
    good = [proc_line("eth0", [7] * 16), proc_line("eth2", [8] * 16)]
    found, _values, failed = parse_proc_net_dev(HEAD + good[0] + line.rstrip(b"\n") + b"\n" + good[1])
    assert found == ("eth0", "eth2")
    assert len(failed) == 1
    assert "not a line of counters" in failed[0].reason


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_for_proc_net_dev_is_an_error_or_failed_lines(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="unexpected beginning"):
        parse_proc_net_dev(b"x" + garbage)
    found, values, _failed = parse_proc_net_dev(HEAD + garbage)
    assert values.shape[0] == len(found)


def make_device(sysfs: Path, name: str, index: int, base: int = 0) -> Path:
    folder = sysfs / "class/net" / name
    (folder / "statistics").mkdir(parents=True)
    (folder / "ifindex").write_text(f"{index}\n")
    for position, field in enumerate(SYSFS_FIELDS):
        (folder / "statistics" / field).write_text(f"{base + position}\n")
    return folder


@pytest.fixture
def sysfs(tmp_path: Path) -> Iterator[SysfsCounters]:
    make_device(tmp_path, "eth10", 10, 1000)
    make_device(tmp_path, "eth2", 2, 200)
    (tmp_path / "class/net/bonding_masters").write_text("bond0\n")
    source = SysfsCounters(tmp_path, SteppedClock())
    yield source
    source.close()


def test_sysfs_counters_are_read_again_through_kept_descriptors(sysfs: SysfsCounters, tmp_path: Path) -> None:
    first = sysfs.read()
    assert first.names == ("eth2", "eth10")
    assert first.generations == (2, 10)
    assert value(first, "eth10", "tx_bytes") == 1001
    (tmp_path / "class/net/eth10/statistics/tx_bytes").write_text("5000\n")
    second = sysfs.read()
    assert value(second, "eth10", "tx_bytes") == 5000
    assert second.names is first.names


@pytest.mark.parametrize("text", ["", "N/A\n", "-3\n", "18446744073709551616\n"])
def test_garbage_in_one_counter_drops_only_that_device_and_says_so(
    sysfs: SysfsCounters, tmp_path: Path, text: str
) -> None:
    sysfs.read()
    (tmp_path / "class/net/eth2/statistics/rx_bytes").write_text(text)
    reading = sysfs.read()
    assert reading.names == ("eth10",)
    assert [failure.device for failure in reading.failed] == ["eth2"]
    (tmp_path / "class/net/eth2/statistics/rx_bytes").write_text("201\n")
    assert sysfs.read().names == ("eth2", "eth10")


def test_a_device_without_statistics_is_named_and_the_others_are_read(sysfs: SysfsCounters, tmp_path: Path) -> None:
    (tmp_path / "class/net/rail9").mkdir()
    reading = sysfs.read()
    assert reading.names == ("eth2", "eth10")
    assert [failure.device for failure in reading.failed] == ["rail9"]


def test_a_new_device_is_read_after_a_refresh(sysfs: SysfsCounters, tmp_path: Path) -> None:
    sysfs.read()
    make_device(tmp_path, "eth3", 3)
    sysfs.refresh()
    assert sysfs.read().names == ("eth2", "eth3", "eth10")


def test_a_tree_without_network_devices_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SysfsCounters(tmp_path, SteppedClock())
