"""`railscope record -o DIR` beside real jobs: the dataset says what the job says it did, also after the worst end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest

from railscope.agent.analysis.facts.report import OwnerUse
from railscope.agent.analysis.report.report import make_report
from railscope.agent.analysis.report.text import as_text
from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.dataset.writer import read_part
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.fabric.agent_process import RAILSCOPE
from tests.fabric.ledgers import PortCounters
from tests.fabric.talkers import SEND, SERVE, Talker
from tests.fabric.test_recordings import Calls, said
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric]

FOREIGN_BYTES = 60_000_000
PACE_US = 300_000
"""So that the job is there while it is found out whose the connections are."""
SETTLED_SECONDS = 10
"""After which all bytes have an owner: what nothing explains waits for three readings."""


@contextlib.contextmanager
def recorder(folder: Path, pids: Sequence[int], *options: str) -> Iterator[subprocess.Popen[str]]:
    """`railscope record`, attached."""
    words = [word for pid in pids for word in ("--pid", str(pid))]
    with subprocess.Popen(
        [RAILSCOPE, "record", "-o", folder, *words, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            kind = "file" if folder.suffix == ".npz" else "folder"
            assert any(f"recording into the {kind} " in line for line in process.stderr)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def recorded(dataset: Dataset) -> Calls:
    """What a dataset holds, with the identities that stand in it."""
    calls, ends = dataset["calls"], dataset["communicators"]
    named = calls.join(ends, ["recording", "instance"])
    totals = named.group_by("comm", "rank", "op").aggregate(calls=named.count(), size=named.payload_bytes.sum())
    rows = dataset.rows(totals).to_pylist()
    return {(row["comm"], str(row["rank"]), row["op"]): (row["calls"], int(row["size"])) for row in rows}


def test_two_recorders_write_one_dataset_that_holds_every_call(two_hosts: Fabric, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    before_ns = time.time_ns()
    with Job(two_hosts.hosts, JobOptions(pattern="mixed", iterations=40, hold=True)) as job:
        with recorder(folder, job.pids[:1]) as one, recorder(folder, job.pids[1:], "--seconds", "600") as other:
            job.release()
            reports = job.wait(60)
            one.send_signal(signal.SIGINT)
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # and again: what is begun is finished
                other.send_signal(number)
            for process in (one, other):
                out, err = process.communicate(timeout=60)
                assert process.returncode == 0, err
                assert out.startswith(f"wrote {folder}\n")
                assert "nothing was lost" in out
    with open_dataset([folder]) as dataset:
        assert recorded(dataset) == said(reports)
        rows = dataset.rows(dataset["recordings"]).to_pylist()
        assert len({row["recording"] for row in rows}) == len(rows) == 2
        assert {(row["calls_lost"], row["operations_lost"], row["schema_version"]) for row in rows} == {(0, 0, 1)}
        calls = dataset.rows(dataset["calls"]).to_pandas()
        ends = dataset.rows(dataset["communicators"]).to_pylist()
        assert {end["pid"] for end in ends} == set(job.pids)
        assert {end["netns"] for end in ends} == {host.namespace for host in two_hosts.hosts}
        assert before_ns <= calls["time_ns"].min()
        assert calls["time_ns"].max() <= time.time_ns()
        for row in rows:
            own = calls[calls["recording"] == row["recording"]]
            assert row["began_ns"] <= own["time_ns"].min()
            assert own["time_ns"].max() <= row["ended_ns"]
            # Each once, as they were made.
            for _, of_one in own.groupby("instance"):
                sequence = sorted(of_one["sequence"])
                assert sequence == list(range(sequence[0], sequence[0] + len(sequence)))
        samples = dataset["rail_samples"].join(dataset["rails"], ["recording", "rail_id"])
        carried = dataset.rows(
            samples.group_by("netns", "device").aggregate(
                sent=samples.transmit_bytes.max() - samples.transmit_bytes.min()
            )
        ).to_pylist()
        sent = {(row["netns"], row["device"]): row["sent"] for row in carried}
        for report in reports:
            for rail in report.rails:
                # The job's own bytes, and TCP's headers and acknowledgements.
                counted = sent[two_hosts.hosts[report.rank].namespace, rail.rail]
                assert counted < 1.5 * rail.transmit_bytes + 200_000


@pytest.mark.parametrize("output", ["job", "job.npz"])
def test_a_recording_tells_who_moved_the_bytes_of_each_rail(two_hosts: Fabric, tmp_path: Path, output: str) -> None:
    """A job over two rails, and a program that maps no library over the first one."""
    with ExitStack() as open_until_here:
        server = Talker(two_hosts.hosts[1].command(sys.executable, "-c", SERVE, *two_hosts.hosts[1].addresses))
        open_until_here.callback(server.end)
        sender = Talker(two_hosts.hosts[0].command(sys.executable, "-c", SEND))
        open_until_here.callback(sender.end)
        job = open_until_here.enter_context(
            Job(two_hosts.hosts, JobOptions("ddp", iterations=60, hold=True, verify=False, pace_us=PACE_US))
        )
        process = open_until_here.enter_context(recorder(tmp_path / output, ()))
        ports = PortCounters(two_hosts)
        job.release()
        for _ in range(6):
            sender.send(two_hosts.hosts[1].addresses[0], FOREIGN_BYTES // 6)
            time.sleep(1)
        job.wait(120)
        moved = ports.since()
        time.sleep(SETTLED_SECONDS)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    report = make_report([tmp_path / output])
    places = {(host.namespace, rail): (number, at) for number, host in enumerate(two_hosts.hosts)
              for at, rail in enumerate(two_hosts.rail_names)}  # fmt: skip
    owned: dict[tuple[int, int, str], dict[str, OwnerUse]] = {}
    for use in report.owners:
        place = places.get((use.server.partition("/")[2], use.device))
        if place is not None:
            owned.setdefault((*place, use.direction), {})[use.owner] = use
    assert owned.keys() == moved.keys()
    for where, owners in owned.items():
        foreign = FOREIGN_BYTES if where in ((0, 0, "transmit"), (1, 0, "receive")) else 0
        together = sum(use.port_bytes for use in owners.values())
        assert together == pytest.approx(moved[where], rel=0.02), (where, owners)
        other = owners["tcp_other"].port_bytes if "tcp_other" in owners else 0
        assert other == pytest.approx(foreign, abs=0.05 * FOREIGN_BYTES), (where, owners)
        assert owners["nccl"].port_bytes == pytest.approx(moved[where] - foreign, rel=0.05), (where, owners)
        (error_ratio,) = {use.error_ratio for use in owners.values()}
        assert error_ratio is not None
        assert abs(owners["nccl"].port_bytes + foreign - together) < (error_ratio + 0.01) * together, (where, owners)
        assert sum(use.share for use in owners.values()) == pytest.approx(1)
    assert "tcp_other" in as_text(report)


@pytest.mark.parametrize("output", ["job", "job.npz"])
def test_the_log_ends_with_the_calls_that_are_recorded_also_those_of_the_last_moment(
    two_hosts: Fabric, tmp_path: Path, output: str
) -> None:
    with Job(two_hosts.hosts, JobOptions(pattern="tensor-parallel", seconds=120, hold=True)) as job:
        job.release()
        with recorder(tmp_path / output, job.pids, "--seconds", "2") as process:
            _, log = process.communicate(timeout=60)
    with open_dataset([tmp_path / output]) as dataset:
        calls = dataset.rows(dataset["calls"].count()).as_py()
    assert calls > 100
    assert f"{calls} calls were recorded, lost: none" in log
    assert "calls counted" not in log


def test_a_recorder_that_is_killed_leaves_what_it_had_written_and_another_one_adds_to_it(
    two_hosts: Fabric, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    with Job(two_hosts.hosts, JobOptions(pattern="ddp", seconds=120, hold=True)) as job:
        with recorder(folder, job.pids) as killed:
            job.release()
            deadline = time.monotonic() + 60
            while len(list((folder / "calls").glob("*/*/*.parquet"))) < 2:
                assert time.monotonic() < deadline, "nothing was written"
                time.sleep(0.1)
            killed.kill()
            killed.communicate()
        left = next((folder / "calls").glob("*/*")) / ".left-behind.parquet.1.partial"
        left.write_bytes(b"half of a part")
        with open_dataset([folder]) as dataset:
            held = recorded(dataset)
            (row,) = dataset.rows(dataset["recordings"]).to_pylist()
            assert len(held) >= 2
            assert row["calls_lost"] == 0
            calls = dataset.rows(dataset["calls"]).to_pandas()
            assert row["began_ns"] <= calls["time_ns"].min()
            for _, of_one in calls.groupby("instance"):
                assert sorted(of_one["sequence"]) == list(range(1, len(of_one) + 1))
        with recorder(folder, job.pids, "--seconds", "3") as second:
            _, err = second.communicate(timeout=60)
            assert second.returncode == 0, err
            assert not left.exists()
        job.stop()
    with open_dataset([folder]) as dataset:
        assert dataset.rows(dataset["recordings"].count()).as_py() == 2
        more = recorded(dataset)
        assert all(more[kind] >= total for kind, total in held.items())


def test_a_recording_begins_when_all_is_attached_and_says_that_nobody_called(tmp_path: Path) -> None:
    folder, pid, attached_ns = tmp_path / "job", os.getpid(), []
    for already in ("", f"{folder} already holds 1 recording of {socket.gethostname()}: this recording is added"):
        one = subprocess.run(
            [RAILSCOPE, "record", "-o", folder, "--pid", str(pid), "--seconds", "1"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert one.returncode == 0, one.stderr
        assert one.stdout.startswith(f"wrote {folder}\n")
        assert f"process {pid} did not use NCCL meanwhile" in one.stdout
        assert already in one.stderr
        (line,) = (line for line in one.stderr.splitlines() if "calls are counted by" in line)
        moment = datetime.fromisoformat(line.split()[0].removeprefix("ts="))
        attached_ns.append(int(moment.timestamp() * 1000) * 1_000_000)
    with open_dataset([folder]) as dataset:
        rows = sorted(dataset.rows(dataset["recordings"]).to_pylist(), key=lambda row: int(row["began_ns"]))
    for row, ready_ns in zip(rows, attached_ns, strict=True):
        assert ready_ns <= row["began_ns"] <= row["ended_ns"] - 1_000_000_000


def evidence_in(folder: Path) -> list[str]:
    """What a dataset has of stalls so far."""
    rows = [row for file in table_files(folder, "stalls") for row in read_part(file, "stalls").to_pylist()]
    return [row["evidence"] or "" for row in rows]


def test_a_job_that_is_killed_while_it_hangs_is_recorded_with_what_made_it_hang(
    two_hosts: Fabric, tmp_path: Path
) -> None:
    folder = tmp_path / "hung"
    with Job(
        two_hosts.hosts, JobOptions(pattern="ddp", seconds=600, hold=True, init_before_start=True, linger=True)
    ) as job:
        with recorder(folder, job.pids) as process:
            job.release()
            # What is recorded is written every few seconds: the stall, and the end of its process, lie between.
            eventually(lambda: bool(table_files(folder, "calls")), 60)
            os.kill(job.pids[1], signal.SIGSTOP)
            assert process.stderr is not None
            assert any("process_stopped, blamed on rank 1" in line for line in process.stderr)
            os.kill(job.pids[1], signal.SIGKILL)
            eventually(lambda: any("has ended: killed by signal 9" in told for told in evidence_in(folder)), 60)
            for pid in job.pids:
                os.kill(pid, signal.SIGKILL)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    verdict = subprocess.run([RAILSCOPE, "diagnose", folder], capture_output=True, text=True, check=False)
    assert verdict.returncode == 1, verdict.stderr
    said = " ".join(verdict.stdout.split())
    assert said.startswith("STALLED for ")
    assert f"rank 1 (pid {job.pids[1]}, " in said
    assert " is stopped (SIGSTOP or a debugger)." in said
    assert "has ended: killed by signal 9" in said
