"""A job of a simulated NCCL and a simulated CUDA, with the real probes on both.

Both are a few instructions in one library, loaded by a process that makes the calls that a test tells it to; the last
argument of a CUDA function is what it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.cuda import LIBRARY_PROGRAMS, cuda_points, library_points
from railscope.probes.nccl.functions.entry_points import ENQUEUE_CHECK
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.probes.nccl.layouts.layout import CommLayout
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.cuda import CudaEvents
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.cuda import CudaStat
from railscope.probes.nccl.records.internals import LAYOUT
from tests.root.caller import Caller
from tests.root.probe_targets import GARBAGE, assemble

LIBRARY = 3
NOT_READY = 600
CAPTURED_EVENT = 907
PERSISTENT = 32
SESSION = (AttachKind.MULTI, EnqueueTime.SESSION)
MODES = [
    pytest.param(SESSION, id="session"),
    pytest.param((AttachKind.MULTI, EnqueueTime.OFF), id="multi"),
    pytest.param((AttachKind.PERF, EnqueueTime.OFF), id="perf"),
]
_SECOND, _THIRD, _FOURTH = "esi", "edx", "ecx"
_RESULT = {
    **dict.fromkeys((*LIBRARY_PROGRAMS.values(), "ncclAllReduce", "ncclCommDestroy"), _SECOND),
    **dict.fromkeys(("cudaEventQuery", "cudaEventSynchronize", "cudaEventDestroy"), _SECOND),
    **dict.fromkeys(("cudaStreamQuery", "cudaStreamSynchronize", "cudaStreamDestroy"), _SECOND),
    "cudaStreamSynchronize_ptsz": _SECOND,
    **dict.fromkeys(("cudaEventRecord", "cudaEventRecord_ptsz"), _THIRD),
    "cudaEventRecordWithFlags": _FOURTH,
}
_CODE = {
    **{name: f"push %rbp; pop %rbp; mov %{register},%eax; ret" for name, register in _RESULT.items()},
    # Stays until the word that its last argument leads to is no longer zero.
    "cudaEventRecord_ptsz": "push %rbp; pop %rbp; test %rcx,%rcx; jz 2f; 1: pause; cmpl $0,(%rcx); je 1b; "
    "2: mov %edx,%eax; ret",
    # Leaves its caller too, as longjmp does, where its result would be this.
    "cudaEventSynchronize": "push %rbp; pop %rbp; mov %esi,%eax; cmp $77,%esi; jne 1f; pop %rdx; 1: ret",
    "never_returned_to": "mov $77,%esi; call cudaEventSynchronize@PLT; ud2",
}
LAYOUT_OF_COMMUNICATORS = CommLayout(
    source="dwarf",
    nccl_version="2.99.1",
    start_magic=0,
    comm_hash=64,
    rank=72,
    nranks=76,
    cuda_dev=80,
    end_magic=4088,
    async_result=200,
)


@dataclass(frozen=True, slots=True)
class Job:
    """The process, and what was proved of it."""

    caller: Caller
    cuda: CudaEvents
    programs: NcclPrograms

    def enqueue(self, comm: int, stream: int, calls: int = 1) -> None:
        """Calls of NCCL that are not launched yet."""
        info = self.caller.memory(128)
        for offset, value in ((0, int(Op.AllReduce)), (32, 16), (40, 7), (56, comm), (64, stream)):
            self.caller.store(info + offset, value, 8)
        self.caller.call(ENQUEUE_CHECK, calls, info, 0)

    def plan(self, comm: int, *, captured: bool, program: str = "cuda_plan") -> None:
        plan = self.caller.memory(64)
        self.caller.store(plan + PERSISTENT, int(captured), 1)
        self.caller.call(LIBRARY_PROGRAMS[program], 1, comm, plan)

    def finish(self, comm: int) -> None:
        self.caller.call(LIBRARY_PROGRAMS["cuda_finish"], 1, comm, 0)

    def launch(self, comm: int, *, captured: bool = False, program: str = "cuda_plan") -> None:
        """What has been enqueued goes to its streams."""
        self.plan(comm, captured=captured, program=program)
        self.finish(comm)

    def run(self, comm: int, stream: int, calls: int = 1) -> None:
        for _ in range(calls):
            self.enqueue(comm, stream)
            self.launch(comm)

    def record(self, event: int, stream: int, result: int = 0) -> None:
        self.caller.call("cudaEventRecord", 1, event, stream, GARBAGE | result)

    def record_slowly(self, event: int, stream: int) -> Callable[[], None]:
        """A call that records in another thread, begun; what is returned lets it return."""
        before, go = self.cuda.stats()[CudaStat.CALLS], self.caller.memory(8)
        self.caller.start("cudaEventRecord_ptsz", event, stream, 0, go)
        while self.cuda.stats()[CudaStat.CALLS] == before:
            time.sleep(0.001)
        return lambda: self.caller.store(go, 1, 4)

    def ask(self, handle: int, result: int = 0, function: str = "cudaEventQuery") -> None:
        assert self.caller.call(function, 1, handle, GARBAGE | result) == result

    def wait_for(self, stream: int) -> None:
        self.ask(stream, function="cudaStreamSynchronize")

    def proved(self) -> tuple[list[int], int]:
        """How many calls of each communicator are complete, in their order; and the number of durations measured."""
        durations = self.cuda.durations()
        return (
            [self.cuda.progress()[instance].completed_sequence for instance in self.instances()],
            int(durations[Op.AllReduce]["count"]) if Op.AllReduce in durations else 0,
        )

    def instances(self) -> list[int]:
        """Communicators of which something was proved, as they were made."""
        proved = self.cuda.progress()
        _, known = self.programs.communicators.read()
        return [one for one in known["instance"][np.argsort(known["first_ns"])].tolist() if one in proved]


def simulated_library(folder: Path) -> Path:
    return assemble(folder, **_CODE)


@contextmanager
def probed_job(library: Path, caller: Caller, attach: AttachKind, enqueue_time: EnqueueTime) -> Iterator[Job]:
    with library.open("rb") as file, Elf.open(file.fileno()) as elf:
        points, launches, functions = probe_points(elf, LIBRARY), library_points(elf, LIBRARY), cuda_points(elf)
    assert functions is not None
    layout = np.zeros(1, LAYOUT)
    layout["known"], layout["plan_persistent"] = 1, PERSISTENT
    settings = ProgramSettings(attach=attach, enqueue_time=enqueue_time, only_observed_processes=True)
    with ExitStack() as stack:
        programs = NcclPrograms.load(settings)
        stack.callback(programs.close)
        internals = Internals.load(programs)
        stack.callback(internals.close)
        programs.observe(caller.pid)
        internals.describe(LIBRARY, layout)
        stack.callback(programs.attach(str(library), points, LIBRARY, LAYOUT_OF_COMMUNICATORS).close)
        stack.callback(internals.cuda.attach_library(str(library), launches).close)
        stack.callback(internals.cuda.attach_cuda(str(library), functions).close)
        yield Job(caller, internals.cuda, programs)
