"""Both sides of the boundary with the programs that watch CUDA agree."""

from __future__ import annotations

import re

import pytest

from probes.nccl.cuda_records import BEHIND, SIZES, CudaKind, CudaStat
from tests.nccl.library import REPOSITORY
from tests.unit.headers import constants, enumeration, fields_of, structure

HEADER = (REPOSITORY / "probes/bpf/cuda_structs.h").read_text()


@pytest.mark.parametrize("name", SIZES)
def test_every_dtype_has_the_fields_of_its_struct(name: str) -> None:
    dtype, size_bytes = SIZES[name]
    header = structure(HEADER, name)
    assert fields_of(dtype) == fields_of(header)
    assert dtype.itemsize == header.itemsize == size_bytes
    assert f"ASSERT_SIZE({name}, {size_bytes});" in HEADER


def test_every_asserted_struct_has_a_dtype() -> None:
    assert set(re.findall(r"^ASSERT_SIZE\((\w+),", HEADER, re.MULTILINE)) == set(SIZES)


def test_kinds_and_stats_are_numbered_alike() -> None:
    assert enumeration(HEADER, "cuda_kind") == [f"CUDA_{kind.name}" for kind in CudaKind]
    assert enumeration(HEADER, "cuda_stat") == [f"CUDA_STAT_{stat.name}" for stat in CudaStat] + ["CUDA_STAT_COUNT"]
    assert constants(HEADER)["CUDA_BEHIND"] == BEHIND
