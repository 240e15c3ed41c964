"""Calls that do not return, as a host finds and describes them.  The kernel's table and the time are simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import Stall
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls.told_calls import MOST_OF_A_PROCESS, MOST_OF_A_USER
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.comm_hash import comm_hash, two_lane_hash
from railscope.probes.nccl.records.calls import LifecycleKind
from tests.unit.stall_world import AFTER_S, COMM_HASH, LOOKS_A_SECOND, RUNNING, STOPPED, World

PID = 4711
"""Of the world's first rank, whose communicator has instance 7."""
COMM = f"{COMM_HASH:016x}"
ID = np.arange(128, dtype="u1")
IN_TIME = int((AFTER_S - 2) * LOOKS_A_SECOND)
TOO_LONG = int((AFTER_S + 2) * LOOKS_A_SECOND)


def a_world(tmp_path: Path, *tids: int, **settings: Any) -> World:
    """Where these threads of the first process live."""
    world = World(procfs=tmp_path, seen=False, **settings)
    for tid in tids:
        live(tmp_path, PID, tid)
    return world


def live(procfs: Path, pid: int, tid: int) -> None:
    (procfs / str(pid) / "task" / str(tid)).mkdir(parents=True)


def calls(world: World, tid: int, kind: LifecycleKind, *, pid: int = PID, **fields: Any) -> None:
    world.host_calls.call(tid, world.clock.now_ns, kind, tgid=pid, **fields)


def the_stall(world: World) -> Stall:
    stall = world.stall
    assert stall is not None
    assert stall.diagnosis.cause is Cause.INSIDE_CALL
    assert not stall.diagnosis.culprit
    assert stall.strength == "strong"
    return stall


def test_an_init_is_a_stall_of_the_communicator_that_it_would_make(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20)
    began_ns = world.clock.now_ns
    calls(world, 20, LifecycleKind.INIT, nranks=64, rank=3, has_unique_id=1, unique_id=ID)
    world.step(IN_TIME)
    assert world.stall is None
    world.step(TOO_LONG - IN_TIME)
    stall = the_stall(world)
    assert (stall.comm, stall.rank, stall.nranks) == (f"{comm_hash(ID.tobytes(), '2.27.3'):016x}", "3", "64")
    assert (stall.op, stall.pid, stall.since_ns) == ("ncclCommInitRank", PID, began_ns)
    assert "thread 20" in stall.diagnosis.evidence[0]
    assert [one for _, one in world.begun] == [stall]
    (length,) = world.watch.facts().lengths
    assert length.seconds == pytest.approx((world.clock.now_ns - began_ns) / 1e9)


def test_where_nccls_name_is_not_known_the_unique_id_names_the_communicator_on_all_hosts(tmp_path: Path) -> None:
    world = a_world(tmp_path)
    for pid, rank in ((5001, 0), (5002, 1)):
        live(tmp_path, pid, pid)
        calls(world, pid, LifecycleKind.INIT, pid=pid, nranks=3, rank=rank, has_unique_id=1, unique_id=ID)
    world.step(TOO_LONG)
    first, second = world.watch.current
    assert first.comm == second.comm == f"id-{two_lane_hash(ID.tobytes()):016x}"
    assert (first.rank, second.rank, second.nranks) == ("0", "1", "3")


def test_whoever_says_anothers_unique_id_later_takes_neither_its_name_nor_its_stall(tmp_path: Path) -> None:
    # The second sorts first by user; the name of the first is known from /metrics, and ids that give it can be made.
    world = a_world(tmp_path)
    name = f"id-{two_lane_hash(ID.tobytes()):016x}"
    for pid, uid in ((5001, 1001), (5002, 1000)):
        live(tmp_path, pid, pid)
        calls(world, pid, LifecycleKind.INIT, pid=pid, uid=uid, nranks=2, rank=0, has_unique_id=1, unique_id=ID)
        world.step(LOOKS_A_SECOND)
    world.step(TOO_LONG)
    assert [(one.comm, one.pid) for one in world.watch.current] == [(name, 5001), (f"{name}~5002", 5002)]
    world.step(TOO_LONG)
    assert [(one.comm, one.pid) for one in world.watch.current] == [(name, 5001), (f"{name}~5002", 5002)]


