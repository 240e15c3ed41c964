"""Stalls of no communicator that a host knows: live and of recordings it is the process's.  All is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.dataset.from_recording import convert_file
from railscope.agent.imports.hang_command import diagnose_files
from railscope.agent.recording.file import write_recording
from tests.unit.canned_store import CannedStore, agent, read
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, recording, stall

HOST = "host0"


def live_headline(cause: str, op: str) -> str:
    store = CannedStore()
    agent(store, f"{HOST}:9779")
    nameless = {"instance": f"{HOST}:9779", "comm": "unknown", "rank": "unknown"}
    store.say("railscope_comm_stalled==1", 1, op=op, cause=cause, **nameless)
    store.say("railscope_comm_stall_info==1", 1, cause=cause, strength="strong", **nameless)
    store.say("railscope_call_inside_seconds", 30.0, call=op, nranks="unknown", pid="77", **nameless)
    (found,) = make_verdict(read(store)).findings
    return found.headline


@pytest.mark.parametrize(
    ("cause", "op", "said"),
    [
        ("inside_call", "ncclCommInitAll", "it does not return for a process (pid 77, host0)"),
        (
            "unseen_work_stuck",
            "cudaStreamSynchronize",
            "a wait for the GPU does not return for a process (pid 77, host0)",
        ),
        ("process_stopped", "AllReduce", "a process (pid 77, host0) is stopped (SIGSTOP or a debugger)"),
    ],
)
def test_the_process_is_named_live_and_of_recordings(tmp_path: Path, cause: str, op: str, said: str) -> None:
    headline = f"STALLED for 30 s: {op}: {said}."
    assert live_headline(cause, op) == headline
    one = replace(
        stall("unknown"), rank="unknown", nranks="unknown", pid=77, op=op, cause=cause, seconds=30.0, rail="",
        device="", since_realtime_ns=REALTIME_NS + BEGAN_NS + 30 * SECOND_NS, evidence=("thread 77 has not returned",),
    )  # fmt: skip
    other = replace(one, pid=78, evidence=("thread 78 has not returned",))
    with (tmp_path / "stall.npz").open("wb") as file:
        write_recording(file, replace(recording(), host=HOST, communicators=(), stalls=(one,)))
    with (tmp_path / "two.npz").open("wb") as file:
        write_recording(file, replace(recording(), host=HOST, communicators=(), stalls=(one, other)))
    for name in ("stall", "two"):
        convert_file(tmp_path / f"{name}.npz", tmp_path / name)
    for path in (tmp_path / "stall.npz", tmp_path / "stall"):
        verdict = diagnose_files([path])
        assert [found.headline for found in verdict.findings] == [headline]
        assert "host0: thread 77 has not returned" in verdict.notes
    for path in (tmp_path / "two.npz", tmp_path / "two"):
        assert "pid 78" in " ".join(found.headline for found in diagnose_files([path]).findings)
