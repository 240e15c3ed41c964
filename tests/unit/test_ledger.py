"""Where a rail's bytes came from (simulated evidence): the three rules of every ledger, and one scenario a class."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.facts.rail_ledger import DirectionLedger, Origin
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.node.attribution import ledger as attribution
from railscope.agent.node.attribution.ledger import Evidence, HeaderSizes, Sockets

NOTHING = Evidence(0, 0, sockets=Sockets(0, 0, 0, 0, 0))
MEGABYTE = 1_000_000
SEGMENT = 1448
HEADER = 66


@dataclass(frozen=True)
class Origins:
    """Bytes by origin."""

    collective: int
    overhead: int
    retransmission: int
    foreign: int
    unseen: int
    offload: int
    transfer: int
    error_ratio: float | None


def origins(ledger: DirectionLedger) -> Origins:
    found = {origin.value: ledger.of_origin(origin) for origin in Origin}
    assert sum(found.values()) == sum(ledger.of_owner(owner) for owner in TrafficOwner) == sum(ledger.cells.values())
    return Origins(**found, error_ratio=ledger.error_ratio)


class Account:
    """An account that tells origins."""

    def __init__(self) -> None:
        self.account = attribution.Account()
        self.begin = self.account.begin

    def update(self, evidence: Evidence) -> Origins:
        return origins(self.account.update(evidence))

    @property
    def ledger(self) -> Origins:
        return origins(self.account.ledger)


def classes(ledger: Origins) -> tuple[int, ...]:
    return astuple(ledger)[:-1]


def packets_of(payload_bytes: int, each: int = SEGMENT) -> int:
    return -(-payload_bytes // each)


def sockets(payload_bytes: int, *, retransmitted: int = 0, each: int = SEGMENT, changes: int = 0) -> Sockets:
    segments = packets_of(payload_bytes, SEGMENT if each > SEGMENT else each)
    return Sockets(payload_bytes, retransmitted, segments, segments * HEADER, changes)


def port(payload_bytes: int, each: int = SEGMENT) -> tuple[int, int]:
    """(bytes, packets) that a port counts for so much payload."""
    packets = packets_of(payload_bytes, each)
    return payload_bytes + packets * HEADER, packets


def ledger_of(*moments: Evidence) -> Origins:
    """After a moment at which nothing had happened yet, with the same sources."""
    first = moments[0]
    account = Account()
    account.update(
        replace(
            first,
            port_bytes=0,
            packets=0,
            handed_over_bytes=None if first.handed_over_bytes is None else 0,
            expected_bytes=None if first.expected_bytes is None else 0,
            sockets=None if first.sockets is None else sockets(0),
            retransmitted_packets=0,
        )
    )
    for moment in moments:
        account.update(moment)
    return account.ledger


totals = st.integers(0, 2**50)
connections = st.builds(Sockets, totals, totals, totals, totals, st.integers(0, 9))
by_owner = st.dictionaries(st.sampled_from(TrafficOwner), connections, max_size=3)
evidences = st.builds(
    Evidence,
    port_bytes=totals,
    packets=st.none() | totals,
    handed_over_bytes=st.none() | totals,
    complete=st.booleans(),
    expected_bytes=st.none() | totals,
    sockets=st.none() | connections,
    own=by_owner,
    others=by_owner,
    undecided_bytes=st.just(0) | totals,
    headers=st.sampled_from([HeaderSizes(16, 58, 82), HeaderSizes(24, 26, 66)]),
    retransmitted_packets=st.integers(0, 2**40),
    offload_bytes=st.just(0) | totals,
    skew=st.floats(0, 3),
    closing=st.booleans(),
)


@settings(deadline=None)
@given(st.lists(evidences, max_size=8))
def test_whatever_the_evidence_says_classes_never_fall_and_are_the_port_bytes_together(moments: list[Evidence]) -> None:
    account = Account()
    before = classes(account.ledger)
    port_bytes = [moment.port_bytes for moment in moments]
    for number, moment in enumerate(moments):
        ledger = account.update(moment)
        now = classes(ledger)
        assert all(isinstance(value, int) for value in now)
        assert all(new >= old >= 0 for old, new in zip(before, now, strict=True))
        classed = max(port_bytes[: number + 1]) - port_bytes[0]
        assert classed - moment.undecided_bytes <= sum(now) <= classed
        assert sum(now) == classed or moment.undecided_bytes
        assert ledger.error_ratio is None or 0 <= ledger.error_ratio <= 1
        before = now


def test_evidence_that_is_missing_for_a_while_does_not_come_back_lower_than_it_was() -> None:
    account = Account()
    start = Evidence(0, 0, sockets=Sockets(0, 0, 0, HEADER, 0))
    account.update(start)
    account.update(replace(start, sockets=None))
    ledger = account.update(replace(start, port_bytes=1, packets=1, sockets=Sockets(0, 0, 1, 0, 0)))
    assert classes(ledger) == (0, 0, 0, 1, 0, 0, 0)
    assert ledger.error_ratio == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**8)), min_size=1, max_size=8))
def test_exact_evidence_is_classed_exactly_however_it_is_spread_over_moments(steps: list[tuple[int, int, int]]) -> None:
    """(collective, unseen, foreign) bytes of each step, all in packets of one size."""
    account = Account()
    account.update(replace(NOTHING, handed_over_bytes=0, complete=True))
    collective = unseen = foreign = 0
    for more in steps:
        collective, unseen, foreign = collective + more[0], unseen + more[1], foreign + more[2]
        own, others = port(collective + unseen), port(foreign)
        ledger = account.update(
            Evidence(own[0] + others[0], own[1] + others[1], collective, True, None, sockets(collective + unseen))
        )
    assert (ledger.collective, ledger.unseen, ledger.retransmission, ledger.offload) == (collective, unseen, 0, 0)
    assert ledger.foreign == others[0]
    assert ledger.overhead == own[1] * HEADER
    assert not ledger.error_ratio


def test_bytes_that_the_port_counted_before_it_was_first_seen_are_in_no_class() -> None:
    account = Account()
    account.update(Evidence(10**12, 10**9))
    assert classes(account.update(Evidence(10**12 + 500, 10**9 + 5)))[3] == 500


def test_bytes_of_others_are_foreign_headers_included() -> None:
    own, others = port(100 * MEGABYTE), port(20 * MEGABYTE)
    ledger = ledger_of(
        Evidence(own[0] + others[0], own[1] + others[1], 100 * MEGABYTE, True, sockets=sockets(100 * MEGABYTE))
    )
    assert (ledger.collective, ledger.foreign) == (100 * MEGABYTE, others[0])


@pytest.mark.parametrize("foreign_packet", [100, SEGMENT, 60_000])
def test_on_a_device_that_counts_large_packets_foreign_bytes_are_found_within_five_percent(foreign_packet: int) -> None:
    own, others = port(1000 * MEGABYTE, 50_000), port(20 * MEGABYTE, foreign_packet)
    large = sockets(1000 * MEGABYTE, each=50_000)
    ledger = ledger_of(
        Evidence(*port(10 * MEGABYTE, 50_000), 10 * MEGABYTE, True, sockets=sockets(10 * MEGABYTE, each=50_000)),
        Evidence(own[0] + others[0], own[1] + others[1], 1000 * MEGABYTE, True, sockets=large),
    )
    assert 20 * MEGABYTE * 0.95 < ledger.foreign < others[0] * 1.05
    assert ledger.error_ratio is not None
    assert abs(ledger.foreign - others[0]) <= ledger.error_ratio * (own[0] + others[0]) + MEGABYTE / 1000


def test_what_connections_carried_and_no_collective_explains_is_unseen() -> None:
    ledger = ledger_of(Evidence(*port(50 * MEGABYTE), 40 * MEGABYTE, True, sockets=sockets(50 * MEGABYTE)))
    assert (ledger.collective, ledger.unseen, ledger.foreign) == (40 * MEGABYTE, 10 * MEGABYTE, 0)


def test_what_was_sent_again_is_retransmission_unless_it_never_reached_the_port() -> None:
    sent = 50 * MEGABYTE
    evidence = Evidence(*port(sent), 49 * MEGABYTE, True, sockets=sockets(sent, retransmitted=MEGABYTE))
    assert (ledger_of(evidence).retransmission, ledger_of(evidence).unseen) == (MEGABYTE, 0)
    dropped = replace(evidence, port_bytes=port(49 * MEGABYTE)[0], packets=port(49 * MEGABYTE)[1])
    assert ledger_of(dropped).retransmission < HEADER * packets_of(MEGABYTE)
    assert ledger_of(dropped).collective == pytest.approx(49 * MEGABYTE, abs=HEADER * packets_of(MEGABYTE))


def test_an_operation_that_is_enqueued_and_not_yet_sent_hides_nothing_once_it_has_left() -> None:
    """The model counts at the call, the port when bytes leave; meanwhile others send."""
    moments = []
    for step in range(1, 11):
        own, others = port(step * 10 * MEGABYTE), port(step * MEGABYTE)
        moments.append(
            Evidence(
                own[0] + others[0],
                own[1] + others[1],
                expected_bytes=100 * MEGABYTE,
                sockets=sockets(step * 10 * MEGABYTE),
            )
        )
    ledger = ledger_of(*moments)
    assert ledger.collective == 100 * MEGABYTE
    assert ledger.foreign == others[0]


def test_the_model_and_the_connections_disagreeing_widens_the_band() -> None:
    agree = Evidence(*port(100 * MEGABYTE), expected_bytes=100 * MEGABYTE, sockets=sockets(100 * MEGABYTE))
    disagree = replace(agree, expected_bytes=60 * MEGABYTE)
    unknown = replace(agree, expected_bytes=None)
    handed = replace(disagree, handed_over_bytes=60 * MEGABYTE, complete=True)
    errors = [ledger_of(evidence).error_ratio for evidence in (agree, disagree, handed)]
    assert errors == [0, pytest.approx(0.2 / 1.045, rel=0.01), 0]
    account = Account()
    account.update(NOTHING)
    ledger = account.update(unknown)
    assert (ledger.collective, ledger.unseen) == (0, 100 * MEGABYTE)
    assert ledger.error_ratio is not None
    assert ledger.error_ratio >= 0.45


def test_what_a_connection_carried_after_its_last_reading_is_known_from_what_was_handed_over() -> None:
    before = Evidence(*port(80 * MEGABYTE), 90 * MEGABYTE, True, sockets=sockets(80 * MEGABYTE))
    total = port(100 * MEGABYTE)
    after = Evidence(total[0], total[1], 100 * MEGABYTE, True, sockets=before.sockets, closing=True)
    ledger = ledger_of(before, after)
    assert ledger.collective == 100 * MEGABYTE
    assert ledger.foreign == 0


def test_a_job_that_ended_before_its_connections_were_ever_read_has_headers_too() -> None:
    total = port(100 * MEGABYTE)
    ledger = ledger_of(Evidence(*total, 100 * MEGABYTE, True, sockets=sockets(0), closing=True))
    assert (ledger.collective, ledger.overhead, ledger.foreign) == (100 * MEGABYTE, total[1] * HEADER, 0)


@pytest.mark.parametrize("closing", [True, False])
def test_what_the_model_expects_counts_beyond_connections_only_where_some_came_or_went(closing: bool) -> None:
    read = sockets(80 * MEGABYTE)
    before = Evidence(*port(80 * MEGABYTE), expected_bytes=100 * MEGABYTE, sockets=read)
    total = port(100 * MEGABYTE)
    went = replace(before, port_bytes=total[0], packets=total[1], sockets=replace(read, changes=1), closing=closing)
    stayed = replace(went, sockets=read, closing=False)
    assert ledger_of(before, went).foreign == 0
    assert ledger_of(before, stayed).foreign >= 20 * MEGABYTE


def test_traffic_of_others_is_not_taken_for_what_a_closed_connection_carried() -> None:
    """Nothing is expected beyond what was read: the band says that it may have been."""
    before = Evidence(*port(80 * MEGABYTE), 80 * MEGABYTE, True, sockets=sockets(80 * MEGABYTE))
    own, others = port(80 * MEGABYTE), port(20 * MEGABYTE)
    gone = sockets(80 * MEGABYTE, changes=1)
    ledger = ledger_of(before, replace(before, port_bytes=own[0] + others[0], packets=own[1] + others[1], sockets=gone))
    assert ledger.foreign == others[0]
    assert ledger.error_ratio == pytest.approx(others[0] / 2 / (own[0] + others[0]), rel=0.01)


def test_a_level_that_falls_and_rises_leaves_no_gap_and_counts_nothing_twice() -> None:
    """Calls are expected some moments before they are handed over."""
    handed, expected, sent = 0, 0, 0
    moments = []
    for step in range(30):
        complete = step // 10 != 1
        sent += 10 * MEGABYTE
        expected = min(300 * MEGABYTE, sent + 50 * MEGABYTE)
        handed += 10 * MEGABYTE if complete else 0
        moments.append(Evidence(*port(sent), handed, complete, expected, sockets(sent)))
    ledger = ledger_of(*moments)
    assert ledger.collective == pytest.approx(300 * MEGABYTE, rel=0.01)
    assert ledger.unseen <= 3 * MEGABYTE


def test_without_connections_the_residual_is_foreign_and_the_band_holds_half_of_it() -> None:
    rdma = HeaderSizes(24, 26, 66)
    packets = 100 * MEGABYTE // 4096
    counted = 110 * MEGABYTE + packets * 26
    evidence = Evidence(counted, packets, 100 * MEGABYTE, True, headers=rdma)
    ledger = ledger_of(evidence)
    assert ledger.collective == 100 * MEGABYTE
    assert ledger.foreign == pytest.approx(10 * MEGABYTE, rel=0.02)
    assert ledger.error_ratio == pytest.approx(ledger.foreign / 2 / counted, rel=0.15)
    in_network = ledger_of(replace(evidence, offload_bytes=counted))
    assert (in_network.offload, in_network.foreign) == (ledger.foreign, 0)
    lossy = ledger_of(replace(evidence, retransmitted_packets=0), replace(evidence, retransmitted_packets=100))
    assert lossy.retransmission == 0, "the port counted nothing since"


def test_packets_that_a_device_sent_again_are_an_estimate_of_retransmission() -> None:
    start = Evidence(0, 0, 0, True, headers=HeaderSizes(24, 26, 66))
    packets = 25_000
    account = Account()
    account.update(start)
    counted = packets * (4096 + 26)
    ledger = account.update(
        replace(start, port_bytes=counted, packets=packets, handed_over_bytes=24_000 * 4096, retransmitted_packets=600)
    )
    assert ledger.retransmission == pytest.approx(600 * (4096 + 26), rel=0.01)
    assert ledger.foreign == pytest.approx(400 * (4096 + 26), rel=0.07)
    assert ledger.error_ratio is not None
    assert ledger.error_ratio >= ledger.retransmission / counted


def test_a_port_that_begins_anew_stands_still_until_it_counts_on() -> None:
    account = Account()
    account.update(NOTHING)
    full = account.update(Evidence(*port(10 * MEGABYTE), sockets=sockets(0)))
    assert account.update(replace(NOTHING, port_bytes=5)) == full


def test_counters_read_far_apart_widen_the_band() -> None:
    evidence = Evidence(*port(100 * MEGABYTE), 100 * MEGABYTE, True, sockets=sockets(100 * MEGABYTE))
    assert ledger_of(replace(evidence, skew=0.01)).error_ratio == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("unseen", [0, 5 * MEGABYTE])
def test_a_job_that_sends_already_when_its_port_is_first_read_is_no_unseen_traffic(unseen: int) -> None:
    """Port and connections are read between two looks at what was handed over, a second apart."""
    account = Account()
    second = 60 * MEGABYTE

    def moment(seconds: int) -> Evidence:
        """What was handed over, and the port of half a second before; the job ends after 40 seconds."""
        sent = min(40 * second, seconds * second - second // 2) + unseen * (seconds > 2)
        port_bytes, packets = port(sent)
        return Evidence(port_bytes, packets, min(40, seconds) * second, complete=True, sockets=sockets(sent))

    account.begin(second, 0)
    for seconds in range(2, 44):
        account.update(moment(seconds))
    ledger = account.ledger
    whole = moment(43).port_bytes - moment(2).port_bytes
    assert sum(classes(ledger)) == whole
    # As much as was handed over before the port was first read may hide what is not seen; the error tells of that.
    assert ledger.unseen <= unseen
    assert ledger.collective == 38 * second + second // 2 + unseen - ledger.unseen
    assert ledger.error_ratio == pytest.approx(second / 2 / whole, rel=0.01)


def test_a_job_that_begins_after_its_port_was_read_is_told_without_an_error() -> None:
    account = Account()
    account.begin(0, 0)
    account.update(replace(NOTHING, handed_over_bytes=0, complete=True))
    port_bytes, packets = port(MEGABYTE)
    account.update(Evidence(port_bytes, packets, MEGABYTE, complete=True, sockets=sockets(MEGABYTE)))
    assert (account.ledger.collective, account.ledger.unseen, account.ledger.error_ratio) == (
        MEGABYTE,
        0,
        0,
    )


def test_every_byte_of_a_shared_rail_has_an_owner_and_the_headers_of_its_packets_with_it() -> None:
    """NCCL's job, whose program loads data itself, beside UCX, a checkpoint, a copy, and what nobody tells of."""
    own, data = 100 * MEGABYTE, 7 * MEGABYTE
    ucx, copied = 50 * MEGABYTE, 10 * MEGABYTE
    others = {TrafficOwner.UCX: ucx, TrafficOwner.STORAGE: 20 * MEGABYTE, TrafficOwner.TCP_OTHER: copied}
    untold = port(3 * MEGABYTE)
    payload = own + data + sum(others.values())
    packets = packets_of(own + data) + sum(map(packets_of, others.values()))
    evidence = Evidence(
        payload + packets * HEADER + untold[0],
        packets + untold[1],
        own,
        complete=True,
        sockets=sockets(own + data),
        own={TrafficOwner.TCP_OTHER: sockets(data)},
        others={owner: sockets(count) for owner, count in others.items()},
    )
    account = attribution.Account()
    account.update(replace(NOTHING, handed_over_bytes=0, complete=True))
    ledger = account.update(evidence)
    assert ledger.of_owner(TrafficOwner.NCCL) == pytest.approx(port(own)[0], abs=100)
    for owner in (TrafficOwner.UCX, TrafficOwner.STORAGE):
        assert ledger.of_owner(owner) == port(others[owner])[0]
    assert ledger.of_owner(TrafficOwner.TCP_OTHER) == pytest.approx(port(copied)[0] + port(data)[0], abs=100)
    assert ledger.of_owner(TrafficOwner.UNKNOWN) == untold[0]
    assert ledger.of_origin(Origin.TRANSFER) == others[TrafficOwner.UCX]
    assert ledger.of_origin(Origin.UNSEEN) == data
    assert ledger.of_origin(Origin.FOREIGN) == port(others[TrafficOwner.STORAGE])[0] + port(copied)[0] + untold[0]
    assert not ledger.error_ratio


