"""`railscope dashboards cost`: the typical node is what the agent shows, and the sums are right."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from railscope.agent.cli import main as cli
from railscope.agent.facts.catalogue import METRICS
from railscope.agent.node.rails.ethernet_rules import StatisticRules
from railscope.dashboards import cost, typical_node
from railscope.dashboards.server_cost import SERVERS, estimate_server_cost
from railscope.exporters.series.families import make_families
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format, Renderer
from railscope.probes.netdev.ethtool_stats import StatisticUse
from tests.unit.golden_metrics import golden_file

ROOT = Path(__file__).parents[2]
NODE = cost.count_series(typical_node.typical_node())


def labels(line: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def test_its_rdma_ports_have_the_counters_that_the_agent_shows_of_mlx5() -> None:
    """The golden file is what the real agent printed for a simulated sysfs of eight mlx5 ports."""
    shown: dict[str, set[tuple[str, str]]] = {}
    for line in golden_file("mlx5_roce_8rails").read_text().splitlines():
        if line.startswith("railscope_rail_events_total"):
            found = labels(line)
            shown.setdefault(found["device"], set()).add((found["counter"], found["severity"]))
    rails = {rail.device: rail for rail in typical_node.typical_node().rails}

    def counters(device: str) -> set[tuple[str, str]]:
        return {(name, severity) for name, severity, _ in rails[device].counters}

    assert counters("mlx5_0") == shown["mlx5_0"]
    assert counters("eth0") == shown["ens24np0"], "of a job that uses sockets; the kernel counts the same of both"
    assert counters("ens0np0") > shown["ens24np0"]
    assert len(rails) == len(shown) + 1 == 17


def test_its_driver_counters_are_those_that_are_taken_in() -> None:
    assert [
        name for name in typical_node.DRIVER_COUNTERS if StatisticRules().use(name) is not StatisticUse.COUNTER
    ] == []


def test_it_has_at_most_three_thousand_series_until_more_are_asked_for() -> None:
    everything = make_families(typical_node.typical_node(), selection=Selection(["all"]))
    assert NODE.series <= 3_000 < sum(family.series() for family in everything)


def test_it_has_every_metric_but_those_of_what_is_wrong_and_of_what_is_asked_for() -> None:
    missing = {metric.name.removeprefix("railscope_") for metric in METRICS} - {
        name.removeprefix("railscope_") for name in NODE.families
    }
    assert missing == {
        "transfer_operations_total",
        "transfer_probe_attached",
        "transfer_payload_bytes_total",
        "transfer_unsized_total",
        "transfer_failures_total",
        "transfer_unfollowed_total",
        "transfer_seconds",
        "transfers_in_flight",
        "transfer_inflight_seconds",
        "transfer_stalled_seconds",
        "transfer_peer_operations_total",
        "transfer_peer_payload_bytes_total",
        "transfer_peer_seconds_total",
        "agent_dark_seconds_total",
        "call_inside_seconds",
        "comm_awaited_ratio",
        "comm_awaited_since_timestamp_seconds",
        "comm_counted_from_start",
        # Only of jobs whose calls repeat.
        "collective_estimated_calls_total",
        "collective_estimated_payload_bytes_total",
        "collective_estimated_payload_error_ratio",
        "comm_estimated_total",
        "job_step_part_seconds_total",
        "job_step_seconds",
        "job_step_silent_seconds_total",
        "job_steps_total",
        "job_time_seconds",
        "limit_reached_total",
        "comm_ended",
        "comm_errors_total",
        "comm_failed_over_total",
        "comm_degraded_connections",
        "comm_graph_captured_total",
        "comm_graph_replayed_total",
        "comm_peer_wire_bytes_total",
        "comm_stall_info",
        "comm_stall_seconds_total",
        "comm_stall_collectives",
        "comm_stalled",
        "comm_writing",
        "rail_bytes_by_owner_total",
        "rail_lanes",
        # Only where RDMA devices have queue pairs, and where a switch is heard.
        "rail_switch_info",
        "rdma_queue_pairs",
        "rail_link_to_siblings_ratio",
        "cuda_graph_launches_total",
        "cuda_inside_seconds",
        "process_without_comm",
        "gpu_fabric_unhealthy",
        "gpu_fabric_error",
        "hardware_events_total",
        "hardware_event_timestamp_seconds",
        "pcie_link_ratio",
        "pcie_errors_total",
        "rail_physical_state",
        "rail_module_temperature_celsius",
        "rail_module_light_watts",
        "rail_module_alarm",
        "rail_fec_blocks_total",
        "rail_fec_bin_blocks_total",
        "gpu_fabric_health_mask",
        "gpu_ecc_errors_total",
        "gpu_remapped_rows",
        "gpu_row_remap_pending",
        "gpu_row_remap_failed",
        "gpu_pcie_errors_total",
        "gpu_slowed",
        "gpu_recovery_action",
        "gpu_nvlink_transmit_bytes_total",
        "gpu_nvlink_receive_bytes_total",
        "nvlink_bit_error_ratio",
        "nvlink_fec_blocks_total",
        "http_refused_total",
        "otlp_exports_total",
        "nvlink_errors_total",
        "nvlink_speed_bytes_per_second",
        "nvlink_utilization_ratio",
        "rail_bond_member_up",
        "rail_pinned",
        "rail_value",
    }


def test_an_exposition_is_counted_as_the_snapshot_that_it_was_made_of() -> None:
    text = Renderer().render(make_families(typical_node.typical_node()), Format.PROMETHEUS).decode()
    found = cost.count_exposition_series(text)
    assert found.families == NODE.families
    assert found.kept == NODE.kept > 0
    assert found.series == sum(bool(line) and not line.startswith("#") for line in text.splitlines())


@pytest.mark.parametrize("text", ["", "node_load1 0.5\n", "railscope_build_info 1\n<html>\n"])
def test_something_else_is_no_exposition(text: str) -> None:
    with pytest.raises(cost.NotAnExpositionError):
        cost.count_exposition_series(text)


def test_a_fleet_costs_what_its_nodes_do() -> None:
    one, many = cost.estimate_costs(NODE, [8, 1001], 8, 15.0, 0)
    assert one.nodes == 1
    assert one.series == NODE.series + NODE.recorded + len(cost.OF_A_SCRAPE)
    assert one.samples_per_second == one.series / 15
    assert one.bytes_per_day == one.series * (5760 * cost.BYTES_PER_SAMPLE + cost.INDEX_BYTES_PER_SERIES)
    assert many.nodes == 126
    assert many.series == 126 * one.series
    assert many.kept_series == 126 * one.kept_series < many.series


def test_what_servers_take_grows_as_it_was_measured_to() -> None:
    for server in SERVERS:
        one = estimate_server_cost(server, series=1e6, samples_per_second=1e5, ranks=8_192, new_series_per_day=0)
        two = estimate_server_cost(server, series=2e6, samples_per_second=2e5, ranks=16_384, new_series_per_day=0)
        assert two.resident_bytes - one.resident_bytes == pytest.approx(1e6 * server.bytes_per_series)
        assert two.scrape_cores / one.scrape_cores == pytest.approx(2**server.scrapes.exponent)
        assert two.rule_cores / one.rule_cores == pytest.approx(2**server.rules.exponent)
        assert one.rule_seconds == 15 * one.rule_cores
        assert one.cores == one.scrape_cores + one.rule_cores


def test_series_that_jobs_leave_behind_stay_in_memory_for_a_while() -> None:
    few, many = (cost.estimate_cost(NODE, 8, 8, 15.0, restarts).servers[0] for restarts in (0, 24))
    hours = SERVERS[0].remembered_seconds / 3600
    left = NODE.of_communicators * hours * SERVERS[0].bytes_per_series
    assert many.resident_bytes - few.resident_bytes == pytest.approx(left)
    assert cost.estimate_cost(NODE, 8, 8, 15.0, 24).new_series_per_day == 24 * NODE.of_communicators
    assert NODE.ranks == 64
    assert NODE.of_communicators > 8 * NODE.ranks


def test_a_lean_node_costs_a_fraction() -> None:
    lean = cost.count_series(typical_node.typical_node(), "lean")
    assert lean.series < NODE.series / 5
    assert lean.ranks == NODE.ranks
    full, few = (cost.estimate_cost(one, 8_000, 8, 15.0, 4).servers[0] for one in (NODE, lean))
    assert few.resident_bytes < full.resident_bytes / 3
    assert few.rule_cores == full.rule_cores


def test_a_node_without_ranks_takes_no_time_of_rules() -> None:
    found = estimate_server_cost(SERVERS[0], series=10, samples_per_second=1, ranks=0, new_series_per_day=0)
    assert found.rule_cores == 0


Sample = tuple[str, Mapping[str, str]]


def relabelled(configs: list[dict[str, Any]], sample: Sample) -> bool:
    """Whether relabelling keeps a sample, as Prometheus does it (of its actions, those that are used)."""
    name, given = sample
    found = {"__name__": name, **given}
    for one in configs:
        value = ";".join(found.get(label, "") for label in one.get("source_labels", ()))
        matches = re.fullmatch(one["regex"], value) is not None
        if one.get("action", "replace") == "replace" and matches:
            found[one["target_label"]] = one["replacement"]
        if one.get("action") == ("drop" if matches else "keep"):
            return False
    return True


def samples() -> list[Sample]:
    """Every series of the typical node."""
    text = Renderer().render(make_families(typical_node.typical_node()), Format.PROMETHEUS).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [(re.split("[{ ]", line, maxsplit=1)[0], labels(line)) for line in lines]


def test_what_prometheus_may_leave_out_is_a_quarter_of_a_typical_node_and_nothing_that_rules_need() -> None:
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    first, *block = text[text.index("    # metric_relabel_configs:") :].split("\n    #   ")
    switched_on = "\n".join([first.replace("# ", "", 1), *(f"  {line}".partition("\n")[0] for line in block)])
    configs = yaml.safe_load(switched_on.strip())["metric_relabel_configs"]
    stays = {name for name, given in samples() if relabelled(configs, (name, given))}
    assert sum(relabelled(configs, one) for one in samples()) <= 2_300 < NODE.series
    assert {metric for metric in cost.RECORDED_LIKE.values() if metric not in stays} == set()


def test_what_is_kept_is_what_the_shipped_remote_write_lets_through() -> None:
    (write,) = yaml.safe_load((ROOT / "deploy/prometheus/remote-write.yml").read_text())["remote_write"]
    configs = write["write_relabel_configs"]
    assert sum(relabelled(configs, one) for one in samples()) == NODE.kept
    assert {metric.name for metric in METRICS if relabelled(configs, (metric.name, {}))} == cost.KEPT - {"up"}
    assert all(relabelled(configs, (name, {})) for name in cost.RECORDED_LIKE)
    assert [name for name in cost.OF_A_SCRAPE if relabelled(configs, (name, {}))] == ["up"]


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "deploy/prometheus/README.md").read_text()
    blocks = re.findall(r"```console\n\$ (railscope dashboards cost.*)\n((?:.*\n)*?)```", page)
    assert blocks
    for command, printed in blocks:
        assert cli.main(command.split()[1:]) == 0
        assert capsys.readouterr().out == printed


def test_json_has_the_numbers_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboards", "cost", "--gpus", "64", "--scrape-interval", "5s", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (fleet,) = facts["fleets"]
    assert (fleet["gpus"], fleet["nodes"]) == (64, 8)
    assert fleet["samples_per_second"] == fleet["series"] / 5
    assert facts["node"]["series"] == NODE.series == sum(facts["node"]["series_by_metric"].values())


def test_a_wrong_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["dashboards", "cost", "--exposition", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_950, "100 kB"), (2.5e15, "2.5 PB")],
)
def test_amounts_are_short(size_bytes: float, shown: str) -> None:
    assert cost.format_bytes(size_bytes) == shown


def test_a_fleet_beyond_any_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboards", "cost", "--gpus", "9" * 18]) == 2
    assert capsys.readouterr().err == "railscope: --gpus: a fleet has 1,000,000,000 GPUs at most\n"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["dashboards", "cost", "--gpus", "9" * 400])
    assert "is not a whole number" in capsys.readouterr().err
