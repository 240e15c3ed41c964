"""`railscope demo`: the main job, live, on one machine.

Hosts are network namespaces with two rails each, the job is real processes that call a library with NCCL's ABI and
move real bytes over those rails, and the agent observes them from outside as it would on a GPU node.  At the end the
job's own count of what it did is compared, call by call and byte by byte, with what the agent saw.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TextIO

from railscope.agent.config.options import Config
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CommunicatorFacts, RailFacts, Snapshot
from railscope.agent.facts.stall import Stall
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.node.daemon.observer import Observer
from railscope.agent.record.command import analysis_needed
from railscope.agent.recording.file import RecordingError
from railscope.probes.clock import SystemClock
from railscope.testbed.hosts import Fabric, Host, TestbedError
from railscope.testbed.job import GptShape, Job, JobOptions, RankReport
from railscope.testbed.namespaces import NAMESPACES_DIRECTORY

_log = logging.getLogger("railscope.demo")

_PATTERNS: Final = ("ddp", "tensor-parallel", "moe", "inference", "mixed")
GPT: Final = "gpt"
"""Not among `all`: how many ranks there are decides what it shows."""
_VIEW_SECONDS: Final = 1.0
_WINDOW_NS: Final = 3_000_000_000
"""Expected and counted bytes are compared over this long: jobs of the demo last seconds."""
_ATTACH_SECONDS: Final = 10.0
_FINISH_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 0.25
"""The rails are read once more after the job's last byte: longer than two sample periods."""

_MOST_SHOWN: Final = 8
"""Communicators in one view: ranks times four of them and more are a job's, and most are idle at a time."""
_INTERRUPTED: Final = 130
"""Exit status of what Ctrl-C ended, as shells have it."""

Counts = dict[str, tuple[int, int]]
"""Calls and payload bytes by op."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    seconds: float
    """At least one."""
    hosts: int
    """2 to 8."""
    ranks_per_host: int
    """1 to 8."""
    pattern: str
    """A pattern's name, or `all`."""
    as_json: bool
    record: Path | None = None
    """Folder of a dataset to record into; None: nothing is recorded."""


@dataclass(frozen=True, slots=True)
class RankCount:
    """What one rank did, as the job or as the agent counted it."""

    pattern: str
    rank: int
    pid: int
    ops: Mapping[str, Mapping[str, int]]
    """op → calls, payload_bytes."""
    communicators: Mapping[str, int]
    """commHash → operations given to it."""


@dataclass(frozen=True, slots=True)
class RailCount:
    """What one rail carried while the jobs ran."""

    device: str
    netns: str
    direction: str
    port_bytes: int
    expected_wire_bytes: int | None
    explained_ratio: float | None


def run_demo(settings: DemoSettings, out: TextIO, version: str) -> int:
    """Run the demo; returns 0 when the agent's counts equal the job's, else 1, and 130 when Ctrl-C ended it.

    Raises:
        TestbedError, LoadError: it cannot run here; the message says what to do.
        RecordingError: the folder to record into cannot be used.
        SystemExit: SIGTERM ended it.
    """
    try:
        with _stalls_untold():
            return _run(settings, out, version)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except SystemExit:
        # A fabric makes this of SIGTERM.
        print("interrupted", file=sys.stderr)
        raise


@contextmanager
def _stalls_untold() -> Iterator[None]:
    """Keep the daemon from logging stalls: the demo logs them itself, while it does not kill the ranks."""
    logger = logging.getLogger("railscope.stalls")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run(settings: DemoSettings, out: TextIO, version: str) -> int:
    patterns = _PATTERNS if settings.pattern == "all" else (settings.pattern,)
    stalls = OwnStalls()
    with (
        Fabric(hosts=settings.hosts, rails=2) as fabric,
        _agent(_config(fabric.hosts), version, settings.record, stalls) as daemon,
    ):
        loop = threading.Thread(target=daemon.run, name="agent")
        loop.start()
        try:
            demo = _Demo(daemon.observer, stalls, fabric, settings, out)
            for pattern in patterns:
                demo.run_job(pattern, settings.seconds / len(patterns))
            status = demo.conclude()
        finally:
            daemon.stop()
            loop.join()
    if settings.record is not None and not settings.as_json:
        print(f"wrote {settings.record}", file=out)
    return status


def _config(hosts: Sequence[Host]) -> Config:
    """An agent that observes the processes of these hosts: other jobs of this machine are none of the demo's."""
    return Config(
        namespaces=frozenset((NAMESPACES_DIRECTORY / host.namespace).stat().st_ino for host in hosts),
        collectors=frozenset({"collective", "netdev"}),
        correlation_window_ns=_WINDOW_NS,
        recordings_directory=None,
    )


