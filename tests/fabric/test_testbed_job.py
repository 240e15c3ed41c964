"""Jobs on fabrics: right results, the bytes that the ring formula says, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from railscope.testbed.hosts import Fabric, RailCounters, TestbedError
from railscope.testbed.job import Job, JobOptions, Moments, RankReport, SkippedCall
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric]

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 60
EVERY_OP = {
    *("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"),
    *("AllToAll", "Gather", "Scatter", "Send", "Recv"),
}


def run(fabric: Fabric, options: JobOptions) -> tuple[RankReport, ...]:
    with Job(fabric.hosts, options) as job:
        return job.wait(WAIT_SECONDS)


def check_reports(reports: tuple[RankReport, ...], nranks: int) -> None:
    assert [report.rank for report in reports] == list(range(nranks))
    for report in reports:
        assert report.verified
        assert report.errors == ()
        assert not report.interrupted
        assert len(report.communicators[0].hash) == 16
    worlds = {report.communicators[0].hash for report in reports}
    assert len(worlds) == 1
    by_comm: dict[str, list[int]] = {}
    for comm in (comm for report in reports for comm in report.communicators):
        by_comm.setdefault(comm.hash, []).append(comm.rank)
        assert comm.nranks <= nranks
    for hash_, ranks in by_comm.items():
        nranks_of = {comm.nranks for report in reports for comm in report.communicators if comm.hash == hash_}
        assert [sorted(ranks)] == [list(range(count)) for count in nranks_of]


@pytest.mark.parametrize(
    ("pattern", "iterations", "ops"),
    [
        ("ddp", 2, {"AllReduce"}),
        ("tensor-parallel", 2, {"AllReduce", "AllGather", "ReduceScatter"}),
        ("moe", 20, {"Send", "Recv", "AllToAll"}),
        ("inference", 5, {"AllReduce"}),
        ("mixed", 40, EVERY_OP),
        ("idle", 3, set()),
    ],
)
def test_every_pattern_gets_right_results(two_hosts: Fabric, pattern: str, iterations: int, ops: set[str]) -> None:
    reports = run(two_hosts, JobOptions(pattern, iterations=iterations, seed=7))
    check_reports(reports, 2)
    assert [report.host for report in reports] == ["host0", "host1"]
    for report in reports:
        assert set(report.totals()) == ops
        assert report.calls == sum(total.calls for total in report.totals().values())


def test_ddp_counts_what_it_says(two_hosts: Fabric) -> None:
    (operation,) = run(two_hosts, JobOptions("ddp", iterations=2))[0].communicators[0].operations
    assert (operation.op, operation.dtype, operation.calls) == ("AllReduce", "float32", 6)
    assert operation.payload_bytes == 2 * (1 + 25 + 25) * 2**20


@pytest.mark.parametrize("pattern", ["tensor-parallel", "moe", "mixed"])
def test_four_hosts_get_right_results(four_hosts: Fabric, pattern: str) -> None:
    check_reports(run(four_hosts, JobOptions(pattern, iterations=1 if pattern == "tensor-parallel" else 12)), 4)


@pytest.mark.parametrize("pattern", ["tensor-parallel", "moe", "mixed"])
def test_two_ranks_a_host_get_right_results(two_hosts: Fabric, pattern: str) -> None:
    iterations = 1 if pattern == "tensor-parallel" else 12
    reports = run(two_hosts, JobOptions(pattern, iterations=iterations, ranks_per_host=2))
    check_reports(reports, 4)
    assert [report.host for report in reports] == ["host0", "host0", "host1", "host1"]


def test_three_ranks_share_what_does_not_divide_evenly(four_hosts: Fabric) -> None:
    with Job(four_hosts.hosts[:3], JobOptions("mixed", iterations=20)) as job:
        check_reports(job.wait(WAIT_SECONDS), 3)


def sent_by_host(fabric: Fabric, host: int, options: JobOptions) -> tuple[list[RailCounters], tuple[RankReport, ...]]:
    """What one job put on each rail of one host, by the kernel's counters."""
    rails = range(len(fabric.rail_names))
    before = [fabric.counters(host, rail) for rail in rails]
    reports = run(fabric, options)
    after = [fabric.counters(host, rail) for rail in rails]
    return [
        RailCounters(
            end.transmit_bytes - start.transmit_bytes,
            end.receive_bytes - start.receive_bytes,
            end.transmit_packets - start.transmit_packets,
            end.receive_packets - start.receive_packets,
        )
        for start, end in zip(before, after, strict=True)
    ], reports


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 1), (2, 2), (4, 1)])
def test_rails_carry_what_the_ring_formula_says(
    two_hosts: Fabric, four_hosts: Fabric, hosts: int, ranks_per_host: int
) -> None:
    """2(n-1)/n of the payload leaves each host, half on each rail; ranks of one host use no rail between them."""
    fabric, n = (two_hosts if hosts == 2 else four_hosts), hosts * ranks_per_host
    options = JobOptions("inference", iterations=1, bytes=2**20, ranks_per_host=ranks_per_host)
    rails, reports = sent_by_host(fabric, 0, options)
    payload_bytes = reports[0].totals()["AllReduce"].payload_bytes
    assert payload_bytes == 64 * 2**20
    expected_bytes = payload_bytes * 2 * (n - 1) // n
    for rail, counters in enumerate(rails):
        # TCP's and IP's headers and acknowledgements, a few retransmissions; never less than the payload.
        assert expected_bytes / 2 <= counters.transmit_bytes <= expected_bytes / 2 * 1.05
        assert expected_bytes / 2 <= counters.receive_bytes <= expected_bytes / 2 * 1.05
        counted = sum(report.rails[rail].transmit_bytes for report in reports if report.host == "host0")
        assert expected_bytes / 2 <= counted <= expected_bytes / 2 * 1.001


