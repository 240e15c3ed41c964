"""Totals of counters that end at different widths, from simulated readings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.node.sampling.sampler import Sampler
from railscope.agent.node.sampling.shaped_totals import ShapedTotals, totals_for
from railscope.agent.node.sampling.state import DeviceTotals
from railscope.agent.node.sampling.totals import Totals
from railscope.probes.netdev.counters import CounterReading, CounterShape
from tests.unit.netdev_messages import SteppedClock

FIELDS = ("tx_bytes", "rx_bytes", "link_downed", "out_of_sequence", "sent_pkts")
MAXIMA = (2**64 - 1, 2**64 - 1, 255, 2**32 - 1, 2**64 - 1)
SATURATING = (False, False, True, False, False)
Row = dict[str, int]


def reading(
    second: float, rows: dict[str, Row], *, generation: int = 1, fields: tuple[str, ...] = FIELDS
) -> CounterReading:
    """One row a device; what a row leaves out is unknown."""
    size = (len(rows), len(fields))
    values = np.zeros(size, dtype=np.uint64)
    known = np.zeros(size, dtype=np.bool_)
    for at, row in enumerate(rows.values()):
        for field, value in row.items():
            values[at, fields.index(field)] = value
            known[at, fields.index(field)] = True
    extra = len(fields) - len(FIELDS)
    maxima = np.tile(np.array((*MAXIMA, *[2**64 - 1] * extra), dtype=np.uint64), (len(rows), 1))
    saturating = np.tile(np.array((*SATURATING, *[False] * extra)), (len(rows), 1))
    time_ns = round(second * 1e9)
    names = tuple(rows)
    shape = CounterShape(known, maxima, saturating)
    return CounterReading(time_ns, time_ns, names, (generation,) * len(rows), fields, values, (), shape)


def totals_of(*readings: CounterReading) -> ShapedTotals:
    totals = ShapedTotals(readings[0].fields)
    for one in readings:
        assert totals.add_columns(one.fields)
        totals.add(one, rates=True)
    return totals


def total(totals: Totals, field: str, name: str = "a/1") -> int:
    return int(totals.totals[totals.rows[name], totals.fields.index(field)])


def pinned(totals: ShapedTotals, field: str, name: str = "a/1") -> bool:
    return bool(totals.pinned[totals.rows[name], totals.fields.index(field)])


def of(*values: int) -> dict[str, Row]:
    return {"a/1": dict(zip(FIELDS, values, strict=True))}


def test_the_first_reading_counts_whole_and_the_second_its_increase() -> None:
    totals = totals_of(reading(1, of(100, 200, 3, 4, 5)))
    assert totals.totals[0].tolist() == [100, 200, 3, 4, 5]
    totals.add(reading(2, of(110, 220, 4, 6, 8)), rates=True)
    assert totals.totals[0].tolist() == [110, 220, 4, 6, 8]
    assert totals.resets == 0


def test_a_32_bit_counter_that_goes_through_its_end_counts_on() -> None:
    totals = totals_of(reading(1, of(1, 1, 0, 2**32 - 6, 0)), reading(2, of(2, 2, 0, 5, 0)))
    assert total(totals, "out_of_sequence") == 2**32 + 5
    assert total(totals, "tx_bytes") == 2
    assert totals.resets == 0


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_a_32_bit_counter_never_loses_an_event_however_often_it_wraps(start: int, steps: list[int]) -> None:
    readings = [reading(1, of(0, 0, 0, start, 0))]
    value = start
    for at, step in enumerate(steps):
        value = (value + step) % 2**32
        readings.append(reading(2 + at, of(at + 1, at + 1, 0, value, at + 1)))
    assert total(totals_of(*readings), "out_of_sequence") == start + sum(steps)


def test_a_counter_that_was_set_back_a_little_stands_still() -> None:
    totals = totals_of(reading(1, of(1, 1, 0, 100, 0)), reading(2, of(5, 5, 0, 98, 0)), reading(3, of(6, 6, 0, 99, 0)))
    assert total(totals, "out_of_sequence") == 101
    assert total(totals, "tx_bytes") == 6


def test_a_driver_reload_starts_anew_though_a_32_bit_counter_falls_from_high_up() -> None:
    before = of(10**12, 10**12, 3, 3_000_000_000, 50)
    totals = totals_of(reading(1, before), reading(2, of(40, 40, 0, 10, 1)), reading(3, of(44, 45, 1, 12, 2)))
    assert totals.resets == 1
    assert totals.totals[0].tolist() == [10**12 + 4, 10**12 + 5, 4, 3_000_000_002, 51]


def test_another_generation_starts_anew_though_everything_rose() -> None:
    totals = totals_of(
        reading(1, of(10, 10, 0, 0, 0)),
        reading(2, of(90, 90, 9, 9, 9), generation=2),
        reading(3, of(91, 92, 9, 9, 9), generation=2),
    )
    assert totals.resets == 1
    assert totals.totals[0].tolist() == [11, 12, 0, 0, 0]


def test_a_counter_that_failed_while_the_driver_was_reloaded_is_not_compared_with_before() -> None:
    totals = totals_of(
        reading(1, of(100, 100, 0, 3, 3)),
        reading(2, {"a/1": {"tx_bytes": 5, "rx_bytes": 5}}),
        reading(3, of(6, 6, 0, 7, 7)),
        reading(4, of(7, 7, 0, 8, 9)),
    )
    assert totals.totals[0].tolist() == [102, 102, 0, 4, 5]


def test_a_port_without_bytes_starts_anew_when_all_its_counters_fall() -> None:
    rows = [{"a/1": {"out_of_sequence": x, "sent_pkts": y}} for x, y in ((3_000_000_000, 900), (2, 3), (4, 8))]
    totals = totals_of(*[reading(1 + at, row) for at, row in enumerate(rows)])
    assert totals.resets == 1
    assert (total(totals, "out_of_sequence"), total(totals, "sent_pkts")) == (3_000_000_002, 905)


def test_a_counter_at_its_end_is_pinned_and_one_below_it_is_not() -> None:
    totals = totals_of(reading(1, of(1, 1, 254, 0, 0)))
    assert not pinned(totals, "link_downed")
    totals.add(reading(2, of(2, 2, 255, 2**32 - 1, 0)), rates=True)
    assert pinned(totals, "link_downed")
    assert not pinned(totals, "out_of_sequence")
    assert total(totals, "link_downed") == 255


def test_a_pinned_counter_that_was_cleared_counts_what_it_shows_since() -> None:
    totals = totals_of(reading(1, of(1, 1, 255, 0, 0)), reading(2, of(2, 2, 2, 0, 0)))
    assert total(totals, "link_downed") == 255 + 2
    assert not pinned(totals, "link_downed")
    assert totals.resets == 0


def test_a_port_that_is_gone_is_pinned_no_more() -> None:
    totals = totals_of(reading(1, of(1, 1, 255, 0, 0)), reading(2, {"b/1": {"tx_bytes": 1}}))
    assert not pinned(totals, "link_downed")


def test_a_counter_that_fails_for_a_while_loses_nothing_and_disturbs_no_other() -> None:
    totals = totals_of(
        reading(1, of(10, 10, 0, 5, 0)),
        reading(2, {"a/1": {"tx_bytes": 20, "rx_bytes": 21}}),
        reading(3, of(30, 31, 1, 9, 2)),
    )
    assert totals.totals[0].tolist() == [30, 31, 1, 9, 2]
    assert totals.counts[0, 0].sum() == 2


def test_rates_are_seen_only_between_readings_that_follow_each_other() -> None:
    totals = totals_of(
        reading(1, of(0, 0, 0, 0, 0)),
        reading(2, {"a/1": {"sent_pkts": 1}}),
        reading(3, of(10**9, 10**9, 0, 0, 2)),
    )
    assert totals.counts.sum() == 0
    assert total(totals, "tx_bytes") == 10**9
    totals.add(reading(4, of(2 * 10**9, 10**9 + 5, 0, 0, 3)), rates=True)
    assert totals.counts[0, 0].sum() == totals.counts[0, 1].sum() == 1
    assert totals.sums[0].tolist() == [1e9, 5]


def test_a_step_that_no_link_could_carry_is_no_traffic() -> None:
    totals = totals_of(
        reading(1, of(0, 0, 0, 0, 0)), reading(2, of(2**63, 5, 0, 0, 0)), reading(3, of(2**63 + 7, 6, 0, 0, 0))
    )
    assert (total(totals, "tx_bytes"), total(totals, "rx_bytes")) == (7, 1)
    assert totals.resets == 1


def test_appended_columns_begin_with_a_baseline_of_their_own_and_others_are_refused() -> None:
    wider = (*FIELDS, "cmds_err")
    totals = totals_of(reading(1, of(1, 1, 0, 0, 0)))
    assert totals.add_columns(wider)
    for second, value in ((2, 40), (3, 42)):
        row = {"a/1": dict(zip(FIELDS, (second, second, 0, 0, 0), strict=True)) | {"cmds_err": value}}
        totals.add(reading(second, row, fields=wider), rates=True)
    assert total(totals, "cmds_err") == 42
    assert total(totals, "tx_bytes") == 3
    assert not totals.add_columns(FIELDS)
    assert not totals.add_columns(("rx_bytes", *wider))


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a/1", "b/1", "c/2"]),
            st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 2**60) | st.integers(0, 300), max_size=5),
            max_size=3,
        ),
        max_size=12,
    ),
)
def test_no_total_ever_falls_whatever_devices_and_counters_do(rounds: list[dict[str, Row]]) -> None:
    totals = ShapedTotals(FIELDS)
    before: dict[str, list[int]] = {}
    for second, rows in enumerate(rounds):
        totals.add(reading(1 + second, rows), rates=True)
        now = {name: totals.totals[at].tolist() for name, at in totals.rows.items()}
        for name, values in before.items():
            assert all(new >= old for new, old in zip(now[name], values, strict=True))
        before = now


def test_a_driver_that_shows_all_ones_for_a_while_does_not_let_a_total_begin_again() -> None:
    rows = [{"a/1": {"sent_pkts": value}} for value in (5, 2**64 - 1, 6, 2**63, 7)]
    totals = ShapedTotals(FIELDS)
    seen = []
    for second, row in enumerate(rows):
        totals.add(reading(1 + second, row), rates=True)
        seen.append(total(totals, "sent_pkts"))
    assert seen == [5, *[2**64 - 1] * 4]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 10**9)] * 2), min_size=1, max_size=12))
def test_readings_of_wide_counters_give_what_plain_totals_give(values: list[tuple[int, int]]) -> None:
    plain, shaped = Totals(FIELDS), ShapedTotals(FIELDS)
    for second, (transmit, receive) in enumerate(values):
        one = reading(1 + second, of(transmit, receive, 0, 0, 0))
        shaped.add(one, rates=True)
        plain.add(one, rates=True)
    assert shaped.totals.tolist() == plain.totals.tolist()
    assert shaped.counts.tolist() == plain.counts.tolist()
    assert shaped.sums.tolist() == plain.sums.tolist()
    assert shaped.resets == plain.resets


def test_a_reading_without_a_shape_has_plain_totals() -> None:
    one = reading(1, of(1, 1, 1, 1, 1))
    bare = CounterReading(1, 1, one.names, one.generations, one.fields, one.values)
    assert type(totals_for(bare)) is Totals
    assert type(totals_for(one)) is ShapedTotals
    with pytest.raises(ValueError, match="without a shape"):
        ShapedTotals(FIELDS).add(bare, rates=True)


class Scripted:
    """A source that gives prepared readings."""

    def __init__(self, *readings: CounterReading) -> None:
        self.readings = list(readings)

    def read(self) -> CounterReading:
        return self.readings.pop(0)

    def refresh(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def sampled(*readings: CounterReading) -> DeviceTotals:
    clock = SteppedClock()
    sampler = Sampler(clock)
    sampler.add("rdma", 0, Scripted(*readings), 1.0)
    for _ in readings:
        sampler.read_due(clock.monotonic_ns())
        clock.sleep(1)
    state = sampler.state()
    sampler.stop()
    found = state.device_of_source("rdma", "a/1")
    assert found is not None
    result = state.result("rdma")
    assert result is not None
    assert result.success, result.error
    return found


def test_the_sampler_shows_what_a_device_counts_and_no_more() -> None:
    found = sampled(
        reading(1, {"a/1": {"sent_pkts": 5, "link_downed": 255}, "b/1": {"tx_bytes": 1}}),
        reading(2, {"a/1": {"sent_pkts": 9, "link_downed": 255}, "b/1": {"tx_bytes": 1}}),
    )
    assert found.counters == (("link_downed", 255), ("sent_pkts", 9))
    assert found.pinned == ("link_downed",)
    assert (found.transmit_counted, found.receive_counted) == (False, False)


def test_the_sampler_takes_in_columns_that_come_later() -> None:
    row = {"tx_bytes": 1, "rx_bytes": 1}
    wider = (*FIELDS, "late")
    found = sampled(
        reading(1, {"a/1": row}),
        reading(2, {"a/1": row | {"late": 5}}, fields=wider),
        reading(3, {"a/1": row | {"late": 6}}, fields=wider),
    )
    assert found.counters == (("late", 6),)
    assert (found.transmit_counted, found.receive_counted) == (True, True)
