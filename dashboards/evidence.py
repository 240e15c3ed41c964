"""The recording rule that grades causes of a stall, made of the one table of causes (agent/facts/causes.py).

    python -m railscope.dashboards.evidence      # writes it into rules/railscope-recording.yml

An agent's newer cause that the table lacks has the least evidence, and is shown under its own name.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import CAUSES, Cause, Tier
from railscope.dashboards import recorded
from railscope.dashboards.rules_files import RECORDING, SHIPPED

RULE: Final = recorded.STALL_EVIDENCE.name
FILE: Final = SHIPPED / RECORDING
"""Where the rule stands."""
_BODY: Final = re.compile(rf"(?<=- record: {re.escape(RULE)}\n        expr: \|\n)(?: {{10}}.*\n)+")


class Ground(Enum):
    """How a cause is known."""

    SAID = "a host says it"
    NAMED = "a host says it and names the rank"
    SEQUENCE = "the sequences of all ranks show it"


def ranked_causes() -> list[tuple[int, Cause, Ground]]:
    """Evidence for each cause of a stall that hosts report, the strongest first.

    A host that names no rank says of `rank_behind` only that its rank waits, as any does: nearly nothing.
    """
    graded = [
        (facts.tier, cause, Ground.NAMED if cause is Cause.RANK_BEHIND else Ground.SAID)
        for cause, facts in CAUSES.items()
        if facts.by_host
    ]
    graded.append((Tier.SEQUENCE, Cause.RANK_BEHIND, Ground.SEQUENCE))
    graded.append((Tier.UNSEEN, Cause.RANK_BEHIND, Ground.SAID))
    ordered = sorted(graded, key=lambda one: one[0])  # stable: within a tier as the table has them
    return [(len(ordered) - place, cause, ground) for place, (_, cause, ground) in enumerate(ordered)]


def render_expression() -> str:
    """The expression of the recording rule that grades causes, indented as in the file."""
    return "          " + "\n          or ".join(_term(*one) for one in ranked_causes()) + "\n"


def _term(grade: int, cause: Cause, ground: Ground) -> str:
    if ground is Ground.SEQUENCE:
        # The host of a rank whose GPU does not progress knows better why it is behind.
        gpu = catalogue.COMM_STALLED.where(f'cause="{Cause.GPU_NOT_PROGRESSING}"')
        behind = f"{recorded.OPERATIONS_BEHIND_STALLED} unless on (cluster, job, instance, comm, rank) {gpu}"
        return f'{grade:2} * label_replace(max by (cluster, comm) (({behind}) > bool 0), "cause", "{cause}", "", "")'
    if ground is Ground.NAMED:
        named = catalogue.COMM_STALL_INFO.where(f'cause="{cause}",blamed_rank!=""')
        return f"{grade:2} * max by (cluster, comm, cause) ({named})"
    if cause is Cause.UNKNOWN:
        known = "|".join(one for one in Cause if one is not Cause.UNKNOWN)
        return f'{grade:2} * max by (cluster, comm, cause) ({catalogue.COMM_STALLED}{{cause!~"{known}"}})'
    return f'{grade:2} * max by (cluster, comm, cause) ({catalogue.COMM_STALLED}{{cause="{cause}"}})'


def replace_rule(text: str) -> str:
    """The rule file's text with the recording rule that grades causes as it should be.

    Raises:
        ValueError: the file has no such rule.
    """
    if not _BODY.search(text):
        raise ValueError(f"no expression of {RULE} was found")
    return _BODY.sub(lambda _: render_expression(), text)


if __name__ == "__main__":
    FILE.write_text(replace_rule(FILE.read_text()))
