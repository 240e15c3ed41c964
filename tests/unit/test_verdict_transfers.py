"""Transfers of other libraries that do not complete, as `railscope diagnose` finds them in a store.  All is made up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.cluster.fleet.prometheus import Series
from railscope.agent.cluster.verdict.dumps import make_dump_verdict
from railscope.agent.cluster.verdict.finding import Finding
from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.dataset.from_recording import convert_file
from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.clocks import ClockReading
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.facts.transfers import NodeTransfers
from railscope.agent.imports.dataset_hang import read_hang_dataset
from railscope.agent.imports.facts import Problems
from railscope.agent.imports.hang_command import diagnose_files
from railscope.agent.node.recorder.triggers import make_recorded_stall
from railscope.agent.recording.file import write_recording
from railscope.exporters.series.transfer_families import transfer_families
from tests.unit import recordings
from tests.unit.canned_store import NOW, CannedStore, agent, rank, read, stalled
from tests.unit.datasets import BEGAN_NS, JobDataset
from tests.unit.exporters_snapshots import stall
from tests.unit.recordings import REALTIME_NS, SECOND_NS, recording

METRIC = "railscope_transfer_stalled_seconds"
HOST = "host0:9779"
ENDED_NS = recordings.BEGAN_NS + 60 * SECOND_NS


def stuck(
    store: CannedStore, pid: str, seconds: float, cause: str, *, peer: str = "decode-0", blamed: str = ""
) -> None:
    """As an agent shows it: under its own name, and as a stall of a communicator that is not known."""
    names = {"library": "nixl", "op": "Write", "pid": pid, "peer": peer}
    store.say(METRIC, seconds, instance=HOST, cause=cause, blamed_pid=blamed, **names)
    store.say(f"countby(instance,cause)(last_over_time({METRIC}))", 1, instance=HOST, cause=cause)
    nameless = {"instance": HOST, "comm": "unknown", "rank": "unknown", "cause": cause}
    store.say("railscope_comm_stalled==1", 1, op="nixl Write", **nameless)
    store.say("railscope_comm_stall_info==1", 1, strength="strong", **nameless)


def test_a_stopped_process_at_the_other_end_is_the_root_cause_of_all_that_wait_for_it() -> None:
    store = CannedStore()
    agent(store, HOST)
    stuck(store, "70", 40.0, "process_stopped", blamed="90")
    stuck(store, "71", 30.0, "process_stopped", blamed="90")
    verdict = make_verdict(read(store))
    (found,) = verdict.findings
    assert verdict.problem
    assert found.headline == (
        "STALLED: nixl Write of 2 processes on host0 to decode-0 does not complete, for 40 s so far: the process at "
        "its other end (pid 90) is stopped."
    )
    assert (found.cause, found.comm, found.op, found.pids) == ("process_stopped", "", "nixl Write", ("90",))
    assert len(found.evidence) == 2
    assert "kill -CONT 90" in [step.command for step in found.next_steps]


def test_a_transfer_without_a_culprit_has_a_cause_of_its_own_and_no_collective_is_called_stalled() -> None:
    store = CannedStore()
    agent(store, HOST)
    rank(store, HOST, 0)
    stuck(store, "70", 40.0, "transfer_stuck", peer="10.0.0.2:4242")
    fleet = read(store)
    (found,) = make_verdict(fleet).findings
    assert found.headline == (
        "STALLED: nixl Write of process 70 on host0 to 10.0.0.2:4242 does not complete, for 40 s so far."
    )
    assert (fleet.ranks, fleet.reported) == ((), ())
    assert [step.command for step in found.next_steps if "pid" in step.command]
    assert not any("{" in step.command + step.why for step in found.next_steps)


def test_a_collective_that_stalls_beside_it_is_a_finding_of_its_own_and_alone_if_it_is_asked_for() -> None:
    store = CannedStore()
    agent(store, HOST)
    rank(store, HOST, 0)
    stalled(store, HOST, 0, "process_stopped", strength="strong", blamed_rank="0")
    stuck(store, "70", 40.0, "process_stopped", blamed="90")
    assert [one.op for one in make_verdict(read(store)).findings] == ["AllReduce", "nixl Write"]
    comm = read(store).ranks[0].comm
    assert [one.op for one in make_verdict(read(store, comm), comm).findings] == ["AllReduce"]


def test_a_transfer_whose_other_end_is_not_known_says_so() -> None:
    store = CannedStore()
    agent(store, HOST)
    stuck(store, "70", 40.0, "transfer_stuck", peer="")
    (found,) = make_verdict(read(store)).findings
    assert found.headline == "STALLED: nixl Write of process 70 on host0 does not complete, for 40 s so far."
    assert found.unknown


def was_stuck(store: CannedStore, *, until: float, cause: str = "process_stopped", blamed: str = "90") -> None:
    """As an agent showed it until so many seconds ago, for 30 s then."""
    labels = {"instance": HOST, "cause": cause}
    points = tuple((NOW - until - ago, 30.0 - ago) for ago in (2.0, 1.0, 0.0))
    names = {"library": "nixl", "op": "Write", "pid": "70", "peer": "decode-0", "blamed_pid": blamed}
    store.history.append(Series({**labels, **names, "__for__": METRIC}, points))
    nameless = {**labels, "comm": "unknown", "rank": "unknown", "strength": "strong"}
    store.history.append(Series({**nameless, "__for__": "railscope_comm_stall_info"}, points))
    store.say("count(last_over_time(railscope_comm_stall_info))", 1)
    store.say(f"countby(instance,cause)(last_over_time({METRIC}))", 1, **labels)


def test_of_a_stuck_transfer_that_is_over_it_is_said_whose_it_was() -> None:
    store = CannedStore()
    agent(store, HOST)
    was_stuck(store, until=100.0)
    verdict = make_verdict(read(store))
    assert not verdict.findings
    (note,) = [note for note in verdict.notes if "nixl" in note]
    assert re.fullmatch(
        r"nixl Write of process 70 on host0 to decode-0 did not complete for 30 s, until \d\d:\d\d:\d\d UTC, 100 s "
        r"ago: the process at its other end \(pid 90\) was stopped",
        note,
    )
    assert not any("unknown" in note for note in verdict.notes)


def test_of_a_stuck_transfer_whose_agent_is_gone_it_is_said_what_was_told_last() -> None:
    store = CannedStore()
    agent(store, HOST, scraped=NOW - 20.0, up=0)
    was_stuck(store, until=20.0)
    verdict = make_verdict(read(store))
    assert not verdict.findings
    (note,) = [note for note in verdict.notes if "nixl" in note]
    assert " did not complete for 30 s, when host0 was last heard of at " in note
    assert not any("unknown, 20" in note or "rank unknown" in note for note in verdict.notes)
    assert not any("communicator unknown" in said for said in (verdict.headline, *verdict.notes))


def test_of_very_many_stuck_transfers_a_shorter_time_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    for series in (1, 1_000_000):
        store = CannedStore()
        agent(store, HOST)
        store.say(f"countby(instance,cause)(last_over_time({METRIC}))", series, instance=HOST, cause="transfer_stuck")
        scrapes = store.scrapes

        def remember(selector: str, seconds: float, at: float, scrapes: Any = scrapes) -> Any:
            asked.extend([seconds] if selector == METRIC else [])
            return scrapes(selector, seconds, at)

        monkeypatch.setattr(store, "scrapes", remember)
        read(store)
    assert asked[0] == 300
    assert 1 <= asked[1] < 5


def test_a_transfer_that_is_stuck_is_not_told_of_as_over() -> None:
    store = CannedStore()
    agent(store, HOST)
    was_stuck(store, until=0.5, cause="transfer_stuck", blamed="")
    stuck(store, "70", 30.0, "process_stopped", blamed="90")
    fleet = read(store)
    assert len(fleet.stuck_transfers) == 1
    assert fleet.past_transfers == ()


def test_a_recording_of_a_stuck_transfer_is_a_finding_with_what_its_host_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    said = ["process 90 is stopped (state T)", "a nixl Write to decode-0 that process 70 began is not complete"]
    job.row(
        0, "stalls", op="nixl Write", cause="process_stopped", since_ns=BEGAN_NS, seconds=30.0, evidence="\n".join(said)
    )  # fmt: skip
    job.open()
    dumps = read_hang_dataset(tmp_path, Problems())
    (found,) = make_dump_verdict(dumps).findings
    assert found.headline == (
        "STALLED: nixl Write of a process on node-0 does not complete, for 30 s so far: a process is stopped."
    )
    assert found.evidence == tuple(f"node-0: {sentence}" for sentence in said)
    assert not any("{" in step.command or "/proc//" in step.command for step in found.next_steps)


def live_finding(one: Stall) -> Finding:
    """Of a stall as its host's metrics tell of it."""
    store = CannedStore()
    agent(store, HOST)
    drafts = {draft.metric: draft for draft in transfer_families(NodeTransfers(), [one], ENDED_NS)}
    metric = catalogue.TRANSFER_STALLED_SECONDS
    for values, seconds in drafts[metric].samples:
        store.say(METRIC, seconds, instance=HOST, **dict(zip(metric.labels, map(str, values), strict=True)))
    (found,) = make_verdict(read(store)).findings
    return found


