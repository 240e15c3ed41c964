"""The command: what it prints for people and programs, and its exit status."""

from __future__ import annotations

import argparse
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from railscope.agent.cli.main import main
from railscope.agent.cluster import command
from railscope.agent.cluster.command import as_json_text, as_text, diagnose, endpoint_of, question_from, run_diagnose
from railscope.agent.cluster.fleet.prometheus import PrometheusError
from railscope.agent.cluster.options import add_diagnose_arguments
from railscope.agent.cluster.verdict.finding import Verdict
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.canned_store import NOW, CannedStore, agent
from tests.unit.fleets import COMM, OTHER, Fleets, fleets_of_any_kind, stall


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_diagnose_arguments(parser)
    return parser.parse_args(["--prometheus", "http://127.0.0.1:9", *arguments])


def stopped() -> Verdict:
    fleets = Fleets(4).communicator().communicator(OTHER, pids=100).all_say("rank_behind").all_say("rank_behind", OTHER)
    fleets.rank(1, stall=stall("process_stopped")).lose_host(3)
    return make_verdict(fleets.made())


def test_the_first_line_is_the_verdict_and_the_rest_tells_why_and_what_next() -> None:
    text = as_text(stopped())
    lines = text.splitlines()
    assert " ".join(lines[:2]).startswith(
        f"STALLED for 40 s: AllReduce on {COMM}: rank 1 (pid 101, host1) is stopped (SIGSTOP or a debugger)."
    )
    titles = [line for line in lines if line and not line.startswith(" ")][2:]
    assert titles[:5] == [
        "Evidence",
        "Healthy beside it",
        "Waits only because of this",
        "Cannot be known",
        "Check next",
    ]
    assert "  2. host1: kill -CONT 101" in lines
    assert lines[-1] == "As of 1970-01-12 13:46:40 UTC, by the store's clock."


def test_of_many_communicators_that_wait_only_a_few_are_printed() -> None:
    fleets = Fleets()
    for number in range(50):
        fleets.communicator(f"{number:016x}").all_say("rank_behind", f"{number:016x}")
        fleets.rank(1, f"{number:016x}", stall=stall("process_stopped"))
    verdict = make_verdict(fleets.made())
    assert "44 more (--json lists all)" in as_text(verdict)
    assert as_text(verdict).count("the same process") == 5
    assert as_json_text(verdict).count("the same process") == 49


def test_no_stall_is_one_line_and_the_time() -> None:
    fleets = Fleets().communicator()
    assert as_text(make_verdict(fleets.made())).splitlines()[0] == (
        "No stall: no host calls the only communicator stalled."
    )


def test_where_no_communicator_is_seen_nothing_is_called_no_stall() -> None:
    verdict = make_verdict(Fleets().made())
    assert verdict.headline == "No agent observes a communicator."
    assert verdict.notes[0].startswith("if a job runs, `railscope doctor`")
    assert (verdict.problem, verdict.heard) == (False, True)


@given(fleets_of_any_kind())
def test_nothing_is_wider_than_a_terminal_but_commands(fleets: Fleets) -> None:
    for line in as_text(make_verdict(fleets.made())).splitlines():
        assert len(line) <= 80 or re.match(r"  \d+\. \w+: ", line), line


def test_colour_only_changes_how_it_looks() -> None:
    plain, coloured = as_text(stopped()), as_text(stopped(), colour=True)
    assert "\x1b" not in plain
    assert coloured.startswith("\x1b[31;1mSTALLED")
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


@pytest.mark.parametrize("name", ["host\x1b[31m", "host\x9b2J", "host\x7f\r"])
def test_what_hosts_are_called_commands_no_terminal(name: str) -> None:
    fleets = Fleets().communicator().all_say("rank_behind").rank(1, stall=stall("process_stopped"), host=name)
    verdict = replace(make_verdict(fleets.made()), notes=(f"note of {name}",))
    assert any(name in step.host for finding in verdict.findings for step in finding.next_steps)
    text, document = as_text(verdict), as_json_text(verdict)
    assert all(line.isprintable() for text in (text, document) for line in text.split("\n"))
    assert json.loads(document)["findings"][0]["hosts"] == [name]


