"""Structure layouts from a library's debug information (DWARF), and the command that fills layouts.json with them.

    python -m railscope.probes.nccl.layouts.dwarf nvidia_nccl_cu12-2.27.7-…whl libnccl.so.2 …

The published NCCL libraries carry complete debug information, so the offsets in the table are the compiler's own.  The
command reads wheels or libraries and adds each build to the table; it takes about a quarter of a minute a library.  It
is for developers, when a new NCCL appears, and for operators with a build of their own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64, Elf, ElfError
from railscope.probes.nccl.layouts.layout import COMM_FIELDS, TABLE, Layouts, Structure

if TYPE_CHECKING:
    from elftools.dwarf.die import DIE

_FIELD_NAMES: Final = {
    "ncclInfo": "coll opName sendbuff recvbuff count datatype op root comm stream algorithm protocol",
    "ncclKernelPlan": "comm persistent isSymColl isCeColl isRma channelMask hasProxyOps collOpCount collTaskQueue "
    "proxyOpQueue",
    "ncclTaskColl": "next func count root datatype trafficBytes nMaxChannels nWarps algorithm protocol",
    "ncclProxyState": "proxyOps tpRank peerArraySize asyncResult progressState.active",
    "ncclProxyOps": "pool nextOps nextOpsEnd",
    "ncclProxyOpsPool": "ops",
    "ncclProxyOp": "connection nbytes opCount root next nsteps channelId dtype redOp coll collAPI pattern protocol "
    "algorithm nChannels rank peer pid task.coll",
    "ncclProxyArgs": "subs nsubs opCount dtype pattern coll collAPI protocol algorithm nChannels",
    "ncclProxySubArgs": "connection channelId nsteps nbytes peer base posted received transmitted done end rank pid "
    "transSize",
    "ncclSharedResources": "persistentRefs",
    "ncclChannel": "peers id",
    "ncclChannelPeer": "send recv",
    "ncclConnector": "connected proxyConn",
    "ncclProxyConnector": "connection",
    "ncclProxyConnection": "send transport transportResources",
    "sendNetResources": "tpRank tpLocalRank tpRemoteRank netDev channelId netSendComm",
    "recvNetResources": "tpRemoteRank netDev netRecvComm",
    "ncclIbSendComm": "base.ndevs base.vProps.ndevs base.vProps.devs base.resiliency devs fifo ctsFifo fifoReqs "
    "sendReqs",
    "ncclIbResiliency": "baseComm devs ndevs",
    "ncclIbResiliencyDev": "state",
    "ncclIbSendCommDev": "base.ibDevN",
    "ncclIbSendFifo": "nreqs",
    "ncclIbRequest": "send.size",
    "ncclIbDev": "devName portNum",
    "ncclNetSocketComm": "dev",
    "ncclNetSocketDev": "devName",
}
FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "ncclComm": (
        *(*COMM_FIELDS, "magic", "nChannels", "channels", "config.commName"),
        *("sharedRes", "proxyState", "topParentLocalRanks", "seqNumber", "groupNext"),
    ),
    **{structure: names.split() for structure, names in _FIELD_NAMES.items()},
}
"""The structures that the table records, and the fields of each; versions lack some."""

_Table = dict[str, dict[str, Any]]
"""As layouts.json has it: layouts by name, and builds by build-id, each with the name of its layout."""
_MAX_DEPTH: Final = 8
_MACHINES: Final = {EM_X86_64: "x86-64", EM_AARCH64: "arm64"}


class ConflictError(Exception):
    """Two compile units define a structure differently."""


def structures_in(
    stream: IO[bytes], wanted: Mapping[str, Sequence[str]], *, until_found: bool = False
) -> dict[str, Structure]:
    """The wanted structures of a library's debug information with those of the wanted fields that they have.

    With `until_found` the search ends when every structure was found once; else all compile units are read and must
    agree.  pyelftools trusts its input: give it files of strangers only in a process that may fail or never end.

    Raises:
        ConflictError: two compile units disagree.
    """
    from elftools.elf.elffile import ELFFile

    file = ELFFile(stream)
    found: dict[str, Structure] = {}
    if not file.has_dwarf_info():
        return found
    dwarf = file.get_dwarf_info(relocate_dwarf_sections=False, follow_links=False)
    for unit in dwarf.iter_CUs():
        for die in unit.get_top_DIE().iter_children():
            if die.tag != "DW_TAG_structure_type" or "DW_AT_byte_size" not in die.attributes:
                continue
            name = _name(die)
            if name not in wanted:
                continue
            offsets = {field: at for field in wanted[name] if (at := _offset(die, field.split("."))) is not None}
            structure = Structure(die.attributes["DW_AT_byte_size"].value, offsets)
            if found.setdefault(name, structure) != structure:
                raise ConflictError(f"two compile units define {name} differently")
        if until_found and found.keys() == set(wanted):
            break
    return found


def _name(die: DIE) -> str:
    """The name, empty where it lies in another file: dwz(1) moves what several libraries share into one."""
    attribute = die.attributes.get("DW_AT_name")
    name = attribute.value if attribute is not None else b""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else ""


def _offset(structure: DIE, path: Sequence[str], depth: int = 0) -> int | None:
    """Byte offset of a (nested) field; members of anonymous structures and unions count as the outer one's."""
    if depth > _MAX_DEPTH:
        return None
    for member in structure.iter_children():
        if member.tag != "DW_TAG_member":
            continue
        name = _name(member)
        at = _member_offset(member)
        if at is None or (name and name != path[0]):
            continue
        if name and len(path) == 1:
            return at
        inner = _structure_behind(member)
        within = _offset(inner, path[1:] if name else path, depth + 1) if inner is not None else None
        if within is not None:
            return at + within
    return None


