"""Who is GPU number k in small recordings (simulated)."""

from __future__ import annotations

from pathlib import Path

from railscope.agent.analysis.report.report import report_of
from railscope.agent.analysis.report.text import as_text
from railscope.agent.analysis.tables.gpus import find_gpus
from tests.unit.datasets import JobDataset


def test_gpus_are_numbered_by_their_rank_in_the_job_where_the_launcher_said_it(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2), world_ranks=True)
    job.communicator("backwards", (3, 2, 1, 0))
    gpus = find_gpus(job.open())
    assert [(gpu.number, gpu.server, gpu.gpu, gpu.pid, gpu.world_rank) for gpu in gpus.gpus] == [
        (0, "node-0", "0", 1000, 0),
        (1, "node-0", "1", 1001, 1),
        (2, "node-1", "0", 1002, 2),
        (3, "node-1", "1", 1003, 3),
    ]
    assert dict(gpus.communicators[0].members) == {0: 3, 1: 2, 2: 1, 3: 0}


def test_without_a_launchers_word_they_are_numbered_by_the_communicator_of_all(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("pair", (0, 1))
    job.communicator("backwards", (3, 2, 1, 0))
    gpus = find_gpus(job.open())
    assert [gpu.pid for gpu in gpus.gpus] == [1003, 1002, 1001, 1000]
    assert [one.comm for one in gpus.communicators] == ["backwards", "pair"]


def test_without_either_they_are_numbered_server_by_server(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 12))
    job.communicator("a", range(13, 1, -1))
    job.communicator("b", (1, 0))
    gpus = find_gpus(job.open())
    assert [gpu.pid for gpu in gpus.gpus] == [1000 + number for number in range(14)]


def test_a_communicator_whose_other_server_was_not_recorded_is_not_complete(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1), silent_servers=frozenset({1}))
    job.communicator("all", (0, 1))
    (communicator,) = find_gpus(job.open()).communicators
    assert communicator.nranks == 2
    assert not communicator.complete


def test_network_namespaces_that_nccl_takes_for_nodes_are_servers(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2,))
    for rank, netns in enumerate(("host-a", "host-b")):
        job.row(
            0, "communicators", instance=rank + 1, comm="c", rank=rank, nranks=2, node_rank=rank, pid=rank, netns=netns
        )
    assert [gpu.server for gpu in find_gpus(job.open()).gpus] == ["node-0/host-a", "node-0/host-b"]


def test_an_end_without_a_gpu_index_is_the_gpu_of_its_process(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2,))
    job.communicator("told", (0, 1))
    job.communicator("untold", (0, 1), gpu=None)
    gpus = find_gpus(job.open())
    assert [gpu.gpu for gpu in gpus.gpus] == ["0", "1"]
    assert [dict(one.members) for one in gpus.communicators] == [{0: 0, 1: 1}] * 2


def test_imported_ranks_that_name_no_process_are_gpus_by_their_rank_in_the_job(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(3,))
    for rank in range(3):
        for place, comm in enumerate(("world", "again")):
            job.row(0, "communicators", instance=2 * rank + place, comm=comm, rank=rank, nranks=3, world_rank=rank)
    gpus = find_gpus(job.open())
    assert [(gpu.number, gpu.world_rank) for gpu in gpus.gpus] == [(0, 0), (1, 1), (2, 2)]
    assert [dict(one.members) for one in gpus.communicators] == [{0: 0, 1: 1, 2: 2}] * 2


def test_a_rank_in_the_job_that_one_communicator_tells_is_its_processs(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2,))
    job.communicator("untold", (1, 0))
    job.communicator("told", (1, 0))
    for rank in (0, 1):
        job.row(0, "communicators", instance=10 + rank, comm="c", rank=rank, nranks=2, pid=1000 + rank, world_rank=rank)
    gpus = find_gpus(job.open())
    assert [(gpu.pid, gpu.world_rank, gpu.gpu) for gpu in gpus.gpus] == [(1000, 0, "0"), (1001, 1, "1")]


def test_a_gpus_rail_is_the_one_network_device_that_it_uses(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1, 1))
    job.communicator("all", (0, 1, 2))
    job.connection("all", 0, 1, net_device=3)
    job.connection("all", 1, 2, net_device=4)
    assert [gpu.rail for gpu in find_gpus(job.open()).gpus] == ["3", "", "4"]


def test_communicators_without_a_name_are_nobody_elses(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("all", (0, 1, 2, 3))
    job.communicator("a", (0, 1), comm=None)
    job.communicator("b", (2, 3), comm=None)
    gpus = find_gpus(job.open())
    assert len(gpus.gpus) == 4
    unnamed = [one for one in gpus.communicators if one.comm != "all"]
    assert len({one.comm for one in unnamed}) == 4
    assert [(dict(one.members), one.nranks, one.complete) for one in unnamed] == [
        ({0: 0}, None, False),
        ({1: 1}, None, False),
        ({0: 2}, None, False),
        ({1: 3}, None, False),
    ]


def test_calls_of_communicators_without_a_name_are_reported(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("all", (0, 1, 2, 3))
    job.communicator("a", (0, 1), comm=None)
    for _ in range(3):
        job.collective("all", "AllReduce", 1 << 20)
        job.collective("a", "AllReduce", 1 << 20)
    report = report_of(job.open())
    assert [(use.nranks, use.gpus, use.calls) for use in report.communicators] == [
        (4, (0, 1, 2, 3), 12),
        (None, (0,), 3),
        (None, (1,), 3),
    ]
    assert sum(line.lstrip().startswith("unknown:") for line in as_text(report).splitlines()) == 2


def test_ranks_of_one_process_that_no_index_tells_apart_are_gpus_each(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(4,))
    job.communicator("all", (0, 1, 2, 3), pid=41, gpu=None)
    job.communicator("again", (0, 1, 2, 3), pid=41, gpu=None)
    job.row(0, "communicators", instance=99, comm="other", rank=0, nranks=1, pid=42)
    gpus = find_gpus(job.open())
    assert [gpu.pid for gpu in gpus.gpus] == [41] * 4 + [42]
    assert [dict(one.members) for one in gpus.communicators] == [{0: 0, 1: 1, 2: 2, 3: 3}] * 2 + [{0: 4}]
