"""Communicators as the probes see them: their identity, their end, and another one at the same address."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.records.calls import LifecycleKind, Stat
from tests.root.caller import forge_communicator
from tests.root.probe_targets import (
    FLOAT32,
    Count,
    Target,
    all_reduce,
    assemble,
    attached,
    communicators,
    counted,
    loaded,
    on_x86_64,
    target,
)

pytestmark = pytest.mark.root

IDENTITY = {
    "comm_hash": 0xABCD_EF01_2345_6789,
    "bus_id": 0x1A000,
    "rank": 5,
    "nranks": 8,
    "cuda_dev": 1,
    "nvml_dev": 3,
    "node": 1,
    "n_nodes": 2,
    "local_rank": 2,
    "local_ranks": 4,
}


@pytest.mark.nccl
def test_a_communicator_made_before_the_probes_came_gets_its_identity_at_its_first_call(
    nccl: Target, layouts: Layouts
) -> None:
    with nccl.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        size_bytes = layouts.structures(elf.build_id)["ncclComm"].size_bytes
    comm = forge_communicator(nccl.caller, nccl.layout, size_bytes, IDENTITY)
    with loaded(nccl) as programs, attached(programs, nccl):
        all_reduce(nccl, 3, comm)
        (entry,) = communicators(programs).values()
        lifecycle = programs.lifecycle_events.read()
    assert int(entry["confirmed"]) == 1
    assert {name: int(entry["identity"][name]) for name in IDENTITY} == IDENTITY
    assert (int(entry["sequence"]), int(entry["library"]), int(entry["destroyed_ns"])) == (3, 3, 0)
    (event,) = lifecycle
    assert (int(event["kind"]), int(event["confirmed"]), int(event["comm"])) == (LifecycleKind.SEEN, 1, comm)
    assert event["identity"] == entry["identity"]


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("field", "value"),
    [("start_magic", 0), ("end_magic", 0), ("rank", 8), ("rank", -1), ("nranks", 0), ("n_nodes", 0)],
)
def test_an_identity_that_is_not_whole_stays_unconfirmed_until_it_is(
    nccl: Target, layouts: Layouts, field: str, value: int
) -> None:
    with nccl.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        size_bytes = layouts.structures(elf.build_id)["ncclComm"].size_bytes
    comm = forge_communicator(nccl.caller, nccl.layout, size_bytes, IDENTITY)
    at = comm + getattr(nccl.layout, field)
    width = 8 if field.endswith("magic") else 4
    whole = int.from_bytes(nccl.caller.text(at, width), "little")
    nccl.caller.store(at, value, width)
    with loaded(nccl) as programs, attached(programs, nccl):
        all_reduce(nccl, 2, comm)
        early = communicators(programs)[comm]
        nccl.caller.store(at, whole, width)
        all_reduce(nccl, 2, comm)
        late = communicators(programs)[comm]
        kinds = programs.lifecycle_events.read()["kind"].tolist()
        assert counted(programs) == {Op.AllReduce: Count(4, 1600)}
    assert (int(early["confirmed"]), int(early["identity"]["rank"])) == (0, -1)
    assert (int(late["confirmed"]), int(late["identity"]["rank"])) == (1, 5)
    assert int(early["instance"]) == int(late["instance"])
    assert kinds == [LifecycleKind.SEEN, LifecycleKind.CONFIRMED]


def test_without_a_layout_calls_count_and_identity_stays_unknown(testbed: Target) -> None:
    comm = testbed.caller.new_communicator()
    unknown = Target(testbed.path, testbed.points, None, testbed.caller)
    with loaded(testbed) as programs, attached(programs, unknown):
        assert all_reduce(testbed, 5, comm) == 0
        assert counted(programs) == {Op.AllReduce: Count(5, 2000)}
        (entry,) = communicators(programs).values()
    assert (int(entry["sequence"]), int(entry["confirmed"]), int(entry["identity"]["rank"])) == (5, 0, -1)


@pytest.mark.parametrize("attach", AttachKind)
def test_a_communicators_life_is_told_and_its_address_used_again_is_another_one(
    testbed: Target, attach: AttachKind
) -> None:
    caller = testbed.caller
    lives: dict[int, Records] = {}
    with loaded(testbed, attach=attach) as programs, attached(programs, testbed):
        for _ in range(50):  # until the allocator gives an address a second time
            comm = caller.new_communicator()
            assert all_reduce(testbed, 3, comm) == 0
            second = communicators(programs)[comm]
            if comm in lives:
                break
            lives[comm] = second
            assert caller.call("ncclCommFinalize", 1, comm) == 0
            assert caller.call("ncclCommDestroy", 1, comm) == 0
            ended = communicators(programs)[comm]
            assert int(ended["destroyed_ns"]) > int(ended["last_ns"])
        assert all_reduce(testbed, 2, comm) == 0
        events = programs.lifecycle_events.read()
        keys, values = programs.aggregates.read()
    first = lives[comm]
    for life in (first, second):
        assert (int(life["sequence"]), int(life["destroyed_ns"]), int(life["confirmed"])) == (3, 0, 1)
        assert (int(life["identity"]["rank"]), int(life["identity"]["nranks"])) == (0, 1)
    assert int(second["instance"]) != int(first["instance"])
    per_instance = {int(key["instance"]): int(value["calls"].sum()) for key, value in zip(keys, values, strict=True)}
    assert (per_instance[int(first["instance"])], per_instance[int(second["instance"])]) == (3, 5)
    told = events[events["comm"] == comm]
    init, finalize, destroy = LifecycleKind.INIT_ALL, LifecycleKind.FINALIZE, LifecycleKind.DESTROY
    assert [(int(event["kind"]), int(event["instance"])) for event in told] == [
        (init, int(first["instance"])),
        (finalize, int(first["instance"])),
        (destroy, int(first["instance"])),
        (init, int(second["instance"])),
    ]
    assert (int(told[0]["nranks"]), int(told[0]["result"]), int(told[0]["confirmed"])) == (1, 0, 1)
    assert told[0]["identity"] == first["identity"]


def test_when_the_communicators_are_full_calls_still_count(testbed: Target) -> None:
    comms = [testbed.caller.new_communicator() for _ in range(4)]
    with loaded(testbed, communicator_entries=6) as programs, attached(programs, testbed):
        for comm in comms:
            assert all_reduce(testbed, 10, comm) == 0
        assert counted(programs) == {Op.AllReduce: Count(40, 16_000)}
        assert len(communicators(programs)) == 2
        assert programs.stats()[Stat.COMMUNICATORS_FULL] == 20
    for comm in comms:
        assert testbed.caller.call("ncclCommDestroy", 1, comm) == 0


@on_x86_64
@pytest.mark.parametrize("attach", AttachKind)
def test_the_latest_calls_in_a_row_that_nccl_discards_are_kept_by_number(
    tmp_path: Path, layouts: Layouts, attach: AttachKind
) -> None:
    nothing = "push %rbp; pop %rbp; xor %eax, %eax; ret"
    path = assemble(tmp_path, **dict.fromkeys(("ncclAllReduce", "ncclBroadcast", "ncclSend", "ncclAllToAllv"), nothing))
    comm, other = 0x1000, 0x2000
    with target(path, layouts) as plain, loaded(plain, attach=attach) as programs, attached(programs, plain):
        call = plain.caller.call
        told = []
        for name, times, *words in (
            ("ncclSend", 2, 0, 0, FLOAT32, 1, comm, 0),  # a message of its own, also of nothing
            ("ncclAllReduce", 3, 0, 0, 0, FLOAT32, 0, comm, 0),
            ("ncclAllReduce", 1, 0, 0, 0, FLOAT32, 0, other, 0),
            ("ncclBroadcast", 300, 0, 0, 0, FLOAT32, 0, comm, 0),  # past the point where it goes on in its slot
            ("ncclAllReduce", 1, 0, 0, 1, FLOAT32, 0, comm, 0),
            ("ncclAllToAllv", 1, 0, 0, 0, 0, 0, 0, FLOAT32, comm, 0),  # how many elements cannot be told
            ("ncclBroadcast", 2, 0, 0, 0, FLOAT32, 0, comm, 0),
        ):
            assert call(str(name), int(times), *map(int, words)) == 0
            entry = communicators(programs)[comm]
            told.append((int(entry["empty_first"]), int(entry["empty_last"])))
    assert told == [(0, 0), (3, 5), (3, 5), (3, 305), (3, 305), (3, 305), (308, 309)]
