"""Totals of NVLink counters never fall, whatever the counters do. All counters simulated."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.nvlink.gpu import GpuHistories, GpuTotals

KEY = ("3", "transmit")
COUNTERS = st.lists(st.none() | st.integers(0, 2**64 - 1), max_size=30)


def test_a_total_begins_with_the_first_reading() -> None:
    counted = GpuTotals()
    assert counted.add(KEY, 5_000) == 5_000
    assert counted.add(KEY, 5_300) == 5_300


def test_a_counter_that_was_never_read_has_no_total() -> None:
    assert GpuTotals().add(KEY, None) is None


def test_what_was_counted_stays_known_while_a_counter_cannot_be_read() -> None:
    counted = GpuTotals()
    counted.add(KEY, 1)
    counted.add(KEY, 4)
    assert counted.add(KEY, None) == 4
    assert counted.add(KEY, 6) == 6


def test_a_fall_is_a_new_baseline_and_is_counted() -> None:
    counted = GpuTotals()
    for value in (10, 30, 2, 7):
        total = counted.add(KEY, value)
    assert total == 30 + 5
    assert counted.resets == 1


def test_bytes_of_another_kind_go_on_where_the_total_was() -> None:
    counted = GpuTotals()
    counted.add(KEY, 10, "data")
    counted.add(KEY, 30, "data")
    assert counted.add(KEY, 500, "raw") == 30
    assert counted.add(KEY, 501, "raw") == 31
    assert counted.resets == 0


def test_after_a_restart_a_higher_counter_adds_nothing() -> None:
    counted = GpuTotals()
    counted.add(KEY, 10)
    counted.restart()
    assert counted.add(KEY, 1_000) == 10
    assert counted.add(KEY, 1_001) == 11


def test_totals_belong_to_the_gpu_not_to_its_number() -> None:
    histories = GpuHistories()
    histories.get("GPU-a").totals.add(KEY, 1)
    histories.get("GPU-a").totals.add(KEY, 9)
    assert histories.get("GPU-a").totals.add(KEY, 10) == 10
    assert histories.get("GPU-a").totals.add(KEY, 3) == 10
    assert histories.get("GPU-b").totals.add(KEY, 3) == 3


@given(COUNTERS)
def test_totals_never_fall_and_are_the_first_value_and_the_sum_of_the_rises(values: list[int | None]) -> None:
    counted = GpuTotals()
    totals = [total for value in values if (total := counted.add(KEY, value)) is not None]
    assert totals == sorted(totals)
    known = [value for value in values if value is not None]
    if known:
        assert totals[-1] == known[0] + sum(max(0, after - before) for before, after in pairwise(known))


def test_errors_that_stand_keep_their_totals_and_those_that_move_add_to_them() -> None:
    counted = GpuTotals()
    assert counted.add_errors("3", (("replay", 4), ("crc", 1))) == (("replay", 4), ("crc", 1))
    assert counted.add_errors("3", (("replay", 4), ("crc", 1))) == (("replay", 4), ("crc", 1))
    assert counted.add_errors("3", (("replay", 6), ("crc", 1))) == (("replay", 6), ("crc", 1))
    counted.restart()
    assert counted.add_errors("3", (("replay", 6), ("crc", 1))) == (("replay", 6), ("crc", 1))
    assert counted.add_errors("3", (("replay", 7), ("crc", 0))) == (("replay", 7), ("crc", 1))
    counted.restart()
    assert counted.add_errors("3", (("replay", 50), ("crc", 0))) == (("replay", 7), ("crc", 1))
    assert counted.add_errors("3", (("replay", 51), ("crc", 0))) == (("replay", 8), ("crc", 1))
