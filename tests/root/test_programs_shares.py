"""Tables are shared out by user and process: whoever fills one leaves room for the next, who loses nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.node.inspection.tenants import Tenant, tenant_of
from railscope.probes.loading import bcc_loader
from railscope.probes.loading.links import AttachKind
from railscope.probes.loading.maps import Map
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime, Loader, NcclPrograms
from railscope.probes.nccl.records.calls import (
    AGGREGATE_SLOTS,
    CALL_SLOT,
    DEEPLY_NESTED,
    NOBODY,
    SHAPES,
    SHARE,
    SHARE_KEY,
    SHARED_TABLES,
    UNREADABLE,
    UNREADABLE_PROCESSES,
    Stat,
)
from railscope.probes.processes.namespaces import FIRST_NAMESPACE
from tests.root.caller import Caller
from tests.root.probe_targets import FLOAT32, Target, assemble, attached, counted, loaded, on_x86_64, target
from tests.waiting import eventually

pytestmark = [pytest.mark.root, on_x86_64]

GREEDY, MODEST = 5000, 5001
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
ENTRIES = 96
"""Of communicators: one process may have a third, one user half."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, layouts: Layouts) -> Iterator[Target]:
    nothing = "push %rbp; pop %rbp; xor %eax, %eax; ret"
    path = assemble(tmp_path_factory.mktemp("plain"), ncclAllReduce=nothing, ncclSend=nothing)
    with target(path, layouts) as found:
        yield found


def make(caller: Caller, communicators: int) -> None:
    """A call on each of so many communicators."""
    caller.sweep("ncclAllReduce", 5, communicators, 0, 0, 100, FLOAT32, 0, 0, 7)


CALLS = 4096
_RETURNS_WHEN_TOLD = (
    # (flag, …): sleeps 200 ms, again and again until the flag is 0.
    "push %rdi; sub $16, %rsp; movq $0, (%rsp); movq $200000000, 8(%rsp);"
    "1: mov 16(%rsp), %rax; cmpl $0, (%rax); je 2f;"
    "mov %rsp, %rdi; xor %esi, %esi; mov $35, %eax; syscall; jmp 1b;"
    "2: add $24, %rsp; xor %eax, %eax; ret"
)


def user_of(pid: int) -> int:
    """The uid of a process, as the host numbers it."""
    return Path(f"/proc/{pid}").stat().st_uid


def held(programs: NcclPrograms) -> dict[int, int]:
    """Communicators by process."""
    keys, _ = programs.communicators.read()
    tgids = keys["tgid"].tolist()
    return {tgid: tgids.count(tgid) for tgid in set(tgids)}


def test_a_user_who_fills_the_table_leaves_room_for_another(plain: Target) -> None:
    with (
        Caller(plain.path, user=GREEDY) as one,
        Caller(plain.path, user=GREEDY) as more,
        Caller(plain.path, user=MODEST) as other,
        loaded(communicator_entries=ENTRIES) as programs,
        attached(programs, plain),
    ):
        for caller in (one, more, other):
            programs.observe(caller.pid)
        # A call without a communicator, the first of each sweep, takes no place.
        make(one, 1000)
        assert held(programs)[one.pid] == ENTRIES // 3
        make(more, 1000)
        greedy = ENTRIES // 3 + held(programs)[more.pid]
        assert ENTRIES // 3 < greedy <= ENTRIES // 2
        make(other, 11)
        assert held(programs)[other.pid] == 10
        assert {op: count.calls for op, count in counted(programs).items()} == {Op.AllReduce: 2011}
        refused = programs.shares.refused()
        assert refused == {("communicators", GREEDY): 1998 - greedy}
        assert programs.stats()[Stat.COMMUNICATORS_FULL] == 1998 - greedy


def test_whoever_has_subordinate_numbers_is_one_user_whatever_he_nests(plain: Target) -> None:
    with ExitStack() as stack:
        callers = [stack.enter_context(Caller(plain.path, user=GREEDY)) for _ in range(8)]
        programs = stack.enter_context(loaded(communicator_entries=ENTRIES))
        stack.enter_context(attached(programs, plain))
        for at, caller in enumerate(callers):
            programs.observe(caller.pid)
            assert caller.unshare(CLONE_NEWUSER) == 0
            for map_ in ("uid_map", "gid_map"):  # as newuidmap(1) does, which users may run
                Path(f"/proc/{caller.pid}/{map_}").write_text(f"0 {100_000 + 1000 * at} 1000")
            caller.become(0)
            assert caller.unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0
            assert user_of(caller.pid) not in (0, GREEDY)
            assert tenant_of(Path("/proc"), caller.pid) == Tenant(GREEDY)
            make(caller, 1000)
        assert sum(held(programs).values()) <= ENTRIES // 2
        assert set(programs.shares.refused()) == {("communicators", GREEDY)}


