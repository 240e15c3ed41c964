"""Inside a virtual machine: the NCCL probes on the testbed's library, attached in every way that the kernel has.

python3 -m tests.vm.guest_probes
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from railscope.probes.loading.libbpf import LoadError
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.transfers.programs import TransferPrograms
from railscope.testbed.job import LIBRARY
from tests.root.probe_targets import Target, all_reduce, attached, counted, loaded, target

CALLS: Final = 500
ELEMENTS: Final = 100
ENQUEUE_TIMES: Final = (EnqueueTime.OFF, EnqueueTime.PAIR)


def main() -> None:
    ways: dict[str, Any] = {}
    internals: dict[str, Any] = {}
    transfers: dict[str, Any] = {}
    with testbed_process() as process:
        comm = process.caller.new_communicator()
        for attach in AttachKind:
            for enqueue_time in ENQUEUE_TIMES:
                with contextlib.ExitStack() as stack:
                    try:
                        programs = stack.enter_context(
                            loaded(process, attach=attach, enqueue_time=enqueue_time, sample_every=1)
                        )
                    except LoadError as error:
                        ways[attach.value] = {"refused": str(error)}
                        break  # not for the time: and refusing takes this processor long
                    ways[f"{attach.value}+{enqueue_time.value}"] = count(process, comm, programs)
                    if enqueue_time is EnqueueTime.OFF:
                        internals[attach.value] = load(Internals, programs)
                        transfers[attach.value] = load(TransferPrograms, programs)
    print(json.dumps({"ways": ways, "internals": internals, "transfers": transfers}))


def count(process: Target, comm: int, programs: NcclPrograms) -> dict[str, Any]:
    """What was counted of `CALLS` calls."""
    with attached(programs, process):
        result = all_reduce(process, CALLS, comm, ELEMENTS)
        found = counted(programs, process.caller.pid)
        return {
            "result": result,
            "ops": [op.name for op in found],
            "calls": found[Op.AllReduce].calls,
            "payload_bytes": found[Op.AllReduce].payload_bytes,
            "events": len(programs.call_events.read()),
            "timed": int(programs.enqueue_times()["calls"].sum()),
        }


def load(more: type[Internals] | type[TransferPrograms], programs: NcclPrograms) -> dict[str, Any]:
    """{"refused": why further programs do not load, or None}."""
    try:
        more.load(programs).close()
    except LoadError as error:
        return {"refused": str(error)}
    return {"refused": None}


@contextmanager
def testbed_process() -> Iterator[Target]:
    """A process with a copy of the testbed's library, which nobody else probes."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(shutil.copy(LIBRARY, folder))
        with target(library, Layouts.load()) as process:
            yield process


if __name__ == "__main__":
    main()
