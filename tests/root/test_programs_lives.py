"""Communicators that come, go and come again at the same address: who they are, and whose calls are whose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from railscope.probes.nccl.functions.entry_points import INIT_FUNCTIONS
from railscope.probes.nccl.layouts.layout import CommLayout, Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.records.calls import LifecycleKind
from tests.root.caller import MAGIC, forge_communicator
from tests.root.probe_targets import (
    Target,
    all_reduce,
    assemble,
    attached,
    communicators,
    loaded,
    on_x86_64,
    target,
)
from tests.root.test_programs_slots import addresses_of_one_slot

pytestmark = [pytest.mark.root, on_x86_64]

LAYOUT = CommLayout(
    source="dwarf", nccl_version="2.99.1", start_magic=0, comm_hash=64, rank=72, nranks=76, cuda_dev=80, end_magic=4088
)
SIZE_BYTES = 4096
IDENTITY = {"comm_hash": 0xFEED, "rank": 6, "nranks": 8}
ATTEMPTS = 200
"""IDENTITY_ATTEMPTS of communicators.h: calls after which a communicator's identity is not looked for any more."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, layouts: Layouts) -> Iterator[Target]:
    """Functions that do nothing: what they would have made lies where they would have put it."""
    names = ("ncclAllReduce", "ncclCommDestroy", "ncclCommAbort", *(function.symbol for function in INIT_FUNCTIONS))
    path = assemble(
        tmp_path_factory.mktemp("lives"), **dict.fromkeys(names, "push %rbp; pop %rbp; xor %eax, %eax; ret")
    )
    with target(path, layouts) as found:
        yield replace(found, layout=LAYOUT)


@contextmanager
def observed(plain: Target) -> Iterator[NcclPrograms]:
    with ExitStack() as stack:
        programs = stack.enter_context(loaded(plain))
        stack.enter_context(attached(programs, plain))
        yield programs


def ended(plain: Target, comm: int, how: str = "ncclCommDestroy") -> None:
    assert plain.caller.call(how, 1, comm) == 0


@pytest.mark.parametrize("how", ["ncclCommDestroy", "ncclCommAbort"])
def test_after_its_end_an_address_is_another_communicators_also_on_the_fast_path(plain: Target, how: str) -> None:
    comm = plain.caller.memory(SIZE_BYTES)
    with observed(plain) as programs:
        all_reduce(plain, ATTEMPTS + 100, comm)
        first = communicators(programs)[comm]
        ended(plain, comm, how)
        all_reduce(plain, 5, comm)
        second = communicators(programs)[comm]
        keys, values = programs.aggregates.read()
    assert int(second["instance"]) != int(first["instance"])
    assert (int(first["sequence"]), int(second["sequence"]), int(second["destroyed_ns"])) == (ATTEMPTS + 100, 5, 0)
    calls = dict(zip(keys["instance"].tolist(), values["calls"].sum(axis=1).tolist(), strict=True))
    assert calls == {int(first["instance"]): ATTEMPTS + 100, int(second["instance"]): 5}


def test_a_communicator_without_a_slot_is_numbered_anew_after_its_end(plain: Target) -> None:
    first, second = addresses_of_one_slot(plain.caller.pid, 2)
    with observed(plain) as programs:
        for comm in (first, second):
            all_reduce(plain, ATTEMPTS + 100, comm)
        ended(plain, second)
        all_reduce(plain, 5, second)
        found = communicators(programs)
    assert (int(found[first]["sequence"]), int(found[second]["sequence"])) == (ATTEMPTS + 100, 5)


