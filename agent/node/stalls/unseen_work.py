"""Finds processes that wait for their GPU and do not come back, where no NCCL call tells why.

CUDA graphs, one-node jobs over NVLink and the all-reduce kernels that inference engines bring along make no call that
could be followed.  What shows is that a thread has not returned from cuStreamSynchronize or the like
(probes/bpf/driver_calls.bpf.c), and what the other processes of its job on this host do meanwhile.  That proves no
fault: such a finding is weak, says who is inside which call, and names a process only if it launched fewer graphs than
the others, where they launched equally many before.  Where NVML is there, it adds whether the NVLinks of its GPU carry
anything.

A long wait alone is nothing: kernels may run for minutes.  So a wait is told of if

- another process of its job, or of its communicators, runs on this host.  Alone, nothing can be compared;
- no operation of NCCL is known to be in flight in its process: for those there is better evidence;
- no process of its job does work that comes to an end, as a checkpoint does, or did so a moment ago;
- and it lasts longer than it may: `--stall.after`, and longer than any wait of this process before, while another
  process goes on; where none does, `--stall.factor` times the longest wait of all of them, or `--stall.after` as
  often as that until they have made a few.

Ranks that all become slower at once are told of at most until the first wait returns: it is their longest then.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.hardware import ALL_LINKS, NvlinkFacts
from railscope.agent.facts.host_calls import DRIVER_CALL_NAMES
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import DriverCallsOfProcess
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.node.completion.driver_calls import DriverReading
from railscope.agent.node.stalls.detector import Changes, StallLimits
from railscope.agent.node.stalls.evidence import RankFacts
from railscope.agent.node.stalls.sources import Known
from railscope.agent.node.stalls.told_calls import PAUSE_NS, CallKey, CallNumbers, ToldCalls, oldest_calls
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.records.driver_calls import DriverKind

_FEW_CALLS: Final = 20
"""Before a job has made so many calls the longest of them says nothing."""
_UNUSED_NS: Final = 60_000_000_000
"""What a thread left that has made no call for so long is taken out."""
_MOST_TAKEN_OUT: Final = 256
"""In one look."""
_SAMPLES: Final = 32
"""Of launch counts, a quarter of `--stall.after` apart: four minutes."""
_FEW_SAMPLES: Final = 3
_WATCHED_NS: Final = 3_000_000_000
"""What processes of its job do is watched for so long before a wait is told of."""
_STILL_NS: Final = 5_000_000_000
"""NVLinks that carried nothing for so long are still: their counters may change but now and then."""
_MOST_ASKED: Final = 16
"""Processes of one job about which it is asked whether they are stopped."""


class DriverCallTables(Protocol):
    """What is needed of the watch on the driver (agent/node/completion/driver_calls.py)."""

    @property
    def follows(self) -> bool: ...
    def read(self) -> DriverReading: ...
    def drop(self, threads: Iterable[tuple[int, int]]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Counts:
    """What one process did, since it was followed."""

    launches: int
    calls: int
    last_return_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True)
class _Sample:
    time_ns: int
    launches: Mapping[int, int]
    """By pid."""


class _Job:
    """Processes of this host that belong together.  What is asked of all of them is found once."""

    def __init__(
        self, pids: Sequence[int], counts: Mapping[int, _Counts], ranks_of: Mapping[int, Sequence[RankFacts]]
    ) -> None:
        self.pids = tuple(pids)
        self.counts = {pid: counts[pid] for pid in pids}
        few = any(one.calls < _FEW_CALLS for one in self.counts.values())
        self.longest_ns = None if few else max(one.longest_ns for one in self.counts.values())
        """The longest wait of all; None: they made too few calls."""
        self._latest = sorted(self.pids, key=lambda pid: -self.counts[pid].last_return_ns)[:2]
        self._ranks_of = ranks_of
        self._sharing = Counter(comm for pid in pids for comm in {rank.comm for rank in ranks_of.get(pid, ())})
        self.excused: bool | None = None
        """Whether one of them does work that comes to an end; None: nobody asked yet."""
        self.behind: dict[int, int] | None = None
        """By pid: graphs fewer than the foremost; None: nobody asked yet."""

    def another_goes_on(self, pid: int, since_ns: int) -> int | None:
        """One of the others of which a call returned since then; None: there is none."""
        latest = next(one for one in self._latest if one != pid)
        return latest if self.counts[latest].last_return_ns > since_ns else None

    def rank_of(self, pid: int) -> RankFacts | None:
        """The rank under which a process is told of: in the largest of the communicators that its job shares here."""
        own = [rank for rank in self._ranks_of.get(pid, ()) if rank.comm != UNKNOWN and rank.rank is not None]
        return max(own, key=lambda rank: (self._sharing[rank.comm] > 1, rank.nranks or 0, rank.comm), default=None)

    def rank_in(self, comm: str, pid: int) -> int | None:
        """The rank of a process in a communicator; None: not known."""
        return next((rank.rank for rank in self._ranks_of.get(pid, ()) if rank.comm == comm != UNKNOWN), None)


class _Carried:
    """What the NVLinks of each GPU carried, while a process waits for too long."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._since_ns: dict[str, int] = {}
        """Since when that is so."""

    def add(self, now_ns: int, links: Iterable[NvlinkFacts]) -> None:
        """Add a reading of all links."""
        sums: dict[str, dict[str, int]] = {}
        for one in links:
            if one.transmit_bytes is not None and one.receive_bytes is not None:
                sums.setdefault(one.gpu, {})[one.link] = one.transmit_bytes + one.receive_bytes
        # Where a GPU counts for all links together, single ones are part of that.
        carried = {gpu: of.get(ALL_LINKS, sum(of.values())) for gpu, of in sums.items()}
        self._since_ns = {
            gpu: self._since_ns[gpu] if self._bytes.get(gpu) == count else now_ns for gpu, count in carried.items()
        }
        self._bytes = carried

    def signs(self, now_ns: int, gpu: str) -> list[str]:
        """What is known of a GPU, as sentences."""
        since_ns = self._since_ns.get(gpu)
        return [f"NVLinks of its GPU {gpu} carry nothing"] if since_ns and now_ns - since_ns >= _STILL_NS else []

    def clear(self) -> None:
        """The wait is over."""
        self._bytes.clear()
        self._since_ns.clear()


