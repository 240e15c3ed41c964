"""The ELF reader finds the functions that are there, and takes nothing that a hostile file says on trust."""

from __future__ import annotations

import os
import random
import re
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from elftools.elf.segments import NoteSegment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railscope.probes.libraries import elf as elf_module
from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64, Elf, ElfError
from tests.unit.elf_writer import (
    BASE_ADDRESS,
    STB_LOCAL,
    STB_WEAK,
    STT_GNU_IFUNC,
    STT_OBJECT,
    WantedElf,
    WantedSymbol,
    write_elf,
)

Opener = Callable[[bytes], Elf]

NCCL = WantedElf(
    exported=[
        WantedSymbol("cudaMalloc", defined=False),
        WantedSymbol("pncclAllReduce", offset=16),
        WantedSymbol("ncclAllReduce", offset=16, binding=STB_WEAK),
        WantedSymbol("ncclSend", offset=48),
        WantedSymbol("ncclTable", offset=64, kind=STT_OBJECT),
    ],
    internal=[
        WantedSymbol("ncclAllReduce", offset=16),
        WantedSymbol("_Z16ncclEnqueueCheckP8ncclInfo", offset=96, size=33),
        WantedSymbol("static_twice", offset=128, binding=STB_LOCAL),
        WantedSymbol("static_twice", offset=144, binding=STB_LOCAL),
        WantedSymbol("chosen_at_load", offset=160, kind=STT_GNU_IFUNC),
        WantedSymbol("imported", defined=False),
    ],
    constants=b"\0NCCL version 2.99.1+cuda12.9\0",
)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """A function that writes bytes to a file and opens it as ELF; everything is closed afterwards."""
    kept: list[Elf] = []

    def open_bytes(data: bytes) -> Elf:
        path = tmp_path / "library.so"
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        try:
            kept.append(Elf.open(fd))
        finally:
            os.close(fd)
        return kept[-1]

    yield open_bytes
    for elf in kept:
        elf.close()


def look(fd: int) -> None:
    """Use everything that the reader offers."""
    with Elf.open(fd) as elf:
        _ = elf.build_id, elf.machine, elf.sections
        elf.symbols(["ncclAllReduce", "_Z16ncclEnqueueCheckP8ncclInfo", "no_such"])
        elf.search(re.compile(rb"NCCL version ([0-9.]+)"))


@pytest.mark.parametrize("hash_style", ["gnu", "sysv"])
@pytest.mark.parametrize("merge_tails", [False, True])
def test_exported_names_are_found_with_and_without_section_headers(
    opened: Opener, hash_style: Literal["gnu", "sysv"], merge_tails: bool
) -> None:
    for section_headers in (True, False):
        written = write_elf(
            WantedElf(NCCL.exported, hash_style=hash_style, merge_tails=merge_tails, section_headers=section_headers)
        )
        found = opened(written.data).symbols(["ncclAllReduce", "pncclAllReduce", "ncclSend", "absent"])
        assert {name: symbol.file_offset - written.code_at for name, symbol in found.items()} == {
            "ncclAllReduce": 16,
            "pncclAllReduce": 16,
            "ncclSend": 48,
        }
        assert {symbol.address - symbol.file_offset for symbol in found.values()} == {BASE_ADDRESS}
        assert {symbol.table for symbol in found.values()} == {".dynsym"}


@pytest.mark.parametrize("merge_tails", [False, True])
def test_names_that_are_not_exported_come_from_the_symbol_table(opened: Opener, merge_tails: bool) -> None:
    written = write_elf(WantedElf(NCCL.exported, NCCL.internal, merge_tails=merge_tails))
    found = opened(written.data).symbols(["_Z16ncclEnqueueCheckP8ncclInfo", "ncclAllReduce", "chosen_at_load"])
    assert {(s.name, s.file_offset - written.code_at, s.table) for s in found.values()} == {
        ("_Z16ncclEnqueueCheckP8ncclInfo", 96, ".symtab"),
        ("ncclAllReduce", 16, ".dynsym"),
        ("chosen_at_load", 160, ".symtab"),
    }
    assert found["_Z16ncclEnqueueCheckP8ncclInfo"].size == 33