class OwnStalls:
    """Tells of stalls, and only of those of given processes.

    The daemon's loop sees them begin, and the demo's thread asks, so that nothing is said once the demo has stopped.
    """

    def __init__(self) -> None:
        self._begun: deque[Stall] = deque()

    def record(self, stall: Stall) -> None:
        """A stall has begun; on the daemon's loop."""
        self._begun.append(stall)

    def log_new(self, pids: Collection[int]) -> None:
        """Log what began since the last time, of these processes."""
        while self._begun:
            stall = self._begun.popleft()
            if stall.pid in pids:
                why = f"{stall.diagnosis.cause.value}: {'; '.join(stall.diagnosis.evidence)}"
                _log.warning("communicator %s rank %s stalls in %s: %s", stall.comm, stall.rank, stall.op, why)


def communicator_lines(
    communicators: Sequence[CommunicatorFacts], before: Mapping[tuple[int, str], int]
) -> Iterator[str]:
    """The communicators that did most since `before` (enqueued operations by pid and communicator, a second ago).

    Those that have ended come last; what there is no room for is counted.
    """

    def done(facts: CommunicatorFacts) -> int:
        return facts.enqueued - before.get(_key(facts), 0)

    ordered = sorted(communicators, key=lambda facts: (not facts.alive, -done(facts)))
    for facts in ordered[:_MOST_SHOWN]:
        did = f"{done(facts):>7,} ops/s" if facts.alive else f"{'ended':>13}"
        ops = ", ".join(f"{op.op} {op.calls:,}" for op in facts.ops)
        yield f"  comm {facts.identity.comm} rank {facts.identity.rank}/{facts.identity.nranks}: {did}   {ops}"
    if len(ordered) > _MOST_SHOWN:
        yield f"  … and {len(ordered) - _MOST_SHOWN:,} more"


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
def _agent(config: Config, version: str, folder: Path | None, stalls: OwnStalls) -> Iterator[Daemon]:
    """An agent without a server, started, which records into a folder if there is one."""
    if folder is None:
        daemon = Daemon(config, SystemClock(), version, serve=False, keep_ended=True, stall_began=stalls.record)
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


