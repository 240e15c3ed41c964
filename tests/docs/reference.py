"""The parts of reference pages that are made from code: metrics, flags and keys, alerts, causes, JSON.

    .venv/bin/python -m tests.docs.reference      # writes them anew

A page has its own words around the parts; `tests/unit/test_reference.py` says when a part is stale, and that nothing is
left out.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final

from railscope.agent.cli.main import make_parser
from railscope.agent.cli.pages import PROGRAM, Flag, Page, page_of
from railscope.agent.config.options import COLLECTORS, OPTIONS, RELOADABLE, Option
from railscope.agent.facts.catalogue import METRICS, PREFIX, Metric
from railscope.agent.facts.causes import CAUSES, CauseFacts, Severity
from railscope.dashboards import alerts, rules_files
from railscope.dashboards.alerting.alert import Alert
from railscope.dashboards.alerting.thresholds import Thresholds
from railscope.exporters.otlp.names import otlp_name
from railscope.exporters.web.stall_documents import (
    HelloLine,
    ProcessDocument,
    SlowRankDocument,
    StackDocument,
    StallDocument,
    StallsDocument,
    VerdictLine,
)
from tests.docs.schema import fields_of, make_schema

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PAGES: Final = REPOSITORY / "docs/reference"
_RUNBOOKS: Final = "../../dashboards/runbooks"

SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Operations of the node": ("collective_",),
    "Communicators, stalls and calls": ("comm_", "stalls_", "call_", "cuda_", "process_without_comm"),
    "Queues and TCP of Ethernet rails": ("rail_queue_", "rail_tcp_"),
    "Rails": ("rail_",),
    "GPUs and NVLinks": ("gpu_", "nvlink_"),
    "Hardware of the host": ("pcie_", "hardware_"),
    "railscope itself": ("",),
}
"""Beginnings of names, without the prefix; the longest that fits decides."""

_NAME: Final = re.compile(
    r"(?<![`\w/.-])(?:"
    r"railscope (?:diagnose|doctor|verdicts)(?: --[a-z.]+(?: [A-Z]+)?)*"
    r"|--[a-z][\w.-]*[a-z](?:=\w+)?"
    r"|[a-z]+\.\w+_\w+|\w+_\w+(?:[*\w/.]*\w)?|\w+_\*"
    r"|/(?:proc|dev|metrics)[\w/]*(?:\?profile=\w+)?"
    r")"
)
"""What `_typed` sets as code."""
_UNITS: Final = {
    "bytes_per_second": "bytes/s",
    "timestamp_seconds": "s since 1970",
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "ratio",
    "packets": "packets",
    "segments": "segments",
    "celsius": "°C",
    "watts": "W",
    "info": "always 1",
}
"""By the end of a name, as Prometheus' naming conventions have it; the longest that fits decides."""
_LABELS: Final = {"gpu": "INDEX", "of": "QUANTITY", "carried_by": "SUBSTITUTE", "nccl_version": "VERSION"}
"""What stands for a label whose own name would not read well in a sentence."""


def section_of(metric: Metric) -> str:
    """The section of the page on which a metric stands."""
    name = metric.name.removeprefix(PREFIX)
    _, section = max(
        (len(start), title) for title, starts in SECTIONS.items() for start in starts if name.startswith(start)
    )
    return section


def unit_of(metric: Metric) -> str:
    """The unit of a metric's values, by its name; a count of something has none."""
    name = metric.name.removesuffix("_total")
    return next((unit for end, unit in _UNITS.items() if name.endswith(f"_{end}")), "")


def metrics() -> str:
    """A table for each section, in the order of the catalogue."""
    parts = []
    titles = ("Metric", "Type", "Unit", "By OTLP", "Labels", "Meaning")
    for title in SECTIONS:
        rows = [
            (
                _code(one.name),
                one.kind,
                unit_of(one),
                _code(otlp_name(one).name),
                ", ".join(one.labels),
                _typed(one.help),
            )
            for one in METRICS
            if section_of(one) == title
        ]
        parts.append(f"## {title}\n\n{_table(titles, rows)}")
    return "\n\n".join(parts)


