"""The sampler: totals that never fall, rates over measured time, a steady beat. All sources and clocks simulated."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.node.sampling.sampler import OnReading, Sampler
from railscope.agent.node.sampling.state import DeviceTotals, SourceResult
from railscope.agent.node.sampling.totals import MOST_GONE, RATE_BOUNDS
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.counters import CounterReading, DeviceFailure
from railscope.probes.netdev.rtnetlink_counters import NetlinkCounters
from tests.unit.netdev_messages import SteppedClock

MILLISECOND = 1_000_000
FIELDS = ("rx_bytes", "rx_errors", "tx_bytes")


@dataclass
class Source:
    """Counters as a test sets them."""

    clock: SteppedClock | SystemClock
    rows: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """(rx_bytes, rx_errors, tx_bytes) by device."""
    generations: dict[str, int] = field(default_factory=dict)
    error: Exception | None = None
    failed: tuple[DeviceFailure, ...] = ()
    cost_ns: int = 0
    reads: int = 0
    refreshed: int = 0
    closed: bool = False
    fields: tuple[str, ...] = FIELDS

    def read(self) -> CounterReading:
        assert not self.closed
        self.reads += 1
        before_ns = self.clock.monotonic_ns()
        if isinstance(self.clock, SteppedClock):
            self.clock.now_ns += self.cost_ns
        if self.error is not None:
            raise self.error
        return CounterReading(
            before_ns,
            self.clock.monotonic_ns(),
            tuple(self.rows),
            tuple(self.generations.get(name, 0) for name in self.rows),
            self.fields,
            np.array(list(self.rows.values()), dtype=np.uint64).reshape(-1, 3),
            self.failed,
        )

    def refresh(self) -> None:
        self.refreshed += 1

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class Bench:
    """A sampler with one source on a clock that only moves when told to."""

    def __init__(self, on_reading: OnReading | None = None, period_seconds: float = 0.1) -> None:
        self.clock = SteppedClock()
        self.source = Source(self.clock, {"rail0": (0, 0, 0)})
        self.sampler = Sampler(self.clock, on_reading)
        self.sampler.add("netdev", 7, self.source, period_seconds)

    def tick(self, *, after_ms: float = 0, **rows: tuple[int, int, int]) -> int:
        self.clock.now_ns += round(after_ms * MILLISECOND)
        self.source.rows.update(rows)
        due_ns = self.sampler.read_due(self.clock.now_ns)
        assert due_ns is not None
        return due_ns

    def device(self, name: str = "rail0") -> DeviceTotals:
        found = self.sampler.state().device(7, name)
        assert found is not None
        return found

    @property
    def result(self) -> SourceResult:
        (result,) = self.sampler.state().results
        return result


def buckets(counts: tuple[int, ...]) -> dict[float, int]:
    """Non-empty buckets by upper bound, in megabits per second."""
    bounds = (*RATE_BOUNDS, float("inf"))
    return {bound / 125_000: count for bound, count in zip(bounds, counts, strict=True) if count}


def test_totals_begin_with_what_the_device_shows_and_grow_by_differences() -> None:
    bench = Bench()
    bench.tick(rail0=(5_000, 3, 9_000))
    totals = bench.device()
    assert (totals.receive_bytes, totals.transmit_bytes, totals.counters) == (5_000, 9_000, (("rx_errors", 3),))
    bench.tick(after_ms=100, rail0=(5_500, 4, 9_001))
    totals = bench.device()
    assert (totals.receive_bytes, totals.transmit_bytes, totals.counters) == (5_500, 9_001, (("rx_errors", 4),))
    assert sum(totals.transmit_rate.counts) == 1
    assert totals.transmit_rate.sum == pytest.approx(10), "what was counted before is no rate"


def test_sources_that_came_at_different_moments_are_read_together() -> None:
    """So that a thread wakes once for them all, on nodes with a network namespace for every pod."""
    bench = Bench(period_seconds=1.0)
    late = Source(bench.clock, {"rail0": (0, 0, 0)})
    bench.tick()
    bench.tick(after_ms=3_370)
    bench.sampler.add("late", 8, late, 1.0)
    bench.tick()
    reads = bench.source.reads - late.reads
    for _ in range(5):
        bench.clock.now_ns = bench.sampler.read_due(bench.clock.now_ns) or 0
        assert bench.source.reads - late.reads == reads
    assert late.reads == 5


def test_every_good_reading_is_shown_with_its_namespace() -> None:
    shown: list[tuple[int, list[int]]] = []
    bench = Bench(lambda netns, read: shown.append((netns, read.values.reshape(-1).tolist())))
    bench.tick(rail0=(5_000, 3, 9_000))
    bench.source.error = OSError("gone")
    bench.tick(after_ms=100)
    bench.source.error = None
    bench.tick(after_ms=1_000, rail0=(5_500, 4, 9_001))
    assert shown == [(7, [5_000, 3, 9_000]), (7, [5_500, 4, 9_001])]


def test_a_device_that_comes_later_begins_with_what_it_shows_and_leaves_the_others_alone() -> None:
    bench = Bench()
    bench.tick(rail0=(0, 0, 100))
    bench.tick(after_ms=100, rail0=(0, 0, 130), late0=(7, 8, 9))
    assert bench.device().transmit_bytes == 130
    late = bench.device("late0")
    assert (late.receive_bytes, late.transmit_bytes, late.counters) == (7, 9, (("rx_errors", 8),))
    assert sum(late.transmit_rate.counts) == 0


def test_rates_use_the_measured_time_between_reads_not_the_period() -> None:
    bench = Bench()
    bench.tick()
    # 12.5 MB: 1 Gb/s over the period of 100 ms, but 160 ms went by.
    bench.tick(after_ms=160, rail0=(0, 0, 12_500_000))
    assert buckets(bench.device().transmit_rate.counts) == {1000: 1}
    assert bench.device().transmit_rate.sum == pytest.approx(12_500_000 / 0.16)
    bench.tick(after_ms=40, rail0=(0, 0, 25_000_000))
    assert buckets(bench.device().transmit_rate.counts) == {1000: 1, 2500: 1}
    assert buckets(bench.device().receive_rate.counts) == {1: 2}


def test_time_between_reads_is_counted_from_their_middles() -> None:
    bench = Bench()
    bench.tick()
    bench.source.cost_ns = 20 * MILLISECOND
    bench.tick(after_ms=100, rail0=(0, 0, 1_100_000))
    assert bench.device().transmit_rate.sum == pytest.approx(1_100_000 / 0.110)


def test_a_burst_between_two_scrapes_shows_in_the_histogram() -> None:
    bench = Bench()
    total = 0
    for step in range(51):
        total += 500_000_000 if step == 25 else 0
        bench.tick(after_ms=100, rail0=(0, 0, total))
    assert buckets(bench.device().transmit_rate.counts) == {1: 49, 50_000: 1}


def test_a_link_at_full_speed_is_in_the_bucket_that_ends_there() -> None:
    bench = Bench()
    bench.tick()
    bench.tick(after_ms=100, rail0=(0, 0, 5_000_000_000))
    assert buckets(bench.device().transmit_rate.counts) == {400_000: 1}


def test_bytes_that_fall_start_a_new_baseline_and_never_lower_the_total() -> None:
    bench = Bench()
    bench.tick(rail0=(0, 9, 1_000))
    bench.tick(after_ms=100, rail0=(0, 9, 3_000))
    bench.tick(after_ms=100, rail0=(0, 0, 10))
    assert (bench.device().transmit_bytes, bench.result.resets) == (3_000, 1)
    bench.tick(after_ms=100, rail0=(0, 1, 60))
    assert bench.device().transmit_bytes == 3_050
    assert bench.device().counters == (("rx_errors", 10),)
    assert sum(bench.device().transmit_rate.counts) == 2


def test_another_device_under_the_same_name_starts_a_new_baseline_also_with_higher_counters() -> None:
    bench = Bench()
    bench.tick(rail0=(0, 0, 1_000))
    bench.source.generations["rail0"] = 12
    bench.tick(after_ms=100, rail0=(0, 0, 900_000))
    bench.tick(after_ms=100, rail0=(0, 0, 900_001))
    assert (bench.device().transmit_bytes, bench.result.resets) == (1_001, 1)


def test_a_counter_that_reads_zero_once_adds_nothing_when_it_comes_back() -> None:
    bench = Bench()
    for sent in (10**13, 0, 10**13 + 5, 10**13 + 9):
        bench.tick(after_ms=100, rail0=(0, 0, sent))
    assert (bench.device().transmit_bytes, bench.result.resets) == (10**13 + 4, 2)


def test_an_error_counter_corrected_downwards_stands_still_and_bytes_go_on() -> None:
    bench = Bench()
    for errors, sent in ((5, 100), (9, 200), (8, 300), (10, 400)):
        bench.tick(after_ms=100, rail0=(0, errors, sent))
    totals = bench.device()
    assert (totals.transmit_bytes, totals.counters) == (400, (("rx_errors", 11),))


readings = st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2**40), max_size=3), max_size=20)


@settings(deadline=None)
@given(readings)
def test_totals_never_fall_and_never_exceed_what_was_counted_upwards(history: list[dict[str, int]]) -> None:
    bench = Bench()
    bench.source.rows = {}
    before: dict[str, int] = {}
    last: dict[str, int] = {}
    upwards: dict[str, int] = {}
    for rows in history:
        bench.source.rows = {name: (0, 0, sent) for name, sent in rows.items()}
        bench.tick(after_ms=1000)
        for name, sent in rows.items():
            upwards[name] = upwards.get(name, 0) + max(0, sent - last.get(name, 0))
            last[name] = sent
            total = bench.device(name).transmit_bytes
            # One step is at most 2**40 bytes a second; steeper ones are taken for a counter that was set.
            assert before.get(name, 0) <= total <= upwards[name]
            before[name] = total


def test_a_device_that_comes_back_goes_on_with_its_total() -> None:
    bench = Bench()
    bench.tick(rail0=(0, 0, 100))
    bench.tick(after_ms=100, rail0=(0, 0, 150))
    bench.source.rows = {"other": (0, 0, 0)}
    bench.tick(after_ms=100)
    assert (bench.device().transmit_bytes, bench.device().present) == (150, False)
    bench.tick(after_ms=100, rail0=(0, 0, 160))
    assert (bench.device().transmit_bytes, bench.device().present) == (160, True)


def test_devices_that_are_gone_for_long_are_forgotten() -> None:
    bench = Bench()
    bench.tick()
    bench.source.rows = {"veth1": (0, 0, 0)}
    bench.tick(after_ms=100)
    bench.source.rows = {"veth2": (0, 0, 0)}
    bench.tick(after_ms=400_000)
    assert bench.sampler.state().devices() == ((7, "veth2"),)


def test_of_the_names_that_devices_had_the_newest_are_kept() -> None:
    bench = Bench()
    for at in range(3 * MOST_GONE):
        bench.source.rows = {f"veth{at}": (0, 0, 0)}
        bench.tick(after_ms=100)
    names = {name for _, name in bench.sampler.state().devices()}
    assert names == {f"veth{at}" for at in range(2 * MOST_GONE - 1, 3 * MOST_GONE)}


def test_missed_beats_are_counted_and_the_schedule_does_not_drift() -> None:
    bench = Bench()
    start_ns = bench.clock.now_ns
    bench.tick()
    assert bench.tick(after_ms=103) == start_ns + 200 * MILLISECOND
    assert bench.tick(after_ms=250) == start_ns + 400 * MILLISECOND
    assert (bench.source.reads, bench.result.ticks_missed) == (3, 1)


def test_a_tick_before_its_time_reads_nothing() -> None:
    bench = Bench()
    bench.tick()
    bench.tick(after_ms=99)
    assert bench.source.reads == 1


def test_a_failing_source_pauses_longer_and_longer_and_comes_back_with_its_totals() -> None:
    bench = Bench()
    bench.tick(rail0=(0, 0, 100))
    bench.source.error = OSError(19, "No such device")
    pauses = []
    for _ in range(12):
        due_ns = bench.tick(after_ms=100)
        pauses.append((due_ns - bench.clock.now_ns) // (100 * MILLISECOND))
        bench.clock.now_ns = due_ns - 100 * MILLISECOND
    assert pauses[:5] == [2, 4, 8, 16, 32]
    assert max(pauses) == 300
    assert (bench.result.success, bench.result.error) == (False, "[Errno 19] No such device")
    assert bench.result.ticks_missed == 0
    assert not bench.device().present
    bench.source.error = None
    due_ns = bench.tick(after_ms=100, rail0=(0, 0, 1_000_100))
    assert due_ns - bench.clock.now_ns == 100 * MILLISECOND
    assert (bench.result.success, bench.result.error, bench.result.failures) == (True, "", 12)
    assert bench.device().transmit_bytes == 1_000_100
    assert sum(bench.device().transmit_rate.counts) == 0, "the average over the gap is no short-interval rate"
    assert bench.source.refreshed > 0


def test_one_failing_source_leaves_the_others_alone() -> None:
    bench = Bench()
    bad = Source(bench.clock, error=ValueError("garbage"))
    bench.sampler.add("bad", 8, bad)
    bench.tick()
    bench.tick(after_ms=100, rail0=(0, 0, 7))
    assert bench.device().transmit_bytes == 7
    assert [(r.collector, r.success) for r in bench.sampler.state().collector_results()] == [
        ("netdev", True),
        ("bad", False),
    ]


def test_a_device_that_failed_alone_is_named_in_the_result() -> None:
    bench = Bench()
    bench.source.failed = (DeviceFailure("rail1", "Input/output error"),)
    bench.tick()
    assert (bench.result.success, bench.result.failed_devices[0].device) == (True, "rail1")


def test_a_slow_source_is_read_less_often_on_its_own_beat() -> None:
    bench = Bench(period_seconds=0.01)
    start_ns = bench.clock.now_ns
    bench.source.cost_ns = 8 * MILLISECOND
    for _ in range(40):
        due_ns = bench.sampler.read_due(bench.clock.now_ns)
        assert due_ns is not None
        assert (due_ns - start_ns) % (10 * MILLISECOND) == 0
        bench.clock.now_ns = due_ns
    spent_ns = 40 * 8 * MILLISECOND
    assert bench.clock.now_ns - start_ns >= 3 * spent_ns
    assert bench.result.ticks_spared > 0
    assert bench.result.duration_seconds == pytest.approx(0.008)


def test_sources_have_their_own_periods() -> None:
    bench = Bench()
    fast = Source(bench.clock)
    bench.sampler.add("fast", 8, fast, 0.025)
    for _ in range(40):
        bench.tick(after_ms=25)
    assert (fast.reads, bench.source.reads) == (40, 11)


def test_the_same_name_in_two_namespaces_is_two_devices() -> None:
    bench = Bench()
    other = Source(bench.clock, {"rail0": (0, 0, 0)})
    bench.sampler.add("netdev 8", 8, other)
    bench.tick()
    other.rows["rail0"] = (0, 0, 33)
    bench.tick(after_ms=100, rail0=(0, 0, 11))
    state = bench.sampler.state()
    found = [state.device(netns, "rail0") for netns in (7, 8)]
    assert [totals.transmit_bytes for totals in found if totals is not None] == [11, 33]


def test_a_state_does_not_change_afterwards() -> None:
    bench = Bench()
    bench.tick()
    state = bench.sampler.state()
    bench.tick(after_ms=100, rail0=(0, 0, 50), rail1=(0, 0, 0))
    before = state.device(7, "rail0")
    assert before is not None
    assert (before.transmit_bytes, sum(before.transmit_rate.counts)) == (0, 0)
    assert state.device(7, "rail1") is None


def test_a_removed_source_is_closed_and_its_devices_go() -> None:
    bench = Bench()
    bench.tick()
    bench.sampler.remove("netdev")
    bench.sampler.remove("netdev")
    assert bench.source.closed
    assert bench.sampler.read_due(bench.clock.now_ns) is None
    assert bench.sampler.state().devices() == ()


def test_a_refresh_reaches_the_source_before_its_next_read() -> None:
    bench = Bench()
    bench.sampler.refresh("netdev")
    assert bench.source.refreshed == 0
    bench.tick()
    bench.tick(after_ms=100)
    assert bench.source.refreshed == 1


def test_a_source_that_suddenly_counts_other_things_fails_instead_of_mixing_them() -> None:
    bench = Bench()
    bench.tick(rail0=(10, 20, 30))
    bench.source.fields = ("tx_bytes", "rx_errors", "rx_bytes")
    bench.tick(after_ms=100, rail0=(40, 50, 60))
    assert not bench.result.success
    assert bench.device().transmit_bytes == 30


@pytest.mark.parametrize("period", [0.0009, 10.1, 0.0])
def test_periods_outside_one_millisecond_to_ten_seconds_are_refused(period: float) -> None:
    bench = Bench()
    with pytest.raises(ValueError, match=r"choose between 0\.001 and 10 s"):
        bench.sampler.add("other", 1, bench.source, period)


def test_a_key_is_used_once() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="'netdev' is already registered"):
        bench.sampler.add("netdev", 1, bench.source)


def test_the_thread_reads_until_stopped_while_sources_come_and_go() -> None:
    clock = SystemClock()
    sampler = Sampler(clock)
    sampler.start()
    assert sampler.alive
    enough = threading.Event()

    class Counting(Source):
        def read(self) -> CounterReading:
            if self.reads > 20:
                enough.set()
            return super().read()

    kept = Counting(clock, {"rail0": (0, 0, 0)})
    sampler.add("kept", 1, kept, 0.001)
    passing = [Source(clock, {"rail0": (0, 0, 0)}) for _ in range(20)]
    for number, source in enumerate(passing):
        sampler.add(f"passing {number}", number, source, 0.001)
        sampler.state()
        sampler.remove(f"passing {number}")
    assert enough.wait(30)
    sampler.stop()
    assert not sampler.alive
    assert kept.closed
    assert all(source.closed for source in passing)


def test_a_source_that_hangs_does_not_keep_the_agent_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    clock = SystemClock()
    sampler = Sampler(clock)
    begun, let_go = threading.Event(), threading.Event()

    class Hanging(Source):
        def read(self) -> CounterReading:
            begun.set()
            let_go.wait(30)
            return super().read()

    hanging, other = Hanging(clock, {"rail0": (0, 0, 0)}), Source(clock, {"rail0": (0, 0, 0)})
    sampler.add("hanging", 1, hanging)
    sampler.start()
    assert begun.wait(30)
    sampler.add("other", 2, other)
    with caplog.at_level("WARNING", "railscope.sampling"):
        sampler.stop()
    assert caplog.messages == ["hanging does not answer: the agent exits without waiting for it"]
    assert other.closed
    assert not hanging.closed, "what is read must not be closed under the reader's hands"
    let_go.set()
    deadline_ns = clock.monotonic_ns() + 30_000_000_000
    while not hanging.closed and clock.monotonic_ns() < deadline_ns:
        clock.sleep(0.01)
    assert hanging.closed


def test_a_source_is_read_as_often_as_it_is_wanted_and_together_with_the_others() -> None:
    bench = Bench(period_seconds=1.0)
    other = Source(bench.clock, {"rail0": (0, 0, 0)})
    bench.sampler.add("other", 8, other, 1.0)
    bench.tick()

    def reads_over(seconds: int) -> tuple[int, int, int]:
        """Of both, and moments at which something was read."""
        before = bench.source.reads, other.reads
        moments, end_ns = 0, bench.clock.now_ns + seconds * 1000 * MILLISECOND
        while (due_ns := bench.tick()) <= end_ns:
            bench.clock.now_ns = due_ns
            moments += 1
        bench.clock.now_ns = end_ns
        return bench.source.reads - before[0], other.reads - before[1], moments

    assert reads_over(20)[:2] == (20, 20)
    bench.sampler.set_period("netdev", 2.0)
    assert reads_over(20) == (10, 20, 20)
    bench.sampler.set_period("netdev", 1.0)
    assert reads_over(20) == (20, 20, 20)
    bench.sampler.set_period("nobody", 1.0)


def test_a_source_that_is_wanted_soon_is_read_at_once_and_then_with_the_others_again() -> None:
    bench = Bench(period_seconds=2.0)
    bench.tick()
    bench.tick(after_ms=2_300)
    reads = bench.source.reads
    bench.sampler.read_soon(["netdev", "nobody"])
    due_ns = bench.tick()
    assert bench.source.reads == reads + 1
    assert due_ns % (2_000 * MILLISECOND) == 0
    assert due_ns > bench.clock.now_ns


def test_a_source_that_failed_keeps_its_pause_however_soon_it_is_wanted() -> None:
    bench = Bench(period_seconds=1.0)
    bench.source.error = OSError("gone")
    bench.tick()
    bench.sampler.read_soon(["netdev"], 5.0)
    bench.tick()
    assert bench.source.reads == 1


def test_whoever_wants_a_reading_gets_it_and_waits_no_longer_than_told_for_one_that_hangs() -> None:
    clock = SystemClock()
    sampler = Sampler(clock)
    prompt, hangs, goes_on = Source(clock, {"rail0": (0, 0, 0)}), Source(clock, {}), threading.Event()
    sampler.add("prompt", 7, prompt, 10.0)
    sampler.start()
    try:
        while not prompt.reads:
            clock.sleep(0.001)
        sampler.read_soon(["prompt"], 30.0)
        assert prompt.reads == 2
        read, hangs_read = hangs.read, threading.Event()

        def hang() -> CounterReading:
            hangs_read.set()
            goes_on.wait(30)
            return read()

        hangs.read = hang  # type: ignore[method-assign]
        sampler.add("hangs", 8, hangs, 10.0)
        assert hangs_read.wait(30)
        began_ns = clock.monotonic_ns()
        sampler.read_soon(["hangs", "prompt"], 0.05)
        assert clock.monotonic_ns() - began_ns >= 50 * MILLISECOND
        assert prompt.reads == 2
    finally:
        goes_on.set()
        sampler.stop()


def test_the_period_of_a_source_whose_answers_wait_to_be_understood_stays() -> None:
    sampler = Sampler(SteppedClock())
    counters = NetlinkCounters(SteppedClock())
    sampler.add("netdev", 7, counters)
    with pytest.raises(ValueError, match="period of netdev is set for good"):
        sampler.set_period("netdev", 2.0)
    sampler.stop()


def test_a_wish_for_a_reading_while_one_is_under_way_is_heard_right_after_it() -> None:
    bench = Bench(period_seconds=5.0)
    bench.tick()
    bench.tick(after_ms=5_000)
    read = bench.source.read

    def wished_for_meanwhile() -> CounterReading:
        bench.clock.now_ns += MILLISECOND
        bench.sampler.read_soon(["netdev"])
        bench.source.read = read  # type: ignore[method-assign]
        return read()

    bench.source.read = wished_for_meanwhile  # type: ignore[method-assign]
    assert bench.tick(after_ms=5_000) <= bench.clock.now_ns
    reads = bench.source.reads
    assert bench.tick() > bench.clock.now_ns
    assert bench.source.reads == reads + 1


def test_a_source_that_failed_while_it_was_read_seldom_is_tried_as_soon_as_if_it_had_not_been() -> None:
    bench = Bench(period_seconds=8.0)
    bench.source.error = OSError("gone")
    assert bench.tick() - bench.clock.now_ns > 10_000 * MILLISECOND
    bench.sampler.set_period("netdev", 1.0)
    assert bench.tick() - bench.clock.now_ns == 2_000 * MILLISECOND