def test_imports_and_data_are_not_functions_and_an_ambiguous_static_is_left_out(opened: Opener) -> None:
    elf = opened(write_elf(NCCL).data)
    assert elf.symbols(["cudaMalloc", "ncclTable", "static_twice", "imported"]) == {}


def test_a_library_without_any_hash_table_is_searched_through_its_symbol_table(opened: Opener) -> None:
    found = opened(write_elf(WantedElf(NCCL.exported, NCCL.internal, hash_style="none")).data).symbols(
        ["ncclAllReduce"]
    )
    assert found["ncclAllReduce"].table == ".symtab"


@pytest.mark.parametrize("alignment", [4, 8])
def test_build_id_stands_behind_another_note(opened: Opener, alignment: int) -> None:
    """In a segment of eight bytes' alignment each note begins at such a place, and so does what it holds."""
    written = write_elf(replace(NCCL, note_alignment=alignment))
    assert opened(written.data).build_id == bytes(range(20)).hex()
    assert opened(write_elf(WantedElf(build_id=None)).data).build_id is None


def test_machine_is_told(opened: Opener) -> None:
    assert opened(write_elf(NCCL).data).machine == EM_X86_64
    assert opened(write_elf(WantedElf(machine=EM_AARCH64)).data).machine == EM_AARCH64


def test_a_symbol_outside_executable_contents_is_left_out(opened: Opener) -> None:
    beyond = WantedElf([WantedSymbol("ncclAllReduce", offset=1 << 30)], [WantedSymbol("in_data", offset=1 << 20)])
    assert opened(write_elf(beyond).data).symbols(["ncclAllReduce", "in_data"]) == {}


@pytest.mark.parametrize("section_headers", [True, False])
def test_search_finds_a_constant(opened: Opener, section_headers: bool) -> None:
    wanted = WantedElf(constants=NCCL.constants, section_headers=section_headers)
    match = opened(write_elf(wanted).data).search(re.compile(rb"NCCL version ([0-9.]+)"))
    assert match is not None
    assert match[1] == b"2.99.1"


def test_search_finds_a_constant_across_a_block_boundary_and_stops_at_its_budget(opened: Opener) -> None:
    block_bytes = elf_module._CHUNK_BYTES
    elf = opened(write_elf(WantedElf(constants=bytes(block_bytes - 7) + b"NCCL version 2.1.0\0")).data)
    assert elf.search(re.compile(rb"NCCL version 2")) is not None
    assert elf.search(re.compile(rb"NCCL version 2"), budget_bytes=1000) is None


def test_the_callers_descriptor_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(write_elf(NCCL).data)
    with path.open("rb") as file:
        Elf.open(file.fileno()).close()
        assert file.read(4) == b"\x7fELF"


def test_what_is_no_elf_file_is_refused_in_one_line(opened: Opener, tmp_path: Path) -> None:
    whole = write_elf(NCCL).data
    class_32_bits = whole[:4] + b"\x01" + whole[5:]
    for data in (b"", b"\x7fELF", b"#!/bin/sh\n" * 100, bytes(4096), class_32_bits):
        with pytest.raises(ElfError) as caught:
            opened(data)
        assert "\n" not in str(caught.value)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(ElfError, match="not a regular file"):
            Elf.open(directory)
    finally:
        os.close(directory)


def test_refused_files_leave_no_descriptor_behind(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"no ELF file" * 100)
    with path.open("rb") as file:
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(ElfError):
            Elf.open(file.fileno())
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def patched(data: bytes, at: int, form: str, *values: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, *values)
    return bytes(out)


