"""The agent on hosts with RDMA devices: simulated sysfs trees, read and exported by a real agent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fabric.agent_process import AgentProcess
from tests.trees import rdma
from tests.trees.rdma import RdmaTree

pytestmark = [pytest.mark.root]

COUNTERS = "--series.detail=counters"
"""Traffic is counted by more than a port's bytes, and is shown on request."""


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
def test_bytes_of_a_port_are_those_of_its_driver_and_rise_with_them(
    scenario: Callable[[Path], RdmaTree], counter: str, per_unit: int, tmp_path: Path
) -> None:
    scenario(tmp_path)
    (device, *_) = sorted((tmp_path / "class/infiniband").iterdir())
    counted = int((device / "ports/1" / counter).read_text())
    assert counted > 0
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective") as agent:
        agent.until(lambda: value(agent, "rail_transmit_bytes_total", device=device.name) == counted * per_unit)
        raised(device / "ports/1" / counter, 1_000)
        agent.until(
            lambda: value(agent, "rail_transmit_bytes_total", device=device.name) == (counted + 1_000) * per_unit
        )


def test_a_driver_that_is_loaded_anew_lowers_nothing_and_counts_on(tmp_path: Path) -> None:
    tree = rdma.reset(tmp_path)
    before = 4 * 10**12
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective", COUNTERS) as agent:
        agent.until(lambda: value(agent, "rail_transmit_bytes_total", device="mlx5_0") == before)
        agent.until(lambda: value(agent, "rail_events_total", counter="rx_write_requests") == 2**32 - 10)
        tree.set("mlx5_0/1", "hw_counters/rx_write_requests", 5)  # through its end
        agent.until(lambda: value(agent, "rail_events_total", counter="rx_write_requests") == 2**32 + 5)
        rdma.reload_driver(tree)
        # It was read anew when what it counts since shows; a file's change before that would be a part of the reload.
        seen = {before}

        def counts_on() -> bool:
            raised(tmp_path / "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", 25)
            now = value(agent, "rail_transmit_bytes_total", device="mlx5_0")
            assert now is not None
            seen.add(int(now))
            return now > before

        agent.until(counts_on)
        assert all(total >= before and (total - before) % 100 == 0 for total in seen)
        assert value(agent, "rail_events_total", counter="link_downed") == 3
        assert value(agent, "rail_events_total", counter="rx_write_requests") == 2**32 + 5


def test_a_device_that_is_pulled_out_takes_only_its_own_series_and_they_come_back(tmp_path: Path) -> None:
    tree = rdma.mlx5_roce_8rails(tmp_path)
    victim, others = "mlx5_11", ("mlx5_0", "mlx5_10")
    folder = (tmp_path / "class/infiniband" / victim).resolve()
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective") as agent:
        agent.until(lambda: value(agent, "rail_transmit_bytes_total", device=victim) == 4 * 1_011)
        rails = dict(rail_numbers(agent))
        tree.unplug(victim)
        agent.until(lambda: value(agent, "rail_up", device=victim) is None)
        expected = {device: 4 * (2_000 + number) for number, device in enumerate(others)}
        for number, device in enumerate(others):
            tree.set(f"{device}/1", "counters/port_xmit_data", 2_000 + number)
        agent.until(lambda: expected == {one: value(agent, "rail_transmit_bytes_total", device=one) for one in others})
        assert {device: rails[device] for device in others} == {
            device: number for device, number in rail_numbers(agent) if device in others
        }
        agent.until(lambda: value(agent, "collector_success", collector="netdev") == 1)
        (tmp_path / "class/infiniband" / victim).symlink_to(folder)
        agent.until(lambda: value(agent, "rail_up", device=victim) == 1)
        assert value(agent, "rail_transmit_bytes_total", device=victim) == 4 * 1_011
        assert dict(rail_numbers(agent)) == rails


def rail_numbers(agent: AgentProcess) -> list[tuple[str, str]]:
    return [(labels["device"], labels["rail"]) for labels, _ in agent.samples("railscope_rail_info")]


def test_a_device_that_counts_no_bytes_shows_none_and_its_packets(tmp_path: Path) -> None:
    rdma.rxe(tmp_path)
    with AgentProcess("--path.sysfs", str(tmp_path), "--no-collector.collective", COUNTERS) as agent:
        agent.until(lambda: value(agent, "rail_up", device="rxe0") == 1)
        agent.until(lambda: value(agent, "rail_events_total", device="rxe0", counter="sent_pkts") == 10)
        raised(tmp_path / "class/infiniband/rxe0/ports/1/hw_counters/sent_pkts", 7)
        agent.until(lambda: value(agent, "rail_events_total", device="rxe0", counter="sent_pkts") == 17)
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
        agent.until(lambda: value(agent, "rail_transmit_bytes_total", device=device.name) == 4_100)
        assert value(agent, "collector_success", collector="rdma bytes") == 1
        sick.write_text("3\n")
        agent.until(lambda: value(agent, "collector_success", collector="rdma") == 1)
