"""Transfers of other libraries that do not complete, as `railscope diagnose` finds them in a store.  All is made up."""

from __future__ import annotations

from pathlib import Path

from railscope.agent.cluster.verdict.dumps import make_dump_verdict
from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.facts.causes import Cause
from railscope.agent.imports.dataset_hang import read_hang_dataset
from railscope.agent.imports.facts import Problems
from railscope.agent.imports.hang_command import diagnose_files
from tests.unit.canned_store import CannedStore, agent, rank, read, stalled
from tests.unit.datasets import BEGAN_NS, JobDataset

METRIC = "railscope_transfer_stalled_seconds"
HOST = "host0:9779"


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
