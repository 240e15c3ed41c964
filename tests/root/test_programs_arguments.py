"""Every argument of every function reaches the probes, through either route and behind any prologue."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from railscope.probes.libraries.elf import Elf, Symbol
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType, Op
from railscope.probes.nccl.functions.entry_points import COLLECTIVE_FUNCTIONS
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime
from railscope.probes.nccl.records.calls import LifecycleKind, Stat
from tests.root.probe_targets import (
    GARBAGE,
    MODES,
    Target,
    assemble,
    attached,
    communicators,
    loaded,
    on_x86_64,
    target,
)

pytestmark = pytest.mark.root


class ExportedNames(Elf):
    """A library as it looks after `strip --strip-all`: without the names that are not exported."""

    def symbols(self, names: Collection[str]) -> dict[str, Symbol]:
        return {name: symbol for name, symbol in super().symbols(names).items() if symbol.table == ".dynsym"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call and what must be said about it; COMM and STREAM stand for the two words of those names."""

    function: str
    words: tuple[int, ...]
    op: Op
    data_type: DataType
    count: int
    peer: int = -1


COMM, STREAM = -1, 0x5EED
CALLS: Final = (
    Call("ncclAllReduce", (1, 2, 11, 7, 0, COMM, STREAM), Op.AllReduce, DataType.Float32, 11),
    Call("ncclReduceScatter", (1, 2, 12, 8, 0, COMM, STREAM), Op.ReduceScatter, DataType.Float64, 12),
    Call("ncclReduce", (1, 2, 13, 9, 0, GARBAGE | 3, COMM, STREAM), Op.Reduce, DataType.Bfloat16, 13, 3),
    Call("ncclBroadcast", (1, 2, 14, GARBAGE | 0, GARBAGE | 4, COMM, STREAM), Op.Broadcast, DataType.Int8, 14, 4),
    Call("ncclBcast", (1, 15, 5, 5, COMM, STREAM), Op.Broadcast, DataType.Uint64, 15, 5),
    Call("ncclGather", (1, 2, 16, 6, 6, COMM, STREAM), Op.Gather, DataType.Float16, 16, 6),
    Call("ncclScatter", (1, 2, 17, 2, 7, COMM, STREAM), Op.Scatter, DataType.Int32, 17, 7),
    Call("ncclAllGather", (1, 2, 18, 11, COMM, STREAM), Op.AllGather, DataType.Float8e5m2, 18),
    Call("ncclAlltoAll", (1, 2, 19, 4, COMM, STREAM), Op.AllToAll, DataType.Int64, 19),
    Call("ncclSend", (1, 1 << 40, 7, 1, COMM, STREAM), Op.Send, DataType.Float32, 1 << 40, 1),
    Call("ncclRecv", (1, 21, 1, 2, COMM, STREAM), Op.Recv, DataType.Uint8, 21, 2),
)
REAL_CALLS: Final = (
    *(
        replace(call, function=call.function + "Config", words=(*call.words, 0))
        for call in CALLS
        if call.function not in ("ncclBcast", "ncclSend", "ncclRecv")
    ),
    Call("ncclPutSignal", (1, 33, 7, 2, 0, 0, 0, 0, 0, COMM, STREAM), Op.PutSignal, DataType.Float32, 33, 2),
    # The signals move nothing; NCCL fills in some data type, which its exported functions do not have.
    Call("ncclSignal", (2, 0, 0, 0, COMM, STREAM), Op.Signal, DataType.Unknown, 0, 2),
    Call("ncclWaitSignal", (0, 0, COMM, STREAM), Op.WaitSignal, DataType.Unknown, 0),
)
"""Functions of the real library that the testbed's does not have."""


def expectation(call: Call, comm: int, points: ProbePoints) -> tuple[int, ...]:
    """What `described` gives for the event of this call."""
    payload_bytes = call.count * DATA_TYPE_BYTES[call.data_type]
    stream = STREAM if points.through_enqueue_check or stream_comes_free(call) else 0
    return (int(call.op), int(call.data_type), payload_bytes, call.peer, comm, stream)


def stream_comes_free(call: Call) -> bool:
    """Whether the stream is in a register, or lies on the stack behind a communicator that has to be read anyway."""
    registers = {"x86_64": 6, "aarch64": 8}[platform.machine()]
    symbol = "ncclBroadcast" if call.function == "ncclBcast" else call.function
    (function,) = (function for function in COLLECTIVE_FUNCTIONS if function.symbol == symbol)
    return function.stream < registers or function.comm >= registers


def described(event: Any) -> tuple[int, ...]:
    op, data_type, *others = (
        int(event[field]) for field in ("op", "data_type", "payload_bytes", "peer", "comm", "stream")
    )
    return (op, int(DataType.Unknown) if op in (Op.Signal, Op.WaitSignal) else data_type, *others)


