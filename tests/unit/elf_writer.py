"""Writes small ELF shared libraries, so that tests can say exactly what stands in one.

The result has what a linker writes: one read-execute segment (headers, note, hash table, symbols, constants, code), one
read-write segment (dynamic section), and behind them `.symtab` with its strings and the section headers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

STT_OBJECT, STT_FUNC, STT_GNU_IFUNC = 1, 2, 10
STB_LOCAL, STB_GLOBAL, STB_WEAK = 0, 1, 2
BASE_ADDRESS = 0x10000
"""Virtual address of the file's first byte, so that addresses and file offsets differ."""

_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True, slots=True)
class WantedSymbol:
    """A symbol to write; `offset` counts from the start of the code."""

    name: str
    offset: int = 0
    size: int = 16
    kind: int = STT_FUNC
    binding: int = STB_GLOBAL
    defined: bool = True


@dataclass(frozen=True, slots=True)
class WantedElf:
    """What the file shall hold."""

    exported: Sequence[WantedSymbol] = ()
    internal: Sequence[WantedSymbol] = ()
    code: bytes = b"\xc3" * 256
    constants: bytes = b""
    build_id: bytes | None = bytes(range(20))
    note_alignment: int = 4
    machine: int = 62
    hash_style: Literal["gnu", "sysv", "none"] = "gnu"
    section_headers: bool = True
    merge_tails: bool = False
    extra_sections: Sequence[tuple[str, bytes]] = field(default=())


@dataclass(frozen=True, slots=True)
class WrittenElf:
    """The file and where things came to stand in it."""

    data: bytes
    code_at: int
    """File offset of the code; its address is `BASE_ADDRESS` more."""


def write_elf(wanted: WantedElf) -> WrittenElf:
    """Lay the file out and fill it in."""
    header_bytes = 64 + 4 * 56
    note = b""
    if wanted.build_id is not None:
        # Another note stands before it, as .note.gnu.property does.
        note = struct.pack("<III4s4s", 4, 4, 1, b"ABC\0", b"1234")
        note = _padded(note, wanted.note_alignment)
        note += struct.pack("<III4s", 4, len(wanted.build_id), 3, b"GNU\0") + wanted.build_id
        note = _padded(note, wanted.note_alignment)
    exported = _hash_order(wanted.exported) if wanted.hash_style == "gnu" else list(wanted.exported)
    dynamic_strings, dynamic_names = _strings([symbol.name for symbol in exported], wanted.merge_tails)
    table_bytes = _SYMBOL.size * (len(exported) + 1)
    hashes = b""
    if wanted.hash_style != "none":
        hashes = _gnu_hash_table(exported) if wanted.hash_style == "gnu" else _sysv_hash_table(exported)

    note_at = _up(header_bytes, wanted.note_alignment)
    hash_at = _up(note_at + len(note), 8)
    dynamic_symbols_at = _up(hash_at + len(hashes), 8)
    dynamic_strings_at = dynamic_symbols_at + table_bytes
    constants_at = _up(dynamic_strings_at + len(dynamic_strings), 16)
    code_at = _up(constants_at + len(wanted.constants), 16)
    text_end = code_at + len(wanted.code)
    dynamic_at = _up(text_end, 16)

    entries = [
        (5, BASE_ADDRESS + dynamic_strings_at),
        (6, BASE_ADDRESS + dynamic_symbols_at),
        (10, len(dynamic_strings)),
        (11, _SYMBOL.size),
    ]
    if wanted.hash_style != "none":
        entries.append((0x6FFFFEF5 if wanted.hash_style == "gnu" else 4, BASE_ADDRESS + hash_at))
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in [*entries, (0, 0)])
    dynamic_address = BASE_ADDRESS + 0x100000 + dynamic_at

    internal_strings, internal_names = _strings([symbol.name for symbol in wanted.internal], wanted.merge_tails)
    symbols_at = _up(dynamic_at + len(dynamic), 8)
    internal = _symbol_table(wanted.internal, internal_names, BASE_ADDRESS + code_at)
    parts: list[tuple[str, int, int, bytes, int]] = [  # name, type, offset, contents, link
        (".text", 1, code_at, wanted.code, 0),
        (".rodata", 1, constants_at, wanted.constants, 0),
        (".symtab", 2, symbols_at, internal, 4),
        (".strtab", 3, symbols_at + len(internal), internal_strings, 0),
    ]
    end = symbols_at + len(internal) + len(internal_strings)
    for name, contents in wanted.extra_sections:
        parts.append((name, 1, end, contents, 0))
        end += len(contents)
    section_strings, section_names = _strings([*(name for name, *_ in parts), ".shstrtab"], False)
    parts.append((".shstrtab", 3, end, section_strings, 0))
    sections_at = _up(end + len(section_strings), 8)
    headers = bytes(64)
    for name, kind, offset, contents, link in parts:
        headers += struct.pack(
            "<IIQQQQIIQQ", section_names[name], kind, 0, 0, offset, len(contents), link, 0, 8, 24 if kind == 2 else 0
        )

    out = bytearray(sections_at + len(headers) if wanted.section_headers else dynamic_at + len(dynamic))
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    count = len(parts) + 1
    sections = (sections_at, 64, count, count - 1) if wanted.section_headers else (0, 0, 0, 0)
    out[:64] = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(identity, 3, wanted.machine, 1, 0, 64, sections[0], 0, 64, 56, 4, *sections[1:]),
    )
    segments = [
        (1, 5, 0, BASE_ADDRESS, 0, text_end, text_end, 0x1000),
        (1, 6, dynamic_at, dynamic_address, 0, len(dynamic), len(dynamic) + 64, 0x1000),
        (2, 6, dynamic_at, dynamic_address, 0, len(dynamic), len(dynamic), 8),
        (4, 4, note_at, BASE_ADDRESS + note_at, 0, len(note), len(note), wanted.note_alignment),
    ]
    out[64:header_bytes] = b"".join(struct.pack("<IIQQQQQQ", *segment) for segment in segments)
    exported_table = _symbol_table(exported, dynamic_names, BASE_ADDRESS + code_at)
    placed = [
        (note_at, note),
        (hash_at, hashes),
        (dynamic_symbols_at, exported_table),
        (dynamic_strings_at, dynamic_strings),
        (constants_at, wanted.constants),
        (code_at, wanted.code),
        (dynamic_at, dynamic),
    ]
    if wanted.section_headers:
        placed += [(offset, contents) for _, _, offset, contents, _ in parts]
        placed.append((sections_at, headers))
    for offset, contents in placed:
        out[offset : offset + len(contents)] = contents
    return WrittenElf(bytes(out), code_at)


