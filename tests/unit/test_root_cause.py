"""Whom an operation that does not end is blamed on, by cause, and which cause comes first where several are seen.

What is found on the host is simulated, after real faults: see stall_facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.causes import CAUSES, Cause
from railscope.agent.facts.stall import Diagnosis, Disagreement
from railscope.agent.node.stalls.evidence import Elsewhere, Evidence, GonePeer, ProcessFacts, RailSigns, RankFacts
from railscope.agent.node.stalls.root_cause import find_root_cause
from tests.unit.stall_facts import (
    CALM,
    COMPUTES,
    FLIGHT,
    MIB,
    PEER,
    PROCESS,
    RAIL0,
    RANK,
    STARVED,
    STOPPED,
    WEAK,
    WRITES,
    with_peers,
    with_process,
    with_rail1,
    with_rails,
)

NOW_NS: Final = 10**12
SECOND_AGO_NS: Final = NOW_NS - 10**9
PAIR: Final = replace(RANK, nranks=2)
"""All of a communicator of two, with `PEER`."""
FIRST_OF_TWO: Final = replace(RANK, nranks=2, rank=0)
DURING: Final = replace(RANK, in_flight=WEAK)
"""That an operation is in flight follows from bytes that lie unread."""
BEHIND: Final = replace(PEER, enqueued=99)
VAGUE: Final = replace(PEER, comparable=False, in_flight=None)
"""Was not seen to make the call, and cannot be compared."""
SILENT: Final = replace(PEER, in_flight=replace(FLIGHT, nothing_sent=True))
HELD: Final = replace(PEER, enqueued=98, pid=4713, rank=5)
"""Waits in another communicator, with `ELSEWHERE`."""
ELSEWHERE: Final = (Elsewhere(HELD.pid, HELD.name, "cafe", "process 4799 of its rank 1 is stopped"),)
UNANSWERED: Final = {"unanswered": 2, "unanswered_ns": 3_000_000_000}
BRIEFLY: Final = {"unanswered": 1, "unanswered_ns": 1_000_000_000}
UNREAD: Final = with_rails({"unread_bytes": 262160}, {"unread_bytes": 262160})
CLOSED_BESIDE_PEER: Final = with_peers((PEER, PROCESS), evidence=with_rail1(peer_closed=2))
ODD: Final = Disagreement(101, (((0, 1), "AllReduce of 8 bytes"), ((2,), "AllReduce of 16 bytes")))
RDMA: Final = {"connections": 0, "port_bytes": 10**9}
NOBODY: Final = {"blamed_rank": None, "culprit": False}
RUNS: Final = "=this rank's process runs and its rails work: it waits for "


@dataclass(frozen=True, slots=True)
class Case:
    """What is found of one rank, and whom that blames."""

    name: str
    evidence: Evidence
    rank: RankFacts = RANK
    says: tuple[str, ...] = ()
    """Parts of sentences; `=` all of one."""
    first: str = ""
    """The same, of the first sentence."""
    last: str = ""
    never: tuple[str, ...] = ()
    found: Mapping[str, object] = field(default_factory=dict)
    """Of the blame, by name."""


def found(evidence: Evidence, rank: RankFacts = RANK) -> Diagnosis:
    return find_root_cause(rank, evidence, NOW_NS)


def each_rail(losses: tuple[int, ...], counter: str) -> Evidence:
    """Rails that counted so many losses."""
    return replace(
        CALM,
        rails=tuple(
            replace(RAIL0, rail=str(at), device=f"mlx5_{at}", losses=((counter, more),))
            for at, more in enumerate(losses)
        ),
    )


def late(round_trip_ns: int, deviation_ns: int) -> Evidence:
    """Round trips of the second rail take long beside those of the first."""
    return with_rails(
        {"sent_bytes": MIB, "round_trip_ns": 100_000, "round_trip_deviation_ns": 30_000, "busy_ratio": 0.1},
        {"sent_bytes": MIB, "round_trip_ns": round_trip_ns, "round_trip_deviation_ns": deviation_ns, "busy_ratio": 0.3},
    )


def beside_a_management_port(sent_bytes: int) -> Evidence:
    """The second rail is a slower port that sent so much."""
    return with_rails({"sent_bytes": 500 * MIB}, {"speed_bytes_per_second": 125_000_000, "sent_bytes": sent_bytes})


CASES: Final[dict[Cause, list[Case]]] = {
    Cause.PROCESS_GONE: [
        Case(
            "its own process, before everything else",
            with_process(replace(PROCESS, condition="gone"), with_rail1(up=False)),
            first="has ended",
            found={"blamed_rank": 3, "culprit": True},
        ),
        Case(
            "of peers of this host the first whose process has ended",
            replace(CLOSED_BESIDE_PEER, others=1, gone=GonePeer(5, 4713)),
            PAIR,
            found={"blamed_rank": 5, "evidence": ("process 4713 of rank 5 has ended",)},
        ),
        Case(
            "a peer whose process has ended, before one that is behind",
            replace(with_peers((BEHIND, PROCESS)), gone=GonePeer(5, 4713)),
            found={"blamed_rank": 5, "culprit": True},
        ),
    ],
    Cause.PROCESS_STOPPED: [
        Case(
            f"{stands.condition}, before everything else",
            with_process(stands, with_rail1(up=False)),
            first=word,
            found={"blamed_rank": 3, "culprit": True},
        )
        for stands, word in (
            (STOPPED, "kill -CONT"),
            (replace(PROCESS, condition="traced"), "debugger"),
        )
    ],
    Cause.PROCESS_FROZEN: [
        Case(
            f"thawed by {word}",
            with_process(replace(PROCESS, condition="frozen", freezer=freezer), with_rail1(up=False)),
            first=word,
            found={"blamed_rank": 3, "culprit": True},
        )
        for freezer, word in (
            ("/sys/fs/cgroup/a/cgroup.freeze", "`echo 0 > /sys/fs/cgroup/a/cgroup.freeze` thaws it"),
            ("/sys/fs/cgroup/freezer/a/freezer.state", "`echo THAWED > /sys/fs/cgroup/freezer/a/freezer.state`"),
            ("", "this agent cannot see which"),
        )
    ],
    Cause.RAIL_DOWN: [
        Case(
            "without carrier, before one that gives no answer",
            with_rails(UNANSWERED, {"up": False}),
            found={"rail": "1", "device": "rail1"},
        ),
        Case(
            "perhaps not used: no culprit",
            with_rail1(up=False, connections=0, surely_used=False),
            found={"culprit": False},
        ),
        Case(
            "perhaps not used, and up until a moment ago",
            with_rail1(up=False, connections=0, surely_used=False, carrier_lost_ns=NOW_NS - 1),
            found={"culprit": True},
        ),
        Case(
            "a carrier that came back explains silence for a while",
            with_rail1(**BRIEFLY, carrier_lost_ns=SECOND_AGO_NS),
        ),
        *(
            Case(
                f"named with its namespace where its device's name is in several: {name}",
                with_rail1(up=False, netns=netns),
                found={"evidence": (f"{name} has no carrier or is switched off",)},
            )
            for netns, name in (("pod7", "rail 1 (rail1 in pod7)"), ("", "rail 1 (rail1)"))
        ),
    ],
    Cause.RAIL_MTU: [
        Case(
            "shorter segments pass, before another rail that gives no answer",
            with_rails(UNANSWERED, {**UNANSWERED, "only_small_arrive": 1, "segment_bytes": 8948}),
            first="segments of 8948 bytes on rail 1 (rail1) are not acknowledged",
            found={"rail": "1", "device": "rail1", "culprit": True},
        ),
    ],
    Cause.RAIL_FILTERED: [
        Case(
            "no answer on every rail: the host at the other end", with_rails(UNANSWERED, UNANSWERED), last="remote host"
        ),
        Case(
            "no answer on the only rail: that says nothing of the host at the other end",
            replace(CALM, rails=with_rails(UNANSWERED, {}).rails[:1]),
            never=("remote host",),
            found={"device": "rail0"},
        ),
        Case("no answer long after a carrier came back", with_rail1(**BRIEFLY, carrier_lost_ns=NOW_NS - 60 * 10**9)),
    ],
    Cause.RAIL_LOSSY: [
        Case(
            "loses much, although its round trips are long too",
            with_rails(
                {"round_trip_ns": 1_000_000, "busy_ratio": 0.1},
                {"sent_bytes": 5 * MIB, "retransmitted_bytes": MIB, "round_trip_ns": 60_000_000, "busy_ratio": 1.0},
            ),
            last="which end of it loses packets cannot be told here",
            found={"device": "rail1", "either_end": True},
        ),
        Case(
            "its device counts losses",
            with_rail1(losses=(("rx_crc_errors", 100),)),
            never=("cannot be told",),
            found={"either_end": False},
        ),
        Case(
            "of packets out of order one counts many more than its siblings",
            each_rail((400, 401, 402, 403, 404, 1700, 406, 407), "out_of_sequence"),
            found={"device": "mlx5_5"},
        ),
        *(
            Case(
                f"what a healthy rail never counts needs no comparison: {losses}",
                each_rail(losses, "rx_discards"),
                found={"device": "mlx5_0"},
            )
            for losses in ((1000, 1000, 0), (1000, 300), (1000, 1000))
        ),
        Case(
            "the one that lost most",
            with_rails({"losses": (("rx_crc_errors", 20),)}, {"losses": (("rx_discards", 900),)}),
            found={"device": "rail1"},
        ),
    ],
    Cause.RAIL_SLOW: [
        # As measured: with one rail at a tenth, retransmissions for no reason showed on the other one.
        Case(
            "though its sibling sends again",
            with_rails(
                {
                    "sent_bytes": 5 * MIB,
                    "retransmitted_bytes": 120_000,
                    "round_trip_ns": 1_600_000,
                    "busy_ratio": 0.2,
                    "backlog_bytes": 0,
                },
                {"sent_bytes": 5 * MIB, "round_trip_ns": 25_000_000, "busy_ratio": 1.0, "backlog_bytes": 136_000},
            ),
            says=("queue",),
            found={"device": "rail1", "either_end": False},
        ),
        Case(
            "though its sibling sends much again",
            with_rails(
                {
                    "sent_bytes": 5 * MIB,
                    "retransmitted_bytes": MIB,
                    "round_trip_ns": 1_600_000,
                    "busy_ratio": 0.2,
                    "backlog_bytes": 0,
                },
                {"sent_bytes": 5 * MIB, "round_trip_ns": 25_000_000, "busy_ratio": 1.0, "backlog_bytes": 136_000},
            ),
            found={"device": "rail1"},
        ),
        Case(
            "few round trips are far from their mean",
            late(5_138_000, 1_248_000),
            last="which end of it is slow cannot be told here",
            found={"either_end": True, "culprit": True},
        ),
        # A third of all packets, 100 ms late: no receiver puts off so many.
        Case("so many are late that no receiver put them off", late(30_700_000, 42_500_000)),
        Case("a slower port that carries data", beside_a_management_port(100 * MIB)),
        Case(
            "a link that came up at a lower speed, without TCP too",
            with_rails(RDMA, {"speed_bytes_per_second": 10**9, **RDMA}),
            first="8 Gbit/s",
            found={"device": "rail1", "either_end": False},
        ),
    ],
    Cause.RANKS_DISAGREE: [
        Case(
            "two ranks, and neither is the odd one",
            replace(
                CALM, disagreement=Disagreement(101, (((0,), "AllReduce of 8 bytes"), ((1,), "AllGather of 8 bytes")))
            ),
            first="=collective 101 is AllReduce of 8 bytes on rank 0, but AllGather of 8 bytes on rank 1",
            found={"blamed_rank": None, "culprit": True},
        ),
        Case(
            "one against two, though a rail has packets without an answer and its own count is behind",
            replace(with_rail1(**UNANSWERED), disagreement=ODD),
            replace(RANK, enqueued=99),
            found={"blamed_rank": 2, "culprit": True},
        ),
        Case(
            "in one that is complete, and another one hangs",
            replace(CALM, disagreement=replace(ODD, number=99)),
            found={"blamed_rank": 2},
        ),
    ],
    Cause.PEER_LEFT: [
        Case(
            "a peer closed connections, whichever of eight it is",
            with_rail1(peer_closed=2),
            found={"blamed_rank": None, "culprit": True},
        ),
        Case(
            "the other of two closed connections",
            with_rail1(peer_closed=2),
            replace(RANK, nranks=2, rank=1),
            found={"blamed_rank": 0},
        ),
        Case(
            "closed connections of a process without another communicator, though all peers live here",
            CLOSED_BESIDE_PEER,
            PAIR,
        ),
        Case(
            "where nothing is surely in flight nobody may wait for who left",
            with_rail1(peer_closed=2),
            replace(RANK, in_flight=WEAK),
            found={"culprit": False},
        ),
    ],
    Cause.GPU_NOT_PROGRESSING: [
        Case(
            "never began, and may still compute",
            CALM,
            replace(RANK, in_flight=replace(FLIGHT, nothing_sent=True)),
            found={"culprit": False},
        ),
        Case(
            "that of the only other rank, on this host",
            with_peers((SILENT, PROCESS)),
            PAIR,
            found={
                "blamed_rank": 4,
                "culprit": False,
                "evidence": ("it waits for rank 4 of this host, whose GPU has not started the call",),
            },
        ),
    ],
    Cause.RANK_BEHIND: [
        *(
            Case(
                f"a rank of this host: {does}",
                with_peers((BEHIND, process)),
                says=(word,),
                found={"blamed_rank": 4, "culprit": culprit, "excused": excused},
            )
            for does, process, culprit, excused, word in (
                ("sleeps", PROCESS, True, False, "sleeps"),
                ("stopped", STOPPED, True, False, "stopped"),
                ("starved", replace(PROCESS, waited_ratio=2.0, busy_ratio=0.05), True, False, "wait for a CPU"),
                ("computes", COMPUTES, False, False, "busy"),
                ("writes", WRITES, False, True, "busy"),
            )
        ),
        Case(
            "a rank that made the call too is not behind in it",
            with_peers((PEER, PROCESS)),
            replace(RANK, enqueued=105),
            found=NOBODY,
        ),
        Case(
            "a peer that made the call and is stopped",
            with_peers((PEER, STOPPED)),
            found={"blamed_rank": 4, "culprit": True},
        ),
        Case(
            "of two that are behind the one that is not held up elsewhere",
            replace(with_peers((HELD, PROCESS), (BEHIND, PROCESS)), elsewhere=ELSEWHERE),
            found={"blamed_rank": 4, "culprit": True},
        ),
        Case(
            "held up elsewhere",
            replace(with_peers((HELD, PROCESS), (BEHIND, PROCESS)), peers=(HELD,), elsewhere=ELSEWHERE),
            last="=rank 5 of this host is itself stalled in communicator cafe: process 4799 of its rank 1 is stopped",
            found=NOBODY,
        ),
        Case(
            "of two that are behind the one that is stopped",
            with_peers((HELD, STOPPED), (BEHIND, PROCESS)),
            found={"blamed_rank": 5},
        ),
        Case("does not read data from its peers", UNREAD, DURING, found={"blamed_rank": 3, "culprit": True}),
        Case(
            "does not read what is sent on one rail, and its threads sleep, as they do in no operation",
            with_process(replace(PROCESS, busy_ratio=0.01), with_rail1(unread_bytes=262160)),
            replace(DURING, completed=100),
            first="its peers have sent 262160 bytes that this rank does not read",
            found={"blamed_rank": 3, "culprit": False},
        ),
        Case(
            "who has data to send as well is inside the operation: another holds it up",
            with_rails({"unread_bytes": 262160, "unsent_bytes": 100}, {"unread_bytes": 262160}),
            DURING,
            found=NOBODY,
        ),
        Case(
            "does not read data from its peers, and writes",
            with_process(replace(PROCESS, written_bytes=10 * MIB), UNREAD),
            DURING,
            found={"excused": True},
        ),
        Case("has read one rail empty, and waits for the rest", with_rail1(unread_bytes=262160), DURING, found=NOBODY),
        Case(
            "what lies unread in a process with several communicators says nothing of this one",
            replace(UNREAD, others=2),
            DURING,
            found=NOBODY,
        ),
        Case(
            "all others wait for a rank of this host",
            with_peers((replace(PEER, in_flight=replace(WEAK, missing=True)), PROCESS)),
            replace(RANK, comparable=False),
            first="all other ranks wait for rank 4 of this host",
            found={"blamed_rank": 4, "culprit": True},
        ),
        Case(
            "all others wait for a rank of this host, though the GPU of one of them has not begun",
            with_peers((replace(PEER, in_flight=replace(WEAK, missing=True)), PROCESS)),
            replace(RANK, comparable=False, in_flight=replace(FLIGHT, nothing_sent=True)),
            found={"blamed_rank": 4, "culprit": True},
        ),
        # Who waits on a busy host is not behind because its spinning threads wait too.
        Case(
            "starved",
            with_process(replace(PROCESS, waited_ratio=1.4, busy_ratio=0.02)),
            found={"blamed_rank": 3, "culprit": True},
        ),
        Case(
            "starved, with a single wait in the window",
            with_process(replace(PROCESS, waited_ratio=0.85 / 1.5, busy_ratio=0.001)),
            found={"culprit": True},
        ),
        Case("spins", with_process(replace(PROCESS, waited_ratio=1.4, busy_ratio=0.1)), found=NOBODY),
        Case(
            "starved explains more than a port that may not be used",
            with_process(STARVED, with_rail1(up=False, connections=0, surely_used=False)),
        ),
        Case(
            "a rank that cannot be compared and writes is excused",
            with_peers((VAGUE, WRITES)),
            last="bytes written",
            found={"blamed_rank": 4, "culprit": False, "excused": True},
        ),
        Case(
            "the only other rank cannot be compared and writes",
            with_peers((VAGUE, WRITES)),
            PAIR,
            last="bytes written",
            found={"blamed_rank": 4, "culprit": False, "excused": True},
        ),
        Case(
            "a rank that made the call, and writes beside it",
            with_peers((replace(VAGUE, in_flight=FLIGHT), WRITES)),
            found={"excused": False},
        ),
        Case(
            "a rank that cannot be compared and does not write", with_peers((VAGUE, PROCESS)), found={"excused": False}
        ),
        # Who only waits
        Case("for whom", replace(CALM, waits_for=(2, 5)), last="rank 2, 5", found=NOBODY),
        Case(
            "of a launch that only receives, for the one that sends to it",
            replace(CALM, waits_for=(2,)),
            replace(RANK, in_flight=replace(FLIGHT, op="Recv")),
            found={"blamed_rank": 2, "culprit": False},
        ),
        Case(
            "a neighbour that does not send may wait itself",
            replace(CALM, waits_for=(2,)),
            replace(RANK, in_flight=replace(FLIGHT, op="SendRecv")),
            found=NOBODY,
        ),
        Case("for the other of two", CALM, FIRST_OF_TWO, found={"blamed_rank": 1}),
        Case(
            "for the other of two, which may wait in another communicator",
            replace(CALM, others=1),
            FIRST_OF_TWO,
            found={"blamed_rank": None},
        ),
        Case("its rails work", CALM, first="its rails work"),
        Case("no rail is seen", replace(CALM, rails=()), first="none of its rails is observed"),
        Case(
            "rails that lose alike",
            each_rail((400, 400), "out_of_sequence"),
            first="none of its rails differs from the others",
        ),
        Case(
            "connections that cannot be seen",
            replace(CALM, hidden="Operation not permitted"),
            says=("=its connections cannot be read: Operation not permitted",),
            never=("rails work",),
        ),
        Case(
            "for another rank of this host, where ranks were counted from some call on only",
            with_peers((PEER, PROCESS)),
            replace(PAIR, comparable=False),
            found={"evidence": (f"{RUNS[1:]}rank 4",)},
        ),
        Case("six more are elsewhere", with_peers((PEER, PROCESS))),
        *(
            Case(
                f"for other ranks, of this host or of others: {why}",
                with_peers((peer, PROCESS)),
                found={"evidence": (f"{RUNS[1:]}other ranks, of this host or of others",)},
            )
            for why, peer in (
                ("one was not seen to make the call", VAGUE),
                ("one may be in another", replace(VAGUE, in_flight=WEAK)),
            )
        ),
        *(
            Case(
                f"for ranks on other hosts: {why}",
                with_peers((peer, PROCESS)),
                rank,
                found={"evidence": (f"{RUNS[1:]}ranks on other hosts",)},
            )
            for why, peer, rank in (
                ("the one of this host made the call", PEER, replace(RANK, comparable=False)),
                ("the one of this host was counted", replace(PEER, in_flight=None), RANK),
            )
        ),
        Case(
            "closed connections may be those of another of its communicators",
            replace(with_rail1(peer_closed=2), others=2),
            last="or has destroyed a communicator",
            found={"culprit": False},
        ),
        # Rails that are not to blame
        Case("a carrier came back and all is answered", with_rail1(carrier_lost_ns=SECOND_AGO_NS)),
        Case("one retransmission is an accident", with_rail1(unanswered=1, unanswered_ns=300_000_000)),
        # As measured: beside a rank that hardly runs, the kernel said 5.138 ms, deviation 10.205, after one of 40 ms.
        Case("one acknowledgement was put off", late(5_138_000, 10_205_000)),
        Case("a device counts few losses", with_rail1(losses=(("rx_crc_errors", 3),))),
        # Where paths are chosen packet by packet, all rails of a healthy host count them all the time.
        Case("packets out of order on every rail", each_rail(tuple(range(400, 408)), "out_of_sequence")),
        Case("a rail that may carry nothing loses", with_rail1(losses=(("rx_crc_errors", 100),), surely_used=False)),
        Case(
            "rails that are slow alike",
            with_rails(
                *[{"sent_bytes": 5 * MIB, "round_trip_ns": 60_000_000, "busy_ratio": 1.0, "backlog_bytes": 200_000}] * 2
            ),
        ),
        # A management port of 1 Gbit/s beside rails of 80: the bootstrap's connections go through it.
        Case("a slow port that carries nothing", beside_a_management_port(2000)),
        Case(
            "a rail whose peer does not read",
            with_rails(
                {"sent_bytes": 5 * MIB, "round_trip_ns": 1_000_000, "busy_ratio": 0.1},
                {
                    "sent_bytes": 5 * MIB,
                    "round_trip_ns": 25_000_000,
                    "busy_ratio": 1.0,
                    "backlog_bytes": 136_000,
                    "peer_limited_ratio": 0.5,
                },
            ),
        ),
        Case(
            "closed connections are another communicator's where all peers live here",
            replace(CLOSED_BESIDE_PEER, others=1),
            replace(PAIR, comparable=False),
        ),
    ],
    Cause.UNSEEN: [
        Case(
            "every observed call is complete",
            CALM,
            replace(RANK, completed=100),
            first="every observed call is complete",
            found={"culprit": False},
        )
    ],
    Cause.UNKNOWN: [
        Case(
            "all ranks are here and made the call",
            with_peers((PEER, PROCESS)),
            PAIR,
            found={**NOBODY, "evidence": ("all 2 ranks are on this host and made this call: none of them is behind",)},
        ),
        Case(
            "all ranks are here, and closed connections are another communicator's",
            replace(CLOSED_BESIDE_PEER, others=1),
            PAIR,
        ),
        Case(
            "bytes lie unread, of which of several communicators cannot be told",
            replace(UNREAD, others=2),
            replace(RANK, in_flight=replace(WEAK, one_of=3)),
            found=NOBODY,
        ),
        Case("nothing is in flight and nothing wrong", CALM, replace(RANK, in_flight=None)),
    ],
}


@pytest.mark.parametrize(
    ("cause", "case"),
    [pytest.param(cause, case, id=f"{cause}: {case.name}") for cause, cases in CASES.items() for case in cases],
)
def test_each_cause_is_found_by_its_signs_and_blamed_on_the_right_one(cause: Cause, case: Case) -> None:
    diagnosis = found(case.evidence, case.rank)
    assert diagnosis.cause is cause, diagnosis.evidence
    assert {name: getattr(diagnosis, name) for name in case.found} == case.found
    for words, sentences in (
        *((words, diagnosis.evidence) for words in case.says),
        (case.first, diagnosis.evidence[:1]),
        (case.last, diagnosis.evidence[-1:]),
    ):
        assert any(_holds(sentence, words) for sentence in sentences), (words, sentences)
    assert not any(_holds(sentence, words) for words in case.never for sentence in diagnosis.evidence)


def _holds(sentence: str, words: str) -> bool:
    return sentence == words[1:] if words.startswith("=") else words in sentence


def test_every_cause_that_a_host_tells_of_has_a_case() -> None:
    # tests/unit/test_inside_calls.py, tests/unit/test_unseen_work.py, tests/unit/test_stuck_transfers.py
    told_elsewhere = {Cause.INSIDE_CALL, Cause.UNSEEN_WORK_STUCK, Cause.TRANSFER_STUCK}
    assert set(CASES) == {cause for cause, facts in CAUSES.items() if facts.by_host} - told_elsewhere
    assert all(CASES.values())


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
    diagnosis = found(Evidence(process, tuple(signs), others, {4712: peer_process}), rank)
    assert diagnosis.evidence
    assert all(diagnosis.evidence)
    assert diagnosis.device in {"", *(one.device for one in signs)}
    assert bool(diagnosis.rail) == diagnosis.cause.value.startswith("rail_")
    assert not (diagnosis.culprit and diagnosis.excused)


@pytest.mark.parametrize(
    "evidence",
    [
        # As measured: one rail shaped to 100 Mbit/s, and its sibling done long before it, but for the tail.
        with_rails(
            {"sent_bytes": MIB, "retransmitted_bytes": 32 << 10, "busy_ratio": 0.1},
            {"sent_bytes": 5 * MIB, "round_trip_ns": 34_000_000, "round_trip_deviation_ns": 34_000_000}
            | {"busy_ratio": 1.0},
        ),
        with_rails({"sent_bytes": 287_000, "retransmitted_bytes": 8960, "busy_ratio": 0.4}, {"busy_ratio": 0.4}),
    ],
    ids=["its sibling is busier", "a few segments"],
)
def test_a_small_share_sent_again_says_little(evidence: Evidence) -> None:
    assert found(evidence).cause is not Cause.RAIL_LOSSY
