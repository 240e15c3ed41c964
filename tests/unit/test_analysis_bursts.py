"""The burst calendar.  All jobs and links are simulated."""

from __future__ import annotations

import argparse
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.analysis.bursts.bursts import BurstCalendar, find_bursts
from railscope.agent.analysis.bursts.command import add_bursts_arguments, as_text, run_bursts
from railscope.agent.analysis.bursts.rail_bursts import Aperiodic, Rhythm, chance_probability, find_rhythm
from railscope.agent.dataset.reader import open_dataset
from tests.unit.datasets import BEGAN_NS, JobDataset
from tests.unit.timed_jobs import MS, SECOND, ddp, inference

Bursts = list[tuple[float, float]]
"""Seconds: begin, length."""


def counter(bursts: Bursts, seconds: float, every: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Readings of a running total that grows by 1 GB/s in bursts, and by a little always."""
    chance = np.random.default_rng(7)
    moments = np.arange(0, seconds, every) + chance.uniform(0, every / 5, round(seconds / every))
    total = moments * 1e5
    for begin, length in bursts:
        total += np.clip(moments - begin, 0, length) * 1e9
    return BEGAN_NS + np.rint(moments * 1e9).astype(np.int64), total.astype(np.int64)


def regular(period: float, duty: float, seconds: float, jitter: float = 0.05, seed: int = 1) -> Bursts:
    chance = random.Random(seed)
    bursts, begin = [], 0.1
    while begin < seconds:
        bursts.append((begin, duty * period))
        begin += period * (1 + chance.gauss(0, jitter))
    return bursts


@pytest.mark.parametrize("duty", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_rhythm_of_a_link_is_found_through_jitter(duty: float, seed: int) -> None:
    rhythm = find_rhythm(*counter(regular(0.5, duty, 30, seed=seed), 30))
    assert isinstance(rhythm, Rhythm)
    assert rhythm.period_ns / 1e9 == pytest.approx(0.5, rel=0.03)
    assert rhythm.duty_cycle == pytest.approx(duty, abs=0.05)
    assert rhythm.burst_bytes == pytest.approx(duty * 0.5e9, rel=0.05)
    assert rhythm.bursts_per_period == pytest.approx(1, rel=0.05)
    assert rhythm.regularity > 0.9


def test_several_bursts_in_a_period_are_counted() -> None:
    bursts = [(begin + offset, 0.05) for begin in np.arange(0.1, 30, 1.0).tolist() for offset in (0.0, 0.3)]
    rhythm = find_rhythm(*counter(bursts, 30))
    assert isinstance(rhythm, Rhythm)
    assert rhythm.period_ns / 1e9 == pytest.approx(1.0, rel=0.02)
    assert rhythm.bursts_per_period == pytest.approx(2, rel=0.05)
    assert rhythm.burst_bytes == pytest.approx(0.05e9, rel=0.05)
    assert rhythm.period_bytes == pytest.approx(0.1e9, rel=0.05)


@pytest.mark.parametrize("seed", range(12))
def test_bursts_at_random_have_no_rhythm(seed: int) -> None:
    chance = random.Random(seed)
    bursts, begin = [], 0.0
    while begin < 30:
        begin += chance.expovariate(2)
        bursts.append((begin, chance.expovariate(20)))
    found = find_rhythm(*counter(bursts, 30))
    assert isinstance(found, Aperiodic)
    assert "irregular intervals" in found.reason
    # An exponential time of 50 ms at a time, one each half second.
    assert found.duty_cycle == pytest.approx(sum(took for _, took in bursts) / 30, abs=0.1)


def test_smoothed_noise_has_no_rhythm() -> None:
    # Many bursts lie in each period that noise resembles, so that one of them is always near where one is due.
    given = 0
    for seed in range(30):
        chance = np.random.default_rng(seed)
        rate = np.exp(np.convolve(chance.normal(0, 1, 3000), np.ones(8), "same")) * 1e5
        moments = BEGAN_NS + np.arange(3000) * 100 * MS
        given += isinstance(find_rhythm(moments, np.cumsum(rate).astype(np.int64)), Rhythm)
    assert given == 0


def test_chance_is_that_of_bursts_without_a_rhythm() -> None:
    # One burst a period: three in ten are followed by another one, by chance.
    assert chance_probability(4, 4, 1.0) == pytest.approx(0.3**4)
    assert chance_probability(0, 7, 2.5) == pytest.approx(1.0)
    assert chance_probability(50, 60, 5.0) > 0.1
    assert chance_probability(60, 60, 5.0) < 1e-4
    assert chance_probability(1000, 1000, 1e5) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("bursts", "seconds", "reason"),
    [
        ([(0.0, 100.0)], 30, "busy whenever it is read"),
        (regular(0.5, 0.3, 30), 0.2, "record "),
        (regular(12.0, 0.3, 30), 30, "irregular intervals"),
        ([(10.0, 1.0)], 30, "all its traffic passed in one burst"),
    ],
)
def test_what_has_no_rhythm_says_why(bursts: Bursts, seconds: float, reason: str) -> None:
    found = find_rhythm(*counter(bursts, seconds))
    assert not isinstance(found, Rhythm)
    assert reason in (found if isinstance(found, str) else found.reason)


def test_a_silent_link_says_so() -> None:
    moments = BEGAN_NS + np.arange(100) * MS
    assert find_rhythm(moments, np.full(100, 12345)) == "nothing passed"


def test_a_counter_that_began_anew_loses_no_rhythm() -> None:
    moments, total = counter(regular(0.5, 0.3, 30, jitter=0), 30)
    total[len(total) // 2 :] -= total[len(total) // 2]
    rhythm = find_rhythm(moments, total)
    assert isinstance(rhythm, Rhythm)
    assert rhythm.period_ns / 1e9 == pytest.approx(0.5, rel=0.02)


def steps(period: float, duty: float, seconds: float, every: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """Even readings of a link that sends 1 GB/s in the first part of each period, and nothing else."""
    moments = np.arange(0, seconds, every)
    whole, part = np.divmod(moments + period / 3, period)
    total = (whole * duty * period + np.minimum(part, duty * period)) * 1e9
    return BEGAN_NS + np.rint(moments * 1e9).astype(np.int64), np.rint(total).astype(np.int64)


@pytest.mark.parametrize("missing_seconds", [5, 60, 3600])
def test_a_gap_in_the_readings_is_no_silence(missing_seconds: int) -> None:
    # Readings that failed, or a clock that was set; nobody knows when what passed meanwhile did so.
    moments, total = steps(1.0, 0.3, 20)
    moments[800:] += missing_seconds * SECOND
    rhythm = find_rhythm(moments, total)
    assert isinstance(rhythm, Rhythm)
    assert rhythm.duty_cycle == pytest.approx(0.3, abs=0.02)
    assert rhythm.period_bytes == pytest.approx(0.3e9, rel=0.02)
    assert rhythm.bursts_per_period == pytest.approx(1, rel=0.02)
    assert rhythm.gaps == 1
    assert rhythm.span_ns / 1e9 == pytest.approx(12, abs=0.02)
    assert rhythm.last_begin_ns > moments[-1] - 1.1 * SECOND


def test_pieces_between_gaps_that_are_all_too_short_are_said_to_be() -> None:
    moments, total = steps(1.0, 0.3, 20)
    moments += np.arange(len(moments)) // 30 * 60 * SECOND
    assert find_rhythm(moments, total) == (
        "it was read 30 times between 66 gaps, and 32 are needed: record at least "
        f"{32 * float(np.median(np.diff(moments))) / 1e9:.3g} s without a gap"
    )


@pytest.mark.parametrize("duty", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("readings", [10, 14, 40])
def test_slots_that_a_burst_fills_in_part_do_not_make_it_longer(duty: float, readings: int) -> None:
    rhythm = find_rhythm(*steps(readings * 0.01003, duty, 20))
    assert isinstance(rhythm, Rhythm)
    assert rhythm.duty_cycle == pytest.approx(duty, abs=0.03)


def test_a_burst_that_is_mostly_short_gaps_is_as_long_as_it_takes() -> None:
    # Three blips of a reading each, 200 ms apart, begin each period of 5 s.
    bursts = [(begin + offset, 0.01) for begin in np.arange(0.5, 60, 5.0).tolist() for offset in (0.0, 0.2, 0.4)]
    rhythm = find_rhythm(*counter(bursts, 60))
    assert isinstance(rhythm, Rhythm)
    assert rhythm.bursts_per_period == pytest.approx(1, rel=0.01)
    assert rhythm.duty_cycle == pytest.approx(0.41 / 5, abs=0.005)


@pytest.mark.parametrize(("readings", "duty"), [(3, 0.5), (4, 0.3), (5, 0.5), (6, 0.5), (8, 0.85)])
def test_too_few_readings_for_a_burst_are_said_to_be(readings: int, duty: float) -> None:
    found = find_rhythm(*steps(readings * 0.01, duty, 20))
    assert isinstance(found, str)
    assert "--rail.sample-interval" in found or "busy whenever it is read" in found


@pytest.mark.parametrize("seconds", [30.2, 31.5, 32.9])
def test_figures_are_of_whole_periods(seconds: float) -> None:
    rhythm = find_rhythm(*steps(3.0, 0.6, seconds))
    assert isinstance(rhythm, Rhythm)
    assert rhythm.duty_cycle == pytest.approx(0.6, rel=0.01)
    assert rhythm.period_bytes == pytest.approx(1.8e9, rel=0.01)
    assert rhythm.burst_bytes == pytest.approx(1.8e9, rel=0.01)
    assert rhythm.bursts_per_period == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("seconds", [10.1, 10.5, 10.8])
def test_of_unlike_bursts_in_a_period_as_many_of_each_count(seconds: float) -> None:
    large = steps(1.0, 0.2, seconds)
    small = steps(1.0, 0.1, seconds + 0.5)
    total = large[1] + small[1][50:]
    rhythm = find_rhythm(large[0], total)
    assert isinstance(rhythm, Rhythm)
    assert rhythm.bursts_per_period == pytest.approx(2, rel=0.01)
    assert rhythm.period_bytes == pytest.approx(0.3e9, rel=0.01)
    assert rhythm.duty_cycle == pytest.approx(0.3, abs=0.01)


def two_jobs(
    folder: Path, second: Callable[[int], int], *, period: int = 400 * MS, own: int = 400 * MS
) -> BurstCalendar:
    """Two jobs on one server that send 100 ms of each period; `second` is when the second one's iterations begin."""
    job = JobDataset(folder, (4,))
    job.communicator("one", (0, 1), job="alpha")
    job.communicator("two", (2, 3), job="beta")
    for comm, begins in (("one", lambda number: number * own), ("two", second)):
        for iteration in range(30 * own // (own if comm == "one" else period)):
            for place, size in enumerate((1, 2)):
                at = begins(iteration) + place * 50 * MS
                for rank in range(2):
                    job.call(comm, rank, "AllReduce", size << 20, time_ns=BEGAN_NS + at)
                    job.operation(comm, rank, "AllReduce", size << 20, at, 50 * MS, source="cuda")
    return find_bursts(job.open())


def test_jobs_that_send_at_the_same_time_are_told_how_to_avoid_it(tmp_path: Path) -> None:
    calendar = two_jobs(tmp_path, lambda number: number * 400 * MS + 50 * MS)
    assert [job.subject for job in calendar.jobs] == ["alpha", "beta"]
    for job in calendar.jobs:
        assert job.period_seconds == pytest.approx(0.4)
        assert job.duty_cycle == pytest.approx(0.25)
        assert job.period_bytes == 3 << 20
        assert job.regularity == 1.0
    (forecast,) = calendar.forecasts
    assert forecast.servers == ("node-0",)
    assert forecast.coincidence == pytest.approx(50 / 400, abs=0.01)
    assert forecast.unrelated == pytest.approx(1 / 16)
    assert forecast.coincidence_shifted == 0
    assert forecast.shift_seconds == pytest.approx(0.150, abs=0.005)  # from 50 ms behind to half a period behind
    assert forecast.holds_seconds is None


def test_periods_of_one_to_two_keep_their_distance(tmp_path: Path) -> None:
    calendar = two_jobs(tmp_path, lambda number: number * 200 * MS, period=200 * MS)
    (forecast,) = calendar.forecasts
    # The second one sends in every half of the time, the first one in a quarter, always together.
    assert forecast.coincidence == pytest.approx(0.25, abs=0.01)
    assert forecast.coincidence_shifted == pytest.approx(0.0, abs=0.01)
    assert forecast.shift_seconds is not None
    assert forecast.shift_seconds % 0.2 == pytest.approx(0.1, abs=0.01)


def test_other_periods_drift_and_no_shift_helps(tmp_path: Path) -> None:
    calendar = two_jobs(tmp_path, lambda number: number * 290 * MS, period=290 * MS)
    (forecast,) = calendar.forecasts
    assert forecast.coincidence is None
    assert forecast.shift_seconds is None
    assert forecast.unrelated == pytest.approx(100 / 400 * 100 / 290, abs=0.01)


def test_nearly_equal_periods_hold_for_a_while(tmp_path: Path) -> None:
    calendar = two_jobs(tmp_path, lambda number: number * 404 * MS, period=404 * MS)
    (forecast,) = calendar.forecasts
    # 4 ms a period of 400 ms: a twentieth of it, 20 ms, after five periods.
    assert forecast.holds_seconds == pytest.approx(2.0)


def test_jobs_without_a_name_are_told_apart_by_their_gpus(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4,))
    for comm, gpus in (("one", (0, 1)), ("also-one", (0, 1)), ("two", (2, 3))):
        job.communicator(comm, gpus)
        for iteration in range(6):
            job.call(comm, 0, "AllReduce", 1 << 20, time_ns=BEGAN_NS + iteration * SECOND)
    calendar = find_bursts(job.open())
    assert [one.subject for one in calendar.jobs] == ["job (GPUs 0–1)", "job (GPUs 2–3)"]
    assert all(one.duty_cycle is None for one in calendar.jobs)  # calls have no duration
    assert all(one.basis == "moments of calls" for one in calendar.jobs)
    assert not calendar.forecasts  # nobody knows how long they send
    assert as_text(calendar).count("no operation has times, so its sending time is unknown") == 2


def test_each_job_is_called_by_its_own_gpus_also_where_they_alternate(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4,))
    drawn = random.Random(1)
    for comm, gpus in (("regular", (0, 2)), ("random", (1, 3))):
        job.communicator(comm, gpus)
        for iteration in range(30):
            moment = iteration * SECOND if comm == "regular" else drawn.randrange(30 * SECOND)
            op = "AllReduce" if comm == "regular" else drawn.choice(["AllReduce", "Broadcast", "Reduce"])
            job.call(comm, 0, op, 1 << 20 if comm == "regular" else drawn.randrange(1 << 20), time_ns=BEGAN_NS + moment)
    calendar = find_bursts(job.open())
    assert [one.subject for one in calendar.jobs] == ["job (GPUs 0, 2)"]
    (declined,) = calendar.declined
    assert declined.subject == "job (GPUs 1, 3)"
    assert declined.reason.startswith("The 30 calls of GPU 1 (")


