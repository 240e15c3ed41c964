"""One sick part of a machine costs its own values and nothing else: the whole agent on simulated, broken machines.

What a broken machine shows is compared line by line with what it showed before it was broken.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from railscope.agent.config.options import Config
from railscope.agent.node.attribution.evidence import HandedBytes
from railscope.agent.node.daemon.hardware import Hardware
from railscope.agent.node.daemon.observer import Observer
from railscope.agent.node.rails import ethernet
from railscope.agent.node.rails.ethernet import EthernetWatch
from railscope.agent.node.rails.selection import decide_rails
from railscope.agent.node.sampling.sampler import Sampler
from railscope.exporters.series.families import make_families
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format, Renderer
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.inventory import SysfsInventory
from railscope.probes.processes.namespaces import network_namespace
from tests.trees.rdma import MLX5_COUNTERS, MLX5_HW_COUNTERS, RdmaTree, break_kind, break_open, write
from tests.unit.golden_metrics import kept

WAIT_SECONDS = 60
SICK, OTHER = "mlx5_1", "mlx5_0"
NETDEV = "ens25np0"
PORT = f"class/infiniband/{SICK}/ports/1"
STATISTICS = f"class/net/{NETDEV}/statistics"
RDMA_FAILED = {f'railscope_collector_success{{collector="rdma"}} {value}' for value in (0, 1)}
BYTES_FAILED = {f'railscope_collector_success{{collector="rdma bytes"}} {value}' for value in (0, 1)}
NETDEV_FAILED = {f'railscope_collector_success{{collector="netdev"}} {value}' for value in (0, 1)}


def machine(sysfs: Path) -> None:
    """Two adapters, each with its network device."""
    tree = RdmaTree(sysfs)
    for number, (device, netdev) in enumerate(((OTHER, "ens24np0"), (SICK, NETDEV))):
        pci = f"0000:{18 + number}:00.0"
        folder = tree.device(device, pci=pci)
        tree.port(folder, counters=MLX5_COUNTERS, hw_counters=MLX5_HW_COUNTERS, netdevs=(netdev,))
        tree.netdev(netdev, pci=pci, transmit_bytes=100 + number, receive_bytes=200 + number)


def exposition(sysfs: Path) -> str:
    """What an agent shows once it has read everything that there is."""
    observer = Observer(Config(sysfs=sysfs, collectors=frozenset({"netdev", "rdma"})), None, SystemClock(), "0")
    try:
        observer.start()
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            snapshot = observer.snapshot()
            if all(result.duration_seconds > 0 for result in snapshot.health.collectors):
                # Results are taken last: the rails of the same snapshot may be from before the first read.
                shown = make_families(observer.snapshot(), selection=Selection(["all"]))
                return Renderer().render(shown, Format.PROMETHEUS).decode()
            assert time.monotonic() < deadline, snapshot.health.collectors
            time.sleep(0.01)
    finally:
        observer.close()


def test_what_was_handed_over_is_asked_once_for_rails_of_both_kinds(tmp_path: Path) -> None:
    machine(tmp_path)
    hardware = Hardware(Config(sysfs=tmp_path, collectors=frozenset({"netdev", "rdma"})), SystemClock(), None)
    asked: list[HandedBytes] = []

    def handed_over() -> HandedBytes:
        # What was lost until it is asked is told once: a second answer would call bytes whole that are not.
        asked.append(HandedBytes({}, whole=not asked))
        return asked[-1]

    try:
        hardware.start()
        hardware.update([], handed_over)
        assert len(asked) == 1
        hardware.correlate([], handed_over)
        assert len(asked) == 2
        hardware.update(None, handed_over)
        assert len(asked) == 2, "nothing is related"
    finally:
        hardware.close()


def lines_of(sysfs: Path) -> set[str]:
    """What an agent shows, but for sums over counters: those of what is left stay."""
    lines = kept(exposition(sysfs)).splitlines()
    return {line for line in lines if not line.startswith("railscope_rail_events_by_severity_total")}


def events(counter: str) -> Callable[[str], bool]:
    return lambda line: f'device="{SICK}",port="1",counter="{counter}"' in line


def of_device(device: str) -> Callable[[str], bool]:
    return lambda line: f'device="{device}"' in line


def counted(device: str) -> Callable[[str], bool]:
    """Bytes, and counters but carrier changes, which no `statistics` hold."""
    families = tuple(f"railscope_rail_{name}" for name in ("transmit", "receive", "events", "pinned"))
    return lambda line: of_device(device)(line) and line.startswith(families) and "carrier_changes" not in line


def without_link(file: Path) -> None:
    """What a device's entry is like between its being listed and its being looked at: it leads nowhere."""
    file.unlink()
    file.symlink_to("nowhere")


