"""Processes with NCCL of which no call was seen since their agent came: it is not said of them that nothing hangs."""

from __future__ import annotations

import io
import json

import pytest

from railscope.agent.cluster import command
from railscope.agent.cluster.command import as_text, diagnose, question_from, run_diagnose
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.canned_store import COMM, NOW, CannedStore, agent, read
from tests.unit.fleets import Fleets, checkpoint, stall
from tests.unit.test_diagnose import parsed

WITHOUT = "railscope_process_without_comm"
AGE = 56.0
_FIRST = f"last_over_time({WITHOUT}offset{AGE - 17.5:.0f}s)"
"""Scraped each second: 15 s for the scan and 2.5 scrapes."""


def hung_before_the_agent(
    *, age: float = AGE, there: bool = True, world_size: str = "2", inside: bool = False, clock_off: float = 0.0
) -> CannedStore:
    """A rank of a job on host1, without a call; `there`: it was at the agent's first scrapes."""
    store = CannedStore()
    agent(store, "host1:9779")
    if clock_off:
        name = "railscope_snapshot_timestamp_seconds"
        store.canned[name] = []
        store.say(name, NOW - 0.5 + clock_off, instance="host1:9779")
    store.say("railscope_agent_start_time_seconds", NOW - age + clock_off, instance="host1:9779")
    labels = {"instance": "host1:9779", "pid": "101", "exported_job": "7", "world_rank": "1", "world_size": world_size}
    store.say(WITHOUT, 1, **labels)
    if there:
        store.say(_FIRST, 1, **labels)
    if inside:
        call = {"instance": "host1:9779", "comm": COMM, "rank": "1", "nranks": "2", "pid": "101"}
        store.say("railscope_call_inside_seconds", 3.0, call="ncclCommInitRank", **call)
    return store


def test_a_rank_that_was_there_before_the_agent_and_made_no_call_is_silent() -> None:
    (found,) = read(hung_before_the_agent()).silent
    assert (found.host, found.pid, found.job, found.world_rank) == ("host1", "101", "7", "1")
    assert found.agent_seconds == pytest.approx(AGE, abs=0.2)
    assert read(hung_before_the_agent(clock_off=-3600.0)).silent, "the agent's start is by its own clock"


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(hung_before_the_agent(there=False), id="it came after the agent, which would see it hang"),
        pytest.param(hung_before_the_agent(age=20.0), id="the agent has hardly come"),
        pytest.param(hung_before_the_agent(world_size="1"), id="a job of one rank, as a notebook in an allocation"),
        pytest.param(hung_before_the_agent(inside=True), id="it is seen inside a call"),
    ],
)
def test_of_others_it_would_be_known_or_they_wait_for_nobody(store: CannedStore) -> None:
    assert read(store).silent == ()
    assert "cannot be known" not in make_verdict(read(store)).headline


def test_what_the_store_does_not_answer_of_it_is_left_open() -> None:
    store = hung_before_the_agent()
    store.unanswered = lambda expression: "offset 38s" in expression or "offset 39s" in expression
    verdict = diagnose(store, question_from(parsed()))
    assert not verdict.answered
    assert verdict.headline == "No agent observes a communicator."
    assert any("which processes were there before their agents" in note for note in verdict.notes)


def test_the_first_line_does_not_say_that_there_is_no_stall() -> None:
    verdict = make_verdict(Fleets().communicator().silent_since(AGE, "2", "3").made())
    assert verdict.headline == (
        "No stall is seen: no host calls the only communicator stalled; 2 processes with NCCL on host1 have made no "
        "call since the agent came 56 s ago: whether they hang cannot be known."
    )
    (unknown,) = verdict.unknown
    assert unknown.startswith("host1: whether processes of job 7 (rank 2 with pid 500, rank 3 with pid 501) hang, as ")
    assert "`py-spy dump --pid 500` there" in unknown
    assert "of a job that is started again everything is seen" in unknown
    text = " ".join(as_text(verdict).split())
    assert text.index("Cannot be known") < text.index("py-spy dump --pid 500") < text.index("As of")


def test_where_no_communicator_is_seen_and_where_ranks_write_it_is_said_too() -> None:
    assert make_verdict(Fleets().silent_since(AGE, "0").made()).headline == (
        "No agent observes a communicator; 1 process with NCCL on host1 has made no call since the agent came 56 s "
        "ago: whether it hangs cannot be known."
    )
    writing = make_verdict(checkpoint().silent_since(AGE, "9").made())
    assert writing.headline.startswith("No stall is seen: communicator ")
    assert writing.headline.endswith(
        "a checkpoint?; 1 process with NCCL on host1 has made no call since the agent came 56 s ago: whether it hangs "
        "cannot be known."
    )


def test_of_several_agents_the_first_and_the_last_to_come_are_told() -> None:
    fleets = Fleets().silent_since(40.0, "0", host=0).silent_since(90.0, "1", host=1)
    headline = make_verdict(fleets.made()).headline
    assert (
        "2 processes with NCCL on host0, host1 have made no call since their agents came 40 s to 90 s ago" in headline
    )


def test_beside_a_stall_the_stall_is_the_headline_and_the_rest_is_not_forgotten() -> None:
    fleets = Fleets().communicator().all_say("rank_behind").rank(1, stall=stall("process_stopped", blamed_rank="1"))
    verdict = make_verdict(fleets.silent_since(AGE, "9").made())
    assert verdict.problem
    assert verdict.headline.startswith("STALLED")
    assert "cannot be known" not in verdict.headline
    assert verdict.unknown
    assert "py-spy dump --pid 500" in " ".join(as_text(verdict).split())


@pytest.mark.parametrize(("world_rank", "status"), [("1", 2), ("", 0)])
def test_only_a_process_with_a_rank_of_a_job_changes_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, world_rank: str, status: int
) -> None:
    store = hung_before_the_agent()
    for samples in (store.canned[WITHOUT], store.canned[_FIRST]):
        samples[0].labels["world_rank"] = world_rank  # type: ignore[index]
    monkeypatch.setattr(command, "PrometheusStore", lambda _endpoint: store)
    out = io.StringIO()
    assert run_diagnose(parsed("--json"), out) == status
    said = json.loads(out.getvalue())
    assert said["ranks_seen"] is (status == 0)
    assert not said["problem"]
    assert "whether it hangs cannot be known" in said["headline"]
    assert len(said["unknown"]) == 1


def test_many_processes_take_few_lines() -> None:
    fleets = Fleets()
    for host in range(9):
        fleets.silent_since(AGE, *map(str, range(8)), host=host)
    verdict = make_verdict(fleets.made())
    assert verdict.unknown[-1] == "5 more hosts and jobs have such processes"
    assert "rank 3 with pid 503 and 4 more) hang" in verdict.unknown[0]
