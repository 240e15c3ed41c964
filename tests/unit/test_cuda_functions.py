"""Which functions of CUDA and NCCL are probed in a file; the files are written here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf, ElfError
from railscope.probes.nccl.functions.cuda import (
    LIBRARY_PROGRAMS,
    CudaInterface,
    CudaPoints,
    cuda_points,
    library_points,
)
from railscope.probes.nccl.records.cuda import CudaKind
from tests.unit.elf_writer import WantedElf, WantedSymbol, write_elf

PUSH = b"\x55" + b"\xc3" * 15
MOVES_STACK = bytes.fromhex("4883ec08" + "50") + b"\xc3" * 11
"""sub $8,%rsp; push %rax"""
SINGLE_STEPPED = bytes.fromhex("0f05") + b"\xc3" * 14
RUNTIME = (
    "cudaEventQuery",
    "cudaEventRecord",
    "cudaEventRecord_ptsz",
    "cudaStreamSynchronize_ptsz",
    "cudaEventDestroy",
)


def symbols(names: Sequence[str]) -> list[WantedSymbol]:
    return [WantedSymbol(name, offset=16 * at) for at, name in enumerate(names)]


def elf_of(folder: Path, wanted: WantedElf) -> Elf:
    path = folder / "library.so"
    path.write_bytes(write_elf(wanted).data)
    with path.open("rb") as file:
        return Elf.open(file.fileno())


def points_of(folder: Path, names: Sequence[str], code: bytes = PUSH) -> CudaPoints | None:
    with elf_of(folder, WantedElf(exported=symbols(names), code=code * len(names))) as elf:
        return cuda_points(elf)


def test_each_function_is_told_by_what_it_does_and_by_its_default_stream(tmp_path: Path) -> None:
    points = points_of(tmp_path, RUNTIME)
    assert points is not None
    assert points.interface is CudaInterface.RUNTIME
    assert {point.symbol: point.cookie for point in points.calls} == {
        "cudaEventQuery": CudaKind.ASK_EVENT,
        "cudaEventRecord": CudaKind.RECORD,
        "cudaEventRecord_ptsz": CudaKind.RECORD | 1 << 8,
        "cudaStreamSynchronize_ptsz": CudaKind.ASK_STREAM | 1 << 8,
    }
    assert {point.symbol: point.cookie for point in points.drops} == {"cudaEventDestroy": CudaKind.DROP_EVENT}


def test_the_driver_is_known_by_its_own_names(tmp_path: Path) -> None:
    points = points_of(tmp_path, ("cuEventQuery", "cuEventRecord_ptsz", "cuStreamDestroy_v2", "cuEventDestroy"))
    assert points is not None
    assert points.interface is CudaInterface.DRIVER
    assert {point.symbol for point in points.calls} == {"cuEventQuery", "cuEventRecord_ptsz"}
    assert {point.symbol for point in points.drops} == {"cuStreamDestroy_v2", "cuEventDestroy"}


def test_two_names_of_one_function_are_one_probe(tmp_path: Path) -> None:
    names = [WantedSymbol("cuEventQuery"), WantedSymbol("cuEventDestroy", 16), WantedSymbol("cuEventDestroy_v2", 16)]
    with elf_of(tmp_path, WantedElf(exported=names, code=PUSH * 2)) as elf:
        points = cuda_points(elf)
    assert points is not None
    assert len(points.drops) == 1


def test_a_file_that_keeps_its_runtime_to_itself_is_no_runtime(tmp_path: Path) -> None:
    with elf_of(tmp_path, WantedElf(internal=symbols(RUNTIME), code=PUSH * len(RUNTIME))) as elf:
        assert cuda_points(elf) is None
    assert points_of(tmp_path, ("cudaEventRecord",)) is None


@pytest.mark.parametrize("code", [MOVES_STACK, SINGLE_STEPPED])
def test_functions_whose_return_cannot_be_seen_cheaply_are_refused(tmp_path: Path, code: bytes) -> None:
    points = points_of(tmp_path, ("cudaEventQuery", "cudaEventRecord"), code)
    assert points is not None
    assert points.calls == ()
    assert set(points.refused) == {"cudaEventQuery", "cudaEventRecord"}


def test_a_library_is_watched_only_where_captures_can_be_told(tmp_path: Path) -> None:
    names = list(LIBRARY_PROGRAMS.values())
    with elf_of(tmp_path, WantedElf(internal=symbols(names), code=PUSH * len(names))) as elf:
        points = library_points(elf, 9)
    assert set(points) == set(LIBRARY_PROGRAMS)
    assert {point.cookie for point in points.values()} == {9 << 32}
    older = [LIBRARY_PROGRAMS[program] for program in ("cuda_note", "cuda_plan", "cuda_finish")]
    with elf_of(tmp_path, WantedElf(internal=symbols(older), code=PUSH * len(older))) as elf:
        assert set(library_points(elf, 9)) == {"cuda_note", "cuda_plan", "cuda_finish"}
    for missing in older:
        rest = [name for name in names if name != missing]
        with elf_of(tmp_path, WantedElf(internal=symbols(rest), code=PUSH * len(rest))) as elf:
            assert library_points(elf, 9) == {}


def test_a_library_one_of_whose_launches_would_be_single_stepped_is_not_watched(tmp_path: Path) -> None:
    names = list(LIBRARY_PROGRAMS.values())
    copies = names.index(LIBRARY_PROGRAMS["cuda_copy_plan"])
    code = PUSH * copies + SINGLE_STEPPED + PUSH * (len(names) - copies - 1)
    with elf_of(tmp_path, WantedElf(internal=symbols(names), code=code)) as elf:
        assert library_points(elf, 9) == {}


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"\x7fELF" + b"\xff" * 100)
    with path.open("rb") as file, pytest.raises(ElfError), Elf.open(file.fileno()) as elf:
        cuda_points(elf)
