"""Stacks of blamed ranks, asked of agents that are small servers here."""

from __future__ import annotations

import argparse
import io
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from railscope.agent.cluster.command import Question, as_json_text, as_text, diagnose, question_from, run_diagnose
from railscope.agent.cluster.fleet.facts import Agent
from railscope.agent.cluster.fleet.stacks import AgentAccess, AgentAnswer, RankStack, read_stacks
from railscope.agent.cluster.options import add_diagnose_arguments
from railscope.agent.cluster.verdict.stacks import hosts_to_ask, with_stacks
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.canned_store import COMM as STORED_COMM
from tests.unit.canned_store import CannedStore, agent, rank, stalled
from tests.unit.fleets import COMM, waiting

LINES = ("read (dataset.py:30)", "train (train.py:7)")
TAKEN_NS = 1_000_000_000_000_000
STACK = RankStack(COMM, 1, "host1", 1e6, LINES)


def stall(comm: str = COMM, **more: Any) -> dict[str, Any]:
    return {"comm": comm, "rank": 1, "blamed_rank": 1, **more}


def with_stack(comm: str = COMM, **said: Any) -> dict[str, Any]:
    return stall(comm, blamed_stack={"taken_realtime_ns": TAKEN_NS, **(said or {"lines": list(LINES)})})


