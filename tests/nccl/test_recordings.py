"""Recordings beside the real NCCL (on the CUDA test double): what completed, in which order, and how long it took."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.recording.file import read_recording
from railscope.probes.nccl.abi import Op
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job
from tests.nccl.test_completion import by_rank

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]


def test_a_recording_holds_every_completion_once_and_in_order(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    calls, size_bytes = 200, 1 << 16
    folder = tmp_path / "recordings"
    with Job(two_hosts, tmp_path, double, iterations=calls, size_bytes=size_bytes, hold=True) as job:
        pids = job.ready()
        with AgentProcess(
            "--pid", *map(str, pids), "--level", "completion", "--recordings.directory", str(folder)
        ) as agent:
            job.start()
            job.finished()
            agent.until(lambda: by_rank(agent, "railscope_comm_completed_total") == {"0": calls, "1": calls})
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: bool(list(folder.glob("railscope-*.npz"))))
            job.release()
            job.wait()
    one = read_recording(next(folder.glob("railscope-*.npz")))
    assert sorted(comm.identity.rank for comm in one.communicators) == ["0", "1"]
    assert len({comm.identity.comm for comm in one.communicators}) == 1
    assert len(one.open_operations) == 0
    for comm in one.communicators:
        made = one.calls[one.calls["instance"] == comm.instance]
        done = one.completions[one.completions["instance"] == comm.instance]
        assert made["sequence"].tolist() == done["sequence"].tolist() == list(range(made["sequence"][0], calls + 1))
        assert len(done) == calls
        assert set(done["op"].tolist()) == {int(Op.AllReduce)}
        assert set(done["payload_bytes"].tolist()) == {size_bytes}
        # Handed over after the call had begun, complete after that, and that long under way.
        assert (done["posted_ns"] >= made["time_ns"]).all()
        assert (done["duration_ns"] > 0).all()
        # An operation begins when it is handed over and the one before is complete.
        began_ns = done["time_ns"] - done["duration_ns"]
        assert (began_ns >= done["posted_ns"]).all()
        assert (began_ns[1:] >= done["time_ns"][:-1]).all()
        assert comm.completed == comm.enqueued == calls
    assert {int(side) for side in np.unique(one.connections["send"])} == {0, 1}