def test_small_operations_stay_on_the_first_rail(two_hosts: Fabric) -> None:
    options = JobOptions("inference", iterations=10, bytes=1024)
    rails, reports = sent_by_host(two_hosts, 0, options)
    assert reports[0].rails[0].transmit_bytes >= 640 * 1024
    assert reports[0].rails[1].transmit_bytes == 0
    assert rails[1].transmit_bytes < 10_000  # the second connection's opening and closing


def test_without_checking_a_job_does_not_claim_to_be_verified(two_hosts: Fabric) -> None:
    reports = run(two_hosts, JobOptions("inference", iterations=1, verify=False))
    assert [report.verified for report in reports] == [False, False]
    assert [report.errors for report in reports] == [(), ()]


def test_ranks_end_together_when_the_time_is_over(two_hosts: Fabric) -> None:
    reports = run(two_hosts, JobOptions("inference", seconds=0.3))
    assert reports[0].calls == reports[1].calls > 0


def test_ranks_told_to_stop_end_at_the_same_iteration(two_hosts: Fabric) -> None:
    before = two_hosts.counters(0, 1).transmit_bytes
    with Job(two_hosts.hosts, JobOptions("mixed", seconds=300)) as job:
        eventually(lambda: two_hosts.counters(0, 1).transmit_bytes > before + 10**6)
        results = job.stop()
    assert [result.exit_status for result in results] == [0, 0]
    reports = [result.report for result in results if result.report is not None]
    check_reports(tuple(reports), 2)
    assert reports[0].totals().keys() == reports[1].totals().keys()


@pytest.mark.parametrize("init_before_start", [False, True])
def test_held_ranks_call_nothing_before_they_are_released(two_hosts: Fabric, init_before_start: bool) -> None:
    options = JobOptions("inference", iterations=1, hold=True, init_before_start=init_before_start)
    before = two_hosts.counters(0, 0).transmit_bytes
    with Job(two_hosts.hosts, options) as job:
        if init_before_start:  # all hellos have gone when the second rail has opened
            eventually(lambda: two_hosts.counters(0, 0).transmit_bytes > before)
        assert job.running()
        job.release()
        check_reports(job.wait(WAIT_SECONDS), 2)
    with Job(two_hosts.hosts, options) as job:
        eventually(lambda: all("railscope-workl" in comm_name(pid) for pid in job.pids))
        results = job.stop()
    for result in results:
        # A rank that had not got as far as minding signals just ends.
        assert result.exit_status == -signal.SIGTERM or (result.report is not None and result.report.calls == 0)