@contextmanager
def served(body: bytes, *, user: str = "", wait: threading.Event | None = None) -> Iterator[str]:
    """An agent's address; with `user` it wants this Authorization header."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if wait is not None:
                wait.wait(30)
            refused = self.path != "/stalls" or (user and self.headers["Authorization"] != user)
            self.send_response(401 if refused else 200)
            self.end_headers()
            self.wfile.write(b"" if refused else body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            if wait is not None:
                wait.set()
            server.shutdown()
            thread.join()


def page(*stalls: Mapping[str, Any]) -> bytes:
    return json.dumps({"simulated": False, "stalls": stalls, "ended": []}).encode()


def only(address: str, access: AgentAccess | None = None) -> AgentAnswer:
    return read_stacks({"host1": address}, access or AgentAccess())["host1"]


def test_an_agent_says_where_the_code_of_blamed_ranks_stands() -> None:
    with served(page(stall(), with_stack(), with_stack("bb", unknown="py-spy: no Python"))) as address:
        assert only(address).stacks == (STACK, RankStack("bb", 1, "host1", 1e6, (), "py-spy: no Python"))


def test_agents_are_asked_at_once_and_one_that_fails_blanks_no_other() -> None:
    with ExitStack() as stack:
        addresses = {f"host{number}": stack.enter_context(served(page(with_stack()))) for number in range(3)}
        answers = read_stacks({**addresses, "gone": "127.0.0.1:1"}, AgentAccess())
    assert [bool(answer.stacks) for answer in answers.values()] == [True, True, True, False]
    assert answers["gone"].trouble == (
        "cannot reach http://127.0.0.1:1, as the store's label instance has it: Connection refused"
    )


def test_one_that_does_not_answer_is_waited_for_no_longer_than_was_said() -> None:
    with served(page(), wait=threading.Event()) as address:
        said = only(address, AgentAccess(timeout_seconds=0.2)).trouble
    assert said == f"http://{address} did not answer within 0.2 s"


@pytest.mark.parametrize(
    "body",
    [b"", b"not JSON", b"[]", b'{"stalls": 7}', b'{"stalls": [{"blamed_stack": {}}]}', b"[" * 100_000],
    ids=["nothing", "text", "a list", "a number", "no fields", "deep"],
)
def test_what_is_no_agent_s_answer_is_said(body: bytes) -> None:
    with served(body) as address:
        assert only(address).trouble == f"http://{address} does not answer as an agent of railscope does"


def test_an_agent_may_want_a_password() -> None:
    with served(page(with_stack()), user="Basic b3BzOnNlY3JldA==") as address:
        assert (
            only(address).trouble
            == f"http://{address} answers with HTTP 401: it wants credentials, --stacks-auth USER:FILE"
        )
        assert only(address, AgentAccess(authorization="Basic b3BzOnNlY3JldA==")).stacks == (STACK,)


@pytest.mark.parametrize(
    ("address", "tried"),
    [
        ("127.0.0.1", "http://127.0.0.1:9779"),
        ("[::1]:1", "http://::1:1"),
        ("::1", "http://::1:9779"),
        ("no such name:1", "http://no such name:1"),
        ("127.0.0.1:99999", "http://127.0.0.1:99999"),
    ],
)
def test_an_address_may_be_without_port_or_none(address: str, tried: str) -> None:
    assert tried in only(address, AgentAccess(timeout_seconds=0.5)).trouble


def test_only_hosts_of_blamed_ranks_are_asked() -> None:
    fleets = waiting().behind(1)
    fleets.agents = [Agent(f"host{number}", up=True, address=f"10.0.0.{number}:9779") for number in range(2)]
    verdict = make_verdict(fleets.made())
    assert hosts_to_ask(verdict, fleets.agents) == {"host1": "10.0.0.1:9779"}
    on_rail = waiting().all_say("rail_down", rail="0", device="eth0")
    assert hosts_to_ask(make_verdict(on_rail.made()), fleets.agents) == {}
    over = replace(verdict, findings=tuple(replace(one, now=False) for one in verdict.findings))
    assert hosts_to_ask(over, fleets.agents) == {}


@pytest.mark.parametrize(
    ("answer", "unknown"),
    [
        (AgentAnswer((STACK,)), None),
        (AgentAnswer((replace(STACK, comm="bb"), replace(STACK, rank=0))), "the agents of host1 have no stack of it"),
        (AgentAnswer((replace(STACK, lines=(), why="py-spy failed"),)), "of rank 1 stands: py-spy failed"),
        (AgentAnswer(trouble="it is on fire"), "host1: it is on fire"),
    ],
    ids=["told", "of others", "not known", "no answer"],
)
def test_a_finding_has_the_stacks_of_its_own_ranks_or_says_why_not(answer: AgentAnswer, unknown: str | None) -> None:
    verdict = make_verdict(waiting().behind(1).made())
    (finding,) = with_stacks(verdict, {"host1": answer}).findings
    assert finding.stacks == ((STACK,) if unknown is None else ())
    assert (
        any(unknown in line for line in finding.unknown) if unknown else finding.unknown == verdict.findings[0].unknown
    )


def behind(address: str) -> CannedStore:
    """A store of two hosts, where rank 1 keeps rank 0 waiting; the agent of rank 1 is at the address."""
    store = CannedStore()
    for number, instance in enumerate(("host0:9779", address)):
        agent(store, instance)
        rank(store, instance, number)
    stalled(store, "host0:9779", 0, "rank_behind", blamed_rank="1")
    stalled(store, address, 1, "rank_behind", blamed_rank="1")
    return store


def test_diagnose_prints_them_only_where_that_is_asked_for() -> None:
    with served(page(with_stack(STORED_COMM))) as address:
        plain = diagnose(behind(address), Question("http://store"))
        asked = diagnose(behind(address), Question("http://store", stacks="http"))
    assert "dataset.py" not in as_text(plain) + as_json_text(plain)
    text = as_text(asked)
    assert "Where the code of rank 1 stood on 127.0.0.1 at 13:46:40 UTC\n  - read (dataset.py:30)\n" in text
    (finding,) = json.loads(as_json_text(asked))["findings"]
    assert finding["stacks"][0]["lines"] == list(LINES)


def parsed(*arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    add_diagnose_arguments(parser)
    return parser.parse_args(["--prometheus", "http://store", *arguments])


def test_options_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert question_from(parsed()).stacks is None
    assert question_from(parsed("--stacks")).stacks == "http"
    assert question_from(parsed("--stacks", "https", "--stacks-auth", "ops:/file")).stacks_auth == "ops:/file"
    assert run_diagnose(parsed("--stacks", "--time", "1795230300"), io.StringIO()) == 2
    assert capsys.readouterr().err == "railscope diagnose: --stacks shows where code stands now: leave --time out\n"
