"""Inside a virtual machine: the real NCCL over RDMA, on soft-RoCE devices and the stand-in for CUDA.

    python3 -m tests.vm.guest_nccl

Two ranks in one network namespace, each with a device on both of two rails; NCCL takes them for two hosts.  What its
own InfiniBand transport hands to each device is counted as the agent does at level *rails*.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.node.completion.handed_over import RailBytes
from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.functions.internals import Level, internal_points
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.memory.net_devices import device_arrays
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.internals import layout_record
from railscope.testbed.hosts import Host
from railscope.testbed.nccl.build import built
from tests.nccl.job import Job, RankReport
from tests.nccl.test_rail_bytes import Observed, process_facts
from tests.vm.soft_roce import GID_INDEX, SYSFS, Pair, made

RAILS: Final = (
    Pair(("rxe0", "rxe1"), ("eth0", "eth1"), subnet=0),
    Pair(("rxe2", "rxe3"), ("eth2", "eth3"), subnet=1),
)
ITERATIONS: Final = 20
SIZE_BYTES: Final = 1 << 18
PATTERNS: Final = ("allreduce", "allgather", "sendrecv")
_LIBRARY: Final = 0
_ENVIRONMENT: Final[Mapping[str, str | None]] = {
    "NCCL_IB_DISABLE": None,
    "NCCL_NET": "IB",
    "NCCL_IB_GID_INDEX": GID_INDEX,
    "NCCL_IB_TIMEOUT": "20",  # a processor that is emulated answers late
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_NET_MERGE_LEVEL": "LOC",  # each rail is a device of its own
}


class Rank(Host):
    """A rank that uses its own end of every rail, and finds the others through the loopback device."""

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs `arguments` as this rank; the process keeps its pid."""
        devices = ",".join(rail.devices[self.index] for rail in RAILS)
        return ["env", f"NCCL_IB_HCA=={devices}", *arguments]


@dataclass(frozen=True, slots=True)
class Ranks:
    """In a fabric's place."""

    hosts: Sequence[Host] = tuple(Rank(index, "", ("lo",), ("127.0.0.1",)) for index in range(2))


def main() -> None:
    with made(RAILS):
        print(json.dumps({pattern: observe(pattern) for pattern in PATTERNS}))


def observe(pattern: str) -> dict[str, Any]:
    """What a job did, and what was seen of it."""
    double = built()
    layouts = Layouts.load()
    with ExitStack() as stack:
        with double.nccl.open("rb") as file, Elf.open(file.fileno()) as elf:
            structures = layouts.structures(elf.build_id)
            points, below = probe_points(elf, _LIBRARY), internal_points(elf, _LIBRARY)
            arrays, layout = device_arrays(elf, structures), layouts.layout_of(elf)
        programs = NcclPrograms.load(ProgramSettings(only_observed_processes=True))
        stack.callback(programs.close)
        internals = Internals.load(programs)
        stack.callback(internals.close)
        internals.describe(_LIBRARY, layout_record(structures))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = stack.enter_context(
            Job(
                Ranks(),
                folder,
                double,
                pattern=pattern,
                iterations=ITERATIONS,
                size_bytes=SIZE_BYTES,
                hold=True,
                environment=_ENVIRONMENT,
            )
        )
        pids = job.ready(timeout_s=300)
        for pid in pids:
            programs.observe(pid)
        stack.callback(programs.attach(str(double.nccl), points, _LIBRARY, layout).close)
        for level in (Level.COMPLETION, Level.RAILS):
            stack.callback(internals.attach(str(double.nccl), below, level).close)
        packets = sent_packets()
        job.start()
        reports = job.finished(timeout_s=300)
        processes = {pid: process_facts(pid) for pid in pids}
        observed = Observed(programs, internals, arrays)
        rails = RailBytes(processes.get, lambda tgid, _: observed.devices(tgid))
        rails.add_readings(internals.sent())
        completed = sorted(each.completed for each in internals.progress().values())
        totals = rails.totals()
        packets = {device: count - packets[device] for device, count in sent_packets().items()}
        job.release()
        job.wait(timeout_s=300)
    return {
        "reports": [_facts(report) for report in reports],
        "completed": completed,
        "sent_packets": packets,
        "handed_over": {
            f"{rail.network.name} {rail.device}/{rail.port}": [sent.bytes, sent.messages]
            for rail, sent in totals.items()
        },
    }


def sent_packets() -> dict[str, int]:
    """By device, what the kernel has counted since it was made."""
    devices = [device for rail in RAILS for device in rail.devices]
    folder = SYSFS / "class/infiniband"
    return {device: int((folder / device / "ports/1/hw_counters/sent_pkts").read_text()) for device in devices}


def _facts(report: RankReport) -> dict[str, Any]:
    return {
        "verified": report.verified,
        "calls": {each.operation: each.calls for each in report.operations if each.calls},
    }


if __name__ == "__main__":
    main()
