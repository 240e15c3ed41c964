"""Tables and rings below the calls are shared out by user and process: who floods them takes nothing from another.

A user forges what NCCL hands to its proxy, with the library's functions doing nothing; beside it another user's process
makes a few operations, each of which must be seen to the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import TABLE, Layouts, comm_layout
from railscope.probes.nccl.programs.errors import error_points
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records import calls as records
from railscope.probes.nccl.records.errors import ErrorSource, ErrorStat
from railscope.probes.nccl.records.internals import InternalStat
from tests.root.caller import Caller
from tests.root.forged_proxy import FUNCTIONS, OWN, Forged, Probed, forged, probed
from tests.root.probe_targets import all_reduce, assemble, attached, loaded, on_x86_64, target
from tests.waiting import eventually

pytestmark = [pytest.mark.root, on_x86_64]

GREEDY, MODEST = 5000, 5001
VERSION = "2.32.3"
BUILD = next(id_ for id_, build in json.loads(TABLE.read_text())["builds"].items() if build["nccl_version"] == VERSION)
LAUNCH = "_Z16ncclLaunchKernelP8ncclCommP14ncclKernelPlan"
SEND = "_Z18ncclNetSocketIsendPvS_miS_S_PS_"
A_LAUNCH: Final = 1 << 16
"""More proxy operations than one launch may hand over (MOST_OPERATIONS in posting.h) are not looked at."""
CONNECTIONS, OPERATIONS, PARTS, SENT = 131072, 65536, 131072, 16384
LIFECYCLE_RECORDS, COMPLETION_RECORDS = (1 << 20) // 248, (1 << 21) // 88
"""What the tables and rings hold."""
COMPLETED: Final = 10_000
"""More operations than a process may have records of, and fewer than it may have under way."""
NETWORK_CONNECTION: Final = 2 | 2 << 32
"""Memory full of this word has a connection over the network at each address."""


ERROR_CALLS: Final = 4096
_REMOTE_ERROR: Final = 6
_RETURNS_WHEN_TOLD: Final = (
    # (communicator, flag, seconds): sleeps so long, and 2 ms, again and again until the flag is 0; ncclRemoteError.
    "push %rbp; push %rsi; sub $16, %rsp; mov %rdx, (%rsp); movq $2000000, 8(%rsp);"
    "1: mov 16(%rsp), %rax; cmpl $0, (%rax); je 2f;"
    "mov %rsp, %rdi; xor %esi, %esi; mov $35, %eax; syscall; jmp 1b;"
    f"2: add $16, %rsp; pop %rsi; pop %rbp; mov ${_REMOTE_ERROR}, %eax; ret"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = (*FUNCTIONS, LAUNCH, SEND, "ncclAllReduce", "ncclCommDestroy")
    nothing = "push %rbp; pop %rbp; xor %eax, %eax; ret"
    return assemble(tmp_path_factory.mktemp("library"), **dict.fromkeys(names, nothing))


@contextmanager
def users(library: Path) -> Iterator[tuple[Probed, Probed]]:
    """Two users' processes, each with a communicator that has a proxy: the one that floods, and the one beside it."""
    layouts = Layouts.load()
    structures = layouts.structures(BUILD)
    with ExitStack() as stack:
        first = stack.enter_context(target(library, layouts))
        to = replace(first, layout=comm_layout(structures["ncclComm"], "dwarf", VERSION))
        callers = [stack.enter_context(Caller(library, user=user)) for user in (GREEDY, MODEST)]
        made: Sequence[Forged] = [forged(replace(to, caller=caller), structures) for caller in callers]
        programs = stack.enter_context(loaded(*(each.target for each in made)))
        stack.enter_context(attached(programs, to))
        probes = stack.enter_context(probed(programs, made[0]))
        for each in made:
            all_reduce(each.target, 1, each.comm)
        yield probes, replace(probes, forged=made[1])


