"""What each rank sends to each other rank, against what the real NCCL (on the CUDA test double) hands to its network.

With one rank on each host the peers are checked too: they are those that NCCL connected to and used.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from railscope.agent.recording.file import read_recording
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

METRIC = "railscope_comm_peer_wire_bytes_total"
ITERATIONS = 6
SIZE_BYTES = 1 << 18
RANKS = 4

Sent = dict[str, int]
"""Bytes by peer."""


def ring(wire_bytes: int, idle: int = -1) -> Callable[[int], Sent]:
    """To the next rank, but of one rank nothing."""
    return lambda rank: {} if rank == idle else {str((rank + 1) % RANKS): wire_bytes}


def everybody(rank: int) -> Sent:
    return {str(peer): SIZE_BYTES for peer in range(RANKS) if peer != rank}


PATTERNS: dict[str, Callable[[int], Sent]] = {
    "allreduce": ring(2 * (RANKS - 1) * SIZE_BYTES // RANKS),
    "allgather": ring((RANKS - 1) * SIZE_BYTES),
    "reducescatter": ring((RANKS - 1) * SIZE_BYTES),
    # The root is the last rank.
    "broadcast": ring(SIZE_BYTES, RANKS - 2),
    "reduce": ring(SIZE_BYTES, RANKS - 1),
    "sendrecv": everybody,
    "alltoall": everybody,
}
"""What a rank sends in one call."""


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_peers_get_what_the_calls_say_to_the_byte_and_are_those_that_nccl_sends_to(
    four_hosts: Fabric, double: Double, tmp_path: Path, pattern: str
) -> None:
    folder = tmp_path / "recordings"
    job = Job(
        four_hosts, tmp_path, double, pattern=pattern, iterations=ITERATIONS, size_bytes=SIZE_BYTES, hold=True
    )  # fmt: skip
    with job:
        pids = job.ready()
        only = [word for pid in pids for word in ("--pid", str(pid))]
        options = ("--level", "rails", "--series.peers", "8", "--recordings.directory", str(folder))
        with AgentProcess(*only, *options) as agent:
            job.start()
            assert all(report.verified for report in job.finished())
            expected = {str(rank): scaled(PATTERNS[pattern](rank)) for rank in range(RANKS)}
            agent.until(lambda: shown(agent) == {rank: sent for rank, sent in expected.items() if sent})
            handed = {rank: sum(sent.values()) for rank, sent in expected.items()}
            agent.until(lambda: handed_over(agent) == handed)
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: any(folder.glob("railscope-*.npz")))
        job.release()
        job.wait()
    recording = read_recording(next(folder.glob("railscope-*.npz")))
    rank_of = {one.instance: one.identity.rank for one in recording.communicators}
    used: dict[str, set[str]] = {}
    for connection in recording.connections:
        if connection["send"] and connection["network"] and connection["posted"]:
            used.setdefault(rank_of[int(connection["instance"])], set()).add(str(connection["peer"]))
    assert used == {rank: set(sent) for rank, sent in expected.items() if sent}


def scaled(sent: Sent) -> Sent:
    return {peer: ITERATIONS * wire_bytes for peer, wire_bytes in sent.items()}


def shown(agent: AgentProcess) -> dict[str, Sent]:
    """By rank."""
    found: dict[str, Sent] = {}
    for labels, value in agent.samples(METRIC):
        found.setdefault(labels["rank"], {})[labels["peer"]] = int(value)
    return found


def handed_over(agent: AgentProcess) -> dict[str, int]:
    """What NCCL gave to the network devices of each rank's host, by rank."""
    rank_of = {labels["netns"]: labels["rank"] for labels, _ in agent.samples("railscope_comm_info")}
    found = Counter[str](dict.fromkeys(rank_of.values(), 0))
    for labels, value in agent.samples("railscope_rail_collective_bytes_total", direction="transmit"):
        if labels.get("netns", "") in rank_of:
            found[rank_of[labels["netns"]]] += int(value)
    return dict(found)
