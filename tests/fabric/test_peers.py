"""What each rank sends to each other rank, as the agent shows it of real jobs, against what these jobs send.

A scaled-down GPT against `railscope estimate`; experts and data parallelism against the driver's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Shape
from railscope.agent.model.traffic import estimate_traffic
from railscope.agent.node.collectives.peer_bytes import CALL, OTHER, RING
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import GptShape, Job, JobOptions, RankReport
from tests.fabric.agent_process import AgentProcess
from tests.fabric.experts import expert_bytes

pytestmark = [pytest.mark.root, pytest.mark.fabric]

METRIC = "railscope_comm_peer_wire_bytes_total"
ITERATIONS = 3
RANKS = 4

Samples = list[tuple[dict[str, str], float]]


def observed(fabric: Fabric, options: JobOptions, arguments: Sequence[str]) -> tuple[tuple[RankReport, ...], Samples]:
    """Run a job beside an agent; returns what the ranks say they did, and what each is shown to have sent."""
    with Job(fabric.hosts, options) as job:
        only = [word for pid in job.pids for word in ("--pid", str(pid))]
        with AgentProcess(*only, *arguments) as agent:
            agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] == len(job.pids))
            job.release()
            reports = job.wait(60)
            # What has ended is told as what lives is.
            agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] == 0)
            assert all(report.verified for report in reports)
            return reports, agent.samples(METRIC)


def matrix(reports: Sequence[RankReport], samples: Samples, basis: str | None = None) -> NDArray[np.int64]:
    """Bytes between the ranks of the job, over all communicators."""
    rank_of = {
        (communicator.hash, communicator.rank): report.rank
        for report in reports
        for communicator in report.communicators
    }
    sent = np.zeros((len(reports), len(reports)), dtype=np.int64)
    for labels, value in samples:
        if basis in (None, labels["basis"]):
            source = rank_of[labels["comm"], int(labels["rank"])]
            sent[source, rank_of[labels["comm"], int(labels["peer"])]] += int(value)
    return sent


def next_rank(edge: int) -> NDArray[np.int64]:
    return edge * np.roll(np.eye(RANKS, dtype=np.int64), 1, axis=1)


def test_a_gpt_sends_between_every_pair_of_ranks_what_is_estimated(two_hosts: Fabric) -> None:
    shape = Shape(
        layers=4, hidden=64, sequence=32, vocabulary=500,
        global_batch=8, micro_batch=2, pipeline=2, tensor=2, data=1,
    )  # fmt: skip
    sizes = GptShape(2, 2, 1, 4, 64, 32, 500, 2, shape.micro_batches)
    options = JobOptions("gpt", iterations=ITERATIONS, ranks_per_host=2, hold=True, shape=sizes)
    reports, samples = observed(two_hosts, options, ["--series.peers", "8"])
    flows = estimate_traffic(shape, default_mapping(shape))
    np.testing.assert_array_equal(matrix(reports, samples), ITERATIONS * flows.matrix())
    # Neighbours in the pipeline are named by the calls.
    assert matrix(reports, samples, CALL).sum() == sum(report.totals()["Send"].payload_bytes for report in reports)


def test_experts_send_each_other_what_the_driver_drew_to_the_byte(two_hosts: Fabric) -> None:
    options = JobOptions("moe", iterations=ITERATIONS, ranks_per_host=2, hold=True, seed=5)
    reports, samples = observed(two_hosts, options, ["--series.peers", "8"])
    assert {labels["basis"] for labels, _ in samples} == {CALL}
    np.testing.assert_array_equal(matrix(reports, samples), expert_bytes(5, ITERATIONS, RANKS))


def test_gradients_go_round_the_ring(two_hosts: Fabric) -> None:
    options = JobOptions("ddp", iterations=2, ranks_per_host=2, hold=True)
    reports, samples = observed(two_hosts, options, ["--series.peers", "1"])
    assert {labels["basis"] for labels, _ in samples} == {RING}
    # Two iterations of buckets of 1, 25 and 25 MiB: three halves of each go to the next rank.
    np.testing.assert_array_equal(matrix(reports, samples), next_rank(2 * 51 * (1 << 20) * 3 // 2))


def test_beyond_the_limit_peers_are_one_and_without_the_option_there_is_nothing(two_hosts: Fabric) -> None:
    options = JobOptions("moe", iterations=ITERATIONS, ranks_per_host=2, hold=True, seed=5)
    _, samples = observed(two_hosts, options, ["--series.peers", "1"])
    by_rank: dict[str, list[str]] = {}
    for labels, _ in samples:
        by_rank.setdefault(labels["rank"], []).append(labels["peer"])
    assert sorted(by_rank) == ["0", "1", "2", "3"]
    assert all(len(peers) == 2 and OTHER in peers for peers in by_rank.values())
    assert sum(value for _, value in samples) == expert_bytes(5, ITERATIONS, RANKS).sum()
    _, samples = observed(two_hosts, options, [])
    assert samples == []
