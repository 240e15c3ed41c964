"""The hash of a unique id is the one that the real NCCL gave to the communicator."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.comm_hash import comm_hash
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from railscope.testbed.nccl.library import NCCL_VERSION
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]


def test_the_unique_id_of_the_init_call_tells_the_hash_that_nccl_keeps(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with double.nccl.open("rb") as file, Elf.open(file.fileno()) as elf:
        points, layout = probe_points(elf, 0), Layouts.load().layout_of(elf)
    assert layout is not None
    programs = NcclPrograms.load(ProgramSettings())
    try:
        links = programs.attach(str(double.nccl), points, 0, layout)
        try:
            with Job(two_hosts, tmp_path, double, communicators=2) as job:
                pids = job.ready()
                job.run()
        finally:
            links.close()
        named: dict[tuple[int, int], tuple[int, int | None]] = {}
        deadline = time.monotonic() + 10
        while len(named) < 4 and time.monotonic() < deadline:
            for event in programs.lifecycle_events.read():
                if event["kind"] == LifecycleKind.INIT and event["has_unique_id"] and event["tgid"] in pids:
                    assert event["confirmed"]
                    of = int(event["tgid"]), int(event["instance"])
                    unique_id = event["unique_id"].tobytes()
                    named[of] = int(event["identity"]["comm_hash"]), comm_hash(unique_id, NCCL_VERSION)
    finally:
        programs.close()
    assert len(named) == 4
    assert all(kept == computed for kept, computed in named.values())