def test_what_limits_the_store_s_answers_is_the_first_note() -> None:
    class Partial(CannedStore):
        def warnings(self) -> tuple[str, ...]:
            return ("answers are partial",)

    store = Partial()
    agent(store, "host0:9779")
    agent(store, "host1:9779", scraped=NOW - 40, up=0)
    verdict = diagnose(store, question_from(parsed()))
    assert verdict.notes[0] == "answers are partial"
    assert any("host1" in note for note in verdict.notes[1:])


@pytest.mark.parametrize("typed", ["0x00AA", "00aa", "00Aa000000000001"])
def test_a_communicator_is_named_by_how_its_hash_begins(typed: str) -> None:
    store = CannedStore()
    agent(store, "host0:9779")
    labels = {"instance": "host0:9779", "comm": "00aa000000000001", "rank": "0"}
    store.say("last_over_time(railscope_comm_info)", 1, **labels, nranks="2", pid="100")
    store.say("railscope_comm_enqueued_total", 7, **labels)
    store.say("countby(comm)(last_over_time(railscope_comm_info))", 1, comm="00aa000000000001")
    verdict = diagnose(store, question_from(parsed("--comm", typed)))
    assert verdict.headline == "No stall: no host calls communicator 00aa000000000001 stalled."


def test_of_several_communicators_that_begin_so_none_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CannedStore()
    for number in (1, 2):
        store.say("countby(comm)(last_over_time(railscope_comm_info))", 1, comm=f"00aa{number:012x}")
    monkeypatch.setattr(command, "PrometheusStore", lambda _endpoint: store)
    assert run_diagnose(parsed("--comm", "00AA"), io.StringIO()) == 2
    assert capsys.readouterr().err == (
        "railscope diagnose: --comm 00aa: 2 communicators begin so, name one of them: "
        "00aa000000000001, 00aa000000000002\n"
    )


def test_json_holds_everything_by_name() -> None:
    verdict = json.loads(as_json_text(stopped()))
    assert verdict["problem"] is True
    (finding,) = verdict["findings"]
    assert (finding["cause"], finding["ranks"], finding["hosts"], finding["pids"]) == (
        "process_stopped",
        [1],
        ["host1"],
        [101],
    )
    assert finding["waiting"][0]["comm"] == OTHER
    assert {"evidence", "healthy", "unknown", "next_steps", "headline"} <= finding.keys()


SILENT = make_verdict(Fleets(2).communicator().lose_host(0).lose_host(1).made())


@pytest.mark.parametrize(("verdict", "status"), [(stopped(), 1), (make_verdict(Fleets().made()), 0), (SILENT, 2)])
def test_the_exit_status_says_whether_something_is_stalled(
    verdict: Verdict, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "diagnose", lambda *_: verdict)
    out = io.StringIO()
    assert run_diagnose(parsed("--json"), out) == status
    assert json.loads(out.getvalue())["problem"] is (status == 1)
    out = io.StringIO()
    assert run_diagnose(parsed(), out) == status
    assert out.getvalue() == as_text(verdict)


def test_a_store_that_is_not_there_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--prometheus", "http://127.0.0.1:1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "railscope diagnose: cannot reach http://127.0.0.1:1: Connection refused; check the URL given with "
        "--prometheus\n"
    )


def test_options_are_understood(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("abc\n")
    question = question_from(
        parsed("--comm", "0xAB", "--time", "1795230300", "--window", "10m", "--bearer-token-file", str(secret))
    )
    assert (question.comm, question.at, question.window_seconds) == ("ab", 1795230300.0, 600.0)
    assert endpoint_of(question).authorization == "Bearer abc"
    endpoint = endpoint_of(question_from(parsed("--timeout", "1m")))
    assert (endpoint.timeout_seconds, endpoint.all_seconds) == (20.0, 60.0)
    with pytest.raises(PrometheusError, match="not both"):
        endpoint_of(replace(question, basic_auth="me:x"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--time", "noon"),
        ("--time", "1e18"),
        ("--window", "soon"),
        ("--window", "s"),
        ("--window", "0s"),
        ("--timeout", "long"),
        ("--basic-auth", "me"),
        ("--comm", "0x"),
        ("--comm", ""),
    ],
)
def test_values_that_make_no_sense_name_their_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_diagnose(parsed(option, value), io.StringIO()) == 2
    said = capsys.readouterr().err
    assert said.startswith("railscope diagnose: ")
    assert option in said
    assert said.count("\n") == 1
