"""What an agent holds at a moment, and whether it holds more and more."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from tests.fabric.agent_process import AgentProcess

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """What the agent and its inspection processes hold."""

    memory_mib: float
    """Anonymous memory of all its processes, what forks share counted once: files that others map too would blur it."""
    descriptors: int
    """But those of deleted files."""
    deleted_files: int
    """Descriptors of libraries that jobs took away: an answer about one that came late is kept for half a minute."""
    bpf_maps: int
    links: int
    """Of BPF programs and perf events: what is attached."""
    mappings: int
    """Lines of /proc/PID/maps of the agent."""
    threads: int
    processes: int
    series: int
    """Lines of its exposition."""


ALLOWED_GROWTH: Final = Held(
    memory_mib=10.0,
    descriptors=24,
    deleted_files=16,
    bpf_maps=0,
    links=0,
    mappings=24,
    threads=2,
    processes=1,
    series=120,
)
"""From the first third of a run's rests to the last one: what varies from one moment to the next, and no more."""
SLOW: Final = ("deleted_files", "series")
"""What the agent keeps for up to five minutes: gone ranks, rails of gone namespaces, late answers."""
SETTLED_SECONDS: Final = 1800
"""A run of this length begins its second third after that; a shorter one says nothing of what is slow."""


def held(agent: AgentProcess) -> Held:
    """Measure it now.

    Raises:
        OSError: it has ended.
    """
    own = Path("/proc", str(agent.process.pid))
    processes = [own.name, *_descendants(own.name)]
    kinds = Counter(_kind(file) for file in (own / "fd").iterdir())
    deleted = sum(number for kind, number in kinds.items() if kind.endswith(" (deleted)"))
    return Held(
        memory_mib=round(sum(map(_anonymous_bytes, processes)) / MIB, 1),
        descriptors=kinds.total() - deleted,
        deleted_files=deleted,
        bpf_maps=kinds["anon_inode:bpf-map"],
        links=kinds["anon_inode:bpf_link"] + kinds["anon_inode:[perf_event]"],
        mappings=len((own / "maps").read_text().splitlines()),
        threads=len(list((own / "task").iterdir())),
        processes=len(processes),
        series=sum(not line.startswith("#") for line in agent.text().splitlines()),
    )


def growth(rests: Sequence[Held]) -> dict[str, float]:
    """Of each quantity, from the first third of the rests to the last one, by medians; the first rest is left out, for
    what the agent makes once is made in the first round."""
    third = max(1, (len(rests) - 1) // 3)
    early, late = rests[1 : 1 + third], rests[-third:]
    return {one.name: _median(late, one.name) - _median(early, one.name) for one in fields(Held)}


def _median(rests: Sequence[Held], name: str) -> float:
    values: list[float] = [getattr(one, name) for one in rests]
    return statistics.median(values)


def grown(rests: Sequence[Held], seconds: float) -> dict[str, float]:
    """Quantities that grew by more than they may in a run of this length."""
    return {
        name: more
        for name, more in growth(rests).items()
        if more > getattr(ALLOWED_GROWTH, name) and (seconds >= SETTLED_SECONDS or name not in SLOW)
    }


def table(rests: Sequence[Held]) -> str:
    """A row for each rest, and one for the growth between the first and the last third of them."""
    names = [one.name for one in fields(Held)]
    rows = [["rest", *names]]
    rows += [[str(number), *(f"{getattr(one, name):g}" for name in names)] for number, one in enumerate(rests, 1)]
    rows.append(["growth", *(f"{more:+g}" for more in growth(rests).values())])
    rows.append(["allowed", *(f"{getattr(ALLOWED_GROWTH, name):+g}" for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def _kind(file: Path) -> str:
    try:
        return str(file.readlink())
    except FileNotFoundError:
        return "closed meanwhile"


def _anonymous_bytes(pid: str) -> int:
    try:
        lines = Path("/proc", pid, "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))


def _descendants(pid: str) -> list[str]:
    found: list[str] = []
    for file in Path("/proc", pid, "task").glob("*/children"):
        for child in file.read_text().split():
            found += [child, *_descendants(child)]
    return found
