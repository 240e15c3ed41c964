"""Datasets recorded beside the real NCCL (on the CUDA test double): calls and what completed of them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from railscope.agent.dataset.reader import open_dataset
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.test_datasets import recorder
from tests.nccl.job import Job

CLOCKS_NS = 50_000
"""Operations take ten times as long."""

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]


def test_a_dataset_holds_every_call_and_its_completion_once(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    calls, size_bytes = 200, 1 << 16
    folder = tmp_path / "dataset"
    with Job(two_hosts, tmp_path, double, iterations=calls, size_bytes=size_bytes, hold=True) as job:
        pids = job.ready()
        with recorder(folder, pids, "--level", "completion") as record:
            job.start()
            job.finished()
            # What completed is on its way through the kernel's ring.
            time.sleep(1)
            record.send_signal(signal.SIGINT)
            out, err = record.communicate(timeout=60)
            assert record.returncode == 0, err
            assert "nothing was lost" in out
        job.release()
        job.wait()
    with open_dataset([folder]) as dataset:
        ends = dataset.rows(dataset["communicators"]).to_pylist()
        assert sorted(end["rank"] for end in ends) == [0, 1]
        assert {end["nranks"] for end in ends} == {2}
        assert len({end["comm"] for end in ends}) == 1
        for end in ends:
            made, done = (
                dataset.rows(rows.filter(rows.instance == end["instance"]).order_by("sequence")).to_pandas()
                for rows in (dataset["calls"], dataset["operations"])
            )
            assert made["sequence"].tolist() == done["sequence"].tolist() == list(range(1, calls + 1))
            assert set(made["op"]) == set(done["op"]) == {"AllReduce"}
            assert set(made["payload_bytes"]) == set(done["payload_bytes"]) == {size_bytes}
            assert set(done["data_type"]) == set(made["data_type"])
            assert set(done["source"]) == {"proxy"}
            assert done["algorithm"].notna().all()
            assert done["protocol"].notna().all()
            assert (done["channels"] > 0).all()
            # Called, handed over, begun when the one before was complete, ended.
            assert (made["time_ns"] <= done["handed_over_ns"]).all()
            assert (done["handed_over_ns"] <= done["begin_ns"]).all()
            assert (done["begin_ns"] < done["end_ns"]).all()
            # Each moment goes by the clock reading that is nearest to it, and two readings differ by some microseconds.
            assert (done["begin_ns"].to_numpy()[1:] >= done["end_ns"].to_numpy()[:-1] - CLOCKS_NS).all()
        connections = dataset.rows(dataset["connections"]).to_pylist()
        assert {one["send"] for one in connections} == {True, False}
        assert {one["network"] for one in connections} == {None}
        assert {one["instance"] for one in connections} == {end["instance"] for end in ends}