@pytest.mark.parametrize(
    "library", [pytest.param("nccl", marks=pytest.mark.nccl), pytest.param("stripped", marks=pytest.mark.nccl), "other"]
)
def test_every_function_gives_its_arguments_through_either_route(library: str, request: pytest.FixtureRequest) -> None:
    to: Target = request.getfixturevalue("testbed" if library == "other" else "nccl")
    points = to.points
    if library == "stripped":
        with to.path.open("rb") as file, ExportedNames.open(file.fileno()) as elf:
            points = probe_points(elf, 3)
        assert not points.through_enqueue_check
    assert points.refused == ()
    calls = CALLS if library == "other" else (*CALLS, *REAL_CALLS)
    comm = to.caller.memory(2 << 20)  # without magics: refused once it has been counted
    with loaded(to) as programs, attached(programs, to, points):
        for call in calls:
            result = to.caller.call(call.function, 1, *(comm if word == COMM else word for word in call.words))
            assert result in (4, 5), call.function
        events = programs.call_events.read()
        (entry,) = communicators(programs).values()
        stats = programs.stats()
    assert [described(event) for event in events] == [expectation(call, comm, points) for call in calls]
    assert events["sequence"].tolist() == list(range(1, len(calls) + 1))
    assert set(events["instance"].tolist()) == {int(entry["instance"])}
    assert stats[Stat.ARGUMENTS_UNREADABLE] == 0


@pytest.mark.nccl
@pytest.mark.parametrize("name", ["ncclCommInitRank", "ncclCommInitRankConfig"])
def test_the_unique_id_of_an_init_call_is_read_although_it_fails(nccl: Target, name: str) -> None:
    # By value it is copied to the stack, sixteen words of it; NCCL refuses rank 9 of 4.
    words = [0x0101010101010101 * (number + 1) for number in range(16)]
    new_comm = nccl.caller.memory(8)
    # newcomm, nranks and rank in registers, three registers unused, then the stack
    arguments = [new_comm, GARBAGE | 4, GARBAGE | 9, 0, 0, 0, *words]
    with loaded(nccl) as programs, attached(programs, nccl):
        assert nccl.caller.call(name, 1, *arguments) != 0
        events = programs.lifecycle_events.read()
    event = events[-1]
    assert (int(event["kind"]), int(event["nranks"]), int(event["rank"])) == (LifecycleKind.INIT, 4, 9)
    assert int(event["result"]) != 0
    assert int(event["has_unique_id"]) == 1
    assert event["unique_id"].tobytes() == b"".join(bytes([number + 1]) * 8 for number in range(16))


@on_x86_64
@pytest.mark.parametrize(("attach", "enqueue_time"), MODES)
def test_stack_arguments_are_found_where_the_prologue_has_moved_the_stack(
    tmp_path: Path, layouts: Layouts, attach: AttachKind, enqueue_time: EnqueueTime
) -> None:
    library = assemble(
        tmp_path,
        ncclAllReduce="endbr64; push %rbp; pop %rbp; xor %eax, %eax; ret",
        ncclReduce="sub $40, %rsp; push %rbp; pop %rbp; add $40, %rsp; xor %eax, %eax; ret",
        ncclBroadcast="movabs $0x1234567890, %rax; push %rbp; pop %rbp; xor %eax, %eax; ret",
        ncclSend="mov %rsi, %rdi; push %rbp; pop %rbp; xor %eax, %eax; ret",
    )
    with target(library, layouts) as unusual:
        assert [point.symbol for point in unusual.points.calls_entry_only] == ["ncclReduce"]
        assert unusual.points.refused == ("ncclSend",)
        comm = unusual.caller.memory(4096)
        calls = [call for call in CALLS if call.function in ("ncclAllReduce", "ncclReduce", "ncclBroadcast")]
        settings = {"attach": attach, "enqueue_time": enqueue_time, "sample_every": 1}
        with loaded(unusual, **settings) as programs, attached(programs, unusual):
            for call in calls:
                words = [comm if word == COMM else word for word in call.words]
                assert unusual.caller.call(call.function, 1, *words) == 0
            events = programs.call_events.read()
            timed = programs.enqueue_times()["calls"]
    assert [described(event) for event in events] == [expectation(call, comm, unusual.points) for call in calls]
    # No return probe fits behind the moved stack pointer
    timed_ops = {Op(int(op)) for op in timed.nonzero()[0]}
    assert timed_ops == (set() if enqueue_time is EnqueueTime.OFF else {Op.AllReduce, Op.Broadcast})


@on_x86_64
def test_calls_whose_arguments_are_not_there_are_told_of_their_process_alone(tmp_path: Path, layouts: Layouts) -> None:
    library = assemble(
        tmp_path,
        ncclReduce="endbr64; push %rbp; pop %rbp; xor %eax, %eax; ret",
        from_stack="push %rbx; mov %rsp, %rbx; mov %rdi, %rsp; call ncclReduce@PLT; mov %rbx, %rsp; pop %rbx; ret",
    )
    with target(library, layouts) as one, target(library, layouts) as other:
        words = [1, 2, 13, 9, 0, 3, one.caller.memory(4096), 7]
        top = one.caller.pages(8192) + 4096  # the page above it holds arguments, and nobody has touched it
        with loaded(one, other) as programs, attached(programs, one):
            assert programs.unreadable_calls() == {}
            for times in (1, 2):
                assert one.caller.call("from_stack", times, top) == 0
                assert other.caller.call("ncclReduce", times, *words) == 0
            assert programs.unreadable_calls() == {one.caller.pid: 3}
            assert programs.stats()[Stat.ARGUMENTS_UNREADABLE] == 3
