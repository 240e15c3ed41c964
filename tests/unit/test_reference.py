"""Reference pages are as fresh as the code, and leave no metric, flag, key, alert or cause out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from railscope.agent.cli.main import make_parser
from railscope.agent.cli.pages import page_of
from railscope.agent.config.options import COLLECTORS, FILE_KEYS, OPTIONS
from railscope.agent.facts.catalogue import METRICS
from railscope.agent.facts.causes import Cause, Tier
from railscope.dashboards.alerts import to_grafana_template
from railscope.dashboards.rules_files import make_alerts
from railscope.exporters.otlp.names import otlp_name
from tests.docs.reference import PAGES, PARTS, pages, parts_of, render, schemas, unit_of, words_of

COMMAND = ".venv/bin/python -m tests.docs.reference"


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def first_cells(text: str) -> set[str]:
    """What stands as code in the first cells of a page's tables."""
    return {
        name for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", line)
    }


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_a_page_is_what_the_code_says(path: Path) -> None:
    assert path.read_text() == render(path.read_text()), f"run {COMMAND}"


@pytest.mark.parametrize("path", schemas(), ids=lambda path: path.name)
def test_a_schema_is_what_the_types_say(path: Path) -> None:
    assert path.read_text() == schemas()[path], f"run {COMMAND}"
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


def test_every_part_stands_on_one_page() -> None:
    assert sorted(part for path in pages() for part in parts_of(path.read_text())) == sorted(PARTS)


def test_a_part_that_the_code_has_not_made_is_noticed() -> None:
    text = page("causes")
    assert render(text.replace("`process_gone`", "`process_lost`")) == text


def test_every_metric_has_a_line_with_its_labels() -> None:
    text = page("metrics")
    assert [one.name for one in METRICS if text.count(f"| `{one.name}` |") != 1] == []
    for one in METRICS:
        (cells,) = re.findall(rf"^\| `{one.name}` \| (\w+) \| ([^|]*) \| `([^|]*)` \| ([^|]*) \|", text, re.MULTILINE)
        assert cells == (one.kind, unit_of(one), otlp_name(one).name, ", ".join(one.labels)), one.name


def test_units_are_those_of_names() -> None:
    units = {one.name: unit_of(one) for one in METRICS}
    assert units["railscope_rail_transmit_bytes_total"] == "bytes"
    assert units["railscope_rail_speed_bytes_per_second"] == "bytes/s"
    assert units["railscope_agent_start_time_seconds"] == "s"
    assert units["railscope_snapshot_timestamp_seconds"] == "s since 1970"
    assert units["railscope_collective_calls_total"] == ""


def test_every_flag_and_key_has_a_line() -> None:
    text = page("flags")
    flags = {name.partition(" ")[0] for name in first_cells(text)}
    assert flags >= {one.flag for one in OPTIONS}
    assert flags >= {flag for one in COLLECTORS for flag in (one.flag, f"--no-collector.{one.name}")}
    assert [key for key in FILE_KEYS if f"| `{key}` |" not in text] == []


def test_every_command_and_action_has_a_section_with_its_options() -> None:
    text = page("commands")
    for command in page_of(make_parser()).pages:
        for one in (command, *command.pages):
            name = " ".join(("railscope", *one.words))
            (section,) = re.findall(rf"^#+ {name}\n(.*?)(?=^#+ railscope|\Z)", text, re.MULTILINE | re.DOTALL)
            options = first_cells(section)
            shown = {flag for cell in options for flag in re.findall(r"--[\w.-]+", cell)}
            for flag in (flag for flag in one.flags if flag.names and "--help" not in flag.names):
                assert shown.intersection(flag.names) or "options of the agent" in section, (name, flag.names)


def test_every_alert_has_a_line_and_a_section() -> None:
    text, names = page("alerts"), {one.name for one in make_alerts()}
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) == names
    assert set(re.findall(r"^\| \[(\w+)\]", text, re.MULTILINE)) == names


