"""Ranks of the real NCCL that do not make the same collectives, and those that differ by right."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from railscope.agent.facts.stall import LastCollectives, find_disagreement, parse_shapes
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import GptShape
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = pytest.mark.nccl

LIMITS = ("--stall.floor", "1s", "--stall.after", "4s")
SAID = "do not make the same collectives"
KINDS = {
    "operation": r"AllReduce of \d+ bytes float32 on rank 0, but AllGather of \d+ bytes on rank 1",
    "count": r"AllReduce of \d+ bytes float32 on rank 0, but AllReduce of \d+ bytes float32 on rank 1",
    "order": r"AllReduce of \d+ bytes float32 on rank 0, but AllGather of \d+ bytes on rank 1",
}


@pytest.mark.parametrize("how", KINDS)
def test_ranks_that_disagree_are_told_whether_that_hangs_or_not(
    two_hosts: Fabric, double: Double, tmp_path: Path, how: str
) -> None:
    """The double plays some disagreements to their end, as GPUs do now and then; others hang."""
    log, folder = tmp_path / "agent.log", tmp_path / "job"
    folder.mkdir()
    with Job(
        two_hosts,
        folder,
        double,
        pattern=f"disagree-{how}",
        iterations=100_000,
        size_bytes=1 << 14,
        pace_us=2_000,
        hold_init=True,
    ) as job:
        with AgentProcess("--pid", *map(str, job.pids), "--level", "all", *LIMITS, log=log) as agent:
            job.initialise()
            job.ready()
            job.start()
            agent.until(
                lambda: SAID in log.read_text() or any(one["cause"] == "ranks_disagree" for one in agent.stalls())
            )
            found = [one for one in agent.stalls() if one["cause"] == "ranks_disagree"]
            told = found[0]["evidence"][0] if found else log.read_text()
    match = re.search(r"between collective (\d+) and (\d+)|collective (\d+) is " + KINDS[how], told)
    assert match is not None, told
    numbers = [int(one) for one in match.groups() if one is not None]
    # Every 300th AllReduce, and the AllGather behind it.
    assert -(-numbers[0] // 600) * 600 - 1 <= numbers[-1]


def test_a_job_that_hangs_in_different_collectives_is_told_in_which(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    """The last AllReduce of one rank is an AllGather of the other, which goes on while the first waits for ever."""
    with Job(
        two_hosts, tmp_path, double, pattern="disagree-operation", iterations=300, size_bytes=1 << 14, hold_init=True,
        hold=True,
    ) as job:  # fmt: skip
        with AgentProcess("--pid", *map(str, job.pids), "--level", "all", *LIMITS) as agent:
            job.initialise()
            job.ready()
            job.start()
            agent.until(lambda: any(one["cause"] == "ranks_disagree" for one in agent.stalls()))
            agent.until(lambda: len(agent.samples("railscope_comm_stall_collectives")) > 0)
            found = [one for one in agent.stalls() if one["cause"] == "ranks_disagree"]
            told = agent.samples("railscope_comm_stall_collectives")
    for stall in found:
        assert re.fullmatch("collective 599 is " + KINDS["operation"], stall["evidence"][0])
    for labels, number in told:
        assert number == 600
        assert labels["last"].count("; ") == 15
        assert labels["last"].endswith("bytes")


def last_collectives(agent: AgentProcess) -> tuple[int, LastCollectives[str]]:
    """What an agent tells of its only rank, once it does."""
    agent.until(lambda: len(agent.samples("railscope_comm_stall_collectives")) > 0)
    ((labels, number),) = agent.samples("railscope_comm_stall_collectives")
    return int(labels["rank"]), LastCollectives(int(number), parse_shapes(labels["last"]))


@pytest.mark.parametrize(
    ("pattern", "how"), [("disagree-count", "count"), ("disagree-operation", "operation"), ("allreduce", "")]
)
def test_ranks_of_two_hosts_are_compared_though_one_of_them_or_both_have_left(
    two_hosts: Fabric, double: Double, tmp_path: Path, pattern: str, how: str
) -> None:
    """Each has an agent of its own.  Of different counts both come to an end here, of different operations one."""
    job = Job(two_hosts, tmp_path, double, pattern=pattern, iterations=300, size_bytes=1 << 14, hold_init=True)
    with job, ExitStack() as stack:
        agents = [stack.enter_context(AgentProcess("--pid", str(pid), "--level", "all", *LIMITS)) for pid in job.pids]
        job.initialise()
        job.ready()
        job.start()
        told = dict(map(last_collectives, agents))
    found = find_disagreement(told, str)
    assert told.keys() == {0, 1}
    assert (found is not None) == bool(how)
    if found is not None:
        assert re.fullmatch("collective 599 is " + KINDS[how], found.sentence)


SHAPE = GptShape(
    pipeline=2, tensor=1, data=1, layers=2, hidden=64, sequence=64, vocabulary=256, micro_batch=1, micro_batches=2
)


@pytest.mark.parametrize("pattern", ["mixed", "mixed-group", "split", "empty", "gpt", "everything"])
def test_ranks_that_make_the_same_are_never_said_to_differ(
    two_hosts: Fabric, double: Double, tmp_path: Path, pattern: str
) -> None:
    """Send and Recv beside collectives, groups, roots, a pipeline whose stages send different things."""
    log, folder = tmp_path / "agent.log", tmp_path / "job"
    folder.mkdir()
    with Job(
        two_hosts,
        folder,
        double,
        pattern=pattern,
        iterations=3 if pattern == "everything" else 150,
        size_bytes=1 << 12,
        shape=SHAPE if pattern == "gpt" else None,
        ranks_per_host=2 if pattern == "split" else 1,
        hold_init=True,
        hold=True,
    ) as job:
        with AgentProcess("--pid", *map(str, job.pids), "--level", "all", *LIMITS, log=log) as agent:
            job.initialise()
            job.ready()
            job.start()
            job.finished()
            # It compares once a second: at least once after the last call.
            calls = sum(value for _, value in agent.samples("railscope_comm_enqueued_total"))
            time.sleep(3)
            assert calls > 128
            assert SAID not in log.read_text()
            assert not any(one["cause"] == "ranks_disagree" for one in agent.stalls())
            job.release()
            job.wait()
