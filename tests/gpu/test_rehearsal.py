"""The lane for a GPU, without one: the command that CONTRIBUTING names, the kit, and every check (GPU simulated)."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from tests.gpu.conftest import Rehearsal
from tests.gpu.kit import KIT, MOST_BYTES
from tests.gpu.lane import CHECKS
from tests.gpu.table import Verdict
from tests.nccl.library import REPOSITORY

pytestmark = [
    pytest.mark.root,
    pytest.mark.fabric,
    pytest.mark.nccl,
    pytest.mark.slow,
    pytest.mark.timeout(420),
]


def test_every_check_comes_to_its_end_and_nothing_differs(rehearsal: Rehearsal) -> None:
    wrong = [row for row in rehearsal.results.rows if row.verdict in (Verdict.FAILED, Verdict.DIFFERS)]
    assert wrong == []
    assert {row.check for row in rehearsal.results.rows} == set(CHECKS)
    assert rehearsal.results.simulated


@pytest.mark.parametrize(
    ("check", "what"),
    [
        ("counts", "mixed collectives of each rank"),
        ("counts", "attached before: calls and payload as the job made them"),
        ("counts", "attached late: calls and payload as the job made them"),
        ("counts", "rank, comm, pid as NCCL says at INFO"),
        ("graphs", "captured, by rank"),
        ("graphs", "replayed, by rank"),
        ("stalls", "a rank that is stopped"),
        ("stalls", "communicators aborted"),
        ("nvml", "GPUs: index, uuid, bus id, name"),
        ("nvml", "NVLinks that are active"),
    ],
)
def test_what_needs_no_hardware_is_right_before_a_gpu_is_there(rehearsal: Rehearsal, check: str, what: str) -> None:
    row = rehearsal.row(check, what)
    assert row.verdict is Verdict.OK, row


def test_durations_of_both_sources_stand_beside_those_of_cuda_events(rehearsal: Rehearsal) -> None:
    for source in ("proxy", "cuda"):
        ratio = rehearsal.row("times", f"AllReduce of 64 KiB, {source}: mean over CUDA's").value
        assert ratio is not None
        # On two busy cores the scheduler is in both; what is meant is that units and operations are the same.
        assert 0.2 < ratio < 5
    longer = rehearsal.row("times", "AllReduce of 64 KiB, proxy: call by call, µs longer than CUDA's, median")
    assert longer.value is not None


def test_probes_on_the_drivers_library_meet_every_call(rehearsal: Rehearsal) -> None:
    of_both = [("libcuda.so", "cu"), ("libcudart.so", "cuda")]
    for (library, prefix), call in product(of_both, ("EventQuery", "StreamSynchronize", "GraphLaunch")):
        row = rehearsal.row("questions", f"{library}: probe of {prefix}{call}")
        seen = re.fullmatch(r"(\d+) hits where the job called (\d+)", row.seen)
        assert seen is not None
        assert int(seen[1]) == int(seen[2]) > 0


def test_what_comes_back_is_little_enough_and_holds_the_evidence(rehearsal: Rehearsal) -> None:
    files = sorted(rehearsal.out.iterdir())
    assert [file.name for file in files] == ["evidence.tar.xz", "results.json", "table.txt"]
    assert all(file.stat().st_size < 16 << 20 for file in files)
    evidence = rehearsal.evidence()
    assert {f"{check}/output.txt" for check in CHECKS} <= evidence
    assert {"counts/metrics.txt", "counts/agent-before.log", "machine/doctor.json", "counts/nccl-info.txt"} <= evidence
    assert any(name.startswith("times/recordings/") and name.endswith(".npz") for name in evidence)


def test_the_kit_is_small_enough_to_travel(rehearsal: Rehearsal) -> None:
    del rehearsal  # made the kit
    assert sum(path.stat().st_size for path in KIT.rglob("*") if path.is_file()) <= MOST_BYTES


def test_the_command_in_contributing_is_one_short_line_that_runs_the_lane() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    (command,) = re.findall(r"^(tests/gpu/run) +# there", text, re.MULTILINE)
    assert len(command) < 2000
    assert Path(REPOSITORY / "tests/gpu/run").stat().st_mode & 0o111
