"""A process that pauses where it did before is expected to go on; one that stands anywhere else is not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from railscope.agent.node.stalls.pauses import Pauses

SECOND_NS = 1_000_000_000
PID = 7


class Job:
    """Makes a call each tenth of a second, and is looked at each second."""

    def __init__(self) -> None:
        self.pauses = Pauses()
        self.now_ns = 1000 * SECOND_NS
        self.calls = 0
        self.call_ns = self.now_ns

    def work(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += SECOND_NS
            self.calls += 10
            self.call_ns = self.now_ns
            self.look()

    def pause(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_ns += SECOND_NS
            self.look()

    def look(self) -> None:
        self.pauses.update(self.now_ns, PID, self.call_ns, self.calls)

    @property
    def usual_s(self) -> float | None:
        usual = self.pauses.usual(self.now_ns, PID)
        return None if usual is None else usual.longest_ns / SECOND_NS


def saved(seconds: int = 20, times: int = 2, *, every: int = 30, more: Iterable[int] = ()) -> Job:
    """A job that saved a checkpoint now and then, each after as many calls."""
    job = Job()
    for _ in range(times):
        job.work(every)
        job.pause(seconds)
    for length in more:
        job.work(length)
    return job


def test_a_pause_at_the_usual_place_is_usual_up_to_twice_its_length() -> None:
    job = saved(more=[30])
    job.pause(5)
    assert job.usual_s == pytest.approx(20, abs=1)
    job.pause(33)
    assert job.usual_s is not None
    job.pause(4)
    assert job.usual_s is None


@pytest.mark.parametrize(
    "job",
    [saved(times=1, more=[30]), saved(more=[12]), saved(more=[31]), saved(seconds=1, more=[30]), saved(times=0)],
    ids=["once is no habit", "earlier", "later", "too short to matter", "never"],
)
def test_a_pause_anywhere_else_is_not(job: Job) -> None:
    job.pause(5)
    assert job.usual_s is None


def test_pauses_of_several_kinds_have_places_of_their_own() -> None:
    job = Job()
    for _ in range(3):
        job.work(10)
        job.pause(4)
        job.work(25)
        job.pause(12)
    job.work(10)
    job.pause(3)
    assert job.usual_s == pytest.approx(4, abs=1)
    job.pause(20)
    assert job.usual_s is None


def test_what_was_learnt_goes_with_its_communicators_and_its_process() -> None:
    job = saved(more=[30])
    job.pauses.keep({PID + 1})
    job.pause(3)
    assert job.usual_s is None
    again = saved(more=[30])
    again.calls = 5  # one was destroyed, and its calls are counted no more
    again.pause(3)
    assert again.usual_s is None


@pytest.mark.parametrize("wrote", [True, False])
def test_who_wrote_in_its_pauses_may_write_again(wrote: bool) -> None:
    job = saved(times=1)
    job.work(30)
    job.pause(5)
    if wrote:
        job.pauses.record_writing(PID)
    job.pause(15)
    job.work(30)
    job.pause(3)
    usual = job.pauses.usual(job.now_ns, PID)
    assert usual is not None
    assert usual.wrote is wrote
