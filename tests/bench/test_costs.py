"""The bench's reading of what it measured: shares of a core, beats, run times, collections, calibrations."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from railscope.probes.loading.calibration import OPERATION_NS, PROGRAM_NS, REFERENCE_TRAP_NS, Calibration, Source
from tests.bench import collection_cost, program_cost
from tests.bench.cpu_time import ThreadTime, cpu_seconds, process_time, thread_time
from tests.bench.foreign_probes import require_no_probes
from tests.bench.nccl_cost import require_hits
from tests.bench.probe_cost import accounting, empty_probe
from tests.bench.results import Figure, Line, Omission
from tests.bench.run_times import RunTime, counted, program_ids, run_times
from tests.bench.sampler_cost import Beats
from tests.bench.target import BenchError, Target, build

REFERENCE = Calibration(REFERENCE_TRAP_NS, Source.MEASURED)


def figures(lines: list[Line]) -> dict[str, Figure]:
    """By the first word of their names."""
    return {line.name.split(",")[0]: line for line in lines if isinstance(line, Figure)}


def test_a_process_clock_is_what_the_kernel_accounts_to_it() -> None:
    before = process_time(os.getpid()).cpu_ns
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert process_time(os.getpid()).cpu_ns - before >= 50_000_000
    assert abs(process_time(os.getpid()).cpu_ns / 1e9 - cpu_seconds(os.getpid())) < 0.1
    with pytest.raises(OSError, match="Invalid argument"):
        process_time(2**22 + 1)


def test_a_share_is_cpu_time_over_time() -> None:
    before, after = ThreadTime(1_000, 5_000), ThreadTime(1_600, 15_000)
    assert after.core_percent(before) == pytest.approx(6.0)


def test_the_time_of_a_thread_is_its_own() -> None:
    ending = threading.Event()
    idle = threading.Thread(target=ending.wait)
    idle.start()
    try:
        before = thread_time(idle)
        while time.thread_time_ns() < 20_000_000:
            pass
        assert thread_time(idle).cpu_ns - before.cpu_ns < 10_000_000
    finally:
        ending.set()
        idle.join()


def test_beats_without_a_reading_are_of_all_beats_since_then() -> None:
    at = ThreadTime(0, 0)
    assert Beats(at, 1_100, 15).without_percent(Beats(at, 110, 5)) == pytest.approx(1.0)


def test_a_collection_is_summed_up_round_by_round() -> None:
    processor = {"processor time": 7.0}
    usual = [{"RDMA": 1.0, "NVLink": 9.0}, {"RDMA": 8.0, "NVLink": 2.0}, {"RDMA": 15.0, "NVLink": 15.0}]
    learning_anew = {"RDMA": 40.0, "NVLink": 2.0}
    lines = collection_cost.lines_of([each | processor for each in usual], [learning_anew | processor])
    found = [(line.median, line.verdict) for line in lines if isinstance(line, Figure)]
    assert found[:2] == [(10.0, "met"), (30.0, "MISSED")]
    assert [median for median, _ in found[2:5]] == [8.0, 9.0, 7.0]
    assert found[5] == (42.0, "MISSED")
    assert [median for median, _ in found[6:]] == [40.0, 2.0, 7.0]


def test_a_program_costs_what_it_ran_beyond_one_that_does_nothing() -> None:
    jobs = [{"collective_sess": RunTime(100, 70_000)}, {"collective_sess": RunTime(100, 90_000)}]
    calls = figures(program_cost.lines_of(jobs, 60.0, REFERENCE))["calls"]
    assert (calls.median, calls.samples, calls.name) == (740.0, 2, "calls, 200 hits")
    assert calls.note == f"assumed: {PROGRAM_NS['calls']:.0f}"


def test_what_is_assumed_of_posting_grows_with_the_operations_of_a_post() -> None:
    jobs = [{"proxy_post": RunTime(100, 300_000), "proxy_stop": RunTime(400, 400_000)}]
    post = figures(program_cost.lines_of(jobs, 0.0, REFERENCE))["proxy_post"]
    assert post.note == f"assumed: {PROGRAM_NS['proxy_post'] + 4 * OPERATION_NS:.0f}, for 4.0 operations each"


def test_entries_of_an_agent_with_pairs_are_not_taken_for_those_of_sessions() -> None:
    pair = {"collective_entr": RunTime(100, 1), "collective_retu": RunTime(100, 20_000)}
    found = figures(program_cost.lines_of([pair], 0.0, REFERENCE))
    assert "calls" not in found
    assert found["returns"].median == 200.0


def test_where_there_are_no_sessions_entries_are_calls() -> None:
    found = figures(program_cost.lines_of([{"collective_entr": RunTime(100, 50_000)}], 0.0, REFERENCE))
    assert found["calls"].median == 500.0


def test_every_program_that_has_a_cost_is_measured_or_said_to_be_missing() -> None:
    named = {line.name for line in program_cost.lines_of([], 0.0, REFERENCE)}
    assert named == set(PROGRAM_NS)
    assert all(isinstance(line, Omission) for line in program_cost.lines_of([], 0.0, REFERENCE))


def test_only_descriptors_of_programs_count(tmp_path: Path) -> None:
    (tmp_path / "fd").mkdir()
    (tmp_path / "fdinfo").mkdir()
    for number, target, info in (
        ("3", "anon_inode:bpf-prog", "pos:\t0\nprog_type:\t2\nprog_id:\t77\n"),
        ("4", "anon_inode:bpf-prog", "prog_id:\t77\n"),
        ("5", "anon_inode:bpf-map", "map_id:\t5\nprog_id:\t5\n"),
        ("6", "anon_inode:bpf-prog", None),
    ):
        (tmp_path / "fd" / number).symlink_to(target)
        if info is not None:
            (tmp_path / "fdinfo" / number).write_text(info)
    assert program_ids(tmp_path) == {77}


@pytest.mark.root
def test_the_kernel_tells_how_often_a_program_ran(tmp_path: Path) -> None:
    built = build(tmp_path)
    with Target(built, "counted") as target, empty_probe(built, target.library, target.points()):
        with counted():
            target.call(100)
        target.call(100)
        taken = run_times(os.getpid())["empty"]
    assert taken.runs == 100, "while nobody counts, nothing is counted"
    assert taken.nanoseconds > 0
    assert "empty" not in run_times(os.getpid())


@pytest.mark.root
def test_nothing_is_measured_where_somebody_else_has_probes_attached(tmp_path: Path) -> None:
    built = build(tmp_path)
    own = tmp_path / "proc"
    own.mkdir()
    (own / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    (own / "self").symlink_to("/proc/self")
    require_no_probes(own)
    with Target(built, "probed") as target, accounting(target, None):
        with pytest.raises(BenchError, match=rf"\(pid {os.getpid()}\) has probes attached.*: end it first"):
            require_no_probes(own)
    require_no_probes(own)


@pytest.mark.root
def test_a_job_that_does_not_run_into_the_empty_uprobe_is_no_measurement(tmp_path: Path) -> None:
    built = build(tmp_path)
    with (
        Target(built, "idle") as target,
        pytest.raises(BenchError, match="no call of the NCCL job runs into the empty uprobe"),
    ):
        require_hits(partial(empty_probe, built, target.library, target.points()), (target.pid,))
