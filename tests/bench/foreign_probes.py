"""Who else has probes attached on this machine: in the bench's floor they would hide what its own probes cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.bench.target import BenchError

PROCFS: Final = Path("/proc")
_PROBE_LINK: Final = re.compile(r"^link_type:\s+u(ret)?probe_multi$", re.MULTILINE)


def require_no_probes(procfs: Path = PROCFS) -> None:
    """Raises BenchError while another process holds links of user-space probes (kernel: Documentation/bpf, fdinfo)."""
    holders = sorted(int(one.name) for one in procfs.iterdir() if one.name.isdecimal() and _holds_probes(one))
    if holders:
        named = ", ".join(f"{_name(procfs, pid)} (pid {pid})" for pid in holders)
        raise BenchError(f"{named} has probes attached, which the bench's floor would include: end it first")


def _holds_probes(process: Path) -> bool:
    try:
        descriptors = list((process / "fdinfo").iterdir())
    except OSError:
        return False
    return any(_is_probe(one) for one in descriptors)


def _is_probe(descriptor: Path) -> bool:
    try:
        return _PROBE_LINK.search(descriptor.read_text()) is not None
    except OSError:
        return False


def _name(procfs: Path, pid: int) -> str:
    try:
        return (procfs / str(pid) / "comm").read_text().strip()
    except OSError:
        return "a process"
