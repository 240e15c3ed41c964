"""`railscope demo`: the main job, live, on one machine.

Hosts are network namespaces with two rails each, the job is real processes that call NCCL and move real bytes over
those rails, and the agent observes them from outside as it would on a GPU node.  At the end the job's own count of what
it did is compared, call by call and byte by byte, with what the agent saw.  With a fault something breaks instead, and
the demo ends with what the agent says of it.

The library is the real NCCL on a stand-in for CUDA (testbed/nccl) where a checkout has fetched it, else the testbed's
own, of which calls are all there is to see.  With the pattern `disaggregated` the real NIXL moves KV caches beside it.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TextIO

from railscope.agent.cli.demo_counts import (
    NOTHING_YET,
    LiveTotals,
    OpCompletion,
    RailCount,
    RankCount,
    carried_between,
    communicator_lines,
    completion_table,
    completions_of,
    count_of_report,
    count_of_snapshot,
    count_table,
    counts_are_equal,
    differences,
    format_ratio,
    rail_line,
    rail_table,
    together,
    totals_of,
)
from railscope.agent.cli.demo_fault import (
    FaultKind,
    OwnStalls,
    PlannedFault,
    describe_process,
    next_step_lines,
    plan_fault,
    stalls_of,
    stalls_untold,
    verdict_lines,
)
from railscope.agent.cli.demo_transfers import DISAGGREGATED, JOB_PATTERN, InferenceBeside, write_table
from railscope.agent.config.options import Config, ListenAddress
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.snapshot import RailFacts, Snapshot
from railscope.agent.facts.stall import Stall
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.record.command import analysis_needed
from railscope.agent.recording.file import RecordingError
from railscope.exporters.web.http import ServerError
from railscope.exporters.web.pages import describe_stall
from railscope.probes.clock import SystemClock
from railscope.testbed.hosts import Fabric, Host, TestbedError
from railscope.testbed.job import GptShape, Job, JobOptions
from railscope.testbed.namespaces import NAMESPACES_DIRECTORY
from railscope.testbed.nccl.build import BuildError, Double, build
from railscope.testbed.nccl.library import NCCL_VERSION, LibraryMissing
from railscope.testbed.transfers.library import find_nixl, nixl_version

_log = logging.getLogger("railscope.demo")

_PATTERNS: Final = ("ddp", "tensor-parallel", "moe", "inference", "mixed")
GPT: Final = "gpt"
"""Not among `all`: how many ranks there are decides what it shows."""
_ENDLESS_SECONDS: Final = 86_400.0
_VIEW_SECONDS: Final = 1.0
_WINDOW_NS: Final = 3_000_000_000
"""Expected and counted bytes are compared over this long: jobs of the demo last seconds."""
_ATTACH_SECONDS: Final = 60.0
"""A busy machine takes that long to map NCCL, of half a gigabyte, once for each rank."""
_BELOW_SECONDS: Final = 5.0
"""So long the demo waits for what is below NCCL's calls: not every kernel lets it be seen."""
_FINISH_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 0.25
"""The rails are read once more after the job's last byte: longer than two sample periods."""
_VERDICT_SECONDS: Final = 60.0
_WAIT_NS: Final = 4_000_000_000
"""--stall.after of a demo with a fault: so soon a rank that only waits is told of, too."""
_OTHERS_SECONDS: Final = 8.0
_BURSTS_NS: Final = 10_000_000
"""A recording reads rails so often: the bursts of the demo's jobs are shorter than the usual distance of readings."""
_FAULT_BATCH: Final = 1 << 20
"""Iterations between two agreements about the end: a rank that is stopped in one would leave nothing in flight."""
_INTERRUPTED: Final = 130
"""Exit status of what Ctrl-C ended, as shells have it."""
_PORT: Final = 9779


@dataclass(frozen=True, slots=True)
class DemoSettings:
    seconds: float
    """At least one."""
    hosts: int
    """2 to 8."""
    ranks_per_host: int
    """1 to 8."""
    pattern: str
    """A pattern's name, or `all`; with a fault or `keep`, `all` is ddp."""
    as_json: bool
    record: Path | None = None
    """Folder of a dataset to record into; None: nothing is recorded."""
    library: str = "auto"
    """`nccl`, `workload`, or `auto`: the real NCCL where it is there."""
    fault: FaultKind | None = None
    keep: bool = False
    """Run until Ctrl-C, and answer at the agent's usual address."""