def input_output_error(file: Path) -> None:
    """Address 0 of a process cannot be read: EIO."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


@dataclass(frozen=True, slots=True)
class Break:
    """How a machine is broken, and what may be seen of it."""

    do: Callable[[Path], None]
    gone: Callable[[str], bool]
    """Which lines go: all these, and no others."""
    collectors: frozenset[str] = frozenset()
    """Lines of collectors that change."""
    renewed: Callable[[str], bool] = lambda _line: False
    """Which lines come, or have another value."""


SYMBOL_ERROR = f"{PORT}/counters/symbol_error"
BREAKS = {
    "garbage in a counter": Break(
        lambda sysfs: write(sysfs / SYMBOL_ERROR, "no number"), events("symbol_error"), frozenset(RDMA_FAILED)
    ),
    "a negative counter": Break(
        lambda sysfs: write(sysfs / SYMBOL_ERROR, "-1"), events("symbol_error"), frozenset(RDMA_FAILED)
    ),
    "an empty counter": Break(
        lambda sysfs: os.truncate(sysfs / SYMBOL_ERROR, 0), events("symbol_error"), frozenset(RDMA_FAILED)
    ),
    "an input/output error": Break(
        lambda sysfs: input_output_error(sysfs / SYMBOL_ERROR), events("symbol_error"), frozenset(RDMA_FAILED)
    ),
    "a counter without an end": Break(
        lambda sysfs: break_kind(sysfs / SYMBOL_ERROR, "endless"), events("symbol_error"), frozenset(RDMA_FAILED)
    ),
    "a pipe in place of a counter": Break(
        lambda sysfs: break_kind(sysfs / SYMBOL_ERROR, "pipe"), events("symbol_error")
    ),
    "a counter that cannot be opened": Break(lambda sysfs: break_open(sysfs / SYMBOL_ERROR), events("symbol_error")),
    "garbage in the bytes": Break(
        lambda sysfs: write(sysfs / f"{PORT}/counters/port_xmit_data", "?"),
        lambda line: of_device(SICK)(line) and line.startswith("railscope_rail_transmit"),
        frozenset(RDMA_FAILED | BYTES_FAILED),
    ),
    "no counters folder": Break(
        lambda sysfs: shutil.rmtree(sysfs / f"{PORT}/counters"),
        lambda line: counted(SICK)(line) and not any(events(name)(line) for name in MLX5_HW_COUNTERS),
    ),
    "no hw_counters folder": Break(
        lambda sysfs: shutil.rmtree(sysfs / f"{PORT}/hw_counters"),
        lambda line: any(events(name)(line) for name in MLX5_HW_COUNTERS),
    ),
    "no device folder": Break(
        lambda sysfs: (sysfs / f"class/infiniband/{SICK}/device").unlink(),
        lambda line: of_device(SICK)(line) and "rail_info" in line,
        renewed=lambda line: of_device(SICK)(line) and 'driver="unknown"' in line,
    ),
    "an unreadable state": Break(
        lambda sysfs: write(sysfs / f"{PORT}/state", "\x00\xff?"),
        lambda line: of_device(SICK)(line) and "rail_up" in line,
    ),
    "an entry that leads nowhere": Break(
        lambda sysfs: without_link(sysfs / f"class/infiniband/{SICK}"),
        # Beside RDMA rails a network device of no port is no rail.
        lambda line: of_device(SICK)(line) or of_device(NETDEV)(line),
    ),
    "garbage in a network device's counter": Break(
        lambda sysfs: write(sysfs / STATISTICS / "rx_errors", "many"), counted(NETDEV), frozenset(NETDEV_FAILED)
    ),
    "a network device's counter without an end": Break(
        lambda sysfs: break_kind(sysfs / STATISTICS / "rx_errors", "endless"), counted(NETDEV), frozenset(NETDEV_FAILED)
    ),
    "no statistics of a network device": Break(
        lambda sysfs: shutil.rmtree(sysfs / STATISTICS), counted(NETDEV), frozenset(NETDEV_FAILED)
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What the machine shows before it is broken."""
    root = tmp_path_factory.mktemp("whole")
    machine(root)
    return lines_of(root)


