"""Whom an operation that does not end is blamed on.  What is found on the host is simulated, after real faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import Blame, InFlight
from railscope.agent.node.stalls.evidence import Elsewhere, Evidence, GonePeer, ProcessFacts, RailSigns, RankFacts
from railscope.agent.node.stalls.root_cause import blame_for
from railscope.probes.processes.state import Condition

NOW_NS = 10**12
MIB = 1 << 20
FLIGHT = InFlight("AllReduce", MIB, 0, "strong", "handed to the network and not complete", calls_before=99)
WEAK = InFlight("AllReduce", None, 0, "weak", "bytes lie unread")
RANK = RankFacts(7, "00000000000000ab", 3, 8, 4711, 100, 99, 5000, FLIGHT)
PEER = replace(RANK, instance=8, rank=4, pid=4712)
PROCESS = ProcessFacts("running", 1_500_000_000, 0.1, 0.0, 0, 0)
RAIL0 = RailSigns("0", "rail0", "", up=True, window_ns=1_500_000_000, connections=2, speed_bytes_per_second=10**10)
RAIL1 = replace(RAIL0, rail="1", device="rail1")
CALM = Evidence(PROCESS, (RAIL0, RAIL1), ())


def found(evidence: Evidence, rank: RankFacts = RANK) -> Blame:
    return blame_for(rank, evidence, NOW_NS)


def with_(rail: RailSigns, **signs: Any) -> RailSigns:
    return replace(rail, **signs)


def with_rail1(**signs: Any) -> Evidence:
    return replace(CALM, rails=(RAIL0, with_(RAIL1, **signs)))


@pytest.mark.parametrize(
    ("condition", "cause", "word"),
    [
        ("gone", Cause.PROCESS_GONE, "has ended"),
        ("stopped", Cause.PROCESS_STOPPED, "kill -CONT"),
        ("traced", Cause.PROCESS_STOPPED, "debugger"),
        ("frozen", Cause.PROCESS_STOPPED, "control group"),
    ],
)
def test_a_process_that_cannot_go_on_is_blamed_before_everything_else(
    condition: Condition, cause: Cause, word: str
) -> None:
    blame = found(replace(with_rail1(up=False), process=replace(PROCESS, condition=condition)))
    assert (blame.cause, blame.blamed_rank, blame.culprit) == (cause, 3, True)
    assert word in blame.evidence[0]


def test_a_rail_without_carrier_comes_before_one_that_gives_no_answer() -> None:
    silent = replace(RAIL0, unanswered=2, unanswered_ns=3_000_000_000)
    blame = found(replace(CALM, rails=(silent, replace(RAIL1, up=False))))
    assert (blame.cause, blame.rail, blame.device) == (Cause.RAIL_DOWN, "1", "rail1")


def test_a_port_that_may_not_be_used_is_no_culprit_and_anything_else_explains_more() -> None:
    perhaps = with_rail1(up=False, connections=0, surely_used=False)
    assert (found(perhaps).cause, found(perhaps).culprit) == (Cause.RAIL_DOWN, False)
    assert (
        found(replace(perhaps, process=replace(PROCESS, waited_ratio=2.0, busy_ratio=0.01))).cause is Cause.RANK_BEHIND
    )
    lost = with_rail1(up=False, connections=0, surely_used=False, carrier_lost_ns=NOW_NS - 1)
    assert (found(lost).cause, found(lost).culprit) == (Cause.RAIL_DOWN, True)


def test_no_answer_on_every_rail_points_to_the_host_at_the_other_end() -> None:
    silent = {"unanswered": 2, "unanswered_ns": 3_000_000_000}
    blame = found(replace(CALM, rails=(with_(RAIL0, **silent), with_(RAIL1, **silent))))
    assert blame.cause is Cause.RAIL_FILTERED
    assert "other end" in blame.evidence[-1]


def test_a_carrier_that_came_back_explains_silence_for_a_while() -> None:
    signs = {"unanswered": 1, "unanswered_ns": 1_000_000_000}
    assert found(with_rail1(**signs, carrier_lost_ns=NOW_NS - 10**9)).cause is Cause.RAIL_DOWN
    assert found(with_rail1(**signs, carrier_lost_ns=NOW_NS - 60 * 10**9)).cause is Cause.RAIL_FILTERED
    assert found(with_rail1(carrier_lost_ns=NOW_NS - 10**9)).cause is Cause.RANK_BEHIND


def test_one_retransmission_is_an_accident() -> None:
    assert found(with_rail1(unanswered=1, unanswered_ns=300_000_000)).cause is Cause.RANK_BEHIND


def test_a_slow_rail_is_blamed_though_its_sibling_sends_again() -> None:
    """As measured: with one rail at a tenth, retransmissions for no reason showed on the other one."""
    healthy = replace(
        RAIL0, sent_bytes=5 * MIB, retransmitted_bytes=120_000, round_trip_ns=1_600_000, busy_ratio=0.2, backlog_bytes=0
    )
    shaped = replace(RAIL1, sent_bytes=5 * MIB, round_trip_ns=25_000_000, busy_ratio=1.0, backlog_bytes=136_000)
    blame = found(replace(CALM, rails=(healthy, shaped)))
    assert (blame.cause, blame.device) == (Cause.RAIL_SLOW, "rail1")
    assert any("queue" in sentence for sentence in blame.evidence)


def test_one_acknowledgement_that_was_put_off_does_not_make_a_rail_slow() -> None:
    """As measured: beside a rank that hardly runs, the kernel said 5.138 ms, deviation 10.205, after one of 40 ms."""
    healthy = replace(RAIL0, sent_bytes=MIB, round_trip_ns=100_000, round_trip_deviation_ns=30_000, busy_ratio=0.1)
    late = {"sent_bytes": MIB, "round_trip_ns": 5_138_000, "busy_ratio": 0.3}
    for deviation_ns, cause in ((10_205_000, Cause.RANK_BEHIND), (1_248_000, Cause.RAIL_SLOW)):
        rail = with_(RAIL1, **late, round_trip_deviation_ns=deviation_ns)
        assert found(replace(CALM, rails=(healthy, rail))).cause is cause
    # A third of all packets, 100 ms late: no receiver puts off so many.
    often = with_(RAIL1, **{**late, "round_trip_ns": 30_700_000}, round_trip_deviation_ns=42_500_000)
    assert found(replace(CALM, rails=(healthy, often))).cause is Cause.RAIL_SLOW


def test_a_rail_that_loses_much_is_lossy_although_its_round_trips_are_long_too() -> None:
    lossy = {"sent_bytes": 5 * MIB, "retransmitted_bytes": MIB, "round_trip_ns": 60_000_000, "busy_ratio": 1.0}
    blame = found(replace(CALM, rails=(replace(RAIL0, round_trip_ns=1_000_000, busy_ratio=0.1), with_(RAIL1, **lossy))))
    assert (blame.cause, blame.device) == (Cause.RAIL_LOSSY, "rail1")


def test_losses_that_the_device_counts_make_a_rail_lossy_and_a_few_do_not() -> None:
    assert found(with_rail1(losses=(("rx_crc_errors", 100),))).cause is Cause.RAIL_LOSSY
    assert found(with_rail1(losses=(("rx_crc_errors", 3),))).cause is Cause.RANK_BEHIND


def test_packets_out_of_order_on_every_rail_are_no_loss_of_one() -> None:
    """Where paths are chosen packet by packet, all rails of a healthy host count them all the time."""
    everywhere = tuple(
        replace(RAIL0, rail=str(number), device=f"mlx5_{number}", losses=(("out_of_sequence", 400 + number),))
        for number in range(8)
    )
    assert found(replace(CALM, rails=everywhere)).cause is Cause.RANK_BEHIND
    one = (*everywhere[:5], replace(everywhere[5], losses=(("out_of_sequence", 1700),)), *everywhere[6:])
    blame = found(replace(CALM, rails=one))
    assert (blame.cause, blame.device) == (Cause.RAIL_LOSSY, "mlx5_5")


@pytest.mark.parametrize("losses", [(1000, 1000, 0), (1000, 300), (1000, 1000)])
def test_what_a_healthy_rail_never_counts_needs_no_comparison(losses: tuple[int, ...]) -> None:
    rails = tuple(
        replace(RAIL0, rail=str(at), device=f"mlx5_{at}", losses=(("rx_discards", more),))
        for at, more in enumerate(losses)
    )
    blame = found(replace(CALM, rails=rails))
    assert (blame.cause, blame.device) == (Cause.RAIL_LOSSY, "mlx5_0")


def test_the_rail_that_lost_most_is_the_lossy_one() -> None:
    rails = (with_(RAIL0, losses=(("rx_crc_errors", 20),)), with_(RAIL1, losses=(("rx_discards", 900),)))
    assert found(replace(CALM, rails=rails)).device == "rail1"


def test_losses_of_a_rail_that_may_carry_nothing_of_this_process_are_not_its_trouble() -> None:
    assert found(with_rail1(losses=(("rx_crc_errors", 100),), surely_used=False)).cause is Cause.RANK_BEHIND


def test_that_rails_work_is_only_said_of_rails_that_were_seen() -> None:
    assert "its rails work" in found(CALM).evidence[0]
    assert "no rail that it uses is seen" in found(replace(CALM, rails=())).evidence[0]
    alike = tuple(replace(rail, losses=(("out_of_sequence", 400),)) for rail in CALM.rails)
    assert "none of its rails stands out" in found(replace(CALM, rails=alike)).evidence[0]


def test_a_closed_connection_may_be_that_of_another_communicator() -> None:
    """Who destroys a communicator closes its connections, and this process's end of it may live on for hours."""
    alone = found(with_rail1(peer_closed=2))
    assert (alone.cause, alone.culprit) == (Cause.PROCESS_GONE, True)
    one_of_three = found(replace(with_rail1(peer_closed=2), others=2))
    assert (one_of_three.cause, one_of_three.culprit) == (Cause.RANK_BEHIND, False)
    assert "or has destroyed its end of one of several communicators" in one_of_three.evidence[-1]


