"""What the agent prints for every simulated machine: as in the golden files, and as the machines' own files say.

The golden files are compared with the whole output; that they hold the truth is checked against the trees, by rules
of their own that are much simpler than the agent's: every counter file is a sample, every sample stands in a file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trees import rdma
from tests.unit.golden_metrics import exposition, expositions, golden_file, kept, name_of

SCENARIOS = [name_of(scenario) for scenario in rdma.SCENARIOS]
_SAMPLE = re.compile(r"railscope_(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Sample = tuple[dict[str, str], float]

FACTORS = {"port_xmit_data": 4, "port_rcv_data": 4}
"""InfiniBand counts data in units of four octets."""
BYTES = {
    "transmit": ("port_xmit_data", "tx_bytes", "ip4OutOctets", "ip6OutOctets", "tx_rdma_ucast_bytes"),
    "receive": ("port_rcv_data", "rx_bytes", "ip4InOctets", "ip6InOctets", "rx_rdma_ucast_bytes"),
}
GAUGES = {"db_fifo_register", "current_rate", "num_qps_congested"}
NO_COUNTERS = {"lifespan", "active_qps", "watermark_qps"} | GAUGES


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for scenario in rdma.SCENARIOS:
        found[name_of(scenario)] = root = tmp_path_factory.mktemp(name_of(scenario))
        scenario(root)
    return found


@pytest.fixture(scope="module")
def printed(machines: dict[str, Path]) -> dict[str, str]:
    return dict(zip(machines, expositions(machines.values()), strict=True))


def samples(text: str, name: str) -> Iterator[Sample]:
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is not None and match[1] == name:
            yield dict(_LABEL.findall(match[2])), float(match[3])


def number(file: Path) -> int | None:
    """None: no number can be read there."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def port_files(sysfs: Path) -> dict[tuple[str, str], dict[str, int]]:
    """Every counter of every RDMA port that can be read, by device and port."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for device in sorted((sysfs / "class/infiniband").iterdir()):
        for port in sorted((device / "ports").iterdir()):
            files = [file for group in ("counters", "hw_counters") for file in port.glob(f"{group}/*")]
            files += device.glob("hw_counters/*")
            values = {file.name: value for file in files if (value := number(file)) is not None}
            found[device.name, port.name] = values
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_metrics_of_a_machine_are_the_golden_ones(name: str, printed: dict[str, str]) -> None:
    assert kept(printed[name]) == golden_file(name).read_text()


def test_every_golden_file_is_of_a_machine_that_there_is() -> None:
    assert sorted(file.stem for file in golden_file("x").parent.iterdir()) == sorted(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_counter_of_a_rail_s_rdma_port_is_shown_with_its_file_s_value(
    name: str, machines: dict[str, Path], printed: dict[str, str]
) -> None:
    shown: dict[tuple[str, str], dict[str, float]] = {}
    for labels, value in samples(printed[name], "rail_events_total"):
        if labels["port"]:
            shown.setdefault((labels["device"], labels["port"]), {})[labels["counter"]] = value
    rails = {(labels["device"], labels["port"]) for labels, _ in samples(printed[name], "rail_info") if labels["port"]}
    assert rails
    assert shown.keys() == rails
    of_bytes = {counter for counters in BYTES.values() for counter in counters}
    for port, files in port_files(machines[name]).items():
        if port in rails:
            expected = {counter: value for counter, value in files.items() if counter not in of_bytes | NO_COUNTERS}
            assert shown[port] == expected


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_rises_and_falls_is_a_gauge_with_its_file_s_value(
    name: str, machines: dict[str, Path], printed: dict[str, str]
) -> None:
    shown = {(labels["device"], labels["name"]): value for labels, value in samples(printed[name], "rail_value")}
    files = port_files(machines[name]).items()
    expected = {(device, one): value for (device, _), found in files for one, value in found.items() if one in GAUGES}
    assert shown == expected
    assert expected or name not in ("bnxt_re", "mana_ib")


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("direction", ["transmit", "receive"])
def test_bytes_are_octets_whatever_unit_the_driver_counts_in(
    name: str, direction: str, machines: dict[str, Path], printed: dict[str, str]
) -> None:
    shown = {
        (labels["device"], labels["port"]): value
        for labels, value in samples(printed[name], f"rail_{direction}_bytes_total")
    }
    rails = {(labels["device"], labels["port"]) for labels, _ in samples(printed[name], "rail_info")}
    expected = {}
    for port, files in port_files(machines[name]).items():
        counted = [files[counter] * FACTORS.get(counter, 1) for counter in BYTES[direction] if counter in files]
        if counted and port in rails:
            expected[port] = sum(counted)
    for device, number_of_port in rails:
        if not number_of_port:
            file = machines[name] / "class/net" / device / "statistics" / f"{direction[0]}x_bytes"
            expected[device, ""] = int(file.read_text())
    assert shown == expected


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_other_counters_of_network_devices_are_their_files(
    name: str, machines: dict[str, Path], printed: dict[str, str]
) -> None:
    for labels, value in samples(printed[name], "rail_events_total"):
        if not labels["port"]:
            folder = machines[name] / "class/net" / labels["device"]
            file = "carrier_changes" if labels["counter"] == "carrier_changes" else f"statistics/{labels['counter']}"
            assert value == number(folder / file), labels


@pytest.mark.parametrize("name", SCENARIOS)
def test_links_are_up_and_as_fast_as_their_files_say(
    name: str, machines: dict[str, Path], printed: dict[str, str]
) -> None:
    up = {labels["device"]: value for labels, value in samples(printed[name], "rail_up")}
    speed = {labels["device"]: value for labels, value in samples(printed[name], "rail_speed_bytes_per_second")}
    for labels, _ in samples(printed[name], "rail_info"):
        device = labels["device"]
        if labels["port"]:
            port = machines[name] / "class/infiniband" / device / "ports" / labels["port"]
            assert up[device] == ("ACTIVE" in (port / "state").read_text())
            gigabits = float((port / "rate").read_text().split()[0])
            assert speed[device] == gigabits * 1e9 / 8
        else:
            assert up[device] == number(machines[name] / "class/net" / device / "carrier")
            megabits = number(machines[name] / "class/net" / device / "speed") or 0
            assert speed.get(device) == (megabits * 1e6 / 8 if megabits > 0 else None)


def test_only_counters_at_their_very_end_are_pinned(printed: dict[str, str]) -> None:
    assert {
        name: {labels["counter"] for labels, _ in samples(text, "rail_pinned")}
        for name, text in printed.items()
        if "railscope_rail_pinned{" in text
    } == {"pinned_counters": {"symbol_error", "link_downed", "local_link_integrity_errors", "port_xmit_wait"}}


def test_the_member_of_a_bond_that_is_down_shows_on_its_rails_and_the_bond_is_up(printed: dict[str, str]) -> None:
    members = {
        (labels["device"], labels["member"]): value for labels, value in samples(printed["bond"], "rail_bond_member_up")
    }
    assert members == {
        (device, member): up
        for device in ("mlx5_bond_0", "bond0")
        for member, up in (("ens24f0np0", 1), ("ens24f1np1", 0))
    }
    assert {value for _, value in samples(printed["bond"], "rail_up")} == {1}


def test_rails_are_numbered_by_gpu_and_other_networks_take_other_numbers(printed: dict[str, str]) -> None:
    rails = {labels["device"]: labels["rail"] for labels, _ in samples(printed["mlx5_roce_8rails"], "rail_info")}
    adapters = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
    assert [rails[device] for device in adapters] == [str(rail) for rail in range(8)]
    assert (rails["ens64np0"], rails["ens220np0"]) == ("1", "7"), "the network devices of the same ports"
    assert "eth0" not in rails, "NCCL sends through RDMA here"
    assert "mlx5_1" not in rails, "the storage adapter"


def test_sick_links_and_half_counted_ports_are_shown_as_what_they_are(printed: dict[str, str]) -> None:
    ratios = {
        (labels["device"], labels["of"]): value
        for labels, value in samples(printed["degraded"], "rail_link_to_siblings_ratio")
    }
    assert ratios == {("mlx5_1", "speed"): 0.025, ("mlx5_2", "speed"): 0.25, ("mlx5_2", "lanes"): 0.25}
    lanes = {labels["device"]: value for labels, value in samples(printed["degraded"], "rail_lanes")}
    assert lanes == {"mlx5_0": 4, "mlx5_1": 4, "mlx5_2": 1, "mlx5_3": 4}
    sent = {labels["device"] for labels, _ in samples(printed["degraded"], "rail_transmit_bytes_total")}
    received = {labels["device"]: value for labels, value in samples(printed["degraded"], "rail_receive_bytes_total")}
    assert sent == {"mlx5_0", "mlx5_1", "mlx5_2"}
    assert received["mlx5_3"] == 8000


def test_every_source_of_every_machine_works(printed: dict[str, str]) -> None:
    for text in printed.values():
        found = {labels["collector"]: value for labels, value in samples(text, "collector_success")}
        assert found == {"netdev": 1, "rdma": 1, "rdma bytes": 1}


def test_a_driver_reload_shows_the_new_counters_to_an_agent_that_starts_after_it(tmp_path: Path) -> None:
    rdma.reload_driver(rdma.reset(tmp_path))
    ((_, transmit_bytes),) = samples(exposition(tmp_path), "rail_transmit_bytes_total")
    assert transmit_bytes == 0


@pytest.mark.stack
@pytest.mark.parametrize("name", SCENARIOS)
def test_promtool_has_nothing_to_say_about_a_machine_s_metrics(name: str, printed: dict[str, str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: install Debian's package prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=printed[name], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
