"""The real NCCL observed without a probe on its calls: what its own numbers tell is what the job did."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job as WorkloadJob
from railscope.testbed.job import JobOptions
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job
from tests.nccl.test_completion import by_rank

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]


def probed_calls(agent: AgentProcess, library: Path) -> int:
    """Links of an agent to the functions that a library's collectives run through.

    Of the agent's own: others of this machine may have theirs on the same file.
    """
    with library.open("rb") as file:
        points = probe_points(Elf.open(file.fileno()), 0)
    wanted = {point.file_offset for point in (*points.calls, *points.calls_entry_only)}
    return sum(bool(wanted & offsets) for offsets in offsets_of_links(agent.process.pid))


def offsets_of_links(pid: int) -> Iterator[set[int]]:
    """Where each link of uprobes of a process is, as the kernel says it (bpf_uprobe_multi_show_fdinfo, 6.16)."""
    for descriptor in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            text = descriptor.read_text()
            if "uprobe_cnt:" in text:
                yield {int(word, 16) for word in re.findall(r"(?<=0x)[0-9a-f]+", text)}


def levels(agent: AgentProcess, version: str = "2.32.3") -> set[float]:
    """Of the libraries of this version: none before they are found."""
    return {value for _, value in agent.samples("railscope_probe_level", nccl_version=version)}


def total(agent: AgentProcess, metric: str) -> float:
    return sum(value for _, value in agent.samples(metric))


def test_no_call_meets_a_probe_and_every_one_is_known_with_its_payload(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    calls, size = 1_500, 4_096
    with Job(
        two_hosts, tmp_path, double, iterations=calls, size_bytes=size, pace_us=4_000, hold=True, hold_init=True
    ) as job:
        with AgentProcess("--pid", *map(str, job.pids), "--level", "watch") as agent:
            agent.until(lambda: levels(agent) == {-1})
            job.initialise()
            job.ready()
            job.start()
            # For about a second in every few, calls are counted.
            agent.until(lambda: total(agent, "railscope_comm_estimated_total") > 0)
            agent.until(lambda: total(agent, "railscope_collective_calls_total") > 0)
            agent.until(lambda: probed_calls(agent, double.nccl) == 0)
            job.finished()
            agent.until(lambda: by_rank(agent, "railscope_comm_enqueued_total") == {"0": calls, "1": calls})
            counted = total(agent, "railscope_collective_calls_total")
            estimated = total(agent, "railscope_collective_estimated_calls_total")
            payload = total(agent, "railscope_collective_estimated_payload_bytes_total")
            sequences = by_rank(agent, "railscope_comm_sequence")
            from_start = by_rank(agent, "railscope_comm_counted_from_start")
            stalled = agent.stalls()
            job.release()
            job.wait()
    assert counted + estimated == 2 * calls
    assert payload == estimated * size
    assert sequences == {"0": calls, "1": calls}
    assert from_start == {"0": 0, "1": 0}
    assert stalled == []


def test_the_governor_gives_up_counts_for_very_many_calls_and_the_next_job_gets_them_back(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    iterations = 2_000
    calls = 4 * iterations
    log, folder = tmp_path / "agent.log", tmp_path / "job"
    folder.mkdir()
    with Job(
        *(two_hosts, folder, double),
        pattern="grouped",
        iterations=iterations,
        size_bytes=256,
        hold=True,
        hold_init=True,
    ) as job:
        with AgentProcess("--pid", *map(str, job.pids), "--budget", "0.01%", log=log) as agent:
            agent.until(lambda: probed_calls(agent, double.nccl) > 0)
            job.initialise()
            job.ready()
            job.start()
            agent.until(lambda: levels(agent) == {-1})
            agent.until(lambda: probed_calls(agent, double.nccl) == 0)
            assert agent.samples("railscope_probe_attached", program="calls") == []
            job.finished(120)
            agent.until(lambda: by_rank(agent, "railscope_comm_enqueued_total") == {"0": calls, "1": calls})
            job.release()
            job.wait()
            agent.until(lambda: -1 not in levels(agent))
            agent.until(lambda: [on for _, on in agent.samples("railscope_probe_attached", program="calls")] == [1])
    assert "counts to watch: " in log.read_text()


def test_a_library_that_has_no_numbers_is_counted_and_the_log_says_why(two_hosts: Fabric, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    with WorkloadJob(two_hosts.hosts, JobOptions(pattern="inference", seconds=60)) as job:
        with AgentProcess("--pid", *map(str, job.pids), "--level", "watch", log=log) as agent:
            agent.until(lambda: total(agent, "railscope_collective_calls_total") > 100)
            before = total(agent, "railscope_collective_calls_total")
            agent.until(lambda: total(agent, "railscope_collective_calls_total") > before)
            found = {value for _, value in agent.samples("railscope_probe_level")}
        job.stop()
    assert found == {0}
    assert log.read_text().count("its calls are counted although the level is watch") == 1