def test_rails_that_are_slow_alike_are_not_blamed() -> None:
    slow = {"sent_bytes": 5 * MIB, "round_trip_ns": 60_000_000, "busy_ratio": 1.0, "backlog_bytes": 200_000}
    assert found(replace(CALM, rails=(with_(RAIL0, **slow), with_(RAIL1, **slow)))).cause is Cause.RANK_BEHIND


def test_a_slow_port_that_carries_nothing_is_not_the_reason() -> None:
    """A management port of 1 Gbit/s beside rails of 80: the bootstrap's connections go through it."""
    management = replace(RAIL1, speed_bytes_per_second=125_000_000, sent_bytes=2000)
    data = replace(RAIL0, sent_bytes=500 * MIB)
    assert found(replace(CALM, rails=(data, management))).cause is Cause.RANK_BEHIND
    carries = replace(management, sent_bytes=100 * MIB)
    assert found(replace(CALM, rails=(data, carries))).cause is Cause.RAIL_SLOW


def test_a_link_that_came_up_at_a_lower_speed_is_slow_without_tcp_too() -> None:
    rdma = {"connections": 0, "port_bytes": 10**9}
    slow = with_(RAIL1, speed_bytes_per_second=10**9, **rdma)
    blame = found(replace(CALM, rails=(with_(RAIL0, **rdma), slow)))
    assert (blame.cause, blame.device) == (Cause.RAIL_SLOW, "rail1")
    assert "8 Gbit/s" in blame.evidence[0]


