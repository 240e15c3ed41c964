"""Both sides of the boundary with the programs below the entry points agree, and every known build has its offsets."""

from __future__ import annotations

import json

import pytest

from railscope.probes.nccl.layouts.layout import TABLE, Layouts
from railscope.probes.nccl.records import internals as internal_records
from railscope.probes.nccl.records.calls import NO_OFFSET
from railscope.probes.nccl.records.internals import LAYOUT, SIZES, InternalStat, NetworkKind, layout_record
from tests.nccl.library import REPOSITORY
from tests.unit.headers import asserted, compare, enumeration

HEADER = (REPOSITORY / "probes/bpf/internals.h").read_text()
BUILDS = json.loads(TABLE.read_text())["builds"]


@pytest.mark.parametrize("name", SIZES)
def test_every_dtype_has_the_fields_of_its_struct(name: str) -> None:
    compare(HEADER, name, *SIZES[name])


def test_every_asserted_struct_has_a_dtype() -> None:
    assert asserted(HEADER) == set(SIZES)


def test_stats_and_networks_are_numbered_alike() -> None:
    assert enumeration(HEADER, "internal_stat") == [f"INTERNAL_{stat.name}" for stat in InternalStat] + [
        "INTERNAL_STAT_COUNT"
    ]
    assert enumeration(HEADER, "network_kind") == [f"NETWORK_{kind.name}" for kind in NetworkKind]


@pytest.mark.parametrize("build_id", BUILDS)
def test_every_known_build_has_the_offsets_that_the_programs_need(build_id: str) -> None:
    record = layout_record(Layouts.load().structures(build_id))
    version = tuple(map(int, BUILDS[build_id]["nccl_version"].split(".")))
    assert (record is not None) == (version >= (2, 20)), "before, a proxy operation does not tell its function"
    if record is None:
        return
    assert record.dtype == LAYOUT
    # The head of a proxy operation is read in one piece (OPERATION_HEAD in posting.h).
    sizes = {"connection": 8, "count": 8, "next": 4, "channel": 1, "function": 1, "protocol": 1}
    assert all(int(record[f"operation_{field}"][0]) + size <= 96 for field, size in sizes.items())
    structures = Layouts.load().structures(build_id)
    several = "base.vProps.devs" in structures["ncclIbSendComm"].offsets
    assert several == (version >= (2, 24)), "one connection over several devices"
    assert record["ib_device_stride"] == (4 if several else structures["ncclIbSendCommDev"].size_bytes)
    for field in ("slots", "slot_size", "slot_requests", "requests", "request_bytes", "device_count", "devices"):
        assert int(record[f"ib_{field}"][0]) != NO_OFFSET, field
    if version >= (2, 23):
        task = structures["ncclTaskColl"].offsets
        for field in ("algorithm", "protocol"):
            assert record[f"task_{field}"] == task[field]
    assert (int(record["task_count"][0]) != NO_OFFSET) == (version >= (2, 22))
    assert (int(record["state_own_rank"][0]) != NO_OFFSET) == (version >= (2, 30))


def test_a_build_without_a_needed_struct_is_not_looked_into() -> None:
    structures = dict(Layouts.load().structures(next(reversed(BUILDS))))
    assert layout_record(structures) is not None
    del structures["ncclProxyOps"]
    assert layout_record(structures) is None
    assert layout_record({}) is None


def test_algorithms_and_protocols_have_nccls_names() -> None:
    assert internal_records.ALGORITHMS[1] == "Ring"
    assert internal_records.PROTOCOLS[2] == "Simple"
