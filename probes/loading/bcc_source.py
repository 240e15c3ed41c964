"""Rewrites a BPF program's source for bcc, the BPF Compiler Collection.

The sources in probes/bpf are written for libbpf.  bcc compiles almost the same C, but its compiler finds maps by
declarations of its own and takes only its own calls on them, in the text itself: "cannot use map function inside a
macro", so no header can translate.  Seven things differ, and each is rewritten here:

1. headers beside the source are put in its place, because only the text itself is searched for maps and calls;
2. maps: `struct { __uint(…) … } name SEC(".maps")` becomes BPF_F_TABLE, or BPF_RINGBUF_OUTPUT;
3. calls on maps: `bpf_map_lookup_elem(&name, key)` becomes `name.lookup(key)`, and so on;
4. `const volatile` variables, which a loader fills in, become constants with their values;
5. programs stand in no section;
6. the licence is a macro;
7. comments go, so that no rewriting is misled by one.

A source that has another shape than this is an error, never a guess.  The headers of the kernel and of libbpf have
stand-ins in probes/bpf/bcc.  Source of facts: bcc's docs/reference_guide.md and
src/cc/export/helpers.h, 0.26.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TABLES: Final = {
    "BPF_MAP_TYPE_ARRAY": "array",
    "BPF_MAP_TYPE_HASH": "hash",
    "BPF_MAP_TYPE_LRU_HASH": "lru_hash",
    "BPF_MAP_TYPE_LRU_PERCPU_HASH": "lru_percpu_hash",
    "BPF_MAP_TYPE_PERCPU_ARRAY": "percpu_array",
    "BPF_MAP_TYPE_PERCPU_HASH": "percpu_hash",
}
_RING: Final = "BPF_MAP_TYPE_RINGBUF"
_INTEGERS: Final = {"__u8": "B", "__u16": "H", "__u32": "I", "__u64": "Q", "__s32": "i", "__s64": "q"}

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_COMMENT: Final = re.compile(r'"(?:\\.|[^"\\])*"|/\*.*?\*/|//[^\n]*', re.DOTALL)
_MAP: Final = re.compile(r'struct\s*\{((?:\s*__(?:uint|type)\([^;]*\);)+)\s*\}\s*(\w+)\s+SEC\("\.maps"\)\s*;')
_MAP_PART: Final = re.compile(r"__(?:uint|type)\(\s*(\w+)\s*,\s*([^;]*?)\s*\)\s*;")
_CONSTANT: Final = re.compile(r"^const volatile (\w+) (\w+) = [^;]+;", re.MULTILINE)
_PROGRAM: Final = re.compile(r'SEC\("(?:uprobe|uretprobe|kprobe|kretprobe)"\)\s*int (\w+)\(')
_LICENCE: Final = re.compile(r'char _license\[\]\s+SEC\("license"\)\s*=\s*"([^"]+)"\s*;')
_MAP_CALL: Final = re.compile(r"\bbpf_(map_lookup_elem|map_update_elem|map_delete_elem|ringbuf_reserve)\s*\(")
_UPDATES: Final = {"BPF_ANY": "update", "BPF_NOEXIST": "insert"}


class SourceError(ValueError):
    """The source has a shape that cannot be put in bcc's words; one line says which."""


@dataclass(frozen=True, slots=True)
class BccSource:
    """What bcc is given."""

    text: str
    maps: tuple[str, ...]
    programs: tuple[str, ...]


def read_source(path: Path) -> str:
    """The BPF source at `path` with the text of each header beside it in place of the first `#include` of it.

    Raises:
        OSError: a file cannot be read.
    """
    return _with_headers(path, set())


def _with_headers(path: Path, seen: set[Path]) -> str:
    seen.add(path)

    def text_of(match: re.Match[str]) -> str:
        header = path.parent / match.group(1)
        return "" if header in seen else _with_headers(header, seen)

    return _INCLUDE.sub(text_of, path.read_text())


def bcc_source(source: str, map_entries: Mapping[str, int], constants: bytes) -> BccSource:
    """Rewrite a BPF source for libbpf as bcc compiles it.

    `map_entries` overrides max_entries by map name, for ring buffers in bytes.  `constants` are the values of the
    `const volatile` variables in their order, aligned as in C.

    Raises:
        SourceError: something has another shape, or what is given does not fit the source.
    """
    text = _COMMENT.sub(_without_comment, source)
    text, maps = _rewrite_maps(text, map_entries)
    text = _rewrite_map_calls(text, frozenset(maps))
    text = _rewrite_constants(text, constants)
    text, licences = _LICENCE.subn(r"#define BPF_LICENSE \1", text)
    if licences != 1:
        raise SourceError(f"the source has {licences} licences instead of one")
    programs = tuple(_PROGRAM.findall(text))
    if not programs:
        raise SourceError("the source has no program")
    text = _PROGRAM.sub(r"int \1(", text)
    if left := re.search(r"[^\n]*\b(?:SEC\(|__ksym\b|const volatile\b)[^\n]*", text):
        raise SourceError(f"bcc has no equivalent of: {left.group().strip()}")
    return BccSource(text, maps, programs)


