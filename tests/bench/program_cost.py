"""What each BPF program takes at a hit beyond its trap, and what probes/loading/calibration.py assumes of it.

The agent observes everything of short jobs of the real NCCL on two namespace hosts: AllReduce of 1 KiB and of 1 MiB by
jobs that ask CUDA's events, Send and Recv, replays of a graph, and a graph of other kernels; each job is one sample.
The kernel's own accounting of run times tells how long the programs ran; what a program that does nothing has on that
account is taken off.  Programs called back to back in a loop show a fraction of this: a job calls them with cold
caches, the colder the more it sends.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.calibration import Calibration, calibrate
from railscope.probes.loading.links import AttachKind
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double, build
from tests.bench.agent_cost import idle_mapper
from tests.bench.cpu_time import DISTURBED, Others
from tests.bench.probe_cost import empty_probe, empty_run_time
from tests.bench.results import Figure, Line, Omission, figure
from tests.bench.run_times import NAME_BYTES, NEVER, RunTime, counted, run_times
from tests.bench.target import BenchError, Built, Target
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job, JobError

PART: Final = "programs"

KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "calls": ("collective_session",),
    "returns": ("collective_return",),
    "lifecycle": ("init_entry", "init_return", "end_entry", "call_entry", "call_return"),
    "proxy_post": ("proxy_post",),
    "proxy_stop": ("proxy_stop",),
    "plan_replay": ("plan_replay",),
    "plan_launch": ("plan_launch",),
    "socket_send": ("socket_send",),
    "cuda": ("cuda_session", "cuda_note", "cuda_plan", "cuda_copy_plan", "cuda_remote_plan", "cuda_finish"),
    "driver_calls": ("driver_call_session", "driver_call_entry", "driver_call_return"),
}
"""Programs of the BPF objects by the name of their cost; without sessions there is another one for calls."""
_FEWEST_RUNS: Final = {kind: 1 if kind == "lifecycle" else 50 for kind in KINDS}
"""A job that ran into a program more rarely says nothing about its usual cost."""
_CALLS_WITHOUT_SESSIONS: Final = "collective_entry"
_BURSTS, _BURST_CALLS, _BURST_PAUSE_SECONDS = 20, 400, 0.002


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One short job; a rank makes this many calls."""

    name: str
    size_bytes: int
    iterations: int
    events: str | None = None


_PATTERNS: Final = (
    _Pattern("allreduce", 1 << 10, 800, "query"),
    _Pattern("allreduce", 1 << 20, 150, "query"),
    _Pattern("sendrecv", 1 << 16, 300),
    _Pattern("graph", 1 << 16, 150),
)
_DRIVER_PATTERNS: Final = (_Pattern("inference", 1 << 10, 500, "stream"),)
_PAIR_PATTERNS: Final = (_Pattern("allreduce", 1 << 10, 800), _Pattern("allreduce", 1 << 20, 150))
_WATCHED_SECONDS: Final = 0.5
"""After which the agent also watches what a job that is ready has mapped of CUDA's."""


def measure(built: Built, rounds: int) -> list[Line]:
    """Run all jobs beside one agent, `rounds` times; then those that show CUDA's driver or a return beside another.

    Raises:
        BenchError: a job does not run, or the kernel does not count.
        LibraryMissing, BuildError: the NCCL library or its stand-in for CUDA is not there.
    """
    double = build()
    calibration = calibrate(AttachKind.MULTI)
    taken: list[Mapping[str, RunTime]] = []
    empty: list[RunTime] = []
    others: list[float] = []
    try:
        with counted(), Fabric(hosts=2, rails=2) as fabric, idle_mapper(double.nccl):
            for arguments, patterns in (
                ((), _PATTERNS),
                (("--collector.cuda",), _DRIVER_PATTERNS),
                (("--probe.enqueue-time", "pair"), _PAIR_PATTERNS),
            ):
                with _agent(double, *arguments) as agent:
                    for turn in range(rounds):
                        empty.append(_empty_run(built, f"empty{turn}"))
                        taken += [_observed(agent, fabric, double, pattern, others) for pattern in patterns]
    except KernelRefusal as refusal:
        raise BenchError(str(refusal)) from None
    without_ns = min(run.mean_ns for run in empty)
    return [
        figure(PART, "CPU taken by others than jobs and agent", "%", others, note=DISTURBED),
        figure(PART, "trap", "ns/hit", [calibration.trap_ns]),
        figure(PART, "a program that does nothing", "ns/hit", [run.mean_ns for run in empty], note="taken off below"),
        *lines_of(taken, without_ns, calibration),
    ]


