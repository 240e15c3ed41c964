#!/usr/bin/env python3
"""Write the C header of the struct layouts that the CUDA test double shares with libnccl.

Usage: make-layout.py LIBRARY HEADER

NCCL's device structures change between versions, so nothing about them is written down here but the
names: sizes, offsets, bit positions and enumerators come from the DWARF that the pip wheel of NCCL
carries.  The header also holds the library's build-id; the double refuses any other library.  A name
that the DWARF lacks stops the generator, because the double would otherwise play a guess.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elftools.elf.elffile import ELFFile

UNITS: Final = ("enqueue/enqueue.cc", "enqueue.cc", "init.cc", "misc/argcheck.cc")
"""Compilation units that, together, describe every structure below."""

STRUCTURES: Final = {
    "ncclConnFifo": ["mode", "offset", "size"],
    "ncclConnInfo": [
        "buffs",
        "tail",
        "head",
        "flags",
        "stepSize",
        "connFifo",
        "step",
        "netDeviceHandle.netDeviceType",
    ],
    "ncclDevChannelPeer": ["send", "recv"],
    "ncclRing": ["prev", "next", "userRanks", "index"],
    "ncclTree": ["up", "down"],
    "ncclDevChannel": ["peers", "ring", "tree"],
    "ncclKernelComm": ["rank", "nRanks", "buffSizes", "p2pChunkSize", "abortFlag", "channels"],
    "ncclDevKernelArgs": ["comm", "channelMask", "workStorageType", "workMask", "workBuf"],
    "ncclDevWorkBatch": ["nextJump", "nextExtends", "workType", "funcId", "offsetBase", "offsetBitset"],
    "ncclDevWorkColl": [
        "channelLo",
        "channelHi",
        "redOpArgIsPtr",
        "regUsed",
        "netRegUsed",
        "root",
        "recvbuff",
        "sendbuff",
        "cbd.countLo",
        "cbd.countMid",
        "cbd.countHi",
        "cbd.chunkGrainsLo",
        "cbd.chunkGrainsMid",
        "cbd.chunkGrainsHi",
        "redOpArg",
    ],
    "ncclDevWorkP2p": [
        "sendAddr",
        "recvAddr",
        "sendBytes",
        "recvBytes",
        "sendRank",
        "recvRank",
        "nP2pChannels",
        "channelBase",
        "nSendChannels",
        "nRecvChannels",
        "sendChunkSize_u32fp8",
        "recvChunkSize_u32fp8",
        "sendProtoLL",
        "recvProtoLL",
        "sendNetReg",
        "recvNetReg",
        "sendIpcReg",
        "recvIpcReg",
    ],
    "CUlaunchConfig_st": ["gridDimX", "hStream"],
    "ncclComm": ["commHash"],
    "cudaDeviceProp": [
        "name",
        "totalGlobalMem",
        "warpSize",
        "major",
        "minor",
        "multiProcessorCount",
        "pciBusID",
        "pciDeviceID",
        "pciDomainID",
    ],
    "cudaPointerAttributes": ["type", "device", "devicePointer", "hostPointer"],
    "cudaFuncAttributes": ["binaryVersion"],
}
"""Structures and the members of them that the double reads or writes; a dot enters a nested structure."""

ENUMERATORS: Final = [
    "ncclDevWorkTypeP2p",
    "ncclDevWorkTypeColl",
    "ncclDevWorkStorageTypeArgs",
    "cudaDevAttrComputeCapabilityMajor",
    "cudaDevAttrComputeCapabilityMinor",
    "cudaDevAttrMaxSharedMemoryPerBlockOptin",
    "cudaDevAttrMultiProcessorCount",
    "cudaMemoryTypeUnregistered",
    "cudaMemoryTypeHost",
    "cudaMemoryTypeDevice",
]

Entry = Any
"""A DIE of pyelftools, which carries no types."""


class LayoutError(RuntimeError):
    """The library's DWARF does not describe what the double needs."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where one member lies in its structure."""

    name: str
    offset_bytes: int
    declaration: str
    """The C declaration with %s where the name belongs; empty for a bit field."""
    size_bytes: int
    shift_bits: int = 0
    width_bits: int = 0


def name_of(entry: Entry) -> str:
    attribute = entry.attributes.get("DW_AT_name")
    return attribute.value.decode() if attribute else ""


def type_of(entry: Entry) -> Entry:
    """The entry's type with typedefs and qualifiers taken off; None is void."""
    while "DW_AT_type" in entry.attributes:
        entry = entry.get_DIE_from_attribute("DW_AT_type")
        if entry.tag not in ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type"):
            return entry
    return None


def size_of(kind: Entry) -> int:
    size: int = kind.attributes["DW_AT_byte_size"].value
    return size


def declaration(kind: Entry) -> str:
    """How C declares a member of this type: %s stands for its name."""
    if kind is None:
        return "void %s"
    if kind.tag == "DW_TAG_pointer_type":
        inner = declaration(type_of(kind))
        return inner.replace("%s", "*%s") if "[" not in inner else "void *%s"
    if kind.tag == "DW_TAG_array_type":
        bounds = [child.attributes["DW_AT_upper_bound"].value for child in kind.iter_children()]
        return declaration(type_of(kind)) + "".join(f"[{bound + 1}]" for bound in bounds)
    if kind.tag == "DW_TAG_structure_type" and name_of(kind) in STRUCTURES:
        return f"struct {name_of(kind)} %s"
    if kind.tag in ("DW_TAG_base_type", "DW_TAG_enumeration_type"):
        if name_of(kind) == "char":
            return "char %s"
        encoding = kind.attributes.get("DW_AT_encoding")
        signed = encoding is not None and encoding.value in (5, 6)  # DW_ATE_signed, DW_ATE_signed_char
        return f"{'' if signed else 'u'}int{8 * size_of(kind)}_t %s"
    return "void %s"


