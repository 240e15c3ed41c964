"""From a duration bucket to the operation, beside the real NCCL (on the CUDA test double)."""

from __future__ import annotations

import io
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from railscope.agent.recording.file import read_recording
from railscope.agent.trace.from_recording import RecordingFile, make_timelines
from railscope.agent.trace.perfetto import write_trace
from railscope.agent.trace.same_operations import join_operations
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job
from tests.nccl.test_completion import by_rank
from tests.unit.traces import read_trace

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

CALLS = 200
DURATION = "railscope_collective_duration_seconds"


def test_an_exemplar_leads_to_its_operation_in_the_recording_and_in_the_trace(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    folder = tmp_path / "recordings"
    # Apart from each other, so that only one way to join the ranks' calls fits their times on a busy machine too.
    with Job(two_hosts, tmp_path, double, iterations=CALLS, size_bytes=1 << 16, pace_us=5_000, hold=True) as job:
        pids = job.ready()
        with AgentProcess(
            "--pid", *map(str, pids), "--level", "completion", "--recordings.directory", str(folder)
        ) as agent:
            job.start()
            job.finished()
            agent.until(lambda: by_rank(agent, "railscope_comm_completed_total") == {"0": CALLS, "1": CALLS})
            # Recorded events have been read from the ring by then, and exemplars are made of the same.
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: bool(list(folder.glob("railscope-*.npz"))))
            text = agent.page("/metrics", accept="application/openmetrics-text")
            plain = agent.text()
            job.release()
            job.wait()
    file = next(folder.glob("railscope-*.npz"))
    one = read_recording(file)
    buckets = [
        sample
        for family in text_string_to_metric_families(text)
        if family.name == DURATION
        for sample in family.samples
        if sample.name == f"{DURATION}_bucket"
    ]
    exemplars = [sample.exemplar for sample in buckets if sample.exemplar]
    # Every bucket that counted something has one.
    counts = [0.0, *(sample.value for sample in buckets)]
    assert len(exemplars) == sum(later > before for before, later in pairwise(counts))
    who = {comm.identity.key: comm.instance for comm in one.communicators}
    for exemplar in exemplars:
        done = one.completions[
            (one.completions["instance"] == who[exemplar.labels["comm"], exemplar.labels["rank"]])
            & (one.completions["sequence"] == int(exemplar.labels["sequence"]))
        ]
        assert done["duration_ns"].tolist() == [round(exemplar.value * 1e9)]
        assert abs(float(exemplar.timestamp) * 1e9 - one.realtime_ns(int(done["time_ns"][0]))) < 100_000_000
    assert " # " not in plain.replace("# HELP", "").replace("# TYPE", "").replace("\n# ", "\n")

    content = io.BytesIO()
    hosts = make_timelines([RecordingFile(file, one)])
    same = join_operations(hosts)
    summary = write_trace(hosts, same, content)
    trace = read_trace(content.getvalue())
    assert (summary.calls, summary.operations, summary.unfinished) == (2 * CALLS, 2 * CALLS, 0)
    assert same.joined == CALLS
    assert len(trace.below("network")) == 2 * CALLS
    for arrow in trace.arrows().values():
        assert [leg.said["sequence"] for leg in arrow] == [arrow[0].said["sequence"]] * 2
        # What is joined was under way together: the two really are one operation.
        assert max(leg.begin_ns for leg in arrow) <= min(leg.end_ns or 0 for leg in arrow)
    for exemplar in exemplars:
        track = f"comm {exemplar.labels['comm']} · rank {exemplar.labels['rank']} of 2"
        (leg,) = [
            leg for leg in trace.below(track, "network") if leg.said["sequence"] == int(exemplar.labels["sequence"])
        ]
        assert (leg.end_ns or 0) - leg.begin_ns >= round(exemplar.value * 1e9)
