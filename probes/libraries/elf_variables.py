"""Finds variables in a library's `.symtab`, or those that it exports; elf.py finds functions.

A variable is read from a process's memory, so its virtual address is what counts, and most have no place in the file
at all (`.bss`).  The table is as hostile as the rest of the file: it has a budget, an address must lie inside a loaded
segment, and a name that stands for several variables stands for none.  A stripped library has
only what it exports, in `.dynsym`.

Source: System V ABI (gABI) chapter 4, "Symbol Table".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from railscope.probes.libraries.elf import Elf, ElfError, Section

MAX_TABLE_BYTES: Final = 32 << 20
"""Of `.symtab` and of its strings; the published NCCL libraries have less than 1 MiB of each."""
MAX_NAMESAKES: Final = 1 << 12
"""Variables that may have one of the names asked for, and places of these names in the strings."""

_SYMBOL: Final = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_PT_LOAD: Final = 1
_SHT_SYMTAB, _SHT_STRTAB, _SHT_DYNSYM = 2, 3, 11
_STT_OBJECT: Final = 1
_SHN_LORESERVE: Final = 0xFF00


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that the file defines."""

    name: str
    address: int
    """Virtual address as linked."""
    size_bytes: int


def find_variables(elf: Elf, names: Collection[str], *, exported: bool = False) -> dict[str, Variable]:
    """Find variables of an ELF file by their exact (mangled) names; `exported`: in `.dynsym`, which none is without.

    Left out are names that are absent, only declared, no variables, outside the loaded segments, or that several
    addresses have: nothing says which one is meant.

    Raises:
        ElfError: the table is broken or over its budget.
    """
    kind = _SHT_DYNSYM if exported else _SHT_SYMTAB
    table = next((section for section in elf.sections if section.type == kind), None)
    if table is None:
        return {}
    if table.link >= len(elf.sections) or elf.sections[table.link].type != _SHT_STRTAB:
        raise ElfError(f"{table.name} names section {table.link} as its strings, which is not a string table")
    name_of = _name_offsets(_contents(elf, elf.sections[table.link]), names)
    rows = np.frombuffer(_contents(elf, table), _SYMBOL, table.size_bytes // _SYMBOL.itemsize)
    defined = (rows["section"] != 0) & (rows["section"] < _SHN_LORESERVE)
    rows = rows[(rows["info"] & 15 == _STT_OBJECT) & defined & np.isin(rows["name"], list(name_of))]
    if len(rows) > MAX_NAMESAKES:
        raise ElfError(f"{table.name}: more than {MAX_NAMESAKES} variables have the names looked for")
    found: dict[str, set[Variable]] = {}
    for row in rows:
        name = name_of[int(row["name"])]
        found.setdefault(name, set()).add(Variable(name, int(row["value"]), int(row["size"])))
    alone = {name: next(iter(several)) for name, several in found.items() if len(several) == 1}
    return {name: variable for name, variable in alone.items() if _loaded(elf, variable)}


def _contents(elf: Elf, section: Section) -> bytes:
    if section.size_bytes > MAX_TABLE_BYTES:
        raise ElfError(f"{section.name} of {section.size_bytes} bytes is over the limit of {MAX_TABLE_BYTES}")
    return elf.read_at(section.offset, section.size_bytes)


def _name_offsets(strings: bytes, names: Collection[str]) -> dict[int, str]:
    """Every offset at which one of the names stands whole; it may be the tail of a longer one.

    Raises:
        ElfError: there are more of them than a linker would write.
    """
    name_of: dict[int, str] = {}
    for name in names:
        key = name.encode() + b"\0"
        at = strings.find(key)
        while at >= 0:
            name_of[at] = name
            if len(name_of) > MAX_NAMESAKES:
                raise ElfError(f"the names occur more than {MAX_NAMESAKES} times in the strings of .symtab")
            at = strings.find(key, at + 1)
    return name_of


def _loaded(elf: Elf, variable: Variable) -> bool:
    return any(
        segment.address <= variable.address
        and variable.address + variable.size_bytes <= segment.address + segment.memory_bytes
        for segment in elf.segments
        if segment.type == _PT_LOAD
    )
