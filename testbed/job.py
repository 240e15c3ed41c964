"""A collective job on a fabric's hosts: its ranks as processes, and what they report at the end.

A rank is the program `railscope-workload`, which calls a small library with NCCL's public ABI, or the same program on
the real NCCL (testbed/nccl); the bytes really cross the rails.  Ranks are numbered host by host, as torchrun does:
rank = host * ranks_per_host + local rank.  They find each other through a unique id in a private temporary directory,
and die with the thread that started them (prctl(2), PR_SET_PDEATHSIG): start a job in a thread that outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Self

from railscope.testbed.hosts import Host, TestbedError
from railscope.testbed.nccl.build import ENVIRONMENT, Double
from railscope.testbed.processes import Started

_SOURCES: Final = Path(__file__).resolve().parent / "workload"
_BUILT: Final = Path(__file__).resolve().parent / "bin"
BIN_DIRECTORY: Final = _BUILT if _BUILT.is_dir() else Path("/var/cache/railscope/workload")
"""A checkout and the Debian package bring what is compiled; of a wheel it is compiled when it is first used."""
_LIBRARY_FLAGS: Final = ("-shared", "-Wl,--build-id", "-Wl,-soname,librailscope-workload.so")
_DRIVER_FLAGS: Final = ("-Wl,--build-id", "-Wl,-rpath,$ORIGIN", "-lm")
_FLAGS: Final = (
    *("-std=gnu11", "-g", "-O3", "-pthread", "-fPIC", "-fvisibility=hidden", "-fwrapv"),
    *("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-shrink-wrap"),
)
"""As in build.mk, which says why."""
DRIVER: Final = BIN_DIRECTORY / "railscope-workload"
LIBRARY: Final = BIN_DIRECTORY / "librailscope-workload.so"
PATTERNS: Final = ("ddp", "tensor-parallel", "moe", "inference", "gpt", "mixed", "idle")

_POLL_SECONDS: Final = 0.01
_STOP_SECONDS: Final = 15.0
"""How long ranks may take to end after SIGTERM: the driver itself gives up waiting for its peers after 3 s."""


class Instead(IntEnum):
    """What a rank does instead of the call that it leaves out: `enum instead` of workload/driver_moments.h."""

    WAIT = 0
    REPLACE = 1
    """Its process executes another program."""
    LEAVE = 2
    """It takes its communicator apart and lives on; the others compute, and no rank makes another call."""
    RECEIVE = 3
    """Each rank receives from another and sends to it afterwards; with the real NCCL only."""


class Writer(IntEnum):
    """Who writes a checkpoint, and where to: `enum writer` of workload/driver_moments.h."""

    SELF = 0
    CHILD = 1
    UPLOAD = 2
    """The rank sends it to a server."""
    MEMORY = 3
    """The rank writes it to /dev/shm."""


def build_workload(folder: Path, sources: Path = _SOURCES, packaged: Path = _BUILT) -> None:
    """Compile the workload into a folder, where none was `packaged`.

    Raises:
        TestbedError: its sources or a compiler are missing, or it does not compile.
    """
    files = sorted(sources.glob("*.c"))
    compiler = shutil.which("gcc")
    if not files or packaged.is_dir():
        raise TestbedError("the testbed's workload is not built: run `make build`")
    if compiler is None:
        raise TestbedError("the testbed's workload is compiled where it runs: install gcc and libc6-dev")
    of_driver = [str(file) for file in files if file.name.startswith("driver")]
    of_library = [str(file) for file in files if not file.name.startswith("driver")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library, driver = Path(scratch, LIBRARY.name), Path(scratch, DRIVER.name)
            for command in (
                (compiler, *_FLAGS, *of_library, *_LIBRARY_FLAGS, "-o", str(library)),
                (compiler, *_FLAGS, *of_driver, str(library), *_DRIVER_FLAGS, "-o", str(driver)),
            ):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    said = (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
                    raise TestbedError(f"the testbed's workload does not compile: {said}")
            library.replace(folder / library.name)
            driver.replace(folder / driver.name)
    except OSError as error:
        raise TestbedError(f"the testbed's workload cannot be kept: {error.filename}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Moments:
    """Something that happens again and again."""

    every: int
    """After so many iterations."""
    milliseconds: int


@dataclass(frozen=True, slots=True)
class SlowSteps:
    """A rank computes for longer than the others, who go on to the next collective meanwhile."""

    milliseconds: int
    rank: int | None
    """None: each in turn, one an iteration."""
    every: int = 1
    """After so many iterations."""


@dataclass(frozen=True, slots=True)
class SkippedCall:
    """A rank leaves out the first AllReduce of an iteration (counted from 0), and makes no further call."""

    rank: int
    iteration: int
    instead: Instead = Instead.WAIT


@dataclass(frozen=True, slots=True)
class GptShape:
    """Sizes of the `gpt` pattern; pipeline × tensor × data is the number of ranks."""

    pipeline: int
    tensor: int
    data: int
    layers: int
    hidden: int
    sequence: int
    vocabulary: int
    micro_batch: int
    """Sequences."""
    micro_batches: int
    """Of a replica in an iteration."""
    replicas_apart: bool = False
    """Ranks are counted tensor, pipeline, data; by default tensor, data, pipeline."""

    @property
    def arguments(self) -> list[str]:
        """The driver's options."""
        numbers = (
            *(self.pipeline, self.tensor, self.data, self.layers, self.hidden, self.sequence, self.vocabulary),
            *(self.micro_batch, self.micro_batches),
        )
        return ["--shape", ",".join(map(str, numbers)), *(["--replicas-apart"] if self.replicas_apart else [])]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the ranks do; exactly one of `seconds` and `iterations` says for how long."""

    pattern: str = "ddp"
    seconds: float | None = None
    iterations: int | None = None
    ranks_per_host: int = 1
    seed: int = 1
    bytes: int | None = None
    """With `inference`: payload of every call; None: 1 to 64 KiB, mixed."""
    calls: int | None = None
    """With `inference`: calls of an iteration, at most 256; None: 64."""
    verify: bool = True
    """Check every element of every result."""
    hold: bool = False
    """Make no collective call before `Job.release`, so that an observer can attach first."""
    init_before_start: bool = False
    """With `hold`: create the communicator before `Job.release` instead of after it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment variables of every rank."""
    batch: int | None = None
    """Iterations between two agreements about the end; None: as many as fit in some 50 ms.  An agreement is traffic
    that no observer can see, so a job that is to wait in collectives and nowhere else has large batches."""
    destroy: bool = True
    """Take the communicator apart at the end; without it ranks just leave."""
    linger: bool = False
    """A rank whose call fails, as when a peer has gone, stays: its operation never completes."""
    pace_us: int = 0
    """Pause after each iteration, in microseconds."""
    pause: Moments | None = None
    """All ranks compute."""
    checkpoint: Moments | None = None
    """Rank 0 computes and writes to disk while the others go on to the next collective."""
    checkpoint_by: Writer = Writer.SELF
    slow: SlowSteps | None = None
    warm_up_ms: int = 0
    """How late the last rank comes to the first iteration; the others come in between."""
    late_ms: int = 0
    """How late the last rank comes to the making of the communicator."""
    skip: SkippedCall | None = None
    shape: GptShape | None = None
    """With `gpt`, and only there: the sizes of the job."""


@dataclass(frozen=True, slots=True)
class OperationCount:
    """Calls of one operation with one data type."""

    op: str
    """NCCL's name: AllReduce, AllGather, …; Bcast counts as Broadcast."""
    dtype: str
    """As in `railscope.probes.nccl.abi.data_type_name`: float32, bfloat16, …"""
    calls: int
    payload_bytes: int
    """Sum of count times the size of an element."""


