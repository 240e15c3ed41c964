"""Names that others chose, at each outlet: no control characters, no marks of direction, no length without bound."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.analysis.pictures.svg import strip_control_characters
from railscope.agent.doctor.command import Examination, as_json_text, as_text
from railscope.agent.doctor.findings import Finding
from railscope.agent.facts.snapshot import AttachedProbe, Snapshot
from railscope.agent.node.targets.jobs import job_facts
from railscope.exporters.series.families import make_families
from railscope.exporters.series.printable_labels import PrintableLabels
from railscope.exporters.series.protobuf import ProtobufRenderer
from railscope.exporters.series.text import Format, Renderer
from railscope.exporters.top.plain import _written
from railscope.exporters.web.pages import render_communicators, render_stalls
from railscope.probes.printable import LONGEST_SHOWN, printable, printable_document, printable_lines
from tests.unit.exporters_snapshots import full_snapshot

HOSTILE = "/tmp/\x1b[2Ja\nb\r\u202egnp.os\u200f\x9b1m\udcff" + "x" * 5000
"""A path: clears the screen, begins a line, reverses text, is half a character, and longer than a screen."""


def assert_harmless(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n"))


def strings(document: object) -> list[str]:
    if isinstance(document, str):
        return [document]
    if isinstance(document, dict):
        return [text for pair in document.items() for one in pair for text in strings(one)]
    return [text for one in document for text in strings(one)] if isinstance(document, list) else []


def hostile_snapshot() -> Snapshot:
    snapshot = full_snapshot()
    probes = replace(
        snapshot.health.probes,
        attached=(
            AttachedProbe(HOSTILE, HOSTILE, "uprobe", True, "layout"),
            # Another name that looks the same when it is shown.
            AttachedProbe(HOSTILE.replace("\x1b", "\x1c"), HOSTILE, "uprobe", True, "layout"),
        ),
    )
    communicators = tuple(
        replace(one, identity=replace(one.identity, job=(("job", HOSTILE), ("pod", HOSTILE)), netns=HOSTILE))
        for one in snapshot.collectives.communicators
    )
    rails = tuple(replace(one, device=HOSTILE, netdev=HOSTILE, netns=HOSTILE) for one in snapshot.rails)
    return replace(
        snapshot,
        collectives=replace(snapshot.collectives, communicators=communicators),
        rails=rails,
        health=replace(snapshot.health, probes=probes),
    )


@given(st.text(), st.integers(1, 40))
def test_nothing_but_what_can_be_printed_is_left_and_no_more_than_is_allowed(text: str, longest: int) -> None:
    shown = printable(text, longest)
    assert shown.isprintable()
    assert len(shown) == min(len(text), longest)
    assert printable(shown, longest) == shown
    assert printable(text, instead="").isprintable()


@pytest.mark.parametrize("format", list(Format))
def test_labels(format: Format) -> None:
    text = Renderer().render(make_families(hostile_snapshot()), format).decode()
    assert "gnp.os" in text
    assert_harmless(text)
    assert max(map(len, text.split("\n"))) < 4 * LONGEST_SHOWN
    names = [line.rpartition(" ")[0] for line in text.split("\n") if line and not line.startswith("#")]
    assert len(names) == len(set(names)), "names that look alike are one series"


class Watched(str):
    """A name that counts how often it is looked at."""

    looks = 0

    def isprintable(self) -> bool:
        type(self).looks += 1
        return super().isprintable()


def named(name: str, *, agent: Snapshot) -> Snapshot:
    """The agent observes one rail, of this name."""
    rails = tuple(replace(one, device=name) for one in agent.rails[:1])
    return replace(agent, rails=rails)


def test_the_same_labels_are_looked_at_once_and_not_in_each_scrape() -> None:
    labels, snapshot = PrintableLabels(), named(Watched("mlx5_0"), agent=full_snapshot())
    first = make_families(snapshot, labels=labels)
    looks = Watched.looks
    assert looks
    assert make_families(snapshot, labels=labels) == first
    assert Watched.looks == looks


def test_labels_that_may_not_be_shown_are_replaced_in_each_scrape() -> None:
    labels = PrintableLabels()
    shown = [make_families(hostile_snapshot(), labels=labels) for _ in range(3)]
    assert shown[0] == shown[1] == shown[2]
    assert all(value is None or value.isprintable() for one in shown[2] for found, _ in one.samples for value in found)


def test_labels_that_went_are_not_remembered() -> None:
    labels, snapshot = PrintableLabels(), full_snapshot()
    make_families(snapshot, labels=labels)
    once = labels.cached_label_sets()
    for number in range(200):
        make_families(named(f"mlx5_{number}", agent=snapshot), labels=labels)
    make_families(snapshot, labels=labels)
    assert labels.cached_label_sets() < 6 * once
    make_families(replace(snapshot, rails=()), labels=labels)
    assert labels.cached_label_sets() < once


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.exporters.series.printable_labels.MOST_REMEMBERED", 10)
    labels = PrintableLabels()
    assert make_families(full_snapshot(), labels=labels) == make_families(full_snapshot())
    assert labels.cached_label_sets() == 10


def test_labels_in_protobuf() -> None:
    data = b"".join(ProtobufRenderer().chunks(make_families(hostile_snapshot())))
    assert b"gnp.os" in data
    assert b"\x1b[" not in data
    assert "\u202e".encode() not in data


def test_doctor_in_both_forms() -> None:
    finding = Finding("NCCL library", "note", f"{HOSTILE}: it has no calls", f"remove {HOSTILE}")
    examination = Examination("0", "6.1", (finding,), (), (), None, ())
    text = as_text(examination)
    assert_harmless(text)
    assert next(line for line in text.split("\n") if "gnp.os" in line).startswith("note")
    assert len(text) < 4 * LONGEST_SHOWN
    for one in strings(json.loads(as_json_text(examination))):
        assert one.isprintable()
        assert len(one) <= LONGEST_SHOWN


def test_pages() -> None:
    snapshot = hostile_snapshot()
    for page in (render_communicators(snapshot), render_stalls(snapshot)):
        assert all(one.isprintable() for one in strings(json.loads(page)))


def test_top_s_lines_for_programs() -> None:
    written = _written(HOSTILE)
    assert written.isprintable()
    assert len(json.loads(written)) == LONGEST_SHOWN


def test_pictures_and_pages_of_reports() -> None:
    assert_harmless(strip_control_characters(HOSTILE))


def test_a_job_s_environment() -> None:
    facts = job_facts({"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": HOSTILE}, "")
    assert facts.job_name.isprintable()
    assert len(facts.job_name) <= 128


def test_lines_and_documents() -> None:
    assert printable_lines("a\x1b\nb\u202e") == "a\ufffd\nb\ufffd"
    assert printable_document({"a\n": [1, None, ("\x1b",)]}) == {"a\ufffd": [1, None, ["\ufffd"]]}
