"""The table of causes is whole, and whatever speaks of a cause says what the table says."""

from __future__ import annotations

import ast
import re
from string import Formatter
from typing import Final

import pytest

from railscope.agent.cluster.fleet.facts import Rail, Rank
from railscope.agent.cluster.verdict.advice import Period, next_steps, past_steps
from railscope.agent.cluster.verdict.culprits import Culprit
from railscope.agent.cluster.verdict.links import StalledCommunicator
from railscope.agent.cluster.verdict.recent import to_past_tense
from railscope.agent.cluster.verdict.verdict import RootCause
from railscope.agent.cluster.verdict.words import what_of
from railscope.agent.facts.causes import CAUSES, About, Cause, Severity, Tier, facts_of
from railscope.dashboards import rules_files, runbook
from tests.nccl.library import REPOSITORY
from tests.unit.fleets import identity

OF_CLAUSES: Final = {"who", "is", "s", "rail", "plane", "hosts", "unnamed", "missing", "last_seen", "within", "differ"}
OF_STEPS: Final = {
    About.RANK: {"rank", "pid", "gpu"},
    About.RAIL: {"device", "inside"},
    About.HOST: {"host"},
    About.STALLED: {"rank", "pid", "gpu"},
}
OF_THE_PAST: Final = {"window", "period"}
OCCASIONS: Final = {
    "host",
    "plane",
    "sequence",
    "idle",
    "completion",
    "rail state",
    "absence",
    "history",
    "back",
    "one_of",
    "outside",
    "all",
    "behind",
    "between",
}
SAID: Final = [cause for cause, facts in CAUSES.items() if facts.by_host]
COMMON_WORDS: Final = {Cause.UNKNOWN, Cause.UNSEEN, Cause.WRITING}
"""Of other things too: what is not known, bytes of no observed collective, a column."""
_MATCHER: Final = re.compile(r'\bcause ?(?:=~|!~|!=|=) ?"([^"$.*]+)"|\.cause "(\w+)"', re.IGNORECASE)


def placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_words_steps_and_a_remedy(cause: Cause) -> None:
    facts = CAUSES[cause]
    assert re.fullmatch(r"[A-Z].*\.", facts.meaning)
    assert facts.words
    assert facts.remedy
    assert not facts.remedy.endswith(".")
    assert facts.now
    assert all(step.why for step in (*facts.now, *facts.after))
    assert facts.after or facts.tier >= Tier.UNSEEN, "what kept traces of it?"
    assert (runbook.FOLDER / f"{facts.runbook}.md").is_file()


@pytest.mark.parametrize("cause", Cause)
def test_placeholders_are_those_that_diagnose_fills(cause: Cause) -> None:
    facts = CAUSES[cause]
    for clause in (facts.words, *facts.words_by.values()):
        assert placeholders(clause) <= OF_CLAUSES
    assert facts.words_by.keys() <= OCCASIONS
    for more, steps in ((set[str](), facts.now), (OF_THE_PAST, facts.after)):
        for step in steps:
            assert placeholders(step.command + step.why) <= OF_STEPS[facts.about] | more


@pytest.mark.parametrize("cause", [cause for cause, facts in CAUSES.items() if facts.tier < Tier.MISSING])
def test_what_is_said_of_now_can_be_said_of_then(cause: Cause) -> None:
    values = dict.fromkeys(OF_CLAUSES, "") | {"who": "rank 1", "is": "is", "s": "s", "rail": "rail 0"}
    clause = CAUSES[cause].words.format(**values)
    assert to_past_tense(clause) != clause, "recent._PAST lacks its verb"


def blamed(cause: Cause, basis: str = "host") -> StalledCommunicator:
    """A communicator of two ranks; rank 1 on host1 and its rail are to blame, or nobody sees it."""
    facts = CAUSES[cause]
    ranks = tuple(Rank(identity("aa", str(number), pid=f"10{number}", gpu="3"), f"host{number}") for number in (0, 1))
    rails = (Rail("host1", "0", "eth7"),) if facts.about is About.RAIL else ()
    missing = ("1",) if facts.about is About.HOST else ()
    of_ranks = () if facts.about is About.RAIL else ranks[1:]
    culprit = Culprit(cause, of_ranks, missing, rails, basis, "strong")
    return StalledCommunicator("aa", ranks, culprit, (), missing, 2, "AllReduce", 40.0, ())


@pytest.mark.parametrize("cause", Cause)
def test_diagnose_says_what_the_table_says_and_of_whom(cause: Cause) -> None:
    facts, stalled = CAUSES[cause], blamed(cause)
    said = what_of(RootCause(stalled))
    plain = [part for part in re.split(r"\{\w+\}", facts.words_by.get("host", facts.words)) if part]
    assert all(part in said for part in plain)
    assert "{" not in said
    steps = next_steps(stalled)
    assert steps[0].why.startswith(facts.now[0].why.partition("{")[0])
    assert any("10" in step.command for step in steps) == any("{pid}" in one.command for one in facts.now)
    assert any("eth7" in step.command for step in steps) == (facts.about is About.RAIL)
    over = past_steps(stalled, Period(1000.0, 1010.0))
    assert [step.why for step in over if "{" in step.command + step.why] == []
    if facts.after:
        assert over[0].why.startswith(facts.after[0].why.partition("{")[0])


