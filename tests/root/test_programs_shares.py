"""Tables are shared out by user and process: whoever fills one leaves room for the next, who loses nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from railscope.probes.loading.maps import Map
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.records.calls import AGGREGATE_SLOTS, NOBODY, Stat
from tests.root.caller import Caller
from tests.root.probe_targets import FLOAT32, Target, assemble, attached, counted, loaded, on_x86_64, target

pytestmark = [pytest.mark.root, on_x86_64]

GREEDY, MODEST = 5000, 5001
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


def share_maps(programs: NcclPrograms) -> list[tuple[Map, str]]:
    return [(programs.shares._taken, "taken"), (programs.shares._freed, "freed")]


def share_counts(shares: Map, field: str) -> dict[tuple[int, int], list[int]]:
    keys, values = shares.read()
    return {(int(key["uid"]), int(key["tgid"])): value[field].tolist() for key, value in zip(keys, values, strict=True)}
