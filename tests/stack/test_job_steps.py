"""What bounds a job, as `railscope diagnose --job` asks a real Prometheus for it.  The series are simulated."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.agent.cluster.fleet.job_steps import read_job_steps
from railscope.agent.cluster.fleet.prometheus import PrometheusError, Store
from railscope.agent.cluster.verdict.job import describe_job
from tests.stack.prometheus import prometheus, store_at, tool

pytestmark = pytest.mark.stack

BEGAN, MINUTES = 1_700_000_000, 20
AT = BEGAN + 60 * MINUTES


def rank(host: str, number: int, comm: str = "c", job: str = "77") -> dict[str, str]:
    instance = host if host == "c" else f"{host}:9779"  # who relabels may leave the port out
    return {"job": "railscope", "instance": instance, "comm": comm, "rank": str(number), "exported_job": job}


def series() -> Iterator[tuple[str, dict[str, str], float]]:
    """Names, labels, and by how much each rises in a minute; that of an `info` is its value."""
    for host, number, inside in (("a", 0, 30.0), ("b", 1, 30.0), ("c", 2, 6.0)):
        labels = rank(host, number)
        yield "railscope_comm_info", labels, 1
        series_of = {name: value for name, value in labels.items() if name != "exported_job"}
        yield "railscope_comm_operations_total", series_of, 600
        yield "railscope_comm_operation_seconds_total", series_of, inside
        yield "railscope_comm_enqueued_total", series_of, 600
    first = {name: value for name, value in rank("a", 0).items() if name != "exported_job"}
    yield "railscope_job_step_seconds_sum", first, 60
    yield "railscope_job_step_seconds_count", first, 30
    for part, seconds in (("communication", 30.0), ("between", 20.0), ("silent", 10.0)):
        yield "railscope_job_step_part_seconds_total", {**first, "part": part}, seconds
    for state, seconds in (("start", 0.0), ("steps", 45.0), ("checkpoint", 15.0)):
        yield "railscope_job_time_seconds", {**first, "state": state}, seconds
    yield "railscope_comm_info", rank("d", 0, "r", "chat"), 1
    requests = {name: value for name, value in rank("d", 0, "r").items() if name != "exported_job"}
    yield "railscope_comm_enqueued_total", requests, 1200


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    lines: list[str] = []
    by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, more in series():
        by_name.setdefault(name, []).append((labels, more))
    for name, found in by_name.items():
        lines.append(f"# TYPE {name} unknown")
        for labels, more in found:
            written = ",".join(f'{label}="{value}"' for label, value in labels.items())
            for scrape in range(4 * MINUTES + 1):
                value = more if name.endswith("_info") else more * scrape / 4
                lines.append(f"{name}{{{written}}} {value} {BEGAN + 15 * scrape}")
    (folder / "series.om").write_text("\n".join([*lines, "# EOF", ""]))
    command = ["tsdb", "create-blocks-from", "openmetrics", str(folder / "series.om"), str(folder / "data")]
    done = subprocess.run([tool("promtool"), *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with prometheus(folder, "", arguments=["--storage.tsdb.retention.time=100y"]) as url:
        yield store_at(url)


def test_waiting_is_told_over_all_hosts_and_who_is_waited_for(store: Store) -> None:
    told = describe_job(read_job_steps(store, "77", 300, AT))
    # Of 66 s in operations, 48 are longer than the 6 that the last rank spends; of the half that is communication.
    assert told == (
        "A step of job 77 takes 2.00 s.",
        "The job is bound by a straggler: ranks wait 36 % of a step for rank 2 on c.",
        "Of a step: 36 % waiting for rank 2 on c, 14 % communication, 50 % computation or input.",
        "How much of the 14 % is overlapped with computation cannot be told without a trace of the GPU.",
        "The job began 20 min 0 s ago; steps took 75 % of that time; the rest was 5 min 0 s writing checkpoints.",
    )


def test_a_job_without_rhythm_has_its_calls_per_second(store: Store) -> None:
    first, *_ = describe_job(read_job_steps(store, "chat", 300, AT))
    assert first == "Job chat has no steps that are known; it makes 20.0 calls/s."


def test_a_job_that_the_store_does_not_know_is_an_error(store: Store) -> None:
    with pytest.raises(PrometheusError, match="no job 'gone'"):
        read_job_steps(store, "gone", 300, AT)
