"""Ranks of a communicator that do not make the same collectives, and all the ways in which ranks differ by right."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from railscope.agent.facts.stall import Disagreement
from railscope.agent.node.collectives.agreement import Agreement, pack
from railscope.agent.node.collectives.communicators import Communicator
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.programs.shapes import WINDOW, Block
from tests.unit.collectives_kernel import SimulatedShapes

SECOND = 1_000_000_000
HASH = 0xC0FFEE
FIRST_NS = 5 * SECOND


def end(instance: int, rank: int, *, whole: bool = True, nranks: int = 2, comm_hash: int | None = HASH) -> Communicator:
    return Communicator(instance, 4711 + rank, FIRST_NS, comm_hash=comm_hash, rank=rank, nranks=nranks, whole=whole)


class Ranks:
    """Ranks of one communicator, with what they called."""

    def __init__(self, ranks: int = 2) -> None:
        self.shapes = SimulatedShapes()
        self.ends = [end(1 + rank, rank, nranks=ranks) for rank in range(ranks)]
        self.moving: set[int] = set()
        self.positions: dict[int, int] = {}
        """By instance, where NCCL's own numbers are known."""
        self.agreement = Agreement(self.shapes, self._calls_of, lambda instance, _: self.positions.get(instance))
        self._asked = 0

    def _calls_of(self, instance: int) -> int | None:
        self._asked += instance in self.moving
        made = self.shapes.made.get(instance)
        return None if made is None else len(made) + self._asked

    def all_make(self, op: int = Op.AllReduce, times: int = 1, payload: int = 1024) -> None:
        for one in self.ends:
            self.shapes.make(one.instance, op, times=times, payload=payload)

    def update(self, seconds: float = 0.1, lost: dict[int, int] | None = None) -> None:
        self.agreement.update(tuple(self.ends), lost or {}, FIRST_NS + int(seconds * SECOND))

    def signatures(self) -> list[int | None]:
        return [self.agreement.signature(one.instance) for one in self.ends]


