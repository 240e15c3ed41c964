"""To a probe the testbed's library looks like NCCL: symbols, first instructions, debug information, codes."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

import pytest
from elftools.dwarf.die import DIE
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType
from railscope.testbed.job import LIBRARY
from tests.unit.testbed_library import FLOAT32, INVALID_ARGUMENT, OK, SUM, load, ranks, size

COLLECTIVES: Final = (
    *("ncclAllReduce", "ncclBroadcast", "ncclBcast", "ncclReduce", "ncclAllGather", "ncclReduceScatter"),
    *("ncclAlltoAll", "ncclGather", "ncclScatter", "ncclSend", "ncclRecv"),
)
OTHERS: Final = (
    *("ncclGetVersion", "ncclGetUniqueId", "ncclGetErrorString", "ncclGetLastError", "ncclGroupStart", "ncclGroupEnd"),
    *("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommInitAll", "ncclCommSplit"),
    *("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort", "ncclCommCount", "ncclCommUserRank"),
    *("ncclCommCuDevice", "ncclCommGetAsyncError"),
)
NCCL_MAGIC: Final = 0x0280028002800280


def symbols() -> dict[str, tuple[str, int]]:
    with LIBRARY.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        return {symbol.name: (symbol["st_info"]["bind"], symbol["st_value"]) for symbol in table.iter_symbols()}


def test_every_function_is_weak_and_has_a_strong_twin_at_its_address() -> None:
    table = symbols()
    for name in COLLECTIVES + OTHERS:
        assert table[name][0] == "STB_WEAK"
        assert table[f"p{name}"][0] == "STB_GLOBAL"
        assert table[name][1] == table[f"p{name}"][1] != 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks at x86-64 instructions")
def test_entry_points_begin_with_a_push_that_the_kernel_emulates() -> None:
    table = symbols()
    with LIBRARY.open("rb") as file:
        elf = ELFFile(file)
        for name in COLLECTIVES:
            (offset,) = elf.address_offsets(table[name][1], 5)
            file.seek(offset)
            code = file.read(5).removeprefix(b"\xf3\x0f\x1e\xfa")  # endbr64
            assert code[0] == 0x55, name  # push %rbp


def test_bcast_calls_broadcast_through_the_linkage_table() -> None:
    """As in NCCL, so that counting both would show as a double count."""
    with LIBRARY.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        relocations = elf.get_section_by_name(".rela.plt")
        assert isinstance(table, SymbolTableSection)
        assert isinstance(relocations, RelocationSection)
        names = {table.get_symbol(relocation["r_info_sym"]).name for relocation in relocations.iter_relocations()}
    assert "ncclBroadcast" in names


def comm_offsets() -> dict[str, int]:
    def is_comm(die: DIE) -> bool:
        return (
            die.tag == "DW_TAG_structure_type"
            and die.attributes.get("DW_AT_name") is not None
            and die.attributes["DW_AT_name"].value == b"ncclComm"
            and "DW_AT_byte_size" in die.attributes
        )

    with LIBRARY.open("rb") as file:
        for unit in ELFFile(file).get_dwarf_info().iter_CUs():
            for die in filter(is_comm, unit.iter_DIEs()):
                return {
                    member.attributes["DW_AT_name"].value.decode(): member.attributes[
                        "DW_AT_data_member_location"
                    ].value
                    for member in die.iter_children()
                    if member.tag == "DW_TAG_member"
                }
    raise AssertionError("no struct ncclComm in the debug information")


def test_a_communicator_can_be_read_by_its_debug_information() -> None:
    offsets = comm_offsets()
    assert offsets["startMagic"] == 0
    with ranks(2) as two:

        def field(rank: int, name: str, kind: type[ctypes.c_int] | type[ctypes.c_uint64]) -> int:
            return int(kind.from_address(two.handles[rank] + offsets[name]).value)

        for rank in range(2):
            for name in ("startMagic", "magic", "endMagic"):
                assert field(rank, name, ctypes.c_uint64) == NCCL_MAGIC
            found = {
                name: field(rank, name, ctypes.c_int)
                for name in ("rank", "nRanks", "cudaDev", "nvmlDev", "node", "nNodes", "localRank", "localRanks")
            }
            assert found == {
                "rank": rank,
                "nRanks": 2,
                "cudaDev": rank,
                "nvmlDev": rank,
                "node": 0,
                "nNodes": 1,
                "localRank": rank,
                "localRanks": 2,
            }
            assert field(rank, "asyncResult", ctypes.c_int) == OK
            assert field(rank, "commHash", ctypes.c_uint64) == two.library.workload_comm_hash(
                ctypes.c_void_p(two.handles[rank])
            )
        assert field(0, "commHash", ctypes.c_uint64) == field(1, "commHash", ctypes.c_uint64) != 0
        assert field(0, "busId", ctypes.c_uint64) != field(1, "busId", ctypes.c_uint64)


def test_the_fields_that_follow_the_hash_keep_nccls_distances() -> None:
    offsets = comm_offsets()
    distances = {name: offsets[name] - offsets["rank"] for name in ("commHash", "nRanks", "cudaDev", "nvmlDev")}
    assert distances == {"commHash": -8, "nRanks": 4, "cudaDev": 8, "nvmlDev": 12}
    assert [offsets[name] - offsets["node"] for name in ("nNodes", "localRank", "localRanks")] == [4, 8, 12]


def test_without_a_communicator_every_operation_is_an_invalid_argument() -> None:
    library, null, one = load(), ctypes.c_void_p(), size(1)
    calls = {
        "ncclAllReduce": (null, null, one, FLOAT32, SUM, null, null),
        "ncclReduceScatter": (null, null, one, FLOAT32, SUM, null, null),
        "ncclReduce": (null, null, one, FLOAT32, SUM, 0, null, null),
        "ncclBroadcast": (null, null, one, FLOAT32, 0, null, null),
        "ncclBcast": (null, one, FLOAT32, 0, null, null),
        "ncclAllGather": (null, null, one, FLOAT32, null, null),
        "ncclAlltoAll": (null, null, one, FLOAT32, null, null),
        "ncclGather": (null, null, one, FLOAT32, 0, null, null),
        "ncclScatter": (null, null, one, FLOAT32, 0, null, null),
        "ncclSend": (null, one, FLOAT32, 0, null, null),
        "ncclRecv": (null, one, FLOAT32, 0, null, null),
    }
    assert set(calls) == set(COLLECTIVES)
    for name, arguments in calls.items():
        assert getattr(library, name)(*arguments) == INVALID_ARGUMENT
        assert name.replace("ncclBcast", "ncclBroadcast").encode() in library.ncclGetLastError(None)


def test_version_and_error_texts() -> None:
    library, version = load(), ctypes.c_int()
    assert library.ncclGetVersion(ctypes.byref(version)) == OK
    assert version.value == 23203
    assert library.ncclGetErrorString(4) == b"invalid argument"
    assert library.ncclGetErrorString(99) == b"unknown result code"


def test_element_sizes_are_those_that_the_probes_use() -> None:
    """The largest count that a type may have tells its size: the library limits bytes, not elements."""
    with ranks(1) as alone:
        for dtype, element_bytes in DATA_TYPE_BYTES.items():
            if dtype is DataType.Unknown:
                continue
            limit = (2**64 - 1) // 16 // element_bytes
            arguments = (ctypes.c_int(dtype), ctypes.c_void_p(alone.handles[0]), ctypes.c_void_p(1))
            buffer = ctypes.c_void_p()  # NULL: neither call gets past the checks
            for count, words in ((limit, b"NULL"), (limit + 1, b"too large")):
                assert alone.library.ncclAllGather(buffer, buffer, size(count), *arguments) == INVALID_ARGUMENT
                assert words in alone.library.ncclGetLastError(None)