def flags() -> str:
    """A table for each group of keys, and one for flags without a key."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for option in OPTIONS:
        groups.setdefault(option.key.partition(".")[0], []).append(_option(option))
    groups["collectors"] = [
        (
            f"`{one.flag}`, `--no-collector.{one.name}`",
            _code(one.key),
            _code("true" if one.enabled else "false"),
            "",
            _sentence(one.help),
        )
        for one in COLLECTORS
    ]
    without_key = groups.pop("")
    without_key.append(
        (_code("--once"), "", "", "", _sentence("observe for --once.settle, print the metrics and exit"))
    )
    titles = ("Flag", "Key", "Default", "Reload", "Meaning")
    parts = [f"### {group}\n\n{_table(titles, rows)}" for group, rows in groups.items()]
    parts.append(f"### Without a key\n\n{_table(titles, without_key)}")
    return "\n\n".join(parts)


def _option(option: Option) -> tuple[str, ...]:
    reload = "yes" if option.key in RELOADABLE else ""
    default = option.default if option.default in ("none", "found") or " " in option.default else _code(option.default)
    return _code(f"{option.flag} {option.metavar}"), _code(option.key), default, reload, _sentence(option.help)


def alert_rules() -> str:
    """A section for each alert, in the order of the rules file."""
    groups: dict[str, list[Alert]] = {}
    for one in rules_files.make_alerts():
        groups.setdefault(one.group.value, []).append(one)
    return "\n\n".join(
        f"## Group {_code(group)}\n\n" + "\n\n".join(_alert(one) for one in members)
        for group, members in groups.items()
    )


def _alert(alert: Alert) -> str:
    said = {name: _plain(text) for name, text in alert.annotations("").items()}
    lines = [
        f"### {alert.name}",
        f"{said['summary']}.  {said['description']}",
        f"Severity: {alert.severity}.  Fires after `{alert.holds_for}`.  {_typed(alert.because)}",
        *([_typed(alert.about)] if alert.about else ()),
        f"What to do: [{alert.page}]({_RUNBOOKS}/{alert.page}.md).",
        f"```promql\n{alert.expression}\n```",
    ]
    return "\n\n".join(lines)


def _plain(text: str) -> str:
    return _typed(words_of(text))


_OF_UNKNOWN: Final = re.compile(r'(eq|ne) \$labels\.\w+ "unknown"')


def words_of(template: str) -> str:
    """An annotation with words in capitals where a firing alert has a label or a value; queries are left out.

    Where a template asks whether a label is there, it is, and where it asks whether it is known, it is known.

    Raises:
        ValueError: an action is none of those that annotations use.
    """
    said = ""
    shown = [True]
    subjects = [""]
    """What `.` stands for, in each block that is open."""
    template = alerts.to_grafana_template(template)
    for part in re.split(r"((?:\s*\{\{-|\{\{).*?(?:-\}\}\s*|\}\}))", template):
        action = re.fullmatch(r"\s*\{\{-?\s*(.*?)\s*-?\}\}\s*", part)
        word, _, rest = action[1].partition(" ") if action else ("", "", "")
        if action is None:
            glued = part[:1].isalnum() and said[-1:].isupper()
            said += f"{' ' * glued}{part}" if shown[-1] else ""
        elif word == "if" and (compared := _OF_UNKNOWN.fullmatch(rest)):
            shown.append(shown[-1] and compared[1] == "ne")
            subjects.append(subjects[-1])
        elif word in ("if", "with"):
            asked = _placeholder(rest, subjects[-1])
            shown.append(shown[-1])
            subjects.append(asked if word == "with" else subjects[-1])
        elif word == "else" and len(shown) > 1:
            shown[-1] = shown[-2] and not shown[-1]
        elif word == "end" and len(shown) > 1:
            shown.pop()
            subjects.pop()
        else:
            stands = _placeholder(action[1], subjects[-1])
            said += stands if shown[-1] else ""
    return " ".join(said.split())


def _placeholder(action: str, subject: str) -> str:
    """The word that stands for what an action gives, with what `printf` has around it."""
    found = re.fullmatch(
        r'(?:printf "(?P<around>[^"%]*%[\d.]*[a-z](?:[^"%]|%%)*)" )?'
        r"(?:\$labels\.(?P<label>\w+)|(?P<value>\$values?\b[.\w]*)|\.)(?: \| \w+)*",
        action,
    )
    if found is None or not (found["label"] or found["value"] or subject):
        raise ValueError(f"no words are known for {{{{ {action} }}}}")
    label = found["label"]
    stands = _LABELS.get(label, label.upper()) if label else "VALUE" if found["value"] else subject
    return re.sub(r"%[\d.]*[a-z]", stands, found["around"]).replace("%%", "%") if found["around"] else stands


def alert_list() -> str:
    """A line for each alert, the most severe first."""
    made = sorted(rules_files.make_alerts(), key=lambda one: list(Severity).index(one.severity))
    rows = [(f"[{one.name}](#{one.name.lower()})", one.severity.value, f"{_plain(one.summary)}.") for one in made]
    return _table(("Alert", "Severity", "Says"), rows)


def thresholds() -> str:
    """The numbers that `railscope dashboards build --threshold` changes."""
    rows = [(_code(one.name), f"{one.default:g}", str(one.metadata["meaning"])) for one in fields(Thresholds)]
    return _table(("Threshold", "Default", "Meaning"), rows)


def causes() -> str:
    """The causes, best evidence first."""
    rows = [
        (
            _code(cause),
            facts.tier.name.lower(),
            "host" if facts.by_host else "`railscope diagnose`",
            facts.severity.value,
            facts.meaning,
            _remedy(facts),
        )
        for cause, facts in CAUSES.items()
    ]
    return _table(("Cause", "Evidence", "Told by", "Severity", "Meaning", "Remedy"), rows)


def _remedy(facts: CauseFacts) -> str:
    return f"{facts.remedy}: [{facts.runbook}]({_RUNBOOKS}/{facts.runbook}.md)"


def command_list() -> str:
    """A line for each command."""
    rows = [
        (f"[{_code(_name(one))}](#{_name(one).replace(' ', '-')})", _sentence(one.summary))
        for one in page_of(make_parser()).pages
    ]
    return _table(("Command", "Does"), rows)


def commands() -> str:
    """A section for each command, and for each action of one."""
    return "\n\n".join(_command(one) for page in page_of(make_parser()).pages for one in (page, *page.pages))


def _name(page: Page) -> str:
    return " ".join((PROGRAM, *page.words))


def _command(page: Page) -> str:
    said, _, example = page.epilog.rpartition("example: ") if "\n" not in page.epilog else ("", "", "")
    parts = [f"{'#' * (len(page.words) + 1)} {_name(page)}", _typed(page.description or _sentence(page.summary))]
    if not page.pages:
        positional = "".join(f" {flag.value}{'...' if flag.several else ''}" for flag in page.flags if not flag.names)
        parts.append(f"```text\n{_name(page)} [OPTION...]{positional}\n```")
    known = {one.flag for one in OPTIONS} | {
        flag for one in COLLECTORS for flag in (one.flag, f"--no-collector.{one.name}")
    }
    own = [flag for flag in page.flags if "--help" not in flag.names and not known.intersection(flag.names)]
    if len(own) < len([flag for flag in page.flags if "--help" not in flag.names]):
        parts.append("It takes the [options of the agent](flags.md).")
    if own:
        parts.append(_table(("Option", "Meaning"), ((_flag(flag), _sentence(flag.help)) for flag in own)))
    if said.strip():
        parts.append(_typed(said.strip()))
    if example:
        parts.append(f"Example: `{example.removesuffix('.')}`")
    if "\n" in page.epilog:
        parts.append(f"```text\n{page.epilog.strip()}\n```")
    return "\n\n".join(parts)


def _flag(flag: Flag) -> str:
    names = ", ".join(flag.names)
    return _code(" ".join(part for part in (names, flag.value + ("..." if flag.several else "")) if part))


DOCUMENTS: Final = (StallsDocument, StallDocument, SlowRankDocument, ProcessDocument, StackDocument)
LINES: Final = (HelloLine, VerdictLine)


def documents() -> str:
    """The fields of `/stalls` and of what it holds."""
    return "\n\n".join(map(_fields, DOCUMENTS))


def lines() -> str:
    """The fields of the lines that the socket of verdicts writes."""
    return "\n\n".join(map(_fields, LINES))


def _fields(document: type) -> str:
    rows = [
        (_code(name), kind, "" if always else "may be absent", meaning)
        for name, kind, always, meaning in fields_of(document)
    ]
    return f"### {document.__name__}\n\n{inspect.getdoc(document)}\n\n{_table(('Field', 'Type', '', 'Meaning'), rows)}"


def schemas() -> dict[Path, str]:
    """The text of each file with a JSON Schema."""
    made = {
        "stalls": make_schema("GET /stalls of the railscope agent", StallsDocument),
        "verdicts": make_schema("A line of the railscope agent's socket of verdicts", *LINES),
    }
    return {PAGES / f"{name}.schema.json": json.dumps(schema, indent=2) + "\n" for name, schema in made.items()}


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = tuple(titles)
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _typed(text: str) -> str:
    """A text with commands and names of flags, metrics and files set as code, so that none is read as markup."""
    return _NAME.sub(r"`\g<0>`", text)


def _sentence(text: str) -> str:
    text = _typed(text)
    return text[:1].upper() + text[1:] + "."


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "metrics": metrics,
    "flags": flags,
    "alert_list": alert_list,
    "alerts": alert_rules,
    "thresholds": thresholds,
    "causes": causes,
    "command_list": command_list,
    "commands": commands,
    "documents": documents,
    "lines": lines,
}
_PART: Final = re.compile(r"(?<=<!-- made from code: )(\w+)( -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def parts_of(text: str) -> list[str]:
    """The names of a page's parts."""
    return [part[1] for part in _PART.finditer(text)]


def render(text: str) -> str:
    """A page with its parts as they are to be."""
    return _PART.sub(lambda part: f"{part[1]}{part[2]}\n{PARTS[part[1]]()}\n", text)


def pages() -> list[Path]:
    """The pages that have such parts."""
    return [path for path in sorted(PAGES.glob("*.md")) if parts_of(path.read_text())]


if __name__ == "__main__":
    for page in pages():
        page.write_text(render(page.read_text()))
    for file, schema_text in schemas().items():
        file.write_text(schema_text)