@dataclass(frozen=True, slots=True)
class JobLibrary:
    """What the job calls."""

    nccl: Double | None
    """None: the testbed's workload library."""
    words: str


def run_demo(settings: DemoSettings, out: TextIO, version: str) -> int:
    """Run the demo; returns 0 when the agent's counts equal the job's, else 1, and 130 when Ctrl-C ended it.

    With a fault it returns 0 when the agent named it.

    Raises:
        TestbedError, LoadError: it cannot run here; the message says what to do.
        RecordingError: the folder to record into cannot be used.
        SystemExit: SIGTERM ended it.
    """
    try:
        with stalls_untold():
            return _run(settings, out, version)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except SystemExit:
        # A fabric makes this of SIGTERM.
        print("interrupted", file=sys.stderr)
        raise


def _run(settings: DemoSettings, out: TextIO, version: str) -> int:
    if settings.keep and settings.record is not None:
        raise TestbedError("a recording ends with its job: give one of --keep and --record")
    if settings.keep and settings.as_json:
        raise TestbedError("--keep is for people, who read text: leave out --json")
    alone = settings.fault is not None or settings.keep
    if settings.pattern == "all":
        patterns: tuple[str, ...] = _PATTERNS[:1] if alone else _PATTERNS
    else:
        patterns = (settings.pattern,)
    library = find_library(settings.library)
    if settings.pattern == DISAGGREGATED:
        wheels = find_nixl()
        words = (
            f"{library.words}; beside it the real NIXL {nixl_version(wheels)} writes KV caches over TCP, with its UCX"
        )
        library = replace(library, words=words)
    stalls = OwnStalls()
    with (
        Fabric(hosts=settings.hosts, rails=2) as fabric,
        _agent(
            _config(fabric.hosts, settings, watchful=alone), version, settings.record, stalls, serve=settings.keep
        ) as daemon,
    ):
        loop = threading.Thread(target=daemon.run, name="agent")
        loop.start()
        try:
            demo = _Demo(daemon, stalls, fabric, settings, library, out)
            if settings.fault is not None:
                status = demo.run_fault(patterns[0], settings.fault)
            elif settings.keep:
                demo.run_job(patterns[0], _ENDLESS_SECONDS)
                status = demo.conclude()
            else:
                for pattern in patterns:
                    demo.run_job(pattern, settings.seconds / len(patterns))
                status = demo.conclude()
        finally:
            daemon.stop()
            loop.join()
    if settings.record is not None and not settings.as_json:
        print(f"wrote {settings.record}", file=out)
    return status


def find_library(wanted: str) -> JobLibrary:
    """What the job is to call.

    Raises:
        TestbedError: the real NCCL is wanted and cannot be had.
    """
    own = "the job calls the testbed's own library with NCCL's interface, of which calls are all there is to see"
    if wanted == "workload":
        return JobLibrary(None, own)
    try:
        nccl = build()
    except (LibraryMissing, BuildError) as error:
        if wanted == "nccl":
            raise TestbedError(" ".join(str(error).split())) from None
        if isinstance(error, LibraryMissing):
            return JobLibrary(None, f"{own} (the real NCCL is not here: `make demo` in a checkout fetches it)")
        # Of what a compiler or Python says, the last line is the reason.
        failed, *said = str(error).splitlines()
        why = f"{failed} {said[-1]}" if said else failed
        return JobLibrary(None, f"{own} (the stand-in for CUDA does not build: {why})")
    words = (
        f"the job calls the real NCCL {NCCL_VERSION} on a stand-in for CUDA: its GPU kernels run on this machine's CPUs"
    )
    return JobLibrary(nccl, words)


def _config(hosts: Sequence[Host], settings: DemoSettings, *, watchful: bool) -> Config:
    """An agent that observes the processes of these hosts: other jobs of this machine are none of the demo's.

    `watchful`: it reads what tells a sick rail, too.  Connections tell whose the bytes of a rail are.
    """
    rails = {"netdev", "tcp", "qdisc"} if watchful else {"netdev"}
    if settings.pattern == DISAGGREGATED:
        rails.add("tcp")
    return Config(
        listen=ListenAddress("127.0.0.1", _PORT),
        namespaces=frozenset((NAMESPACES_DIRECTORY / host.namespace).stat().st_ino for host in hosts),
        collectors=frozenset({"collective", *rails}),
        correlation_window_ns=_WINDOW_NS,
        level="all",
        sample_interval_ns=Config().sample_interval_ns if settings.record is None else _BURSTS_NS,
        stall_after_ns=_WAIT_NS if watchful else Config().stall_after_ns,
        recordings_directory=None,
        state_directory=None,
        verdicts_socket=None,
    )