class _Demo:
    def __init__(
        self, observer: Observer, stalls: OwnStalls, fabric: Fabric, settings: DemoSettings, out: TextIO
    ) -> None:
        self._observer = observer
        self._stalls = stalls
        self._full_window: float | None = None
        """When bytes have been compared for a whole window; None: no job has begun."""
        self._namespaces = [host.namespace for host in fabric.hosts]
        self._fabric = fabric
        self._settings = settings
        self._out = out
        self._did: list[RankCount] = []
        self._seen: list[RankCount] = []
        self._verified = True
        self._rails: dict[tuple[str, str, str], RailCount] = {}
        """By namespace, device and direction."""
        self._say(
            f"{settings.hosts} hosts × 2 rails from network namespaces, {settings.ranks_per_host} rank(s) a host; "
            "the job is a workload with NCCL's ABI, the agent watches from outside"
        )

    def _say(self, line: str) -> None:
        if not self._settings.as_json:
            print(line, file=self._out, flush=True)

    def run_job(self, pattern: str, seconds: float) -> None:
        """One job, watched from before its first call to after its last."""
        options = JobOptions(
            pattern=pattern,
            seconds=seconds,
            ranks_per_host=self._settings.ranks_per_host,
            hold=True,
            shape=gpt_shape(self._settings.hosts * self._settings.ranks_per_host) if pattern == GPT else None,
        )
        with Job(self._fabric.hosts, options) as job:
            idle = self._await_attached(job.pids)
            self._say(f"\n{pattern}: {len(job.pids)} ranks, pids {' '.join(map(str, job.pids))}")
            job.release()
            if self._full_window is None:
                self._full_window = time.monotonic() + _WINDOW_NS / 1e9
            next_view = time.monotonic() + _VIEW_SECONDS
            before: Mapping[tuple[int, str], int] = {}
            while job.running():
                time.sleep(0.05)
                self._stalls.log_new(job.pids)
                if time.monotonic() >= next_view and not self._settings.as_json:
                    before = self._show(self._observer.snapshot(), job.pids, before)
                    next_view += _VIEW_SECONDS
            reports = job.wait(_FINISH_SECONDS)
        time.sleep(_SETTLE_SECONDS)
        snapshot = self._observer.snapshot()
        for report in reports:
            self._verified &= report.verified is not False and not report.errors
            self._did.append(_of_report(pattern, report))
            self._seen.append(_of_snapshot(pattern, report.rank, report.pid, snapshot))
        after = self._rails_of(snapshot)
        for key, rail in idle.items():
            for carried in _carried(rail, after.get(key, rail)):
                known = self._rails.get((*key, carried.direction))
                self._rails[*key, carried.direction] = carried if known is None else _together(known, carried)
        equal = map(_equal, self._did[-len(reports) :], self._seen[-len(reports) :])
        calls = sum(count["calls"] for rank in self._did[-len(reports) :] for count in rank.ops.values())
        self._say(f"  {calls:,} calls counted by the job; the agent saw {'the same' if all(equal) else 'OTHERWISE'}")

    def _await_attached(self, pids: Sequence[int]) -> Mapping[tuple[str, str], RailFacts]:
        """Wait until the job is observed; returns its rails as they are before it begins."""
        deadline = time.monotonic() + _ATTACH_SECONDS
        while time.monotonic() < deadline:
            if self._observer.observes(pids):
                rails = self._rails_of(self._observer.snapshot())
                read = all(rail.transmit_bytes is not None for rail in rails.values())
                if read and {netns for netns, _ in rails} == set(self._namespaces):
                    return rails
            time.sleep(0.02)
        raise TestbedError(f"the agent did not find the job's {len(pids)} processes within {_ATTACH_SECONDS:.0f} s")

    def _rails_of(self, snapshot: Snapshot) -> Mapping[tuple[str, str], RailFacts]:
        return {(rail.netns, rail.device): rail for rail in snapshot.rails if rail.netns in self._namespaces}

    def _show(
        self, snapshot: Snapshot, pids: Sequence[int], before: Mapping[tuple[int, str], int]
    ) -> Mapping[tuple[int, str], int]:
        """A few lines on what each communicator did and what each rail carried."""
        mine = [facts for facts in snapshot.collectives.communicators if facts.identity.pid in pids]
        for line in communicator_lines(mine, before):
            self._say(line)
        for rail in snapshot.rails:
            if rail.netns in self._namespaces:
                self._say(
                    f"  {rail.netns.rsplit('-', 1)[-1]} {rail.device}: "
                    f"sent {(rail.transmit_bytes or 0) / 1e6:,.1f} MB, "
                    f"explained {self._live_ratio(rail)}"
                )
        return {_key(facts): facts.enqueued for facts in mine}

    def _live_ratio(self, rail: RailFacts) -> str:
        """Nothing before a whole window has passed: until then bytes that have not left yet make it misleading."""
        full = self._full_window is not None and time.monotonic() >= self._full_window
        return _ratio(rail.transmit_explained_ratio) if full else "…"

    def conclude(self) -> int:
        """Print the comparison; returns the exit status."""
        rails = [self._rails[key] for key in sorted(self._rails, key=lambda key: key[:2])]
        equal = len(self._did) == len(self._seen) and all(map(_equal, self._did, self._seen))
        compared = sum(count["calls"] for rank in self._did for count in rank.ops.values())
        ok = equal and self._verified and compared > 0
        if self._settings.as_json:
            result = {
                "jobs": [asdict(rank) for rank in self._did],
                "observed": [asdict(rank) for rank in self._seen],
                "rails": [asdict(rail) for rail in rails],
                "verified": self._verified,
                "ok": ok,
            }
            json.dump(result, self._out, indent=1)
            print(file=self._out)
            return 0 if ok else 1
        self._table(rails)
        if ok:
            self._say("\nequal: the agent counted every call and every byte that the job says it made")
        else:
            self._say("\nNOT EQUAL" if not equal else "\nthe job itself failed its verification")
            for did, seen in zip(self._did, self._seen, strict=True):
                if did != seen:
                    for op in sorted(did.ops.keys() | seen.ops.keys()):
                        if did.ops.get(op) != seen.ops.get(op):
                            self._say(
                                f"  {did.pattern} rank {did.rank} {op}: job {did.ops.get(op)}, agent {seen.ops.get(op)}"
                            )
        return 0 if ok else 1

    def _table(self, rails: Sequence[RailCount]) -> None:
        did, seen = _by_op(self._did), _by_op(self._seen)
        self._say(
            f"\n{'op':<14} {'calls (job)':>14} {'calls (agent)':>14} {'payload (job)':>16} {'payload (agent)':>16}"
        )
        for op in sorted(did.keys() | seen.keys()):
            calls, size = did.get(op, (0, 0))
            seen_calls, seen_size = seen.get(op, (0, 0))
            self._say(f"{op:<14} {calls:>14,} {seen_calls:>14,} {size:>16,} {seen_size:>16,}")
        self._say(f"\n{'rail':<26} {'direction':<9} {'port bytes':>16} {'expected wire':>16} {'explained':>10}")
        for rail in rails:
            host = rail.netns.rsplit("-", 1)[-1]
            expected = "unknown" if rail.expected_wire_bytes is None else f"{rail.expected_wire_bytes:,}"
            name = f"{host} {rail.device}"
            ratio = _ratio(rail.explained_ratio)
            self._say(f"{name:<26} {rail.direction:<9} {rail.port_bytes:>16,} {expected:>16} {ratio:>10}")


