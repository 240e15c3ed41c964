"""What each rank sends to each other rank, by what its calls say, against the formulas and by hand. Calls simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.snapshot import NodeCollectives, NodeTimes, PeerTotal
from railscope.agent.model.ring import all_reduce_bytes
from railscope.agent.node.collectives.call_counts import CallCount, CallKind
from railscope.agent.node.collectives.collectives import Collectives
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.collectives.peer_bytes import CALL, OTHER, RING, PeerBytes
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.collectives_kernel import SimulatedPrograms

COMM = 0xC0FFEE
NAME = f"{COMM:016x}"
MANY = 1000
Peers = dict[tuple[str, str], int]
"""Bytes by (peer, basis)."""


def end(rank: int, nranks: int, instance: int = 1) -> Communicator:
    return Communicator(instance, 10, 0, comm_hash=COMM, rank=rank, nranks=nranks)


def count(op: Op, payload_bytes: int, *, peer: int = -1, calls: int = 1, instance: int = 1) -> CallCount:
    return CallCount(CallKind(10, instance, peer, op, 7, 20), calls, payload_bytes)


def sent(rank: int, nranks: int, *counts: CallCount, most_peers: int = MANY) -> Peers:
    communicator = end(rank, nranks)
    return by_peer(PeerBytes(most_peers, {1: communicator}.get).totals(counts), rank)


def by_peer(totals: tuple[PeerTotal, ...], rank: int) -> Peers:
    assert {(one.comm, one.rank) for one in totals} <= {(NAME, str(rank))}
    found = {(one.peer, one.basis): one.wire_bytes for one in totals}
    assert len(found) == len(totals)
    return found


@pytest.mark.parametrize(
    ("op", "root", "expected"),
    [
        (Op.AllReduce, -1, (1500, 1500, 1500, 1500)),
        (Op.AllGather, -1, (3000, 3000, 3000, 3000)),
        (Op.ReduceScatter, -1, (3000, 3000, 3000, 3000)),
        (Op.Broadcast, 2, (1000, 0, 1000, 1000)),
        (Op.Reduce, 2, (1000, 1000, 0, 1000)),
    ],
)
def test_a_ring_sends_to_the_next_rank_and_the_last_to_the_first(op: Op, root: int, expected: tuple[int, ...]) -> None:
    for rank, wire_bytes in enumerate(expected):
        assert sent(rank, 4, count(op, 1000, peer=root)) == (
            {(str((rank + 1) % 4), RING): wire_bytes} if wire_bytes else {}
        )


@given(st.integers(2, 9), st.integers(1, 50), st.integers(1, 20))
def test_an_all_reduce_of_whole_chunks_is_what_the_analysis_of_recordings_says_to_the_byte(
    nranks: int, elements: int, calls: int
) -> None:
    payload = elements * nranks * 4
    for rank in range(nranks):
        edge = all_reduce_bytes(np.array([payload]), np.array([4]), nranks, np.array([rank]))
        ((peer, wire_bytes),) = sent(rank, nranks, count(Op.AllReduce, payload * calls, calls=calls)).items()
        assert peer == (str((rank + 1) % nranks), RING)
        assert wire_bytes == calls * int(edge[0])


def test_messages_go_to_the_peer_that_the_call_names_and_receiving_sends_nothing() -> None:
    counts = (
        count(Op.Send, 300, peer=3), count(Op.Send, 20, peer=3), count(Op.Recv, 5000, peer=1),
        count(Op.PutSignal, 7, peer=0), count(Op.Signal, 9, peer=0),
    )  # fmt: skip
    assert sent(2, 4, *counts) == {("3", CALL): 320, ("0", CALL): 7}


def test_scatter_is_sent_by_the_root_gather_to_it_and_everybody_sends_all_to_all() -> None:
    assert sent(1, 3, count(Op.Scatter, 100, peer=1)) == {("2", CALL): 100, ("0", CALL): 100}
    assert sent(0, 3, count(Op.Scatter, 100, peer=1)) == {}
    assert sent(1, 3, count(Op.Gather, 100, peer=1)) == {}
    assert sent(0, 3, count(Op.Gather, 100, peer=1)) == {("1", CALL): 100}
    assert sent(2, 3, count(Op.AllToAll, 100)) == {("0", CALL): 100, ("1", CALL): 100}


def test_what_is_known_from_the_call_is_apart_from_what_a_ring_would_do() -> None:
    assert sent(0, 2, count(Op.AllReduce, 1000), count(Op.Send, 1, peer=1)) == {("1", RING): 1000, ("1", CALL): 1}


@pytest.mark.parametrize(
    "communicator",
    [
        None,
        replace(end(0, 2), comm_hash=None),
        replace(end(0, 2), rank=None),
        replace(end(0, 2), nranks=None),
        replace(end(0, 2), rank=2),
    ],
)
def test_nothing_is_said_of_whom_nobody_knows(communicator: Communicator | None) -> None:
    assert PeerBytes(MANY, lambda _: communicator).totals([count(Op.AllReduce, 1000)]) == ()


def test_nonsense_and_one_s_self_are_no_peers() -> None:
    counts = [count(op, 100, peer=peer) for op in (Op.Send, Op.Gather) for peer in (-1, 4, 2)]
    counts += [count(op, 100, peer=-1) for op in (Op.Broadcast, Op.Reduce, Op.Scatter)]
    assert sent(2, 4, *counts) == {}
    assert sent(0, 1, *(count(op, 100, peer=0) for op in Op)) == {}


def test_operations_of_which_nothing_is_known_send_nothing_that_is_told() -> None:
    assert sent(0, 2, count(Op.AllGatherV, 1000), count(Op.Unknown, 1000), count(Op.WaitSignal, 1)) == {}


def test_beyond_the_limit_peers_are_one_and_no_byte_is_lost() -> None:
    counts = [count(Op.Send, 100 * peer, peer=peer) for peer in range(1, 6)]
    assert sent(0, 6, *counts, most_peers=2) == {("5", CALL): 500, ("4", CALL): 400, (OTHER, CALL): 600}
    assert sent(4, 6, count(Op.AllToAll, 10), most_peers=3) == {
        ("5", CALL): 10, ("0", CALL): 10, ("1", CALL): 10, (OTHER, CALL): 20,
    }  # fmt: skip


def test_a_peer_that_has_a_series_keeps_it_whoever_comes_later() -> None:
    peers = PeerBytes(1, {1: end(0, 4)}.get)
    assert by_peer(peers.totals([count(Op.Send, 5, peer=1)]), 0) == {("1", CALL): 5}
    later = [count(Op.Send, 5, peer=1), count(Op.Send, 10**9, peer=2)]
    assert by_peer(peers.totals(later), 0) == {("1", CALL): 5, (OTHER, CALL): 10**9}
    peers.forget([1])
    assert by_peer(peers.totals(later), 0) == {("2", CALL): 10**9, (OTHER, CALL): 5}


@given(
    st.lists(
        st.lists(
            st.builds(
                count,
                st.sampled_from(list(Op)),
                st.integers(0, 10**6),
                peer=st.integers(-1, 5),
            ),
            max_size=8,
        ),
        max_size=6,
    ),
    st.integers(0, 4),
    st.integers(1, 4),
)
def test_no_total_ever_falls_as_calls_come_in_and_rows_leave_the_table(
    readings: list[list[CallCount]], rank: int, most_peers: int
) -> None:
    peers = PeerBytes(most_peers, {1: end(rank, 5)}.get)
    before: Peers = {}
    for rows in readings:
        living = by_peer(peers.totals(rows), rank)
        assert all(living.get(key, 0) >= value for key, value in before.items())
        assert sum(basis == CALL for _, basis in living) <= most_peers + 1
        peers.fold(rows)
        before = by_peer(peers.totals([]), rank)
        assert before == living


def test_all_ranks_together_send_what_the_ring_carries() -> None:
    total = Counter[str]()
    for rank in range(8):
        total.update({basis: size for (_, basis), size in sent(rank, 8, count(Op.AllReduce, 1 << 20)).items()})
    assert total == {RING: 2 * (1 << 20) * 7}


# Beside the rest of what is known of communicators


def test_what_ended_communicators_sent_stays_until_they_are_forgotten() -> None:
    kernel = SimulatedPrograms()
    processes = {
        10: ObservedProcess(
            ProcessIdentity(10, 1), NetworkNamespace(7, Path("/proc/1/ns/net"), own=True), JobFacts(), "", "2.27.7"
        )
    }
    collectives = Collectives(kernel, processes, 0, most_peers=4)
    silent = Collectives(kernel, processes, 0)
    kernel.communicator(10, 1)
    kernel.call(10, 1, 5)

    def facts(of: Collectives) -> NodeCollectives:
        return of.facts(of.read(), NodeTimes(), now_ns=0, realtime_offset_ns=0)

    def peers(of: Collectives) -> tuple[PeerTotal, ...]:
        return facts(of).peers

    expected = (PeerTotal(f"{1:016x}", "0", "1", RING, 5 * 1024),)
    assert peers(collectives) == expected
    assert peers(silent) == ()
    kernel.destroy(1, 1_000_000_000)
    collectives.read()
    collectives.archive_ended(3_000_000_000)
    assert not kernel.aggregates.rows
    assert peers(collectives) == expected
    collectives.forget(2_000_000_000, 100)
    assert peers(collectives) == ()
    # Nothing is left of it: whoever had the same number would not inherit it.
    kernel.communicator(10, 1)
    (row,) = kernel.communicators.rows.values()
    kernel.event(10, 1, LifecycleKind.INIT, confirmed=1, identity=row["identity"])
    assert [one.identity.comm for one in facts(collectives).communicators] == [f"{1:016x}"]
    assert peers(collectives) == ()
