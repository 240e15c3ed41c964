"""RDMA devices that do not answer, simulated: reading a file of theirs waits until the test lets it go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.agent.node.rails.rdma_machine import RdmaMachineReader
from railscope.agent.node.rails.rdma_ports import RdmaWatch
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.netdev import sysfs
from tests.trees import rdma
from tests.unit.netdev_messages import SteppedClock
from tests.waiting import eventually

_PORT = "ibp24s0/1"
_NO_PATIENCE_SECONDS = 0.001


class SickFile:
    """Reading it waits while the device is sick; every other file is read as usual."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers = threading.Event()
        self._answers.set()
        self.asked = 0

    def read(self, file: Path | str, most: int = 4096) -> bytes:
        if Path(file).name == self._name:
            self.asked += 1
            assert self._answers.wait(60)
        return sysfs.read_bytes(file, most)

    def fall_sick(self) -> None:
        self._answers.clear()

    def recover(self) -> None:
        self._answers.set()


@pytest.fixture
def vital_product_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[SickFile]:
    sick = SickFile("vpd")
    monkeypatch.setattr("railscope.probes.rdma.inventory.read_bytes", sick.read)
    yield sick
    sick.recover()


@pytest.fixture
def port_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[SickFile]:
    sick = SickFile("state")
    monkeypatch.setattr("railscope.probes.rdma.inventory.read_text", lambda file: sick.read(file).decode().strip())
    yield sick
    sick.recover()


def test_a_card_that_does_not_answer_for_its_product_data_holds_up_nobody(
    tmp_path: Path, vital_product_data: SickFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railscope.agent.node.rails.rdma_machine.START_PATIENCE_SECONDS", _NO_PATIENCE_SECONDS)
    clock = SteppedClock()
    tree = rdma.mlx5_ib_ndr(tmp_path)
    function = tree.sysfs / "class/infiniband/ibp24s0/device"
    (function / "class").write_text("0x020700\n")
    (function / "vpd").write_bytes(b"\x82\x0a\x00ConnectX-7")
    reader = RdmaMachineReader(clock, tree.sysfs)

    def ports() -> list[str]:
        return [port.name for port in reader.machine.ports]

    vital_product_data.fall_sick()
    assert not reader.update()
    assert ports() == []
    eventually(lambda: vital_product_data.asked == 1)
    clock.sleep(60)
    assert not reader.update()
    assert reader.hangs_for_ns() == 60_000_000_000
    assert vital_product_data.asked == 1, "one reading at a time"
    vital_product_data.recover()
    eventually(reader.update)
    assert ports() == [_PORT]
    assert [nic.device for nic in reader.machine.nics] == ["ibp24s0"]
    assert reader.hangs_for_ns() == 0


def test_whether_a_port_is_up_is_unknown_while_it_does_not_answer(
    tmp_path: Path, port_state: SickFile, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SteppedClock()
    sampler = Sampler(clock)
    watch = RdmaWatch(
        clock, sampler, sysfs=rdma.mlx5_ib_ndr(tmp_path).sysfs, netlink=False, patience_seconds=_NO_PATIENCE_SECONDS
    )

    def is_up() -> bool | None:
        watch.update()
        return next((facts.port.up for facts in watch.facts()), None)

    eventually(lambda: is_up() is not None)
    sampler.read_due(clock.monotonic_ns())
    assert [facts.port.up for facts in watch.facts()] == [True]
    assert [(result.collector, result.success) for result in watch.collectors()] == [("rdma", True)]
    port_state.fall_sick()
    clock.sleep(6)
    watch.update()
    clock.sleep(6)
    with caplog.at_level(logging.INFO, "railscope.rdma"):
        watch.update()
        (facts,) = watch.facts()
        assert (facts.port.up, facts.port.physical_state) == (None, "unknown")
        assert facts.transmit_bytes is not None, "its counters are read as before"
        assert [(result.collector, result.success) for result in watch.collectors()] == [("rdma", False)]
        port_state.recover()
        eventually(lambda: is_up() is True)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["RDMA devices"] * 2
    watch.close()
    sampler.stop()


def test_a_reading_that_fails_is_told_once_and_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    reader = RdmaMachineReader(clock, rdma.mlx5_ib_ndr(tmp_path).sysfs, patience_seconds=10)
    with monkeypatch.context() as broken:
        broken.setattr("railscope.probes.rdma.inventory.RdmaInventory.read", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            eventually(reader.update)
    assert not reader.update(), "not due yet"
    clock.sleep(6)
    assert reader.update()
    assert [port.name for port in reader.machine.ports] == [_PORT]