def _equal(did: RankCount, seen: RankCount) -> bool:
    """Same calls and bytes of each op, and of each communicator that has a name.

    A communicator that lived shorter than the agent's reader slept may be without a name; its calls are counted all
    the same, and the loss of its name shows in `events_lost_total`.
    """
    named = {comm: calls for comm, calls in seen.communicators.items() if comm != UNKNOWN}
    return did.ops == seen.ops and named.items() <= did.communicators.items()


def _key(facts: CommunicatorFacts) -> tuple[int, str]:
    """Tells two communicators of one view apart."""
    return facts.identity.pid, facts.identity.comm


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f}"


def _of_report(pattern: str, report: RankReport) -> RankCount:
    ops = {op: {"calls": count.calls, "payload_bytes": count.payload_bytes} for op, count in report.totals().items()}
    communicators = {
        communicator.hash: sum(operation.calls for operation in communicator.operations)
        for communicator in report.communicators
        if communicator.operations
    }
    return RankCount(pattern, report.rank, report.pid, dict(sorted(ops.items())), dict(sorted(communicators.items())))


def _of_snapshot(pattern: str, rank: int, pid: int, snapshot: Snapshot) -> RankCount:
    ops: dict[str, dict[str, int]] = defaultdict(lambda: {"calls": 0, "payload_bytes": 0})
    communicators: dict[str, int] = defaultdict(int)
    for facts in snapshot.collectives.communicators:
        if facts.identity.pid != pid:
            continue
        if facts.enqueued:
            communicators[facts.identity.comm] += facts.enqueued
        for op in facts.ops:
            ops[op.op]["calls"] += op.calls
            ops[op.op]["payload_bytes"] += op.payload_bytes
    return RankCount(pattern, rank, pid, dict(sorted(ops.items())), dict(sorted(communicators.items())))


def _carried(before: RailFacts, after: RailFacts) -> tuple[RailCount, RailCount]:
    """What a rail carried between two moments: a port has counted since long before."""

    def one(direction: str, port: tuple[int | None, int | None], wire: tuple[int | None, int | None]) -> RailCount:
        # Before a namespace's first call nothing is expected there, and nothing known of it.
        wire_bytes = None if wire[1] is None else wire[1] - (wire[0] or 0)
        return _counted(after, direction, (port[1] or 0) - (port[0] or 0), wire_bytes)

    return (
        one(
            "transmit",
            (before.transmit_bytes, after.transmit_bytes),
            (before.transmit_wire_bytes, after.transmit_wire_bytes),
        ),
        one(
            "receive",
            (before.receive_bytes, after.receive_bytes),
            (before.receive_wire_bytes, after.receive_wire_bytes),
        ),
    )


def _together(one: RailCount, other: RailCount) -> RailCount:
    known = one.expected_wire_bytes is not None and other.expected_wire_bytes is not None
    wire_bytes = (one.expected_wire_bytes or 0) + (other.expected_wire_bytes or 0) if known else None
    return _counted(one, one.direction, one.port_bytes + other.port_bytes, wire_bytes)


def _counted(rail: RailFacts | RailCount, direction: str, port_bytes: int, wire_bytes: int | None) -> RailCount:
    ratio = wire_bytes / port_bytes if wire_bytes is not None and port_bytes else None
    return RailCount(rail.device, rail.netns, direction, port_bytes, wire_bytes, ratio)


def _by_op(ranks: Sequence[RankCount]) -> Counts:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for rank in ranks:
        for op, count in rank.ops.items():
            totals[op][0] += count["calls"]
            totals[op][1] += count["payload_bytes"]
    return {op: (calls, size) for op, (calls, size) in totals.items()}