@dataclass(frozen=True, slots=True)
class CommunicatorReport:
    """What one rank called on one communicator."""

    hash: str
    """16 hex digits, the same on all its ranks."""
    rank: int
    nranks: int
    operations: tuple[OperationCount, ...]


@dataclass(frozen=True, slots=True)
class RailBytes:
    """Bytes the library gave to and took from one rail's sockets: payload and message headers, no TCP/IP headers."""

    rail: str
    transmit_bytes: int
    receive_bytes: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank did, as it says itself: the truth that an observer's numbers are held against."""

    pid: int
    rank: int
    nranks: int
    host: str
    pattern: str
    communicators: tuple[CommunicatorReport, ...]
    rails: tuple[RailBytes, ...]
    calls: int
    seconds: float
    """From the first call to the end of the last."""
    calls_per_second: float
    verified: bool
    """Every result was checked and right."""
    interrupted: bool
    """The rank was told to end while it waited for its peers."""
    errors: tuple[str, ...]

    def totals(self) -> dict[str, OperationCount]:
        """Calls and payload by operation over all communicators and data types (dtype reads `all`)."""
        sums: dict[str, tuple[int, int]] = {}
        for operation in (operation for comm in self.communicators for operation in comm.operations):
            calls, payload_bytes = sums.get(operation.op, (0, 0))
            sums[operation.op] = calls + operation.calls, payload_bytes + operation.payload_bytes
        return {op: OperationCount(op, "all", calls, payload) for op, (calls, payload) in sorted(sums.items())}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the driver's JSON.

        Raises:
            TestbedError: it is not what this version's driver writes.
        """
        try:
            facts: dict[str, Any] = json.loads(text)
            return cls(
                communicators=tuple(
                    CommunicatorReport(
                        comm["hash"],
                        comm["rank"],
                        comm["nranks"],
                        tuple(OperationCount(**operation) for operation in comm["operations"]),
                    )
                    for comm in facts.pop("communicators")
                ),
                rails=tuple(RailBytes(**rail) for rail in facts.pop("rails")),
                errors=tuple(facts.pop("errors")),
                **{name: value for name, value in facts.items() if name != "totals"},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TestbedError(f"a rank's report cannot be read ({error}): run `make build` again") from None


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank's process ended."""

    rank: int
    pid: int
    exit_status: int | None
    """0 fine, 1 wrong results or an NCCL error, 3 told to end while it waited for its peers, negative: the signal that
    ended it, None: still running."""
    report: RankReport | None
    """None: the rank ended without writing one."""
    complaint: str
    """Last line it wrote to its standard error."""