def comm_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def pids_in(fabric: Fabric) -> list[str]:
    return [
        pid
        for host in fabric.hosts
        for pid in subprocess.run(
            ["ip", "netns", "pids", host.namespace], check=True, capture_output=True, text=True
        ).stdout.split()
    ]


def test_a_killed_rank_fails_the_job_and_leaves_no_process(two_hosts: Fabric) -> None:
    with Job(two_hosts.hosts, JobOptions("inference", seconds=300, ranks_per_host=2)) as job:
        before = two_hosts.counters(0, 0).transmit_bytes
        eventually(lambda: two_hosts.counters(0, 0).transmit_bytes > before + 10**6)
        os.kill(job.pids[2], signal.SIGKILL)
        with pytest.raises(TestbedError, match=r"rank \d ended with status"):
            job.wait(WAIT_SECONDS)
        eventually(lambda: not job.running())  # the others notice by themselves
        survivors = [result for result in job.results() if result.rank != 2]
    for result in survivors:
        assert result.exit_status == 1
        assert result.report is not None
        assert result.report.errors
        assert not result.report.verified
    assert pids_in(two_hosts) == []


def test_a_stopped_rank_stalls_the_job_and_ends_with_it(two_hosts: Fabric) -> None:
    with Job(two_hosts.hosts, JobOptions("ddp", seconds=300)) as job:
        before = two_hosts.counters(0, 0).transmit_bytes
        eventually(lambda: two_hosts.counters(0, 0).transmit_bytes > before + 10**6)
        os.kill(job.pids[1], signal.SIGSTOP)
        os.kill(job.pids[0], signal.SIGTERM)  # only rank 0: it waits in vain and says so
        eventually(lambda: job.results()[0].exit_status is not None)
        first = job.results()[0]
        assert first.exit_status == 3
        assert first.report is not None
        assert first.report.interrupted
        assert job.running()
    assert pids_in(two_hosts) == []


def test_a_job_survives_a_rail_that_is_down_for_a_moment(two_hosts: Fabric) -> None:
    with Job(two_hosts.hosts, JobOptions("tensor-parallel", iterations=4)) as job:
        before = two_hosts.counters(0, 1).transmit_bytes
        eventually(lambda: two_hosts.counters(0, 1).transmit_bytes > before + 10**6)
        two_hosts.set_link(0, 1, up=False)
        time.sleep(0.1)
        two_hosts.set_link(0, 1, up=True)
        check_reports(job.wait(WAIT_SECONDS), 2)