WHOLE = write_elf(NCCL).data
LOAD, SECOND_LOAD, NOTE = 64, 64 + 56, 64 + 3 * 56
GNU_HASH_AT = WHOLE.index(struct.pack("<4I", 3, 2, 1, 6))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (patched(WHOLE, 56, "<H", 0), "no program headers"),
        (patched(WHOLE, 56, "<H", 0xFFFF), "over the limit"),
        (patched(WHOLE, 54, "<H", 8), "program headers of 8 bytes"),
        (patched(WHOLE, 32, "<Q", 1 << 62), "outside the file"),
        (patched(WHOLE, LOAD + 32, "<Q", 1 << 63), "truncated"),
        (patched(WHOLE, LOAD + 40, "<Q", 1), "more file than memory"),
        (patched(WHOLE, SECOND_LOAD + 16, "<Q", BASE_ADDRESS), "overlap"),
        (patched(WHOLE, SECOND_LOAD + 16, "<Q", (1 << 64) - 1), "end of the address space"),
        (patched(WHOLE, 60, "<H", 0xFFF0), "section headers are over the limit"),
        (patched(WHOLE, 58, "<H", 63), "section headers of 63 bytes"),
        (patched(WHOLE, 40, "<Q", len(WHOLE) - 8), "outside the file"),
        (patched(WHOLE, NOTE + 32, "<Q", 40), "past its segment"),
        (patched(WHOLE, GNU_HASH_AT + 4, "<I", 1 << 20), "below its first"),
        (patched(WHOLE, GNU_HASH_AT + 8, "<I", 0xFFFFFFFF), "outside the file"),
        (patched(WHOLE, GNU_HASH_AT, "<I", 0xFFFFFFFF), "outside the file"),
        (WHOLE[:-1], "outside the file"),
        (WHOLE[:500], "truncated"),
    ],
)
def test_a_broken_header_is_named(opened: Opener, data: bytes, message: str) -> None:
    with pytest.raises(ElfError, match=message):
        look(opened(data).fileno())


def test_a_hash_chain_without_end_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf_module, "MAX_HASH_STEPS", 1000)
    data = bytearray(write_elf(WantedElf(NCCL.exported, code=bytes(100_000))).data)
    at = data.index(struct.pack("<4I", 3, 2, 1, 6)) + 16 + 8
    data[at:-400] = b"\x02\0\0\0" * ((len(data) - 400 - at) // 4)
    path = tmp_path / "endless.so"
    path.write_bytes(data[: len(WHOLE) + 200_000])
    with path.open("rb") as file, Elf.open(file.fileno()) as elf, pytest.raises(ElfError):
        elf._hashed_symbols({"ncclAllReduce": b"ncclAllReduce"}, at - 24, 0, 0, 0)


def test_a_file_truncated_while_open_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(WHOLE)
    with path.open("r+b") as file, Elf.open(file.fileno()) as elf:
        file.truncate(100)
        with pytest.raises(ElfError, match="truncated while"):
            elf.symbols(["ncclAllReduce"])


def test_huge_claims_in_a_sparse_file_allocate_little(tmp_path: Path) -> None:
    path = tmp_path / "sparse.so"
    third_section = struct.unpack_from("<Q", WHOLE, 40)[0] + 3 * 64
    with path.open("wb") as file:
        file.write(patched(WHOLE, third_section + 32, "<Q", 1 << 39))
        file.truncate(1 << 40)
    with path.open("rb") as file:
        tracemalloc.start()
        try:
            with pytest.raises(ElfError, match="over the limit"):
                look(file.fileno())
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_names_standing_everywhere_in_the_strings_are_refused(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf_module, "MAX_OCCURRENCES", 100)
    data = bytearray(write_elf(WantedElf((), [WantedSymbol("x" * 14 * 200)])).data)
    at = data.index(b"x" * 100)
    data[at : at + 14 * 200] = b"ncclAllReduce\0" * 200
    with pytest.raises(ElfError, match="more than 100 times"):
        opened(bytes(data)).symbols(["ncclAllReduce"])


def write_namesakes(path: Path, name: str, count: int) -> int:
    """Write a library whose `.symtab` has `count` functions of one name; returns the address of the first."""
    written = write_elf(WantedElf(internal=[WantedSymbol(name)]))
    data = bytearray(written.data)
    symbol_table = struct.unpack_from("<Q", data, 40)[0] + 3 * 64
    (symbols_at,) = struct.unpack_from("<Q", data, symbol_table + 24)
    only = np.frombuffer(bytes(data[symbols_at + 24 : symbols_at + 48]), elf_module._SYMBOL_FIELDS)
    rows = np.repeat(only, count)
    rows["value"] += np.arange(count, dtype=np.uint64) % 200
    struct.pack_into("<QQ", data, symbol_table + 24, len(data), rows.nbytes)
    path.write_bytes(bytes(data) + rows.tobytes())
    return BASE_ADDRESS + written.code_at


def test_a_name_that_millions_of_symbols_have_is_refused_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "namesakes.so"
    write_namesakes(path, "ncclGetUniqueId", 1_000_000)
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        tracemalloc.start()
        try:
            with pytest.raises(ElfError, match=r"more than 4096 functions have the names looked for"):
                elf.symbols(["ncclGetUniqueId"])
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()


def test_a_name_that_some_symbols_have_is_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "namesakes.so"
    first = write_namesakes(path, "ncclGetUniqueId", elf_module.MAX_NAMESAKES)
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        assert elf.symbols(["ncclGetUniqueId"])["ncclGetUniqueId"].address == first


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8)), max_size=6),
    keep=st.integers(0, len(WHOLE)) | st.just(len(WHOLE)),
)
def test_any_damage_yields_an_answer_or_one_line(tmp_path: Path, edits: list[tuple[int, bytes]], keep: int) -> None:
    data = bytearray(WHOLE)
    for at, change in edits:
        data[at : at + len(change)] = change
    path = tmp_path / "damaged.so"
    path.write_bytes(data[:keep])
    with path.open("rb") as file:
        problem = ""
        try:
            look(file.fileno())
        except ElfError as error:
            problem = str(error)
    assert "\n" not in problem


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.sets(st.text("abcnl_Z0189", min_size=1, max_size=12), max_size=24),
    style=st.sampled_from(["gnu", "sysv"]),
    merge=st.booleans(),
)
def test_every_written_name_is_found_where_it_was_written(
    tmp_path: Path,
    names: set[str],
    style: str,
    merge: bool,
) -> None:
    ordered = sorted(names)
    wanted = WantedElf(
        [WantedSymbol(name, offset=8 * place) for place, name in enumerate(ordered)],
        hash_style="gnu" if style == "gnu" else "sysv",
        merge_tails=merge,
    )
    written = write_elf(wanted)
    path = tmp_path / "generated.so"
    path.write_bytes(written.data)
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        found = elf.symbols([*ordered, "never_written"])
    assert {name: symbol.file_offset - written.code_at for name, symbol in found.items()} == {
        name: 8 * place for place, name in enumerate(ordered)
    }


