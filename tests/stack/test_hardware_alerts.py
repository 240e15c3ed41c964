"""Hardware falls ill in twenty ways and is mended: in a real Prometheus each has its alert, which ends with it.

The agent is real and the hardware simulated (ill_machine.py).  The rules are those that are shipped, but for times:
what must hold for minutes holds for a second, and what is asked for over minutes or hours is asked for over seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from railscope.dashboards import rules_files
from tests.stack.ill_machine import ACTION, CRC, RECOVERY, REPLAYS, UNCORRECTED, IllMachine
from tests.stack.prometheus import prometheus, store_at, until

pytestmark = [pytest.mark.stack, pytest.mark.root, pytest.mark.timeout(400)]

RULES: Final = [rules_files.SHIPPED / name for name in (rules_files.RECORDING, rules_files.ALERTS)]
RANGES: Final = {"30s": "10s", "1m": "10s", "5m": "20s", "15m": "20s", "30m": "30s", "1h": "30s"}
OFFSETS: Final = {"15s": "5s", "30s": "5s", "5m": "10s", "10m": "10s", "30m": "20s", "2h": "15s", "1d": "30s"}
HOT, FABRIC_DEGRADED, DOUBLE_BIT = 0x40, 1, 0x2

EXPECTED: Final = {
    ("RailscopeRailLinkUnstable", "mlx5_0"),
    ("RailscopeRailLinkDegraded", "mlx5_3"),
    ("RailscopeRailLinkSlowerThanBefore", "mlx5_3"),
    ("RailscopeRailErrors", "mlx5_4"),
    ("RailscopeRailCounterRises", "mlx5_5"),
    ("RailscopeRailCounterPinned", "mlx5_6"),
    ("RailscopeRailFlaps", "mlx5_9"),
    ("RailscopeRailErrors", "mlx5_9"),
    ("RailscopePcieLinkDegraded", "mlx5_10"),
    ("RailscopePcieErrors", "mlx5_11"),
    ("RailscopeNVLinksDown", "gpu0"),
    ("RailscopeNVLinkErrors", "gpu1"),
    ("RailscopeNVLinkRecovers", "gpu2"),
    ("RailscopeNVLinkFabricUnhealthy", "gpu3"),
    ("RailscopeGpuMemory", "gpu4"),
    ("RailscopeGpuWantsRecovery", "gpu5"),
    ("RailscopeGpuSlowed", "gpu6"),
    ("RailscopePcieErrors", "gpu7"),
    ("RailscopeXid", "0000:1b:00.0"),
    ("RailscopeHardwareEvent", "0000:1c:00.0"),
    ("RailscopeHardwareEvent", "0000:18:00.0"),
}
"""Each alert with its device, GPU or PCI address."""
KINDS: Final = {name for name, _ in EXPECTED}


def quickened(folder: Path) -> list[Path]:
    """The shipped rules with seconds for minutes."""
    found = []
    for file in RULES:
        text = re.sub(r"\bfor: \w+", "for: 1s", file.read_text())
        text = re.sub(r"\[(\w+)\]", lambda match: f"[{RANGES.get(match[1], match[1])}]", text)
        text = re.sub(r"\boffset (\w+)", lambda match: f"offset {OFFSETS[match[1]]}", text)
        text = text.replace("< 3600", "< 20")
        found.append(folder / file.name)
        found[-1].write_text(text)
    return found


class Sickness:
    """What goes wrong at once, goes on while it lasts, and is mended."""

    def __init__(self, machine: IllMachine) -> None:
        self._machine = machine
        self._turns = 0

    def begins(self) -> None:
        machine = self._machine
        machine.port("mlx5_0", physical_state="6: LinkErrorRecovery")
        machine.port("mlx5_3", rate="10 Gb/sec (4X SDR)")
        machine.counter("mlx5_6", "counters/symbol_error", 65535)
        machine.pcie("0000:ce:00.0", lanes=8, errors=0)
        machine.nvml("link 0 1", "0 2 90")
        for gpu, field in ((1, CRC), (2, RECOVERY), (7, REPLAYS)):
            machine.nvml(f"grow {gpu} {field} 0", "5")
        machine.nvml("fabric 3", f"3 {FABRIC_DEGRADED}")
        machine.field(4, UNCORRECTED, 2)
        machine.field(5, ACTION, 1, 1)
        machine.nvml("clocks 6", str(HOT))
        machine.event(1, DOUBLE_BIT, 0)
        machine.kernel_says("NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.")
        machine.kernel_says("mlx5_core 0000:18:00.0: poll_health:1010: device will reset")
        self.goes_on()

    def goes_on(self) -> None:
        """Counters rise."""
        machine, self._turns = self._machine, self._turns + 1
        machine.counter("mlx5_4", "hw_counters/req_transport_retries_exceeded", self._turns)
        machine.counter("mlx5_5", "hw_counters/packet_seq_err", 100 * self._turns)
        machine.counter("mlx5_9", "counters/link_downed", min(250, 3 * self._turns))
        machine.pcie("0000:dc:00.0", lanes=16, errors=100 * self._turns)

    def ends(self) -> None:
        machine = self._machine
        for device in ("mlx5_0", "mlx5_3"):
            machine.port(device)
        machine.counter("mlx5_6", "counters/symbol_error", 0)
        machine.pcie("0000:ce:00.0", lanes=16, errors=0)
        machine.nvml("link 0 1", "1 2 90")
        for gpu, field in ((1, CRC), (2, RECOVERY), (7, REPLAYS)):
            machine.nvml(f"grow {gpu} {field} 0", "0")
        machine.nvml("fabric 3", "3 0")
        machine.field(4, UNCORRECTED, 0)
        machine.field(5, ACTION, 0, 1)
        machine.nvml("clocks 6", "0")


def ill_part(labels: Mapping[str, str]) -> str:
    """What an alert is about."""
    if "gpu" in labels:
        return f"gpu{labels['gpu']}"
    return next((labels[name] for name in ("device", "pci", "collector") if name in labels), "")


def test_each_kind_of_sickness_has_its_alert_which_ends_when_it_is_mended(tmp_path: Path) -> None:
    machine = IllMachine(tmp_path)
    sickness = Sickness(machine)
    with machine.agent(tmp_path / "agent.log") as agent:
        scrapes = (
            "scrape_configs:\n  - job_name: railscope\n    static_configs:\n"
            f"      - targets: ['127.0.0.1:{agent.port}']\n        labels: {{simulated: 'true'}}\n"
        )
        with prometheus(tmp_path, scrapes, quickened(tmp_path)) as url:
            store = store_at(url)

            def ask(expression: str) -> set[tuple[str, str]]:
                return {(one.labels["alertname"], ill_part(one.labels)) for one in store.query(expression)}

            def firing() -> set[tuple[str, str]]:
                return ask('ALERTS{alertstate="firing"}')

            def fired() -> set[tuple[str, str]]:
                return ask('last_over_time(ALERTS{alertstate="firing"}[10m])')

            seen = "min(count_over_time(railscope_build_info[5m]))"
            until(lambda: [one.value >= 20 for one in store.query(seen)] == [True], "scrapes of a sound machine", 120)
            assert fired() == set(), "a sound machine"
            sickness.begins()

            def all_told() -> bool:
                sickness.goes_on()
                return fired() >= EXPECTED

            until(all_told, "every alert", 120, instead=lambda: f"but {EXPECTED - fired()} did not fire")
            sickness.ends()
            until(lambda: firing() == set(), "every alert to end", 120, instead=lambda: f"but {firing()} goes on")
            assert fired() == EXPECTED, "and no other"
    assert len(KINDS) >= 10
