"""What `railscope agent --once` prints for each simulated machine of tests/trees, kept in data/golden.

After a wanted change: `python -m tests.unit.golden_metrics --write` writes the files anew; read the difference.

Kept are the samples in their order.  Left out is what differs from run to run (times, versions, how often something
was read, rates between two reads), and what relates rails to collectives: it has tests of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.trees import rdma
from tests.trees.rdma import RdmaTree

GOLDEN: Final = Path(__file__).parent / "data" / "golden"
_SETTLE: Final = "2s"
"""Every source is read at once; this is for machines that are busy with other tests."""
_AT_ONCE: Final = 6
_VARYING: Final = tuple(
    f"railscope_{name}"
    for name in (
        "build_info",
        "node_info",
        "agent_start_time_seconds",
        "snapshot_timestamp_seconds",
        "collector_duration_seconds",
        "collector_reads_missed_total",
        "rail_rate_bytes_per_second",
        # Rails beside collectives, which are not observed here, and over time.
        "rail_bytes_by_origin",
        "rail_collective_bytes",
        "rail_expected_wire_bytes",
        "rail_explained_ratio",
        "rail_ledger_error_ratio",
        "rail_utilization_ratio",
    )
)


def name_of(scenario: Callable[[Path], RdmaTree]) -> str:
    return scenario.__name__


def exposition(sysfs: Path) -> str:
    """What the real command prints for a machine with this sysfs."""
    command = [sys.executable, "-m", "railscope.agent.cli.main", "agent", "--once", "--once.settle", _SETTLE]
    # The collectives are those of this machine's processes, whatever its devices are.
    command += ["--no-collector.collective", "--path.sysfs", str(sysfs), "--series.detail", "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "level=warn" not in done.stderr, done.stderr
    return done.stdout


def expositions(machines: Iterable[Path]) -> list[str]:
    """Of several machines, side by side: a run waits more than it works."""
    with ThreadPoolExecutor(_AT_ONCE) as side_by_side:
        return list(side_by_side.map(exposition, machines))


def kept(text: str) -> str:
    """The samples that are the same at every run."""
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", *_VARYING))]
    return "\n".join(lines) + "\n"


def golden_file(name: str) -> Path:
    return GOLDEN / f"{name}.prom"


def main(arguments: list[str]) -> int:
    if arguments != ["--write"]:
        print("usage: python -m tests.unit.golden_metrics --write", file=sys.stderr)
        return 2
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder) / name_of(scenario) for scenario in rdma.SCENARIOS]
        for scenario, root in zip(rdma.SCENARIOS, roots, strict=True):
            scenario(root)
        for root, text in zip(roots, expositions(roots), strict=True):
            golden_file(root.name).write_text(kept(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