def test_annotations_leave_no_template_behind() -> None:
    words = re.sub(r"```.*?```", "", page("alerts"), flags=re.DOTALL)
    assert "{{" not in words
    assert "$labels" not in words


def test_every_cause_has_a_line_and_every_kind_of_evidence_is_told() -> None:
    text = page("causes")
    assert first_cells(text) >= set(Cause)
    told = re.findall(r"^\| ([a-z, ]+) \|", text.partition("\n## Evidence\n")[2], re.MULTILINE)
    assert {word for line in told for word in line.split(", ")} == {tier.name.lower() for tier in Tier}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ if $labels.counter }}{{ $labels.counter }}{{ else }}a counter{{ end }} increased", "COUNTER increased"),
        ("of {{ with $labels.pci }}{{ . }} of {{ end }}{{ $labels.instance }}", "of PCI of INSTANCE"),
        ("{{ $labels.code }}{{ with $labels.pci }} of {{ . }}{{ end }}, {{ $value | humanizeDuration }} ago",
         "CODE of PCI, VALUE ago"),
        ("{{ with $labels.a }}{{ if $labels.b }}{{ . }}{{ else }}x{{ end }}{{ else }}z{{ end }} y", "A y"),
        ("became {{ printf \"%.2g\" $value }} times as long", "became VALUE times as long"),
        ("{{ printf \"up to %.0f%%\" $value }} of it", "up to VALUE% of it"),
        ("is {{ $value | humanize }}B/s", "is VALUE B/s"),
        ("GPU {{ $labels.gpu }}'s, {{ $labels.rail }}.", "GPU INDEX's, RAIL."),
        ("one {{- with $labels.rail }}, rail {{ . -}} {{ end -}} .", "one, rail RAIL."),
        ("Down.{{ with printf \"up\" | query }} By {{ range . }}{{ .Value }}{{ end }}.{{ end }}", "Down."),
    ],
)  # fmt: skip
def test_a_template_becomes_words(template: str, words: str) -> None:
    assert words_of(template) == words


@pytest.mark.parametrize("template", ['{{ if eq $labels.a "x" }}y{{ end }}', "{{ . }}", "a{{ end }}", "{{ else }}"])
def test_a_template_that_no_words_are_known_for_is_an_error(template: str) -> None:
    with pytest.raises(ValueError, match="no words are known for"):
        words_of(template)


SAID = {
    f"{one.name} {kind}": text
    for one in make_alerts()
    for kind, text in one.annotations("").items()
    if kind in ("summary", "description")
}


@pytest.mark.parametrize("template", SAID.values(), ids=SAID)
def test_what_an_alert_says_reads_well(template: str) -> None:
    words = words_of(template)
    assert not re.search(r"\b(\w+) \1\b", words), f"a word stands twice: {words}"
    assert not re.search(r"[{}$]| [,.:;)]|\( *\)|[,:;][,.:;]|[,:;]$", words), f"something is missing: {words}"
    assert not re.search(r"\b(?:a|are|at|by|for|of|on|the|with|without|became)(?:[,.:;)]|$)", words), words
    together = re.sub(r"\b(?:NVLinks?|PCIe|GPUs)\b", "", words)
    assert not re.search(r"[A-Z]{2}[a-z]|[a-z][A-Z]{2}", together), f"words run together: {words}"
    always = re.sub(r"\{\{ else \}\}.*?\{\{ end \}\}", "", to_grafana_template(template))
    assert len(re.findall(r"\$values\b", always)) == words.count("VALUE")
    stand = re.findall(r"\{\{[^}]*?\$labels\.\w+[^}]*\}\}", re.sub(r"\{\{ if .*?\}\}", "", always))
    assert len(stand) <= len(re.findall(r"\b[A-Z_]{2,}\b", words)), f"a label is missing: {words}"
