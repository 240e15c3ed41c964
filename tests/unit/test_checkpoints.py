"""Who is seen to write to storage while nobody calls its communicators, and what is told of it.

Simulated: see stall_world.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.node.stalls.checkpoints import MOST_ASKED, MOST_CLOSELY, PERIOD_NS, Checkpoints, LastCall
from railscope.probes.processes.tree import written_bytes
from tests.unit.stall_world import AFTER_S, COMM_HASH, LOOK_S, MIB, RUNNING, WRITING, Rank, World, steady

WRITES = replace(RUNNING, written_bytes=3 * MIB // 2)
"""A MiB a second."""
LOGS = replace(RUNNING, written_bytes=MIB)
SECOND_LOOKS = int(1 / LOOK_S)


def shown(world: World) -> tuple[RankKey, ...]:
    return world.watch.facts().writing


WRITER = (f"{COMM_HASH:016x}", "0")


def writer() -> tuple[World, Rank]:
    """A rank that works, falls silent, and is seen to write."""
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.process = WRITING
    world.step(4 * SECOND_LOOKS)
    assert shown(world) == (WRITER,)
    return world, rank


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
def test_a_rank_that_makes_no_call_and_writes_is_told_within_seconds(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    assert shown(world) == ()
    world.ranks[0].process = WRITES
    world.step(4 * SECOND_LOOKS)
    assert shown(world) == (WRITER,)


def test_whoever_works_is_not_asked_and_whoever_hardly_writes_is_not_told() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    for _ in range(40):
        rank.process = WRITING
        rank.work(1, 0.005)
        world.step()
        assert shown(world) == ()
    rank.process = LOGS
    world.step(40)
    assert shown(world) == ()


def test_who_pauses_counts_as_writing_as_long_as_it_is_excused_and_no_longer() -> None:
    world, rank = writer()
    rank.process = RUNNING
    world.step(int((AFTER_S - 2) * SECOND_LOOKS))
    assert shown(world)
    world.step(3 * SECOND_LOOKS)
    assert shown(world) == ()


def test_with_its_next_call_a_rank_writes_no_more_though_it_falls_silent_again() -> None:
    world, rank = writer()
    rank.process = RUNNING
    rank.work(1, 0.005)
    world.step(SECOND_LOOKS)
    assert shown(world) == ()
    world.step(4 * SECOND_LOOKS)
    assert shown(world) == ()


def test_a_rank_that_waits_in_an_operation_itself_and_writes_beside_it_keeps_nobody_waiting() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.process = WRITING
    world.step(8 * SECOND_LOOKS)
    assert shown(world) == ()


def test_a_process_that_has_ended_writes_no_more() -> None:
    world, rank = writer()
    rank.gone = True
    world.watch.processes_gone({rank.pid: 0})
    assert shown(world) == ()


def test_a_checkpoint_that_lasts_minutes_is_told_to_its_end() -> None:
    world, _ = writer()
    for _ in range(20 * 60):
        world.step(SECOND_LOOKS)
        assert shown(world)
    assert world.watch.current == ()


def asked(writers: Checkpoints, at_s: float, calls: dict[int, int]) -> None:
    writers.update(int(at_s * 1e9), {pid: LastCall(call_ns, 7) for pid, call_ns in calls.items()})


def test_who_is_silent_is_asked_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rank = writer()
    asked_ns: list[int] = []

    def written(pid: int, *, closely: bool) -> int | None:
        del pid, closely
        asked_ns.append(world.clock.now_ns)
        return rank.written_bytes

    monkeypatch.setattr(world.watch._checkpoints, "_written", written)
    rank.begin()  # somebody to look at four times a second
    world.step(2 * SECOND_LOOKS)
    asked_ns.clear()
    world.step(20 * SECOND_LOOKS)
    assert 19 <= len(asked_ns) <= 21
    assert max(later - earlier for earlier, later in pairwise(asked_ns)) <= 1.25 * PERIOD_NS
    rank.work(1, 0.005)
    world.step()
    asked_ns.clear()
    world.step(SECOND_LOOKS // 2)
    assert asked_ns == []


def test_an_idle_process_is_not_asked() -> None:
    questions: list[int] = []

    def written(pid: int, *, closely: bool) -> int:
        del closely
        questions.append(pid)
        return 0

    writers = Checkpoints(written, PERIOD_NS, 30 * PERIOD_NS)
    for second in range(10):
        asked(writers, 1000 + second, {1: 999 * PERIOD_NS, 2: 1010 * PERIOD_NS})
    assert questions == [1] * 10
    questions.clear()
    for look in range(40):
        asked(writers, 2000 + look, {1: 999 * PERIOD_NS})
    assert questions == []


def test_one_tenants_thousands_of_silent_processes_take_no_turn_of_anothers() -> None:
    ours, last_calls = {1, 2}, dict.fromkeys(range(1, 3000), 1000 * PERIOD_NS)
    looks: list[tuple[int, bool]] = []

    def written(pid: int, *, closely: bool) -> int:
        looks.append((pid, closely))
        return 0

    writers = Checkpoints(written, PERIOD_NS, 30 * PERIOD_NS, lambda pid: pid in ours)
    every: set[int] = set()
    for second in range(5, 25):
        looks.clear()
        asked(writers, 1000 + second, last_calls)
        assert len(looks) <= MOST_ASKED + MOST_CLOSELY
        assert sum(closely for _, closely in looks) <= MOST_CLOSELY
        assert ours <= {pid for pid, _ in looks}
        assert second > 5 or ours <= {pid for pid, closely in looks if closely}
        every |= {pid for pid, _ in looks}
    assert len(every) == len(last_calls), "each has its turn"


def test_where_nobody_looks_any_more_nobody_is_said_to_write() -> None:
    total = iter(range(0, 100 * MIB, MIB))
    writers = Checkpoints(lambda _pid, **_: next(total), PERIOD_NS, 30 * PERIOD_NS)
    for second in range(5):
        asked(writers, 1000 + second, {1: 990 * PERIOD_NS})
    assert writers.writing_since_ns(1005 * PERIOD_NS) == {1: 990 * PERIOD_NS}
    assert writers.writing_since_ns(1010 * PERIOD_NS) == {}


def test_what_cannot_be_known_is_no_writing() -> None:
    writers = Checkpoints(lambda _pid, **_: None, PERIOD_NS, 30 * PERIOD_NS)
    for second in range(5):
        asked(writers, 1000 + second, {1: 990 * PERIOD_NS})
    assert writers.writing_since_ns(1004 * PERIOD_NS) == {}
    assert written_bytes(Path("/proc"), 2**30) is None


def test_what_a_process_gives_to_storage_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/io").write_text("rchar: 9\nwchar: 8\nread_bytes: 5\nwrite_bytes: 4096\ncancelled_write_bytes: 3\n")
    assert written_bytes(tmp_path, 7) == 4096
    (tmp_path / "7/io").write_text("wchar: 8192\nwrite_bytes: 4096\n")
    assert written_bytes(tmp_path, 7) == 8192, "as to a file in memory"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert written_bytes(Path("/proc"), child.pid) is not None
        child.communicate(b"\n")


def test_who_pauses_where_it_wrote_the_last_times_is_told_to_write() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    for writes in (True, True, False):
        world.train(10)
        rank.process = WRITING if writes else RUNNING
        world.step(12 * SECOND_LOOKS)
        assert shown(world) == (WRITER,)
        rank.process = RUNNING
    world.train(7)
    world.step(6 * SECOND_LOOKS)
    assert shown(world) == (), "it was never there"
