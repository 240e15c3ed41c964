"""Totals of NVLink counters never fall, whatever the counters do. All counters simulated."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agent.nvlink_gpu import GpuHistories, Increases

KEY = ("3", "transmit")
COUNTERS = st.lists(st.none() | st.integers(0, 2**64 - 1), max_size=30)


def test_the_first_reading_is_a_baseline() -> None:
    increases = Increases()
    assert increases.add(KEY, 5_000) == 0
    assert increases.add(KEY, 5_300) == 300


def test_a_counter_that_was_never_read_has_no_total() -> None:
    assert Increases().add(KEY, None) is None


def test_what_was_counted_stays_known_while_a_counter_cannot_be_read() -> None:
    increases = Increases()
    increases.add(KEY, 1)
    increases.add(KEY, 4)
    assert increases.add(KEY, None) == 3
    assert increases.add(KEY, 6) == 5


def test_a_fall_is_a_new_baseline_and_is_counted() -> None:
    increases = Increases()
    for value in (10, 30, 2, 7):
        total = increases.add(KEY, value)
    assert total == 20 + 5
    assert increases.resets == 1


def test_bytes_of_another_kind_go_on_where_the_total_was() -> None:
    increases = Increases()
    increases.add(KEY, 10, "data")
    increases.add(KEY, 30, "data")
    assert increases.add(KEY, 500, "raw") == 20
    assert increases.add(KEY, 501, "raw") == 21
    assert increases.resets == 0


def test_after_a_restart_a_higher_counter_adds_nothing() -> None:
    increases = Increases()
    increases.add(KEY, 10)
    increases.restart()
    assert increases.add(KEY, 1_000) == 0
    assert increases.add(KEY, 1_001) == 1


def test_totals_belong_to_the_gpu_not_to_its_number() -> None:
    histories = GpuHistories()
    histories.of("GPU-a").add(KEY, 1)
    histories.of("GPU-a").add(KEY, 9)
    assert histories.of("GPU-a").add(KEY, 9) == 8
    assert histories.of("GPU-b").add(KEY, 9) == 0


@given(COUNTERS)
def test_totals_never_fall_and_are_the_sum_of_the_rises(values: list[int | None]) -> None:
    increases = Increases()
    totals = [total for value in values if (total := increases.add(KEY, value)) is not None]
    assert totals == sorted(totals)
    known = [value for value in values if value is not None]
    if known:
        assert totals[-1] == sum(max(0, after - before) for before, after in pairwise(known))
