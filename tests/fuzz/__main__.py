"""Fuzzes all targets, or those named: `python -m tests.fuzz [--seconds N] [--keep] [TARGET …]`.

What fails is shown with its file, which lies in .fuzz/TARGET: mend the reader and keep the file in
tests/fuzz/corpus/TARGET, where `make test` reads it again.  `--keep` adds to the corpus the smallest inputs that reach
something new, as far as they are small enough to be kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.targets import CORPUS, TARGETS

FOUND: Final = Path(".fuzz")
LARGEST_KEPT_BYTES: Final = 4 << 10
MOST_KEPT: Final = 24
"""Files of one target in the repository."""
_LAST_LINES: Final = 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one target."""

    name: str
    status: int
    runs: int
    coverage: int
    """Counters that some input has reached."""
    output: str


def can_fuzz() -> bool:
    """Whether Atheris is installed; it has no build for some Pythons and machines."""
    return importlib.util.find_spec("atheris") is not None


def fuzz(names: Sequence[str], seconds: int, found: Path, seed: int = 0, runs: int = -1) -> list[Outcome]:
    """Fuzz targets from their corpus, each for so long and at most so often; a `seed` other than 0 repeats a run."""
    statuses = _drive(names, found, f"-max_total_time={seconds}", f"-seed={seed}", f"-runs={runs}")
    return [_outcome(name, statuses.get(name, 1), (found / name / "log").read_text(errors="replace")) for name in names]


def keep(name: str, found: Path) -> None:
    """Add to the corpus the smallest inputs that reached something which it does not."""
    room = MOST_KEPT - len(list((CORPUS / name).iterdir()))
    for file in sorted((found / name / "new").iterdir(), key=lambda one: one.stat().st_size)[: max(0, room)]:
        if file.stat().st_size <= LARGEST_KEPT_BYTES:
            shutil.copy(file, CORPUS / name / file.name[:12])


def _drive(names: Sequence[str], found: Path, *options: str) -> dict[str, int]:
    """The status of each target."""
    # Hashes of strings must not differ from run to run, or an input reaches something else the next time.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.driver", ",".join(names), str(found), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"the driver failed:\n{done.stderr}")
    return {name: int(status) for name, status in (line.split() for line in done.stdout.splitlines())}


def _outcome(name: str, status: int, log: str) -> Outcome:
    runs = coverage = 0
    for line in log.splitlines():
        words = line.split()
        if "cov:" in words:
            coverage = int(words[words.index("cov:") + 1])
        elif line.startswith("stat::number_of_executed_units:"):
            runs = int(words[-1])
    return Outcome(name, status, runs, coverage, log)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a reader failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default %(default)s)")
    parser.add_argument("--keep", action="store_true", help="add what reaches something new to the corpus")
    given = parser.parse_args(arguments)
    if not can_fuzz():
        print("atheris is missing, which has no build for this Python: use CPython 3.11 to 3.13 on x86-64")
        return 2
    failed = False
    print(f"{'target':<12}{'inputs':>10}{'reached':>10}  outcome")
    for name in given.targets or TARGETS:
        (outcome,) = fuzz([name], given.seconds, FOUND)
        print(f"{name:<12}{outcome.runs:>10,}{outcome.coverage:>10,}  {'failed' if outcome.status else 'fine'}")
        if outcome.status:
            failed = True
            print("\n".join(outcome.output.splitlines()[-_LAST_LINES:]))
        elif given.keep:
            keep(name, FOUND)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