def test_a_rank_that_waits_on_a_busy_host_is_not_behind_because_its_spinning_threads_wait_too() -> None:
    starved = found(replace(CALM, process=replace(PROCESS, waited_ratio=1.4, busy_ratio=0.02)))
    assert (starved.cause, starved.blamed_rank, starved.culprit) == (Cause.RANK_BEHIND, 3, True)
    one_wait = replace(PROCESS, window_ns=1_500_000_000, waited_ratio=0.85 / 1.5, busy_ratio=0.001)
    assert found(replace(CALM, process=one_wait)).cause is Cause.RANK_BEHIND
    assert found(replace(CALM, process=one_wait)).culprit
    spins = found(replace(CALM, process=replace(PROCESS, waited_ratio=1.4, busy_ratio=0.1)))
    assert (spins.cause, spins.blamed_rank, spins.culprit) == (Cause.RANK_BEHIND, None, False)


def test_closed_connections_tell_that_the_peer_is_gone() -> None:
    blame = found(with_rail1(peer_closed=2), replace(RANK, nranks=2, rank=1))
    assert (blame.cause, blame.blamed_rank) == (Cause.PROCESS_GONE, 0)
    assert found(with_rail1(peer_closed=2)).blamed_rank is None, "one of eight"


@pytest.mark.parametrize(
    ("process", "culprit", "excused", "word"),
    [
        (PROCESS, True, False, "sleeps"),
        (replace(PROCESS, condition="stopped"), True, False, "stopped"),
        (replace(PROCESS, waited_ratio=2.0, busy_ratio=0.05), True, False, "wait for a processor"),
        (replace(PROCESS, busy_ratio=1.0), False, False, "busy"),
        (replace(PROCESS, written_bytes=100 * MIB), False, True, "busy"),
    ],
    ids=["sleeps", "stopped", "starved", "computes", "writes"],
)
def test_a_rank_of_this_host_that_is_behind_is_named_with_what_it_does(
    process: ProcessFacts, culprit: bool, excused: bool, word: str
) -> None:
    behind = replace(PEER, enqueued=99)
    blame = found(replace(CALM, peers=(behind,), peer_processes=((behind.pid, process),)))
    assert (blame.cause, blame.blamed_rank) == (Cause.RANK_BEHIND, 4)
    assert (blame.culprit, blame.excused) == (culprit, excused)
    assert any(word in sentence for sentence in blame.evidence)