def members(structure: Entry, prefix: str = "", base: int = 0) -> Iterator[Member]:
    """Every member of a structure, those of nested and unnamed structures included."""
    for child in structure.iter_children():
        if child.tag != "DW_TAG_member":
            continue
        location = child.attributes.get("DW_AT_data_member_location")
        offset = base + (location.value if location else 0)
        kind = type_of(child)
        name = prefix + name_of(child)
        if "DW_AT_bit_size" in child.attributes:
            width = child.attributes["DW_AT_bit_size"].value
            size = child.attributes["DW_AT_byte_size"].value
            # DWARF 4 counts a bit field from the most significant bit of its storage unit.
            shift = 8 * size - child.attributes["DW_AT_bit_offset"].value - width
            yield Member(name, offset, "", size, shift, width)
            continue
        if kind.tag in ("DW_TAG_structure_type", "DW_TAG_union_type") and name_of(kind) not in STRUCTURES:
            yield from members(kind, f"{name}." if name_of(child) else prefix, offset)
            continue
        yield Member(name, offset, declaration(kind), 0)


def c_structure(name: str, structure: Entry, wanted: list[str]) -> Iterator[str]:
    """The lines of one structure: a union of its bytes and, each at its own offset, the wanted members."""
    found = {member.name: member for member in members(structure)}
    missing = [member for member in wanted if member not in found]
    if missing:
        raise LayoutError(f"struct {name} has no member {', '.join(missing)}")
    chosen = [found[member] for member in wanted]
    yield f"struct {name} {{"
    yield "    union {"
    yield f"        unsigned char bytes[{size_of(structure)}];"
    for member in chosen:
        if member.declaration:
            c_name = member.name.replace(".", "_")
            pad = f"unsigned char before_{c_name}[{member.offset_bytes}]; " if member.offset_bytes else ""
            yield f"        struct {{ {pad}{member.declaration % c_name}; }};"
    yield "    };"
    yield "};"
    yield f'_Static_assert(sizeof(struct {name}) == {size_of(structure)}, "{name}");'
    for member in chosen:
        if member.declaration:
            c_name = member.name.replace(".", "_")
            yield f'_Static_assert(offsetof(struct {name}, {c_name}) == {member.offset_bytes}, "{c_name}");'
        else:
            yield f"static inline uint64_t {name}_{member.name.replace('.', '_')}(const struct {name} *s) {{"
            yield "    uint64_t word = 0;"
            yield f"    memcpy(&word, s->bytes + {member.offset_bytes}, {member.size_bytes});"
            yield f"    return (word >> {member.shift_bits}) & {hex((1 << member.width_bits) - 1)}u;"
            yield "}"


def build_id(elf: ELFFile) -> str:
    section: Any = elf.get_section_by_name(".note.gnu.build-id")
    for note in section.iter_notes() if section else ():
        return str(note["n_desc"])
    raise LayoutError("the library has no build-id")


def header(library: Path) -> Iterator[str]:
    """The lines of the header for one library."""
    structures: dict[str, Entry] = {}
    enumerators: dict[str, int] = {}
    with library.open("rb") as file:
        elf = ELFFile(file)
        dwarf = elf.get_dwarf_info(relocate_dwarf_sections=False)
        for unit in dwarf.iter_CUs():
            if name_of(unit.get_top_DIE()) not in UNITS:
                continue
            aliases: dict[str, Entry] = {}
            for entry in unit.iter_DIEs():
                name = name_of(entry)
                if name in STRUCTURES and "DW_AT_byte_size" in entry.attributes:
                    structures.setdefault(name, entry)
                elif name in STRUCTURES and entry.tag == "DW_TAG_typedef":
                    aliases[name] = type_of(entry)
                elif name in ENUMERATORS and entry.tag == "DW_TAG_enumerator":
                    enumerators[name] = entry.attributes["DW_AT_const_value"].value
            for name, entry in aliases.items():
                structures.setdefault(name, entry)
        missing = [name for name in (*STRUCTURES, *ENUMERATORS) if name not in structures and name not in enumerators]
        if missing:
            raise LayoutError(f"the DWARF of {library} does not describe {', '.join(missing)}")
        yield f"/* Generated by make-layout.py from the DWARF of {library.name}; not a source file. */"
        yield "#pragma once"
        yield "#include <stddef.h>"
        yield "#include <stdint.h>"
        yield "#include <string.h>"
        yield f'#define LAYOUT_BUILD_ID "{build_id(elf)}"'
        for name in ENUMERATORS:
            yield f"#define {name} {enumerators[name]}"
        for name in STRUCTURES:
            yield f"struct {name};"
        for name, wanted in STRUCTURES.items():
            yield from c_structure(name, structures[name], wanted)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: make-layout.py LIBRARY HEADER", file=sys.stderr)
        return 2
    library, target = map(Path, arguments)
    try:
        text = "\n".join(header(library)) + "\n"
    except LayoutError as error:
        print(f"make-layout.py: {error}", file=sys.stderr)
        return 1
    partial = target.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