def test_aperiodic_traffic_has_no_calendar(tmp_path: Path) -> None:
    calendar = find_bursts(inference(tmp_path).open())
    assert calendar.jobs == ()
    assert [one.subject for one in calendar.declined] == ["job (GPUs 0–1)"]
    assert "there is no period" in calendar.declined[0].reason
    assert calendar.declined[0].duty_cycle is None


def test_without_a_period_it_is_told_how_much_of_the_time_a_rail_and_a_job_send(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("aa", (0, 1))
    chance = random.Random(4)
    begins = sorted(chance.randrange(20 * SECOND) for _ in range(40))
    for begin in begins:
        job.call("aa", 0, chance.choice(("AllReduce", "Reduce")), chance.randrange(1 << 20), time_ns=BEGAN_NS + begin)
        job.operation("aa", 0, "AllReduce", 1 << 20, begin, 50 * MS, source="proxy")
    moments, total = counter([(begin / SECOND, 0.05) for begin in begins], 20)
    job.row(0, "rails", rail_id=0, rail="0", device="rail0")
    for moment, count in zip(moments.tolist(), total.tolist(), strict=True):
        job.row(0, "rail_samples", rail_id=0, time_ns=moment, transmit_bytes=count, receive_bytes=0)
    calendar = find_bursts(job.open())
    rail, declined = calendar.declined
    assert (rail.subject, declined.subject) == ("node-0 rail0 (rail 0) transmit", "job (GPUs 0–1)")
    busy = sum(min(50 * MS, after - begin) for begin, after in zip(begins, [*begins[1:], 1 << 62], strict=True))
    assert declined.duty_cycle == pytest.approx(busy / (begins[-1] + 50 * MS - begins[0]), rel=0.01)
    assert rail.duty_cycle == pytest.approx(busy / (20 * SECOND), rel=0.2)
    assert rail.bursts is not None
    assert 30 <= rail.bursts <= 40
    assert re.search(r"it sends \d+% of the time, in \d+ bursts of .* \(median\)", as_text(calendar))


def test_times_that_only_tell_the_order_make_no_calendar(tmp_path: Path) -> None:
    job = with_rail(tmp_path)
    job.recording["times_known"] = False
    calendar = find_bursts(job.open())
    assert not calendar.rails
    assert not calendar.jobs
    assert len(calendar.declined) == 3
    assert all("has no times, only an order" in one.reason for one in calendar.declined)


def test_a_recorded_name_cannot_give_orders_to_the_terminal(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("one", (0, 1), job="al\x1b[2Jpha")
    for iteration in range(6):
        job.call("one", 0, "AllReduce", 1 << 20, time_ns=BEGAN_NS + iteration * SECOND)
    assert "\n  al�[2Jpha: every 1 s" in as_text(find_bursts(job.open()))


def with_rail(folder: Path, shuffle: int | None = None) -> JobDataset:
    job = ddp(folder, iterations=20, shuffle=shuffle)
    moments, total = counter(regular(0.5, 0.2, 10), 10)
    for rail in (0, 1):
        job.row(0, "rails", rail_id=rail, rail=str(rail), device=f"mlx5_{rail}", speed_bytes_per_second=50_000_000_000)
        for moment, count in zip(moments.tolist(), total.tolist(), strict=True):
            row = {"rail_id": rail, "time_ns": moment, "transmit_bytes": 5, "receive_bytes": 5 if rail else count}
            job.row(0, "rail_samples", **row)
    return job


def test_a_rail_says_of_which_readings_its_figures_are_and_leaves_out_those_that_failed(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (1,))
    job.communicator("aa", (0,))
    job.row(0, "rails", rail_id=0, rail="0", device="mlx5_0", speed_bytes_per_second=50_000_000_000)
    moments, total = steps(1.0, 0.3, 20)
    moments[800:] += 60 * SECOND
    for number, (moment, count) in enumerate(zip(moments.tolist(), total.tolist(), strict=True)):
        read = None if number == 1000 else count
        job.row(0, "rail_samples", rail_id=0, time_ns=moment, transmit_bytes=read, receive_bytes=0)
    (rail,) = find_bursts(job.open()).rails
    assert rail.duty_cycle == pytest.approx(0.3, abs=0.02)
    assert rail.basis == (
        "readings of the port's byte counter, which have 1 gap: of the longest piece without any, 12 s"
    )


def test_the_command_shows_rails_jobs_and_what_it_declines(tmp_path: Path) -> None:
    folder = with_rail(tmp_path / "job").write()
    parser = argparse.ArgumentParser()
    add_bursts_arguments(parser)
    out = io.StringIO()
    assert run_bursts(parser.parse_args([str(folder)]), out) == 0
    lines = out.getvalue().splitlines()
    assert lines[0] == "Rails"
    assert lines[1].startswith("  node-0 mlx5_0 (rail 0) receive: every 5")
    assert " duty cycle 2" in lines[1]
    assert lines[3] == "Jobs"
    assert lines[4].startswith("  job (GPUs 0–1): every ")
    assert ", duty cycle –, " in lines[4]
    assert "6.0 bursts" not in lines[4]
    assert lines[6:8] == ["No calendar", "  node-0 mlx5_1 (rail 1): nothing passed"]
    out = io.StringIO()
    assert run_bursts(parser.parse_args(["--json", str(folder)]), out) == 0
    content = json.loads(out.getvalue())
    assert set(content) == {"rails", "jobs", "forecasts", "declined"}
    assert content["rails"][0]["period_seconds"] == pytest.approx(0.5, rel=0.03)


def test_the_order_of_rows_makes_no_difference(tmp_path: Path) -> None:
    plain = find_bursts(with_rail(tmp_path / "plain").open())
    assert find_bursts(with_rail(tmp_path / "shuffled", shuffle=9).open()) == plain


def test_two_jobs_from_two_folders_meet_beyond_their_servers(tmp_path: Path) -> None:
    first = JobDataset(tmp_path / "first", (2,))
    first.communicator("one", (0, 1), job="alpha")
    second = JobDataset(tmp_path / "second", (1, 2), silent_servers=frozenset({0}))
    second.communicator("two", (1, 2), job="beta")
    for job, comm, phase in ((first, "one", 0), (second, "two", 200)):
        for iteration in range(8):
            at = iteration * 400 * MS + phase * MS
            job.call(comm, 0, "AllReduce", 1 << 20, time_ns=BEGAN_NS + at)
            job.operation(comm, 0, "AllReduce", 1 << 20, at, 100 * MS, source="cuda")
    (forecast,) = find_bursts(open_dataset([first.write(), second.write()])).forecasts
    assert (forecast.first, forecast.second, forecast.servers) == ("alpha", "beta", ())
    assert forecast.coincidence == 0
    assert forecast.shift_seconds == pytest.approx(0, abs=0.005)  # it is in the middle of the silence already


def test_a_folder_that_is_no_dataset_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_bursts_arguments(parser)
    assert run_bursts(parser.parse_args([str(tmp_path)]), io.StringIO()) == 2
    assert capsys.readouterr().err.startswith(f"railscope bursts: {tmp_path}: it contains no recorded dataset")
