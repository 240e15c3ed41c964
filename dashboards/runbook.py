"""The part of the runbook page CollectiveStalled that speaks of causes, made of the table of causes.

    python -m railscope.dashboards.runbook      # writes it into runbooks/CollectiveStalled.md

A table for whoever was woken, then a section for each cause: its steps as `railscope diagnose` gives them, with words
in capitals where `diagnose` names a rank, a process or a device.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from railscope.agent.facts.causes import CAUSES, Cause, CauseFacts, StepFacts

FOLDER: Final = Path(__file__).parent / "runbooks"
FILE: Final = FOLDER / "CollectiveStalled.md"
BEGIN: Final = "<!-- causes: written by `python -m railscope.dashboards.runbook` from agent/facts/causes.py -->"
END: Final = "<!-- end of causes -->"
_NAMES: Final = {
    "rank": "RANK",
    "pid": "PID",
    "gpu": "GPU",
    "device": "DEV",
    "inside": "",
    "host": "HOST",
}
_BODY: Final = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)


def text() -> str:
    """The table and the sections."""
    rows = [
        f"| [`{cause}`](#{cause}) | {facts.meaning} | {facts.remedy} | {facts.severity} |"
        for cause, facts in CAUSES.items()
    ]
    table = "\n".join(("| Cause | What it means | Remedy | Alert |", "|---|---|---|---|", *rows))
    return "\n" + "\n\n".join((table, *(_section(cause, facts) for cause, facts in CAUSES.items()))) + "\n\n"


def _section(cause: Cause, facts: CauseFacts) -> str:
    steps = "\n".join(f"{number}. {_step(step)}" for number, step in enumerate(facts.now, 1))
    more = "" if facts.runbook == FILE.stem else f"  More: [{facts.runbook}]({facts.runbook}.md)."
    return "\n\n".join((f"### {cause}", facts.meaning, steps, f"Remedy: {facts.remedy}.{more}"))


def _step(step: StepFacts) -> str:
    why = step.why.format(**_NAMES)
    return f"`{step.command.format(**_NAMES)}`: {why}" if step.command else why[:1].upper() + why[1:]


def written(page: str) -> str:
    """The page with the part as it should be.

    Raises:
        ValueError: the page does not say where it stands.
    """
    if not _BODY.search(page):
        raise ValueError(f"{FILE.name} has no lines {BEGIN!r} and {END!r}")
    return _BODY.sub(lambda _: text(), page)


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
