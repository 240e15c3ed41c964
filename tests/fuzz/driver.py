"""Targets under libFuzzer, each in a process of its own:

    python -m tests.fuzz.driver TARGET[,TARGET …] FOLDER [libFuzzer's options]

Atheris writes counters into the bytecode of railscope's modules as they are imported, so that libFuzzer keeps the
inputs that reach something new.  The import takes longer than a short run, so all targets are forks of one process.
libFuzzer ends a fork by itself: with a status other than 0, and the input in a file, where the target fails.  Below
FOLDER/TARGET lie its words (`log`), what failed (`failed-…`) and new inputs (`new`); standard output has a line of name
and status for each target.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["railscope"]):
    from tests.fuzz.targets import CORPUS, TARGETS

MOST_SECONDS_A_FILE: Final = 10
MOST_MIB: Final = 1024
LARGEST_BYTES: Final = 1 << 16


def main(arguments: Sequence[str]) -> None:
    """Fuzz the targets one after the other."""
    names, folder, *options = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in names.split(","):
        new = Path(folder, name, "new")
        new.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            _fuzz(name, new.parent, options)
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _fuzz(name: str, folder: Path, options: Sequence[str]) -> None:
    with open(folder / "log", "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    limits = [f"-timeout={MOST_SECONDS_A_FILE}", f"-rss_limit_mb={MOST_MIB}", f"-max_len={LARGEST_BYTES}"]
    outputs = [f"-artifact_prefix={folder}/failed-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, *outputs, *options, str(folder / "new"), str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
