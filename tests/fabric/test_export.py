"""A trace of a real job: recordings of two hosts, each made on its own, in one file."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from railscope.agent.recording.file import read_recording
from railscope.agent.trace.command import run_export
from railscope.agent.trace.from_recording import RecordingFile, make_timelines
from railscope.agent.trace.perfetto import write_trace
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.fabric.agent_process import RAILSCOPE
from tests.fabric.test_recordings import said
from tests.unit.test_perfetto import parsed
from tests.unit.traces import read_trace

pytestmark = [pytest.mark.root, pytest.mark.fabric]


def test_calls_of_both_hosts_are_in_one_trace_and_joined_by_arrows(two_hosts: Fabric, tmp_path: Path) -> None:
    files = [tmp_path / f"{host.namespace}.npz" for host in two_hosts.hosts]
    with Job(two_hosts.hosts, JobOptions(pattern="ddp", iterations=4, hold=True)) as job, ExitStack() as recorders:
        started = [
            recorders.enter_context(
                subprocess.Popen(
                    [RAILSCOPE, "record", "-o", file, "--seconds", "15", "--pid", str(pid)],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for file, pid in zip(files, job.pids, strict=True)
        ]
        for recorder in started:
            assert recorder.stderr is not None
            assert any("recording into" in line for line in recorder.stderr)
        job.release()
        reports = job.wait(60)
        for recorder in started:
            _, err = recorder.communicate(timeout=60)
            assert recorder.returncode == 0, err
    out = tmp_path / "job.pftrace"
    with (tmp_path / "said").open("w") as words:
        assert run_export(parsed(out, *files), words, write_trace) == 0
    trace = read_trace(out)
    calls = [call for call in trace.instants if call.where[-1] == "calls"]
    made = {key: count for key, (count, _) in said(reports).items()}
    assert len(calls) == sum(made.values())
    for (comm, rank, op), count in made.items():
        track = f"comm {comm} · rank {rank} of 2"
        assert len([call for call in calls if call.where[-2] == track and call.name == op]) == count
    # Both were watched from the first call on: every call of one rank has its like on the other.
    pairs = list(trace.arrows().values())
    assert len(pairs) == len(calls) / 2
    for one, other in pairs:
        assert one.name == other.name
        assert one.said["sequence"] == other.said["sequence"]
        assert one.said["payload_bytes"] == other.said["payload_bytes"]
        assert one.where[-2] != other.where[-2]
    # One machine has one clock.
    assert "2 recordings share one clock: their times compare exactly" in (tmp_path / "said").read_text()
    hosts = make_timelines([RecordingFile(file, read_recording(file)) for file in files])
    assert all(host.began_ns <= call.begin_ns <= host.ended_ns for host, call in zip(hosts, pairs[0], strict=True))
    # Each rail's counter adds up to the bytes that its host says it sent, and some more (TCP's headers).
    for report in reports:
        host = two_hosts.hosts[report.rank].namespace
        for carried in report.rails:
            (rates,) = [
                rates
                for where, rates in trace.counters.items()
                if where[0].find(f"{host}.npz") > 0
                and where[-1] == "transmit"
                and where[-2].endswith(f"{carried.rail} · {host}")
            ]
            sent = sum(rate * (later_ns - at_ns) / 1e9 for (at_ns, rate), (later_ns, _) in pairwise(rates))
            assert carried.transmit_bytes <= sent * 1.000001 < 1.5 * carried.transmit_bytes + 100_000
