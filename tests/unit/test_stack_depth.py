"""How deep the stack of the BPF programs gets: kernels before 6.13 allow 512 bytes with all functions that are called.

Newer ones give each program a stack of its own on x86, so that a program which loads there may load nowhere else.
`check_max_stack_depth` (kernel/bpf/verifier.c) rounds each frame up to 32 bytes, since 6.8 only where nothing is
compiled to machine code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from railscope.probes.nccl.programs import calls

FOLDER: Final = Path(calls.__file__).parents[2] / "bpf"
OBJECTS: Final = sorted(FOLDER.glob("*.bpf.o"))
MOST_BYTES: Final = 512
FRAME_BYTES: Final = 32
"""Frames are multiples of that."""
"""ELF, as elf(5) names it."""
SHT_SYMTAB, SHT_REL, SHF_EXECINSTR, STT_FUNC, STT_SECTION = 2, 9, 4, 2, 3
"""Instructions, as linux/bpf.h names them."""
LOAD_64_BITS, CALL, ADD_NUMBER, MOVE, FRAME_POINTER, OF_THIS_PROGRAM = 0x18, 0x85, 0x07, 0xBF, 10, 1
LOADS_FROM_MEMORY, STORES = 1, (2, 3)
INSTRUCTION: Final = struct.Struct("<BBhi")


@dataclass(frozen=True, slots=True)
class Function:
    """One function of an object."""

    frame_bytes: int
    calls: frozenset[str]
    """Functions of the same object, those for bpf_loop() among them."""


def functions(content: bytes) -> Mapping[str, Function]:
    """What an object file holds, by name."""
    (at,), (count,) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<H", content, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, at + 64 * number) for number in range(count)]
    table = next(one for one in sections if one[1] == SHT_SYMTAB)
    names_at = sections[table[6]][4]
    symbols = [struct.unpack_from("<IBBHQQ", content, table[4] + 24 * number) for number in range(table[5] // 24)]
    begins = {}
    for name, info, _, section, value, size_bytes in symbols:
        if info & 0xF == STT_FUNC:
            start = names_at + name
            begins[section, value] = content[start : content.index(b"\0", start)].decode(), size_bytes
    moved = {}
    for one in sections:
        if one[1] == SHT_REL:
            for entry in range(one[4], one[4] + one[5], 16):
                offset, info = struct.unpack_from("<QQ", content, entry)
                moved[one[7], offset] = symbols[info >> 32]

    def callees(section: int, start: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        for offset, code, registers, _, number in instructions(content, sections[section][4], start, size_bytes):
            is_call = code == CALL and registers >> 4 == OF_THIS_PROGRAM
            if not is_call and code != LOAD_64_BITS:
                continue
            _, info, _, target, value, _ = moved.get((section, offset), (0, 0, 0, 0, 0, 0))
            if target:
                within = 8 * (number + 1) if is_call else number
                yield target, value + within if info & 0xF == STT_SECTION or is_call else value
            elif is_call:
                yield section, offset + 8 * (number + 1)

    found = {}
    for (section, start), (name, size_bytes) in begins.items():
        calls = frozenset(begins[to][0] for to in callees(section, start, size_bytes) if to in begins)
        found[name] = Function(frame_bytes(content, sections[section][4], start, size_bytes), calls)
    return found


def instructions(content: bytes, at: int, start: int, size_bytes: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Offset, code, registers, offset field and number of each."""
    offset = start
    while offset < start + size_bytes:
        code, registers, field, number = INSTRUCTION.unpack_from(content, at + offset)
        yield offset, code, registers, field, number
        offset += 16 if code == LOAD_64_BITS else 8


def frame_bytes(content: bytes, at: int, start: int, size_bytes: int) -> int:
    """How far below the frame pointer a function reaches."""
    deepest, pointers = 0, set()
    for _, code, registers, field, number in instructions(content, at, start, size_bytes):
        target, source = registers & 0xF, registers >> 4
        kind = code & 7
        if (kind == LOADS_FROM_MEMORY and source == FRAME_POINTER) or (kind in STORES and target == FRAME_POINTER):
            deepest = max(deepest, -field)
        elif code == MOVE and source == FRAME_POINTER:
            pointers.add(target)
        elif code == ADD_NUMBER and target in pointers:
            pointers.discard(target)
            deepest = max(deepest, -number)
    return deepest


def deepest_stack(of: Mapping[str, Function], name: str) -> tuple[int, tuple[str, ...]]:
    """Bytes of a function's stack with those that it calls, and the deepest row of calls."""
    below = max((deepest_stack(of, called) for called in of[name].calls), default=(0, ()))
    frames = max(-(-of[name].frame_bytes // FRAME_BYTES), 1)
    return below[0] + frames * FRAME_BYTES, (name, *below[1])


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name)
def test_the_stack_of_each_program_is_what_all_kernels_allow(path: Path) -> None:
    of = functions(path.read_bytes())
    assert of
    stacks = {name: deepest_stack(of, name) for name in of}
    assert {name: stack for name, stack in stacks.items() if stack[0] > MOST_BYTES} == {}


def test_the_deepest_row_of_calls_is_found_through_loops_and_functions_of_their_own() -> None:
    of = functions((FOLDER / "nccl_internals.x86.bpf.o").read_bytes())
    _, calls = deepest_stack(of, "proxy_post")
    assert calls[:2] == ("proxy_post", "take_operation")
    assert "serves" in of["known_connection"].calls
