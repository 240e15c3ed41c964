"""The helper process that derives a communicator's layout from a build that the table lacks.

    python -m railscope.probes.nccl.layouts.unknown_build {dwarf|accessors} FD VERSION

It prints `null` or a JSON object with `source`, `size_bytes` and `offsets`.  A stranger's debug information may crash
a parser, never end, or unpack to any size: the process has limits, and its death means "unknown".

The second way reads the three exported accessors, whose last act is to load one `int` of the communicator:
ncclCommUserRank `rank`, ncclCommCount `nRanks`, ncclCommCuDevice `cudaDev`.  In 2.18.1 to 2.32.3 these three stand in
a row; only a triple of loads that fits this pattern, and only one, is believed.  The 8 bytes before them are `commHash`
there.  From 2.26 on every collective function hands it to NVTX: where none loads those 8 bytes, another field may
have come between, and a communicator's name from it would be invented.  Before 2.26 no exported function loads it, but
those versions are known (published debug information of 2.18.1 to 2.25.1).  A communicator's
marks came with 2.21: without them nothing here confirms one, so that an older build's identity stays unknown.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from typing import Final

from railscope.probes.libraries.elf import EM_X86_64, Elf, ElfError, Symbol
from railscope.probes.nccl.layouts.dwarf import ConflictError, structures_in
from railscope.probes.nccl.layouts.layout import ACCESSORS, COMM_FIELDS, Structure

_MEMORY_BYTES: Final = 2 << 30
_CPU_SECONDS: Final = 5
_MAX_FUNCTION_BYTES: Final = 4096
_MIN_OFFSET: Final = 64
_MAX_COMM_BYTES: Final = 16 << 20
_HASH_READERS: Final = ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclBroadcast", "ncclReduce")
_HASH_BEFORE_RANK: Final = ((2, 18), (2, 26))
"""Versions, the second one excluded, that keep the hash before the rank although no exported function loads it."""


def from_debug_information(fd: int) -> Structure | None:
    """`struct ncclComm` as the library's own DWARF describes it."""
    with open(fd, "rb", closefd=False) as stream:
        return structures_in(stream, {"ncclComm": COMM_FIELDS}, until_found=True).get("ncclComm")


def from_accessors(elf: Elf, nccl_version: str) -> Structure | None:
    """Rank, ranks, CUDA device and, where it is sure, hash of `struct ncclComm` as the machine code tells; x86-64 only.

    Raises:
        ElfError: the file is broken.
    """
    if elf.machine != EM_X86_64:
        return None
    symbols = elf.symbols(ACCESSORS)
    if symbols.keys() != set(ACCESSORS):
        return None
    rank_loads, count_loads, device_loads = (loaded_offsets(_code(elf, symbols[name])) for name in ACCESSORS)
    fitting = [at for at in rank_loads if at % 8 == 0 and at + 4 in count_loads and at + 8 in device_loads]
    if len(fitting) != 1:
        return None
    rank = fitting[0]
    offsets = {"startMagic": 0, "rank": rank, "nRanks": rank + 4, "cudaDev": rank + 8}
    if _keeps_the_hash_at(elf, rank - 8, nccl_version):
        offsets["commHash"] = rank - 8
    return Structure(_MAX_COMM_BYTES, offsets)


def _keeps_the_hash_at(elf: Elf, offset: int, nccl_version: str) -> bool:
    if _within(nccl_version, _HASH_BEFORE_RANK):
        return True
    readers = elf.symbols(_HASH_READERS)
    return bool(readers) and all(offset in loaded_offsets(_code(elf, one), 8) for one in readers.values())


def _within(nccl_version: str, versions: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    numbers = nccl_version.split(".")
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers[:2]):
        return False
    first, end = versions
    return first <= (int(numbers[0]), int(numbers[1])) < end


def _code(elf: Elf, symbol: Symbol) -> bytes:
    length = min(symbol.size or _MAX_FUNCTION_BYTES, _MAX_FUNCTION_BYTES, elf.size_bytes - symbol.file_offset)
    return elf.read_at(symbol.file_offset, length)


def loaded_offsets(code: bytes, width_bytes: int = 4) -> set[int]:
    """Displacements of every load of this width from a register plus a constant in x86-64 code, far enough for a field.

    Loads relative to the stack or the instruction pointer have nothing to do with a communicator.
    """
    from capstone import CS_ARCH_X86, CS_MODE_64, Cs
    from capstone.x86 import X86_INS_MOV, X86_OP_MEM, X86_OP_REG, X86_REG_INVALID, X86_REG_RIP, X86_REG_RSP

    decoder = Cs(CS_ARCH_X86, CS_MODE_64)
    decoder.detail = True
    found: set[int] = set()
    for instruction in decoder.disasm(code, 0):
        if instruction.id != X86_INS_MOV or len(instruction.operands) != 2:
            continue
        target, source = instruction.operands
        if target.type != X86_OP_REG or source.type != X86_OP_MEM or source.size != width_bytes:
            continue
        place = source.mem
        if place.base in (X86_REG_INVALID, X86_REG_RIP, X86_REG_RSP) or place.index != X86_REG_INVALID:
            continue
        if _MIN_OFFSET <= place.disp < _MAX_COMM_BYTES:
            found.add(place.disp)
    return found


def main(arguments: Sequence[str]) -> int:
    """Print what was found of an unknown build's layout; 0, or 1 when the file cannot be used."""
    source, fd, nccl_version = arguments[0], int(arguments[1]), arguments[2]
    for limit, value in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        # Whoever started this process may allow it less.
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    try:
        if source == "dwarf":
            # The descriptor shares its position with the parent's; a new one does not.
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            found = from_debug_information(own)
        else:
            with Elf.open(fd) as elf:
                found = from_accessors(elf, nccl_version)
    except (ElfError, ConflictError) as error:
        print(error, file=sys.stderr)
        return 1
    answer = None
    if found is not None:
        answer = {"source": source, "size_bytes": found.size_bytes, "offsets": dict(found.offsets)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
