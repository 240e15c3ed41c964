"""Jobs of the real NCCL on namespace hosts: one driver process a rank, the network between them real.

The ranks initialise, tell that they are ready, and wait for `start`, so that an observer can attach
before the first collective; with `hold` they also wait, done but alive, for `release`.  Only the GPUs are
simulated (see testbed/nccl/double/double.h): sockets, proxy threads and everything else are NCCL's own.

    with Fabric(hosts=2, rails=2) as fabric, Job(fabric, tmp_path, build(), iterations=500) as job:
        pids = job.ready()
        ...
        job.start()
        for report in job.wait():
            assert report.verified
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from railscope.testbed.hosts import Host
from railscope.testbed.job import GptShape, Moments, SkippedCall, SlowSteps, Writer, moment_arguments
from railscope.testbed.nccl.build import ENVIRONMENT, Double

POLL_SECONDS: Final = 0.01


class Hosts(Protocol):
    """Where ranks run: a fabric (testbed/hosts.py), as a rule."""

    @property
    def hosts(self) -> Sequence[Host]: ...


class JobError(RuntimeError):
    """The job did not do what was asked; the message holds what the ranks said."""


@dataclass(frozen=True, slots=True)
class OperationCount:
    """Calls of one operation that one rank made, by its API."""

    operation: str
    """NCCL's name: AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AllToAll, Send, Recv."""
    calls: int
    payload_bytes: int
    """Sum of count times the size of the data type, as the calls had them."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What one of NCCL's functions about errors returned or told."""

    function: str
    """Its name; "ncclCommGetAsyncError after ncclCommRevoke" is the state that a revoked communicator reached."""
    result: int
    """ncclResult_t: 0 success, 5 invalid usage, 6 remote error, 7 in progress."""


@dataclass(frozen=True, slots=True)
class EventCounts:
    """Calls that one rank made to learn of completion; all zero for a job without `events`."""

    recorded: int
    """cudaEventRecord: two an operation (or a replay), before it and behind it."""
    queries: int
    """cudaEventQuery."""
    not_ready: int
    """How many of the queries said cudaErrorNotReady."""
    event_synchronizes: int
    """cudaEventSynchronize."""
    stream_synchronizes: int
    """cudaStreamSynchronize, apart from those that a pattern makes of itself."""
    stream_waits: int
    """cudaStreamWaitEvent: one an operation (or a replay)."""


@dataclass(frozen=True, slots=True)
class Evaluations:
    """AllGathers between iterations, on a communicator that is split off for them."""

    every: int
    """After so many iterations."""
    calls: int
    """Of one evaluation, each after half the pause between iterations."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did."""

    pid: int
    rank: int
    ranks: int
    nccl_version: int
    """As ncclGetVersion has it: 23203 for 2.32.3."""
    communicators: int
    verified: bool
    """Every result that was checked was right."""
    seconds: float
    """Time from the start signal to the last result."""
    operations: tuple[OperationCount, ...]
    """Calls of NCCL's API; of a captured graph, those that were captured."""
    replayed: tuple[OperationCount, ...]
    """Operations that replays of a graph ran, without a call of NCCL's API."""
    results: tuple[CallResult, ...]
    """In the order of the calls; only patterns in which a peer is missing have any."""
    events: EventCounts
    in_progress: int
    """Calls that returned ncclInProgress and were waited for; 0 for communicators that block."""

    def count(self, operation: str) -> OperationCount:
        """The calls of one operation; zero calls when it never ran."""
        return _count(self.operations, operation)

    def replays(self, operation: str) -> OperationCount:
        """The replays of one operation; zero when none was captured."""
        return _count(self.replayed, operation)


def _count(counts: Iterable[OperationCount], operation: str) -> OperationCount:
    for entry in counts:
        if entry.operation == operation:
            return entry
    return OperationCount(operation, 0, 0)


def read_report(path: Path) -> RankReport:
    """Read the JSON that the driver program left."""
    facts = json.loads(path.read_text())
    operations, replayed = (
        tuple(OperationCount(name, entry["calls"], entry["payload_bytes"]) for name, entry in facts.pop(key).items())
        for key in ("operations", "replayed")
    )
    results = tuple(CallResult(function, result) for function, result in facts.pop("results"))
    events = EventCounts(**facts.pop("events"))
    return RankReport(operations=operations, replayed=replayed, results=results, events=events, **facts)


