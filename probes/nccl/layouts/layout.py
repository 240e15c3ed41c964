"""Finds the field offsets of NCCL's structures for the build that a process has mapped.

Struct offsets move with every NCCL version, and reading a wrong one would invent an identity.  They come, in this
order, from the table of known builds (layouts.json, keyed by build-id and made from the debug information that the
published libraries carry), from the library's own debug information when that is small, and from the machine code of
the exported accessors.  When none answers the layout is `None`, and identity stays unknown.

The last two ways parse what a stranger wrote with large libraries (pyelftools, capstone).  They run in a helper process
with limits (probes/nccl/layouts/unknown_build.py), which also keeps those libraries out of the daemon's memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from railscope.probes.installation import remedy_for_missing_file
from railscope.probes.libraries.elf import Elf

TABLE: Final = Path(__file__).with_name("layouts.json")
HELPER_SECONDS: Final = 10.0
"""The agent does nothing else meanwhile."""
MAX_DEBUG_BYTES: Final = 1 << 20
"""More debug information than this, about a second's work, is not read; the published libraries carry 70 MB."""
ACCESSORS: Final = ("ncclCommUserRank", "ncclCommCount", "ncclCommCuDevice")

_VERSION: Final = re.compile(rb"NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})")
_log = logging.getLogger(__name__)

Source = Literal["build-id", "dwarf", "accessors"]


class _HelperError(Exception):
    """The helper process did not come to an answer: another time it may."""


class LayoutTableError(Exception):
    """The table of known builds cannot be used: the installation is damaged."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Size and field offsets of one structure; nested fields have dotted names (`config.commName`)."""

    size_bytes: int
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CommLayout:
    """Byte offsets in `struct ncclComm`; `None` where the source does not tell."""

    source: Source
    nccl_version: str
    rank: int
    nranks: int
    cuda_dev: int
    comm_hash: int | None = None
    """Without it a communicator's ends have ranks, but no name that others would know it by."""
    start_magic: int | None = None
    """None: it has no marks (up to 2.20), and is believed where all that says where a rank stands fits together."""
    nvml_dev: int | None = None
    bus_id: int | None = None
    node: int | None = None
    n_nodes: int | None = None
    local_rank: int | None = None
    local_ranks: int | None = None
    op_count: int | None = None
    async_result: int | None = None
    end_magic: int | None = None
    """Without it only the start of a communicator can be checked, not that its layout has the right length."""


_OPTIONAL_FIELDS: Final = {
    "comm_hash": "commHash",
    "start_magic": "startMagic",
    "nvml_dev": "nvmlDev",
    "bus_id": "busId",
    "node": "node",
    "n_nodes": "nNodes",
    "local_rank": "localRank",
    "local_ranks": "localRanks",
    "op_count": "opCount",
    "async_result": "asyncResult",
    "end_magic": "endMagic",
}
COMM_FIELDS: Final = ("rank", "nRanks", "cudaDev", *_OPTIONAL_FIELDS.values())
"""The fields of `struct ncclComm` that a `CommLayout` is made of, by NCCL's names."""


@dataclass(frozen=True, slots=True)
class _Build:
    nccl_version: str
    structures: Mapping[str, Structure]