def test_ranks_die_with_whoever_started_them(two_hosts: Fabric, tmp_path: Path) -> None:
    program = """
import sys, time
from railscope.testbed.hosts import Host
from railscope.testbed.job import Job, JobOptions
host = Host(0, sys.argv[1], ("rail0", "rail1"), ("10.77.0.1", "10.77.1.1"))
with Job([host], JobOptions("inference", seconds=300, ranks_per_host=2)) as job:
    print(*job.pids, flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", program, two_hosts.hosts[0].namespace]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # what it cannot remove shall not stay
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        eventually(lambda: all("railscope-workl" in comm_name(pid) for pid in pids))
        starter.kill()
    assert len(pids) == 2
    eventually(lambda: pids_in(two_hosts) == [])


def test_a_job_that_takes_too_long_says_so(two_hosts: Fabric) -> None:
    with (
        Job(two_hosts.hosts, JobOptions("idle", seconds=300)) as job,
        pytest.raises(TestbedError, match="did not end within"),
    ):
        job.wait(0.05)
    assert pids_in(two_hosts) == []


def test_elements_that_packets_cut_in_two_are_put_together() -> None:
    with Fabric(hosts=2, rails=2) as fabric:
        for host in fabric.hosts:
            for rail in host.rails:  # an odd number of bytes a segment
                subprocess.run(["ip", "-n", host.namespace, "link", "set", rail, "mtu", "1401"], check=True)
        check_reports(run(fabric, JobOptions("inference", iterations=2, bytes=2**20)), 2)
        check_reports(run(fabric, JobOptions("mixed", iterations=20)), 2)


def small(**settings: Any) -> JobOptions:
    """One small AllReduce an iteration."""
    return JobOptions("inference", bytes=4096, calls=1, **settings)


def test_a_pause_after_every_few_iterations_makes_the_job_longer(two_hosts: Fabric) -> None:
    (report, _) = run(two_hosts, small(iterations=6, pause=Moments(every=2, milliseconds=200)))
    assert report.calls == 6
    assert 0.6 <= report.seconds < 5


def test_a_pace_is_kept(two_hosts: Fabric) -> None:
    (report, _) = run(two_hosts, small(iterations=20, pace_us=20_000))
    assert report.seconds >= 0.4


def test_at_a_checkpoint_the_first_rank_works_and_the_others_wait_for_it(two_hosts: Fabric) -> None:
    with Job(two_hosts.hosts, small(iterations=3, batch=3, checkpoint=Moments(every=2, milliseconds=4000))) as job:
        # A quarter of what it works, for a machine that is busy otherwise.
        eventually(lambda: cpu_ticks(job.pids[0]) > 100)
        waiting = cpu_ticks(job.pids[1])
        reports = job.wait(WAIT_SECONDS)
        check_reports(reports, 2)
    assert waiting < 50
    assert all(report.seconds >= 4 for report in reports)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_last_rank_comes_late_to_a_job_that_warms_up(two_hosts: Fabric) -> None:
    reports = run(two_hosts, small(iterations=2, warm_up_ms=400))
    assert reports[0].seconds >= 0.4
    assert reports[1].seconds >= 0.4  # it began to count before it came late


def test_a_rank_that_skips_a_call_leaves_its_peers_waiting(two_hosts: Fabric) -> None:
    options = small(seconds=60, batch=1000, pace_us=1000, skip=SkippedCall(rank=1, iteration=10))
    with Job(two_hosts.hosts, options) as job:
        eventually(lambda: waits_for_ever(job.pids[1]))
        results = job.stop()
    first, second = (result.report for result in results)
    assert first is not None
    assert second is not None
    assert (first.calls, second.calls) == (11, 10)


def waits_for_ever(pid: int) -> bool:
    return Path(f"/proc/{pid}/syscall").read_text().startswith("34 ")  # pause


def test_a_rank_that_lingers_outlives_the_call_that_failed(two_hosts: Fabric) -> None:
    with Job(two_hosts.hosts, small(seconds=60, batch=1000, linger=True, pace_us=1000)) as job:
        eventually(lambda: "railscope-workl" in comm_name(job.pids[0]))
        # More than it takes to make a communicator, for which the other waits a minute.
        eventually(lambda: two_hosts.counters(0, 0).transmit_bytes > 100_000)
        os.kill(job.pids[1], signal.SIGKILL)
        eventually(lambda: job.results()[0].report is not None)
        first = job.results()[0]
        assert first.exit_status is None
        assert first.report is not None
        assert first.report.errors
        assert waits_for_ever(job.pids[0])


def test_a_job_may_leave_without_taking_its_communicator_apart(two_hosts: Fabric) -> None:
    check_reports(run(two_hosts, small(iterations=3, destroy=False)), 2)


def test_a_large_batch_puts_no_agreement_between_iterations(two_hosts: Fabric) -> None:
    """A rank that is told to end answers at the next agreement: with a large batch there is none in time."""
    with Job(two_hosts.hosts, small(seconds=60, batch=10**9, pace_us=1000)) as job:
        eventually(lambda: all("railscope-workl" in comm_name(pid) for pid in job.pids))
        time.sleep(0.3)
        results = job.stop()
    assert 3 in {result.exit_status for result in results}  # the other may first see its peer go