def test_another_user_takes_no_rank_of_the_first_users_communicator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = a_world(tmp_path, ranks=2)
    processes = world.watch._inside._known.process  # type: ignore[union-attr]
    pids = [rank.pid for rank in world.ranks]

    def process(pid: int) -> ObservedProcess | None:
        found = processes(pid)
        return None if found is None else replace(found, tenant=Tenant(1000 + pids.index(pid)))

    monkeypatch.setattr(world.watch._inside._known, "process", process)  # type: ignore[union-attr]
    for rank, pid in enumerate(pids):
        live(tmp_path, pid, pid)
        calls(world, pid, LifecycleKind.INIT, pid=pid, nranks=2, rank=rank, has_unique_id=1, unique_id=ID)
        world.step(LOOKS_A_SECOND)
    world.step(TOO_LONG)
    name = f"{comm_hash(ID.tobytes(), '2.27.3'):016x}"
    assert [one.comm for one in world.watch.current] == [name, f"{name}~{pids[1]}"]


def test_a_call_that_returns_ends_its_stall(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20)
    calls(world, 20, LifecycleKind.SPLIT, instance=7)
    world.step(TOO_LONG)
    assert the_stall(world).op == "ncclCommSplit"
    world.host_calls.rows.clear()
    world.step(LOOKS_A_SECOND)
    assert world.watch.current == ()
    (ended,) = world.watch.facts().ended
    assert (ended.op, ended.comm) == ("ncclCommSplit", COMM)
    assert ended.ended_ns is not None
    world.step(700 * LOOKS_A_SECOND)
    assert world.watch.facts().lengths == ()


@pytest.mark.parametrize(
    ("kind", "op"),
    [
        (LifecycleKind.SPLIT, "ncclCommSplit"),
        (LifecycleKind.SHRINK, "ncclCommShrink"),
        (LifecycleKind.GROW, "ncclCommGrow"),
        (LifecycleKind.FINALIZE, "ncclCommFinalize"),
        (LifecycleKind.DESTROY, "ncclCommDestroy"),
        (LifecycleKind.ABORT, "ncclCommAbort"),
        (LifecycleKind.REVOKE, "ncclCommRevoke"),
        (LifecycleKind.SUSPEND, "ncclCommSuspend"),
        (LifecycleKind.RESUME, "ncclCommResume"),
        (LifecycleKind.CONNECT, "connecting ranks"),
        (LifecycleKind.INIT_WORK, "ncclCommInitRank"),
        (LifecycleKind.WINDOW, "ncclCommWindowRegister"),
        (LifecycleKind.DEVICE_COMM, "ncclDevCommCreate"),
    ],
)
def test_calls_on_a_communicator_are_stalls_of_it(tmp_path: Path, kind: LifecycleKind, op: str) -> None:
    world = a_world(tmp_path, 20)
    calls(world, 20, kind, instance=7)
    world.step(TOO_LONG)
    stall = the_stall(world)
    assert (stall.op, stall.comm, stall.rank, stall.nranks) == (op, COMM, "0", "2")


def test_of_what_is_unknown_the_process_is_told(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20)
    calls(world, 20, LifecycleKind.INIT_ALL, nranks=8)
    world.step(TOO_LONG)
    stall = the_stall(world)
    assert (stall.op, stall.comm, stall.rank, stall.pid) == ("ncclCommInitAll", "unknown", "unknown", PID)


def test_work_that_began_before_its_communicator_was_told_of_is_that_of_the_nearest(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20)
    calls(world, 20, LifecycleKind.INIT_WORK)
    world.step(TOO_LONG)
    stall = the_stall(world)
    assert (stall.op, stall.comm, stall.rank) == ("ncclCommInitRank", COMM, "0")


def test_what_threads_of_nccl_do_for_a_call_that_is_there_is_part_of_it(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20, 21, 22)
    calls(world, 20, LifecycleKind.INIT_ALL, nranks=2)
    world.clock.now_ns += 1000
    for tid in (21, 22):
        calls(world, tid, LifecycleKind.INIT_WORK, instance=7)
    world.step(TOO_LONG)
    assert the_stall(world).op == "ncclCommInitAll"


