"""What happens between the calls of a real-library job: pauses, checkpoints, warm-up, a collective left out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Moments, SkippedCall
from railscope.testbed.nccl.build import Double
from tests.nccl.job import Job
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]


def test_pauses_checkpoints_and_warm_up_take_their_time_and_change_no_result(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    job = Job(
        two_hosts, tmp_path, double, iterations=4, size_bytes=4096, warm_up_ms=300, destroy=False,
        pause=Moments(every=2, milliseconds=200), checkpoint=Moments(every=3, milliseconds=500),
    )  # fmt: skip
    with job:
        reports = job.run()
    assert all(report.verified for report in reports)
    assert [report.count("AllReduce").calls for report in reports] == [4, 4]
    assert all(1.2 <= report.seconds < 20 for report in reports)


def test_a_rank_that_skips_a_collective_waits_for_ever_and_so_do_its_peers(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, iterations=50, size_bytes=4096, skip=SkippedCall(1, 20)) as job:
        pids = job.ready()
        job.start()
        eventually(lambda: Path(f"/proc/{pids[1]}/syscall").read_text().startswith("34 "))  # pause
        time.sleep(0.3)
        assert not any((tmp_path / f"report.{rank}").exists() for rank in (0, 1))