def lines_of(jobs: Sequence[Mapping[str, RunTime]], empty_ns: float, calibration: Calibration) -> list[Line]:
    """What each kind takes beyond `empty_ns`, each with what the calibration assumes on this host; those hit at all.

    `jobs` hold what every program ran, by its name as the kernel keeps it.
    """
    lines: list[Line] = []
    for kind in KINDS:
        runs = [run for each in jobs if (run := _of(kind, each)).runs >= _FEWEST_RUNS[kind]]
        if not runs:
            lines.append(Omission(PART, kind, "no job ran into it"))
            continue
        operations = _operations_a_post(jobs) if kind == "proxy_post" else 0.0
        lines.append(_line(kind, runs, empty_ns, operations, calibration))
    lines.append(Omission(PART, "ib_send", "there is no RDMA device here"))
    lines.append(Omission(PART, "transfers", "no job here maps UCX, NIXL, MPI or NVSHMEM"))
    return lines


def _line(kind: str, runs: list[RunTime], empty_ns: float, operations: float, calibration: Calibration) -> Figure:
    assumed_ns = calibration.hit_ns(kind) - calibration.trap_ns + operations * calibration.operation_ns
    note = f"assumed: {assumed_ns:.0f}"
    if operations:
        note += f", for {operations:.1f} operations each"
    name = f"{kind}, {sum(run.runs for run in runs)} hits"
    return figure(PART, name, "ns/hit", [run.mean_ns - empty_ns for run in runs], note=note)


def _of(kind: str, taken: Mapping[str, RunTime]) -> RunTime:
    total = NEVER
    for program in KINDS[kind]:
        total += taken.get(program[:NAME_BYTES], NEVER)
    if kind == "calls" and not total.runs and not _of("returns", taken).runs:
        return taken.get(_CALLS_WITHOUT_SESSIONS[:NAME_BYTES], NEVER)
    return total


def _operations_a_post(jobs: Sequence[Mapping[str, RunTime]]) -> float:
    """How many operations a hit of `proxy_post` walked over: each is stopped once."""
    posts, stops = (sum(_of(kind, each).runs for each in jobs) for kind in ("proxy_post", "proxy_stop"))
    return stops / posts


@contextmanager
def _agent(double: Double, *arguments: str) -> Iterator[AgentProcess]:
    """An agent that has attached everything to the library."""
    with AgentProcess("--level", "all", *arguments) as agent:
        library = str(double.nccl)
        agent.until(lambda: any(value == 3 for _, value in agent.samples("railscope_probe_level", library=library)))
        yield agent


def _observed(
    agent: AgentProcess, fabric: Fabric, double: Double, pattern: _Pattern, others: list[float]
) -> Mapping[str, RunTime]:
    """What every program ran while a job did."""
    before = run_times(agent.process.pid)
    _run(agent, fabric, double, pattern, others)
    return {name: run - before.get(name, NEVER) for name, run in run_times(agent.process.pid).items()}


def _run(agent: AgentProcess, fabric: Fabric, double: Double, pattern: _Pattern, others: list[float]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory,
        Job(
            fabric,
            Path(directory),
            double,
            pattern=pattern.name,
            iterations=pattern.iterations,
            size_bytes=pattern.size_bytes,
            events=pattern.events,
            hold=True,
        ) as job,
    ):
        try:
            pids = job.ready()
            time.sleep(_WATCHED_SECONDS)
            taken = Others([agent.process.pid, *pids])
            job.start()
            job.finished()
            others.append(taken.percent())
            job.release()
            job.wait()
        except JobError as error:
            raise BenchError(str(error)) from None


def _empty_run(built: Built, name: str) -> RunTime:
    """What the kernel's account shows of a program that does nothing, called in short bursts."""
    with Target(built, name) as target, empty_probe(built, target.library, target.points()):
        before = empty_run_time()
        for _ in range(_BURSTS):
            target.call(_BURST_CALLS)
            time.sleep(_BURST_PAUSE_SECONDS)
        return empty_run_time() - before