class Layouts:
    """Answers for libraries, known and unknown.  Unknown builds are remembered by build-id, also that nothing tells."""

    def __init__(self, builds: Mapping[str, _Build]) -> None:
        self._builds = builds
        self._derived: dict[str, CommLayout | None] = {}

    @classmethod
    def load(cls, table: Path = TABLE) -> Self:
        """Read the table of known builds.

        Raises:
            LayoutTableError: it is missing or damaged.
        """
        try:
            content = json.loads(table.read_bytes())
            layouts = {
                name: {struct: Structure(int(s["size_bytes"]), s["offsets"]) for struct, s in structures.items()}
                for name, structures in content["layouts"].items()
            }
            return cls(
                {
                    build_id: _Build(str(build["nccl_version"]), layouts[build["layout"]])
                    for build_id, build in content["builds"].items()
                }
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LayoutTableError(
                f"{table} is missing or damaged ({error}): {remedy_for_missing_file(compiled=False)}"
            ) from None

    def layout_of(self, elf: Elf) -> CommLayout | None:
        """The layout of `struct ncclComm` in this library, `None` when nothing trustworthy tells.

        Takes milliseconds for a known build, and for the first library of an unknown one as long as Python takes to
        start and to import a disassembler; `HELPER_SECONDS` at worst.

        Raises:
            ElfError: the file is broken.
        """
        build_id = elf.build_id
        structures = self.structures(build_id)
        if "ncclComm" in structures:
            return comm_layout(structures["ncclComm"], "build-id", self.nccl_version_of(elf))
        if build_id is not None and build_id in self._derived:
            return self._derived[build_id]
        try:
            layout = self._derive(elf)
        except _HelperError as error:
            _log.warning("layout of an unknown NCCL build: %s", error)
            return None
        if build_id is not None:
            self._derived[build_id] = layout
        return layout

    def nccl_version_of(self, elf: Elf) -> str:
        """The version such as `2.27.7`: from the table, else from the library's own version string, else `unknown`.

        Raises:
            ElfError: the file is broken.
        """
        build = self._builds.get(elf.build_id or "")
        if build is not None:
            return build.nccl_version
        match = elf.search(_VERSION)
        return match[1].decode() if match is not None else "unknown"

    def structures(self, build_id: str | None) -> Mapping[str, Structure]:
        """All structures that the table has of a build; empty for an unknown one."""
        build = self._builds.get(build_id or "")
        return build.structures if build is not None else {}

    def _derive(self, elf: Elf) -> CommLayout | None:
        debug = [section.size_bytes for section in elf.sections if section.name.startswith((".debug_", ".zdebug_"))]
        if debug and sum(debug) <= MAX_DEBUG_BYTES:
            layout = self._ask("dwarf", elf, self.nccl_version_of(elf))
            if layout is not None:
                return layout
        if elf.symbols(ACCESSORS).keys() != set(ACCESSORS):
            return None
        return self._ask("accessors", elf, self.nccl_version_of(elf))

    def _ask(self, source: Source, elf: Elf, nccl_version: str) -> CommLayout | None:
        """Let the helper process look.

        Raises:
            _HelperError: it could not be started or did not end in time.
        """
        command = [
            sys.executable,
            "-m",
            "railscope.probes.nccl.layouts.unknown_build",
            source,
            str(elf.fileno()),
            nccl_version,
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        try:
            result = subprocess.run(
                command,
                pass_fds=(elf.fileno(),),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=HELPER_SECONDS,
                env=environment,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _HelperError(f"the helper process failed: {error}") from None
        if result.returncode != 0:
            lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
            _log.warning("layout of an unknown NCCL build: %s", lines[-1] if lines else "the helper process died")
            return None
        return layout_from_answer(result.stdout, nccl_version)


def comm_layout(structure: Structure, source: Source, nccl_version: str) -> CommLayout | None:
    """The layout that `struct ncclComm` gives, `None` when a field that identity needs is missing or out of range."""
    offsets = structure.offsets
    rank, nranks, cuda_dev = (offsets.get(name) for name in ("rank", "nRanks", "cudaDev"))
    if rank is None or nranks is None or cuda_dev is None:
        return None
    if source != "accessors" and "commHash" not in offsets:
        return None
    if any(not 0 <= offset < structure.size_bytes for name, offset in offsets.items() if name in COMM_FIELDS):
        return None
    return CommLayout(
        source=source,
        nccl_version=nccl_version,
        rank=rank,
        nranks=nranks,
        cuda_dev=cuda_dev,
        **{field: offsets.get(name) for field, name in _OPTIONAL_FIELDS.items()},
    )


def layout_from_answer(answer: bytes, nccl_version: str) -> CommLayout | None:
    """The layout that the helper process found: JSON with `source`, `size_bytes` and `offsets`, or `null`."""
    try:
        found: Any = json.loads(answer)
        if found is None:
            return None
        source, size_bytes = found["source"], int(found["size_bytes"])
        offsets = {str(name): int(offset) for name, offset in found["offsets"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if source not in ("dwarf", "accessors"):
        return None
    return comm_layout(Structure(size_bytes, offsets), source, nccl_version)
