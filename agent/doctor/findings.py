"""The findings of `railscope doctor`, its reports on libraries and rails, and how to get rights that are missing.

A check that cannot be made is itself a finding: whatever goes wrong while one looks at a strange host, the others
still speak.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from railscope.probes.libraries.elf import ElfError
from railscope.probes.libraries.mmap_events import MmapEventsError
from railscope.probes.loading.libbpf import LoadError
from railscope.probes.nccl.layouts.layout import LayoutTableError
from railscope.probes.processes.namespaces import NamespaceError
from railscope.probes.processes.processes import MappedFileError

Status = Literal["ok", "note", "problem"]

CHECK_FAILURES: Final = (
    OSError,
    ValueError,
    LoadError,
    ElfError,
    NamespaceError,
    MappedFileError,
    MmapEventsError,
    LayoutTableError,
)
"""What a check may raise; `KernelRefusal` is an OSError."""

_AS_ROOT: Final = "sudo railscope doctor"
_AS_ROOT_ALREADY: Final = "run railscope outside of this container or sandbox, or privileged in it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, the result, and the remedy."""

    check: str
    status: Status
    what: str
    remedy: str = ""
    """A command or a step; empty where nothing has to be done."""


@dataclass(frozen=True, slots=True)
class LibraryReport:
    """One NCCL library that running processes have mapped."""

    path: str
    nccl_version: str
    layout_source: str
    """Where the offsets in `struct ncclComm` come from; `unknown`: communicators have no identity."""
    through: str
    """`ncclEnqueueCheck` or `exported functions`."""
    probe_points: int
    refused_functions: tuple[str, ...]
    """Not probed, because every call would be single-stepped: their calls are not counted."""
    processes: int
    attach: Literal["accepted", "refused", "not tried"]
    """Whether the kernel takes the probes on this file; tried without touching the processes."""
    attach_refusal: str
    highest_level: str
    """How much can be observed beyond calls: `counts` (nothing), `completion`, `rails`, `all`."""
    watchable: bool
    """Whether it can be observed without a probe on its calls (level `watch`)."""
    completion_unseen: str
    """Why nothing tells when operations are complete, whatever the level; empty where something does."""
    failover: str
    """Whether NCCL's own failover is seen: `seen`, or why not."""


@dataclass(frozen=True, slots=True)
class RailReport:
    """One network device, and whether it is a rail."""

    netns: int
    """Inode of its network namespace."""
    own_netns: bool
    device: str
    rail: str | None
    """The rail's number; None: not a rail."""
    reason: str
    kind: str
    up: bool | None
    carrier: bool | None
    speed_bytes_per_second: int | None


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process that has NCCL mapped; None and empty: not known."""

    pid: int
    user: str
    program: str
    """Without arguments."""
    command_line: str | None
    """With them, cut; None: not asked for (--command-lines)."""
    cpu_ratio: float | None
    """Processors that it kept busy over half a second, 1.0: one."""
    resident_bytes: int | None
    threads: int | None
    start_realtime_ns: int | None


def run_guarded(check: str, look: Callable[[], Sequence[Finding]]) -> list[Finding]:
    """The findings of one check of the doctor, or the one that it could not be made."""
    try:
        return list(look())
    except CHECK_FAILURES as error:
        what = f"cannot be checked: {one_line(error)}"
        return [Finding(check, "problem", what, f"{privilege_remedy()}; if that does not help, report this line")]


def privilege_remedy() -> str:
    """How to get what the kernel refuses: root that is refused lives in a container or a sandbox."""
    return _AS_ROOT if os.geteuid() != 0 else _AS_ROOT_ALREADY


def capability_remedy(name: str) -> str:
    """How to get one capability."""
    in_a_pod = f"capabilities: {{add: [{name.removeprefix('CAP_')}]}}"
    return f"{privilege_remedy()}; in a systemd unit: AmbientCapabilities={name}; in a pod: {in_a_pod}"


def one_line(error: BaseException) -> str:
    """The message of an exception on one line of the doctor's, without the number that OSError puts before it."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__