def test_identity_is_looked_for_in_many_calls_and_in_each_life_anew(plain: Target) -> None:
    comm = plain.caller.memory(SIZE_BYTES)
    late = plain.caller.memory(SIZE_BYTES)
    with observed(plain) as programs:
        all_reduce(plain, ATTEMPTS - 10, late)
        whole = forge_communicator(plain.caller, LAYOUT_WITH_RESULT, SIZE_BYTES, IDENTITY)
        copied(plain, whole, late)
        all_reduce(plain, 1, late)
        all_reduce(plain, ATTEMPTS + 50, comm)
        unknown = communicators(programs)[comm]
        ended(plain, comm)
        copied(plain, whole, comm)
        all_reduce(plain, 1, comm)
        found = communicators(programs)
    assert (int(unknown["confirmed"]), int(unknown["identity"]["rank"])) == (0, -1)
    for address in (late, comm):
        assert int(found[address]["confirmed"]) == 1
        assert {name: int(found[address]["identity"][name]) for name in IDENTITY} == IDENTITY


LAYOUT_WITH_RESULT = replace(LAYOUT, async_result=200)


def copied(plain: Target, whole: int, to: int) -> None:
    for at in (0, 64, 72, 80, 4088):
        plain.caller.store(to + at, int.from_bytes(plain.caller.text(whole + at, 8), "little"), 8)
    assert plain.caller.text(to, 8) == MAGIC.to_bytes(8, "little")


@pytest.mark.parametrize("field", ["rank", "nranks", "cuda_dev", "nvml_dev", "node", "local_rank", "bus_id"])
def test_an_identity_of_which_a_part_is_swapped_out_is_not_believed_until_it_is_back(plain: Target, field: str) -> None:
    page = 4096
    layout = replace(LAYOUT, nvml_dev=84, node=88, local_rank=92, bus_id=96, end_magic=2 * page)
    moved: dict[str, Any] = {field: page}
    layout = replace(layout, **moved)
    comm = plain.caller.pages(3 * page)
    for at in (0, 2 * page):
        plain.caller.store(comm + at, MAGIC, 8)
    for name, value in {**IDENTITY, field: 7 if field != "nranks" else 8}.items():
        plain.caller.store(comm + getattr(layout, name), value, 8 if name in ("comm_hash", "bus_id") else 4)
    with observed(replace(plain, layout=layout)) as programs:
        plain.caller.show(comm + page, page, visible=False)
        all_reduce(plain, 1, comm)
        away = communicators(programs)[comm]
        plain.caller.show(comm + page, page, visible=True)
        all_reduce(plain, 1, comm)
        back = communicators(programs)[comm]
    assert (int(away["confirmed"]), int(back["confirmed"])) == (0, 1)
    assert int(back["identity"][field]) == (7 if field != "nranks" else 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("comm_hash", 0), ("rank", 8), ("n_nodes", 0), ("n_nodes", 9), ("node", 2), ("node", -1)),
        *(("local_rank", 4), ("local_rank", -1), ("local_ranks", 0), ("local_ranks", 9), ("cuda_dev", -1)),
    ],
)
def test_without_marks_a_communicator_is_believed_where_everything_fits_together(
    plain: Target, field: str, value: int
) -> None:
    """As NCCL up to 2.20 has them."""
    unmarked = replace(plain, layout=UNMARKED)
    comm = plain.caller.memory(SIZE_BYTES)
    for name, whole in WHERE.items():
        plain.caller.store(comm + getattr(UNMARKED, name), whole, 8 if name == "comm_hash" else 4)
    at, width = comm + getattr(UNMARKED, field), 8 if field == "comm_hash" else 4
    plain.caller.store(at, value, width)
    with observed(unmarked) as programs:
        all_reduce(plain, 1, comm)
        early = communicators(programs)[comm]
        plain.caller.store(at, WHERE[field], width)
        all_reduce(plain, 1, comm)
        late = communicators(programs)[comm]
    assert (int(early["confirmed"]), int(late["confirmed"])) == (0, 1)
    assert {name: int(late["identity"][name]) for name in WHERE} == WHERE


UNMARKED = replace(LAYOUT, start_magic=None, end_magic=None, node=100, n_nodes=104, local_rank=108, local_ranks=112)
WHERE = {**IDENTITY, "cuda_dev": 1, "node": 1, "n_nodes": 2, "local_rank": 2, "local_ranks": 4}


