"""A reboot of many hosts, at once and one after the other, raises nothing but that their agents are silent.

promtool evaluates the rules that are shipped, with their own times, on what agents show before, while and after hosts
boot: counters begin anew, links train for a minute, and what is read of hardware comes up in parts (simulated).
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import pytest
import yaml

from railscope.dashboards import rules_files
from tests.stack.prometheus import tool

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

TOGETHER, IN_TURN = 12, 3
"""Hosts: one leaf switch and more, and single ones."""
SCRAPE_SECONDS: Final = 15
SOUND, OFF, TRAINS, AFTER = 80, 16, 4, 120
"""Scrapes: twenty minutes, four minutes, one minute, half an hour."""
APART: Final = 40
"""Scrapes from one host to the next, of those that boot in turn."""
SPEED: Final = 50_000_000_000


def host_series(instance: str, first: int) -> list[dict[str, str]]:
    """Series of a host that goes down after so many scrapes."""
    last = SOUND + IN_TURN * APART + AFTER - first
    host = f'job="railscope",instance="{instance}"'
    rail = f'{host},rail="0",device="mlx5_0"'
    port, gpu = f'{rail},port="1"', f'{host},gpu="0"'
    gone = f"stale _x{OFF - 2}"

    def counter(name: str, labels: str, per_scrape: int, anew: int) -> dict[str, str]:
        """It rises by so much; after the boot it begins at `anew`."""
        values = f"1000+{per_scrape}x{first - 1} {gone} {anew}+{per_scrape}x{TRAINS + last - 1}"
        return {"series": f"{name}{{{labels}}}", "values": values}

    def gauge(name: str, labels: str, sound: str, training: str) -> dict[str, str]:
        """`_`: absent."""
        before = f"{sound}x{first - 1}" if sound != "_" else f"_x{first - 1}"
        after = f"{sound}x{last - 1}" if sound != "_" else f"stale _x{last - 2}"
        return {"series": f"{name}{{{labels}}}", "values": f"{before} {gone} {training}x{TRAINS - 1} {after}"}

    event = 'counter="link_downed",severity="page"'
    return [
        {"series": f"up{{{host}}}", "values": f"1x{first - 1} 0x{OFF - 1} 1x{TRAINS + last - 1}"},
        gauge("railscope_build_info", f'{host},version="1"', "1", "1"),
        counter("railscope_agent_start_time_seconds", host, 0, (first + OFF) * SCRAPE_SECONDS),
        gauge("railscope_processes_observed", host, "8", "0"),
        gauge("railscope_rail_up", port, "1", "0"),
        gauge("railscope_rail_physical_state", f'{port},state="Polling"', "_", "1"),
        gauge("railscope_rail_speed_bytes_per_second", port, str(SPEED), "_"),
        counter("railscope_rail_transmit_bytes_total", port, 10**10, 0),
        # Of a link that is trained, a driver that is loaded: what it had counted when the agent came stays.
        counter("railscope_rail_events_total", f"{port},{event}", 0, 2),
        counter("railscope_rail_events_total", f'{port},counter="symbol_error",severity="warn"', 0, 40),
        counter("railscope_rail_events_total", f'{rail},port="",counter="carrier_changes",severity="page"', 0, 1),
        gauge("railscope_pcie_link_ratio", f'{host},device="mlx5_0",pci="0000:18:00.0",of="width"', "_", "0.5"),
        gauge("railscope_rail_module_alarm", f'{rail},lane="1",alarm="receive_lost"', "_", "1"),
        counter("railscope_rail_fec_blocks_total", f'{rail},result="uncorrectable"', 0, 30),
        counter("railscope_pcie_errors_total", f'{host},device="mlx5_0",pci="0000:18:00.0",severity="correctable",'
                'error="RxErr"', 0, 12),
        gauge("railscope_gpu_nvlinks_up", gpu, "18", "0"),
        counter("railscope_gpu_nvlink_errors_total", f'{gpu},kind="recovery"', 0, 2),
        gauge("railscope_gpu_recovery_action", f'{gpu},action="gpu_reset"', "_", "_"),
        gauge("railscope_collector_success", f'{host},collector="nvlink"', "1", "0"),
    ]  # fmt: skip


def test_a_reboot_raises_nothing_but_that_agents_are_silent(tmp_path: Path) -> None:
    hosts = {f"together{number}:9779": SOUND for number in range(TOGETHER)}
    hosts |= {f"turn{number}:9779": SOUND + APART * (number + 1) for number in range(IN_TURN)}
    end = SOUND + IN_TURN * APART + OFF + TRAINS + AFTER
    firing = 'ALERTS{alertstate="firing",alertname!="RailscopeAgentSilent"}'
    silent = 'count(ALERTS{alertstate="firing",alertname="RailscopeAgentSilent"})'
    test = {
        "interval": f"{SCRAPE_SECONDS}s",
        "input_series": [one for name, first in hosts.items() for one in host_series(name, first)],
        "promql_expr_test": [
            # It is looked: the agents that are gone are told of.
            {"expr": silent, "eval_time": f"{(SOUND + OFF - 1) * SCRAPE_SECONDS}s",
             "exp_samples": [{"labels": "{}", "value": TOGETHER}]},
            {"expr": f"max_over_time({firing}[{end * SCRAPE_SECONDS}s])", "eval_time": f"{end * SCRAPE_SECONDS}s"},
        ],
    }  # fmt: skip
    whole = {
        "rule_files": [str(rules_files.SHIPPED / name) for name in (rules_files.RECORDING, rules_files.ALERTS)],
        "evaluation_interval": "30s",
        "tests": [test],
    }
    file = tmp_path / "reboot.yml"
    file.write_text(yaml.safe_dump(whole))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
