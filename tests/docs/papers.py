"""The page of the papers' figures: its commands, its pictures, and how they are drawn anew.

    .venv/bin/python -m tests.docs.papers FOLDER    # as root

runs every command of docs/papers.md in the folder (but for recordings that lie there) and copies the pictures that the
page shows to docs/papers/.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PAGE: Final = REPOSITORY / "docs/papers.md"
PICTURES: Final = REPOSITORY / "docs/papers"
MOST_BYTES: Final = 100_000
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PICTURE: Final = re.compile(r"!\[[^\]]+\]\(papers/([\w-]+\.\w+)\)")


def commands(page: Path = PAGE) -> list[list[str]]:
    """Every command of the page, as the words behind `railscope`.

    Raises:
        ValueError: a line of a console block is none of ours.
    """
    found = []
    for language, block in _BLOCK.findall(page.read_text()):
        for line in block.splitlines() if language == "console" else ():
            program, *words = shlex.split(line, comments=True)
            if program != "railscope":
                raise ValueError(f"{page.name}: {line!r} is no command of railscope")
            found.append(words)
    return found


def job_file(page: Path = PAGE) -> str:
    """The file that describes the recorded job, as the page has it."""
    blocks: list[tuple[str, str]] = _BLOCK.findall(page.read_text())
    return next(block for language, block in blocks if language == "toml")


def shown_pictures(page: Path = PAGE) -> list[str]:
    """Names of the pictures that the page shows."""
    return _PICTURE.findall(page.read_text())


def main(folder: Path) -> int:
    """Draw the page's pictures anew; returns 0, or the status of the command that failed."""
    (folder / "job.toml").write_text(job_file())
    railscope = REPOSITORY / ".venv/bin/railscope"
    for words in commands():
        made = words[words.index("--record") + 1] if "--record" in words else None
        if made is not None and (folder / made).is_dir():
            continue
        if "again/" in words and not (folder / "again").is_dir():
            shutil.copytree(folder / "job", folder / "again")
        done = subprocess.run([railscope, *words], cwd=folder, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            return done.returncode
    PICTURES.mkdir(exist_ok=True)
    for name in shown_pictures():
        (drawn,) = [file for file in folder.rglob(name) if file.parent.name in (folder.name, place_of(name))]
        shutil.copy(drawn, PICTURES / name)
    return 0


def place_of(name: str) -> str:
    """The folder into which the page's commands write a picture of a report: whose picture the page shows."""
    if name.startswith("all-to-all"):
        return "pictures-moe"
    return "pictures-infer" if name in ("sizes.svg", "latency.svg", "bandwidth.svg") else "pictures"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
