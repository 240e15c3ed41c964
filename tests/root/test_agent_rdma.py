"""The agent on hosts with RDMA devices: simulated sysfs trees, read and exported by a real agent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fabric.agent_process import AgentProcess
from tests.trees import rdma
from tests.trees.rdma import RdmaTree

pytestmark = [pytest.mark.root]


def raised(file: Path, by: int) -> None:
    """Let a counter rise, as a device would."""
    file.write_text(f"{int(file.read_text()) + by}\n")


def value(agent: AgentProcess, name: str, **labels: str) -> float | None:
    found = [number for _, number in agent.samples(f"railscope_{name}", **labels)]
    return found[0] if found else None


@pytest.mark.parametrize(
    ("scenario", "counter", "per_unit"),
    [
        (rdma.mlx5_ib_ndr, "counters/port_xmit_data", 4),
        (rdma.bnxt_re, "hw_counters/tx_bytes", 1),
        (rdma.efa, "hw_counters/tx_bytes", 1),
    ],
)
def test_bytes_of_a_port_rise_as_its_driver_counts_them(
    scenario: Callable[[Path], RdmaTree], counter: str, per_unit: int, tmp_path: Path
) -> None:
    scenario(tmp_path)
    (device, *_) = sorted((tmp_path / "class/infiniband").iterdir())
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective") as agent:
        agent.until(lambda: value(agent, "rail_transmit_bytes_total", device=device.name) == 0)
        raised(device / "ports/1" / counter, 1_000)
        agent.until(lambda: value(agent, "rail_transmit_bytes_total", device=device.name) == 1_000 * per_unit)


def test_a_device_that_counts_no_bytes_shows_none_and_its_packets(tmp_path: Path) -> None:
    rdma.rxe(tmp_path)
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective") as agent:
        agent.until(lambda: value(agent, "rail_up", device="rxe0") == 1)
        agent.until(lambda: value(agent, "rail_events_total", device="rxe0", counter="sent_pkts") == 0)
        raised(tmp_path / "class/infiniband/rxe0/ports/1/hw_counters/sent_pkts", 7)
        agent.until(lambda: value(agent, "rail_events_total", device="rxe0", counter="sent_pkts") == 7)
        assert value(agent, "rail_transmit_bytes_total", device="rxe0") is None


def test_a_saturated_counter_is_said_to_be_pinned(tmp_path: Path) -> None:
    rdma.pinned_counters(tmp_path)
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective") as agent:
        agent.until(lambda: value(agent, "rail_pinned", counter="link_downed") == 1)


def test_one_sick_file_shows_in_its_collector_and_nowhere_else(tmp_path: Path) -> None:
    rdma.mlx5_ib_ndr(tmp_path)
    (device, *_) = sorted((tmp_path / "class/infiniband").iterdir())
    sick = device / "ports/1/counters/symbol_error"
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective") as agent:
        agent.until(lambda: value(agent, "collector_success", collector="rdma") == 1)
        sick.write_text("no number\n")
        agent.until(lambda: value(agent, "collector_success", collector="rdma") == 0)
        raised(device / "ports/1/counters/port_xmit_data", 25)
        agent.until(lambda: value(agent, "rail_transmit_bytes_total", device=device.name) == 100)
        assert value(agent, "collector_success", collector="rdma bytes") == 1
        sick.write_text("3\n")
        agent.until(lambda: value(agent, "collector_success", collector="rdma") == 1)
