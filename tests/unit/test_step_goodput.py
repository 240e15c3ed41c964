"""What a job's time goes into.  All times are simulated."""

from __future__ import annotations

import numpy as np

from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.steps.goodput import MOST_ENDED, EndedJobs, JobTime, Lives
from railscope.agent.rhythm.tracker import ITERATION, Iterations

S = 1_000_000_000
MINE = Tenant(1000)


def steps(*lengths: int, first: int) -> Iterations:
    """Steps without a gap, in seconds."""
    found = np.zeros(len(lengths), ITERATION)
    ends = first + np.cumsum(lengths)
    found["start_ns"], found["end_ns"] = (ends - np.array(lengths)) * S, ends * S
    return found


def seconds(time: JobTime, now: int) -> dict[str, float]:
    spent = {state: value / S for state, value in time.spent_ns(now * S).items()}
    return {state: value for state, value in spent.items() if value}


def look(time: JobTime, now: int, *, stalled_since: int | None = None, writing_since: int | None = None) -> None:
    """What is seen of its ranks; times in seconds."""
    time.look(
        now * S,
        stalled_since_ns=None if stalled_since is None else stalled_since * S,
        writing_since_ns=None if writing_since is None else writing_since * S,
    )


def test_what_interrupts_a_step_is_no_step() -> None:
    time = JobTime(100 * S)
    time.record_steps(steps(*[1] * 20, 41, *[1] * 20, first=130))
    assert seconds(time, 211) == {"start": 30, "steps": 41, "other": 40}


def test_checkpoints_and_stalls_explain_what_was_seen_of_them_and_no_more() -> None:
    time = JobTime(0)
    time.record_steps(steps(*[1] * 20, first=0))
    for now in range(20, 51):
        look(time, now, stalled_since=40 if now > 40 else None, writing_since=20 if 20 < now <= 40 else None)
    assert seconds(time, 50) == {"steps": 22, "checkpoint": 18, "stalled": 10}
    time.record_steps(steps(31, *[1] * 19, first=20))
    look(time, 70)
    assert seconds(time, 70) == {"steps": 40, "checkpoint": 20, "stalled": 10}


def test_a_stall_counts_from_the_hand_over_though_it_is_told_of_later() -> None:
    time = JobTime(0)
    time.record_steps(steps(*[1] * 20, first=0))
    for now in range(20, 82):
        look(time, now, stalled_since=25 if 55 <= now <= 80 else None, writing_since=25 if 25 < now <= 35 else None)
    time.record_steps(steps(61, *[1] * 19, first=20))
    assert seconds(time, 100) == {"steps": 40, "checkpoint": 10, "stalled": 45, "other": 5}


def test_a_checkpoint_counts_from_the_last_call_of_who_writes_though_ranks_that_wait_were_told_of_as_a_stall() -> None:
    time = JobTime(0)
    time.record_steps(steps(*[1] * 20, first=0))
    for now in range(20, 51):
        # A stall first; who was stopped makes a call, writes then, and is seen to after three seconds.
        look(time, now, stalled_since=21 if now > 22 else None, writing_since=30 if now > 33 else None)
    time.record_steps(steps(31, *[1] * 19, first=20))
    assert seconds(time, 70) == {"steps": 40, "stalled": 9, "checkpoint": 20, "other": 1}


def test_what_did_not_hold_steps_up_explains_no_later_pause() -> None:
    time = JobTime(0)
    for now in range(1, 101):
        # An operation that is slow is told of as a stall, and the steps go on all the same.
        look(time, now, stalled_since=10 if 20 <= now <= 60 else None)
        time.record_steps(steps(1, first=now - 1))
    time.record_steps(steps(61, *[1] * 4, first=100))
    look(time, 165)
    assert seconds(time, 165) == {"steps": 105, "other": 60}


def test_what_slow_operations_take_of_steps_stays_what_it_is_however_long_they_are_slow() -> None:
    time = JobTime(0)
    for now in range(1, 41):
        time.record_steps(steps(1, first=now - 1))
        look(time, now)
    for now in range(45, 541, 5):
        for at in range(now - 4, now + 1):
            look(time, at, stalled_since=40)
        time.record_steps(steps(5, first=now - 5))
    assert seconds(time, 540) == {"steps": 140, "stalled": 400}


def test_what_held_a_job_up_before_its_first_step_explains_nothing_that_comes_later() -> None:
    time = JobTime(0)
    for now in range(91):
        # It writes a cache as it starts, and stalls in the third step, before any step is told.
        look(time, now, stalled_since=72 if 77 < now <= 82 else None, writing_since=10 if 10 < now <= 40 else None)
    time.record_steps(steps(1, 1, 11, *[1] * 17, first=70))
    assert seconds(time, 100) == {"start": 70, "steps": 20, "stalled": 10}
    time.record_steps(steps(41, *[1] * 19, first=100))
    look(time, 160)
    assert seconds(time, 160) == {"start": 70, "steps": 40, "stalled": 10, "other": 40}


def test_a_step_under_way_counts_until_it_is_longer_than_usual() -> None:
    time = JobTime(0)
    time.record_steps(steps(*[10] * 8, first=0))
    assert seconds(time, 95) == {"steps": 95}
    assert seconds(time, 130) == {"steps": 100, "other": 30}


def test_a_job_that_begins_again_goes_on_where_it_ended() -> None:
    first = JobTime(0)
    first.record_steps(steps(*[1] * 90, first=10))
    ended = EndedJobs()
    ended.put(MINE, "job", first.ended(101 * S))
    again = JobTime(150 * S)
    ended.continue_by("job", again)
    assert seconds(again, 160) == {"start": 10, "steps": 91, "restart": 59}
    again.record_steps(steps(*[1] * 40, first=170))
    assert seconds(again, 210) == {"start": 10, "steps": 131, "restart": 69}
    another = JobTime(220 * S)
    ended.continue_by("job", another)
    assert another.before is None, "it was continued once"


def test_an_end_that_is_seen_after_the_job_began_again_is_counted_once() -> None:
    first, again, beside = JobTime(0), JobTime(105 * S), JobTime(0)
    first.record_steps(steps(*[1] * 90, first=10))
    beside.record_steps(steps(*[1] * 105, first=5))
    again.record_steps(steps(*[1] * 5, first=110))
    ended = EndedJobs()
    ended.put(MINE, "job", first.ended(112 * S))
    ended.continue_by("job", beside)
    assert beside.before is None, "it ran beside the other"
    ended.continue_by("job", again)
    spent = seconds(again, 115)
    assert sum(spent.values()) == 115
    assert (spent["restart"], spent["start"], spent["steps"]) == (5, 10, 97)


def test_few_ended_jobs_are_remembered() -> None:
    ended = EndedJobs()
    for number in range(MOST_ENDED + 1):
        ended.put(MINE, number, Lives(0, 1, {}, 0))
    oldest, next_oldest = JobTime(2), JobTime(2)
    ended.continue_by(0, oldest)
    ended.continue_by(1, next_oldest)
    assert (oldest.before, next_oldest.before is not None) == (None, True)


def test_a_tenant_whose_jobs_end_by_the_thousand_makes_nobody_elses_forgotten() -> None:
    ended = EndedJobs()
    ended.put(MINE, "job", Lives(0, 1, {}, 0))
    for number in range(10 * MOST_ENDED):
        ended.put(Tenant(5000), number, Lives(0, 1, {}, 0))
    again = JobTime(2)
    ended.continue_by("job", again)
    assert again.before == Lives(0, 1, {}, 0)