def test_whoever_nests_user_namespaces_deeply_shares_what_is_one_users(plain: Target) -> None:
    with (
        Caller(plain.path, user=GREEDY) as caller,
        loaded(communicator_entries=ENTRIES) as programs,
        attached(programs, plain),
    ):
        programs.observe(caller.pid)
        for _ in range(10):
            caller.nest()
        make(caller, 1000)
        assert set(programs.shares.refused()) == {("communicators", DEEPLY_NESTED)}


def test_containers_have_a_share_each_though_all_in_them_are_called_root(plain: Target) -> None:
    containers: list[int] = []
    with ExitStack() as stack:
        callers = [stack.enter_context(Caller(plain.path)) for _ in range(2)]
        programs = stack.enter_context(loaded(namespaces=frozenset({Path("/proc/self/ns/net").stat().st_ino})))
        stack.enter_context(attached(programs, plain))
        for caller in callers:
            assert caller.unshare(CLONE_NEWPID) == 0
            assert caller.sweep_from_fork("ncclAllReduce", 5, 100, 0, 0, 100, FLOAT32, 0, 0, 7) == 0
            keys, _ = programs.shares._taken.read()
            new = [uid for uid, tgid in keys.tolist() if not tgid and uid not in (NOBODY, 0, *containers)]
            assert len(new) == 1
            containers += new
    assert min(containers) > FIRST_NAMESPACE


def test_what_is_taken_out_of_the_table_is_the_users_again(plain: Target) -> None:
    with (
        Caller(plain.path, user=GREEDY) as caller,
        loaded(communicator_entries=ENTRIES) as programs,
        attached(programs, plain),
    ):
        programs.observe(caller.pid)
        for _ in range(3):
            make(caller, 100)
            keys, _ = programs.communicators.read()
            assert len(keys) == ENTRIES // 3
            for key in keys:
                programs.communicators.delete(key.tobytes())
            assert held(programs) == {}
        # What a process without an entry had is forgotten, and its user's share is nothing again.
        taken, freed = (share_counts(map_, field) for map_, field in share_maps(programs))
        assert set(taken) == {(NOBODY, 0), (GREEDY, 0)} | {key for key in taken if key[1] == caller.pid}
        assert (taken[GREEDY, 0][0], taken[NOBODY, 0][0]) == (freed[GREEDY, 0][0], freed[NOBODY, 0][0])


def test_combinations_beyond_a_share_are_counted_in_the_totals_alone(plain: Target) -> None:
    with (
        Caller(plain.path, user=GREEDY) as one,
        Caller(plain.path, user=MODEST) as other,
        loaded(aggregate_entries=300) as programs,
        attached(programs, plain),
    ):
        for caller in (one, other):
            programs.observe(caller.pid)
        # Without a communicator no combination has a slot.
        one.sweep("ncclSend", 3, AGGREGATE_SLOTS, 0, 7, FLOAT32, 0, 0, 0)
        assert counted(programs, one.pid)[Op.Send].calls == 100
        other.sweep("ncclSend", 3, 20, 0, 7, FLOAT32, 0, 0, 0)
        assert counted(programs, other.pid)[Op.Send].calls == 20
        assert int(programs.overflow_totals()[Op.Send, FLOAT32]["calls"]) == AGGREGATE_SLOTS - 100
        assert programs.shares.refused() == {("aggregates", GREEDY): AGGREGATE_SLOTS - 100}