@dataclass(frozen=True, slots=True)
class _Wait:
    """A call that lasts too long."""

    tid: int
    since_ns: int
    pid: int
    call: str
    rank: RankFacts | None
    """Under which its process is told of; None: not known."""


class UnseenWork:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        tables: DriverCallTables,
        known: Known,
        procfs: Path,
        realtime_offset_ns: Callable[[], int],
        ranks_of: Callable[[], Mapping[int, Sequence[RankFacts]]],
        stalled: Callable[[], Collection[int]],
        held: Callable[[int, int | None], Diagnosis | None],
        *,
        excused: Callable[[int], bool],
        numbers: CallNumbers,
        nvlinks: Callable[[], Iterable[NvlinkFacts]] = tuple,
    ) -> None:
        """
        Args:
            tables: the kernel's tables.
            known: what the rest of the agent knows.
            procfs: where threads are looked for.
            realtime_offset_ns: the time of day less CLOCK_MONOTONIC.
            ranks_of: ranks by process, as of the last evaluation.
            stalled: processes that are told of for another reason.
            held: that a process is stopped, traced or frozen, by its pid and rank.
            excused: that a process does work that comes to an end, by its pid; it is asked again and again.
            numbers: the instances of the calls that are told of.
            nvlinks: those of this host, as they were last read; never waits.
        """
        self._tables = tables
        self._known = known
        self._procfs = procfs
        self._realtime_offset_ns = realtime_offset_ns
        self._ranks_of = ranks_of
        self._stalled = stalled
        self._held = held
        self._excused = excused
        self._excused_ns: dict[int, int] = {}
        """By the first process of a job: when one of it did such work last."""
        self._numbers = numbers
        self._looked_ns: int | None = None
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._oldest: dict[int, tuple[DriverKind, int]] = {}
        """By pid: the oldest call that a thread is in, and since when."""
        self._counts: dict[int, _Counts] = {}
        self._nvlinks = nvlinks
        self._carried = _Carried()
        self._stalls: dict[CallKey, Stall] = {}
        self._told = ToldCalls()
        self.pop_forgotten = self._told.pop_forgotten

    @property
    def current(self) -> tuple[Stall, ...]:
        """Waits that are told of."""
        return self._told.current

    @property
    def under_way(self) -> bool:
        """Whether a thread was inside a call at the last look."""
        return bool(self._oldest)

    def processes(self, now_ns: int) -> tuple[DriverCallsOfProcess, ...]:
        """What each process did, as of the last look."""
        return tuple(
            DriverCallsOfProcess(
                pid,
                counts.launches,
                DRIVER_CALL_NAMES[inside[0]] if (inside := self._oldest.get(pid)) is not None else "",
                max(0, now_ns - inside[1]) / 1e9 if inside is not None else 0.0,
            )
            for pid, counts in self._counts.items()
        )

    def update(self, now_ns: int, limits: StallLimits) -> Changes:
        """Look at the calls, once a second at most.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        if self._looked_ns is not None and now_ns - self._looked_ns < PAUSE_NS:
            return Changes((), ())
        self._looked_ns = now_ns
        if not self._tables.follows:
            self._counts.clear()
            self._oldest.clear()
            self._samples.clear()
            return self._tell(now_ns, {})
        reading = self._tables.read()
        self._counts = _counts_of(reading)
        tids, threads = reading.tids, reading.threads
        self._take_out_unused(now_ns, tids, threads)
        inside = threads["start_ns"] > 0
        self._oldest = _oldest_by_process(threads[inside])
        watched_ns = max(0, limits.after_ns - _WATCHED_NS)
        late = inside & (threads["start_ns"] + np.uint64(watched_ns) <= now_ns)
        found: dict[CallKey, Stall] = {}
        if late.any():
            self._carried.add(now_ns, self._nvlinks())
            found = self._find_stuck(now_ns, limits, *oldest_calls(tids[late], threads[late]))
        else:
            self._carried.clear()
        self._sample(now_ns, limits.after_ns // 4)
        return self._tell(now_ns, found)

    def _tell(self, now_ns: int, found: dict[CallKey, Stall]) -> Changes:
        self._stalls = found
        return self._told.tell(now_ns, found)

    def _take_out_unused(self, now_ns: int, tids: Records, threads: Records) -> None:
        unused = (threads["start_ns"] == 0) & (threads["last_ns"] + np.uint64(_UNUSED_NS) <= now_ns)
        if unused.any():
            some = np.flatnonzero(unused)[:_MOST_TAKEN_OUT]
            self._tables.drop(zip(tids[some].tolist(), threads["last_ns"][some].tolist(), strict=True))

    def _sample(self, now_ns: int, pause_ns: int) -> None:
        """Launch counts now and then: whether ranks launch alike shows before one of them is stuck."""
        if not self._samples or now_ns - self._samples[-1].time_ns >= pause_ns:
            self._samples.append(_Sample(now_ns, {pid: counts.launches for pid, counts in self._counts.items()}))

    def _find_stuck(self, now_ns: int, limits: StallLimits, tids: Records, threads: Records) -> dict[CallKey, Stall]:
        """Of each process the oldest wait that lasts too long."""
        ranks_of, stalled = self._ranks_of(), self._stalled()
        jobs = _jobs_of(self._counts, ranks_of, self._known)
        found: dict[CallKey, Stall] = {}
        told: set[int] = set()
        gone = []
        order = np.argsort(threads["start_ns"], kind="stable")
        for tid, thread in zip(tids[order].tolist(), threads[order], strict=True):
            pid, since_ns = int(thread["tgid"]), int(thread["start_ns"])
            if not (self._procfs / str(pid) / "task" / str(tid)).exists():
                gone.append((tid, int(thread["last_ns"])))
                continue
            job, ranks = jobs.get(pid), ranks_of.get(pid, ())
            if job is None or pid in told or pid in stalled or any(rank.in_flight is not None for rank in ranks):
                continue
            if job.excused is None:
                job.excused = self._is_excused(now_ns, limits, job)
            going_on = job.another_goes_on(pid, since_ns + limits.after_ns // 2)
            limit_ns = _limit_ns(limits, job, pid, others_go_on=going_on is not None)
            if not job.excused and now_ns - since_ns >= limit_ns:
                told.add(pid)
                # The first is the oldest: from then on counts say nothing of how it was before.
                if job.behind is None:
                    job.behind = self._behind(job, since_ns)
                wait = _Wait(tid, since_ns, pid, DRIVER_CALL_NAMES[DriverKind(int(thread["kind"]))], job.rank_of(pid))
                found[tid, since_ns] = self._describe(now_ns, wait, job, going_on)
        if gone:
            self._tables.drop(gone)
        return found

    def _is_excused(self, now_ns: int, limits: StallLimits, job: _Job) -> bool:
        """Whether a process of a job does work that comes to an end, or did of late: who writes pauses now and then."""
        self._excused_ns = {pid: at for pid, at in self._excused_ns.items() if now_ns - at < limits.after_ns}
        # All are asked: what a process does shows from one look to the next.
        working = [pid for pid in job.pids[:_MOST_ASKED] if self._excused(pid)]
        if working:
            self._excused_ns[job.pids[0]] = now_ns
        return job.pids[0] in self._excused_ns

    def _describe(self, now_ns: int, wait: _Wait, job: _Job, going_on: int | None) -> Stall:
        diagnosis = self._diagnose(now_ns, wait, job, going_on)
        before = self._stalls.get((wait.tid, wait.since_ns))
        if before is not None:
            return replace(before, diagnosis=diagnosis)
        rank = wait.rank
        return Stall(
            instance=self._numbers.take(),
            comm=rank.comm if rank is not None else UNKNOWN,
            rank=rank.name if rank is not None else UNKNOWN,
            nranks=UNKNOWN if rank is None or rank.nranks is None else str(rank.nranks),
            pid=wait.pid,
            op=wait.call,
            payload_bytes=None,
            since_ns=wait.since_ns,
            flagged_ns=now_ns,
            realtime_offset_ns=self._realtime_offset_ns(),
            flight_strength="weak",
            diagnosis=diagnosis,
            owner=self._known.owner(wait.pid),
        )

    def _diagnose(self, now_ns: int, wait: _Wait, job: _Job, going_on: int | None) -> Diagnosis:
        comm = wait.rank.comm if wait.rank is not None else UNKNOWN

        def name(pid: int) -> str:
            rank = job.rank_in(comm, pid)
            return f"process {pid}" if rank is None else f"rank {rank} (process {pid})"

        evidence = [f"thread {wait.tid} has not returned from {wait.call}"]
        # That a process may not run is seen itself: it explains why the others wait.
        for pid in (wait.pid, *job.pids[:_MOST_ASKED]):
            held = self._held(pid, job.rank_in(comm, pid))
            if held is not None:
                return replace(held, evidence=(*held.evidence, *evidence))
        if going_on is not None:
            evidence.append(f"{name(going_on)} goes on: its calls return")
        else:
            many = len(job.pids)
            which = f"any of the {many} processes" if many != 1 else "the only process"
            evidence.append(f"no call returns in {which} of its job on this host")
        communicator = self._known.communicator(wait.rank.instance) if wait.rank is not None else None
        if communicator is not None:
            evidence += self._carried.signs(now_ns, communicator.gpu)
        behind = job.behind
        if not behind:
            return Diagnosis(Cause.UNSEEN_WORK_STUCK, tuple(evidence), culprit=False)
        last, fewer = min(behind.items(), key=lambda one: (-one[1], one[0]))
        graphs = f"{format_count(fewer, 'graph')} fewer"
        evidence.insert(1, f"{name(last)} launched {graphs} than another process, and as many as the others before")
        blamed = job.rank_in(comm, last) if len(behind) == 1 else None
        return Diagnosis(Cause.UNSEEN_WORK_STUCK, tuple(evidence), culprit=blamed is not None, blamed_rank=blamed)

    def _behind(self, job: _Job, since_ns: int) -> dict[int, int]:
        """By pid: how many graphs fewer than the foremost they launched; empty: as many, or they never did alike.

        That they do alike shows before the wait: most of the time the counts of two processes were equally far apart,
        while both grew.
        """
        first = job.pids[0]
        apart: defaultdict[int, Counter[int]] = defaultdict(Counter)
        samples, before = 0, -1
        for sample in self._samples:
            if sample.time_ns >= since_ns or any(pid not in sample.launches for pid in job.pids):
                continue
            if sample.launches[first] == before:
                continue
            before, samples = sample.launches[first], samples + 1
            for pid in job.pids:
                apart[pid][sample.launches[pid] - before] += 1
        if samples < _FEW_SAMPLES:
            return {}
        place: dict[int, int] = {}
        for pid in job.pids:
            ((usual, times),) = apart[pid].most_common(1)
            if 2 * times <= samples:
                return {}
            place[pid] = job.counts[pid].launches - usual
        foremost = max(place.values())
        return {pid: foremost - at for pid, at in place.items() if at < foremost}


def _limit_ns(limits: StallLimits, job: _Job, pid: int, *, others_go_on: bool) -> float:
    if others_go_on:
        return max(limits.after_ns, job.counts[pid].longest_ns)
    longest_ns = job.longest_ns
    return max(limits.after_ns, limits.factor * (limits.after_ns if longest_ns is None else longest_ns))


def _counts_of(reading: DriverReading) -> dict[int, _Counts]:
    processes = reading.processes
    calls = processes["launched"] + processes["waited"]
    rows = zip(
        reading.pids.tolist(),
        processes["launches"].tolist(),
        calls.tolist(),
        processes["last_return_ns"].tolist(),
        processes["longest_ns"].tolist(),
        strict=True,
    )
    return {pid: _Counts(*row) for pid, *row in rows}


def _oldest_by_process(threads: Records) -> dict[int, tuple[DriverKind, int]]:
    order = np.argsort(threads["start_ns"], kind="stable")[::-1]
    rows = zip(
        *(threads[name][order].tolist() for name in ("tgid", "kind", "start_ns")),
        strict=True,
    )
    return {tgid: (DriverKind(kind), start_ns) for tgid, kind, start_ns in rows}


def _jobs_of(
    counts: Mapping[int, _Counts], ranks_of: Mapping[int, Sequence[RankFacts]], known: Known
) -> dict[int, _Job]:
    """By pid: processes that are followed and share a communicator or a job; none of those that are alone."""
    first: dict[object, int] = {}
    """By what they share: who had it first."""
    leads: dict[int, int] = {pid: pid for pid in counts}

    def leader(pid: int) -> int:
        while leads[pid] != pid:
            leads[pid] = leads[leads[pid]]
            pid = leads[pid]
        return pid

    for pid in counts:
        process = known.process(pid)
        if process is None or process.ended_ns is not None:
            continue
        # A name of a communicator or a job is what a user's processes say: it joins that user's alone.
        shared: list[object] = [("comm", process.tenant.uid, rank.comm) for rank in ranks_of.get(pid, ())]
        shared = [one for one in shared if one != ("comm", process.tenant.uid, UNKNOWN)]
        if process.job.job:
            shared.append(("job", process.tenant.uid, process.job.job))
        for one in shared:
            other = leader(first.setdefault(one, pid))
            own = leader(pid)
            leads[max(own, other)] = min(own, other)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for pid in sorted(counts):
        members[leader(pid)].append(pid)
    jobs = [_Job(pids, counts, ranks_of) for pids in members.values() if len(pids) > 1]
    return {pid: job for job in jobs for pid in job.pids}
