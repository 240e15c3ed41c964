"""Answers that are taken at the beat and understood later: nothing may depend on when. Sources and clocks simulated."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.node.sampling.sampler import Sampler
from railscope.agent.node.sampling.state import DeviceTotals, SourceResult
from railscope.agent.node.sampling.totals import Totals
from railscope.probes.native.beats import Answer
from railscope.probes.netdev.counters import CounterBlock, CounterReading
from railscope.probes.netdev.rtnetlink_counters import LINK_STATS_FIELDS, parse_alike, parse_statistics
from tests.unit.netdev_messages import SteppedClock, done, message, statistics

MILLISECOND = 1_000_000
FIELDS = ("rx_bytes", "tx_bytes")


@dataclass
class Prompt:
    """A source of one device that answers and understands in one."""

    clock: SteppedClock
    sent: int = 0
    error: OSError | None = None
    reads: int = 0
    refreshed: int = 0
    closed: bool = False

    def read(self) -> CounterReading:
        (block,) = blocks_of([self.ask()])
        self.reads += 1
        return block.reading(0)

    def ask(self) -> Answer:
        if self.error is not None:
            raise self.error
        now_ns = self.clock.monotonic_ns()
        return Answer(now_ns, now_ns, [struct.pack("<Q", self.sent)])

    def refresh(self) -> None:
        self.refreshed += 1

    def close(self) -> None:
        self.closed = True


@dataclass
class Deferring(Prompt):
    """The same device, understood later."""

    understood: list[int] = field(default_factory=list)
    """How many answers at a time."""
    nonsense: bool = False
    must_be_read: bool = False

    def read_raw(self) -> Answer | None:
        return None if self.must_be_read else self.ask()

    def question(self) -> None:
        return None

    def parse_raw(self, answers: Sequence[Answer]) -> list[CounterBlock]:
        self.understood.append(len(answers))
        if self.nonsense:
            raise ValueError("this makes no sense")
        return blocks_of(answers)


def blocks_of(answers: Sequence[Answer]) -> list[CounterBlock]:
    sent = [struct.unpack("<Q", answer.datagrams[0])[0] for answer in answers]
    values = np.array([[(2 * value, value)] for value in sent], dtype=np.uint64)
    times = tuple((answer.before_ns, answer.after_ns) for answer in answers)
    return [CounterBlock(times, ("rail0",), (7,), FIELDS, values)]


class Sampled:
    """A sampler at 1 kHz, whose clock only moves when told to."""

    def __init__(self, source_type: type[Prompt] = Deferring) -> None:
        self.clock = SteppedClock()
        self.source = source_type(self.clock)
        self.sampler = Sampler(self.clock)
        self.sampler.add("netdev", 7, self.source, 0.001)

    @property
    def understood(self) -> list[int]:
        assert isinstance(self.source, Deferring)
        return self.source.understood

    def beat(self, *sent: int) -> None:
        for value in sent:
            self.source.sent = value
            self.sampler.read_due(self.clock.now_ns)
            self.clock.now_ns += MILLISECOND

    def device(self) -> DeviceTotals:
        found = self.sampler.state().device(7, "rail0")
        assert found is not None
        return found

    def result(self) -> SourceResult:
        (result,) = self.sampler.state().results
        return result


def test_answers_are_understood_when_somebody_asks() -> None:
    sampled = Sampled()
    sampled.beat(100, 101, 102, 103)
    assert (sampled.source.reads, sampled.understood) == (1, [])
    assert sampled.device().transmit_bytes == 103
    assert sampled.understood == [3]
    assert sum(sampled.device().transmit_rate.counts) == 3
    assert sampled.result().reads == 4


def test_answers_do_not_pile_up_when_nobody_asks() -> None:
    sampled = Sampled()
    sampled.beat(*range(200))
    assert sampled.understood == [64, 64, 64]


def test_a_source_that_is_read_once_a_second_or_less_is_understood_at_once() -> None:
    sampled = Sampled()
    slow = Deferring(sampled.clock)
    sampled.sampler.add("slow", 8, slow, 2.0)
    for _ in range(8):
        sampled.sampler.read_due(sampled.clock.now_ns)
        sampled.clock.now_ns += 1_000_000_000
    assert len(slow.understood) >= 3
    assert set(slow.understood) == {1}


steps = st.one_of(
    st.integers(0, 2**33).map(lambda sent: ("beat", sent)),
    st.sampled_from([("ask", 0), ("refuse", 0), ("refresh", 0), ("late", 0)]),
)


@settings(deadline=None)
@given(st.lists(steps, max_size=90))
def test_what_is_understood_later_is_what_would_have_been_understood_at_once(history: list[tuple[str, int]]) -> None:
    both = Sampled(Prompt), Sampled(Deferring)
    for sampled in both:
        sampled.beat(0)
        for step, sent in history:
            sampled.source.error = OSError(5, "Input/output error") if step == "refuse" else None
            if step == "ask":
                sampled.sampler.state()
            elif step == "refresh":
                sampled.sampler.refresh("netdev")
            elif step == "late":
                sampled.clock.now_ns += 7 * MILLISECOND
            else:
                sampled.beat(sent)
    at_once, later = both
    assert later.result() == at_once.result()
    one, other = at_once.device(), later.device()
    assert (other.transmit_bytes, other.receive_bytes) == (one.transmit_bytes, one.receive_bytes)
    assert other.transmit_rate.counts == one.transmit_rate.counts
    assert other.receive_rate.sum == pytest.approx(one.receive_rate.sum)
    assert later.source.refreshed == at_once.source.refreshed


def test_an_answer_that_makes_no_sense_is_a_failure_and_the_source_comes_back() -> None:
    sampled = Sampled()
    sampled.beat(10, 20)
    assert isinstance(sampled.source, Deferring)
    sampled.source.nonsense = True
    sampled.beat(30, 40)
    result = sampled.result()
    assert (result.success, result.error, result.failures) == (False, "this makes no sense", 3)
    sampled.source.nonsense = False
    sampled.beat(50, 60)
    result = sampled.result()
    assert (result.success, result.error) == (True, "")
    assert sampled.device().transmit_bytes == 60
    assert sampled.source.refreshed == 1, "names are learnt anew after a failure"


def test_a_source_that_must_be_read_is_read_after_what_it_answered_before() -> None:
    sampled = Sampled()
    sampled.beat(10, 20, 30)
    assert isinstance(sampled.source, Deferring)
    sampled.source.must_be_read = True
    sampled.beat(40)
    assert (sampled.source.reads, sampled.understood) == (2, [2])
    sampled.source.must_be_read = False
    sampled.beat(50)
    assert sampled.device().transmit_bytes == 50
    assert sum(sampled.device().transmit_rate.counts) == 4
    assert (sampled.result().failures, sampled.result().reads) == (0, 5)


def test_what_was_answered_before_a_failure_counts() -> None:
    sampled = Sampled()
    sampled.beat(10, 20, 30)
    sampled.source.error = OSError(19, "No such device")
    sampled.beat(0)
    assert (sampled.result().success, sampled.understood) == (False, [2])
    assert sampled.device().transmit_bytes == 30


def test_a_removed_source_is_closed_and_its_answers_are_forgotten() -> None:
    sampled = Sampled()
    sampled.beat(10, 20)
    sampled.sampler.remove("netdev")
    assert sampled.source.closed
    assert sampled.sampler.state().devices() == ()
    assert sampled.sampler.read_due(sampled.clock.now_ns) is None
    assert sampled.understood == []


class TestBlocks:
    """Readings taken in at once, against the same taken in one by one."""

    @settings(deadline=None)
    @given(
        st.lists(st.lists(st.integers(0, 2**40), min_size=4, max_size=4), min_size=2, max_size=12),
        st.booleans(),
        st.booleans(),
    )
    def test_a_block_is_its_readings_one_after_the_other(
        self, counted: list[list[int]], rising: bool, rates: bool
    ) -> None:
        values = np.array(counted, dtype=np.uint64).reshape(len(counted), 2, 2)
        if rising:
            values = np.cumsum(values % 1000, axis=0, dtype=np.uint64)
        times = tuple((at * MILLISECOND, at * MILLISECOND + 10) for at in range(1, len(values) + 1))
        block = CounterBlock(times, ("rail0", "rail1"), (1, 2), FIELDS, values)
        first = CounterBlock(times[:1], block.names, block.generations, FIELDS, values[:1])
        rest = CounterBlock(times[1:], block.names, block.generations, FIELDS, values[1:])
        one, other = Totals(FIELDS), Totals(FIELDS)
        for number in range(len(values)):
            one.add(block.reading(number), rates=rates if number == 1 else number > 1)
        other.add_block(first, rates=False)
        other.add_block(rest, rates=rates)
        assert (other.totals == one.totals).all()
        assert (other.counts == one.counts).all()
        assert other.sums == pytest.approx(one.sums)
        assert other.resets == one.resets


class TestAlikeAnswers:
    """Answers of the kernel, simulated, understood together."""

    def test_answers_about_the_same_devices_are_understood_together(self) -> None:
        answers = [[statistics(3, {2: 10 + at}) + statistics(5, {2: 20 + at}) + done()] for at in range(3)]
        alike = parse_alike(answers)
        assert alike is not None
        indexes, values = alike
        assert indexes == (3, 5)
        assert values.shape == (3, 2, len(LINK_STATS_FIELDS))
        for answer, found in zip(answers, values, strict=True):
            assert (found == parse_statistics(answer)[1]).all()

    @pytest.mark.parametrize(
        "other",
        [
            [statistics(3, {}) + statistics(6, {}) + done()],
            [statistics(5, {}) + statistics(3, {}) + done()],
            [statistics(3, {}) + done()],
            [statistics(3, {}) + statistics(5, {}), done()],
            [statistics(3, {}) + statistics(5, {})[:-4] + b"\1\0\0\0" + message(2, bytes(4))],
            [],
        ],
        ids=["another device", "another order", "one gone", "two datagrams", "no end", "nothing"],
    )
    def test_answers_that_differ_are_left_to_be_understood_one_by_one(self, other: list[bytes]) -> None:
        usual = [statistics(3, {}) + statistics(5, {}) + done()]
        assert parse_alike([usual, other]) is None
        assert parse_alike([other, usual]) is None

    def test_a_device_listed_twice_is_left_to_be_refused(self) -> None:
        assert parse_alike([[statistics(3, {}) + statistics(3, {}) + done()]]) is None

    @settings(deadline=None)
    @given(st.data())
    def test_a_flipped_byte_never_hangs_and_is_never_taken_for_another_shape(self, data: st.DataObject) -> None:
        whole = bytearray(statistics(3, {2: 1}) + statistics(5, {2: 2}) + done())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        alike = parse_alike([[bytes(whole)], [bytes(whole)]])
        assert alike is None or alike[1].shape == (2, len(alike[0]), len(LINK_STATS_FIELDS))
