"""What a job refuses, and how a rank's report is read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from railscope.testbed.hosts import Host, TestbedError
from railscope.testbed.job import DRIVER, GptShape, Job, JobOptions, OperationCount, RailBytes, RankReport

ENDLESS = ["--pattern", "ddp", "--seconds", "1", "--id-file", "x"]
HOST = Host(0, "nowhere", ("rail0",), ("10.77.0.1",))
REPORT = """{"pid": 12, "rank": 1, "nranks": 2, "pattern": "ddp", "host": "host1",
 "communicators": [
  {"hash": "00000000000000ab", "rank": 1, "nranks": 2, "operations": [
   {"op": "AllReduce", "dtype": "float32", "calls": 3, "payload_bytes": 12},
   {"op": "AllReduce", "dtype": "int8", "calls": 1, "payload_bytes": 5}]},
  {"hash": "00000000000000cd", "rank": 0, "nranks": 1, "operations": [
   {"op": "AllReduce", "dtype": "int8", "calls": 2, "payload_bytes": 2}]}],
 "totals": [{"op": "AllReduce", "calls": 6, "payload_bytes": 19}],
 "rails": [{"rail": "rail0", "transmit_bytes": 7, "receive_bytes": 8}],
 "calls": 6, "seconds": 0.5, "calls_per_second": 12.0, "verified": true, "interrupted": false, "errors": []}"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (JobOptions("training", seconds=1), "no pattern is called 'training'"),
        (JobOptions("ddp"), "exactly one"),
        (JobOptions("ddp", seconds=1, iterations=1), "exactly one"),
        (JobOptions("ddp", seconds=1, ranks_per_host=0), "at least one"),
        (JobOptions("gpt", seconds=1), "gpt needs a shape"),
        (JobOptions("ddp", seconds=1, shape=GptShape(1, 1, 1, 1, 8, 8, 8, 1, 1)), "no other pattern takes one"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(options: JobOptions, words: str) -> None:
    with pytest.raises(TestbedError, match=words):
        Job([HOST], options)


def test_a_job_that_was_not_started_cannot_be_released_and_closes_without_harm() -> None:
    job = Job([HOST], JobOptions("ddp", seconds=1))
    with pytest.raises(TestbedError, match="not been started"):
        job.release()
    job.close()
    assert not job.running()


def test_a_report_is_read_whole() -> None:
    report = RankReport.parse(REPORT)
    assert (report.pid, report.rank, report.host, report.calls, report.verified) == (12, 1, "host1", 6, True)
    assert report.rails == (RailBytes("rail0", 7, 8),)
    assert report.communicators[0].operations[1] == OperationCount("AllReduce", "int8", 1, 5)
    assert report.totals() == {"AllReduce": OperationCount("AllReduce", "all", 6, 19)}


@pytest.mark.parametrize("text", ["", "[]", "{}", REPORT.replace('"calls": 6, ', ""), REPORT[:-9]])
def test_a_report_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(TestbedError, match="make build"):
        RankReport.parse(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pattern", "what", "--seconds", "1", "--id-file", "x"], "--pattern is one of"),
        (["--pattern", "ddp", "--id-file", "x"], "one of --seconds and --iterations"),
        (["--pattern", "ddp", "--seconds", "soon", "--id-file", "x"], '--seconds takes a number, not "soon"'),
        (["--pattern", "ddp", "--seconds", "1"], "--id-file is missing"),
        ([*ENDLESS, "--pace-us", "fast"], '--pace-us takes a number, not "fast"'),
        ([*ENDLESS, "--skip-rank", "0"], "both of --skip-rank and --skip-iteration"),
        ([*ENDLESS, "--pause-every", "3"], "both of --pause-every and --pause-ms"),
        ([*ENDLESS, "--checkpoint-ms", "3"], "both of --checkpoint-every and --checkpoint-ms"),
        (
            ["--pattern", "moe", "--seconds", "1", "--id-file", "x", "--skip-rank", "0", "--skip-iteration", "0"],
            "leaves out an AllReduce",
        ),
    ],
)
def test_the_driver_says_what_is_wrong_in_one_line(arguments: list[str], words: str) -> None:
    done = subprocess.run([DRIVER, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_one_rank_alone_needs_no_fabric(tmp_path: Path) -> None:
    arguments = ["--pattern", "mixed", "--iterations", "12", "--id-file", str(tmp_path / "id")]
    arguments += ["--report", str(tmp_path / "r")]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_HOSTID": 'a"b\\c'}
    subprocess.run([DRIVER, *arguments], check=True, env=environment)
    report = RankReport.parse((tmp_path / "r").read_text())
    assert report.verified
    assert report.host == 'a"b\\c'
    assert report.communicators[0].nranks == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["id", "r"]  # no half-written file stays


def test_a_gpt_s_shape_becomes_the_driver_s_options() -> None:
    shape = GptShape(
        pipeline=2,
        tensor=3,
        data=4,
        layers=5,
        hidden=6,
        sequence=7,
        vocabulary=8,
        micro_batch=9,
        micro_batches=10,
        replicas_apart=True,
    )
    assert shape.arguments == ["--shape", "2,3,4,5,6,7,8,9,10", "--replicas-apart"]