def test_of_ranks_that_made_the_same_the_first_tells_it_and_none_is_found(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    for op in (Op.AllReduce, Op.AllGather, Op.ReduceScatter):
        ranks.all_make(op, 3 * WINDOW)
    ranks.update(600)
    first, second = ranks.signatures()
    assert first is not None
    assert second is None
    assert ranks.agreement.find(ranks.ends) is None
    assert not caplog.records


def test_another_operation_is_named_with_its_number_and_both_shapes() -> None:
    ranks = Ranks()
    ranks.all_make(times=100)
    ranks.shapes.make(1, Op.AllReduce, payload=4096)
    ranks.shapes.make(2, Op.AllGather, payload=4096)
    ranks.all_make(times=5)  # calls are handed over ahead of time
    found = ranks.agreement.find(ranks.ends)
    assert found == Disagreement(101, (((0,), "AllReduce of 4096 bytes float32"), ((1,), "AllGather of 4096 bytes")))
    assert found.odd_rank is None
    assert found.sentence == (
        "collective 101 is AllReduce of 4096 bytes float32 on rank 0, but AllGather of 4096 bytes on rank 1"
    )


def test_one_rank_against_several_is_the_odd_one() -> None:
    ranks = Ranks(4)
    ranks.all_make(times=3)
    for one in ranks.ends:
        ranks.shapes.make(one.instance, Op.Broadcast, root=1 if one.rank == 2 else 0)
    found = ranks.agreement.find(ranks.ends)
    assert found is not None
    assert found.odd_rank == 2
    assert found.sentence == (
        "collective 4 is Broadcast of 1024 bytes with root 0 on ranks 0, 1, 3, but Broadcast of 1024 bytes with root 1 "
        "on rank 2"
    )


def test_a_rank_that_is_behind_agrees_in_what_it_made() -> None:
    ranks = Ranks()
    ranks.all_make(times=100)
    ranks.shapes.make(1, Op.AllGather, times=20)
    assert ranks.agreement.find(ranks.ends) is None
    ranks.shapes.make(1, Op.AllGather, times=WINDOW)
    assert ranks.agreement.find(ranks.ends) is None  # so far behind that nothing is left to compare


def test_a_rank_that_calls_just_now_is_not_compared() -> None:
    ranks = Ranks()
    ranks.shapes.make(1, Op.AllReduce)
    ranks.shapes.make(2, Op.AllGather)
    assert ranks.agreement.find(ranks.ends) is not None
    ranks.moving.add(2)
    assert ranks.agreement.find(ranks.ends) is None


def test_a_disagreement_of_ranks_on_this_host_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    ranks.all_make(times=2 * WINDOW + 7)
    ranks.shapes.make(1, payload=1024)
    ranks.shapes.make(2, payload=2048)
    ranks.all_make(times=60)
    with caplog.at_level(logging.WARNING):
        ranks.update(600)
        ranks.update(601)
    assert len(caplog.records) == 1
    assert "do not make the same collectives: they differ between collective 129 and 192" in caplog.text
    assert ": collective 136 is AllReduce of 1024 bytes float32 on rank 0, but AllReduce of 2048 bytes" in caplog.text
    first, second = ranks.signatures()
    assert first is not None
    assert second is not None
    assert first != second
    assert first >> 32 == second >> 32
    # The next blocks are alike again.
    ranks.all_make(times=4 * WINDOW)
    ranks.update(602)
    assert ranks.signatures()[1] is None


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(end(2, 1, whole=False), id="seen late"),
        pytest.param(end(2, 1, comm_hash=None), id="without a name"),
        pytest.param(end(2, 1, comm_hash=HASH + 1), id="of another communicator, as of a split"),
    ],
)
def test_what_is_not_known_is_not_said(other: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    ranks.ends[1] = other
    ranks.shapes.make(1, Op.AllReduce, times=WINDOW)
    ranks.shapes.make(2, Op.AllGather, times=WINDOW)
    ranks.update(600)
    assert not caplog.records
    if other.comm_hash != HASH + 1:
        assert ranks.agreement.signature(2) is None
        assert ranks.agreement.find(ranks.ends) is None


def seen_late() -> Ranks:
    """The second rank was seen two collectives later than the first, which was seen after ten."""
    ranks = Ranks()
    ranks.ends = [end(1, 0, whole=False), end(2, 1, whole=False)]
    ranks.shapes.make(1, Op.AllReduce, times=2)
    ranks.all_make(Op.AllGather, times=5)
    ranks.all_make(Op.AllReduce, times=5)
    ranks.positions = {1: 22, 2: 22}
    return ranks


def test_ranks_that_were_seen_late_are_compared_by_the_numbers_of_nccl() -> None:
    ranks = seen_late()
    assert ranks.agreement.find(ranks.ends) is None
    ranks.shapes.make(1, Op.AllReduce, payload=8)
    ranks.shapes.make(2, Op.AllReduce, payload=16)
    ranks.all_make()
    ranks.positions = {1: 24, 2: 24}
    found = ranks.agreement.find(ranks.ends)
    assert found is not None
    assert found.number == 23
    ranks.update(600)
    assert ranks.signatures() == [None, None]
    assert ranks.agreement.last(ranks.ends[0]) is None


@pytest.mark.parametrize("unnumbered", [{"payload": 0}, {"op": Op.AllToAll}])
def test_what_nccl_does_not_number_leaves_ranks_that_were_seen_late_incomparable(unnumbered: dict[str, int]) -> None:
    ranks = seen_late()
    ranks.shapes.make(1, **unnumbered)
    ranks.shapes.make(2, Op.AllReduce, payload=8)
    ranks.positions = {1: 22, 2: 23}
    assert ranks.agreement.find(ranks.ends) is None


def test_calls_that_were_lost_make_what_lived_then_unknown() -> None:
    ranks = Ranks()
    ranks.all_make(times=WINDOW)
    ranks.update(600, lost={4713: 3})
    assert ranks.signatures()[0] is not None
    ranks.shapes.make(1, Op.AllGather)
    ranks.shapes.make(2, Op.AllReduce)
    ranks.update(601, lost={4711: 1, 4712: 1, 4713: 3})
    assert ranks.signatures() == [None, None]
    assert ranks.agreement.find(ranks.ends) is None
    ranks.ends = [end(3, 0), end(4, 1)]
    ranks.all_make(times=WINDOW)
    ranks.update(1200, lost={4711: 1, 4712: 1, 4713: 3})
    assert ranks.signatures()[0] is not None


def test_calls_that_another_process_lost_make_nothing_unknown() -> None:
    ranks = Ranks()
    for second in range(3):
        ranks.all_make(times=WINDOW)
        ranks.update(600 + second, lost={5000: second + 1})
        assert ranks.signatures()[0] is not None
    ranks.shapes.make(1, Op.AllGather)
    ranks.shapes.make(2, Op.AllReduce)
    ranks.update(604, lost={5000: 9})
    assert ranks.agreement.find(ranks.ends) is not None


@pytest.mark.parametrize(
    ("calls", "seconds", "lasts"),
    [
        (WINDOW, 3600.0, 3600.0),
        (64 << 10, 60.0, 60.0),
        (64 << 10, 61.0, 61.0),
        (64 << 10, 59.0, None),
        (100, 9.0, None),
    ],
)
def test_a_checkpoint_stands_for_a_minute_at_least(calls: int, seconds: float, lasts: float | None) -> None:
    ranks = Ranks()
    ranks.all_make(times=calls)
    ranks.update(seconds)
    told = ranks.signatures()[0]
    if lasts is None:
        assert told is None
    else:
        assert told is not None
        length = WINDOW << (told >> 49)
        assert length / (calls / seconds) == lasts


def test_the_packed_number_is_exact_in_a_float_and_tells_blocks_apart() -> None:
    most = pack(Block(14, (1 << 32) - (WINDOW << 14), 0xFFFFFFFF))
    assert int(float(most)) == most < 1 << 53
    blocks = [Block(level, last * (WINDOW << level), 7) for level in range(15) for last in range(1, 5)]
    assert len({pack(block) >> 32 for block in blocks}) == len(blocks)
    assert {pack(block) & 0xFFFFFFFF for block in blocks} == {7}


def test_what_a_rank_called_last_is_known_a_moment_after_it_left() -> None:
    ranks = Ranks()
    ranks.all_make(Op.AllReduce, 3)
    ranks.update()
    left = replace(ranks.ends[0], ended_ns=FIRST_NS + SECOND)
    ranks.ends = ranks.ends[1:]
    ranks.update(2)
    found = ranks.agreement.last(left)
    assert found is not None
    assert (found.last, len(found.shapes)) == (3, 3)


def test_of_a_rank_that_left_after_a_call_that_could_not_be_read_nothing_is_said() -> None:
    ranks = Ranks()
    ranks.all_make(Op.AllReduce, 3)
    ranks.update(lost={ranks.ends[0].tgid: 1})
    left = replace(ranks.ends[0], ended_ns=FIRST_NS + SECOND)
    ranks.ends = ranks.ends[1:]
    ranks.update(2, lost={left.tgid: 1})
    assert ranks.agreement.last(left) is None
    ranks.agreement.forget([left.instance])
    assert ranks.agreement.last(left) is not None
