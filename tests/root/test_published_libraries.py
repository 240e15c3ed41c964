"""Every NCCL that the tests fetch, 2.21 to 2.32: counted, named as it names itself, and read below its entry points
where, and only where, it has the functions.

No GPU: calls have no communicator or a forged one, which each library refuses only behind what is probed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, Op
from railscope.probes.nccl.functions.internals import Level, internal_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.calls import LifecycleKind, Stat
from railscope.probes.nccl.records.internals import InternalStat, NetworkKind, layout_record
from railscope.testbed.nccl.library import nccl_library
from tests.fabric.agent_process import AgentProcess
from tests.nccl.library import LIBRARIES
from tests.root.caller import forge_communicator
from tests.root.probe_targets import (
    GARBAGE,
    Count,
    Target,
    all_reduce,
    attached,
    communicators,
    counted,
    loaded,
    target,
)
from tests.root.test_programs_arguments import CALLS, COMM, REAL_CALLS
from tests.root.test_programs_communicators import IDENTITY

pytestmark = [pytest.mark.root, pytest.mark.nccl]

IN_PROGRESS = 7
"""ncclInProgress."""
ACCESSORS = {"rank": "ncclCommUserRank", "nranks": "ncclCommCount", "cuda_dev": "ncclCommCuDevice"}


def version_of(library: Target) -> str:
    assert library.layout is not None
    return library.layout.nccl_version


def tells_of_completion(library: Target) -> bool:
    """Versions before 2.23 have no function that is called when a proxy operation is done."""
    return tuple(map(int, version_of(library).split("."))) >= (2, 23)


@pytest.fixture(scope="module", params=[name for name in LIBRARIES if name >= "2.20"])
def library(request: pytest.FixtureRequest, layouts: Layouts) -> Iterator[Target]:
    with target(nccl_library(request.param), layouts) as found:
        yield found


def exported(path: Path, names: set[str]) -> set[str]:
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        return {name for name, symbol in elf.symbols(names).items() if symbol.table == ".dynsym"}


def forged(library: Target, layouts: Layouts) -> int:
    with library.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        size_bytes = layouts.structures(elf.build_id)["ncclComm"].size_bytes
    # Not ready: NCCL refuses an operation once it has been counted, and touches nothing more of what is forged.
    return forge_communicator(library.caller, library.layout, size_bytes, {**IDENTITY, "async_result": IN_PROGRESS})


def test_calls_without_a_communicator_are_counted_with_their_operation_and_bytes(library: Target) -> None:
    assert library.points.through_enqueue_check
    assert library.points.refused == ()
    there = exported(library.path, {call.function for call in (*CALLS, *REAL_CALLS)})
    calls = [call for call in (*CALLS, *REAL_CALLS) if call.function in there]
    expected: dict[Op, Count] = {}
    with loaded(library) as programs, attached(programs, library):
        for times, call in enumerate(calls, start=1):
            words = (0 if word == COMM else word for word in call.words)
            assert library.caller.call(call.function, times, *words) == 4, call.function
            before = expected.get(call.op, Count(0, 0))
            moved = times * call.count * DATA_TYPE_BYTES[call.data_type]
            expected[call.op] = Count(before.calls + times, before.payload_bytes + moved)
        assert counted(programs) == expected
        assert programs.stats()[Stat.ARGUMENTS_UNREADABLE] == 0
    # Of these every version since 2.18 has all.
    assert {"ncclAllReduce", "ncclReduce", "ncclBcast", "ncclSend", "ncclRecv"} <= there


def test_a_forged_communicator_is_read_as_the_library_itself_reads_it(library: Target, layouts: Layouts) -> None:
    assert library.layout is not None
    assert library.layout.async_result is not None
    assert library.layout.source == "build-id"
    comm, answer = forged(library, layouts), library.caller.memory(8)
    with loaded(library) as programs, attached(programs, library):
        all_reduce(library, 3, comm)
        entry = communicators(programs)[comm]
        assert counted(programs) == {Op.AllReduce: Count(3, 1200)}
    assert int(entry["confirmed"]) == 1
    assert {name: int(entry["identity"][name]) for name in IDENTITY} == IDENTITY
    library.caller.store(comm + library.layout.async_result, 0, 4)
    for field, accessor in ACCESSORS.items():
        assert library.caller.call(accessor, 1, comm, answer) == 0, accessor
        assert int.from_bytes(library.caller.text(answer, 4), "little") == IDENTITY[field]


def test_machine_code_alone_tells_what_the_table_says(library: Target) -> None:
    with library.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        derived = Layouts({}).layout_of(elf)
    assert derived is not None
    assert derived.source == "accessors"
    for field in ("nccl_version", "comm_hash", "rank", "nranks", "cuda_dev"):
        assert getattr(derived, field) == getattr(library.layout, field), field


def test_completion_is_offered_only_by_versions_that_tell_of_it(library: Target) -> None:
    with library.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        points = internal_points(elf, 3)
    assert {"plan_replay", "socket_send", "ib_send"} <= set(points.points)
    assert bool(points.at(Level.COMPLETION)) is tells_of_completion(library)


def test_a_message_has_its_size_and_device_whatever_type_the_size_has(library: Target, layouts: Layouts) -> None:
    with library.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        structures, points = layouts.structures(elf.build_id), internal_points(elf, 3)
        symbol = points.points["socket_send"].symbol
        start = elf.symbols([symbol])[symbol].file_offset
    caller = library.caller
    socket = caller.memory(structures["ncclNetSocketComm"].size_bytes)
    caller.store(socket + structures["ncclNetSocketComm"].offsets["dev"], 1, 4)
    size = 4096 | (GARBAGE if symbol.endswith("PvS_iiS_PS_") else 0)  # before 2.24 an int
    arguments = (socket, caller.memory(4096), size, 0, *(caller.memory(4096) for _ in range(3)))
    with ExitStack() as stack:
        programs = stack.enter_context(loaded(library))
        stack.enter_context(attached(programs, library))
        internals = Internals.load(programs)
        stack.callback(internals.close)
        internals.describe(3, layout_record(structures))
        stack.callback(internals.attach(str(library.path), points, Level.RAILS).close)
        caller.call_at(caller.address_of(library.path, start), 1, *arguments)
        (sent,) = internals.sent()
        assert internals.stats()[InternalStat.UNREADABLE] == 0
    assert (sent.network, sent.device, sent.messages, sent.bytes) == (NetworkKind.SOCKET, 1, 1, 4096)


def test_what_an_agent_cannot_see_of_a_version_is_absent(library: Target, layouts: Layouts) -> None:
    comm = forged(library, layouts)
    with AgentProcess("--pid", str(library.caller.pid), "--level", "all") as agent:
        all_reduce(library, 7, comm)
        ((labels, enqueued),) = agent.samples("railscope_comm_enqueued_total", rank=str(IDENTITY["rank"]))
        ((info, _),) = agent.samples("railscope_comm_info")
        probes = {
            found["program"]: value
            for found, value in agent.samples("railscope_probe_attached", library=str(library.path.resolve()))
        }
        # It has handed nothing to a network: where that could be seen there is nothing to see either.
        for name in ("comm_completed_total", "comm_inflight_seconds"):
            assert agent.samples(f"railscope_{name}") == []
    assert (int(labels["comm"], 16), enqueued) == (IDENTITY["comm_hash"], 7)
    assert (info["nccl_version"], info["nranks"], info["node_rank"]) == (version_of(library), "8", "1")
    assert probes["socket_send"] == 1
    assert bool(probes.get("proxy_stop")) is tells_of_completion(library)


def test_what_connects_ranks_and_makes_communicators_behind_a_call_is_followed(library: Target) -> None:
    kinds = {point.cookie & 0xFF for point in library.points.followed}
    assert kinds >= {LifecycleKind.CONNECT, LifecycleKind.INIT_WORK}
