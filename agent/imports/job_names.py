"""Finds which communicators of a dataset belong to the job that is being imported.

What NCCL calls a communicator is one in a billion.  Names that importers make, of a framework's groups or of sizes, are
the same in every job of that shape.  Hosts of one job may be imported one by one, so equal names may be one
communicator; they are none where a rank would be in it twice, or where both were seen, at other times.  Then the names
of this import get a word of their own behind them: `pg-3-…@1f2e3d4c`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from railscope.agent.dataset.files import parse_part_name, table_files
from railscope.agent.dataset.writer import read_part

_TAGGED: Final = re.compile(r"(?P<name>.*)@(?P<tag>[0-9a-f]{8})", re.DOTALL)
_OF_NCCL: Final = re.compile(r"[0-9a-f]{16}(?:\..*)?", re.DOTALL)
_APART_NS: Final = 60_000_000_000
"""Clocks of hosts, and moments in which they were traced, may be so far from each other."""

Window = tuple[int, int]
"""First and last moment, ns."""
End = tuple[str, int | None]
"""Name and rank of one end of a communicator."""


@dataclass(slots=True)
class _Job:
    """Communicators whose names have the same word behind them."""

    ends: set[End] = field(default_factory=set)
    windows: list[Window] = field(default_factory=list)

    def has_any(self, ends: Collection[End]) -> bool:
        """Whether it has some of these communicators."""
        return bool({name for name, _ in self.ends} & {name for name, _ in ends})

    def accepts(self, ends: Collection[End], window: Window | None) -> bool:
        """Whether these may be more ranks of it."""
        ranks = {name for name, rank in (*self.ends, *ends) if rank is None}
        if self.ends & set(ends) or ranks & {name for name, _ in self.ends} & {name for name, _ in ends}:
            return False
        return window is None or not self.windows or any(_near(window, one) for one in self.windows)


def find_tag(
    folder: Path, source: str, ends: Iterable[End], window: Window | None, not_of: Collection[int]
) -> tuple[str | None, bool]:
    """The word behind the names of an import's communicators, empty: none, None: a new one; and whether it was chosen.

    Of jobs that ran at the same time, each of which may lack these ranks, it is undecidable whose they are: of several
    that fit the first one, in the order of their words, is chosen.

    Args:
        source: the format.
        ends: those of the import.
        window: when they were seen; None: not known.
        not_of: numbers of recordings that this import replaces.

    Raises:
        OSError: the dataset cannot be read.
    """
    own = {end for end in ends if needs_tag(end[0])}
    jobs = _jobs(folder, source, not_of)
    fitting = [tag for tag, job in sorted(jobs.items()) if job.has_any(own) and job.accepts(own, window)]
    if fitting:
        return fitting[0], len(fitting) > 1
    return (None if "" in jobs and jobs[""].has_any(own) else ""), False


def needs_tag(name: str) -> bool:
    """Whether a communicator's name is one that an importer made, which another import may use too."""
    return _OF_NCCL.fullmatch(name) is None


def with_tag(name: str, tag: str) -> str:
    """The name of an imported communicator with a word behind it, where it needs one."""
    return f"{name}@{tag}" if tag and needs_tag(name) else name


def _jobs(folder: Path, source: str, not_of: Collection[int]) -> dict[str, _Job]:
    windows: dict[int, Window | None] = {}
    for file in _files(folder, "recordings", not_of):
        for row in read_part(file, "recordings").to_pylist():
            if row["source"] == source:
                timed = row["times_known"] is not False
                windows[row["recording"]] = (row["began_ns"], row["ended_ns"]) if timed else None
    jobs: dict[str, _Job] = {}
    for file in _files(folder, "communicators", not_of):
        rows = read_part(file, "communicators").select(["recording", "comm", "rank"]).to_pylist()
        for row in rows:
            if row["recording"] not in windows or not row["comm"] or not needs_tag(row["comm"]):
                continue
            named = _TAGGED.fullmatch(row["comm"])
            name, tag = (named["name"], named["tag"]) if named is not None else (row["comm"], "")
            job = jobs.setdefault(tag, _Job())
            job.ends.add((name, row["rank"]))
            window = windows[row["recording"]]
            if window is not None and window not in job.windows:
                job.windows.append(window)
    return jobs


def _files(folder: Path, table: str, not_of: Collection[int]) -> Sequence[Path]:
    files = table_files(folder, table)
    return [file for file in files if (part := parse_part_name(file)) is not None and part.recording not in not_of]


def _near(one: Window, other: Window) -> bool:
    return one[0] <= other[1] + _APART_NS and other[0] <= one[1] + _APART_NS