def moment_arguments(
    *,
    pace_us: int,
    warm_up_ms: int,
    late_ms: int = 0,
    pause: Moments | None,
    checkpoint: Moments | None,
    checkpoint_by: Writer,
    slow: SlowSteps | None,
    skip: SkippedCall | None,
) -> list[str]:
    """What happens between calls, as options of a driver: of this one, and of that for the real NCCL."""
    numbers = {"--pace-us": pace_us, "--warm-up-ms": warm_up_ms, "--late-ms": late_ms}
    numbers["--checkpoint-by"] = checkpoint_by.value
    for name, moments in (("pause", pause), ("checkpoint", checkpoint)):
        if moments is not None:
            numbers |= {f"--{name}-every": moments.every, f"--{name}-ms": moments.milliseconds}
    if slow is not None:
        numbers |= {"--slow-rank": slow.rank or 0, "--slow-in-turn": int(slow.rank is None)}
        numbers |= {"--slow-every": slow.every, "--slow-ms": slow.milliseconds}
    if skip is not None:
        numbers |= {"--skip-rank": skip.rank, "--skip-iteration": skip.iteration, "--instead": skip.instead.value}
    return [word for name, number in numbers.items() for word in (name, str(number))]


class Job(Started):
    """One job, started on entry of the `with` block; whatever still runs is killed on exit."""

    def __init__(self, hosts: Sequence[Host], options: JobOptions, nccl: Double | None = None) -> None:
        """Describe a job; nothing runs before the `with` block is entered.

        Args:
            hosts: where its ranks are.
            options: what they do.
            nccl: the real NCCL to call; None: the workload library.  Reports of the real NCCL tell no rails.

        Raises:
            TestbedError: there is no such job; the message says why.
        """
        if options.pattern not in PATTERNS:
            raise TestbedError(f"no pattern is called {options.pattern!r}: choose one of {', '.join(PATTERNS)}")
        if (options.seconds is None) == (options.iterations is None):
            raise TestbedError("a job ends after a number of seconds or of iterations: give exactly one of them")
        if options.ranks_per_host < 1 or not hosts:
            raise TestbedError("a job needs at least one host and one rank a host")
        if (options.pattern == "gpt") != (options.shape is not None):
            raise TestbedError("the pattern gpt needs a shape, and no other pattern takes one")
        if nccl is None and (not DRIVER.exists() or not LIBRARY.exists()):
            build_workload(BIN_DIRECTORY)
        self.hosts: Final = tuple(hosts)
        self.options: Final = options
        super().__init__("job")
        self._nccl = nccl
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return tuple(process.pid for process in self._processes)

    def release(self) -> None:
        """Let the ranks begin, if `hold` was asked for."""
        (self._folder / "start").touch()

    def running(self) -> bool:
        """Whether any rank still runs."""
        return any(process.poll() is None for process in self._processes)

    def wait(self, timeout_s: float) -> tuple[RankReport, ...]:
        """Wait for the end of all ranks and return their reports in rank order.

        Raises:
            TestbedError: a rank failed, or the time is over (the ranks run on until `stop` or the block's end).
        """
        deadline = time.monotonic() + timeout_s
        while self.running():
            if any(process.poll() not in (None, 0) for process in self._processes):
                break
            if time.monotonic() > deadline:
                raise TestbedError(f"the job did not end within {timeout_s:g} s: stop it, or give it more time")
            time.sleep(_POLL_SECONDS)
        results = self.results()
        for result in results:
            if result.exit_status not in (None, 0):
                raise TestbedError(f"rank {result.rank} ended with status {result.exit_status}: {result.complaint}")
        return tuple(result.report for result in results if result.report is not None)

    def stop(self) -> tuple[RankResult, ...]:
        """Ask all ranks to end at the same iteration, kill those that cannot, and say how each ended."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + _STOP_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._kill()
        return self.results()

    def results(self) -> tuple[RankResult, ...]:
        """How each rank stands now, in rank order."""
        return tuple(self._result(rank, process) for rank, process in enumerate(self._processes))

    @property
    def _every(self) -> Sequence[subprocess.Popen[bytes]]:
        return self._processes

    def _start_all(self) -> None:
        for rank in range(len(self.hosts) * self.options.ranks_per_host):
            self._start(rank)

    def _start(self, rank: int) -> None:
        options, directory = self.options, self._folder
        host_index, local_rank = divmod(rank, options.ranks_per_host)
        host = self.hosts[host_index]
        driver = DRIVER if self._nccl is None else self._nccl.workload
        command = [str(driver), "--pattern", options.pattern, "--seed", str(options.seed)]
        command += ["--id-file", str(directory / "id"), "--report", str(self._report_path(rank))]
        command += ["--die-with", str(os.getpid())]
        if options.seconds is not None:
            command += ["--seconds", str(options.seconds)]
        if options.iterations is not None:
            command += ["--iterations", str(options.iterations)]
        if options.bytes is not None:
            command += ["--bytes", str(options.bytes)]
        if not options.verify:
            command += ["--no-verify"]
        if options.hold:
            command += ["--start-file", str(directory / "start")]
        if options.init_before_start:
            command += ["--init-before-start"]
        if options.calls is not None:
            command += ["--calls", str(options.calls)]
        if options.batch is not None:
            command += ["--batch", str(options.batch)]
        if options.shape is not None:
            command += options.shape.arguments
        if options.linger:
            command += ["--linger"]
        if not options.destroy:
            command += ["--no-destroy"]
        command += moment_arguments(
            pace_us=options.pace_us,
            warm_up_ms=options.warm_up_ms,
            late_ms=options.late_ms,
            pause=options.pause,
            checkpoint=options.checkpoint,
            checkpoint_by=options.checkpoint_by,
            slow=options.slow,
            skip=options.skip,
        )
        of_nccl: dict[str, str] = {}
        if self._nccl is not None:
            of_nccl = {**ENVIRONMENT, "RAILSCOPE_WORKLOAD_AGREEMENT": str(directory / "agreement")}
            of_nccl["CUDA_VISIBLE_DEVICES"] = str(local_rank)
            # Threads of NCCL that wait sleep (double/patience.c): the processors are for those that watch, too.
            of_nccl["NCCL_DOUBLE_PATIENT"] = "1"
        environment = {
            **os.environ,
            **of_nccl,
            "NCCL_SOCKET_IFNAME": ",".join(host.rails),
            "NCCL_HOSTID": f"host{host.index}",
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(len(self.hosts) * options.ranks_per_host),
            **options.environment,
        }
        with self._complaints_path(rank).open("wb") as complaints:
            self._processes.append(
                subprocess.Popen(
                    host.command(*command),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=complaints,
                )
            )

    def _report_path(self, rank: int) -> Path:
        return self._folder / f"report-{rank}.json"

    def _complaints_path(self, rank: int) -> Path:
        return self._folder / f"stderr-{rank}"

    def _result(self, rank: int, process: subprocess.Popen[bytes]) -> RankResult:
        report = None
        with contextlib.suppress(FileNotFoundError):
            report = RankReport.parse(self._report_path(rank).read_text())
        lines = []
        with contextlib.suppress(FileNotFoundError):
            lines = self._complaints_path(rank).read_text(errors="replace").strip().splitlines()
        return RankResult(rank, process.pid, process.poll(), report, lines[-1] if lines else "")