def gpt_shape(ranks: int) -> GptShape:
    """A small GPT for so many ranks: two pipeline stages and two tensor ranks where they fit, the rest are replicas."""
    pipeline = 2 if ranks % 2 == 0 else 1
    tensor = 2 if ranks // pipeline % 2 == 0 else 1
    return GptShape(
        pipeline=pipeline,
        tensor=tensor,
        data=ranks // pipeline // tensor,
        layers=4,
        hidden=256,
        sequence=128,
        vocabulary=2000,
        micro_batch=2,
        micro_batches=4,
    )


@contextmanager
def _agent(config: Config, version: str, folder: Path | None, stalls: OwnStalls, *, serve: bool) -> Iterator[Daemon]:
    """An agent, started, which records into a folder if there is one, and answers requests if it is to serve."""
    if folder is None:
        daemon = _daemon(config, version, stalls, serve=serve)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.close()
        return
    with analysis_needed(f"{folder}: a dataset"):
        from railscope.agent.dataset.files import DatasetError
        from railscope.agent.record.dataset_recorder import DatasetRecorder
    try:
        recorder = DatasetRecorder(folder, config, version, SystemClock(), shown=True, stall_began=stalls.record)
        try:
            recorder.daemon.start()
            recorder.begin()
            yield recorder.daemon
            recorder.finish()
        finally:
            recorder.close()
    except DatasetError as error:
        raise RecordingError(str(error)) from None


def _daemon(config: Config, version: str, stalls: OwnStalls, *, serve: bool) -> Daemon:
    """At the agent's usual address, and where that is taken, by an agent of this host, at a free one."""

    def made(config: Config) -> Daemon:
        return Daemon(config, SystemClock(), version, serve=serve, keep_ended=True, stall_began=stalls.record)

    try:
        return made(config)
    except ServerError:
        return made(replace(config, listen=ListenAddress("127.0.0.1", 0)))