def test_a_user_with_many_communicators_leaves_places_for_what_others_collectives_were(plain: Target) -> None:
    with (
        Caller(plain.path, user=GREEDY) as greedy,
        Caller(plain.path, user=MODEST) as modest,
        loaded() as programs,
        attached(programs, plain),
    ):
        for caller in (greedy, modest):
            programs.observe(caller.pid)
        for caller, communicators in ((greedy, 3001), (modest, 201)):
            make(caller, communicators)
        compared = dict.fromkeys((greedy.pid, modest.pid), 0)
        keys, values = programs.communicators.read()
        instances = values["instance"].tolist()
        assert len(set(instances)) == 3200
        for tgid, instance, calls in zip(keys["tgid"].tolist(), instances, values["sequence"].tolist(), strict=True):
            found = programs.shapes.recent(instance, calls)
            compared[tgid] += found is not None and found[0] == 1
        assert compared == {greedy.pid: -(-SHAPES // 3), modest.pid: 200}
        refused = programs.shares.refused()
        assert {user for _, user in refused} == {GREEDY}
        assert refused["call_shapes", GREEDY] == 3000 - -(-SHAPES // 3)
        # Whoever ends leaves the place, whether a program or the reader takes it back.
        for key in keys[keys["tgid"] == greedy.pid]:
            programs.communicators.delete(key.tobytes())
        programs.communicators.read()
        make(greedy, 101)
        keys, values = programs.communicators.read()
        ours = values["instance"][keys["tgid"] == greedy.pid]
        assert len(ours) == 100
        assert all(programs.shapes.recent(instance, 1) for instance in ours.tolist())


@pytest.mark.skipif(bcc_loader.installed_version() is None, reason="bcc is not installed: apt install python3-bpfcc")
def test_with_the_second_loader_a_user_takes_half_of_these_places_at_most(plain: Target) -> None:
    with (
        Caller(plain.path, user=GREEDY) as greedy,
        Caller(plain.path, user=MODEST) as modest,
        loaded(loader=Loader.BCC) as programs,
        attached(programs, plain),
    ):
        compared = {}
        for caller, communicators in ((greedy, 5001), (modest, 201)):
            programs.observe(caller.pid)
            make(caller, communicators)
            keys, values = programs.communicators.read()
            ours = values["instance"][keys["tgid"] == caller.pid]
            assert len(ours) == communicators - 1
            compared[caller] = sum(programs.shapes.recent(instance, 1) is not None for instance in ours.tolist())
        assert SHAPES // 2 * 0.9 < compared[greedy] <= SHAPES // 2
        assert compared[modest] > 50, "a half of his own, of which another's takes a part"


def test_a_user_who_floods_a_ring_of_calls_loses_his_own_records_alone(plain: Target) -> None:
    slots = 1024
    with (
        Caller(plain.path, user=GREEDY) as greedy,
        Caller(plain.path, user=MODEST) as modest,
        loaded(ring_bytes=slots * CALL_SLOT.itemsize) as programs,
        attached(programs, plain),
    ):
        for caller in (greedy, modest):
            programs.observe(caller.pid)
            os.sched_setaffinity(caller.pid, {min(os.sched_getaffinity(0))})
        for _ in range(2):
            before = programs.shares.refused().get(("call_events", GREEDY), 0)
            for caller, calls in ((greedy, 2000), (modest, 50)):
                caller.call("ncclAllReduce", calls, 0, 0, 100, FLOAT32, 0, 0x1000, 7)
            events = programs.call_events.read()
            assert (events["tgid"] == modest.pid).sum() == 50
            kept = int((events["tgid"] == greedy.pid).sum())
            assert kept == slots * 3 // 4 + -(-slots // 4 // 3)
            assert programs.shares.refused() == {("call_events", GREEDY): before + 2000 - kept}
        assert programs.stats()[Stat.RING_FULL] == before + 2000 - kept


def share_maps(programs: NcclPrograms) -> list[tuple[Map, str]]:
    return [(programs.shares._taken, "taken"), (programs.shares._freed, "freed")]


def share_counts(shares: Map, field: str) -> dict[tuple[int, int], list[int]]:
    keys, values = shares.read()
    return {(int(key["uid"]), int(key["tgid"])): value[field].tolist() for key, value in zip(keys, values, strict=True)}


def test_threads_inside_sampled_calls_leave_places_for_anothers_samples(
    tmp_path_factory: pytest.TempPathFactory, layouts: Layouts
) -> None:
    path = assemble(tmp_path_factory.mktemp("slow"), ncclAllReduce=_RETURNS_WHEN_TOLD)
    with (
        target(path, layouts) as slow,
        Caller(path, user=GREEDY) as greedy,
        Caller(path, user=MODEST) as modest,
        loaded(attach=AttachKind.MULTI, enqueue_time=EnqueueTime.PAIR, sample_every=1) as programs,
        attached(programs, slow),
    ):
        for caller in (greedy, modest):
            programs.observe(caller.pid)

        def arguments(caller: Caller, goes_on: int) -> tuple[int, ...]:
            return caller.memory(8, goes_on), 0, 100, FLOAT32, 0, caller.memory(4096, 1), 7

        forever = arguments(greedy, 1)
        for _ in range(CALLS // 3 + 100):
            greedy.start("ncclAllReduce", *forever)
        eventually(lambda: programs.shares.refused().get(("calls_under_way", GREEDY)) == 100 - 1)
        modest.call("ncclAllReduce", 5, *arguments(modest, 0))
        assert int(programs.enqueue_times()[Op.AllReduce]["calls"]) == 5
        assert len(programs._calls_under_way.read()[0]) == CALLS // 3 + 1
        greedy.end()
        programs.processes_gone({greedy.pid})
        assert len(programs._calls_under_way.read()[0]) == 0
        programs.shares.flush()
        taken, freed = (share_counts(map_, field) for map_, field in share_maps(programs))
        number = SHARED_TABLES.index("calls_under_way")
        assert taken[GREEDY, 0][number] == freed[GREEDY, 0][number] == CALLS // 3 + 1


def test_a_call_that_was_under_way_as_probes_came_off_is_no_time_of_the_next_one(
    tmp_path_factory: pytest.TempPathFactory, layouts: Layouts
) -> None:
    path = assemble(tmp_path_factory.mktemp("slow"), ncclAllReduce=_RETURNS_WHEN_TOLD)
    with (
        target(path, layouts) as slow,
        Caller(path, user=GREEDY) as caller,
        loaded(attach=AttachKind.MULTI, enqueue_time=EnqueueTime.PAIR, sample_every=1) as programs,
    ):
        programs.observe(caller.pid)
        with attached(programs, slow):
            caller.start("ncclAllReduce", caller.memory(8, 1), 0, 100, FLOAT32, 0, caller.memory(4096, 1), 7)
            eventually(lambda: len(programs._calls_under_way.read()[0]) == 1)
        with attached(programs, slow):
            assert len(programs._calls_under_way.read()[0]) == 0
        caller.end()


def test_calls_that_cannot_be_read_are_told_of_a_user_whatever_another_has_of_them(
    tmp_path: Path, layouts: Layouts
) -> None:
    """The greedy user's hundreds of processes are entries that the test writes, with the share that they would hold."""
    library = assemble(
        tmp_path,
        ncclReduce="endbr64; push %rbp; pop %rbp; xor %eax, %eax; ret",
        from_stack="push %rbx; mov %rsp, %rbx; mov %rdi, %rsp; call ncclReduce@PLT; mov %rbx, %rsp; pop %rbx; ret",
    )
    gone = range(1 << 22, (1 << 22) + UNREADABLE_PROCESSES // 2)  # beyond the largest number of a process
    held = np.zeros(1, SHARE)
    held["taken"][0, SHARED_TABLES.index("unreadable_calls")] = len(gone)
    with (
        target(library, layouts) as found,
        Caller(library, user=GREEDY) as greedy,
        Caller(library, user=MODEST) as modest,
        loaded(found) as programs,
        attached(programs, found),
    ):
        for pid in gone:
            entry = np.array((1, GREEDY, pid), UNREADABLE)
            programs._unreadable.update(pid.to_bytes(4, "little"), entry.tobytes())
        for owner in ((GREEDY, 0), (NOBODY, 0)):
            programs.shares._taken.update(np.array(owner, SHARE_KEY).tobytes(), held.tobytes())
        for caller in (greedy, modest):
            programs.observe(caller.pid)
            assert caller.call("from_stack", 2, caller.pages(8192) + 4096) == 0
        assert len(programs.unreadable_calls()) == len(gone) + 1
        assert programs.unreadable_calls()[modest.pid] == 2
        assert programs.shares.refused() == {("unreadable_calls", GREEDY): 2}
        # Whatever has ended makes room, whoever has known it.
        programs.processes_gone(())
        assert programs.unreadable_calls() == {modest.pid: 2}
        programs.communicators.read()
        assert greedy.call("from_stack", 1, greedy.pages(8192) + 4096) == 0
        assert programs.unreadable_calls() == {modest.pid: 2, greedy.pid: 1}
        modest.end()
        programs.processes_gone({modest.pid})
        assert programs.unreadable_calls() == {greedy.pid: 1}
