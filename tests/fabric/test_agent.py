"""The agent beside real jobs: what it counts, whom it names, and that it can be killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions, RankReport
from tests.fabric.agent_process import RAILSCOPE, AgentProcess

pytestmark = [pytest.mark.root, pytest.mark.fabric]


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(hosts=2, rails=2) as made:
        yield made


def identities(reports: tuple[RankReport, ...]) -> set[tuple[str, str, str, str]]:
    return {
        (str(report.pid), communicator.hash, str(communicator.rank), str(communicator.nranks))
        for report in reports
        for communicator in report.communicators
        if communicator.operations
    }


def observed_identities(agent: AgentProcess, pids: set[str]) -> set[tuple[str, str, str, str]]:
    return {
        (labels["pid"], labels["comm"], labels["rank"], labels["nranks"])
        for labels, _ in agent.samples("railscope_comm_info")
        if labels["pid"] in pids
    }


def enqueued_by_comm(agent: AgentProcess) -> dict[tuple[str, str], float]:
    return {(labels["comm"], labels["rank"]): value for labels, value in agent.samples("railscope_comm_enqueued_total")}


def test_the_demo_finds_every_call_and_byte_of_every_pattern_and_records_it(tmp_path: Path) -> None:
    command = [str(RAILSCOPE), "demo", "--library", "workload", "--seconds", "5", "--json"]
    command += ["--record", str(tmp_path / "dataset")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["ok"] is True
    assert result["verified"] is True
    assert result["jobs"] == result["observed"]
    ops = {op for rank in result["jobs"] for op in rank["ops"]}
    assert ops >= {
        "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AllToAll",
        "Gather", "Scatter", "Send", "Recv",
    }  # fmt: skip
    for rail in result["rails"]:
        assert rail["explained_ratio"] == pytest.approx(1.0, abs=0.15), rail
    command = [str(RAILSCOPE), "report", str(tmp_path / "dataset"), "--json", "--html", str(tmp_path / "report.html")]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    did = Counter[str]()
    for rank in result["jobs"]:
        did.update({op: count["calls"] for op, count in rank["ops"].items()})
    recorded = Counter[str]()
    for used in report["ops"]:
        recorded[used["op"]] += used["calls"]
    assert recorded == did
    # Jobs of five patterns ran one after the other, and that is all there is to say.
    assert len(report["losses"]) == 1
    assert "share no communicator" in report["losses"][0]
    assert "</html>" in (tmp_path / "report.html").read_text()


def test_a_recorded_demo_holds_its_own_processes_and_no_other_job(fabric: Fabric, tmp_path: Path) -> None:
    command = [str(RAILSCOPE), "demo", "--library", "workload", "--seconds", "2", "--pattern", "ddp", "--json"]
    command += ["--record", str(tmp_path)]
    with Job(fabric.hosts, JobOptions(pattern="inference", seconds=60.0)) as other:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert other.running()
    assert ran.returncode == 0, ran.stderr
    jobs = json.loads(ran.stdout)["jobs"]
    command = [str(RAILSCOPE), "report", str(tmp_path), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert {gpu["pid"] for gpu in report["gpus"]} == {rank["pid"] for rank in jobs}
    calls = sum(count["calls"] for rank in jobs for count in rank["ops"].values())
    assert sum(used["calls"] for used in report["ops"]) == calls


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_says_so_and_nothing_of_the_ranks_that_it_kills_or_of_other_jobs(
    fabric: Fabric, number: signal.Signals, status: int
) -> None:
    command = [str(RAILSCOPE), "demo", "--library", "workload", "--seconds", "60", "--pattern", "ddp"]
    with Job(fabric.hosts, JobOptions(pattern="ddp", seconds=60.0)) as other:
        demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert demo.stdout is not None
            for line in demo.stdout:
                if "ops/s" in line:
                    break
            # As another's job that fails: its stalls begin at once.
            os.kill(other.pids[0], signal.SIGKILL)
            # Two views of two ranks and four rails: more than a second.
            for _ in range(12):
                demo.stdout.readline()
            demo.send_signal(number)
            _, said = demo.communicate(timeout=60)
        finally:
            demo.kill()
    assert (demo.returncode, said) == (status, "interrupted\n")


def test_a_job_that_ran_before_the_agent_is_named_with_hash_rank_and_size(fabric: Fabric) -> None:
    options = JobOptions(pattern="inference", seconds=30)
    with Job(fabric.hosts, options) as job:
        pids = {str(pid) for pid in job.pids}
        with AgentProcess() as agent:
            agent.until(lambda: len(observed_identities(agent, pids)) == 2)
            seen = observed_identities(agent, pids)
            results = job.stop()
        reports = tuple(result.report for result in results if result.report is not None)
    assert len(reports) == 2
    assert seen == identities(reports)


def only(job: Job) -> tuple[str, ...]:
    """Options that leave every other job on this machine out of the counts."""
    return tuple(option for pid in job.pids for option in ("--pid", str(pid)))


def test_counts_are_exact_and_stay_when_the_job_has_gone(fabric: Fabric) -> None:
    with Job(fabric.hosts, JobOptions(pattern="mixed", iterations=40, hold=True)) as job:
        with AgentProcess(*only(job)) as agent:
            agent.until(lambda: observed(agent) == 2)
            job.release()
            reports = job.wait(60)
            agent.until(lambda: observed(agent) == 0)
            after = totals(agent)
            communicators = enqueued_by_comm(agent)
    expected: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for report in reports:
        for op, count in report.totals().items():
            expected[op][0] += count.calls
            expected[op][1] += count.payload_bytes
        for communicator in report.communicators:
            calls = sum(operation.calls for operation in communicator.operations)
            if calls:
                assert communicators[communicator.hash, str(communicator.rank)] == calls
    for op, (calls, payload_bytes) in expected.items():
        assert after[op] == (calls, payload_bytes), op


def observed(agent: AgentProcess) -> float:
    return agent.samples("railscope_processes_observed")[0][1]


def totals(agent: AgentProcess) -> dict[str, tuple[float, float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for labels, value in agent.samples("railscope_collective_calls_total"):
        sums[labels["op"]][0] += value
    for labels, value in agent.samples("railscope_collective_payload_bytes_total"):
        sums[labels["op"]][1] += value
    return defaultdict(lambda: (0.0, 0.0), {op: (calls, size) for op, (calls, size) in sums.items()})


def loaded_programs() -> set[int]:
    """Ids of all BPF programs in the kernel."""
    listing = subprocess.run(
        [sys.executable, "-c", _LIST_PROGRAMS], capture_output=True, text=True, check=True, timeout=30
    )
    return {int(line) for line in listing.stdout.split()}


def programs_of(pid: int) -> set[int]:
    """Ids of the BPF programs that a process holds open."""
    ids = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        for line in file.read_text().splitlines():
            if line.startswith("prog_id:"):
                ids.add(int(line.split()[1]))
    return ids


_LIST_PROGRAMS = """
import struct
from railscope.probes.loading.bpf_syscall import KernelRefusal, bpf
program = 0
while True:
    attributes = bytearray(struct.pack("<III", program, 0, 0))
    try:
        bpf(11, attributes, "next program")
    except KernelRefusal:
        break
    program = struct.unpack_from("<I", attributes, 4)[0]
    print(program)