def test_two_threads_of_one_rank_inside_one_call_are_one_stall(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20, 21)
    for tid in (20, 21):
        calls(world, tid, LifecycleKind.CONNECT, instance=7)
    world.step(TOO_LONG)
    assert the_stall(world).op == "connecting ranks"


def test_a_thread_that_ended_inside_its_call_is_dropped_and_never_told_of(tmp_path: Path) -> None:
    world = a_world(tmp_path)
    calls(world, 20, LifecycleKind.SPLIT, instance=7)
    world.step(TOO_LONG)
    assert world.watch.current == ()
    assert world.begun == []
    assert world.host_calls.rows == {}


def test_a_process_that_ends_takes_its_calls_with_it_at_once(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20)
    calls(world, 20, LifecycleKind.SPLIT, instance=7)
    world.step(TOO_LONG)
    assert the_stall(world)
    world.ranks[0].gone = True
    world.watch.processes_gone({PID: 9})
    assert world.host_calls.rows == {}
    world.step(1)
    assert [one for one in world.watch.current if one.diagnosis.cause is Cause.INSIDE_CALL] == []


@pytest.mark.parametrize(("condition", "cause"), [("stopped", Cause.PROCESS_STOPPED), ("frozen", Cause.PROCESS_FROZEN)])
def test_a_process_that_is_held_inside_its_call_is_to_blame_until_it_goes_on(
    tmp_path: Path, condition: Any, cause: Cause
) -> None:
    world = a_world(tmp_path, 20)
    calls(world, 20, LifecycleKind.INIT, nranks=64, rank=3, has_unique_id=1, unique_id=ID)
    world.step(TOO_LONG)
    assert the_stall(world)
    world.ranks[0].process = replace(STOPPED, condition=condition)
    world.step(2 * LOOKS_A_SECOND)
    held = world.stall
    assert held is not None
    assert (held.diagnosis.cause, held.diagnosis.blamed_rank, held.op) == (cause, 3, "ncclCommInitRank")
    assert held.diagnosis.evidence[-1] == "thread 20 has not returned from ncclCommInitRank"
    world.ranks[0].process = RUNNING
    world.step(2 * LOOKS_A_SECOND)
    assert the_stall(world).since_ns == held.since_ns
    assert len(world.begun) == 1


def test_a_number_that_another_thread_has_by_now_is_another_call(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20)
    calls(world, 20, LifecycleKind.SPLIT, instance=7)
    world.step(TOO_LONG)
    calls(world, 20, LifecycleKind.FINALIZE, instance=7)
    world.step(LOOKS_A_SECOND)
    assert world.watch.current == ()
    world.step(TOO_LONG)
    assert the_stall(world).op == "ncclCommFinalize"


def test_whoever_has_thousands_of_threads_inside_calls_is_told_of_by_the_oldest(tmp_path: Path) -> None:
    world = a_world(tmp_path)
    for pid in range(100, 120):
        for tid in range(200):
            number = pid * 1000 + tid
            live(tmp_path, pid, number)
            own = np.roll(ID, tid)
            calls(
                world, number, LifecycleKind.INIT, pid=pid, uid=1000, nranks=2, rank=0, has_unique_id=1, unique_id=own
            )
            world.clock.now_ns += 1
    live(tmp_path, PID, 20)
    calls(world, 20, LifecycleKind.SPLIT, instance=7, uid=1001)
    world.step(TOO_LONG)
    found = world.watch.current
    assert [one for one in found if one.pid == PID]
    others = [one.pid for one in found if one.pid != PID]
    assert len(others) <= MOST_OF_A_USER
    assert max(map(others.count, others)) <= MOST_OF_A_PROCESS


def test_calls_under_way_keep_the_watch_awake_though_no_communicator_lives(tmp_path: Path) -> None:
    world = a_world(tmp_path, 20)
    world.ranks.clear()
    world.watch.find_calls()
    assert not world.watch.busy
    world.clock.now_ns += 1_000_000_000
    calls(world, 20, LifecycleKind.INIT)
    world.watch.find_calls()
    assert world.watch.busy