def _member_offset(member: DIE) -> int | None:
    """Byte offset of a member, `None` for one that is static or does not begin at a byte."""
    attributes = {name: attribute.value for name, attribute in member.attributes.items()}
    if "DW_AT_external" in attributes:
        return None
    at = attributes.get("DW_AT_data_member_location", 0)
    if "DW_AT_data_bit_offset" in attributes:
        bits = attributes["DW_AT_data_bit_offset"]
    elif "DW_AT_bit_offset" in attributes:
        # DWARF 3 counts from the most significant bit of the storage unit.
        unit_bits = 8 * attributes.get("DW_AT_byte_size", 0)
        bits = unit_bits - attributes["DW_AT_bit_offset"] - attributes["DW_AT_bit_size"]
    else:
        bits = 0
    return at + bits // 8 if isinstance(at, int) and bits >= 0 and bits % 8 == 0 else None


def _structure_behind(member: DIE) -> DIE | None:
    kind: DIE = member
    for _ in range(_MAX_DEPTH):
        if "DW_AT_type" not in kind.attributes:
            return None
        kind = kind.get_DIE_from_attribute("DW_AT_type")
        if kind.tag in ("DW_TAG_structure_type", "DW_TAG_union_type"):
            return kind
    return None


def _libraries(path: Path) -> Iterator[IO[bytes]]:
    """The NCCL libraries in a wheel, or the library itself."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if Path(name).name.startswith("libnccl.so"):
                with wheel.open(name) as packed, tempfile.TemporaryFile() as file:
                    while block := packed.read(1 << 22):
                        file.write(block)
                    file.flush()
                    yield file


@dataclass(frozen=True, slots=True)
class _Build:
    """What the table keeps of one library."""

    build_id: str
    nccl_version: str
    machine: str
    structures: Mapping[str, Structure]


class _UnusableError(Exception):
    """A file that no build can be taken from."""


def _builds_in(path: Path) -> Iterator[_Build]:
    """Read the debug information of each library in a file.

    Raises:
        _UnusableError, ConflictError, ElfError, OSError, zipfile.BadZipFile: it cannot be used.
    """
    from elftools.common.exceptions import DWARFError, ELFError, ELFParseError

    for file in _libraries(path):
        with Elf.open(file.fileno()) as elf:
            build_id, machine = elf.build_id, _MACHINES.get(elf.machine, str(elf.machine))
            version = Layouts({}).nccl_version_of(elf)
        if version == "unknown":
            raise _UnusableError("it does not say which version of NCCL it is")
        try:
            structures = structures_in(file, FIELDS)
        except (ELFError, DWARFError, ELFParseError, KeyError, ValueError, IndexError) as error:
            raise _UnusableError(f"its debug information is damaged: {error!r}") from error
        if build_id is None or "ncclComm" not in structures:
            raise _UnusableError("no build-id or no debug information of struct ncclComm")
        yield _Build(build_id, version, machine, structures)


def _with_builds(table: _Table, builds: Iterable[_Build]) -> _Table:
    """The table with these builds, in the table's order."""
    layouts, known = dict(table["layouts"]), dict(table["builds"])
    for build in builds:
        plain = {
            name: {"size_bytes": structure.size_bytes, "offsets": dict(structure.offsets)}
            for name, structure in sorted(build.structures.items())
        }
        # Builds of one version for several machines and CUDA versions mostly share their layout.
        layout = next((key for key, other in layouts.items() if other == plain), None)
        if layout is None:
            version = build.nccl_version
            layout = version if version not in layouts else f"{version} {build.build_id[:8]}"
            layouts[layout] = plain
        known[build.build_id] = {"nccl_version": build.nccl_version, "machine": build.machine, "layout": layout}
    order = sorted(known.items(), key=lambda item: [*map(int, item[1]["nccl_version"].split(".")), item[0]])
    # A build that was read again may have left its former layout unused.
    used = {build["layout"] for build in known.values()}
    return {"layouts": {name: layouts[name] for name in sorted(used)}, "builds": dict(order)}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock against other writers of a table in this folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _renew(path: Path, builds: Iterable[_Build]) -> None:
    """Add builds to the table in one step: who reads it has all of the old one or all of the new one.

    Raises:
        OSError: it cannot be read or written, and is as it was.
        ValueError: it is no table.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with _alone(path.parent):
        table = json.loads(path.read_text()) if path.exists() else {"layouts": {}, "builds": {}}
        try:
            partial.write_text(json.dumps(_with_builds(table, builds), indent=1) + "\n")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Add builds of NCCL to the table of layouts; returns 0, or 2 if a file is unusable: the table is unchanged."""
    parser = argparse.ArgumentParser(description="Add NCCL builds to the table of known layouts.")
    parser.add_argument("files", nargs="+", type=Path, metavar="WHEEL_OR_LIBRARY")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to add to (default: the package's)")
    options = parser.parse_args(arguments)
    builds: list[_Build] = []
    for path in options.files:
        try:
            builds += _builds_in(path)
        except (_UnusableError, OSError, ElfError, ConflictError, zipfile.BadZipFile) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
    try:
        _renew(options.table, builds)
    except OSError as error:
        print(f"{options.table}: the table cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"{options.table}: it is not a table of layouts: {error}", file=sys.stderr)
        return 2
    for build in builds:
        print(f"{build.build_id} NCCL {build.nccl_version} {build.machine}: {len(build.structures)} structures")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