def test_calls_of_nothing_before_an_end_are_no_calls_of_the_next_communicator(plain: Target) -> None:
    comm = plain.caller.memory(SIZE_BYTES)
    with observed(plain) as programs:
        all_reduce(plain, 3, comm, count=0)
        before = communicators(programs)[comm]
        ended(plain, comm)
        all_reduce(plain, 1, comm)
        after = communicators(programs)[comm]
    assert (int(before["empty_first"]), int(before["empty_last"])) == (1, 3)
    assert (int(after["empty_first"]), int(after["empty_last"])) == (0, 0)


def test_an_init_at_an_address_whose_end_was_not_seen_is_another_communicator(plain: Target) -> None:
    comm, handle = plain.caller.memory(SIZE_BYTES), plain.caller.memory(8)
    plain.caller.store(handle, comm, 8)
    with observed(plain) as programs:
        all_reduce(plain, 7, comm)
        first = communicators(programs)[comm]
        assert plain.caller.call("ncclCommInitRank", 1, handle, 8, 6, 0, 0, 0, *([0] * 16)) == 0
        all_reduce(plain, 2, comm)
        second = communicators(programs)[comm]
    assert int(second["instance"]) != int(first["instance"])
    assert (int(first["sequence"]), int(second["sequence"])) == (7, 2)


def test_one_call_that_makes_several_communicators_tells_of_each(plain: Target) -> None:
    comms = [forge_communicator(plain.caller, LAYOUT_WITH_RESULT, SIZE_BYTES, IDENTITY | {"rank": n}) for n in range(3)]
    handles = plain.caller.memory(32)
    for place, comm in enumerate(comms):
        plain.caller.store(handles + 8 * place, comm, 8)
    with observed(plain) as programs:
        assert plain.caller.call("ncclCommInitAll", 1, handles, 3, 0) == 0
        events = programs.lifecycle_events.read()
    assert set(events["kind"].tolist()) == {LifecycleKind.INIT_ALL}
    assert events["comm"].tolist() == comms
    assert len(set(events["instance"].tolist()) - {0}) == 3
    assert events["identity"]["rank"].tolist() == [0, 1, 2]


PARENT, NEW, ID = 0x5000, -1, -2
"""In the words below: the communicator that another is made from, where the new one is put, and a unique id."""


@pytest.mark.parametrize(
    ("name", "words", "kind", "nranks", "rank"),
    [
        ("ncclCommSplit", (PARENT, 1, 2, NEW, 0), LifecycleKind.SPLIT, -1, -1),
        ("ncclCommShrink", (PARENT, 1, 2, NEW, 0, 0), LifecycleKind.SHRINK, -1, -1),
        ("ncclCommGrow", (PARENT, 9, ID, 4, NEW, 0), LifecycleKind.GROW, 9, 4),
        ("ncclCommInitRankScalable", (NEW, 9, 4, 1, ID, 0), LifecycleKind.INIT, 9, 4),
    ],
)
def test_what_makes_a_communicator_tells_where_it_is_and_from_what(
    plain: Target, name: str, words: tuple[int, ...], kind: LifecycleKind, nranks: int, rank: int
) -> None:
    comm = forge_communicator(plain.caller, LAYOUT_WITH_RESULT, SIZE_BYTES, IDENTITY)
    handle, unique_id = plain.caller.memory(8), plain.caller.memory(128, word=0x0102030405060708)
    plain.caller.store(handle, comm, 8)
    with observed(plain) as programs:
        assert plain.caller.call(name, 1, *({NEW: handle, ID: unique_id}.get(word, word) for word in words)) == 0
        (event,) = programs.lifecycle_events.read()
        entry = communicators(programs)[comm]
    assert (int(event["kind"]), int(event["comm"]), int(event["confirmed"])) == (kind, comm, 1)
    assert int(event["parent"]) == (PARENT if PARENT in words else 0)
    assert (int(event["nranks"]), int(event["rank"])) == (nranks, rank)
    assert 0 != int(event["instance"]) == int(entry["instance"])
    assert bool(event["has_unique_id"]) is (ID in words)
    if ID in words:
        assert event["unique_id"].tobytes() == np.full(16, 0x0102030405060708, "<u8").tobytes()