def test_a_rank_that_made_the_call_too_is_not_behind_in_it() -> None:
    fewer = replace(PEER, enqueued=100)
    ahead = replace(RANK, enqueued=105)
    blame = found(replace(CALM, peers=(fewer,), peer_processes=((fewer.pid, PROCESS),)), ahead)
    assert blame.blamed_rank is None
    assert not blame.culprit


def test_a_peer_that_made_the_call_and_is_stopped_keeps_the_others_waiting() -> None:
    stopped = replace(PROCESS, condition="stopped")
    blame = found(replace(CALM, peers=(PEER,), peer_processes=((PEER.pid, stopped),)))
    assert (blame.cause, blame.blamed_rank, blame.culprit) == (Cause.RANK_BEHIND, 4, True)


def test_what_peers_sent_and_this_rank_does_not_read_says_that_it_is_behind() -> None:
    unread = replace(CALM, rails=(with_(RAIL0, unread_bytes=262160), with_(RAIL1, unread_bytes=262160)))
    blame = found(unread, replace(RANK, in_flight=WEAK))
    assert (blame.cause, blame.blamed_rank, blame.culprit) == (Cause.RANK_BEHIND, 3, True)
    writes = replace(unread, process=replace(PROCESS, written_bytes=10 * MIB))
    assert found(writes, replace(RANK, in_flight=WEAK)).excused


def test_what_lies_unread_in_a_process_with_several_communicators_says_nothing_of_this_one() -> None:
    unread = replace(CALM, rails=tuple(replace(rail, unread_bytes=262160) for rail in (RAIL0, RAIL1)), others=2)
    waits = found(unread, replace(RANK, in_flight=WEAK))
    assert (waits.cause, waits.blamed_rank, waits.culprit) == (Cause.RANK_BEHIND, None, False)
    unsure = found(unread, replace(RANK, in_flight=replace(WEAK, one_of=3)))
    assert (unsure.cause, unsure.blamed_rank, unsure.culprit) == (Cause.UNKNOWN, None, False)


def test_of_two_ranks_the_other_is_not_named_if_it_may_wait_in_another_communicator() -> None:
    pair = replace(RANK, nranks=2, rank=0)
    assert found(CALM, pair).blamed_rank == 1
    assert found(replace(CALM, others=1), pair).blamed_rank is None


def test_closed_connections_are_another_communicator_s_where_all_peers_live_here() -> None:
    closed = replace(with_rail1(peer_closed=2), peers=(PEER,), peer_processes=((PEER.pid, PROCESS),))
    pair = replace(RANK, nranks=2)
    assert found(closed, pair).cause is Cause.PROCESS_GONE
    assert found(replace(closed, others=1), pair).cause is not Cause.PROCESS_GONE
    gone = found(replace(closed, others=1, gone=(GonePeer(5, 4713), GonePeer(6, 4714))), pair)
    assert (gone.cause, gone.blamed_rank, gone.evidence) == (
        Cause.PROCESS_GONE,
        5,
        ("process 4713 of rank 5 has ended",),
    )


