"""Finds functions in a library's ELF file, which it does not trust.

Any process may map any file, so the reader treats the file as hostile: every offset, size and count is checked
against the file and against a budget, and a file that breaks a rule raises `ElfError`.  It reads with pread and never
maps, because a file that is truncated while mapped kills its reader with SIGBUS.  The exported names are found as the
dynamic linker finds them, through the hash table that the program headers lead to: a few small reads, also in a
library of 470 MB, and section headers may be missing.  Names that are not exported come from `.symtab`.

Why not pyelftools, which reads debug information in a process that may fail: it trusts the file.  In a string table of
64 MiB without an end, each symbol takes it 0.3 s and 64 MiB, of as many as the file claims; and six functions of an
NCCL library take it 1.4 ms, and 0.3 ms here.

Sources: System V ABI (gABI) chapters 4 and 5, the x86-64 and AArch64 supplements, elf.h of glibc.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from railscope.probes.libraries.files import reopened

EM_X86_64: Final = 62
EM_AARCH64: Final = 183

MAX_PROGRAM_HEADERS: Final = 256
MAX_SECTIONS: Final = 8192
MAX_DYNAMIC_BYTES: Final = 64 << 10
MAX_NOTE_BYTES: Final = 64 << 10
MAX_SYMBOLS: Final = 16 << 20
MAX_STRINGS_BYTES: Final = 256 << 20
MAX_HASH_STEPS: Final = 1 << 16
MAX_READ_BYTES: Final = 64 << 20
MAX_OCCURRENCES: Final = 1 << 16
"""How often one name's bytes may stand in a string table; linkers write each name once."""
MAX_NAMESAKES: Final = 1 << 12
"""Functions of one table that may have one of the names asked for: some per name are usual (statics of several source
files, copies of an inlined function), and each is an object in memory."""

_CHUNK_BYTES: Final = 24 * (1 << 17)
_ELF_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER: Final = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER: Final = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC: Final = struct.Struct("<qQ")
_NOTE: Final = struct.Struct("<III")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_SYMBOL_FIELDS: Final = [
    ("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8"),
]  # fmt: skip

_ET_EXEC, _ET_DYN = 2, 3
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_PF_X, _PF_W = 1, 2
_SHT_SYMTAB, _SHT_STRTAB, _SHT_NOBITS = 2, 3, 8
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH = 4, 5, 6, 10, 0x6FFFFEF5
_STT_FUNC, _STT_GNU_IFUNC = 2, 10
_STB_LOCAL = 0
_NT_GNU_BUILD_ID = 3


class ElfError(Exception):
    """The file is no ELF file that can be probed; the message is one line that says why."""


class ElfUnreadable(ElfError):
    """The system did not let us read: nothing is known of the file, and another time it may be read."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function that the file defines."""

    name: str
    address: int
    """Virtual address as linked."""
    size: int
    """Bytes of code; 0 where the file does not say."""
    file_offset: int
    """Where the code stands in the file: what a uprobe attaches to."""
    table: str
    """`.dynsym` or `.symtab`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A program header."""

    type: int
    flags: int
    offset: int
    address: int
    file_bytes: int
    memory_bytes: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Section:
    """A section header."""

    name: str
    type: int
    address: int
    offset: int
    size_bytes: int
    link: int


