"""Both sides of the boundary with the kernel agree on transfers: the BPF header and the numpy dtypes."""

from __future__ import annotations

import re

import pytest

from railscope.probes.transfers import records
from tests.nccl.library import REPOSITORY
from tests.unit.headers import asserted, compare, constants, enumeration

HEADER = (REPOSITORY / "probes/bpf/transfers.h").read_text()
PROGRAM = (REPOSITORY / "probes/bpf/transfers.bpf.c").read_text()
COUNTING = (REPOSITORY / "probes/bpf/nccl.bpf.c").read_text()


@pytest.mark.parametrize("name", records.SIZES)
def test_every_dtype_has_the_fields_of_its_struct(name: str) -> None:
    compare(HEADER, name, *records.SIZES[name])


def test_every_asserted_struct_has_a_dtype() -> None:
    assert asserted(HEADER) == set(records.SIZES)


def test_sizes_completions_and_stats_are_numbered_alike() -> None:
    for prefix, enum, kind in (
        ("SIZE", "transfer_size", records.Size),
        ("COMPLETION", "transfer_completion", records.Completion),
        ("TRANSFER_STAT", "transfer_stat", records.TransferStat),
    ):
        names = enumeration(HEADER, enum)
        assert [f"{prefix}_{one.name}" for one in kind] == [name for name in names if not name.endswith("_COUNT")]
        assert [int(one) for one in kind] == list(range(len(kind)))


def test_limits_are_the_same_on_both_sides() -> None:
    found = constants(HEADER)
    assert found["TRANSFER_BUCKETS"] == records.BUCKETS
    assert found["PEER_NAME_BYTES"] == records.PEER_NAME_BYTES
    assert found["TRANSFER_WAITED"] == records.MOST_WAITED
    assert found["MOST_SPARE"] == records.MOST_SPARE


def test_its_constants_are_those_of_the_programs_that_count_and_one_more() -> None:
    common, own = (re.findall(r"^const volatile (__u\d+ \w+)", text, re.MULTILINE) for text in (COUNTING, PROGRAM))
    assert own == [*common[:10], "__u32 transfer_entries"]
