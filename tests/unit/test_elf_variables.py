"""A library's variables are found by name, and what a hostile symbol table says is not taken on trust."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railscope.probes.libraries import elf_variables
from railscope.probes.libraries.elf import Elf, ElfError
from railscope.probes.libraries.elf_variables import Variable, find_variables
from tests.unit.elf_writer import BASE_ADDRESS, STB_LOCAL, STT_FUNC, STT_OBJECT, WantedElf, WantedSymbol, write_elf

Opener = Callable[[bytes], Elf]

DEVICES = WantedSymbol("devices", offset=16, size=64, kind=STT_OBJECT, binding=STB_LOCAL)
COUNT = WantedSymbol("count", offset=80, size=4, kind=STT_OBJECT)
LIBRARY = WantedElf(
    exported=[WantedSymbol("ncclSend")],
    internal=[DEVICES, COUNT, WantedSymbol("recount", offset=100, size=8, kind=STT_FUNC)],
    merge_tails=True,
)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    files: list[Elf] = []

    def open_bytes(data: bytes) -> Elf:
        path = tmp_path / str(len(files))
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        try:
            files.append(Elf.open(fd))
        finally:
            os.close(fd)
        return files[-1]

    yield open_bytes
    for file in files:
        file.close()


def found(opened: Opener, wanted: WantedElf, *names: str) -> dict[str, Variable]:
    return find_variables(opened(write_elf(wanted).data), names)


def test_variables_are_found_with_address_and_size(opened: Opener) -> None:
    written = write_elf(LIBRARY)
    base = BASE_ADDRESS + written.code_at
    assert find_variables(opened(written.data), ["devices", "count", "absent"]) == {
        "devices": Variable("devices", base + 16, 64),
        "count": Variable("count", base + 80, 4),
    }


def test_functions_and_declarations_are_no_variables(opened: Opener) -> None:
    declared = replace(LIBRARY, internal=[replace(COUNT, defined=False)])
    assert found(opened, LIBRARY, "recount", "ncclSend") == {}
    assert found(opened, declared, "count") == {}


def test_a_name_of_two_variables_names_none(opened: Opener) -> None:
    twice = replace(LIBRARY, internal=[DEVICES, replace(DEVICES, offset=128), COUNT])
    assert found(opened, twice, "devices", "count").keys() == {"count"}


def test_a_variable_that_is_not_in_memory_is_left_out(opened: Opener) -> None:
    outside = replace(LIBRARY, internal=[replace(DEVICES, offset=1 << 40), replace(COUNT, size=1 << 40)])
    assert found(opened, outside, "devices", "count") == {}


def test_a_stripped_library_has_none(opened: Opener) -> None:
    assert found(opened, replace(LIBRARY, section_headers=False), "devices", "count") == {}


def test_a_table_over_its_budget_is_refused(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf_variables, "MAX_TABLE_BYTES", 24)
    with pytest.raises(ElfError, match=r"over the limit of 24"):
        found(opened, LIBRARY, "devices")


def test_more_variables_of_one_name_than_a_linker_writes_are_refused(opened: Opener) -> None:
    many = [WantedSymbol("devices", offset=8 * at, kind=STT_OBJECT) for at in range(elf_variables.MAX_NAMESAKES + 1)]
    with pytest.raises(ElfError, match="more than 4096 variables"):
        found(opened, replace(LIBRARY, internal=many), "devices")


@given(at=st.integers(0, 1 << 12), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere_is_an_error_of_one_kind_or_an_answer_inside_the_file(
    opened: Opener, at: int, byte: int
) -> None:
    data = bytearray(write_elf(LIBRARY).data)
    data[at % len(data)] = byte
    try:
        answer = find_variables(opened(bytes(data)), ["devices", "count"])
    except ElfError:
        return
    assert answer.keys() <= {"devices", "count"}
