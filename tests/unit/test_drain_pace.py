"""When the kernel's rings are read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.drain_pace import POLLED, SHORTEST_NS, UNUSED_NS, WOKEN, Pace, pause_ns

RING_BYTES = 2 << 20
EVENT_BYTES = 64

of_both = pytest.mark.parametrize("pace", [WOKEN, POLLED], ids=["woken", "polled"])


@of_both
@given(st.integers(1, 1_500_000), st.integers(1_000_000, 1_000_000_000))
def test_at_a_steady_rate_a_ring_is_found_as_full_as_it_should_be(
    pace: Pace, calls_per_second: int, waited_ns: int
) -> None:
    for _ in range(5):
        fullness = min(1.0, calls_per_second * EVENT_BYTES * waited_ns / 1e9 / RING_BYTES)
        waited_ns = pause_ns(pace, fullness, waited_ns)
        assert SHORTEST_NS <= waited_ns <= pace.longest_ns
    fullness = calls_per_second * EVENT_BYTES * waited_ns / 1e9 / RING_BYTES
    # Also where a full ring hid how much was lost, it is found earlier from one time to the next.
    assert fullness < 1.01 * pace.aim or waited_ns == SHORTEST_NS


def test_a_ring_is_read_before_its_programs_wake_its_reader() -> None:
    assert 2 * WOKEN.aim <= 1 / 2  # RECORDS_BETWEEN_LOOKS in probes/bpf/observed.h


@of_both
def test_a_ring_that_is_hardly_used_is_left_alone_as_long_as_an_empty_one(pace: Pace) -> None:
    hardly = EVENT_BYTES / RING_BYTES
    assert pause_ns(pace, 0.0, SHORTEST_NS) == pause_ns(pace, hardly, pace.longest_ns) == pace.longest_ns
    assert pause_ns(pace, 1.0, SHORTEST_NS) == SHORTEST_NS


@of_both
def test_without_a_communicator_only_an_empty_ring_waits_longer(pace: Pace) -> None:
    assert pause_ns(pace, 0.0, SHORTEST_NS, used=False) == UNUSED_NS > pace.longest_ns
    assert pause_ns(pace, 1.0, SHORTEST_NS, used=False) == SHORTEST_NS
