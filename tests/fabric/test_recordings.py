"""The flight recorder beside real jobs: what it writes is what the job says it did."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from railscope.agent.recording.file import read_recording
from railscope.agent.recording.recording import Recording
from railscope.probes.nccl.abi import op_name
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions, RankReport
from tests.fabric.agent_process import RAILSCOPE, AgentProcess

pytestmark = [pytest.mark.root, pytest.mark.fabric]

SAMPLE_SECONDS = 0.1
"""How often rails are read; a reading is to be recorded before the job's first byte."""

Calls = dict[tuple[str, str, str], tuple[int, int]]
"""(comm, rank, op) → calls, payload bytes."""


def said(reports: Iterable[RankReport]) -> Calls:
    """What the ranks say they called."""
    calls: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for report in reports:
        for comm in report.communicators:
            for operation in comm.operations:
                total = calls[comm.hash, str(comm.rank), operation.op]
                total[0] += operation.calls
                total[1] += operation.payload_bytes
    return {key: (count, size) for key, (count, size) in calls.items()}


def recorded(one: Recording) -> Calls:
    """What a recording holds, with the identities that stand in it."""
    who = {comm.instance: comm.identity.key for comm in one.communicators}
    calls: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for call in one.calls:
        total = calls[*who[int(call["instance"])], op_name(int(call["op"]))]
        total[0] += 1
        total[1] += int(call["payload_bytes"])
    return {key: (count, size) for key, (count, size) in calls.items()}


def only(job: Job) -> list[str]:
    return [word for pid in job.pids for word in ("--pid", str(pid))]


def attached(agent: AgentProcess, ranks: int) -> bool:
    return agent.samples("railscope_processes_observed")[0][1] == ranks


def rails_are_read(agent: AgentProcess, fabric: Fabric) -> bool:
    shown = {
        (labels.get("netns", ""), labels["device"])
        for labels, _ in agent.samples("railscope_rail_transmit_bytes_total")
    }
    return shown >= {(host.namespace, rail) for host in fabric.hosts for rail in host.rails}


def written(folder: Path) -> list[Path]:
    return sorted(folder.glob("railscope-*.npz"))


def test_a_signal_writes_every_call_of_the_last_minute_and_names_its_communicator(
    two_hosts: Fabric, tmp_path: Path
) -> None:
    folder = tmp_path / "recordings"
    with Job(two_hosts.hosts, JobOptions(pattern="mixed", iterations=40, hold=True)) as job:
        with AgentProcess(*only(job), "--recordings.directory", str(folder)) as agent:
            agent.until(lambda: attached(agent, 2) and rails_are_read(agent, two_hosts))
            time.sleep(3 * SAMPLE_SECONDS)
            job.release()
            reports = job.wait(60)
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: len(written(folder)) == 1)
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: len(written(folder)) == 2)
            counts = {
                (labels["reason"], labels["result"]): value
                for labels, value in agent.samples("railscope_recordings_total")
            }
    one = read_recording(written(folder)[0])
    assert recorded(one) == said(reports)
    assert one.reason == "signal"
    assert one.lost_events() == {"calls": 0, "completions": 0, "lifecycle": 0}
    assert {comm.identity.pid for comm in one.communicators} == {report.pid for report in reports}
    # In the order in which each communicator was given them.
    for comm in one.communicators:
        sequence = one.calls["sequence"][one.calls["instance"] == comm.instance].tolist()
        assert sequence == list(range(sequence[0], sequence[0] + len(sequence))) if sequence else True
    ours = {host.namespace for host in two_hosts.hosts}
    assert {(rail.netns, rail.name) for rail in one.rails if rail.netns in ours} == {
        (host, rail) for host in ours for rail in ("rail0", "rail1")
    }
    assert {comm.identity.netns for comm in one.communicators} == ours
    device = {(rail.netns, rail.name): rail.device for rail in one.rails}
    for report in reports:
        for carried in report.rails:
            number = device[two_hosts.hosts[report.rank].namespace, carried.rail]
            sent = one.rail_samples["transmit_bytes"][one.rail_samples["device"] == number]
            # The job's own bytes, and TCP's headers and acknowledgements.
            assert carried.transmit_bytes <= int(sent[-1] - sent[0]) < 1.5 * carried.transmit_bytes + 100_000
    assert counts["signal", "written"] == 2
    assert counts["signal", "failed"] == counts["stall", "written"] == 0


def test_a_link_that_goes_down_and_comes_back_is_in_the_recording(two_hosts: Fabric, tmp_path: Path) -> None:
    host = two_hosts.hosts[0]
    with Job(two_hosts.hosts, JobOptions(pattern="idle", seconds=60)) as job:
        with AgentProcess(*only(job), "--recordings.directory", str(tmp_path)) as agent:
            agent.until(lambda: attached(agent, 2))
            for state in ("down", "up"):
                subprocess.run(
                    ["ip", "-netns", host.namespace, "link", "set", "rail1", state], check=True, capture_output=True
                )
                time.sleep(0.5)
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: len(written(tmp_path)) == 1)
        job.stop()
    one = read_recording(written(tmp_path)[0])
    number = next(rail.device for rail in one.rails if (rail.netns, rail.name) == (host.namespace, "rail1"))
    events = one.link_events[one.link_events["device"] == number]
    carrier = [(int(event["up"]), int(event["carrier"])) for event in events]
    assert carrier[0] == carrier[-1] == (1, 1)
    assert any(up == 0 or lower == 0 for up, lower in carrier)
    changes = events["carrier_changes"].astype(int)
    assert changes[-1] >= changes[0] + 2


def test_a_folder_that_cannot_be_written_to_costs_a_recording_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with AgentProcess("--recordings.directory", str(tmp_path / "file")) as agent:
        os.kill(agent.process.pid, signal.SIGUSR2)
        agent.until(lambda: agent.samples("railscope_recordings_total", reason="signal", result="failed")[0][1] == 1)
        assert agent.samples("railscope_build_info")
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.stderr is not None
        lines = [line for line in agent.process.stderr if str(tmp_path / "file") in line]
    # At the start, and when one was to be made.
    assert ["recordings cannot be written" in line for line in lines] == [True, False]


def test_an_agent_without_a_recorder_takes_the_signal_and_goes_on() -> None:
    with AgentProcess("--recordings.memory", "0") as agent:
        os.kill(agent.process.pid, signal.SIGUSR2)
        assert agent.samples("railscope_build_info")
        assert agent.process.poll() is None


@pytest.mark.parametrize("ending", ["time", "ctrl-c"])
def test_record_writes_what_the_job_did_while_it_watched(two_hosts: Fabric, tmp_path: Path, ending: str) -> None:
    path = tmp_path / "job.npz"
    # A job that is long over by then, also on a busy machine.
    seconds, iterations = ("15", 3) if ending == "time" else ("600", 30)
    with Job(two_hosts.hosts, JobOptions(pattern="ddp", iterations=iterations, hold=True)) as job:
        with subprocess.Popen(
            [RAILSCOPE, "record", "-o", path, "--seconds", seconds, *only(job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as recorder:
            assert recorder.stderr is not None
            assert any("recording into the file " in line for line in recorder.stderr)
            job.release()
            reports = job.wait(60)
            if ending == "ctrl-c":
                recorder.send_signal(signal.SIGINT)
            out, err = recorder.communicate(timeout=60)
    assert recorder.returncode == 0, err
    assert out.startswith(f"wrote {path}\n")
    one = read_recording(path)
    assert recorded(one) == said(reports)
    assert one.reason == "record"
