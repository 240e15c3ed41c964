"""Keep a run's results, and write docs/gpu.md from all that are kept.

.venv/bin/python -m tests.gpu.page [gpu-results/results.json]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.gpu.table import RESULTS, Results, as_text, changes, read_results

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
_HEAD: Final = """# On a real GPU

`tests/gpu/run` runs railscope beside two ranks of PyTorch on one GPU, in at most four minutes, and checks counts,
identity, durations, CUDA graphs, cost, NVML and stalls against what the job, CUDA's events, NCCL's log and nvidia-smi
say. [CONTRIBUTING.md](../CONTRIBUTING.md#on-a-machine-with-a-gpu) has the command. `tests/gpu/run --double` rehearses
all of it without a GPU, and `make test` runs the short form of that.

This page is made from `tests/gpu/results` by `python -m tests.gpu.page`.
"""
_NONE: Final = """
**No GPU has been met yet**: there are no results. What only a GPU can show, such as the kernel's own time stamps or the
driver's library, is in no figure of this project.
"""


def page(kept: list[Results]) -> str:
    """The page, newest results first."""
    if not kept:
        return _HEAD + _NONE
    ordered = sorted(kept, key=lambda one: one.date, reverse=True)
    return _HEAD + "".join(_section(one, _before(one, ordered)) for one in ordered)


def keep(file: Path, folder: Path = RESULTS) -> Path:
    """Copy results to where they are kept; returns the new path.

    Raises:
        ValueError: they are of a rehearsal, or no results at all.
    """
    results = read_results(file)
    if results.simulated:
        raise ValueError(f"{file} is of a rehearsal: only what a GPU showed is kept")
    kept = folder / results.file_name
    kept.write_text(results.to_json())
    return kept


def all_kept(folder: Path = RESULTS) -> list[Results]:
    """Everything in tests/gpu/results."""
    return [read_results(file) for file in sorted(folder.glob("*.json"))]


def _before(one: Results, ordered: list[Results]) -> Results | None:
    return next((other for other in ordered if other.device == one.device and other.date < one.date), None)


def _section(one: Results, before: Results | None) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in one.machine.items())
    changed = "".join(f"* {line}\n" for line in changes(one.rows, before))
    since = f"\nSince {before.date[:10]}:\n\n{changed or '* nothing'}\n" if before else ""
    return (
        f"\n## {one.device}, {one.date[:10]}\n\n{machine}; revision {one.revision}; {one.seconds:.0f} s.\n{since}\n"
        f"```text\n{as_text(one.rows)}```\n"
    )


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            print(keep(Path(name)))
        PAGE.write_text(page(all_kept()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"tests.gpu.page: {error}")
