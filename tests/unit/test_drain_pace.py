"""When the kernel's rings are read again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.daemon.ring_pace import AIM, LONGEST_NS, SHORTEST_NS, UNUSED_NS, pause_ns

RING_BYTES = 2 << 20
EVENT_BYTES = 64


@given(st.integers(1, 1_500_000), st.integers(1_000_000, 1_000_000_000))
def test_at_a_steady_rate_a_ring_is_found_as_full_as_it_should_be(calls_per_second: int, waited_ns: int) -> None:
    for _ in range(5):
        fullness = min(1.0, calls_per_second * EVENT_BYTES * waited_ns / 1e9 / RING_BYTES)
        waited_ns = pause_ns(fullness, waited_ns)
        assert SHORTEST_NS <= waited_ns <= LONGEST_NS
    fullness = calls_per_second * EVENT_BYTES * waited_ns / 1e9 / RING_BYTES
    # Also where a full ring hid how much was lost, it is found earlier from one time to the next.
    assert fullness < 1.01 * AIM or waited_ns == SHORTEST_NS


def test_a_ring_is_read_before_its_programs_wake_its_reader() -> None:
    assert 2 * AIM <= 1 / 2  # call_slots.h and completion.h in probes/bpf


def test_a_ring_that_is_hardly_used_is_left_alone_as_long_as_an_empty_one() -> None:
    hardly = EVENT_BYTES / RING_BYTES
    assert pause_ns(0.0, SHORTEST_NS) == pause_ns(hardly, LONGEST_NS) == LONGEST_NS
    assert pause_ns(1.0, SHORTEST_NS) == SHORTEST_NS


def test_without_a_communicator_only_an_empty_ring_waits_longer() -> None:
    assert pause_ns(0.0, SHORTEST_NS, used=False) == UNUSED_NS > LONGEST_NS
    assert pause_ns(1.0, SHORTEST_NS, used=False) == SHORTEST_NS
