"""Both sides of the boundary with the kernel agree on calls of CUDA's driver: the BPF header and the numpy dtypes."""

from __future__ import annotations

import re

import pytest

from railscope.probes.nccl.records import driver_calls as records
from tests.nccl.library import REPOSITORY
from tests.unit.headers import asserted, compare, enumeration

HEADER = (REPOSITORY / "probes/bpf/driver_calls.h").read_text()
PROGRAM = (REPOSITORY / "probes/bpf/driver_calls.bpf.c").read_text()
COUNTING = (REPOSITORY / "probes/bpf/nccl.bpf.c").read_text()


@pytest.mark.parametrize("name", records.SIZES)
def test_every_dtype_has_the_fields_of_its_struct(name: str) -> None:
    compare(HEADER, name, *records.SIZES[name])


def test_every_asserted_struct_has_a_dtype() -> None:
    assert asserted(HEADER) == set(records.SIZES)


def test_kinds_and_stats_are_numbered_alike() -> None:
    kinds = [f"DRIVER_{kind.name}" for kind in records.DriverKind]
    stats = [f"DRIVER_STAT_{stat.name}" for stat in records.DriverStat]
    assert enumeration(HEADER, "driver_call_kind") == kinds
    assert enumeration(HEADER, "driver_stat") == [*stats, "DRIVER_STAT_COUNT"]
    assert [list(kind) for kind in (records.DriverKind, records.DriverStat)] == [[0, 1, 2, 3], [0, 1, 2]]


def test_its_constants_are_those_of_the_programs_that_count_and_one_more() -> None:
    common, own = (re.findall(r"^const volatile (__u\d+ \w+)", text, re.MULTILINE) for text in (COUNTING, PROGRAM))
    assert own == [*common[:10], "__u32 driver_thread_entries"]