def system_libraries() -> list[Path]:
    """Real files of this machine: what the interpreter maps, and a few libraries."""
    mapped = {
        line.split(None, 5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if " r-xp " in line
    }
    return sorted(Path(name) for name in mapped | {sys.executable} if name.startswith("/"))[:8]


@pytest.mark.parametrize("path", system_libraries(), ids=lambda path: path.name)
def test_real_libraries_read_as_pyelftools_reads_them(path: Path) -> None:
    with path.open("rb") as file:
        reference = ELFFile(file)
        expected: dict[str, set[int]] = {}
        for table in (reference.get_section_by_name(".dynsym"), reference.get_section_by_name(".symtab")):
            for symbol in table.iter_symbols() if isinstance(table, SymbolTableSection) else ():
                if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["type"] in ("STT_FUNC", "STT_LOOS"):
                    expected.setdefault(symbol.name, set()).add(symbol["st_value"])
        notes = [
            note["n_desc"]
            for segment in reference.iter_segments()
            if isinstance(segment, NoteSegment)
            for note in segment.iter_notes()
            if note["n_type"] == "NT_GNU_BUILD_ID"
        ]
        clear = sorted(name for name, addresses in expected.items() if len(addresses) == 1)
        chosen = random.Random(7).sample(clear, min(60, len(clear)))
        with Elf.open(file.fileno()) as elf:
            assert elf.build_id == (notes[0] if notes else None)
            assert {name: {symbol.address} for name, symbol in elf.symbols(chosen).items()} == {
                name: expected[name] for name in chosen
            }
            for found in elf.symbols(chosen).values():
                assert found.file_offset == next(reference.address_offsets(found.address))
