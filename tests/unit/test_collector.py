"""A snapshot through prometheus-client, and through a file for node_exporter."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from railscope.agent.cli.main import main
from railscope.exporters.series.collector import SnapshotCollector
from railscope.exporters.series.families import make_families
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format, Renderer
from tests.unit.exporters_snapshots import full_snapshot


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("selection", [Selection(), Selection(["all"])], ids=["usual", "all"])
def test_prometheus_client_shows_what_the_agent_serves(selection: Selection) -> None:
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(full_snapshot, selection))
    theirs = samples(generate_latest(registry).decode())
    ours = samples(Renderer().render(make_families(full_snapshot(), selection=selection), Format.PROMETHEUS).decode())
    # Of a histogram whose sum is not known the text says how many there were, and prometheus-client nothing.
    assert theirs.items() <= ours.items()
    assert {name for name, _ in ours.keys() - theirs.keys()} <= {name for name, _ in ours if name.endswith("_count")}
    assert len(theirs) > 100


def agent_once(*options: str, sysfs: Path) -> int:
    quiet = ["--once.settle", "0s", "--no-collector.collective", "--no-collector.nvlink", "--path.sysfs", str(sysfs)]
    return main(["agent", *quiet, *options])


def test_the_metrics_of_a_moment_go_to_a_file_that_anybody_may_read(tmp_path: Path) -> None:
    (tmp_path / "class/net").mkdir(parents=True)
    file = tmp_path / "railscope.prom"
    file.write_text("what was there before\n")
    assert agent_once("--once", "--textfile", str(file), sysfs=tmp_path) == 0
    assert ("railscope_processes_observed", ()) in samples(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["railscope.prom"]


def test_a_file_without_once_or_in_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "class/net").mkdir(parents=True)
    assert agent_once("--textfile", str(tmp_path / "railscope.prom"), sysfs=tmp_path) == 2
    assert (
        capsys.readouterr().err
        == "railscope: --textfile requires --once: without --once the agent serves the metrics over HTTP\n"
    )
    assert agent_once("--once", "--textfile", str(tmp_path / "nowhere/railscope.prom"), sysfs=tmp_path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "nowhere" in error
    with pytest.raises(SystemExit) as ended:
        agent_once("--once", "--textfile", str(tmp_path / "railscope.txt"), sysfs=tmp_path)
    assert ended.value.code == 2
    assert "does not end in .prom" in capsys.readouterr().err
