"""The governor on simulated jobs: hit rates are made up here, and only attached programs run into their probes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.node.overhead.cost import Hits, Interval, cost_ns
from railscope.agent.node.overhead.governor import (
    COMFORT,
    FIRST_WAIT_NS,
    FORGET_AFTER_NS,
    HELD_NS,
    LEVELS,
    LONGEST_WAIT_NS,
    START,
    TICKS_UP,
    Governor,
    Measured,
    available_level,
)
from railscope.probes.loading.calibration import Calibration, Source
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.internals import FUNCTIONS, InternalPoints, Level

CALIBRATION = Calibration(600.0, Source.MEASURED)
SECOND_NS = 1_000_000_000
PROXY = {"proxy_stop", "socket_send", "ib_send"}
LEVEL_OF = {"cuda": Level.ALL, **{function.program: function.level for function in FUNCTIONS}}

LIGHT = Hits(calls=100, proxy_post=100, proxy_stop=800, socket_send=1600, plan_launch=100)
HEAVY = Hits(calls=2000, proxy_post=2000, proxy_stop=16_000, socket_send=32_000, plan_launch=2000)
"""The same job, twenty times as fast."""


def seen(rates: Hits, level: Level) -> Hits:
    """The hits of one second with the programs of `level` attached."""
    missing = {f.name: 0 for f in fields(Hits) if LEVEL_OF.get(f.name, Level.COUNTS) > level}
    return replace(rates, **missing)


def load(rates: Hits, level: Level, processes: int = 1, busy_factor: float = 1.0) -> float:
    """What the governor has to find: the worse of two kinds of threads."""
    costs = cost_ns(seen(rates, level), CALIBRATION)
    proxy = sum(cost for program, cost in costs.items() if program in PROXY)
    return max(proxy, sum(costs.values()) - proxy) / SECOND_NS / processes * busy_factor


@dataclass
class Job:
    """A job on a host whose libraries have probes up to `available`."""

    governor: Governor
    rates: Hits
    processes: int = 1
    available: Level = Level.ALL
    busy_factor: float = 1.0
    lowest: Level = Level.COUNTS

    def tick(self) -> Level:
        interval = Interval(SECOND_NS, seen(self.rates, self.governor.allowed_level(self.available)))
        unprobed = self.rates.calls - interval.hits.calls
        return self.governor.decide(
            Measured(interval, self.processes, self.available, self.busy_factor, self.lowest, unprobed)
        )

    def ticks(self, number: int) -> list[Level]:
        return [self.tick() for _ in range(number)]


def changes(levels: list[Level]) -> int:
    return sum(before is not after for before, after in pairwise(levels))


def rates() -> st.SearchStrategy[Hits]:
    """Constant rates over six decades, also without calls (graph replays) and without network."""
    number = st.one_of(st.just(0), st.integers(1, 1_000_000), st.integers(1, 3000))
    return st.builds(Hits, **{f.name: number for f in fields(Hits)})


budgets = st.floats(0.0005, 1.0)


def test_a_usual_job_shows_completion_and_rails_from_its_first_second() -> None:
    job = Job(Governor(CALIBRATION), LIGHT)
    assert job.governor.level is Level.RAILS
    assert min(job.ticks(60)) >= Level.RAILS


def test_what_costs_too_much_is_given_up_step_by_step_and_counts_stay() -> None:
    levels = Job(Governor(CALIBRATION), HEAVY).ticks(20)
    assert levels[-1] is Level.COUNTS
    assert all(before - after <= 1 for before, after in pairwise([START, *levels]))


def test_one_tick_far_over_the_budget_is_enough() -> None:
    job = Job(Governor(CALIBRATION), HEAVY)
    assert load(HEAVY, Level.RAILS) > 0.04
    assert job.tick() is Level.COMPLETION


def test_what_is_far_over_the_budget_without_rails_too_is_given_up_together_with_them() -> None:
    frantic = Hits(calls=20_000, proxy_post=20_000, proxy_stop=80_000, socket_send=80_000, plan_launch=20_000)
    assert load(frantic, Level.COMPLETION) > 0.04
    job = Job(Governor(CALIBRATION), frantic)
    assert job.tick() is Level.COUNTS
    assert job.governor.reason.startswith("rails to counts: ")
    job.rates = LIGHT
    assert max(job.ticks(FIRST_WAIT_NS // SECOND_NS - 1)) is Level.COUNTS, "completion was taken back too, and waits"
    assert job.ticks(120)[-1] >= Level.RAILS


FRANTIC = Hits(calls=100_000, proxy_post=100_000, proxy_stop=100_000)


def test_exact_counts_are_given_up_last_and_only_where_nccl_numbers_calls() -> None:
    assert load(FRANTIC, Level.COUNTS) > 0.04
    assert Job(Governor(CALIBRATION), FRANTIC).ticks(60)[-1] is Level.COUNTS
    job = Job(Governor(CALIBRATION), FRANTIC, lowest=Level.WATCH)
    levels = job.ticks(10)
    assert levels[-1] is Level.WATCH
    assert levels.count(Level.COUNTS) >= 2, "one tick is not enough"
    assert job.governor.reason.startswith("counts to watch: ")
    assert set(job.ticks(500)) == {Level.WATCH}, "what all its calls would cost is known from those that NCCL numbers"


def test_exact_counts_are_worth_more_than_the_budget() -> None:
    busy = Hits(calls=20_000)
    assert 0.01 < load(busy, Level.COUNTS) < 0.04
    job = Job(Governor(CALIBRATION), busy, lowest=Level.WATCH)
    assert job.ticks(60)[-1] is Level.COUNTS
    assert job.governor.is_stable


def test_exact_counts_come_back_once_the_job_calls_seldom_enough() -> None:
    job = Job(Governor(CALIBRATION), FRANTIC, lowest=Level.WATCH)
    job.ticks(20)
    job.rates = LIGHT
    back = job.ticks(FIRST_WAIT_NS // SECOND_NS + 2 * TICKS_UP)
    assert back[0] is Level.WATCH
    assert back[-1] >= Level.COUNTS


def test_what_counting_costs_is_learnt_anew_each_time_that_calls_are_counted_for_a_moment() -> None:
    job = Job(Governor(CALIBRATION), FRANTIC, lowest=Level.WATCH)
    job.ticks(20)
    for _ in range(20):
        job.ticks(60)
        measured = Measured(Interval(SECOND_NS, seen(FRANTIC, Level.COUNTS)), 1, Level.ALL, 1.0, Level.WATCH)
        assert job.governor.decide(measured) is Level.WATCH


def test_a_person_may_choose_to_watch_where_that_can_be_done() -> None:
    job = Job(Governor(CALIBRATION, fixed=Level.WATCH), LIGHT)
    assert job.tick() is Level.COUNTS
    job.lowest = Level.WATCH
    assert set(job.ticks(60)) == {Level.WATCH}


def test_one_tick_slightly_over_the_budget_changes_nothing() -> None:
    quiet, loud = LIGHT, replace(LIGHT, socket_send=12_000)
    assert 0.01 < load(loud, Level.RAILS) < 0.02
    job = Job(Governor(CALIBRATION), quiet)
    job.ticks(4)
    job.rates = loud
    job.tick()
    job.rates = quiet
    assert min(job.ticks(5)) >= Level.RAILS


def test_a_busy_proxy_is_not_lent_the_time_of_idle_callers() -> None:
    proxy_alone = Hits(calls=10, socket_send=14_000)
    assert load(proxy_alone, Level.RAILS) > 0.01
    assert sum(cost_ns(proxy_alone, CALIBRATION).values()) / 2 / SECOND_NS < 0.01
    assert Job(Governor(CALIBRATION), proxy_alone).ticks(10)[-1] is Level.COMPLETION


def test_more_processes_have_more_time_to_give() -> None:
    heavy = replace(LIGHT, socket_send=30_000)
    assert Job(Governor(CALIBRATION), heavy, processes=1).ticks(10)[-1] is Level.COMPLETION
    assert Job(Governor(CALIBRATION), heavy, processes=8).ticks(10)[-1] >= Level.RAILS


def test_a_busy_host_gets_fewer_probes_and_gets_them_back() -> None:
    job = Job(Governor(CALIBRATION), of_budget(0.5), busy_factor=3.0)
    assert job.ticks(10)[-1] is Level.COMPLETION
    job.busy_factor = 1.0
    assert job.ticks(60)[-1] < Level.RAILS, "what was busy a minute ago may be busy again"
    assert job.ticks(700)[-1] >= Level.RAILS


def test_a_level_comes_back_when_the_job_calls_less() -> None:
    job = Job(Governor(CALIBRATION), HEAVY)
    assert job.ticks(60)[-1] is Level.COUNTS
    job.rates = LIGHT
    assert job.ticks(120)[-1] >= Level.RAILS


def test_what_replays_of_graphs_cost_is_remembered_though_they_make_no_calls() -> None:
    job = Job(Governor(CALIBRATION), replace(HEAVY, calls=0))
    levels = job.ticks(500)
    assert levels[-1] is Level.COUNTS
    assert changes([START, *levels]) == 2


def test_a_level_that_was_not_measured_for_long_is_tried_again() -> None:
    job = Job(Governor(CALIBRATION), replace(HEAVY, calls=0))
    job.ticks(60)
    job.rates = replace(LIGHT, calls=0)
    assert job.ticks(400)[-1] is Level.COUNTS
    assert job.ticks(400)[-1] >= Level.RAILS


def test_a_job_that_turns_loud_again_and_again_is_tried_less_and_less_often() -> None:
    job = Job(Governor(CALIBRATION), LIGHT)
    hours = []
    for _ in range(3):
        levels = []
        for _ in range(3600 // 120):
            job.rates = HEAVY
            levels += job.ticks(20)
            job.rates = LIGHT
            levels += job.ticks(100)
        hours.append(changes(levels))
    assert hours[0] > 2 * hours[1]
    assert hours[-1] <= 6


def test_waits_double_up_to_an_hour() -> None:
    job = Job(Governor(CALIBRATION), LIGHT)
    downs: list[int] = []
    level = job.governor.level
    for second in range(9_000):
        job.rates = HEAVY if level >= Level.RAILS else LIGHT
        before, level = level, job.tick()
        if before is Level.RAILS and level is Level.COMPLETION:
            downs.append(second)
    waits = [(after - before) * SECOND_NS for before, after in pairwise(downs)]
    for number, wait in enumerate(waits):
        least = min(FIRST_WAIT_NS << number, LONGEST_WAIT_NS)
        assert least <= wait <= least + 40 * SECOND_NS
    assert len(waits) > 6


def test_a_level_set_by_hand_stays_whatever_it_costs() -> None:
    for level in Level:
        job = Job(Governor(CALIBRATION, fixed=level), HEAVY, lowest=Level.WATCH)
        assert set(job.ticks(50)) == {level}
        assert job.governor.load_ratio == pytest.approx(load(HEAVY, level))
        assert job.governor.reason == f"{level.name.lower()}: set by hand"


def test_the_reason_says_from_where_to_where_and_why() -> None:
    job = Job(Governor(CALIBRATION), replace(LIGHT, socket_send=14_000))
    job.ticks(3)
    share = load(job.rates, Level.RAILS)
    assert job.governor.reason == f"rails to completion: {share:.2%} of the observed threads' time, budget 1.00%"
    job = Job(Governor(CALIBRATION), LIGHT)
    job.ticks(10)
    share = load(LIGHT, Level.RAILS)
    assert job.governor.reason == (
        f"rails to all: {share:.2%} of the observed threads' time so far; the cost of the next level is not measured "
        "yet, budget 1.00%"
    )


def test_the_next_job_starts_anew() -> None:
    job = Job(Governor(CALIBRATION), HEAVY)
    assert job.ticks(20)[-1] is Level.COUNTS
    job.processes = 0
    job.rates = Hits()
    assert job.ticks(FORGET_AFTER_NS // SECOND_NS - 1)[-1] is Level.COUNTS
    assert job.tick() is START
    assert job.governor.load_ratio == 0.0
    assert job.governor.reason.startswith("counts to rails: ")


def test_a_library_that_lacks_a_level_does_with_less() -> None:
    governor = Governor(CALIBRATION)
    assert [governor.allowed_level(level) for level in Level] == [
        Level.WATCH,
        Level.COUNTS,
        Level.COMPLETION,
        Level.RAILS,
        Level.RAILS,
    ]


def test_what_becomes_available_is_used_at_once() -> None:
    job = Job(Governor(CALIBRATION), LIGHT, available=Level.COUNTS)
    assert set(job.ticks(20)) == {Level.COUNTS}
    job.available = Level.ALL
    assert job.tick() is START


def test_available_is_the_highest_level_with_probes() -> None:
    point = ProbePoint("f", 0, 0)
    assert available_level(InternalPoints({})) is Level.COUNTS
    assert available_level(InternalPoints({"proxy_post": point, "proxy_stop": point})) is Level.COMPLETION
    assert available_level(InternalPoints({"proxy_post": point})) is Level.COUNTS
    assert available_level(InternalPoints({"ib_send": point})) is Level.RAILS
    assert available_level(InternalPoints({"plan_launch": point})) is Level.ALL


@pytest.mark.parametrize("budget", [0.0, -0.01, 1.5, float("nan")])
def test_a_budget_that_makes_no_sense_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        Governor(CALIBRATION, budget)


def test_levels_have_names() -> None:
    assert list(LEVELS) == ["auto", "watch", "counts", "completion", "rails", "all"]
    assert LEVELS["auto"] is None


ticks_of_any_kind = st.lists(
    st.tuples(
        rates(), st.integers(0, 16), st.sampled_from([*Level][1:]), st.floats(1.0, 3.0), st.integers(0, 90 * SECOND_NS)
    ),
    max_size=60,
)


@settings(deadline=None)
@given(ticks_of_any_kind, budgets)
def test_the_level_is_never_below_counts_nor_above_what_is_available(
    ticks: list[tuple[Hits, int, Level, float, int]], budget: float
) -> None:
    governor = Governor(CALIBRATION, budget)
    for hits, processes, available, busy_factor, elapsed_ns in ticks:
        level = governor.decide(Measured(Interval(elapsed_ns, hits), processes, available, busy_factor))
        assert Level.COUNTS <= level <= available


@settings(max_examples=40, deadline=None)
@given(rates(), budgets, st.integers(1, 16), st.sampled_from([*Level][1:]))
def test_constant_rates_come_to_rest_within_the_budget(
    rate: Hits, budget: float, processes: int, available: Level
) -> None:
    job = Job(Governor(CALIBRATION, budget), rate, processes, available)
    start = job.governor.allowed_level(available)
    first = job.ticks(25)
    rest = job.ticks(275)
    level = rest[-1]
    assert set(rest) == {level}
    assert changes([start, *first, level]) <= 3
    assert level is Level.COUNTS or load(rate, level, processes) <= budget * 1.000001
    # Nothing is given up without need.
    if level < available:
        assert load(rate, Level(level + 1), processes) > COMFORT * budget * 0.999999


@settings(max_examples=40, deadline=None)
@given(rates(), st.integers(1, 16), budgets, budgets)
def test_a_larger_budget_never_shows_less(rate: Hits, processes: int, one: float, other: float) -> None:
    less, more = (Job(Governor(CALIBRATION, budget), rate, processes).ticks(60)[-1] for budget in sorted((one, other)))
    assert less <= more


def test_where_ticks_are_long_a_level_comes_back_after_as_many_seconds() -> None:
    governor = Governor(CALIBRATION, fixed=None)
    job = Job(governor, HEAVY)
    job.ticks(20)
    assert governor.level < Level.ALL
    job.rates = Hits(calls=1)
    waited_ns = 0
    while governor.level < Level.ALL and waited_ns < 4 * LONGEST_WAIT_NS:
        before = governor.level
        interval = Interval(4 * SECOND_NS, seen(job.rates, before))
        governor.decide(Measured(interval, 1, Level.ALL))
        waited_ns += 4 * SECOND_NS
    assert governor.level is Level.ALL
    # Each of the three levels waits no longer than it is left alone, and for the ten seconds that are averaged.
    assert waited_ns <= FIRST_WAIT_NS + 3 * 12 * SECOND_NS + 4 * SECOND_NS


def test_the_level_will_do_while_the_budget_is_kept_or_nothing_can_be_given_up() -> None:
    job = Job(Governor(CALIBRATION), LIGHT)
    assert not job.governor.is_stable, "what it costs is not known yet"
    job.ticks(2)
    assert job.governor.is_stable
    job.rates = HEAVY
    job.tick()
    assert not job.governor.is_stable
    job.ticks(20)
    assert job.governor.level is Level.COUNTS
    assert job.governor.is_stable
    assert Governor(CALIBRATION, fixed=Level.ALL).is_stable


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_job_that_grows_louder_between_two_long_ticks_is_noticed_by_the_next(times: int) -> None:
    """As the daemon does: ticks of four seconds while the level will do, of one where it may not."""
    quiet = replace(LIGHT, calls=30, proxy_post=30, proxy_stop=240, socket_send=480, plan_launch=30)
    job = Job(Governor(CALIBRATION, load(quiet, Level.ALL) * 2), quiet)
    job.ticks(40)
    assert job.governor.level is Level.ALL

    def tick(seconds: int, loud_seconds: float) -> None:
        rates = seen(job.rates, job.governor.level)
        number = seconds - loud_seconds + 2 * times * loud_seconds
        hits = Hits(**{f.name: round(getattr(rates, f.name) * number) for f in fields(Hits)})
        job.governor.decide(Measured(Interval(seconds * SECOND_NS, hits), 1, Level.ALL))

    for _ in range(10):
        tick(4, 0)
    passed = 0
    for loud_seconds in (1.0, *(4.0,) * 10):
        assert job.governor.level is Level.ALL
        seconds = 4 if job.governor.is_stable else 1
        tick(seconds, min(loud_seconds, seconds))
        passed += seconds
        if job.governor.level < Level.ALL:
            break
    assert passed <= 4 + 5 + 1


def scaled(rates: Hits, factor: float) -> Hits:
    return Hits(**{f.name: round(getattr(rates, f.name) * factor) for f in fields(Hits)})


def of_budget(share: float) -> Hits:
    """A job that takes this share of the default budget at level rails."""
    return scaled(LIGHT, share * 0.01 / load(LIGHT, Level.RAILS))


def test_what_is_a_little_over_the_budget_is_given_up_after_three_seconds() -> None:
    job = Job(Governor(CALIBRATION), of_budget(2.5))
    assert job.ticks(4) == [Level.RAILS, Level.RAILS, Level.COMPLETION, Level.COMPLETION]


def test_a_level_that_was_given_up_comes_back_after_half_a_minute_and_not_before() -> None:
    job = Job(Governor(CALIBRATION), of_budget(2.5))
    job.ticks(3)
    job.rates = of_budget(0.1)
    assert max(job.ticks(29)) is Level.COMPLETION
    assert job.ticks(15)[-1] >= Level.RAILS


@pytest.mark.parametrize(("share", "level"), [(0.85, Level.COMPLETION), (0.5, Level.RAILS)])
def test_a_level_comes_back_only_where_it_leaves_room(share: float, level: Level) -> None:
    """Else the next small rise would take it away again."""
    job = Job(Governor(CALIBRATION), of_budget(2.5))
    job.ticks(3)
    job.rates = of_budget(share)
    assert min(job.ticks(300)[-1], Level.RAILS) is level


@pytest.mark.parametrize("sends", ["socket_send", "ib_send"])
def test_callers_and_proxies_have_time_of_their_own(sends: str) -> None:
    many = replace(Hits(calls=10_000), **{sends: 6_000})
    assert 0.005 < load(many, Level.RAILS) < 0.01
    assert sum(cost_ns(many, CALIBRATION).values()) / SECOND_NS > 0.01
    assert min(Job(Governor(CALIBRATION), many).ticks(20)) >= Level.RAILS


def given_up(job: Job, times: int) -> None:
    """Level rails was taken back so often, each time after it had come back."""
    for _ in range(times):
        job.rates = of_budget(2.5)
        while job.tick() is not Level.COMPLETION:
            pass
        job.rates = of_budget(0.1)
        while job.tick() is not Level.RAILS:
            pass


def seconds_until_rails(job: Job) -> int:
    job.rates = of_budget(2.5)
    while job.tick() is not Level.COMPLETION:
        pass
    job.rates = of_budget(0.1)
    return next(second for second in range(1, 3600) if job.tick() is Level.RAILS)


def test_a_level_that_has_held_for_half_an_hour_is_given_another_chance_as_soon_as_the_first_time() -> None:
    job = Job(Governor(CALIBRATION), LIGHT, available=Level.RAILS)
    given_up(job, 4)
    job.ticks(HELD_NS // SECOND_NS - 60)
    assert seconds_until_rails(job) >= 16 * FIRST_WAIT_NS // SECOND_NS
    job.ticks(HELD_NS // SECOND_NS)
    assert seconds_until_rails(job) <= FIRST_WAIT_NS // SECOND_NS + TICKS_UP


def test_on_a_busy_host_a_level_needs_more_room_to_come() -> None:
    idle, busy = (Job(Governor(CALIBRATION), of_budget(0.4), busy_factor=factor) for factor in (1.0, 2.0))
    assert idle.ticks(60)[-1] is Level.ALL
    assert busy.ticks(60)[-1] is Level.RAILS


def test_of_long_ticks_only_the_last_seconds_decide_what_is_given_up() -> None:
    governor = Governor(CALIBRATION)
    levels = []
    for rates in [of_budget(0.1)] * 10 + [of_budget(2.5)]:
        interval = Interval(4 * SECOND_NS, scaled(rates, 4))
        levels.append(governor.decide(Measured(interval, 1, Level.RAILS)))
    assert set(levels[:-1]) == {Level.RAILS}
    assert levels[-1] is Level.COMPLETION


def test_what_watching_cuda_costs_belongs_to_level_all() -> None:
    """Given up with it, and remembered."""
    job = Job(Governor(CALIBRATION), replace(LIGHT, cuda=40_000))
    levels = job.ticks(500)
    assert Level.ALL in levels
    assert levels[-1] is Level.RAILS
    assert changes([START, *levels]) == 2


def test_short_pauses_between_jobs_do_not_add_up_to_the_end_of_one() -> None:
    job = Job(Governor(CALIBRATION), HEAVY)
    assert job.ticks(20)[-1] is Level.COUNTS
    for _ in range(3):
        for processes, seconds in ((0, FORGET_AFTER_NS // SECOND_NS - 2), (1, 2)):
            job.processes = processes
            assert set(job.ticks(seconds)) == {Level.COUNTS}


# An agent that comes later than a job


def arrived(rates: Hits, **options: Any) -> Job:
    return Job(Governor(CALIBRATION, late=True), rates, **options)


def test_an_agent_that_comes_to_a_usual_job_counts_first_and_follows_it_within_seconds() -> None:
    job = arrived(LIGHT)
    assert job.governor.level is Level.COUNTS
    assert job.ticks(2) == [Level.COMPLETION, Level.RAILS]
    assert min(job.ticks(60)) >= Level.RAILS


def test_an_agent_that_comes_to_a_job_of_many_small_calls_only_counts_for_as_long_as_it_has_not_watched_it() -> None:
    job = arrived(HEAVY)
    assert set(job.ticks(TICKS_UP - 1)) == {Level.COUNTS}
    assert job.tick() is Level.COMPLETION, "then what it costs is measured"
    assert job.ticks(10)[-1] is Level.COUNTS


def test_in_the_first_seconds_beside_any_job_probes_never_take_more_than_the_budget_where_prices_are_usual() -> None:
    for scale in (1, 3, 10, 30, 100, 300, 1000):
        usual = Hits(**{f.name: scale * getattr(LIGHT, f.name) for f in fields(Hits)})
        job = arrived(usual)
        taken = [load(usual, job.governor.level), *(load(usual, level) for level in job.ticks(5))]
        assert max(taken) <= max(0.01, load(usual, Level.COUNTS))


def test_where_no_job_calls_an_agent_is_ready_for_all_of_the_next_one_at_once() -> None:
    levels = {}
    for running in (True, False):
        governor = Governor(CALIBRATION, late=True)
        governor.judge_arrival(running=running)
        levels[running] = governor.level
        assert ("ran before the agent" if running else "no job is running") in governor.reason
    assert levels == {True: Level.COUNTS, False: START}


def test_where_a_job_that_called_has_gone_an_agent_waits_for_a_second() -> None:
    job = arrived(Hits(), processes=0)
    half = Measured(Interval(SECOND_NS // 2, Hits()), 0, Level.ALL)
    assert [job.governor.decide(half) for _ in range(2)] == [Level.COUNTS, START]
    job.processes, job.rates = 1, LIGHT
    assert min(job.ticks(10)) >= START


def test_a_tick_that_comes_at_once_judges_nothing() -> None:
    governor = Governor(CALIBRATION, late=True)
    assert governor.decide(Measured(Interval(1000, Hits()), 1, Level.ALL)) is Level.COUNTS
    assert governor.decide(Measured(Interval(SECOND_NS, LIGHT), 1, Level.ALL)) is Level.COMPLETION


def test_a_level_that_a_person_names_is_there_at_once_however_late_the_agent_comes() -> None:
    job = Job(Governor(CALIBRATION, fixed=Level.ALL, late=True), HEAVY)
    assert job.governor.level is Level.ALL
    assert set(job.ticks(10)) == {Level.ALL}


@pytest.mark.parametrize("rates", [LIGHT, HEAVY, Hits(), Hits(proxy_post=100, proxy_stop=100, socket_send=100)])
def test_an_agent_that_comes_late_ends_where_one_that_was_there_before_does(rates: Hits) -> None:
    ends = [Job(Governor(CALIBRATION, late=late), rates).ticks(1200)[-600:] for late in (False, True)]
    assert max(ends[0]) is max(ends[1])
    assert sum(ends[0]) / len(ends[0]) == pytest.approx(sum(ends[1]) / len(ends[1]), abs=0.1)