def gnu_hash(name: str) -> int:
    """The hash of DT_GNU_HASH."""
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _padded(data: bytes, alignment: int) -> bytes:
    return data.ljust(_up(len(data), alignment), b"\0")


def _strings(names: Sequence[str], merge_tails: bool) -> tuple[bytes, dict[str, int]]:
    """A string table and where each name stands; `merge_tails` lets a name share the end of a longer one."""
    table = b"\0"
    at: dict[str, int] = {}
    for name in sorted(set(names), key=len, reverse=True):
        key = name.encode() + b"\0"
        place = table.find(key) if merge_tails else -1
        if place < 0:
            place = len(table)
            table += key
        at[name] = place
    return table, at


def _symbol_table(symbols: Sequence[WantedSymbol], names: dict[str, int], code_address: int) -> bytes:
    table = bytes(_SYMBOL.size)
    for symbol in symbols:
        table += _SYMBOL.pack(
            names[symbol.name],
            symbol.binding << 4 | symbol.kind,
            0,
            1 if symbol.defined else 0,
            code_address + symbol.offset if symbol.defined else 0,
            symbol.size,
        )
    return table


_BUCKETS = 3


def _hash_order(symbols: Sequence[WantedSymbol]) -> list[WantedSymbol]:
    """Imported symbols first (they are not hashed), then the rest by bucket, as DT_GNU_HASH asks."""
    imported = [symbol for symbol in symbols if not symbol.defined]
    defined = [symbol for symbol in symbols if symbol.defined]
    return imported + sorted(defined, key=lambda symbol: gnu_hash(symbol.name) % _BUCKETS)


def _gnu_hash_table(symbols: Sequence[WantedSymbol]) -> bytes:
    first = 1 + sum(not symbol.defined for symbol in symbols)
    values = [gnu_hash(symbol.name) for symbol in symbols if symbol.defined]
    buckets = [0] * _BUCKETS
    chains: list[int] = []
    for place, value in enumerate(values):
        bucket = value % _BUCKETS
        buckets[bucket] = buckets[bucket] or first + place
        last = place + 1 == len(values) or values[place + 1] % _BUCKETS != bucket
        chains.append(value & ~1 | last)
    words = [_BUCKETS, first, 1, 6]
    return struct.pack(f"<4IQ{_BUCKETS}I{len(chains)}I", *words, (1 << 64) - 1, *buckets, *chains)


def _sysv_hash_table(symbols: Sequence[WantedSymbol]) -> bytes:
    """One bucket: every symbol in one chain."""
    count = len(symbols) + 1
    chains = [0, *range(2, count), 0][:count]
    return struct.pack(f"<3I{count}I", 1, count, 1 if symbols else 0, *chains)