class Job:
    """Ranks on the hosts of a fabric for as long as the `with` block lasts; what still runs then is killed."""

    def __init__(
        self,
        fabric: Hosts,
        folder: Path,
        double: Double,
        *,
        pattern: str = "allreduce",
        iterations: int = 1,
        size_bytes: int = 1 << 20,
        type_name: str = "f32",
        reduction: str = "sum",
        communicators: int = 1,
        ranks_per_host: int = 1,
        pace_us: int = 0,
        warm_up_ms: int = 0,
        late_ms: int = 0,
        pause: Moments | None = None,
        checkpoint: Moments | None = None,
        checkpoint_by: Writer = Writer.SELF,
        slow: SlowSteps | None = None,
        skip: SkippedCall | None = None,
        evaluations: Evaluations | None = None,
        destroy: bool = True,
        hold: bool = False,
        events: str | None = None,
        shape: GptShape | None = None,
        event_poll_us: int = 100,
        blocking: bool = True,
        late: Collection[int] = (),
        hold_init: bool = False,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        """Describe a job; nothing runs before the `with` block is entered.

        Args:
            folder: where ids, reports and the ranks' output go; empty, owned by the caller.
            pattern: one of the driver's: allreduce, allgather, reducescatter, broadcast, reduce, alltoall,
                sendrecv, everything (each with every type and reduction), mixed (all in turn), mixed-group (all of
                them on all communicators in one group), grouped (four AllReduces in one group), empty (an AllReduce
                and a Send and Recv without an element, with one collective of each kind without an element before and
                behind), split (a communicator for even and one for odd ranks), families (all but the last rank in
                a split and in a shrunk communicator; the split one then grown to all ranks, from 2.29), gpt (a GPT of
                `shape`, in communicators that are split off), graph
                (an AllReduce and an AllGather captured once and replayed `iterations` times), graph-and-live (an
                AllReduce outside the graph after each replay), graph-of-group (48 AllReduces of one group
                captured), abandoned (rank 0 never comes, the communicator is aborted), revoked (the same, revoked
                and destroyed), split-late (a split to which the last rank comes `warm_up_ms` late), receive-first (two
                ranks that each begin with a receive, and come no further), disagree-operation,
                disagree-count, disagree-order (AllReduce and AllGather in turn; every 300th time a rank of the middle
                makes another operation, another count, or both in the other order), bereaved (AllReduces until a peer
                is killed, then abort), bereaved-revoke (a revoke before the abort), inference (a graph of a kernel
                that is not NCCL's, launched and waited for `iterations` times; with `skip` it never ends from that
                iteration on, in that rank).
            iterations: calls of each operation on each communicator.
            size_bytes: count times type size of each call, rounded down to whole elements.
            pace_us: pause between iterations.
            warm_up_ms: how late the last rank comes to the first iteration.
            late_ms: how late it comes to the making of communicators.
            pause: all ranks compute, between iterations.
            checkpoint: rank 0 computes and writes to disk while the others go on to the next collective.
            checkpoint_by: who writes it, and where to.
            slow: a rank computes for longer than the others.
            skip: a rank leaves out a collective of a single operation, and makes no further call.
            evaluations: of the single operations, everything and mixed.
            destroy: without it ranks leave without finalizing and destroying their communicators.
            events: None, or how the ranks learn that an operation is over, through a libcudart.so.12 that they
                map: query (ask an event until it has happened), synchronize (wait for the event), stream (wait
                for the stream), watchdog (go on; a thread asks the events).  For the single operations,
                everything, mixed and the graphs.
            event_poll_us: pause between two queries of an event.
            shape: of the pattern gpt, with its default order of ranks.
            blocking: False: the communicators do not block; each call is waited for with ncclCommGetAsyncError.
            late: ranks that are begun by `begin`, or never.
            hold_init: the ranks make no communicator before `initialise`.
            hold: keep the ranks alive after their last operation until `release`.
            environment: overrides of ENVIRONMENT; None takes a variable away.
        """
        self._fabric = fabric
        self._folder = folder
        self._double = double
        self._ranks_per_host = ranks_per_host
        self._hold = hold
        self._late = frozenset(late)
        self._hold_init = hold_init
        self._arguments = [
            *("--pattern", pattern, "--iterations", str(iterations), "--bytes", str(size_bytes)),
            *("--type", type_name, "--op", reduction, "--communicators", str(communicators)),
            *("--event-poll-us", str(event_poll_us), "--destroy", str(int(destroy))),
            *moment_arguments(
                pace_us=pace_us,
                warm_up_ms=warm_up_ms,
                late_ms=late_ms,
                pause=pause,
                checkpoint=checkpoint,
                checkpoint_by=checkpoint_by,
                slow=slow,
                skip=skip,
            ),
            *("--blocking", str(int(blocking))),
            *(
                ("--evaluate-every", str(evaluations.every), "--evaluate-calls", str(evaluations.calls))
                if evaluations
                else ()
            ),
            *(("--events", events) if events else ()),
            *(shape.arguments if shape else ()),
        ]
        self._environment: dict[str, str | None] = {**ENVIRONMENT, **(environment or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._killed: set[int] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return tuple(process.pid for process in self._processes)

    def __enter__(self) -> Self:
        ranks = len(self._fabric.hosts) * self._ranks_per_host
        try:
            for rank in range(ranks):
                if rank not in self._late:
                    self._processes.append(self._begin(rank, ranks))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the ranks that still run, stopped ones included."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def begin(self, rank: int) -> None:
        """Begin a rank that was left out; ranks are begun in their order."""
        self._processes.append(self._begin(rank, len(self._fabric.hosts) * self._ranks_per_host))

    def initialise(self) -> None:
        """Let the ranks make their communicators, with `hold_init`."""
        (self._folder / "init").touch()

    def ready(self, timeout_s: float = 60) -> tuple[int, ...]:
        """Wait until every rank has its communicators; returns their pids in rank order.

        Raises:
            JobError: a rank ended, or took too long.
        """
        files = [self._folder / f"ready.{rank}" for rank in range(len(self._processes))]
        self._await(lambda: all(file.exists() for file in files), timeout_s, "initialise")
        return self.pids

    def start(self) -> None:
        """Let the ranks call their first collective."""
        (self._folder / "start").touch()

    def under_way(self, timeout_s: float = 60) -> None:
        """Wait until every rank of a bereaved pattern has verified its first AllReduce.

        Raises:
            JobError: a rank ended, or took too long.
        """
        files = [self._folder / f"progress.{rank}" for rank in range(len(self._processes))]
        self._await(lambda: all(file.exists() for file in files), timeout_s, "get under way")

    def kill(self, rank: int) -> None:
        """Let a rank die by SIGKILL: it reports nothing, and its end is no failure of the job."""
        self._killed.add(rank)
        self._processes[rank].kill()

    def finished(self, timeout_s: float = 60) -> list[RankReport]:
        """Wait until every rank (but the killed ones) has made its last call and reported; with `hold` they live on.

        Raises:
            JobError: a rank ended badly, or took too long.
        """
        files = [self._folder / f"report.{r}" for r in range(len(self._processes)) if r not in self._killed]
        self._await(lambda: all(file.exists() for file in files), timeout_s, "finish")
        return [read_report(file) for file in files]

    def release(self) -> None:
        """Let the ranks destroy their communicators and leave."""
        (self._folder / "hold").touch()

    def wait(self, timeout_s: float = 60) -> list[RankReport]:
        """Wait until every rank has left; reports in rank order.

        Raises:
            JobError: a rank failed, or took too long.
        """
        self._await(lambda: all(process.poll() is not None for process in self._processes), timeout_s, "leave")
        return self.finished(timeout_s=0)

    def run(self, timeout_s: float = 60) -> list[RankReport]:
        """Start at once and wait for the end: for a job that nobody watches."""
        self.start()
        self.release()
        return self.wait(timeout_s)

    def output(self, rank: int) -> str:
        """What a rank has written to stdout and stderr."""
        return (self._folder / f"output.{rank}").read_text(errors="replace")

    def _begin(self, rank: int, ranks: int) -> subprocess.Popen[bytes]:
        host = self._fabric.hosts[rank // self._ranks_per_host]
        command = [
            str(self._double.driver),
            *("--rank", str(rank), "--ranks", str(ranks), "--id", str(self._folder / "id")),
            *("--report", str(self._folder / f"report.{rank}"), "--ready-file", str(self._folder / f"ready.{rank}")),
            *("--start-file", str(self._folder / "start"), "--progress-file", str(self._folder / f"progress.{rank}")),
            *(("--init-file", str(self._folder / "init")) if self._hold_init else ()),
            *(("--hold-file", str(self._folder / "hold")) if self._hold else ()),
            *self._arguments,
        ]
        variables = {
            **os.environ,
            "NCCL_SOCKET_IFNAME": ",".join(host.rails),
            "NCCL_HOSTID": f"host{host.index}",
            "CUDA_VISIBLE_DEVICES": str(rank % self._ranks_per_host),
            **self._environment,
        }
        environment = {name: value for name, value in variables.items() if value is not None}
        with (self._folder / f"output.{rank}").open("wb") as output:
            return subprocess.Popen(
                host.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._folder,
            )

    def _await(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            finished = done()  # before the exit statuses: a rank reports, then leaves
            failed = [
                rank
                for rank, process in enumerate(self._processes)
                if rank not in self._killed and process.poll() not in (None, 0)
            ]
            if failed:
                said = "\n".join(f"rank {rank}: {self.output(rank).strip()}" for rank in failed)
                raise JobError(f"ranks {failed} failed:\n{said}")
            if finished:
                return
            if time.monotonic() > deadline:
                said = "\n".join(f"rank {r}: {self.output(r).strip()}" for r in range(len(self._processes)))
                raise JobError(f"the ranks did not {what} within {timeout_s} s:\n{said}")
            time.sleep(POLL_SECONDS)
