"""The agent beside real MPI programs whose calls do not block: it counts what they say they did and names who stops."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.fabric.agent_process import AgentProcess
from tests.transfers.mpi import EVERY, Mpi
from tests.transfers.test_real_libraries import attached, totals
from tests.waiting import eventually

pytestmark = pytest.mark.root


@pytest.fixture(params=EVERY, ids=lambda mpi: mpi.name)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    found: Mpi = request.param
    if not found.there:
        pytest.skip(f"{found.run} or mpi4py is not there for this Python: run make .venv/.stamps/transfers")
    return found


def ranks_of(folder: Path) -> list[int]:
    """Their pids, once they are there."""
    eventually(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)))
    return [int((folder / f"ready{rank}").read_text()) for rank in (0, 1)]


def following(pids: list[int], *options: str) -> AgentProcess:
    return AgentProcess(*(word for pid in pids for word in ("--pid", str(pid))), "--budget", "100%", *options)


def test_what_does_not_block_is_counted_from_its_call_to_its_completion(mpi: Mpi, tmp_path: Path) -> None:
    with mpi.running("complete", tmp_path):
        with following(ranks_of(tmp_path)) as agent:
            agent.until(lambda: "mpi" in attached(agent))
            (tmp_path / "go").touch()
            eventually(lambda: all((tmp_path / f"did{rank}").exists() for rank in (0, 1)))
            operations, payload = totals(agent, "operations_total"), totals(agent, "payload_bytes_total")
            completed, unfollowed = totals(agent, "seconds_count"), totals(agent, "unfollowed_total")
            failed = totals(agent, "failures_total")
            under_way = agent.samples("railscope_transfers_in_flight", library="mpi")
        (tmp_path / "end").touch()
    did: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for rank in (0, 1):
        for into, counts in zip((did, moved), json.loads((tmp_path / f"did{rank}").read_text()), strict=True):
            into.update(counts)
    assert {op: count for (library, op), count in operations.items() if library == "mpi" and op != "Wait"} == did
    assert {op: payload.get(("mpi", op), 0) for op in moved} == moved
    # Each rank let go of one send.
    assert {op: completed.get(("mpi", op), 0) for op in did} == {**did, "Send": did["Send"] - 2}
    assert {op: unfollowed["mpi", op] for op in did} == {**dict.fromkeys(did, 0), "Send": 2}
    assert not any(failed[of] for of in failed if of[0] == "mpi")
    assert under_way == []
    assert operations["mpi", "Wait"] == completed["mpi", "Wait"]


def test_a_send_is_a_stall_once_its_program_waits_for_it(mpi: Mpi, tmp_path: Path) -> None:
    with mpi.running("hang", tmp_path):
        sender, receiver = ranks_of(tmp_path)
        with following([sender, receiver], "--stall.after", "3s") as agent:
            agent.until(lambda: "mpi" in attached(agent))
            (tmp_path / "go").touch()
            eventually(lambda: all((tmp_path / f"met{rank}").exists() for rank in (0, 1)))
            os.kill(receiver, signal.SIGSTOP)
            (tmp_path / "send").touch()
            agent.until(
                lambda: any(age > 5 for _, age in agent.samples("railscope_transfer_inflight_seconds", op="Send"))
            )
            assert agent.stalls() == [], "it computes, as far as anybody knows"
            (tmp_path / "wait").touch()
            agent.until(lambda: [one["cause"] for one in agent.stalls()] == ["process_stopped"])
            (stall,) = agent.stalls()
            os.kill(receiver, signal.SIGCONT)
            agent.until(lambda: agent.stalls() == [])
        (tmp_path / "end").touch()
    assert (stall["library"], stall["op"], stall["peer"], stall["pid"]) == ("mpi", "mpi Send", "rank 1", sender)
    assert stall["blamed_pid"] == receiver