class Elf:
    """A 64-bit little-endian ELF file behind a descriptor.  Everything beyond the headers is read when asked for."""

    def __init__(self, fd: int) -> None:
        """Take ownership of `fd`; use `Elf.open` to keep one's own."""
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ElfError("not a regular file")
        self.size_bytes: Final = status.st_size
        header = _ELF_HEADER.unpack(self._read(0, _ELF_HEADER.size, "ELF header"))
        identity: bytes = header[0]
        if identity[:4] != b"\x7fELF":
            raise ElfError("not an ELF file")
        if identity[4:7] != b"\x02\x01\x01":
            raise ElfError("not a 64-bit little-endian ELF file of version 1")
        if header[1] not in (_ET_EXEC, _ET_DYN):
            raise ElfError(f"ELF type {header[1]} is neither an executable nor a shared library")
        self.machine: Final[int] = header[2]
        """`EM_X86_64`, `EM_AARCH64` or another machine's number."""
        self._section_header: Final[tuple[int, int, int, int]] = (header[6], header[11], header[12], header[13])
        self.segments: Final = self._segments(header[5], header[9], header[10])
        self._loads: Final = [segment for segment in self.segments if segment.type == _PT_LOAD]
        for before, after in zip(self._loads, self._loads[1:], strict=False):
            if after.address < before.address + before.memory_bytes:
                raise ElfError(f"loaded segments overlap or are out of order at address {after.address:#x}")

    @classmethod
    def open(cls, fd: int) -> Self:
        """Read the headers of the file behind `fd`, which stays the caller's and may be of O_PATH.

        Raises:
            ElfError: it is no ELF file of the kind that this reader takes, or a header is broken.
            ElfUnreadable: the system refuses (too many open files, a failing disk).
        """
        try:
            own = reopened(fd)
        except OSError as error:
            raise ElfUnreadable(f"cannot be read: {error.strerror}") from None
        try:
            return cls(own)
        except BaseException:
            os.close(own)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The reader's own descriptor, closed with it."""
        return self._fd

    @cached_property
    def build_id(self) -> str | None:
        """The linker's build-id as lower-case hex digits, `None` when there is none.

        Raises:
            ElfError: a note runs past its segment.
        """
        for segment in self.segments:
            if segment.type != _PT_NOTE:
                continue
            if segment.file_bytes > MAX_NOTE_BYTES:
                raise ElfError(f"a note segment of {segment.file_bytes} bytes is over the limit of {MAX_NOTE_BYTES}")
            notes = self._read(segment.offset, segment.file_bytes, "note segment")
            mask = 7 if segment.alignment == 8 else 3
            at = 0
            while at + _NOTE.size <= len(notes):
                name_bytes, value_bytes, kind = _NOTE.unpack_from(notes, at)
                value_at = (at + _NOTE.size + name_bytes + mask) & ~mask
                if value_at + value_bytes > len(notes):
                    raise ElfError(f"a note at file offset {segment.offset + at:#x} runs past its segment")
                name = notes[at + _NOTE.size : at + _NOTE.size + name_bytes]
                if kind == _NT_GNU_BUILD_ID and name == b"GNU\0" and 0 < value_bytes <= 64:
                    return notes[value_at : value_at + value_bytes].hex()
                at = (value_at + value_bytes + mask) & ~mask
        return None

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The section headers in their order; empty for a file without.

        Raises:
            ElfError: the table, or the strings of its names, lie outside the file.
        """
        offset, entry_bytes, count, names_index = self._section_header
        if offset == 0 or count == 0:
            return ()
        if entry_bytes != _SECTION_HEADER.size:
            raise ElfError(f"section headers of {entry_bytes} bytes where {_SECTION_HEADER.size} are due")
        if count > MAX_SECTIONS:
            raise ElfError(f"{count} section headers are over the limit of {MAX_SECTIONS}")
        if names_index >= count:
            raise ElfError(f"section names in section {names_index} of {count}")
        table = self._read(offset, count * entry_bytes, "section headers")
        rows = list(_SECTION_HEADER.iter_unpack(table))
        names = self._read(rows[names_index][4], rows[names_index][5], "section names")
        return tuple(Section(_text(names, row[0]), row[1], row[3], row[4], row[5], row[6]) for row in rows)

    def section(self, name: str) -> Section | None:
        """The first section of that name, `None` when there is none.  Raises `ElfError` like `sections`."""
        return next((section for section in self.sections if section.name == name), None)

    def read_at(self, file_offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `file_offset`; at most `MAX_READ_BYTES`.

        Raises:
            ElfError: the range is not inside the file, or too long.
        """
        return self._read(file_offset, length, "range")

    def file_offset(self, address: int, *, executable: bool = False) -> int | None:
        """Where the byte at a virtual address stands in the file, `None` when no loaded segment's file part holds it.

        With `executable`, only segments count that are mapped executable, the only ones a uprobe works in.
        """
        for segment in self._loads:
            within = address - segment.address
            if 0 <= within < segment.file_bytes and (not executable or segment.flags & _PF_X):
                return segment.offset + within
        return None

    def symbols(self, names: Collection[str]) -> dict[str, Symbol]:
        """Find functions by their exact (mangled) names, in `.dynsym`, and what is missing there in `.symtab`.

        Names that are absent, only imported, no functions, or not in executable file contents are left out, as are
        local functions that occur at several addresses: nothing says which one is meant.

        Raises:
            ElfError: a table is broken or over its budget.
        """
        wanted = {name: name.encode() for name in names}
        found = self._dynamic_symbols(wanted)
        missing = {name: key for name, key in wanted.items() if name not in found}
        if missing:
            found |= self._static_symbols(missing)
        return found

    def search(self, expression: re.Pattern[bytes], budget_bytes: int = 32 << 20) -> re.Match[bytes] | None:
        """First match of a short expression (at most 256 bytes long) in the constants of the file.

        Looks through `.rodata`, or without section headers through the segments that are not written to, and stops
        after `budget_bytes`.
        """
        rodata = self.section(".rodata")
        if rodata is not None and rodata.type != _SHT_NOBITS:
            ranges = [(rodata.offset, rodata.size_bytes)]
        else:
            ranges = [(part.offset, part.file_bytes) for part in self._loads if not part.flags & _PF_W]
        overlap = 256
        for start, length in ranges:
            length = min(length, budget_bytes)
            budget_bytes -= length
            for _, block in self._blocks(start, length, overlap, "constants"):
                match = expression.search(block)
                if match is not None:
                    return match
        return None

    def _read(self, offset: int, length: int, what: str) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise ElfError(f"{what} at {offset:#x}+{length:#x} is outside the file of {self.size_bytes} bytes")
        if length > MAX_READ_BYTES:
            raise ElfError(f"{what} of {length} bytes is over the limit of {MAX_READ_BYTES}")
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    raise ElfError(f"the file was truncated while its {what} was read")
                data += more
        except OSError as error:
            raise ElfUnreadable(f"{what} cannot be read: {error.strerror}") from None
        return data

    def _blocks(self, offset: int, length: int, overlap: int, what: str) -> Iterator[tuple[int, bytes]]:
        """Blocks of a long range with their start in it, each followed by `overlap` bytes of the next."""
        for at in range(0, length, _CHUNK_BYTES):
            yield at, self._read(offset + at, min(_CHUNK_BYTES + overlap, length - at), what)

    def _segments(self, offset: int, entry_bytes: int, count: int) -> tuple[Segment, ...]:
        if count == 0:
            raise ElfError("no program headers")
        if entry_bytes != _PROGRAM_HEADER.size:
            raise ElfError(f"program headers of {entry_bytes} bytes where {_PROGRAM_HEADER.size} are due")
        if count > MAX_PROGRAM_HEADERS:
            raise ElfError(f"{count} program headers are over the limit of {MAX_PROGRAM_HEADERS}")
        table = self._read(offset, count * entry_bytes, "program headers")
        segments = tuple(
            Segment(kind, flags, at, address, file_bytes, memory_bytes, alignment)
            for kind, flags, at, address, _, file_bytes, memory_bytes, alignment in _PROGRAM_HEADER.iter_unpack(table)
        )
        for segment in segments:
            if segment.type not in (_PT_LOAD, _PT_DYNAMIC, _PT_NOTE):
                continue
            if segment.offset + segment.file_bytes > self.size_bytes:
                end = segment.offset + segment.file_bytes
                raise ElfError(f"truncated: a segment ends at {end:#x}, the file at {self.size_bytes:#x}")
            if segment.type == _PT_LOAD and segment.file_bytes > segment.memory_bytes:
                raise ElfError(f"the segment at address {segment.address:#x} has more file than memory")
            if segment.address + segment.memory_bytes > 1 << 64:
                raise ElfError(f"the segment at address {segment.address:#x} passes the end of the address space")
        return segments

    @cached_property
    def _dynamic(self) -> dict[int, int]:
        """Tag to value of the entries of PT_DYNAMIC that matter here; the first of each tag."""
        tags: dict[int, int] = {}
        for segment in self.segments:
            if segment.type != _PT_DYNAMIC:
                continue
            if segment.file_bytes > MAX_DYNAMIC_BYTES:
                raise ElfError(f"a dynamic segment of {segment.file_bytes} bytes is over the limit")
            table = self._read(segment.offset, segment.file_bytes & ~15, "dynamic segment")
            for tag, value in _DYNAMIC.iter_unpack(table):
                if tag == 0:
                    break
                if tag in (_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH):
                    tags.setdefault(tag, value)
            break
        return tags

    def _dynamic_offset(self, tag: int, what: str) -> int:
        offset = self.file_offset(self._dynamic[tag])
        if offset is None:
            raise ElfError(f"{what} at address {self._dynamic[tag]:#x} is in no loaded segment")
        return offset

    def _dynamic_symbols(self, wanted: dict[str, bytes]) -> dict[str, Symbol]:
        tags = self._dynamic
        if not wanted or not {_DT_SYMTAB, _DT_STRTAB, _DT_STRSZ} <= tags.keys():
            return {}
        symbols_at = self._dynamic_offset(_DT_SYMTAB, ".dynsym")
        strings_at = self._dynamic_offset(_DT_STRTAB, ".dynstr")
        strings_bytes = tags[_DT_STRSZ]
        if _DT_GNU_HASH in tags:
            hash_at = self._dynamic_offset(_DT_GNU_HASH, ".gnu.hash")
            return self._hashed_symbols(wanted, hash_at, symbols_at, strings_at, strings_bytes)
        if _DT_HASH in tags:
            # The older hash table is only asked how many symbols there are.
            hash_at = self._dynamic_offset(_DT_HASH, ".hash")
            count: int = struct.unpack("<II", self._read(hash_at, 8, ".hash"))[1]
            return self._scan(wanted, symbols_at, count, strings_at, strings_bytes, ".dynsym")
        return {}

    def _hashed_symbols(
        self, wanted: dict[str, bytes], hash_at: int, symbols_at: int, strings_at: int, strings_bytes: int
    ) -> dict[str, Symbol]:
        bucket_count, first_hashed, bloom_words, _ = struct.unpack("<IIII", self._read(hash_at, 16, ".gnu.hash"))
        if bucket_count == 0:
            return {}
        buckets_at = hash_at + 16 + 8 * bloom_words
        chains_at = buckets_at + 4 * bucket_count
        steps = 0
        found: dict[str, Symbol] = {}
        for name, key in wanted.items():
            value = _gnu_hash(key)
            (index,) = struct.unpack("<I", self._read(buckets_at + 4 * (value % bucket_count), 4, ".gnu.hash"))
            if index == 0:
                continue
            if index < first_hashed:
                raise ElfError(f".gnu.hash names symbol {index} below its first, {first_hashed}")
            while name not in found:
                steps += 1
                if steps > MAX_HASH_STEPS:
                    raise ElfError(f".gnu.hash: no end of a chain after {MAX_HASH_STEPS} steps")
                (chain,) = struct.unpack("<I", self._read(chains_at + 4 * (index - first_hashed), 4, ".gnu.hash"))
                if chain | 1 == value | 1:
                    name_at, info, _, section, address, size = _SYMBOL.unpack(
                        self._read(symbols_at + _SYMBOL.size * index, _SYMBOL.size, ".dynsym")
                    )
                    # A name that cannot fit in the string table is another name with the same hash.
                    if name_at + len(key) + 1 <= strings_bytes and (
                        self._read(strings_at + name_at, len(key) + 1, ".dynstr") == key + b"\0"
                    ):
                        symbol = self._function(name, info, section, address, size, ".dynsym")
                        if symbol is not None:
                            found[name] = symbol
                if chain & 1:
                    break
                index += 1
        return found

    def _static_symbols(self, wanted: dict[str, bytes]) -> dict[str, Symbol]:
        for section in self.sections:
            if section.type != _SHT_SYMTAB:
                continue
            if section.link >= len(self.sections) or self.sections[section.link].type != _SHT_STRTAB:
                raise ElfError(f".symtab names section {section.link} as its strings, which is not a string table")
            strings = self.sections[section.link]
            count = section.size_bytes // _SYMBOL.size
            return self._scan(wanted, section.offset, count, strings.offset, strings.size_bytes, ".symtab")
        return {}

    def _scan(
        self, wanted: dict[str, bytes], symbols_at: int, count: int, strings_at: int, strings_bytes: int, table: str
    ) -> dict[str, Symbol]:
        """Scan a whole symbol table for name offsets that were found in its string table."""
        if count > MAX_SYMBOLS:
            raise ElfError(f"{table}: {count} symbols are over the limit of {MAX_SYMBOLS}")
        if symbols_at + count * _SYMBOL.size > self.size_bytes:
            raise ElfError(f"{table}: {count} symbols at {symbols_at:#x} do not fit in the file")
        name_of = self._name_offsets(wanted, strings_at, strings_bytes, table)
        if not name_of:
            return {}
        import numpy as np  # 90 ms that the helper process for unknown builds is spared

        row_type = np.dtype(_SYMBOL_FIELDS)
        offsets = np.sort(np.fromiter(name_of, np.uint32, len(name_of)))
        candidates: dict[str, list[tuple[bool, Symbol]]] = {}
        namesakes = 0
        for _, block in self._blocks(symbols_at, count * _SYMBOL.size, 0, table):
            rows = np.frombuffer(block, row_type)
            kinds = rows["info"] & 15
            functions = rows[((kinds == _STT_FUNC) | (kinds == _STT_GNU_IFUNC)) & (rows["section"] != 0)]
            place = np.minimum(np.searchsorted(offsets, functions["name"]), len(offsets) - 1)
            named = functions[offsets[place] == functions["name"]]
            namesakes += len(named)
            if namesakes > MAX_NAMESAKES:
                raise ElfError(f"{table}: more than {MAX_NAMESAKES} functions have the names looked for")
            for row in named:
                name = name_of[int(row["name"])]
                info = int(row["info"])
                symbol = self._function(name, info, int(row["section"]), int(row["value"]), int(row["size"]), table)
                if symbol is not None:
                    candidates.setdefault(name, []).append((info >> 4 == _STB_LOCAL, symbol))
        found: dict[str, Symbol] = {}
        for name, several in candidates.items():
            exported = [symbol for local, symbol in several if not local]
            if exported or len({symbol.address for _, symbol in several}) == 1:
                found[name] = exported[0] if exported else several[0][1]
        return found

    def _name_offsets(self, wanted: dict[str, bytes], at: int, length: int, table: str) -> dict[int, str]:
        """Every offset in a string table at which one of the names stands whole.

        The linker may let a name be the tail of a longer one (`ncclSend` in `pncclSend`): only the end must be NUL.
        """
        if length > MAX_STRINGS_BYTES:
            raise ElfError(f"{table}: strings of {length} bytes are over the limit of {MAX_STRINGS_BYTES}")
        keys = {key + b"\0": name for name, key in wanted.items()}
        overlap = max(map(len, keys), default=1)
        name_of: dict[int, str] = {}
        for start, block in self._blocks(at, length, overlap, f"strings of {table}"):
            for key, name in keys.items():
                position = block.find(key)
                while position >= 0:
                    name_of[start + position] = name
                    if len(name_of) > MAX_OCCURRENCES:
                        raise ElfError(f"{table}: the names occur more than {MAX_OCCURRENCES} times in the strings")
                    position = block.find(key, position + 1)
        return name_of

    def _function(self, name: str, info: int, section: int, address: int, size: int, table: str) -> Symbol | None:
        if section == 0 or info & 15 not in (_STT_FUNC, _STT_GNU_IFUNC):
            return None
        offset = self.file_offset(address, executable=True)
        return None if offset is None else Symbol(name, address, size, offset, table)


def _text(strings: bytes, at: int) -> str:
    """The NUL-terminated string at an offset; empty when the offset or the end is outside."""
    end = strings.find(b"\0", at, at + 256)
    return strings[at:end].decode("utf-8", "replace") if end >= 0 else ""


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