def conclusion(found: Finding) -> tuple[object, ...]:
    return found.headline, found.cause, found.pids, found.hosts, found.next_steps, found.unknown


@pytest.mark.parametrize("cause", [Cause.PROCESS_STOPPED, Cause.PROCESS_FROZEN, Cause.TRANSFER_STUCK])
@pytest.mark.parametrize("blamed_pid", [None, 90])
@pytest.mark.parametrize("peer", ["decode-0", ""])
def test_recordings_say_of_a_stuck_transfer_what_the_live_verdict_says(
    tmp_path: Path, cause: Cause, blamed_pid: int | None, peer: str
) -> None:
    said = () if not peer else ("a nixl Write that process 70 began is not complete",)
    diagnosis = Diagnosis(cause, said, culprit=False, blamed_pid=blamed_pid)
    one = replace(
        stall(), comm="unknown", rank="unknown", nranks="unknown", pid=70, op="nixl Write", library="nixl", peer=peer,
        diagnosis=diagnosis, since_ns=ENDED_NS - 34 * SECOND_NS, realtime_offset_ns=REALTIME_NS,
    )  # fmt: skip
    live = conclusion(live_finding(one))
    told = make_recorded_stall(one, ClockReading(ENDED_NS, ENDED_NS + REALTIME_NS, 0))
    host = replace(recording(), host="host0", communicators=(), stalls=(told,))
    with (tmp_path / "stall.npz").open("wb") as file:
        write_recording(file, host)
    convert_file(tmp_path / "stall.npz", tmp_path / "dataset")
    for path in (tmp_path / "stall.npz", tmp_path / "dataset"):
        (found,) = diagnose_files([path]).findings
        assert conclusion(found) == live


def test_whatever_a_recording_puts_stuck_transfers_down_to_there_are_steps_without_gaps(tmp_path: Path) -> None:
    causes = [*Cause, "of_a_later_version"]
    job = JobDataset(tmp_path, servers=(1,))
    for cause in causes:
        job.row(0, "stalls", op="nixl Write", cause=cause, since_ns=BEGAN_NS, seconds=30.0)
    job.open()
    findings = make_dump_verdict(read_hang_dataset(tmp_path, Problems())).findings
    assert {one.cause for one in findings} == set(causes)
    assert not any("{" in step.command + step.why for one in findings for step in one.next_steps)


def test_of_several_recordings_of_a_host_the_transfer_that_waits_longest_tells_for_how_long(tmp_path: Path) -> None:
    for name, seconds in (("first", 30.0), ("second", 90.0)):
        job = JobDataset(tmp_path / name, servers=(1,))
        job.row(0, "stalls", op="nixl Write", cause="transfer_stuck", since_ns=BEGAN_NS, seconds=seconds)
        job.open()
    (found,) = diagnose_files([tmp_path / "first", tmp_path / "second"]).findings
    assert "for 90 s so far" in found.headline