def test_a_step_on_a_host_that_nobody_knows_is_left_out() -> None:
    lost = Rank(identity("aa", "1"), "", present=False)
    gone = Culprit(Cause.PROCESS_GONE, (lost,), basis="host")
    steps = next_steps(StalledCommunicator("aa", (lost,), gone, (), (), 2, "AllReduce", 40.0, ()))
    assert [(step.host, step.command) for step in steps] == [("", "")]
    assert steps[0].why.startswith("the job's log of rank 1")


def test_a_cause_of_a_newer_agent_is_nothing_that_is_known() -> None:
    assert facts_of("some_new_cause") is CAUSES[Cause.UNKNOWN]


@pytest.mark.parametrize("name", runbook.pages())
def test_runbook_pages_have_what_the_table_says(name: str) -> None:
    page = (runbook.FOLDER / f"{name}.md").read_text()
    assert runbook.replace_parts(name, page) == page, "run 'python -m railscope.dashboards.runbook'"
    with pytest.raises(ValueError, match=f"{name}.md has no part"):
        runbook.replace_parts(name, page.replace(runbook.END, ""))


def test_the_page_on_stalls_has_a_row_and_a_section_for_each_cause_and_no_other() -> None:
    page = (runbook.FOLDER / f"{runbook.OF_ALL}.md").read_text()
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == list(Cause)
    assert re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", page, re.MULTILINE) == [(cause, cause) for cause in Cause]
    for facts in CAUSES.values():
        assert facts.meaning in page
        assert f"Remedy: {facts.remedy}." in page


def test_steps_of_a_cause_stand_on_the_page_that_says_most_of_it_and_on_no_other() -> None:
    for file in runbook.FOLDER.glob("*.md"):
        own = [cause for cause, facts in CAUSES.items() if facts.runbook == file.stem]
        page = file.read_text()
        marked = re.findall(r"^<!-- (\w+): written", page, re.MULTILINE)
        assert marked == (["causes"] if file.stem == runbook.OF_ALL else own)
        steps = [step for cause in own for step in CAUSES[cause].now]
        assert [step.why for step in steps if step.command and step.why.partition("{")[0] not in page] == []


def test_alerts_on_stalls_are_as_severe_as_their_causes() -> None:
    alerts = [one for one in rules_files.make_alerts() if one.page == runbook.OF_ALL]
    critical, warning = alerts
    assert [one.severity for one in alerts] == [Severity.CRITICAL, Severity.WARNING]
    for cause in SAID:
        mild = CAUSES[cause].severity is Severity.WARNING
        found = f'cause!~"{cause}"' in critical.expression, f'{{cause=~"{cause}"' in warning.expression
        assert found == (mild, mild)
    assert {CAUSES[cause].severity for cause in SAID} == {one.severity for one in alerts}
    assert CAUSES[Cause.WRITING].severity is Severity.NONE


def test_rules_and_pages_name_no_cause_that_the_table_lacks() -> None:
    files = [path for folder in ("dashboards", "deploy", "docs") for path in (REPOSITORY / folder).rglob("*.*")]
    named = {
        cause
        for path in (*files, *REPOSITORY.glob("*.md"))
        if path.suffix in (".md", ".yml") and path.parent.name != "tests"  # there are causes of newer agents
        for found in _MATCHER.findall(path.read_text())
        for cause in (found[0] or found[1]).split("|")
    }
    assert named - set(Cause) == set()
    assert named >= {Cause.PROCESS_GONE, Cause.RANK_BEHIND, Cause.UNSEEN}, "the search finds nothing"


def test_the_pages_on_stalls_list_what_hosts_tell_of() -> None:
    page = (REPOSITORY / "docs/stalls.md").read_text()
    (listed,) = re.findall(r"Causes \(.*?\): ((?:`\w+`(?:, )?)+)\.", page)
    assert re.findall(r"\w+", listed) == SAID
    faults = (REPOSITORY / "docs/faults.md").read_text()
    (table,) = re.findall(r"\| Fault \| Named \|.*\n((?:\|.*\n)+)", faults)
    assert set(re.findall(r"^\| [^|]* \| `(\w+)` \|", table, re.MULTILINE)) <= set(SAID)


def test_no_module_but_the_table_writes_a_causes_name() -> None:
    names = {str(cause) for cause in Cause} - COMMON_WORDS
    found = [
        f"{path.relative_to(REPOSITORY)}:{one.lineno}"
        for folder in ("agent", "dashboards", "exporters", "probes", "testbed")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path != REPOSITORY / "agent/facts/causes.py"
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value in names
    ]
    assert found == []
