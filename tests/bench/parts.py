"""Runs the bench part by part, so that what one part cannot measure takes nothing from what the others did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from railscope.probes.loading.libbpf import LoadError
from railscope.testbed.hosts import TestbedError
from railscope.testbed.nccl.build import BuildError
from railscope.testbed.nccl.library import LibraryMissing
from tests.bench.results import Line, Omission
from tests.bench.target import BenchError, Built


@dataclass(frozen=True, slots=True)
class Part:
    """Something to measure."""

    measure: Callable[[Built, int], list[Line]]
    """Takes the number of rounds."""
    rounds: int
    """The usual number of them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What parts measured."""

    lines: tuple[Line, ...]
    failed: Mapping[str, str]
    """Why a part measured nothing, by its name; it is among the lines too."""

    def status(self, errors: TextIO) -> int:
        """The exit status; says last, where it is seen, which parts failed."""
        for name, why in self.failed.items():
            print(f"{name} failed, and has no figures in the results: {why}", file=errors)
        return 1 if self.failed else 0


def measure_parts(
    parts: Mapping[str, Part],
    built: Built,
    rounds: int | None = None,
    keep: Callable[[Sequence[Line]], None] = lambda _lines: None,
) -> Measured:
    """Measure each part in turn, also after one that failed; `rounds` None: as many as is usual for each.

    `keep` is given all lines so far after each part.
    """
    lines: list[Line] = []
    failed: dict[str, str] = {}
    for name, part in parts.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            lines += part.measure(built, rounds or part.rounds)
        except (BenchError, TestbedError, LibraryMissing, BuildError, LoadError) as error:
            failed[name] = str(error)
            lines.append(Omission(name, "all of it", str(error)))
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        keep(lines)
    return Measured(tuple(lines), failed)