def test_of_ranks_behind_a_stopped_one_is_named_first_and_one_that_is_held_up_elsewhere_never() -> None:
    held = replace(PEER, enqueued=98, pid=4713, rank=5)
    behind = replace(PEER, enqueued=99)
    elsewhere = (Elsewhere(held.pid, held.name, "cafe", "process 4799 of its rank 1 is stopped"),)
    processes = ((held.pid, PROCESS), (behind.pid, PROCESS))
    both = replace(CALM, peers=(held, behind), peer_processes=processes, elsewhere=elsewhere)
    assert (found(both).blamed_rank, found(both).culprit) == (4, True)
    alone = found(replace(both, peers=(held,)))
    assert (alone.cause, alone.blamed_rank, alone.culprit) == (Cause.RANK_BEHIND, None, False)
    assert alone.evidence[-1] == (
        "rank 5 of this host is held up itself, in communicator cafe: process 4799 of its rank 1 is stopped"
    )
    stopped = replace(PROCESS, condition="stopped")
    first = found(replace(both, peer_processes=((held.pid, stopped), (behind.pid, PROCESS)), elsewhere=()))
    assert first.blamed_rank == 5


def test_a_rank_that_has_read_one_rail_empty_waits_for_the_rest_of_the_message() -> None:
    blame = found(with_rail1(unread_bytes=262160), replace(RANK, in_flight=WEAK))
    assert (blame.cause, blame.blamed_rank, blame.culprit) == (Cause.RANK_BEHIND, None, False)


def test_who_only_waits_tells_whom_for() -> None:
    blame = found(replace(CALM, waits_for=(2, 5)))
    assert (blame.cause, blame.blamed_rank, blame.culprit) == (Cause.RANK_BEHIND, None, False)
    assert "rank 2, 5" in blame.evidence[-1]
    assert found(CALM, replace(RANK, nranks=2, rank=0)).blamed_rank == 1


def test_where_all_ranks_are_here_and_made_the_call_none_is_said_to_be_behind_or_elsewhere() -> None:
    here = replace(CALM, peers=(PEER,), peer_processes=((PEER.pid, PROCESS),))
    all_of_two = replace(RANK, nranks=2)
    blame = found(here, all_of_two)
    assert (blame.cause, blame.blamed_rank, blame.culprit) == (Cause.UNKNOWN, None, False)
    assert blame.evidence == ("all 2 ranks are on this host and made this call: none of them is behind",)
    # Counted from some call on only: it is not known who is behind, but surely nobody on another host.
    vague = found(here, replace(all_of_two, comparable=False))
    assert vague.cause is Cause.RANK_BEHIND
    assert vague.evidence == ("this rank's process runs and its rails work: it waits for another rank of this host",)
    silent = replace(PEER, in_flight=replace(FLIGHT, nothing_sent=True))
    hung = found(replace(here, peers=(silent,)), all_of_two)
    assert (hung.cause, hung.blamed_rank, hung.culprit) == (Cause.GPU_NOT_PROGRESSING, 4, False)
    assert hung.evidence == ("it waits for rank 4 of this host, whose GPU has not begun with the call",)
    assert found(here, RANK).cause is Cause.RANK_BEHIND, "six more are elsewhere"


def test_a_rank_of_this_host_that_was_not_seen_to_make_the_call_may_be_the_one_that_is_missing() -> None:
    vague = replace(PEER, comparable=False, in_flight=None)
    beside = replace(CALM, peers=(vague,), peer_processes=((PEER.pid, PROCESS),))
    here_or_elsewhere = (
        "this rank's process runs and its rails work: it waits for other ranks, of this host or of others",
    )
    elsewhere = ("this rank's process runs and its rails work: it waits for ranks on other hosts",)
    assert found(beside).evidence == here_or_elsewhere
    assert found(replace(beside, peers=(replace(vague, in_flight=WEAK),))).evidence == here_or_elsewhere
    assert found(replace(beside, peers=(PEER,)), replace(RANK, comparable=False)).evidence == elsewhere
    assert found(replace(beside, peers=(replace(PEER, in_flight=None),))).evidence == elsewhere, "it was counted"


def test_a_rank_of_this_host_that_cannot_be_compared_and_writes_is_excused() -> None:
    writes = replace(PROCESS, written_bytes=100 * MIB)
    vague = replace(PEER, comparable=False, in_flight=None)
    beside = replace(CALM, peers=(vague,), peer_processes=((PEER.pid, writes),))
    for rank in (RANK, replace(RANK, nranks=2)):
        blame = found(beside, rank)
        assert (blame.cause, blame.blamed_rank, blame.culprit, blame.excused) == (Cause.RANK_BEHIND, 4, False, True)
        assert "bytes written" in blame.evidence[-1]
    waits = found(replace(beside, peers=(replace(vague, in_flight=FLIGHT),)))
    assert not waits.excused, "it made the call, and writes beside it"
    assert not found(replace(beside, peer_processes=((PEER.pid, PROCESS),))).excused


