"""Whose the bytes of an RDMA port are, by its queue pairs: readings and ports are simulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from railscope.agent.facts.hardware import BoundCounterFacts, NodeQueuePairs, QueuePairFacts
from railscope.agent.facts.rail_ledger import Origin, RailLedger
from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.agent.node.attribution.evidence import (
    INFINIBAND_HEADERS,
    ROCE_HEADERS,
    HandedBytes,
    RailLedgers,
    rdma_evidence,
)
from railscope.agent.node.attribution.ledger import Sockets
from railscope.agent.node.attribution.parties import Mapped, Unlooked
from railscope.agent.node.attribution.queue_pair_owners import (
    MOST_ABSENT,
    MOST_LOOKS,
    NO_CLAIMS,
    PortClaims,
    QueuePairOwners,
)
from railscope.agent.node.rails.rdma_rails import RdmaRails
from railscope.probes.clock import SystemClock
from railscope.probes.libraries.communication import CommunicationLibrary
from tests.trees.rdma import mlx5_roce_8rails

NCCL, NIXL, UCX, UNKNOWN = TrafficOwner.NCCL, TrafficOwner.NIXL, TrafficOwner.UCX, TrafficOwner.UNKNOWN
MAPPED: Final[dict[int, Mapped]] = {
    1: frozenset({CommunicationLibrary.NCCL, CommunicationLibrary.GLOO}),
    2: frozenset({CommunicationLibrary.NIXL, CommunicationLibrary.UCX}),
    3: frozenset(),
    4: frozenset({CommunicationLibrary.NCCL, CommunicationLibrary.NIXL, CommunicationLibrary.UCX}),
}
KEY: Final = (0, "mlx5_0:1")
PACKET: Final = 4096 + ROCE_HEADERS.usual


def pair(pid: int | None, number: int = 7, **others: object) -> QueuePairFacts:
    one = QueuePairFacts("mlx5_0", 1, number, 88, "", "RC", "RTS", pid, "")
    return replace(one, **others)  # type: ignore[arg-type]


def owners(*, sees_everyone: bool = True) -> QueuePairOwners:
    return QueuePairOwners(lambda pid: MAPPED.get(pid, Unlooked.NEVER), sees_everyone=lambda: sees_everyone)


def bound(sent: int, received: int, *queue_pairs: int, number: int = 5) -> BoundCounterFacts:
    names = ("rdma_tx_bytes", "rdma_tx_packets", "rdma_rx_bytes", "rdma_rx_packets")
    values = (sent * PACKET, sent, received * PACKET, received)
    return BoundCounterFacts("mlx5_0", 1, number, queue_pairs, tuple(zip(names, values, strict=True)))


@pytest.mark.parametrize(
    ("pairs", "claimants"),
    [
        ((pair(1),), {NCCL}),
        ((pair(2),), {NIXL}),
        ((pair(3),), {TrafficOwner.RDMA_OTHER}),
        ((pair(4),), {NCCL, NIXL}),
        ((pair(1), pair(2, 8)), {NCCL, NIXL}),
        ((pair(1), pair(2, 8, state="INIT")), {NCCL}),
        ((pair(1), pair(2, 8, port=2)), {NCCL}),
        ((pair(1), pair(2, 8, port=None)), {NCCL, NIXL}),
        ((pair(1), pair(99, 8)), {NCCL, UNKNOWN}),
        ((pair(1), pair(None, 8)), {NCCL, UNKNOWN}),
        ((pair(1), pair(None, 1, kind="GSI", kernel_user="ib_core")), {NCCL}),
        ((pair(1), pair(None, 8, kind="UD", kernel_user="ib_ipoib")), {NCCL, UNKNOWN}),
        ((pair(None, kernel_user="nvme_rdma"),), {TrafficOwner.STORAGE}),
        ((pair(None, kernel_user="rdma_cm", services=(800, 20_049)),), {TrafficOwner.STORAGE}),
        ((pair(None, kernel_user="rdma_cm", services=(800, 18_634)),), {TrafficOwner.RDMA_OTHER}),
        ((), {UNKNOWN}),
    ],
)
def test_who_has_connected_queue_pairs_may_have_moved_what_a_port_counts(
    pairs: tuple[QueuePairFacts, ...], claimants: set[TrafficOwner]
) -> None:
    of_port = owners()
    assert of_port.claims("mlx5_0", 1, ROCE_HEADERS) is NO_CLAIMS, "they were not read yet"
    of_port.update(NodeQueuePairs(1, pairs))
    assert of_port.claims("mlx5_0", 1, ROCE_HEADERS).claimants == claimants
    for hiding, left_out in ((owners(), 1), (owners(sees_everyone=False), 0)):
        hiding.update(NodeQueuePairs(1, pairs, left_out=left_out))
        assert hiding.claims("mlx5_0", 1, ROCE_HEADERS).claimants == claimants | {UNKNOWN}


def test_a_process_with_thousands_of_queue_pairs_is_asked_about_once_a_reading() -> None:
    asked: list[int] = []

    def mapped_by(pid: int) -> Unlooked:
        asked.append(pid)
        return Unlooked.YET

    found = QueuePairOwners(mapped_by, sees_everyone=lambda: True)
    pairs = tuple(pair(pid, 1000 * pid + at) for pid in (5, 6) for at in range(1000))
    found.update(NodeQueuePairs(read_ns=1, queue_pairs=pairs))
    assert sorted(asked) == [5, 6]


def test_whose_queue_pairs_are_is_asked_again_while_their_process_is_going_to_be_looked_at() -> None:
    """But not for ever, and not what bound counters count."""
    mapped: dict[int, Mapped | Unlooked] = {5: Unlooked.YET, 6: frozenset({CommunicationLibrary.UCX})}
    asked: list[int] = []

    def mapped_by(pid: int) -> Mapped | Unlooked:
        asked.append(pid)
        return mapped[pid]

    of_port = QueuePairOwners(mapped_by, sees_everyone=lambda: True)
    pairs = (pair(5, 7), pair(6, 8), pair(None, 9))
    of_port.update(NodeQueuePairs(1, pairs))
    reading = NodeQueuePairs(2, pairs, bound=(bound(10, 10, 8),))
    for _ in range(2):
        of_port.update(reading)
        assert of_port.owners == {("mlx5_0", 7): {UNKNOWN}, ("mlx5_0", 8): {UCX}, ("mlx5_0", 9): {UNKNOWN}}
    mapped[5] = MAPPED[1]
    of_port.update(reading)
    assert of_port.owners["mlx5_0", 7] == {NCCL}
    found = of_port.claims("mlx5_0", 1, ROCE_HEADERS)
    assert found.claimants == {NCCL, UCX, UNKNOWN}
    assert found.sent[UCX].segments == 10
    asked.clear()
    of_port.update(reading)
    assert not asked
    mapped[5] = Unlooked.YET
    for _ in range(100):
        of_port.update(NodeQueuePairs(3, pairs))
    assert len(asked) == 2 * (1 + MOST_LOOKS)


def test_bound_counters_are_of_who_made_their_queue_pairs_from_the_second_reading_on() -> None:
    of_port = owners()
    pairs = (pair(1, 7), pair(2, 8), pair(2, 9))
    of_port.update(NodeQueuePairs(1, pairs, bound=(bound(100, 10, 8, 9),)))
    assert not of_port.claims("mlx5_0", 1, ROCE_HEADERS).sent
    of_port.update(NodeQueuePairs(2, pairs, bound=(bound(150, 30, 8, 9), bound(7, 7, 7, number=6))))
    of_port.update(NodeQueuePairs(2, pairs, bound=(bound(999, 999, 8, 9),)))
    found = of_port.claims("mlx5_0", 1, ROCE_HEADERS)
    assert (found.counted, found.read_ns) == (True, 2)
    assert (found.sent[NIXL].payload_bytes, found.sent[NIXL].header_bytes) == (50 * 4096, 50 * ROCE_HEADERS.usual)
    assert (found.received[NIXL].segments, found.sent[NCCL].segments) == (20, 7)
    # Its number is another one's now, and that is of several owners.
    of_port.update(NodeQueuePairs(3, pairs, bound=(bound(5, 5, 7, 8),)))
    found = of_port.claims("mlx5_0", 1, ROCE_HEADERS)
    assert (found.sent[UNKNOWN].segments, found.sent[NIXL].segments) == (5, 50)
    assert not of_port.claims("mlx5_1", 1, INFINIBAND_HEADERS).sent


@pytest.mark.parametrize(("then", "more"), [((8, 9), 25), ((9, 10), 25), ((10, 11), 75), ((8, 10), 25)])
def test_of_a_bound_counter_that_a_reading_lacked_is_counted_what_it_counted_since(
    then: tuple[int, ...], more: int
) -> None:
    """Another one that got its number, for other queue pairs, counts from 0 on."""
    of_port = owners()
    pairs = tuple(pair(2, number) for number in range(8, 12))
    of_port.update(NodeQueuePairs(1, pairs))
    of_port.update(NodeQueuePairs(2, pairs, bound=(bound(50, 50, 8, 9),)))
    for moment in (3, 4):
        of_port.update(NodeQueuePairs(moment, pairs))
        assert of_port.claims("mlx5_0", 1, ROCE_HEADERS).sent[NIXL].segments == 50
    for moment in (5, 6):
        of_port.update(NodeQueuePairs(moment, pairs, bound=(bound(75, 75, *then),)))
        found = of_port.claims("mlx5_0", 1, ROCE_HEADERS)
        assert (found.sent[NIXL].segments, found.received[NIXL].segments) == (50 + more, 50 + more)


def test_bound_counters_that_are_gone_are_remembered_up_to_a_number() -> None:
    of_port = owners()
    of_port.update(NodeQueuePairs(1))
    for moment in range(2, MOST_ABSENT + 12):
        of_port.update(NodeQueuePairs(moment, (pair(2),), bound=(bound(5, 5, 7, number=moment),)))
    assert len(of_port._absent) == MOST_ABSENT
    of_port.update(NodeQueuePairs(10**6, (pair(2),), bound=(bound(9, 9, 7, number=MOST_ABSENT + 10),)))
    assert of_port.claims("mlx5_0", 1, ROCE_HEADERS).sent[NIXL].segments == 5 * (MOST_ABSENT + 10) + 4


class Port:
    """One port, whose bytes go out in packets of 4 KiB, and come in as many."""

    def __init__(self) -> None:
        self._ledgers = RailLedgers()
        self._packets = self._handed = 0
        self.count(0, 0, NO_CLAIMS)

    def count(self, collective: int, others: int, claims: PortClaims, *, undecided: int = 0) -> RailLedger | None:
        """So many more packets of collectives and of others."""
        self._packets += collective + others
        self._handed += collective * 4096
        counted = self._packets * PACKET
        self._ledgers.update(
            [
                rdma_evidence(
                    KEY, counted, counted,
                    {"port_xmit_packets": self._packets, "port_rcv_packets": self._packets},
                    None, self._handed,
                    complete=True, infiniband=False, in_network=False,
                    claims=claims, undecided=(undecided * PACKET, 0),
                )
            ]
        )  # fmt: skip
        return self._ledgers.get(KEY)


def claims(*claimants: TrafficOwner) -> PortClaims:
    return PortClaims(frozenset(claimants), read_ns=1)


def test_what_collectives_do_not_explain_is_of_whom_it_can_be_while_it_can_be_nobody_else_s() -> None:
    port = Port()
    port.count(1000, 0, claims(NCCL))
    port.count(1000, 500, claims(NCCL, NIXL))
    port.count(1000, 300, claims(NCCL, NIXL, UCX))
    port.count(0, 200, claims(UCX))
    found = port.count(1000, 0, claims(NCCL))
    assert found is not None
    sent = found.transmit
    for owner, packets in ((NCCL, 4000), (NIXL, 500), (UNKNOWN, 300), (UCX, 200)):
        assert sent.of_owner(owner) == pytest.approx(packets * PACKET, rel=0.01), owner
    assert sent.of_origin(Origin.COLLECTIVE) == 4000 * 4096
    assert sent.of_origin(Origin.TRANSFER) == pytest.approx(700 * 4096, rel=0.01)
    assert sent.of_origin(Origin.FOREIGN) == pytest.approx(300 * PACKET, rel=0.01)
    # What comes in is not handed over by NCCL: of two who may have, nobody knows.
    assert found.receive.of_owner(NIXL) == 0


def test_bytes_of_bound_counters_are_their_owner_s_and_wait_for_the_next_reading() -> None:
    port = Port()
    several = claims(NCCL, NIXL, UCX)
    nixl = {NIXL: owners_counted(400)}
    port.count(1000, 500, replace(several, sent=nixl, counted=True), undecided=1500)
    found = port.count(0, 0, replace(several, sent={NIXL: owners_counted(500)}, counted=True))
    assert found is not None
    assert found.transmit.of_owner(NIXL) == pytest.approx(500 * PACKET, rel=0.01)
    assert found.transmit.of_owner(NCCL) == pytest.approx(1000 * PACKET, rel=0.01)
    assert found.transmit.of_owner(UNKNOWN) < PACKET


def owners_counted(packets: int) -> Sockets:
    return Sockets(packets * 4096, 0, packets, packets * ROCE_HEADERS.usual, 0)


def test_a_port_that_one_library_has_to_itself_is_its_own(tmp_path: Path) -> None:
    """At the hardware's edge: a simulated tree of counters, and a simulated reading of queue pairs."""
    tree = mlx5_roce_8rails(tmp_path / "sys")
    of_port = owners()
    of_port.update(NodeQueuePairs(1, (pair(2),)))
    rails = RdmaRails(
        SystemClock(), sysfs=tree.sysfs, sample_interval_ns=20_000_000, window_ns=10**9, patterns=(),
        queue_pairs=of_port,
    )  # fmt: skip

    def until(shown: Callable[[RailFacts], bool]) -> RailFacts:
        deadline = time.monotonic() + 60
        while True:
            rails.correlate([], HandedBytes({}, whole=True))
            found = next(one for one in rails.rails() if one.device == "mlx5_0")
            if shown(found):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    with closing(rails):
        rails.start()
        before = until(lambda found: found.transmit_bytes is not None and bool(found.counters))
        assert before.transmit_bytes is not None
        tree.set("mlx5_0/1", "counters/port_xmit_data", before.transmit_bytes // 4 + 1_000_000)
        found = until(lambda found: found.ledger is not None and bool(found.ledger.transmit.cells))
    assert found.ledger is not None
    assert found.ledger.transmit.of_owner(NIXL) == 4_000_000
