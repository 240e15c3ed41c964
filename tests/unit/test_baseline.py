"""What is usual for each kind of operation, and when something is slower.  The kernel's sums are simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.stalls.baseline import Baselines
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.internals import HISTORY, HISTORY_KEY

SECOND_NS = 1_000_000_000
MS = 1_000_000


class Kernel:
    """One table of sums, read once a second."""

    def __init__(self) -> None:
        self.histories = Baselines()
        self.now_ns = 0
        self._sums: dict[tuple[int, int, int], list[int]] = {}

    def second(
        self, *, each_ms: float, operations: int = 10, instance: int = 7, op: Op = Op.AllReduce, stalled: bool = False
    ) -> None:
        sums = self._sums.setdefault((instance, op, 20), [0, 0])
        sums[0] += operations
        sums[1] += int(operations * each_ms * MS)
        self.read({instance} if stalled else set())

    def read(self, stalled: set[int]) -> None:
        self.now_ns += SECOND_NS
        keys, values = np.zeros(len(self._sums), HISTORY_KEY), np.zeros(len(self._sums), HISTORY)
        for at, ((instance, op, size), (operations, duration_ns)) in enumerate(self._sums.items()):
            keys[at] = instance, op, size, (0, 0)
            values[at] = operations, duration_ns, 0
        self.histories.record(self.now_ns, keys, values, stalled)

    def read_all(self, latest: dict[int, list[Any]]) -> None:
        """A second of several communicators: operations, ms of each and whether it is stalled, by instance."""
        for instance, (operations, each_ms, _) in latest.items():
            sums = self._sums.setdefault((instance, Op.AllReduce, 20), [0, 0])
            sums[0] += operations
            sums[1] += int(operations * each_ms * MS)
        self.read({instance for instance, (_, _, stalled) in latest.items() if stalled})

    def slow(self, *, stalled: bool = False) -> int | None:
        """The op that has become slower."""
        found = self.histories.slowest(self.now_ns, 7, stalled=stalled)
        return None if found is None else found[0]


def test_nothing_is_known_of_what_never_ran() -> None:
    kernel = Kernel()
    assert kernel.histories.history_of(0, 7, Op.AllReduce, 20) is None
    assert kernel.histories.call_history_of(0, 7) is None
    assert kernel.histories.slowest(0, 7, stalled=False) is None


def test_the_longest_second_counts_and_the_last_three_do_not_yet() -> None:
    kernel = Kernel()
    for each_ms in (5, 9, 5, 5, 5, 5, 50, 50, 50):
        kernel.second(each_ms=each_ms)
    history = kernel.histories.history_of(kernel.now_ns, 7, Op.AllReduce, 20)
    assert history is not None
    assert history.operations == 60
    assert history.mean_ns == pytest.approx(5.7 * MS, rel=0.02)
    assert history.longest_ns == pytest.approx(9 * MS, rel=0.03)
    assert history.recent_mean_ns == 50 * MS


def test_a_young_history_is_what_there_is() -> None:
    kernel = Kernel()
    kernel.second(each_ms=5, operations=3)
    history = kernel.histories.history_of(kernel.now_ns, 7, Op.AllReduce, 20)
    assert history is not None
    assert (history.operations, history.mean_ns, history.recent_mean_ns) == (3, 5 * MS, None)


def test_three_seconds_at_twice_the_usual_time_are_slow_and_two_are_not() -> None:
    kernel = Kernel()
    for _ in range(10):
        kernel.second(each_ms=5)
    for _ in range(2):
        kernel.second(each_ms=10.1)
        assert kernel.slow() is None
    kernel.second(each_ms=10.1)
    assert kernel.slow() == Op.AllReduce


def test_what_is_called_slow_is_so_until_it_is_nearly_as_fast_as_before() -> None:
    kernel = Kernel()
    for _ in range(10):
        kernel.second(each_ms=5)
    for _ in range(4):
        kernel.second(each_ms=8, stalled=True)
    assert kernel.slow() is None
    assert kernel.slow(stalled=True) == Op.AllReduce
    for _ in range(3):
        kernel.second(each_ms=6)
    assert kernel.slow(stalled=True) is None


def test_very_short_operations_are_never_slow() -> None:
    kernel = Kernel()
    for _ in range(10):
        kernel.second(each_ms=0.02)
    for _ in range(5):
        kernel.second(each_ms=0.3)
    assert kernel.slow() is None


def test_operations_that_took_no_time_by_the_clock_may_become_slow() -> None:
    kernel = Kernel()
    for _ in range(10):
        kernel.second(each_ms=0)
    for _ in range(3):
        kernel.second(each_ms=5)
    assert kernel.slow() == Op.AllReduce


def test_what_happened_in_a_stall_does_not_become_usual() -> None:
    kernel = Kernel()
    for _ in range(10):
        kernel.second(each_ms=5)
    for _ in range(100):
        kernel.second(each_ms=500, stalled=True)
    history = kernel.histories.history_of(kernel.now_ns, 7, Op.AllReduce, 20)
    assert history is not None
    assert history.mean_ns == pytest.approx(5 * MS)
    assert kernel.slow(stalled=True) == Op.AllReduce


def test_the_seconds_that_led_to_a_stall_do_not_become_usual_either() -> None:
    kernel = Kernel()
    for each_ms in (5, 5, 5, 5, 5):
        kernel.second(each_ms=each_ms)
    for _ in range(6):  # as long as it takes to say why
        kernel.second(each_ms=12)
    for _ in range(30):
        kernel.second(each_ms=12, stalled=True)
        assert kernel.slow(stalled=True) == Op.AllReduce


def test_slow_seconds_of_which_no_stall_came_become_usual_when_it_is_faster_again() -> None:
    kernel = Kernel()
    for each_ms in (5, 5, 5, 5, 5, 25, 25, 5, 5, 5, 5):
        kernel.second(each_ms=each_ms)
    history = kernel.histories.history_of(kernel.now_ns, 7, Op.AllReduce, 20)
    assert history is not None
    assert history.operations == 80
    assert history.mean_ns == pytest.approx(10 * MS, rel=0.02)
    assert history.longest_ns == pytest.approx(25 * MS, rel=0.02)


def test_what_has_been_slow_for_half_a_minute_without_a_stall_is_not_slow_any_more() -> None:
    kernel = Kernel()
    for each_ms in (5,) * 5 + (12,) * 24:
        kernel.second(each_ms=each_ms)
    assert kernel.slow() is None


def test_a_new_pace_becomes_usual_within_minutes() -> None:
    kernel = Kernel()
    for _ in range(60):
        kernel.second(each_ms=5)
    slow_seconds = 0
    for _ in range(600):
        kernel.second(each_ms=15)
        slow_seconds += kernel.slow() is not None
    assert 10 < slow_seconds < 300
    assert kernel.slow() is None


def test_seconds_long_past_say_nothing_about_now() -> None:
    kernel = Kernel()
    for _ in range(10):
        kernel.second(each_ms=5)
    for _ in range(3):
        kernel.second(each_ms=50)
    assert kernel.slow() == Op.AllReduce
    for _ in range(20):
        kernel.read(set())
    assert kernel.slow() is None


def test_the_time_between_calls_stands_for_their_duration_only_where_nothing_else_is_seen() -> None:
    kernel, calls = Kernel(), 0
    for second in range(30):
        calls += 32 if second < 20 else 8
        kernel.now_ns += SECOND_NS
        kernel.histories.record_calls(kernel.now_ns, np.array([7]), np.array([calls]), ())
    history = kernel.histories.call_history_of(kernel.now_ns, 7)
    assert history is not None
    assert history.operations == 32 * 19
    assert kernel.histories.slowest(kernel.now_ns, 7, stalled=False) is not None
    for _ in range(5):
        kernel.second(each_ms=5)
    assert kernel.slow() is None


def test_when_operations_are_not_followed_any_more_calls_tell_that_they_are_slow() -> None:
    kernel, calls = Kernel(), 0
    for second in range(30):
        calls += 32 if second < 20 else 8
        if second < 15:
            kernel.second(each_ms=5)
        else:
            kernel.now_ns += SECOND_NS
        kernel.histories.record_calls(kernel.now_ns, np.array([7]), np.array([calls]), ())
    found = kernel.histories.slowest(kernel.now_ns, 7, stalled=False, followed=False)
    assert found is not None
    assert found[0] is None
    assert found[1].ratio == pytest.approx(4)


def test_a_pause_between_calls_is_part_of_the_time_between_them() -> None:
    histories = Baselines()
    for second in range(1, 10):
        histories.record_calls(second * SECOND_NS, np.array([7]), np.array([second * 10]), ())
    for second in range(10, 70):
        histories.record_calls(second * SECOND_NS, np.array([7]), np.array([90]), ())
    for second in range(70, 80):
        histories.record_calls(second * SECOND_NS, np.array([7]), np.array([91 + 10 * (second - 70)]), ())
    history = histories.call_history_of(80 * SECOND_NS, 7)
    assert history is not None
    assert history.longest_ns > 50 * SECOND_NS


def test_what_ended_is_forgotten() -> None:
    kernel = Kernel()
    kernel.second(each_ms=5)
    kernel.second(each_ms=5, instance=8)
    kernel.histories.forget({8})
    assert kernel.histories.history_of(kernel.now_ns, 7, Op.AllReduce, 20) is None
    assert kernel.histories.history_of(kernel.now_ns, 8, Op.AllReduce, 20) is not None


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0.001, 1000), st.booleans()), max_size=60))
def test_what_is_usual_lies_between_the_fastest_and_the_slowest_second(
    seconds: list[tuple[int, float, bool]],
) -> None:
    kernel = Kernel()
    for operations, each_ms, stalled in seconds:
        kernel.second(each_ms=each_ms, operations=operations, stalled=stalled)
    history = kernel.histories.history_of(kernel.now_ns, 7, Op.AllReduce, 20)
    usual = [each_ms * MS for operations, each_ms, stalled in seconds if operations and not stalled]
    if history is None:
        return
    assert min(usual) * 0.999 - 1 <= history.mean_ns <= max(usual) * 1.001 + 1
    assert history.longest_ns <= max(usual) * 1.001 + 1
    assert history.operations <= sum(operations for operations, _, stalled in seconds if not stalled)


Reading = tuple[int, int, float, bool]
"""Instance, operations, ms of each, and whether it is stalled."""


READINGS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 9), st.sampled_from((2.0, 5.0, 20.0)), st.booleans()), max_size=4
)


@given(st.lists(READINGS, max_size=40))
def test_what_is_known_of_one_communicator_does_not_depend_on_the_others_that_are_read_with_it(
    seconds: list[list[Reading]],
) -> None:
    together, alone = Kernel(), {instance: Kernel() for instance in range(1, 5)}
    for readings in seconds:
        latest = {instance: reading for instance, *reading in readings}
        for kernel, of_kernel in ((together, range(1, 5)), *((one, (at,)) for at, one in alone.items())):
            kernel.read_all({at: latest[at] for at in of_kernel if at in latest})
    for instance, kernel in alone.items():
        found = [one.histories.history_of(one.now_ns, instance, Op.AllReduce, 20) for one in (together, kernel)]
        assert found[0] == found[1]
        slow = [one.histories.slowest(one.now_ns, instance, stalled=False) for one in (together, kernel)]
        assert slow[0] == slow[1]
        if slow[0] is not None:
            assert instance in together.histories.maybe_slower()