def _without_comment(match: re.Match[str]) -> str:
    found = match.group()
    return found if found.startswith('"') else " "


def _rewrite_maps(text: str, map_entries: Mapping[str, int]) -> tuple[str, tuple[str, ...]]:
    names: list[str] = []

    def declaration(match: re.Match[str]) -> str:
        name = match.group(2)
        names.append(name)
        parts = dict(_MAP_PART.findall(match.group(1)))
        kind, entries = parts.pop("type", ""), parts.pop("max_entries", "")
        entries = str(map_entries.get(name, entries))
        key, value, flags = parts.pop("key", ""), parts.pop("value", ""), parts.pop("map_flags", "0")
        if kind == _RING and entries and not (key or value or parts):
            return f"BPF_RINGBUF_OUTPUT({name}, ({entries}) / PAGE_SIZE);"
        if kind in _TABLES and entries and key and value and not parts:
            return f'BPF_F_TABLE("{_TABLES[kind]}", {key}, {value}, {name}, {entries}, {flags});'
        raise SourceError(f"bcc has no such map as {name} ({kind or 'no type'}{''.join(f', {p}' for p in parts)})")

    text = _MAP.sub(declaration, text)
    if missing := set(map_entries) - set(names):
        raise SourceError(f"the source has no map {', '.join(sorted(missing))} to resize")
    return text, tuple(names)


def _rewrite_map_calls(text: str, maps: frozenset[str]) -> str:
    pieces: list[str] = []
    position = 0
    while match := _MAP_CALL.search(text, position):
        arguments, end = _arguments(text, match.end())
        pieces += [text[position : match.start()], _map_call(match.group(1), arguments, maps)]
        position = end
    text = "".join(pieces) + text[position:]
    for name in maps:
        if re.search(rf"&\s*{name}\b", text):
            raise SourceError(f"map {name} is used in a call that bcc has no equivalent of")
    return text


def _arguments(text: str, start: int) -> tuple[list[str], int]:
    """The arguments of a call whose opening parenthesis ends at `start`, and where the call ends."""
    depth, begin = 1, start
    arguments: list[str] = []
    for position in range(start, len(text)):
        character = text[position]
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 or (depth == 1 and character == ","):
            arguments.append(text[begin:position].strip())
            begin = position + 1
        if depth == 0:
            return arguments, position + 1
    raise SourceError("a call on a map does not end")


def _map_call(function: str, arguments: list[str], maps: frozenset[str]) -> str:
    name = arguments[0].removeprefix("&").strip()
    if name in maps:
        match function, arguments[1:]:
            case "map_lookup_elem", [key]:
                return f"{name}.lookup({key})"
            case "map_delete_elem", [key]:
                return f"{name}.delete({key})"
            case "map_update_elem", [key, value, flag] if flag in _UPDATES:
                return f"{name}.{_UPDATES[flag]}({key}, {value})"
            case "ringbuf_reserve", [size, "0"]:
                return f"{name}.ringbuf_reserve({size})"
    raise SourceError(f"bcc has no equivalent of bpf_{function}({', '.join(arguments)})")


def _rewrite_constants(text: str, constants: bytes) -> str:
    found = _CONSTANT.findall(text)
    unknown = [f"{kind} {name}" for kind, name in found if kind not in _INTEGERS]
    if unknown:
        raise SourceError(f"the size of a constant is not known: {', '.join(unknown)}")
    layout = struct.Struct("@" + "".join(_INTEGERS[kind] for kind, _ in found))
    if layout.size != len(constants):
        raise SourceError(f"the source's constants are {layout.size} bytes, {len(constants)} are given")
    values = iter(layout.unpack(constants))
    # The suffix makes a large unsigned number one in C, too.
    return _CONSTANT.sub(
        lambda match: (
            f"static const {match.group(1)} {match.group(2)} = ({match.group(1)}){next(values)}LL;"
            if match.group(1).startswith("__s")
            else f"static const {match.group(1)} {match.group(2)} = {next(values)}ULL;"
        ),
        text,
    )