"""


def test_a_killed_agent_leaves_no_program_behind_and_the_job_goes_on(fabric: Fabric) -> None:
    with Job(fabric.hosts, JobOptions(pattern="mixed", seconds=600)) as job:
        pids = {str(pid) for pid in job.pids}
        with AgentProcess() as agent:
            agent.until(lambda: len(observed_identities(agent, pids)) >= 2)
            mine = programs_of(agent.process.pid)
            assert len(mine) >= 5
            assert mine <= loaded_programs()
            os.kill(agent.process.pid, signal.SIGKILL)
            agent.process.wait(10)
        agent.until(lambda: not mine & loaded_programs())
        assert job.running()
        reports = [result.report for result in job.stop()]
    assert all(report is not None and report.verified for report in reports)
    assert not list(Path("/sys/fs/bpf").glob("*railscope*"))


def test_only_the_named_process_is_counted_with_pid(fabric: Fabric) -> None:
    with Job(fabric.hosts, JobOptions(pattern="inference", iterations=500, hold=True)) as job:
        with AgentProcess("--pid", str(job.pids[0])) as agent:
            job.release()
            reports = job.wait(60)
            agent.until(lambda: observed(agent) == 0)
            calls = sum(value for _, value in agent.samples("railscope_collective_calls_total"))
            pids = {labels["pid"] for labels, _ in agent.samples("railscope_comm_info")}
    assert calls == reports[0].calls
    assert pids == {str(job.pids[0])}


def test_jobs_in_other_network_namespaces_are_left_alone_with_scope_netns(fabric: Fabric) -> None:
    with Job(fabric.hosts, JobOptions(pattern="inference", iterations=200, hold=True)) as job:
        with AgentProcess("--scope", "netns") as agent:
            job.release()
            job.wait(60)
            pids = {str(pid) for pid in job.pids}
            assert observed_identities(agent, pids) == set()


@pytest.mark.parametrize("options", [("--probe.attach", "perf"), ("--probe.enqueue-time", "pair")])
def test_every_way_of_attaching_counts_the_same(fabric: Fabric, options: tuple[str, str]) -> None:
    with Job(fabric.hosts, JobOptions(pattern="mixed", iterations=20, hold=True)) as job:
        with AgentProcess(*options, *only(job)) as agent:
            agent.until(lambda: observed(agent) == 2)
            job.release()
            reports = job.wait(60)
            agent.until(lambda: observed(agent) == 0)
            seen = totals(agent)
    for op, count in reports[0].totals().items():
        both = count.calls + reports[1].totals()[op].calls
        assert seen[op][0] == both, op


def test_totals_never_fall_while_communicators_come_and_go(fabric: Fabric) -> None:
    with Job(fabric.hosts, JobOptions(pattern="mixed", seconds=4, hold=True)) as job:
        with AgentProcess(*only(job)) as agent:
            agent.until(lambda: observed(agent) == 2)
            job.release()
            highest: dict[tuple[str, ...], float] = {}
            while job.running():
                now = {
                    tuple(labels.values()): value for labels, value in agent.samples("railscope_collective_calls_total")
                }
                for key, value in highest.items():
                    assert now.get(key, 0.0) >= value, key
                highest.update(now)
            job.wait(60)
    assert highest


def log_until_stopped(agent: AgentProcess, number: signal.Signals = signal.SIGTERM) -> list[str]:
    """Stop the agent, as a service manager does unless told otherwise, and return its log."""
    agent.process.send_signal(number)
    assert agent.process.wait(10) == 0
    assert agent.process.stderr is not None
    return agent.process.stderr.read().splitlines()


@pytest.mark.parametrize("prefix", [("env", "--default-signal=HUP"), ("nohup",)])
def test_an_agent_outlives_its_terminal_and_reads_its_configuration_again(prefix: tuple[str, ...]) -> None:
    with AgentProcess(prefix=prefix) as agent:
        agent.process.send_signal(signal.SIGHUP)
        assert agent.samples("railscope_build_info")
        assert agent.process.poll() is None
        log = log_until_stopped(agent)
    assert [line for line in log if "configuration reloaded: " in line]
    assert [line for line in log if "stopping: " in line]


def test_details_that_are_reloaded_show_in_the_metrics(tmp_path: Path) -> None:
    file = tmp_path / "railscope.yml"
    file.write_text("")
    with AgentProcess("--config.file", str(file)) as agent:
        assert len(agent.samples("railscope_loop_late_seconds")) == 1
        before = len(agent.samples("railscope_rail_events_total"))
        file.write_text("series: {detail: [all]}\n")
        agent.process.send_signal(signal.SIGHUP)
        agent.until(lambda: len(agent.samples("railscope_rail_events_total")) > before)


def test_the_log_says_how_calls_are_counted_and_at_the_end_what_was_seen(fabric: Fabric) -> None:
    with Job(fabric.hosts, JobOptions(pattern="inference", iterations=100, hold=True)) as job:
        options = ("--probe.enqueue-time", "pair", "--probe.sample-every", "4", "--limit.ring", "1MiB")
        with AgentProcess(*options, *only(job)) as agent:
            agent.until(lambda: observed(agent) == 2)
            job.release()
            reports = job.wait(60)
            agent.until(lambda: observed(agent) == 0)
            log = log_until_stopped(agent)
    (how,) = [line for line in log if "calls are counted by" in line]
    assert "host time of one call in 4 is measured by pair probes, rings of 1024 KiB" in how
    (end,) = [line for line in log if "stopping: " in line]
    assert f"{sum(report.calls for report in reports):,} calls counted, events lost: none" in end


def test_a_pid_that_ends_is_one_warning_and_the_doctor_says_it_too() -> None:
    with subprocess.Popen(["sleep", "60"]) as idle:
        with AgentProcess("--pid", str(idle.pid), "--probe.scan-interval", "1s") as agent:
            idle.kill()
            idle.wait()
            assert agent.process.stderr is not None
            ended = next(line for line in agent.process.stderr if f"no process has the pid {idle.pid}" in line)
            log = log_until_stopped(agent)
    assert "level=warn" in ended
    assert not [line for line in log if "--pid" in line]
    ran = subprocess.run([RAILSCOPE, "doctor", "--pid", "4194303"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "--pid: no process has the pid 4194303" in ran.stdout