def third(places: int) -> int:
    """What one process may have."""
    return -(-places // 3)


def flood(probes: Probed, numbers: Sequence[int], connections: Sequence[int]) -> None:
    """Hand over a proxy operation of each number, all in one launch; algorithms and protocols are what may be."""
    made = probes.forged
    structure = made.structures["ncclProxyOp"]
    offsets, stride = structure.offsets, structure.size_bytes
    pool = np.zeros((len(numbers), stride), np.uint8)

    def put(field: str, values: object, dtype: str) -> None:
        column = np.asarray(values).astype(dtype)
        pool[:, offsets[field] : offsets[field] + column.itemsize] = column.view(np.uint8).reshape(len(numbers), -1)

    at = np.arange(len(numbers))
    put("connection", connections, "<u8")
    put("opCount", numbers, "<u8")
    put("next", np.where(at + 1 < len(numbers), at + 1, -1), "<i4")
    put("coll", int(Op.AllReduce) + np.zeros(len(numbers)), "u1")
    put("algorithm", at & 0xFF, "u1")
    put("protocol", at >> 8, "u1")
    with Path(f"/proc/{made.target.caller.pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(made.pool)
        memory.write(pool.tobytes())
    made.store(made.list_of(OWN), "ncclProxyOps", nextOps=0)
    made.target.caller.call_at(made.start, 1, made.comm)


def post(probes: Probed, operation: int) -> None:
    """One AllReduce; the hand-over itself is done by a function that does nothing, so the list is ended here."""
    made = probes.forged
    all_reduce(made.target, 1, made.comm)
    task = made.new("ncclTaskColl")
    made.store(task, "ncclTaskColl", 8, count=100)
    made.store(task, "ncclTaskColl", func=int(Op.AllReduce), datatype=7)
    for at, connection in enumerate(made.connections):
        made.store(made.operation(at), "ncclProxyOp", 8, connection=connection, opCount=operation, task__coll=task)
        made.store(made.operation(at), "ncclProxyOp", next=at + 1 if at + 1 < len(made.connections) else -1)
        made.store(made.operation(at), "ncclProxyOp", 1, coll=int(Op.AllReduce), protocol=2, algorithm=1)
    made.store(made.list_of(OWN), "ncclProxyOps", nextOps=0)
    made.target.caller.call_at(made.start, 1, made.comm)


def operates(probes: Probed, operations: int) -> None:
    """So many operations begin and complete."""
    for number in range(6, 6 + 2 * operations, 2):
        post(probes, number)
        for connection in probes.forged.connections:
            probes.forged.complete(connection, number)


def rows_of(probes: Probed, pid: int) -> dict[str, int]:
    """Entries of a process by table."""
    tables = {"connections": probes.internals._connections, "operations": probes.internals._operations}
    return {name: int((table.read()[0]["tgid"] == pid).sum()) for name, table in tables.items()}


def test_a_user_who_fills_the_tables_leaves_room_for_another_whose_operations_all_complete(library: Path) -> None:
    with users(library) as (greedy, modest):
        caller = greedy.forged.target.caller
        base = caller.memory(8 * A_LAUNCH + 4096, NETWORK_CONNECTION)
        connections = [base + 8 * at for at in range(A_LAUNCH)]
        flood(greedy, range(0, 2 * A_LAUNCH, 2), connections)
        held = rows_of(greedy, caller.pid)
        assert held == {"connections": third(CONNECTIONS), "operations": third(OPERATIONS)}
        flood(greedy, range(1, 2 * A_LAUNCH, 2), connections[:1] * A_LAUNCH)
        assert len(greedy.internals._parts.read()[0]) == third(PARTS)
        refused = greedy.programs.shares.refused()
        assert {user for _, user in refused} == {GREEDY}
        assert {table for table, _ in refused} == {"connections", "operations", "parts", "launches"}
        assert refused["parts", GREEDY] == A_LAUNCH - third(PARTS)
        assert greedy.internals.stats()[InternalStat.FULL] >= refused["parts", GREEDY]

        operates(modest, 50)
        progress = modest.internals.progress()
        instance = next(each for each, one in progress.items() if one.completed)
        assert (progress[instance].posted, progress[instance].completed) == (50, 50)
        assert rows_of(modest, modest.forged.target.caller.pid) == {"connections": 2, "operations": 0}
        keys, values = modest.internals.histories()
        assert values["operations"][keys["instance"] == instance].tolist() == [50]
        assert (Op.AllReduce, 1, 2, 0) in {
            (one.op, one.algorithm, one.protocol, one.channels) for one in modest.internals.launches()
        }
        assert modest.programs.shares.refused() == refused


def test_bytes_handed_to_more_devices_than_there_are_cost_their_user_alone(library: Path) -> None:
    with users(library) as (greedy, modest):
        offset = library_offset(library, SEND)
        for probes, devices in ((greedy, SENT // 2), (modest, 2)):
            caller = probes.forged.target.caller
            start, numbers = caller.address_of(library, offset), caller.memory(4 * devices)
            with Path(f"/proc/{caller.pid}/mem").open("r+b", buffering=0) as memory:
                memory.seek(numbers)
                memory.write(np.arange(devices, dtype="<u4").tobytes())
            for at in range(devices):
                caller.call_at(start, 1, numbers + 4 * at - socket_device(), 0, 4096, 0, 0, 0, 0)
        sent: dict[int, list[int]] = {}
        for one in modest.internals.sent():
            sent.setdefault(one.tgid, []).append(one.bytes)
        assert sent[modest.forged.target.caller.pid] == [4096] * 2
        assert len(sent[greedy.forged.target.caller.pid]) == third(SENT)
        refused = greedy.programs.shares.refused()
        assert refused == {("sent_bytes", GREEDY): SENT // 2 - third(SENT)}


def library_offset(library: Path, symbol: str) -> int:
    with library.open("rb") as file, Elf.open(file.fileno()) as elf:
        return elf.symbols([symbol])[symbol].file_offset


def socket_device() -> int:
    return Layouts.load().structures(BUILD)["ncclNetSocketComm"].offsets["dev"]


def test_a_user_who_floods_the_rings_loses_his_own_records_alone(library: Path) -> None:
    with users(library) as (greedy, modest):
        programs = greedy.programs
        programs.lifecycle_events.read()
        caller = greedy.forged.target.caller
        caller.call("ncclCommDestroy", LIFECYCLE_RECORDS, greedy.forged.comm)
        # One that has ended is no communicator: it begins anew with its next call.
        all_reduce(greedy.forged.target, 1, greedy.forged.comm)
        connection = greedy.forged.connections[0]
        operations = range(0, 2 * COMPLETED, 2)
        flood(greedy, operations, [connection] * COMPLETED)
        for number in operations:
            greedy.forged.complete(connection, number)
        refused = programs.shares.refused()
        assert refused["lifecycle_events", GREEDY] >= LIFECYCLE_RECORDS - third(LIFECYCLE_RECORDS)
        assert refused["completion_events", GREEDY] == COMPLETED - third(COMPLETION_RECORDS)

        victim = modest.forged.target.caller
        operates(modest, 50)
        victim.call("ncclCommDestroy", 1, modest.forged.comm)
        completions, lives = modest.events(), programs.lifecycle_events.read()
        assert (completions["tgid"] == victim.pid).sum() == 50
        assert (completions["tgid"] == caller.pid).sum() == third(COMPLETION_RECORDS)
        assert lives["kind"][lives["tgid"] == victim.pid].tolist() == [records.LifecycleKind.DESTROY]
        assert programs.shares.refused() == refused
        # What was read makes room: the share is what waits, not what ever came.
        caller.call("ncclCommDestroy", 100, greedy.forged.comm)
        assert len(programs.lifecycle_events.read()) == 100


def test_what_a_process_held_is_given_back_when_it_is_forgotten(library: Path) -> None:
    with users(library) as (greedy, modest):
        programs, internals = greedy.programs, greedy.internals
        caller = greedy.forged.target.caller
        base = caller.memory(8 * 1000 + 4096, NETWORK_CONNECTION)
        flood(greedy, range(0, 2000, 2), [base + 8 * at for at in range(1000)])
        flood(greedy, range(1, 2001, 2), [base] * 1000)
        operates(greedy, 5)
        operates(modest, 5)
        pids = {caller.pid, modest.forged.target.caller.pid}
        greedy.events(), programs.lifecycle_events.read()
        instances = set(programs.communicators.read()[1]["instance"].tolist())
        internals.forget_communicators(instances)
        internals.forget_processes(pids)
        internals.forget_sent(pids)
        for table in (programs.communicators, programs.aggregates):
            for key in table.read()[0]:
                table.delete(key.tobytes())
        programs.communicators.read()
        held = taken_and_freed(programs.shares)
        assert not [owner for owner in held if owner[1] and owner[0] != records.NOBODY], "ended processes are forgotten"
        launches = records.SHARED_TABLES.index("launches")
        assert [number for number, left in enumerate(held[records.NOBODY, 0]) if left and number != launches] == []
        assert all(left >= 0 for each in held.values() for left in each)


def test_calls_of_many_threads_leave_room_for_the_error_of_another_users_call(tmp_path: Path) -> None:
    library = assemble(tmp_path, ncclCommDestroy=_RETURNS_WHEN_TOLD)
    with ExitStack() as stack:
        callers = [stack.enter_context(Caller(library, user=user)) for user in (GREEDY, GREEDY, GREEDY, MODEST)]
        programs = stack.enter_context(loaded())
        internals = Internals.load(programs)
        stack.callback(internals.close)
        with library.open("rb") as file, Elf.open(file.fileno()) as elf:
            points = error_points(elf, library=0)
        stack.callback(internals.watch_errors(str(library), points, 0, None).close)
        for caller in callers:
            programs.observe(caller.pid)
        *greedy, modest = callers
        flag = modest.memory(8, 1)
        modest.start("ncclCommDestroy", 0x1000, flag, 0)
        for caller in greedy:
            held = caller.memory(8, 1)
            for _ in range(ERROR_CALLS // 2):
                caller.start("ncclCommDestroy", 0x1000, held, 3600)
        # One entered before all of them.
        entered = 3 * (ERROR_CALLS // 2) + 1
        eventually(lambda: internals.errors.stats().get(ErrorStat.CALLS) == entered)
        calls = internals.errors._calls
        tgids = calls.read()[1]["tgid"].tolist()
        assert tgids.count(greedy[0].pid) == third(ERROR_CALLS - 1)
        assert len(tgids) <= ERROR_CALLS // 2 + 1
        assert tgids.count(modest.pid) == 1
        modest.store(flag, 0, 8)
        modest.finish()
        errors = internals.error_events()
        assert errors[["tgid", "result", "source"]].tolist() == [(modest.pid, _REMOTE_ERROR, ErrorSource.DESTROY)]
        assert {user for _, user in programs.shares.refused()} == {GREEDY}
        # What ended within its call is taken out with its process, and its places are free again; also of one that
        # nobody knew.
        greedy[0].end()
        internals.forget_processes(())
        left = calls.read()[1]["tgid"].tolist()
        assert (left.count(greedy[0].pid), left.count(greedy[1].pid) > 0) == (0, True)
        internals.forget_processes({caller.pid for caller in greedy})
        assert len(calls.read()[0]) == 0
        programs.communicators.read()
        assert taken_and_freed(programs.shares)[GREEDY, 0][records.SHARED_TABLES.index("error_calls")] == 0


def taken_and_freed(shares: object) -> dict[tuple[int, int], list[int]]:
    """What is held, by uid and tgid, and by table."""
    taken, freed = shares._taken.read(), shares._freed.read()  # type: ignore[attr-defined]
    given = {(int(key["uid"]), int(key["tgid"])): value["freed"] for key, value in zip(*freed, strict=True)}
    found = {}
    for key, value in zip(*taken, strict=True):
        owner = int(key["uid"]), int(key["tgid"])
        left = value["taken"] - given.get(owner, np.zeros(1, np.uint64))
        found[owner] = left.view(np.int64).tolist()
    return found