def test_what_an_owner_sent_again_and_a_queue_of_this_host_dropped_takes_nothing_from_others() -> None:
    """The port counts behind the queue: what is dropped there and sent again passes once."""
    ucx, lost, untold = 50 * MEGABYTE, MEGABYTE, port(2 * MEGABYTE)
    passed = port(ucx - lost)
    account = attribution.Account()
    account.update(NOTHING)
    ledger = account.update(
        Evidence(
            passed[0] + untold[0],
            passed[1] + untold[1],
            sockets=sockets(0),
            others={TrafficOwner.UCX: sockets(ucx, retransmitted=lost), TrafficOwner.MPI: sockets(0)},
        )
    )
    headers = packets_of(lost) * HEADER
    assert ledger.cells[TrafficOwner.UCX, Origin.TRANSFER] == ucx - lost
    assert ledger.of_owner(TrafficOwner.UCX) == pytest.approx(passed[0] + lost, abs=2 * headers)


def test_bytes_of_a_new_connection_wait_until_it_is_known_whose_they_are() -> None:
    account = attribution.Account()
    account.update(NOTHING)
    first, last, rest = port(40 * MEGABYTE), port(10 * MEGABYTE), port(MEGABYTE)
    undecided = Evidence(
        first[0] + rest[0], first[1] + rest[1], sockets=sockets(0), undecided_bytes=40 * MEGABYTE, skew=0.0
    )
    ledger = account.update(undecided)
    assert sum(ledger.cells.values()) == first[0] + rest[0] - 40 * MEGABYTE
    decided = replace(
        undecided,
        port_bytes=first[0] + last[0] + rest[0],
        packets=first[1] + last[1] + rest[1],
        undecided_bytes=0,
        others={TrafficOwner.UCX: sockets(50 * MEGABYTE)},
    )
    ledger = account.update(decided)
    whole = port(50 * MEGABYTE)[0]
    assert ledger.of_owner(TrafficOwner.UCX) == pytest.approx(whole, rel=0.05)
    assert account.update(decided) == ledger
    given_up = attribution.Account()
    given_up.update(NOTHING)
    given_up.update(undecided)
    ledger = given_up.update(replace(undecided, undecided_bytes=0))
    assert ledger.of_owner(TrafficOwner.UNKNOWN) == first[0] + rest[0], "nobody came to be known"


def test_what_nothing_explains_is_nobodys_only_once_it_has_stayed_so_for_some_readings() -> None:
    """A connection that is accepted late is counted from its beginning, when some of its bytes are seconds old."""
    account = Account()
    own, others = port(20 * MEGABYTE), port(MEGABYTE)

    def read(number: int, bytes_and_packets: tuple[int, int], counted: int) -> Origins:
        return account.update(Evidence(*bytes_and_packets, 0, True, sockets=sockets(counted), reading=number))

    read(0, (0, 0), 0)
    for number in (1, 2, 2, 2):
        assert sum(classes(read(number, own, 0))) == 0
    ledger = read(3, own, 20 * MEGABYTE)
    assert (ledger.unseen, ledger.foreign) == (20 * MEGABYTE, 0)
    both = own[0] + others[0], own[1] + others[1]
    for number in (4, 5):
        assert read(number, both, 20 * MEGABYTE).foreign == 0
    assert read(6, both, 20 * MEGABYTE).foreign == others[0]
    # No more readings come: what is left is nobody's at once.
    last = Evidence(both[0] + 500, both[1] + 5, 0, True, sockets=sockets(20 * MEGABYTE), reading=7, closing=True)
    assert sum(classes(account.update(last))) == both[0] + 500