class _Demo:
    def __init__(
        self,
        daemon: Daemon,
        stalls: OwnStalls,
        fabric: Fabric,
        settings: DemoSettings,
        library: JobLibrary,
        out: TextIO,
    ) -> None:
        self._daemon = daemon
        self._observer = daemon.observer
        self._stalls = stalls
        self._full_window: float | None = None
        """When bytes have been compared for a whole window; None: no job has begun."""
        self._namespaces = [host.namespace for host in fabric.hosts]
        self._fabric = fabric
        self._settings = settings
        self._library = library
        self._out = out
        self._did: list[RankCount] = []
        self._seen: list[RankCount] = []
        self._completions: tuple[OpCompletion, ...] = ()
        self._verified = True
        self._rails: dict[tuple[str, str, str], RailCount] = {}
        """By namespace, device and direction."""
        self._beside = InferenceBeside(fabric, daemon.observer.snapshot)
        self._say(
            f"{settings.hosts} hosts × 2 rails from network namespaces, {settings.ranks_per_host} rank(s) a host; "
            f"{library.words}; the agent watches from outside"
        )

    def _say(self, line: str) -> None:
        if not self._settings.as_json:
            print(line, file=self._out, flush=True)

    def run_job(self, pattern: str, seconds: float) -> None:
        """One job, watched from before its first call to after its last."""
        with (
            self._beside.running(pattern == DISAGGREGATED),
            Job(self._fabric.hosts, self._options(pattern, seconds), self._library.nccl) as job,
        ):
            idle = self._begin(pattern, job)
            if self._settings.keep:
                self._tell_address(job)
            try:
                self._watch(job, _ENDLESS_SECONDS)
            except KeyboardInterrupt:
                if not self._settings.keep:
                    raise
                job.stop()
            reports = job.wait(_FINISH_SECONDS)
            for line in self._beside.finish():
                self._say(line)
        time.sleep(_SETTLE_SECONDS)
        snapshot = self._observer.snapshot()
        for report in reports:
            self._verified &= report.verified is not False and not report.errors
            self._did.append(count_of_report(pattern, report))
            self._seen.append(count_of_snapshot(pattern, report.rank, report.pid, snapshot))
        self._completions = completions_of(snapshot)
        after = self._rails_of(snapshot)
        for key, rail in idle.items():
            for carried in carried_between(rail, after.get(key, rail)):
                known = self._rails.get((*key, carried.direction))
                self._rails[*key, carried.direction] = carried if known is None else together(known, carried)
        equal = map(counts_are_equal, self._did[-len(reports) :], self._seen[-len(reports) :])
        calls = sum(count["calls"] for rank in self._did[-len(reports) :] for count in rank.ops.values())
        self._say(
            f"  {format_count(calls, 'call')} counted by the job; the agent saw "
            f"{'the same' if all(equal) else 'OTHERWISE'}"
        )

    def _options(self, pattern: str, seconds: float, *, batch: int | None = None) -> JobOptions:
        ranks = self._settings.hosts * self._settings.ranks_per_host
        return JobOptions(
            pattern=JOB_PATTERN if pattern == DISAGGREGATED else pattern,
            seconds=seconds,
            ranks_per_host=self._settings.ranks_per_host,
            hold=True,
            batch=batch,
            shape=gpt_shape(ranks) if pattern == GPT else None,
        )

    def _begin(self, pattern: str, job: Job) -> Mapping[tuple[str, str], RailFacts]:
        """Let the job go once it is observed; returns its rails as they were before."""
        idle = self._await_attached(job.pids)
        self._say(f"\n{pattern}: {format_count(len(job.pids), 'rank')}, pids {' '.join(map(str, job.pids))}")
        for line in self._beside.release():
            self._say(line)
        job.release()
        if self._full_window is None:
            self._full_window = time.monotonic() + _WINDOW_NS / 1e9
        return idle

    def _watch(self, job: Job, seconds: float) -> None:
        """Show what the job does, until it ends or the time is over."""
        end = time.monotonic() + seconds
        next_view = time.monotonic() + _VIEW_SECONDS
        before = NOTHING_YET
        quiet = self._settings.as_json or self._settings.keep
        while job.running() and time.monotonic() < end:
            time.sleep(0.05)
            if not self._settings.keep:
                self._stalls.log_new((*job.pids, *self._beside.pids))
            if time.monotonic() >= next_view and not quiet:
                snapshot = self._observer.snapshot()
                before = self._show(snapshot, job.pids, before)
                for line in self._beside.live_lines(snapshot, self._namespaces):
                    self._say(line)
                next_view += _VIEW_SECONDS

    def _await_attached(self, pids: Sequence[int]) -> Mapping[tuple[str, str], RailFacts]:
        """Wait until the job is observed; returns its rails as they are before it begins."""
        deadline = time.monotonic() + _ATTACH_SECONDS
        enough = None
        while time.monotonic() < deadline:
            snapshot = self._observer.snapshot() if self._observer.observes((*pids, *self._beside.pids)) else None
            if snapshot is not None and self._beside.is_seen(snapshot):
                enough = enough or time.monotonic() + _BELOW_SECONDS
                rails = self._rails_of(snapshot)
                read = all(rail.transmit_bytes is not None for rail in rails.values())
                seen = self._is_all_probed(snapshot) or time.monotonic() > enough
                if read and seen and {netns for netns, _ in rails} == set(self._namespaces):
                    return rails
            time.sleep(0.02)
        raise TestbedError(f"the agent did not find the job's {len(pids)} processes within {_ATTACH_SECONDS:.0f} s")

    def _is_all_probed(self, snapshot: Snapshot) -> bool:
        """Whether NCCL is observed as far as it can be: what it does before that would be missing below its calls."""
        levels = snapshot.health.probes.levels
        reached = bool(levels) and all(one.level == one.highest for one in levels)
        return self._library.nccl is None or reached

    def _rails_of(self, snapshot: Snapshot) -> Mapping[tuple[str, str], RailFacts]:
        return {(rail.netns, rail.device): rail for rail in snapshot.rails if rail.netns in self._namespaces}

    def _carried(self, before: Mapping[tuple[str, str], RailFacts], seconds: float) -> dict[tuple[str, str], float]:
        """Bytes per second that each rail has sent since."""
        now = self._rails_of(self._daemon.observer.snapshot())
        return {
            key: ((rail.transmit_bytes or 0) - (before[key].transmit_bytes or 0)) / max(seconds, 1e-3)
            for key, rail in now.items()
            if key in before
        }

    def _show(self, snapshot: Snapshot, pids: Sequence[int], before: LiveTotals) -> LiveTotals:
        """A few lines on what each communicator did and what each rail carried."""
        mine = [facts for facts in snapshot.collectives.communicators if facts.identity.pid in pids]
        now = totals_of(snapshot, mine)
        for line in communicator_lines(mine, before, now):
            self._say(line)
        for rail in snapshot.rails:
            if rail.netns in self._namespaces:
                self._say(rail_line(rail, self._live_ratio(rail), _WINDOW_NS / 1e9))
        return now

    def _live_ratio(self, rail: RailFacts) -> str:
        """Nothing before a whole window has passed: until then bytes that have not left yet make it misleading."""
        full = self._full_window is not None and time.monotonic() >= self._full_window
        if full and rail.transmit_explained_ratio is None and rail.transmit_wire_bytes:
            return "… (not yet: much is queued)"
        return format_ratio(rail.transmit_explained_ratio) if full else "…"

    # ---- faults ----

    def _tell_address(self, job: Job) -> None:
        """Where the reader looks while the demo waits for Ctrl-C."""
        url = self._daemon.url
        option = "" if url.endswith(f":{_PORT}") else f" --url {url}"
        self._say(
            "\nIt runs until Ctrl-C.  In another terminal:\n"
            f"  {_command()} top{option}   # ranks, operations, rails, stalls, live\n"
            f"  curl --silent {url}/stalls   # what is stalled now, and why\n"
            f"  curl --silent {url}/metrics  # what Prometheus scrapes"
        )
        if self._settings.fault is None:
            self._say(f"  kill -STOP {job.pids[-1]}               # stops a rank; kill -CONT lets it go on")
            for name, pid in self._beside.decodes.items():
                self._say(f"  kill -STOP {pid}               # stops {name}")

    def run_fault(self, pattern: str, kind: FaultKind) -> int:
        """Let a job run, break something, and show what the agent says; returns 0 when it named the fault.

        With `keep` the reader finds it: the demo says what it was when Ctrl-C ends it.
        """
        settings = self._settings
        options = self._options(pattern, _ENDLESS_SECONDS, batch=_FAULT_BATCH)
        with (
            self._beside.running(pattern == DISAGGREGATED),
            Job(self._fabric.hosts, options, self._library.nccl) as job,
        ):
            idle, began = self._begin(pattern, job), time.monotonic()
            if settings.keep:
                self._tell_address(job)
            self._watch(job, settings.seconds / 2)
            carried = self._carried(idle, time.monotonic() - began)
            rank = random.randrange(len(job.pids)) if settings.keep else len(job.pids) - 1
            stopped = self._beside.plan_stopped_decode() if kind is FaultKind.STALL else None
            planned = stopped or plan_fault(kind, self._fabric, job, rank, carried)
            with planned.fault:
                broken = time.monotonic()
                if settings.keep:
                    return self._let_find(planned, broken)
                self._say(f"\n{planned.words}")
                found, stalls = self._await_verdict(planned, job, broken)
                now_ns = time.monotonic_ns()
        stalls = tuple(sorted(stalls, key=lambda stall: not planned.is_named_by(stall)))
        if settings.as_json:
            result = {
                "fault": kind.value,
                "seconds": found,
                "stalls": [describe_stall(stall, now_ns) for stall in stalls],
                "ok": found is not None,
            }
            json.dump(result, self._out, indent=1)
            print(file=self._out)
            return 0 if found is not None else 1
        if found is None:
            self._say(f"the agent did not name it within {_VERDICT_SECONDS:.0f} s; what it says is:")
        else:
            self._say(f"the agent named it {found:.1f} s after it was broken:")
        for line in verdict_lines(stalls, now_ns):
            self._say(line)
        named = next((stall for stall in stalls if planned.is_named_by(stall)), None)
        if named is not None:
            self._say("what to run next on a real host:")
            for line in next_step_lines(named):
                self._say(line)
            option = f" --pattern {pattern}" if settings.pattern != "all" else ""
            self._say(
                f"what to run next here: `{_command()} demo --fault "
                f"{kind.value}{option} --keep`, which waits while you find it with `{_command()} top`"
            )
        return 0 if found is not None else 1

    def _let_find(self, planned: PlannedFault, broken: float) -> int:
        self._say("\nSomething is broken now.  Who, where, and why?  Ctrl-C tells.")
        now = ""
        try:
            while True:
                # Not after Ctrl-C, which reaches the job too.
                now = "" if planned.pid is None else f", and {describe_process(planned.pid)}"
                time.sleep(0.2)
        except KeyboardInterrupt:
            ago = f"{time.monotonic() - broken:.0f} s ago"
            self._say(f"\n{planned.past.format(ago=ago)}{now}")
            return 0

    def _await_verdict(self, planned: PlannedFault, job: Job, broken: float) -> tuple[float | None, tuple[Stall, ...]]:
        """Seconds until the fault was named, None: it was not; and all stalls of the job a little later."""
        pids = (*job.pids, *self._beside.pids)
        while time.monotonic() < broken + _VERDICT_SECONDS:
            time.sleep(0.05)
            stalls = stalls_of(self._observer.snapshot(), pids)
            if any(planned.is_named_by(stall) for stall in stalls):
                found = time.monotonic() - broken
                # Who does not write to the process that is stopped goes on.
                waiting = 1 if planned.peer else len(job.pids)
                deadline = time.monotonic() + _OTHERS_SECONDS
                while len({stall.pid for stall in stalls}) < waiting and time.monotonic() < deadline:
                    time.sleep(0.1)
                    stalls = stalls_of(self._observer.snapshot(), pids) or stalls
                return found, stalls
        return None, stalls_of(self._observer.snapshot(), pids)

    # ---- the end ----

    def conclude(self) -> int:
        """Print the comparison; returns the exit status."""
        rails = [self._rails[key] for key in sorted(self._rails, key=lambda key: key[:2])]
        equal = len(self._did) == len(self._seen) and all(map(counts_are_equal, self._did, self._seen))
        equal &= self._beside.wrote == self._beside.seen
        compared = sum(count["calls"] for rank in self._did for count in rank.ops.values())
        ok = equal and self._verified and self._beside.verified and compared > 0
        if self._settings.as_json:
            result = {
                "library": "workload" if self._library.nccl is None else f"nccl {NCCL_VERSION}",
                "jobs": [asdict(rank) for rank in self._did],
                "observed": [asdict(rank) for rank in self._seen],
                "completions": [asdict(one) for one in self._completions],
                "rails": [asdict(rail) for rail in rails],
                "transfers": [asdict(one) for one in self._beside.wrote],
                "observed_transfers": [asdict(one) for one in self._beside.seen],
                "verified": self._verified and self._beside.verified,
                "ok": ok,
            }
            json.dump(result, self._out, indent=1)
            print(file=self._out)
            return 0 if ok else 1
        self._say_tables(rails)
        if ok:
            self._say("\nequal: the agent counted every call and every byte that the job says it made")
        else:
            if not equal:
                self._say("\nNOT EQUAL")
            elif not compared:
                self._say("\nnothing to compare: the job ended before it made a call")
            else:
                self._say("\nthe job itself failed its verification")
            for line in differences(self._did, self._seen):
                self._say(line)
        return 0 if ok else 1

    def _say_tables(self, rails: Sequence[RailCount]) -> None:
        for line in ("", *count_table(self._did, self._seen)):
            self._say(line)
        for line in write_table(self._beside.wrote, self._beside.seen):
            self._say(line)
        if self._completions:
            self._say("\noperations that the agent saw complete: time from NCCL's hand-over to its network threads to")
            self._say("the last byte on the network; bus bandwidth as nccl-tests defines it")
            for line in completion_table(self._completions):
                self._say(line)
        self._say(
            "\nport bytes: what the device counted; by collectives: what NCCL handed to the device; expected wire:"
        )
        self._say("what the observed calls should put on this rail, by rings; 1.000 where the two are equal")
        for line in rail_table(rails):
            self._say(line)


def _command() -> str:
    """How the reader calls railscope here: by its name where a shell finds that, else as this command was called."""
    return "railscope" if shutil.which("railscope") else sys.argv[0]
