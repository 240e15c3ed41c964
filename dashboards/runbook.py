"""The parts of runbook pages that speak of causes, made of the table of causes (agent/facts/causes.py).

    python -m railscope.dashboards.runbook      # writes them into runbooks/*.md

The page CollectiveStalled has a table for the person on call and a section for each cause; the page that says most of a
cause has its steps.  Steps are those that `railscope diagnose` gives, with words in capitals where it names a rank, a
process or a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from railscope.agent.facts.causes import CAUSES, Cause, CauseFacts, StepFacts

FOLDER: Final = Path(__file__).parent / "runbooks"
OF_ALL: Final = "CollectiveStalled"
"""The page that has a section on every cause."""
_WRITTEN: Final = "written by `python -m railscope.dashboards.runbook` from agent/facts/causes.py -->"
END: Final = "<!-- end -->"
_NAMES: Final = {
    "rank": "RANK",
    "pid": "PID",
    "gpu": "GPU",
    "device": "DEV",
    "inside": "",
    "host": "HOST",
}


def _of_all() -> str:
    """The table and the sections."""
    rows = [
        f"| [`{cause}`](#{cause}) | {facts.meaning} | {facts.remedy} | {facts.severity} |"
        for cause, facts in CAUSES.items()
    ]
    table = "\n".join(("| Cause | What it means | Remedy | Alert |", "|---|---|---|---|", *rows))
    return "\n\n".join((table, *(_section(cause, facts) for cause, facts in CAUSES.items())))


def _section(cause: Cause, facts: CauseFacts) -> str:
    more = "" if facts.runbook == OF_ALL else f"  More: [{facts.runbook}]({facts.runbook}.md)."
    return "\n\n".join((f"### {cause}", facts.meaning, _steps(facts), f"Remedy: {facts.remedy}.{more}"))


def _steps(facts: CauseFacts) -> str:
    return "\n".join(f"{number}. {_step(step)}" for number, step in enumerate(facts.now, 1))


def _step(step: StepFacts) -> str:
    why = step.why.format(**_NAMES)
    return f"`{step.command.format(**_NAMES)}`: {why}" if step.command else why[:1].upper() + why[1:]


def pages() -> tuple[str, ...]:
    """The pages of runbooks that have a part made from the table of causes."""
    return tuple(dict.fromkeys((OF_ALL, *(facts.runbook for facts in CAUSES.values()))))


def replace_parts(name: str, page: str) -> str:
    """The text of the runbook of this name with its generated parts as they should be.

    Raises:
        ValueError: the page does not say where they stand.
    """
    parts = {"causes": _of_all()} if name == OF_ALL else {}
    parts |= {cause: _steps(facts) for cause, facts in CAUSES.items() if facts.runbook == name != OF_ALL}
    for what, text in parts.items():
        before, begin, rest = page.partition(f"<!-- {what}: {_WRITTEN}\n")
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{name}.md has no part '<!-- {what}: {_WRITTEN} … {END}'")
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    for name in pages():
        file = FOLDER / f"{name}.md"
        file.write_text(replace_parts(name, file.read_text()))
