"""Calls under way in the kernel's table: there from entry to return, one a thread, the outermost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.records.calls import NOBODY, LifecycleKind
from tests.root.caller import Caller
from tests.root.probe_targets import Target, all_reduce, assemble, attached, communicators, loaded, on_x86_64, target
from tests.root.test_programs_shares import GREEDY, share_counts
from tests.waiting import eventually

pytestmark = [pytest.mark.root, on_x86_64]

SPIN = "1: pause; cmpq $0, (%rdi); je 1b"
"""Until the first argument points to something else than 0."""
RETURN = "pop %rbp; xor %eax, %eax; ret"
WORK = "_ZL20ncclCommInitRankFuncP12ncclAsyncJob"
NCCL = {
    "ncclAllReduce": f"push %rbp; {RETURN}",
    "ncclCommFinalize": f"push %rbp; {SPIN}; {RETURN}",
    "ncclCommRevoke": f"push %rbp; {RETURN}",
    # It makes another call of the same kind, which returns, and goes on.
    "ncclCommDestroy": f"push %rbp; call ncclCommRevoke@PLT; {SPIN}; {RETURN}",
    # Its thread ends inside it.
    "ncclCommAbort": "push %rbp; mov $60, %eax; xor %edi, %edi; syscall",
    "ncclCommInitAll": f"push %rbp; {SPIN}; {RETURN}",
    WORK: f"push %rbp; {SPIN}; {RETURN}",
    # Its result is its second argument.
    "ncclDevCommCreate": "push %rbp; pop %rbp; mov %rsi, %rax; ret",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, layouts: Layouts) -> Iterator[Target]:
    with target(assemble(tmp_path_factory.mktemp("waiting"), **NCCL), layouts) as found:
        yield found


def under_way(programs: NcclPrograms) -> list[dict[str, int]]:
    """What is known of each call, without the unique id."""
    _, calls = programs.host_calls.read()
    names = [name for name in calls.dtype.names or () if name != "unique_id"]
    return [{name: int(call[name]) for name in names} for call in calls]


def enter(programs: NcclPrograms, caller: Caller, name: str) -> tuple[int, dict[str, int]]:
    """A thread goes into a call and stays; returns the address that lets it go on, and what is known of the call."""
    address = caller.memory(4096)
    caller.start(name, address)
    eventually(lambda: len(under_way(programs)) == 1)
    return address, under_way(programs)[0]


def leave(programs: NcclPrograms, caller: Caller, address: int) -> None:
    caller.store(address, 1, 8)
    caller.finish()
    assert under_way(programs) == []


@pytest.mark.parametrize("attach", AttachKind)
def test_a_call_is_there_from_its_entry_to_its_return(library: Target, attach: AttachKind) -> None:
    caller = library.caller
    with loaded(library, attach=attach) as programs, attached(programs, library):
        address, call = enter(programs, caller, "ncclCommFinalize")
        ((tid,), _) = programs.host_calls.read()
        leave(programs, caller, address)
    assert (call["kind"], call["comm"], call["tgid"]) == (LifecycleKind.FINALIZE, address, caller.pid)
    assert (call["instance"], call["rank"], call["nranks"], call["has_unique_id"]) == (0, -1, -1, 0)
    assert tid != caller.pid, "it is a thread of its own"
    assert call["start_ns"] > 0


def test_a_communicator_whose_kernels_communicate_by_themselves_is_told_of_once_that_is_made(library: Target) -> None:
    caller = library.caller
    with loaded(library) as programs, attached(programs, library):
        comm, other = caller.memory(4096), caller.memory(4096)
        caller.call("ncclDevCommCreate", 1, other, 5)  # ncclInvalidUsage
        caller.call("ncclDevCommCreate", 1, comm, 0)
        assert under_way(programs) == []
        events = programs.lifecycle_events.read()
        told = [one for one in events if one["kind"] == LifecycleKind.DEVICE_COMM]
        assert [(int(one["comm"]), int(one["tgid"])) for one in told] == [(comm, caller.pid)]
        # It has made no call of an operation, and is known all the same.
        assert int(told[0]["instance"]) in [one["instance"] for one in communicators(programs).values()]


def test_what_a_call_calls_in_turn_is_part_of_it(library: Target) -> None:
    with loaded(library) as programs, attached(programs, library):
        address, _ = enter(programs, library.caller, "ncclCommDestroy")
        # The inner one has returned, or does so in this moment.
        eventually(lambda: under_way(programs)[0]["kind"] == LifecycleKind.DESTROY)
        library.caller.call("ncclCommRevoke", 3, 0)
        assert [call["kind"] for call in under_way(programs)] == [LifecycleKind.DESTROY]
        leave(programs, library.caller, address)


def test_an_init_that_fails_leaves_nothing_behind(library: Target) -> None:
    with loaded(library) as programs, attached(programs, library):
        address, call = enter(programs, library.caller, "ncclCommInitAll")
        leave(programs, library.caller, address)
    assert (call["kind"], call["new_comm"], call["comm"]) == (LifecycleKind.INIT_ALL, address, 0)


def test_the_thread_of_a_group_or_of_a_call_that_does_not_block_is_told_with_its_communicator(library: Target) -> None:
    caller = library.caller
    with loaded(library) as programs, attached(programs, library):
        comm = caller.memory(4096)
        all_reduce(library, 1, comm)
        job = caller.memory(4096)
        caller.store(job + 104, comm, 8)
        caller.start(WORK, job)
        eventually(lambda: len(under_way(programs)) == 1)
        (call,) = under_way(programs)
        caller.store(job, 1, 8)
        caller.finish()
        assert (call["kind"], call["instance"]) == (
            LifecycleKind.INIT_WORK,
            int(communicators(programs)[comm]["instance"]),
        )


def test_who_has_left_every_call_holds_nothing(library: Target) -> None:
    with Caller(library.path, user=GREEDY) as caller, loaded(library) as programs, attached(programs, library):
        programs.observe(caller.pid)
        address, call = enter(programs, caller, "ncclCommFinalize")
        held = share_counts(programs.shares._taken, "taken")
        leave(programs, caller, address)
        left = share_counts(programs.shares._taken, "taken")
    assert call["uid"] == GREEDY
    assert [held[key][2] for key in ((NOBODY, 0), (GREEDY, 0), (GREEDY, caller.pid))] == [1, 1, 1]
    assert {key: counts[2] for key, counts in left.items()} == {(NOBODY, 0): 0, (GREEDY, 0): 0}


def test_what_a_thread_left_that_ended_inside_its_call_is_taken_out_by_the_reader(library: Target) -> None:
    with Caller(library.path, user=GREEDY) as caller, loaded(library) as programs, attached(programs, library):
        programs.observe(caller.pid)
        caller.start("ncclCommAbort", 0)
        eventually(lambda: len(under_way(programs)) == 1)
        tids, calls = programs.host_calls.read()
        programs.host_calls.drop([(int(tids[0]), int(calls["start_ns"][0]) + 1)])
        assert len(under_way(programs)) == 1, "it is another call"
        programs.host_calls.drop([(int(tids[0]), int(calls["start_ns"][0]))])
        assert under_way(programs) == []
        programs.shares.flush()
        taken, freed = (
            share_counts(one, name)
            for one, name in ((programs.shares._taken, "taken"), (programs.shares._freed, "freed"))
        )
    assert taken[GREEDY, 0] == freed[GREEDY, 0]
    assert (GREEDY, caller.pid) not in taken