def test_a_rail_is_named_with_its_namespace_where_its_device_name_is_in_several() -> None:
    for netns, name in (("pod7", "rail 1 (rail1 in pod7)"), ("", "rail 1 (rail1)")):
        assert found(with_rail1(up=False, netns=netns)).evidence == (f"{name} has no carrier or is switched off",)


def test_a_gpu_that_never_began_may_still_compute() -> None:
    blame = found(CALM, replace(RANK, in_flight=replace(FLIGHT, nothing_sent=True)))
    assert (blame.cause, blame.culprit) == (Cause.GPU_NOT_PROGRESSING, False)


def test_nothing_in_flight_and_nothing_wrong_is_unknown() -> None:
    assert found(CALM, replace(RANK, in_flight=None)).cause is Cause.UNKNOWN


rails = st.builds(
    RailSigns,
    rail=st.sampled_from("01"),
    device=st.sampled_from(["rail0", "rail1"]),
    netns=st.just(""),
    up=st.sampled_from([True, False, None]),
    window_ns=st.integers(0, 10**10),
    carrier_lost_ns=st.none() | st.integers(0, NOW_NS),
    speed_bytes_per_second=st.none() | st.integers(0, 10**11),
    connections=st.integers(0, 10),
    unanswered=st.integers(0, 10),
    peer_closed=st.integers(0, 10),
    unanswered_ns=st.integers(0, 10**11),
    sent_bytes=st.integers(0, 10**12),
    retransmitted_bytes=st.integers(0, 10**12),
    moved_bytes=st.integers(0, 10**12),
    busy_ratio=st.floats(0, 2),
    round_trip_ns=st.none() | st.integers(0, 10**10),
    round_trip_deviation_ns=st.none() | st.integers(0, 10**10),
    least_round_trip_ns=st.none() | st.integers(0, 10**10),
    backlog_bytes=st.none() | st.integers(0, 10**9),
    unread_bytes=st.integers(0, 10**9),
    losses=st.lists(st.tuples(st.sampled_from(["rx_errors", "drops"]), st.integers(1, 100)), max_size=2).map(tuple),
    port_bytes=st.integers(0, 10**12),
    surely_used=st.booleans(),
)
processes = st.builds(
    ProcessFacts,
    st.sampled_from(["running", "stopped", "traced", "frozen", "gone"]),
    st.integers(0, 10**10),
    st.floats(0, 100),
    st.floats(0, 100),
    st.integers(0, 10**12),
    st.none() | st.integers(0, 10**12),
)
ranks = st.builds(
    replace,
    st.just(RANK),
    rank=st.none() | st.integers(0, 7),
    nranks=st.none() | st.integers(1, 8),
    enqueued=st.integers(0, 200),
    completed=st.none() | st.integers(0, 200),
    in_flight=st.none() | st.sampled_from([FLIGHT, WEAK, replace(FLIGHT, nothing_sent=True)]),
)


@given(ranks, processes, st.lists(rails, max_size=4), st.lists(ranks, max_size=3), processes)
def test_every_finding_has_evidence_and_names_only_what_was_looked_at(
    rank: RankFacts, process: ProcessFacts, signs: list[RailSigns], peers: list[RankFacts], peer_process: ProcessFacts
) -> None:
    others = tuple(replace(peer, pid=4712) for peer in peers)
    blame = found(Evidence(process, tuple(signs), others, ((4712, peer_process),)), rank)
    assert blame.evidence
    assert all(blame.evidence)
    assert blame.device in {"", *(one.device for one in signs)}
    assert bool(blame.rail) == blame.cause.value.startswith("rail_")
    assert not (blame.culprit and blame.excused)


def test_rails_whose_connections_are_hidden_are_not_said_to_work() -> None:
    blame = blame_for(RANK, replace(CALM, hidden="Operation not permitted"), NOW_NS)
    assert blame.cause is Cause.RANK_BEHIND
    assert "its connections cannot be seen: Operation not permitted" in blame.evidence
    assert not any("rails work" in sentence for sentence in blame.evidence)
    assert any("rails work" in sentence for sentence in blame_for(RANK, CALM, NOW_NS).evidence)
