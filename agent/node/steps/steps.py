"""Steps of the jobs on this host: how many there were, and how long they took.

A step is what `railscope report` calls an iteration, found by the same rule in the stream of calls that every level of
probes gives: from its first call to the next one's, by the host's clock.  What is enqueued ahead of the GPU keeps the
pace of the GPU within a step or two, as jobs wait for it sooner or later.

Unknown are the steps of a job whose calls have no pattern (requests at random), of one that replays its collectives in
CUDA graphs, and those in which calls were lost (a full ring).  They are absent, and what is counted is counted right.

A step within which other calls lie (an evaluation, a checkpoint), and that is longer than half as long again as usual,
is counted, and what it took is not: it took what a usual one takes, and the rest was something else.

Memory: 40 bytes for each call that is kept.  All jobs together have `MOST_CALLS`, which tenants share equally, and of
one tenant its jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.snapshot import JobSteps
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.agent.node.collectives.slow_ranks import RankWait
from railscope.agent.node.collectives.stragglers import NOT_BY_ALL
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.steps.goodput import MOST_ENDED, EndedJobs, JobTime
from railscope.agent.node.steps.parts import StepParts, Waited
from railscope.agent.node.steps.references import Reference, find_references
from railscope.agent.node.steps.stream import LEAST_NS, CallStream
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.agent.rhythm.pattern import Calls
from railscope.agent.rhythm.tracker import Iterations
from railscope.probes.loading.maps import Records
from railscope.probes.shares import FairMemory

BOUNDS: Final = tuple(2.0**power for power in range(-9, 11))
"""2 ms to 17 minutes."""
MOST_CALLS: Final = 1 << 19
"""Kept of all jobs: 20 MiB."""
_MOST_OF_A_JOB: Final = 1 << 16
_ENOUGH: Final = 1 << 14
"""Calls that are looked at together."""
_INTERRUPTED: Final = 1.5
"""So many times the usual length."""
_COLUMNS: Final = ("time_ns", "instance", "peer", "op", "data_type", "payload_bytes", "sequence")

Columns = tuple[npt.NDArray[Any], ...]


@dataclass(slots=True)
class _Job:
    """What is known of one reference rank."""

    reference: Reference
    rank: RankKey
    stream: CallStream
    time: JobTime
    last: dict[int, int] = field(default_factory=dict)
    """By instance: number of its last call."""
    parts: StepParts = field(default_factory=StepParts)
    name: Hashable = None
    """Whose and which it is for its batch system or launcher; None: not known."""
    ends: dict[int, RankKey] = field(default_factory=dict)
    """By instance: its communicator and rank there."""
    between_pairs: set[int] = field(default_factory=set)
    """Instances with calls that not all ranks make."""
    followed: set[int] = field(default_factory=set)
    """Instances of which operations were seen to complete."""
    steps: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(BOUNDS) + 1, np.int64))
    seconds: float = 0.0
    """Of the steps that `counts` has."""
    silent_seconds: float = 0.0
    """Of those: before their end, without a call."""
    ended_ns: int | None = None

    def record(self, found: Iterations) -> None:
        """Count steps (dtype ITERATION)."""
        self.steps += len(found)
        self.time.record_steps(found)
        lengths_ns = found["end_ns"] - found["start_ns"]
        pattern = self.stream.pattern
        longest_ns = _INTERRUPTED * pattern.median_ns if pattern is not None else 0.0
        measured = ~found["odd"] | (lengths_ns <= longest_ns)
        found, lengths_ns = found[measured], lengths_ns[measured]
        self.parts.add(found)
        seconds = lengths_ns / 1e9
        self.counts += np.bincount(np.searchsorted(BOUNDS, seconds), minlength=len(BOUNDS) + 1)
        self.seconds += float(seconds.sum())
        self.silent_seconds += int(found["silence_ns"].sum()) / 1e9

    def waited(self, waits: Mapping[RankKey, RankWait]) -> Waited:
        """How long the rank waited of late, where all ranks of a communicator make the same calls."""
        compared = [
            waits[end]
            for instance, end in self.ends.items()
            if instance in self.reference.instances and instance not in self.between_pairs and end in waits
        ]
        seen = [one for one in compared if one.inside_seconds is not None]
        inside = sum(one.inside_seconds or 0.0 for one in seen)
        by_calls = [one for one in compared if one.inside_seconds is None]
        return Waited(
            sum(one.seconds for one in seen) / inside if inside > 0 else None,
            min(1.0, sum(one.seconds / one.stretch_seconds for one in by_calls)) if by_calls else None,
        )


class Watch(Protocol):
    """What is seen of the ranks of this host besides their calls (agent/node/stalls/watchdog.py)."""

    @property
    def waits(self) -> Mapping[RankKey, RankWait]:
        """Of each rank that is compared with others of this host, what it waited of late."""

    @property
    def stalled_since_ns(self) -> Mapping[int, int]:
        """By pid of a process that is in an operation which stalls: when that was handed over (CLOCK_MONOTONIC)."""

    @property
    def writing_since_ns(self) -> Mapping[int, int]:
        """By pid of a process that writes to storage and makes no call meanwhile: its last one (CLOCK_MONOTONIC)."""


class Steps:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        processes: Mapping[int, ObservedProcess],
        replays: Callable[[], Collection[int]],
        executor: Executor,
        watch: Watch,
        *,
        least_ns: int = LEAST_NS,
    ) -> None:
        """`replays`: instances whose collectives run in replays of CUDA graphs.  `executor`: for pure computation.

        `watch`: what else is seen of ranks.  `least_ns`: calls that span so much are needed to tell of steps.
        """
        self._processes = processes
        self._replays = replays
        self._executor = executor
        self._watch = watch
        self._least_ns = least_ns
        self._jobs: dict[int, _Job] = {}
        """By pid, those that run."""
        self._ended = FairMemory[Tenant, tuple[int, int], _Job](MOST_ENDED)
        """Those that made steps, by pid and when they had ended."""
        self._changes = -1
        self._known = np.zeros(0, np.uint32)
        """Instances of references, ascending, and the pid of each."""
        self._pids = np.zeros(0, np.int64)
        self._wanted: frozenset[int] = frozenset()
        self._pending: list[Columns] = []
        self._pending_count = 0
        self._lives = EndedJobs()
        self._now_ns = 0
        """Of the last update."""

    def record(self, events: Records, called: Iterable[int]) -> None:
        """Record calls (dtype CALL_EVENT) of the instances `called`.

        Of ranks that stand for no job they are dropped; of others what is needed is kept until there are many, or until
        the next update.
        """
        if self._wanted.isdisjoint(called):
            return
        instances = np.ascontiguousarray(events["instance"])
        at = np.minimum(np.searchsorted(self._known, instances), len(self._known) - 1)
        own = np.flatnonzero(self._known[at] == instances)
        self._pending.append((self._pids[at[own]], *(events[name][own] for name in _COLUMNS)))
        self._pending_count += len(own)
        if self._pending_count >= _ENOUGH:
            self._follow()

    def record_completions(self, events: Records) -> None:
        """Record completed operations (dtype COMPLETION_EVENT), all that there were."""
        if not len(self._known):
            return
        instances = np.ascontiguousarray(events["instance"])
        at = np.minimum(np.searchsorted(self._known, instances), len(self._known) - 1)
        own = np.flatnonzero(self._known[at] == instances)
        if not len(own):
            return
        pids, instances = self._pids[at[own]], instances[own]
        end_ns = events["time_ns"][own].astype(np.int64)
        begin_ns = end_ns - events["duration_ns"][own].astype(np.int64)
        for pid in np.unique(pids).tolist():
            job, of_job = self._jobs[pid], pids == pid
            job.followed.update(np.unique(instances[of_job]).tolist())
            job.parts.record_completions(begin_ns[of_job], end_ns[of_job])

    def miss_calls(self) -> None:
        """Calls met no probe since the last ones that were recorded: what was learnt from those before ends there."""
        self._follow()
        for job in self._jobs.values():
            # As numbers that did not come: those of calls that meet no probe are given to the next ones.
            job.last = {instance: number - 1 for instance, number in job.last.items()}

    def update(self, now_ns: int, communicators: Iterable[Communicator], changes: int) -> None:
        """Look for steps in what was recorded, and for the jobs of now.

        Args:
            now_ns: CLOCK_MONOTONIC.
            communicators: all that have not been put away.
            changes: rises whenever anything about them changes.
        """
        self._now_ns = now_ns
        self._follow()
        self._settle()
        stalled, writing = self._watch.stalled_since_ns, self._watch.writing_since_ns
        for job in self._jobs.values():
            peers = job.reference.peers
            job.time.look(
                now_ns,
                stalled_since_ns=min((stalled[pid] for pid in stalled.keys() & peers), default=None),
                writing_since_ns=min((writing[pid] for pid in writing.keys() & peers), default=None),
            )
        if changes == self._changes:
            return
        self._changes = changes
        living = [one for one in communicators if one.ended_ns is None]
        found = {one.pid: one for one in find_references(living, self._processes, self._jobs.keys())}
        for pid in self._jobs.keys() - found.keys():
            job = self._jobs.pop(pid)
            job.ended_ns = now_ns
            job.stream.end()
            if job.steps:
                self._ended.put(job.reference.tenant, (pid, now_ns), job)
            # One that ended before its first step hands on what it had from the lives before.
            if job.name is not None and (job.steps or job.time.before is not None):
                self._lives.put(job.reference.tenant, job.name, job.time.ended(now_ns))
        most = _shares(found.values())
        names = {one.name for one in living if one.tgid in found}
        ends: dict[int, dict[int, RankKey]] = {pid: {} for pid in found}
        began_ns = dict.fromkeys(found, now_ns)
        for one in living:
            if one.tgid in found:
                ends[one.tgid][one.instance] = one.name, format_label(one.rank)
                began_ns[one.tgid] = min(began_ns[one.tgid], one.first_ns)
        for pid, reference in found.items():
            if pid not in self._jobs:
                stream = CallStream(self._executor, most[pid], least_ns=self._least_ns)
                name = self._name(pid, reference.tenant)
                time = JobTime(began_ns[pid])
                if name is not None:
                    self._lives.continue_by(name, time)
                self._jobs[pid] = _Job(reference, reference.rank, stream, time, ends=ends[pid], name=name)
                continue
            job = self._jobs[pid]
            # Either may come late: what its process is called, and that the life before has ended.
            job.name = job.name if job.name is not None else self._name(pid, reference.tenant)
            if job.name is not None:
                self._lives.continue_by(job.name, job.time)
            job.ends = ends[pid]
            job.between_pairs &= reference.instances
            job.followed &= reference.instances
            job.stream.most = most[pid]
            job.reference = reference
            job.last = {instance: number for instance, number in job.last.items() if instance in reference.instances}
            if job.rank[0] not in names:
                job.rank = reference.rank
        rows = sorted((instance, pid) for pid, one in found.items() for instance in one.instances)
        self._known = np.array([instance for instance, _ in rows], np.uint32)
        self._pids = np.array([pid for _, pid in rows], np.int64)
        self._wanted = frozenset(self._known.tolist())

    def facts(self) -> tuple[JobSteps, ...]:
        """Of each job whose steps are known, or were."""
        self._follow()
        return tuple(
            JobSteps(
                *job.rank,
                steps=job.steps,
                lengths=Histogram(BOUNDS, tuple(job.counts.tolist()), job.seconds),
                silent_seconds=job.silent_seconds,
                parts=dict(job.parts.seconds),
                spent={
                    state: time_ns / 1e9 for state, time_ns in job.time.spent_ns(job.ended_ns or self._now_ns).items()
                },
            )
            for job in (*self._jobs.values(), *(job for _, job in self._ended.items()))
            if job.steps
        )

    def forget(self, before_ns: int) -> None:
        """Drop jobs that ended before a moment."""
        for key, job in list(self._ended.items()):
            if (job.ended_ns or 0) < before_ns:
                self._ended.pop(key)

    def _follow(self) -> None:
        """Give the streams the calls that wait."""
        if not self._pending:
            return
        pids, *columns = (np.concatenate(column) for column in zip(*self._pending, strict=True))
        self._pending.clear()
        self._pending_count = 0
        replays = self._replays()
        for pid in np.unique(pids).tolist():
            job = self._jobs.get(pid)
            if job is None:
                continue
            own = pids == pid
            time_ns, instance, peer, op, data_type, payload, sequence = (column[own] for column in columns)
            # What captured calls do is done when their graph is launched: none of the stream is what it seems.
            if not job.reference.instances.isdisjoint(replays):
                job.stream.record_loss(int(time_ns[-1]))
                continue
            if self._are_missing(job, instance, sequence):
                job.stream.record_loss(int(time_ns[0]))
            calls = Calls.of_columns(time_ns, instance, peer, op, data_type, payload)
            all_ended = job.stream.pattern is not None and job.reference.instances.isdisjoint(
                job.stream.pattern.communicators
            )
            apart = NOT_BY_ALL[op]
            if apart.any():
                job.between_pairs.update(np.unique(instance[apart]).tolist())
            job.record(job.stream.add(calls, all_ended=all_ended))

    def _name(self, pid: int, tenant: Tenant) -> Hashable:
        process = self._processes.get(pid)
        return (tenant, process.job.job) if process is not None and process.job.job else None

    def _settle(self) -> None:
        """Tell what the steps are made of whose operations have ended."""
        waits = self._watch.waits
        for job in self._jobs.values():
            if job.parts.is_settled:
                continue
            pattern = job.stream.pattern
            all_seen = pattern is not None and pattern.communicators <= job.followed
            job.parts.settle(self._now_ns, job.waited(waits), all_seen=all_seen)

    @staticmethod
    def _are_missing(job: _Job, instance: npt.NDArray[Any], sequence: npt.NDArray[Any]) -> bool:
        """Whether calls between these and the last ones did not come."""
        found, place, counts = np.unique(instance, return_inverse=True, return_counts=True)
        highest = np.zeros(len(found), np.int64)
        np.maximum.at(highest, place, sequence.astype(np.int64))
        missing = False
        for one, count, number in zip(found.tolist(), counts.tolist(), highest.tolist(), strict=True):
            before = job.last.get(one)
            job.last[one] = number
            # The kernel's numbers begin again at 2^32.
            missing |= before is not None and 0 < (number - before - count) & 0xFFFFFFFF < 1 << 31
        return missing


def _shares(references: Iterable[Reference]) -> dict[int, int]:
    """By pid: how many calls may be kept."""
    found = list(references)
    jobs = Counter(one.tenant for one in found)
    return {one.pid: min(_MOST_OF_A_JOB, MOST_CALLS // len(jobs) // jobs[one.tenant]) for one in found}
