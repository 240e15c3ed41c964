"""Expected bytes per rail against simulated rails: queues that drain at a given speed, with protocol headers."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.model.edge_share import Placement
from railscope.agent.model.expected import ExpectedBytes, ExpectedSums, ObservedCalls, WireTotals, whole_bytes
from railscope.agent.node.attribution.explained import (
    Correlator,
    DirectionWire,
    NcclBytes,
    PortTotals,
    RailWire,
)
from railscope.probes.nccl.abi import Op

MILLISECOND_NS = 1_000_000
SECOND_NS = 1000 * MILLISECOND_NS
MIB = 1 << 20

Ratios = list[tuple[float | None, float | None]]


@dataclass
class Fabric:
    """Two rails of one node, transmitting: an operation is enqueued at once and leaves at the rails' speed."""

    correlator: Correlator = field(default_factory=Correlator)
    bytes_per_second: int = 100 * MIB
    header_percent: int = 4
    now_ns: int = 0
    expected: WireTotals = field(default_factory=WireTotals)
    queued: list[int] = field(default_factory=lambda: [0, 0])
    port: list[int] = field(default_factory=lambda: [0, 0])

    def enqueue(self, on_rail_0: int, on_rail_1: int, small: bool = False) -> None:
        """An operation that puts these bytes on the rails."""
        expected, total = self.expected, on_rail_0 + on_rail_1
        self.expected = WireTotals(
            expected.spread_bytes + (0 if small else total), expected.small_bytes + (total if small else 0)
        )
        self.queued = [self.queued[0] + on_rail_0, self.queued[1] + on_rail_1]

    def others(self, on_rail_0: int, on_rail_1: int) -> None:
        """Traffic that is no collective."""
        self.port = [self.port[0] + on_rail_0, self.port[1] + on_rail_1]

    def tick(self) -> tuple[DirectionWire, DirectionWire]:
        """Let 100 ms pass."""
        self.now_ns += 100 * MILLISECOND_NS
        for rail in range(2):
            leaving = min(self.queued[rail], self.bytes_per_second // 10)
            self.queued[rail] -= leaving
            self.port[rail] += leaving * (100 + self.header_percent) // 100
        return self.look()

    def look(self) -> tuple[DirectionWire, DirectionWire]:
        first, second = self.correlator.update(
            self.now_ns,
            [PortTotals("a", f"rail{rail}", "", self.port[rail], 0) for rail in range(2)],
            [ExpectedBytes("a", self.expected, WireTotals())],
        )
        return first.transmit, second.transmit

    def ratios(self, ticks: int) -> Ratios:
        """The ratios of both rails after each tick."""
        looks = [self.tick() for _ in range(ticks)]
        return [(first.explained_ratio, second.explained_ratio) for first, second in looks]


def values(ratios: Ratios) -> list[float]:
    return [ratio for pair in ratios for ratio in pair if ratio is not None]


@pytest.mark.parametrize("header_percent", [0, 1, 4, 50])
def test_evenly_spread_operations_are_explained_but_for_their_headers(header_percent: int) -> None:
    fabric = Fabric(header_percent=header_percent)
    seen: Ratios = []
    for step in range(900):  # busy without a pause, each operation two to three ticks long
        if step % 3 == 0:
            fabric.enqueue((26 + step % 7) * MIB, (26 + step % 7) * MIB)
        seen += fabric.ratios(1)
    explained = 100 / (100 + header_percent)
    assert all(None not in pair for pair in seen[100:])
    assert all(explained - 0.02 < value < explained + 0.06 for value in values(seen[100:]))
    assert values(seen[-1:]) == [pytest.approx(explained, rel=0.03)] * 2


def test_a_long_operation_in_flight_shows_no_wild_ratio() -> None:
    fabric = Fabric()
    seen = fabric.ratios(10)
    for _ in range(3):
        fabric.enqueue(4000 * MIB, 4000 * MIB)  # 40 s on the rails, longer than the window
        seen += fabric.ratios(420)
    assert values(seen[-1:]) == [pytest.approx(1 / 1.04)] * 2
    assert all(0.9 < value < 1.1 for value in values(seen))


def test_operations_queued_ahead_show_no_wild_ratio() -> None:
    fabric = Fabric()
    seen = fabric.ratios(1)
    fabric.enqueue(400 * MIB, 400 * MIB)
    for _ in range(70):  # 2 s of work every 2 s, two operations ahead: the rails never rest
        fabric.enqueue(200 * MIB, 200 * MIB)
        seen += fabric.ratios(20)
    assert None not in seen[-1]
    assert all(0.9 < value < 1.1 for value in values(seen))


def test_a_little_that_is_always_in_flight_does_not_hide_the_ratio() -> None:
    fabric = Fabric(header_percent=0)
    fabric.tick()
    fabric.enqueue(MIB, MIB)
    seen: Ratios = []
    for _ in range(400):
        fabric.enqueue(10 * MIB, 10 * MIB)
        seen += fabric.ratios(1)
    assert all(None not in pair for pair in seen[100:])
    assert values(seen[-1:]) == [pytest.approx(1, rel=0.01)] * 2


def test_the_last_ratio_stands_for_four_windows_while_an_operation_leaves() -> None:
    fabric = Fabric()
    fabric.tick()
    for _ in range(50):
        fabric.enqueue(MIB, MIB)
        fabric.tick()
    fabric.enqueue(10_000 * MIB, 10_000 * MIB)
    seen = fabric.ratios(1000)
    assert len(values(seen)) == 2 * len(seen)
    assert all(0.9 < value < 1.1 for value in values(seen))


def test_the_last_ratio_stands_for_one_window_where_nothing_leaves_any_more() -> None:
    fabric = Fabric()
    fabric.tick()
    for _ in range(50):
        fabric.enqueue(MIB, MIB)
        fabric.tick()
    fabric.bytes_per_second = 0
    fabric.enqueue(10_000 * MIB, 10_000 * MIB)
    seen = fabric.ratios(600)
    assert values(seen[250:251]) == [pytest.approx(1 / 1.04)] * 2
    assert values(seen[310:]) == []


def test_a_rail_without_collectives_but_with_traffic_is_explained_by_nothing() -> None:
    fabric = Fabric()
    for _ in range(50):
        fabric.others(MIB, 0)
        first, second = fabric.tick()
    assert first == DirectionWire(0, 0.0)
    assert second == DirectionWire(0, None)


def test_traffic_of_others_lowers_the_ratio_of_its_rail_only() -> None:
    fabric = Fabric(header_percent=0)
    for _ in range(400):
        fabric.enqueue(MIB, MIB)
        fabric.others(3 * MIB, 0)
        first, second = fabric.tick()
    assert first.explained_ratio == pytest.approx(0.25, rel=0.02)
    assert second.explained_ratio == pytest.approx(1, rel=0.02)


def test_large_messages_on_one_rail_show_as_a_skew_at_once() -> None:
    fabric = Fabric()
    for _ in range(50):
        fabric.enqueue(4 * MIB, 2 * MIB)
        first, second = fabric.tick()
    assert first.explained_ratio == pytest.approx(3 / 4 / 1.04, rel=0.05)
    assert second.explained_ratio == pytest.approx(3 / 2 / 1.04, rel=0.05)


def test_small_messages_belong_to_the_rail_that_carried_them() -> None:
    fabric = Fabric(header_percent=60)
    fabric.tick()
    for _ in range(50):
        fabric.enqueue(200_000, 0, small=True)
        fabric.others(0, 100)
        first, second = fabric.tick()
    assert first.explained_ratio == pytest.approx(1 / 1.6, rel=0.01)
    assert first.wire_bytes is not None
    assert second.wire_bytes is not None
    assert second.wire_bytes < first.wire_bytes / 1000
    assert second.explained_ratio is None


def test_small_messages_beside_large_ones_belong_to_the_rail_with_more() -> None:
    fabric = Fabric(header_percent=0)
    fabric.tick()
    for _ in range(100):
        fabric.enqueue(MIB, MIB)
        fabric.enqueue(0, 100_000, small=True)
        first, second = fabric.tick()
    assert first.explained_ratio == pytest.approx(1, rel=0.01)
    assert second.explained_ratio == pytest.approx(1, rel=0.01)


def test_small_messages_without_evidence_are_shared_evenly() -> None:
    fabric = Fabric()
    fabric.expected = WireTotals(0, 1000)
    first, second = fabric.look()
    assert (first.wire_bytes, second.wire_bytes) == (500, 500)


# Disaggregated inference on two hosts with two rails of 10 s: small collectives beside NIXL's KV caches.
NCCL_SENT = (7_720_448, 2_359_296)
NCCL_RECEIVED = (7_868_440, 2_697_192)
EXPECTED = 10_565_632
NIXL_MOVED = (402_653_184, 637_534_208)
"""On each rail: more than collectives, and with another preference."""
STEPS = 100


def beside_nixl(sent: bool, carried: bool) -> tuple[RailWire, RailWire]:
    """What is expected at the end, where what NCCL `sent` is seen as it hands it over, or what connections `carried`.

    Of an operation that is expected, the bytes are handed over at the next update, and connections are read at every
    tenth.
    """
    correlator = Correlator()
    first, second = correlator.update(0, [PortTotals("a", f"rail{rail}", "", 0, 0) for rail in range(2)], [])
    for step in range(1, STEPS + 1):
        ports = []
        for rail in range(2):
            out, into, other = (total[rail] * (step - 1) // STEPS for total in (NCCL_SENT, NCCL_RECEIVED, NIXL_MOVED))
            read = (step - 1) // 10 * 10
            ports.append(
                PortTotals(
                    "a",
                    f"rail{rail}",
                    "",
                    out + other,
                    into + other,
                    nccl=NcclBytes(
                        out if sent else None,
                        NCCL_SENT[rail] * read // STEPS if carried else None,
                        NCCL_RECEIVED[rail] * read // STEPS if carried else None,
                    ),
                )
            )
        small = WireTotals(0, EXPECTED * step // STEPS)
        first, second = correlator.update(step * 100 * MILLISECOND_NS, ports, [ExpectedBytes("a", small, small)])
    return first, second


def bytes_expected(rails: tuple[RailWire, RailWire], direction: str) -> list[int]:
    """On each rail."""
    found = [getattr(rail, direction).wire_bytes for rail in rails]
    assert sum(found) == EXPECTED
    return found


@pytest.mark.parametrize(("handed", "carried"), [(True, True), (True, False), (False, True)])
def test_small_messages_are_expected_where_nccl_sent_them_however_much_others_move(handed: bool, carried: bool) -> None:
    sent = bytes_expected(beside_nixl(handed, carried), "transmit")
    part = EXPECTED * NCCL_SENT[0] // sum(NCCL_SENT)
    assert sent == [pytest.approx(part, rel=0.01), pytest.approx(EXPECTED - part, rel=0.03)]


def test_small_messages_are_expected_where_connections_of_nccl_received_them() -> None:
    received = bytes_expected(beside_nixl(sent=True, carried=True), "receive")
    assert received == [pytest.approx(NCCL_RECEIVED[0], rel=0.01), pytest.approx(NCCL_RECEIVED[1], rel=0.03)]


def test_small_messages_are_expected_from_where_they_are_sent_to_if_connections_do_not_tell() -> None:
    received = bytes_expected(beside_nixl(sent=True, carried=False), "receive")
    part = EXPECTED * NCCL_SENT[0] // sum(NCCL_SENT)
    assert received == [pytest.approx(part, rel=0.01), pytest.approx(EXPECTED - part, rel=0.03)]


def test_the_port_tells_where_small_messages_went_if_nothing_else_does() -> None:
    sent = bytes_expected(beside_nixl(sent=False, carried=False), "transmit")
    assert sent[0] < EXPECTED / 2  # as misleading as NIXL's bytes are


def test_one_rail_without_evidence_leaves_the_others_to_the_port() -> None:
    fabric = Fabric()
    fabric.tick()
    fabric.others(0, MIB)
    found = fabric.correlator.update(
        SECOND_NS,
        [
            PortTotals("a", "rail0", "", 0, 0, nccl=NcclBytes(1000)),
            PortTotals("a", "rail1", "", MIB, 0),
        ],
        [ExpectedBytes("a", WireTotals(0, 1000), WireTotals())],
    )
    assert [rail.transmit.wire_bytes for rail in found] == [0, 1000]


def test_small_messages_after_a_pause_go_where_nccl_sent_earlier_ones() -> None:
    correlator = Correlator()

    def expected(now_s: int, small: int, handed: tuple[int, int]) -> list[int | None]:
        ports = [PortTotals("a", f"rail{rail}", "", now_s * MIB, 0, nccl=NcclBytes(handed[rail])) for rail in range(2)]
        found = correlator.update(now_s * SECOND_NS, ports, [ExpectedBytes("a", WireTotals(0, small), WireTotals())])
        return [rail.transmit.wire_bytes for rail in found]

    assert expected(0, 1000, (0, 0)) == [500, 500]
    assert expected(1, 2000, (900, 100)) == [1400, 600]
    assert expected(2, 3000, (900, 100)) == [2300, 700]
    assert expected(100, 3000, (900, 100)) == [2300, 700]
    assert expected(101, 4000, (900, 100)) == [3200, 800]


def test_bytes_that_do_not_divide_evenly_take_turns() -> None:
    fabric = Fabric()
    for total in range(1, 11):
        fabric.expected = WireTotals(total)
        first, second = fabric.look()
    assert (first.wire_bytes, second.wire_bytes) == (5, 5)


def test_an_idle_rail_has_no_ratio_and_keeps_its_total() -> None:
    fabric = Fabric()
    fabric.tick()
    fabric.enqueue(MIB, MIB)
    assert values(fabric.ratios(1)) == [pytest.approx(1 / 1.04)] * 2
    assert fabric.ratios(320)[-1] == (None, None)
    assert fabric.tick()[0].wire_bytes == MIB


def test_bytes_that_never_leave_show_above_one_after_four_windows() -> None:
    fabric = Fabric(header_percent=0)
    fabric.tick()
    seen: Ratios = []
    for _ in range(1300):
        fabric.enqueue(MIB, MIB)
        fabric.expected = WireTotals(fabric.expected.spread_bytes + 2 * MIB)
        seen += fabric.ratios(1)
    assert values(seen[-1:]) == [pytest.approx(2, rel=0.02)] * 2


def test_a_stalled_operation_has_no_ratio_while_it_hangs_and_the_right_one_afterwards() -> None:
    fabric = Fabric()
    fabric.tick()
    fabric.enqueue(500 * MIB, 500 * MIB)
    fabric.ratios(10)
    fabric.bytes_per_second = 0
    assert values(fabric.ratios(600)) == []
    fabric.bytes_per_second = 100 * MIB
    assert values(fabric.ratios(60)[-1:]) == [pytest.approx(1 / 1.04)] * 2


def test_receive_and_transmit_do_not_mix() -> None:
    correlator = Correlator()
    correlator.update(0, [PortTotals("a", "rail0", "", 0, 0)], [])
    (rail,) = correlator.update(
        SECOND_NS,
        [PortTotals("a", "rail0", "", 2 * MIB, 4 * MIB)],
        [ExpectedBytes("a", WireTotals(2 * MIB), WireTotals(MIB))],
    )
    assert rail == RailWire("a", "rail0", "", DirectionWire(2 * MIB, 1.0), DirectionWire(MIB, 0.25))


def test_rail_sets_do_not_mix_and_the_answer_keeps_the_order_of_the_question() -> None:
    ports = [
        PortTotals("b", "rail0", "", 0, 0),
        PortTotals("a", "rail0", "2", 0, 0),
        PortTotals("a", "rail0", "1", 0, 0),
    ]
    rails = Correlator().update(0, ports, [ExpectedBytes("a", WireTotals(10), WireTotals())])
    assert [(rail.rail_set, rail.port, rail.transmit.wire_bytes) for rail in rails] == [
        ("b", "", 0),
        ("a", "2", 5),
        ("a", "1", 5),
    ]


def test_without_rails_there_is_nothing_and_the_bytes_wait() -> None:
    correlator = Correlator()
    assert correlator.update(0, [], [ExpectedBytes("a", WireTotals(10), WireTotals())]) == ()
    (rail,) = correlator.update(1, [PortTotals("a", "r", "", 0, 0)], [ExpectedBytes("a", WireTotals(12), WireTotals())])
    assert rail.transmit.wire_bytes == 12


def test_what_cannot_be_known_has_no_number_and_resumes_without_losing_a_byte() -> None:
    fabric = Fabric()
    fabric.expected = WireTotals(100)
    fabric.look()
    fabric.expected = WireTotals(100, 0, "communicator abc is new")
    assert fabric.look() == (DirectionWire(None, None, "communicator abc is new"),) * 2
    fabric.expected = WireTotals(300)
    fabric.port = [MIB, MIB]
    assert fabric.look() == (DirectionWire(150, None), DirectionWire(150, None))


def test_a_rail_that_comes_back_continues_its_total() -> None:
    correlator = Correlator()
    both = [PortTotals("a", f"rail{rail}", "", 0, 0) for rail in range(2)]
    correlator.update(0, both, [ExpectedBytes("a", WireTotals(100), WireTotals())])
    (alone,) = correlator.update(1, both[:1], [ExpectedBytes("a", WireTotals(200), WireTotals())])
    first, second = correlator.update(2, both, [ExpectedBytes("a", WireTotals(300), WireTotals())])
    assert alone.transmit.wire_bytes == 150
    assert (first.transmit.wire_bytes, second.transmit.wire_bytes) == (200, 100)


def test_a_closed_rail_set_gives_nothing_out_twice() -> None:
    correlator = Correlator()
    port = [PortTotals("a", "rail0", "", 0, 0)]
    correlator.update(0, port, [ExpectedBytes("a", WireTotals(100), WireTotals(100))])
    correlator.forget("a")
    (rail,) = correlator.update(1, port, [ExpectedBytes("a", WireTotals(107), WireTotals(108))])
    assert (rail.transmit.wire_bytes, rail.receive.wire_bytes) == (7, 8)


def test_a_port_counter_that_starts_anew_starts_the_window_anew() -> None:
    fabric = Fabric()
    fabric.others(10 * MIB, 10 * MIB)
    fabric.tick()
    fabric.enqueue(10 * MIB, 10 * MIB)
    fabric.tick()
    fabric.port = [0, 0]
    assert fabric.tick()[0].explained_ratio is None
    fabric.enqueue(MIB, MIB)
    assert fabric.tick()[0].explained_ratio == pytest.approx(1 / 1.04)


increments = st.tuples(
    st.integers(0, 1 << 40), st.integers(0, 1 << 20), st.lists(st.integers(0, 1 << 40), min_size=5, max_size=5)
)


@given(
    rails=st.integers(1, 5),
    steps=st.lists(increments, min_size=1, max_size=30),
    period_ns=st.sampled_from([MILLISECOND_NS, 100 * MILLISECOND_NS, 20 * SECOND_NS]),
)
def test_every_expected_byte_is_on_exactly_one_rail_and_totals_never_fall(
    rails: int, steps: list[tuple[int, int, list[int]]], period_ns: int
) -> None:
    correlator = Correlator()
    totals, port, previous = WireTotals(), [0] * rails, [0] * rails
    for step, (spread, small, moved) in enumerate(steps):
        totals = WireTotals(totals.spread_bytes + spread, totals.small_bytes + small)
        port = [total + moved[rail] for rail, total in enumerate(port)]
        found = correlator.update(
            step * period_ns,
            [PortTotals("a", f"rail{rail}", "", total, 0) for rail, total in enumerate(port)],
            [ExpectedBytes("a", totals, WireTotals())],
        )
        now = [rail.transmit.wire_bytes or 0 for rail in found]
        assert sum(now) == totals.spread_bytes + totals.small_bytes
        assert all(after >= before for before, after in zip(previous, now, strict=True))
        assert max(now) - min(now) <= totals.small_bytes + 1
        previous = now


PLACED = Placement(rank=0, nranks=2, node=0, n_nodes=2, local_ranks=1)


def calls(
    op: Op, payload: int, largest: int, placement: Placement | None = PLACED, active: bool = True
) -> tuple[ObservedCalls, int]:
    return ObservedCalls("00c0ffee", placement, op, 0, largest, active), payload


def expected_bytes(*kinds: tuple[ObservedCalls, int]) -> ExpectedBytes:
    return ExpectedSums("a", [kind for kind, _ in kinds]).expected(np.array([payload for _, payload in kinds], "u8"))


def test_calls_are_split_by_size_and_by_direction() -> None:
    found = expected_bytes(
        calls(Op.AllReduce, 10 * MIB, MIB), calls(Op.AllReduce, 3000, 1024), calls(Op.Broadcast, 5 * MIB, 65537)
    )
    assert found == ExpectedBytes("a", WireTotals(15 * MIB, 3000), WireTotals(10 * MIB, 3000))


def test_a_message_of_just_the_threshold_is_small() -> None:
    assert expected_bytes(calls(Op.AllReduce, 65536, 65536)).transmit == WireTotals(0, 65536)


def test_one_communicator_without_placement_hides_the_sum_and_says_which() -> None:
    found = expected_bytes(calls(Op.AllReduce, 100, 100), calls(Op.AllReduce, 100, 100, placement=None))
    assert "00c0ffee" in found.transmit.unknown
    assert "00c0ffee" in found.receive.unknown


def test_replays_of_graphs_hide_the_sum_which_does_not_fall() -> None:
    kind, payload = calls(Op.AllReduce, 10 * MIB, MIB)
    before = expected_bytes((kind, payload)).transmit
    found = expected_bytes((kind._replace(replayed=True), payload)).transmit
    assert (found.spread_bytes, found.small_bytes) == (before.spread_bytes, before.small_bytes)
    assert "replays CUDA graphs" in found.unknown
    gone = kind._replace(replayed=True, active=False)
    assert expected_bytes((gone, payload)).transmit == before


def test_a_communicator_that_is_gone_hides_nothing() -> None:
    found = expected_bytes(calls(Op.AllReduce, 8, 8), calls(Op.AllReduce, 8, 8, placement=None, active=False))
    assert found.transmit == WireTotals(0, 8)


def test_only_the_direction_that_cannot_be_known_is_hidden() -> None:
    found = expected_bytes(calls(Op.WaitSignal, 0, 0))
    assert found.transmit == WireTotals()
    assert "WaitSignal" in found.receive.unknown


def test_the_reason_tells_unordered_ranks_from_an_unknown_placement() -> None:
    dealt = Placement(rank=1, nranks=4, node=1, n_nodes=2, local_ranks=2)
    assert "node by node" in expected_bytes(calls(Op.Broadcast, 8, 8, placement=dealt)).transmit.unknown


def test_bytes_are_settled_where_all_that_was_enqueued_has_left() -> None:
    fabric = Fabric()
    assert fabric.correlator.all_sent
    fabric.tick()
    assert fabric.correlator.all_sent
    fabric.enqueue(30 * MIB, 30 * MIB)
    settled = []
    for _ in range(5):
        fabric.tick()
        settled.append(fabric.correlator.all_sent)
    assert settled == [False, False, True, True, True]


def test_what_cannot_be_known_is_not_waited_for() -> None:
    fabric = Fabric()
    fabric.tick()
    fabric.enqueue(30 * MIB, 30 * MIB)
    fabric.tick()
    fabric.expected = WireTotals(unknown="graphs are replayed")
    fabric.look()
    assert fabric.correlator.all_sent


def test_where_no_bytes_ever_settle_none_are_waited_for() -> None:
    """As where ports carry less than is expected: the plain window is shown then."""
    fabric = Fabric(header_percent=-10)
    settled = []
    for _ in range(10 * 60 * 4):
        fabric.enqueue(5 * MIB, 5 * MIB)
        fabric.tick()
        settled.append(fabric.correlator.all_sent)
    assert not any(settled[20:600])
    assert all(settled[-300:])


def test_a_rail_set_that_has_gone_is_not_waited_for() -> None:
    fabric = Fabric()
    fabric.tick()
    fabric.enqueue(300 * MIB, 300 * MIB)
    fabric.tick()
    assert not fabric.correlator.all_sent
    fabric.correlator.update(fabric.now_ns, [], [])
    assert fabric.correlator.all_sent


@given(
    st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=40),
    st.fractions(0, 1 << 40, max_denominator=1 << 40),
)
def test_a_share_of_many_payloads_is_the_sum_of_each_ones_whole_bytes(payloads: list[int], share: Fraction) -> None:
    assert whole_bytes(share, np.array(payloads, "u8")) == sum(
        one * share.numerator // share.denominator for one in payloads
    )