@pytest.mark.parametrize("name", BREAKS)
def test_one_sick_part_costs_its_own_values_and_nothing_else(name: str, tmp_path: Path, whole: set[str]) -> None:
    broken = BREAKS[name]
    machine(tmp_path)
    broken.do(tmp_path)
    after = lines_of(tmp_path)
    gone = {line for line in whole if broken.gone(line)}
    assert gone
    assert whole - after == gone | {line for line in broken.collectors if line.endswith(" 1")}
    assert {line for line in after - whole if not broken.renewed(line)} == {
        line for line in broken.collectors if line.endswith(" 0")
    }


def lines_about(lines: Iterable[str], device: str) -> set[str]:
    """Samples of a device, whatever its number."""
    return {line.partition("device=")[2] for line in lines if of_device(device)(line)}


@pytest.mark.parametrize(
    ("missing", "others"), [("infiniband", ("ens24np0", NETDEV)), ("net", (OTHER, SICK))], ids=["rdma", "netdev"]
)
def test_rdma_and_network_devices_do_not_need_each_other(
    missing: str, others: tuple[str, str], tmp_path: Path, whole: set[str]
) -> None:
    machine(tmp_path)
    shutil.rmtree(tmp_path / "class" / missing)
    lines = lines_of(tmp_path)
    for device in others:
        assert lines_about(lines, device) == lines_about(whole, device)


class RefusedStatistics:
    """ethtool's statistics where the kernel refuses."""

    def __init__(self, *_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")


@pytest.fixture
def ethernet_watch() -> Iterator[tuple[Sampler, EthernetWatch]]:
    clock = SystemClock()
    sampler = Sampler(clock)
    watch = EthernetWatch(clock, sampler, procfs=Path("/proc"), lifetime_ns=0)
    yield sampler, watch
    watch.close()
    sampler.stop()


def test_ethtool_that_is_refused_leaves_queues_and_connections_alone(
    ethernet_watch: tuple[Sampler, EthernetWatch], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ethernet, "EthtoolStatistics", RefusedStatistics)
    sampler, watch = ethernet_watch
    own = network_namespace(Path("/proc"), "self")
    watch.watch_own(own)
    watch.add_process(os.getpid(), own)
    decisions = decide_rails(SysfsInventory(Path("/sys"), own.inode).read(), socket_interfaces={own.inode: ["=lo"]})
    caplog.set_level(logging.WARNING)
    clock = SystemClock()
    for _ in range(2):
        watch.update(decisions)
        sampler.read_due(clock.monotonic_ns() + 60_000_000_000)
    watch.update(decisions)
    assert {result.collector: result.success for result in watch.collectors()} == {
        "ethtool": False,
        "qdisc": True,
        "tcp": True,
    }
    assert [record.message for record in caplog.records] == ["ethtool: [Errno 1] Operation not permitted"]
    (loopback,) = [fact for fact in watch.facts() if fact.device == "lo"]
    assert loopback.queue is not None
    assert loopback.tcp is not None
    assert loopback.counters == ()
