"""`report --only`: one job of several, under the numbers and beside the rails of all of them (simulated)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.analysis.facts.report import Report
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.report import ReportOptions, make_report
from railscope.agent.analysis.report.report_json import as_json
from railscope.agent.analysis.report.text import as_text
from railscope.agent.dataset.files import DatasetError
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset

OPTIONS = ReportOptions(memory_bytes=1 << 29)
RAIL_BYTES = 1 << 20


def two_jobs(folder: Path, first: tuple[int, ...], second: tuple[int, ...], **named: Any) -> Path:
    """Two servers of four GPUs with a rail for each, and two jobs that iterate, of a pipeline and a ring."""
    job = JobDataset(folder, servers=(4, 4))
    for comm, gpus in (("first", first), ("second", second)):
        job.communicator(comm, gpus, **named)
        for _ in range(6):
            job.collective(comm, "AllReduce", 1 << 20)
            for rank in range(len(gpus) - 1):
                job.call(comm, rank, "Send", 1 << 16, peer=rank + 1)
                job.call(comm, rank + 1, "Recv", 1 << 16, peer=rank)
    for rank in range(len(second) - 1):
        job.operation("second", rank + 1, "Recv", 1 << 16, 0, 1000 * (rank + 1), peer=rank)
    for server in (0, 1):
        for rail in range(4):
            job.row(server, "rails", rail_id=rail, rail=str(rail), device=f"mlx5_{rail}")
            for second_of in (0, 1):
                totals = dict.fromkeys(("transmit_bytes", "receive_bytes"), second_of * RAIL_BYTES)
                job.row(server, "rail_samples", time_ns=BEGAN_NS + second_of * SECOND_NS, rail_id=rail, **totals)
    return job.write()


def of(folder: Path, only: str | None) -> Report:
    return make_report([folder], replace(OPTIONS, only=only))


def test_gpus_keep_the_numbers_of_the_whole_report(tmp_path: Path) -> None:
    folder = two_jobs(tmp_path, (0, 1, 4, 5), (2, 3, 6, 7))
    whole, alone = of(folder, None), of(folder, "second")
    assert alone.gpus == tuple(gpu for gpu in whole.gpus if gpu.number in (2, 3, 6, 7))
    own = {2, 3, 6, 7}
    assert list(alone.matrix.pairs) == [pair for pair in whole.matrix.pairs if pair.source in own]
    assert alone.communicators == tuple(
        replace(use, role=alone.communicators[0].role) for use in whole.communicators if use.comm == "second"
    )
    assert {use.gpu for use in alone.composition.ranks} == own
    assert {(use.gpu, use.active_seconds) for use in alone.receives} == {
        (use.gpu, use.active_seconds) for use in whole.receives
    }
    assert {use.gpu for use in alone.receives} == {3, 6, 7}
    assert alone.regularity is not None
    assert alone.regularity.gpu in own
    said = "Of 8 recorded GPUs only 2, 3, 6, 7, which share no communicator with the others; their numbers are those"
    assert said in " ".join(as_text(alone).split())
    assert as_json(alone)["recording"]["one_of_several"].startswith(said)
    assert "one_of_several" in as_json(whole)["recording"]
    assert "recorded GPUs only" not in as_text(whole)


def test_the_beginning_of_a_communicator_s_hash_is_enough_where_no_other_job_has_one_that_begins_so(
    tmp_path: Path,
) -> None:
    job = JobDataset(tmp_path, servers=(4,))
    for comm, gpus in (("00aa01", (0, 1)), ("00aa02", (2, 3))):
        job.communicator(comm, gpus)
        job.collective(comm, "AllReduce", 1 << 20)
    folder = job.write()
    assert {gpu.number for gpu in of(folder, "0x00AA02").gpus} == {2, 3}
    with pytest.raises(DatasetError, match=r"--only 00aa: 2 communicators begin so, name one of them: 00aa01, 00aa02"):
        of(folder, "00aa")


def test_the_page_names_gpus_by_these_numbers_in_picture_and_tables(tmp_path: Path) -> None:
    page = html_text(of(two_jobs(tmp_path, (0, 1, 4, 5), (2, 3, 6, 7)), "second"))
    assert "GPU 2 (node-0) → GPU 3 (node-0): " in page
    assert "What GPU 2 calls" in page
    assert "GPU 0" not in page
    assert "numbered as in the report of all jobs" in page


def test_rails_of_servers_that_the_job_does_not_use_are_left_out(tmp_path: Path) -> None:
    folder = two_jobs(tmp_path, (0, 1, 2, 3), (4, 5, 6, 7))
    assert {use.server for use in of(folder, None).rails} == {"node-0", "node-1"}
    alone = of(folder, "second")
    assert {use.server for use in alone.rails} == {"node-1"}
    assert alone.shared_rails == ""
    assert alone.losses == ()


def test_port_bytes_of_servers_that_other_jobs_use_are_said_to_be_of_all(tmp_path: Path) -> None:
    alone = of(two_jobs(tmp_path, (0, 1, 4, 5), (2, 3, 6, 7)), "first")
    said = (
        "The rails' port bytes do not belong to this job alone: 4 GPUs of other jobs are on 2 of its servers, and a "
        "port counts the traffic of all jobs."
    )
    text = " ".join(as_text(alone).split())
    assert text.index("Rails (port bytes") < text.index(said) < text.index("Composition (")
    assert said in html_text(alone)
    assert said in as_json(alone)["losses"]


def test_a_gpu_has_its_place_among_all_gpus_of_its_server_and_so_its_rail(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(4, 4))
    job.communicator("left", (0, 1, 4, 5))
    job.communicator("right", (2, 3, 6, 7))
    for comm in ("left", "right"):
        job.collective(comm, "AllReduce", 1 << 20)
    folder = job.write()
    leaves = tmp_path / "leaves.csv"
    # Rails 2 and 3 of the two servers are at one leaf; of places among the job's own GPUs, 0 and 1, they would not be.
    rows = [f"node-{server},{rail},leaf-{rail // 2 * 9 or server}" for server in (0, 1) for rail in range(4)]
    leaves.write_text("\n".join(["server,rail,leaf", *rows]) + "\n")
    options = replace(OPTIONS, leaf_map=leaves)
    right = make_report([folder], replace(options, only="right")).matrix
    left = make_report([folder], replace(options, only="left")).matrix
    assert right.spine_wire_bytes == 0
    assert left.spine_wire_bytes == left.between_servers_wire_bytes > 0


def test_several_namespaces_of_a_host_have_rails_of_their_own(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(4,))
    for comm, gpus in (("first", (0, 1)), ("second", (2, 3))):
        for rank, gpu in enumerate(gpus):
            job.row(
                0,
                "communicators",
                instance=gpu + 1,
                comm=comm,
                rank=rank,
                nranks=2,
                node_rank=rank,
                pid=1 + gpu,
                gpu="0",
                netns=f"{comm}-{rank}",
            )
    for rail, netns in enumerate(("first-0", "second-0", "second-1", None)):
        job.row(0, "rails", rail_id=rail, rail=str(rail), device="eth0", netns=netns)
        for moment in (0, 1):
            totals = {"transmit_bytes": moment, "receive_bytes": moment}
            job.row(0, "rail_samples", time_ns=BEGAN_NS + moment * SECOND_NS, rail_id=rail, **totals)
    folder = job.write()
    assert {use.server for use in of(folder, "first").rails} == {"node-0", "node-0/first-0"}
    assert {use.server for use in of(folder, "second").rails} == {"node-0", "node-0/second-0", "node-0/second-1"}
