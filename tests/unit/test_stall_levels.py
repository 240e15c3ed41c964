"""A level that is taken back leaves rows in the kernel's tables that nobody keeps up to date: nothing is told by them.

Simulated: see stall_world.
"""

from __future__ import annotations

from typing import NoReturn

import pytest

from railscope.probes.nccl.abi import Op
from tests.unit.stall_world import AFTER_S, LOOK_S, STOPPED, World, steady


def test_what_was_in_flight_when_completion_was_seen_last_is_no_stall() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    world.step()
    world.seen, world.left_behind = False, True
    for _ in range(int(2 * AFTER_S / LOOK_S)):
        rank.sequence += 1
        rank.last_ns = world.clock.now_ns
        world.step()
        assert world.watch.current == ()


def test_below_completion_no_table_of_what_was_followed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    steady(world)
    world.seen, world.left_behind = False, True

    def refuse() -> NoReturn:
        raise AssertionError("read although nothing is followed")

    for table in ("operations", "connections", "histories", "sent"):
        monkeypatch.setattr(world, table, refuse)
    for _ in range(8):
        world.ranks[0].sequence += 1
        world.ranks[0].last_ns = world.clock.now_ns
        world.step()
    world.ranks[0].process = STOPPED
    world.until_flagged(10)
    reader = world.watch._reader
    assert reader.sends(world.clock.now_ns, world.ranks[0].pid) is None
    assert {one.op for one in reader.times.by_size()} == {Op.AllReduce.name}
