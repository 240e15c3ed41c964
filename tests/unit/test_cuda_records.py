"""Both sides of the boundary with the programs that watch CUDA agree."""

from __future__ import annotations

import pytest

from railscope.probes.nccl.records.cuda import BEHIND, SIZES, CudaKind, CudaStat
from tests.nccl.library import REPOSITORY
from tests.unit.headers import asserted, compare, constants, enumeration

HEADER = (REPOSITORY / "probes/bpf/cuda_structs.h").read_text()


@pytest.mark.parametrize("name", SIZES)
def test_every_dtype_has_the_fields_of_its_struct(name: str) -> None:
    compare(HEADER, name, *SIZES[name])


def test_every_asserted_struct_has_a_dtype() -> None:
    assert asserted(HEADER) == set(SIZES)


def test_kinds_and_stats_are_numbered_alike() -> None:
    assert enumeration(HEADER, "cuda_kind") == [f"CUDA_{kind.name}" for kind in CudaKind]
    assert enumeration(HEADER, "cuda_stat") == [f"CUDA_STAT_{stat.name}" for stat in CudaStat] + ["CUDA_STAT_COUNT"]
    assert constants(HEADER)["CUDA_BEHIND"] == BEHIND
