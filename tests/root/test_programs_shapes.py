"""What the programs keep of each communicator's collectives, by which its ranks are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from railscope.probes.nccl.abi import DataType, Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.programs.shapes import WINDOW, Block, Shape, block_from_word
from railscope.probes.nccl.records.calls import BLOCK_LEVELS, COMMUNICATOR_KEY, SHAPES, WITHOUT_SHAPES
from tests.root.probe_targets import Target, assemble, attached, communicators, loaded, on_x86_64, target
from tests.root.test_programs_slots import addresses_of_one_slot

pytestmark = [pytest.mark.root, on_x86_64]

FLOAT32, INT64, BFLOAT16 = (int(one) for one in (DataType.Float32, DataType.Int64, DataType.Bfloat16))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, layouts: Layouts) -> Iterator[Target]:
    """Functions that do nothing."""
    nothing = "push %rbp; pop %rbp; xor %eax, %eax; ret"
    names = ("ncclAllReduce", "ncclAllGather", "ncclBroadcast", "ncclSend", "ncclRecv", "ncclCommDestroy")
    path = assemble(tmp_path_factory.mktemp("plain"), **dict.fromkeys(names, nothing))
    with target(path, layouts) as found:
        yield found


def reduce_all(plain: Target, comm: int, times: int = 1, elements: int = 100, data_type: int = FLOAT32) -> None:
    plain.caller.call("ncclAllReduce", times, 0, 0, elements, data_type, 0, comm, 0)


def gather_all(plain: Target, comm: int, times: int = 1, elements: int = 100, data_type: int = FLOAT32) -> None:
    plain.caller.call("ncclAllGather", times, 0, 0, elements, data_type, comm, 0)


def broadcast(plain: Target, comm: int, root: int, times: int = 1) -> None:
    plain.caller.call("ncclBroadcast", times, 0, 0, 100, FLOAT32, root, comm, 0)


def blocks(programs: NcclPrograms, comm: int) -> list[Block | None]:
    instance = int(communicators(programs)[comm]["instance"])
    words = programs.shapes.blocks([instance])[0].tolist()
    return [block_from_word(level, word) for level, word in enumerate(words)]


def recent(programs: NcclPrograms, comm: int) -> tuple[int, list[Shape]] | None:
    entry = communicators(programs)[comm]
    found = programs.shapes.recent(int(entry["instance"]), int(entry["sequence"]))
    return None if found is None else (found[0], [Shape.from_word(word) for word in found[1]])


def signatures(programs: NcclPrograms, comms: Sequence[int]) -> list[list[int | None]]:
    return [[block.signature if block else None for block in blocks(programs, comm)] for comm in comms]


def test_the_last_collectives_are_known_one_by_one_and_point_to_point_is_not_among_them(plain: Target) -> None:
    comm = plain.caller.memory(4096)
    with loaded(plain) as programs, attached(programs, plain):
        reduce_all(plain, comm)
        plain.caller.call("ncclSend", 5, 0, 7, INT64, 1, comm, 0)
        gather_all(plain, comm, data_type=BFLOAT16)
        broadcast(plain, comm, 3)
        plain.caller.call("ncclRecv", 2, 0, 7, INT64, 1, comm, 0)
        assert recent(programs, comm) == (
            3,
            [
                Shape(Op.AllReduce, FLOAT32, None, 400),
                Shape(Op.AllGather, None, None, 200),
                Shape(Op.Broadcast, None, 3, 400),
            ],
        )
        reduce_all(plain, comm, 2 * WINDOW, elements=1)
        last = recent(programs, comm)
    assert last == (2 * WINDOW + 3, [Shape(Op.AllReduce, FLOAT32, None, 4)] * WINDOW)


def test_blocks_close_at_multiples_of_their_lengths(plain: Target) -> None:
    comm = plain.caller.memory(4096)
    with loaded(plain) as programs, attached(programs, plain):
        closed = {}
        for times in (WINDOW - 1, 1, WINDOW, WINDOW, 13 * WINDOW):
            reduce_all(plain, comm, times)
            closed[int(communicators(programs)[comm]["sequence"])] = [
                block.last if block else None for block in blocks(programs, comm)
            ]
    none = [None] * BLOCK_LEVELS
    assert closed[WINDOW - 1] == none
    assert closed[WINDOW] == [WINDOW, *none[1:]]
    assert closed[2 * WINDOW] == [2 * WINDOW, 2 * WINDOW, *none[2:]]
    assert closed[3 * WINDOW] == [3 * WINDOW, 2 * WINDOW, *none[2:]]
    assert closed[16 * WINDOW] == [16 * WINDOW] * 5 + none[5:]


def test_signatures_differ_where_the_collectives_do_and_nowhere_else(plain: Target) -> None:
    """Two collectives in another order, another data type, another count, another root; with sends between or not."""
    same, mixed, swapped, typed, counted, rooted, moved = comms = [plain.caller.memory(4096) for _ in range(7)]
    with loaded(plain) as programs, attached(programs, plain):
        for comm in comms:
            reduce_all(plain, comm, WINDOW)  # a first block that is the same on all
            if comm == mixed:
                plain.caller.call("ncclSend", 7, 0, 7, INT64, 1, comm, 0)
            first, second = (gather_all, reduce_all) if comm == swapped else (reduce_all, gather_all)
            first(plain, comm)
            second(plain, comm)
            reduce_all(plain, comm, data_type=BFLOAT16 if comm == typed else FLOAT32, elements=200 >> (comm != typed))
            reduce_all(plain, comm, elements=101 if comm == counted else 100)
            broadcast(plain, comm, 1 if comm == rooted else 0)
            # What only moves bytes may call them what it likes.
            gather_all(plain, comm, elements=200 if comm == moved else 100, data_type=9 if comm == moved else FLOAT32)
            reduce_all(plain, comm, 2 * WINDOW - 6)
            reduce_all(plain, comm, WINDOW)  # a last block that is the same again
        found = dict(zip(comms, signatures(programs, comms), strict=True))
    for comm in (mixed, moved):
        assert found[comm] == found[same]
    for comm in (swapped, typed, counted, rooted):
        assert found[comm][0] == found[same][0]  # the newest block of this length has nothing of it
        assert found[comm][2] != found[same][2]
    assert len({tuple(found[comm]) for comm in (same, swapped, typed, counted, rooted)}) == 5


def test_a_communicator_without_a_slot_is_compared_too(plain: Target) -> None:
    first, second = addresses_of_one_slot(plain.caller.pid, 2)
    with loaded(plain) as programs, attached(programs, plain):
        for comm in (first, second):
            reduce_all(plain, comm, 3 * WINDOW)
            gather_all(plain, comm)
        assert blocks(programs, first) == blocks(programs, second)
        assert recent(programs, first) == recent(programs, second)
        assert blocks(programs, first)[1] is not None


def test_a_place_is_free_once_its_communicator_has_ended_or_is_deleted(plain: Target) -> None:
    first, second = plain.caller.memory(4096), plain.caller.memory(4096)
    with loaded(plain) as programs, attached(programs, plain):
        for comm in (first, second):
            reduce_all(plain, comm, 2 * WINDOW)
        known = communicators(programs)
        plain.caller.call("ncclCommDestroy", 1, first)
        # What it called last is known until another has its place.
        assert recent(programs, first) == (2 * WINDOW, [Shape(Op.AllReduce, FLOAT32, None, 400)] * WINDOW)
        assert blocks(programs, first) == [None] * BLOCK_LEVELS
        programs.communicators.delete(np.array([(second, plain.caller.pid, 0)], COMMUNICATOR_KEY).tobytes())
        instance = int(known[second]["instance"])
        assert programs.shapes.recent(instance, 2 * WINDOW) is None
        # The next at the same address begins anew.
        reduce_all(plain, first, 3)
        assert recent(programs, first) == (3, [Shape(Op.AllReduce, FLOAT32, None, 400)] * 3)
        assert int(programs.shapes.blocks([instance]).sum()) == 0


def test_who_has_no_place_is_not_compared(plain: Target) -> None:
    """A process may have a third of all places (test_programs_shares.py): what comes beyond has none."""
    with loaded(plain) as programs, attached(programs, plain):
        comms = [plain.caller.memory(64) for _ in range(-(-SHAPES // 3) + 1)]
        for comm in comms:
            reduce_all(plain, comm, 5)
        first, *_, other = comms
        assert int(communicators(programs)[other]["instance"]) & WITHOUT_SHAPES
        reduce_all(plain, other, WINDOW)
        assert recent(programs, other) is None
        assert blocks(programs, other) == [None] * BLOCK_LEVELS
        last = recent(programs, first)
    assert last is not None
    assert last[0] == 5
