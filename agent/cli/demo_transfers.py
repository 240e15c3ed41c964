"""The demo's disaggregated inference: what NIXL moves beside the job, as its processes and as the agent count it.

The processes are those of testbed/transfers; the agent's counts are those of its snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from railscope.agent.cli.demo_fault import PlannedFault, plan_stop
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.snapshot import RailFacts, Snapshot
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.exporters.top.words import format_amount, format_length, format_percent
from railscope.testbed.hosts import Fabric
from railscope.testbed.transfers.inference import Inference, KvWrites

DISAGGREGATED: Final = "disaggregated"
"""The pattern: this inference, and beside it a job."""
JOB_PATTERN: Final = "inference"
"""What that job calls."""
_WRITE: Final = ("nixl", "Write")
_READY_SECONDS: Final = 60.0
_FINISH_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class PairTotals:
    """What the agent knows of the writes from one process to one other."""

    operations: int
    payload_bytes: int
    completed: int
    seconds: float


Pairs = Mapping[tuple[int, str], PairTotals]
"""By pid of who writes, and the other end."""


def pairs_of(snapshot: Snapshot, pids: Mapping[str, int]) -> Pairs:
    """What these processes have written so far."""
    wanted = set(pids.values())
    return {
        (one.pid, one.peer): PairTotals(one.operations, one.payload_bytes or 0, one.completed, one.seconds)
        for one in snapshot.transfers.by_peer
        if one.pid in wanted and (one.library, one.op) == _WRITE
    }


def seen_writes(snapshot: Snapshot, did: Sequence[KvWrites]) -> tuple[KvWrites, ...]:
    """The same pairs as the processes tell of, as the agent counted them."""
    known = pairs_of(snapshot, {one.prefill: one.pid for one in did})
    nothing = PairTotals(0, 0, 0, 0.0)
    counts = [known.get((one.pid, one.decode), nothing) for one in did]
    return tuple(
        KvWrites(one.prefill, one.pid, one.decode, count.operations, count.payload_bytes)
        for one, count in zip(did, counts, strict=True)
    )


def pair_lines(snapshot: Snapshot, pids: Mapping[str, int], before: Pairs, seconds: float) -> Iterator[str]:
    """What each pair moved since `before`, and how long what it has under way has taken."""
    names = {pid: name for name, pid in pids.items()}
    ages = {
        (one.pid, one.peer): one.oldest_seconds
        for one in snapshot.transfers.under_way
        if (one.library, one.op) == _WRITE
    }
    for (pid, peer), now in sorted(pairs_of(snapshot, pids).items()):
        then = before.get((pid, peer), PairTotals(0, 0, 0, 0.0))
        completed = now.completed - then.completed
        took = f", each {format_length((now.seconds - then.seconds) / completed)}" if completed else ""
        age = ages.get((pid, peer), 0.0)
        waits = f", one under way for {format_length(age)}" if age >= 1 else ""
        moved = format_amount((now.payload_bytes - then.payload_bytes) / seconds, "B/s")
        yield (
            f"  nixl {names[pid]} (pid {pid}) → {peer}: {(now.operations - then.operations) / seconds:,.0f} writes/s, "
            f"{moved}{took}{waits}"
        )


class InferenceBeside:
    """The inference that runs beside a job of the demo, where there is one."""

    def __init__(self, fabric: Fabric, snapshot: Callable[[], Snapshot]) -> None:
        """`snapshot` asks the agent what it knows."""
        self._fabric = fabric
        self._snapshot = snapshot
        self._running: Inference | None = None
        self._before: Pairs = {}
        self._shown_s = 0.0
        self.wrote: tuple[KvWrites, ...] = ()
        """As its processes told in the end."""
        self.seen: tuple[KvWrites, ...] = ()
        """As the agent counted it."""
        self.verified = True
        """What arrived was what was written."""

    @contextmanager
    def running(self, wanted: bool) -> Iterator[None]:
        """Its processes are there; where it is not `wanted`, nothing is.

        Raises:
            TestbedError: they cannot run here.
        """
        if not wanted:
            yield
            return
        with Inference(self._fabric.hosts) as inference:
            inference.await_ready(_READY_SECONDS)
            self._running = inference
            try:
                yield
            finally:
                self._running = None

    @property
    def pids(self) -> tuple[int, ...]:
        return self._running.pids if self._running is not None else ()

    @property
    def decodes(self) -> Mapping[str, int]:
        """Process ids of those that are written to."""
        if self._running is None:
            return {}
        return {name: self._running.processes[name] for name in self._running.decodes}

    def is_seen(self, snapshot: Snapshot) -> bool:
        """Whether the agent follows it, as far as its processes are observed."""
        if self._running is None:
            return True
        probed = {library for _, library, attached in snapshot.transfers.probed if attached}
        return {"nixl", "ucx"} <= probed

    def release(self) -> Iterator[str]:
        """Let it begin; yields who is who."""
        if self._running is not None:
            self._running.release()
            self._shown_s = time.monotonic()
            yield "beside it " + ", ".join(f"{name} (pid {pid})" for name, pid in self._running.processes.items())

    def live_lines(self, snapshot: Snapshot, namespaces: Collection[str]) -> Iterator[str]:
        """What it did since the last time, and whose the bytes of the rails are."""
        if self._running is None:
            return
        now_s = time.monotonic()
        yield from pair_lines(snapshot, self._running.processes, self._before, now_s - self._shown_s)
        self._before, self._shown_s = pairs_of(snapshot, self._running.processes), now_s
        lines = (owner_line(rail) for rail in snapshot.rails if rail.netns in namespaces)
        yield from (line for line in lines if line)

    def finish(self) -> Iterator[str]:
        """Let it end, hold the agent's counts against its own, and yield how they compare.

        Raises:
            TestbedError: it does not end in order.
        """
        if self._running is None:
            return
        self._running.stop(_FINISH_SECONDS)
        snapshot = self._snapshot()
        report = self._running.end(_FINISH_SECONDS)
        self.wrote, self.seen = report.writes, seen_writes(snapshot, report.writes)
        self.verified = report.verified
        same = "the same" if self.wrote == self.seen else "OTHERWISE"
        writes = sum(one.operations for one in self.wrote)
        yield f"  {format_count(writes, 'write')} of KV caches counted by those who made them; the agent saw {same}"

    def plan_stopped_decode(self) -> PlannedFault | None:
        """The last decode process is stopped, so that who writes to it waits; None: there is none."""
        if self._running is None:
            return None
        name, pid = list(self.decodes.items())[-1]
        where = f"host{self._running.host_of(name).index}"
        return plan_stop(f"{name} (pid {pid}, on {where}), to which KV caches are written,", pid, peer=name)


def owner_line(rail: RailFacts) -> str:
    """Whose the bytes are that a rail has sent, as one line; empty: that is not known."""
    if rail.ledger is None:
        return ""
    counts = {owner: rail.ledger.transmit.of_owner(owner) for owner in TrafficOwner}
    together = sum(counts.values())
    if not together:
        return ""
    parts = sorted(((count / together, owner.value) for owner, count in counts.items() if count), reverse=True)
    shown = ", ".join(f"{owner} {format_percent(part)}" for part, owner in parts if round(100 * part))
    return f"  {rail.netns.rsplit('-', 1)[-1]} {rail.device}: sent by {shown}"


def write_table(did: Sequence[KvWrites], seen: Sequence[KvWrites]) -> Iterator[str]:
    """Writes and payload by pair, beside each other, as lines of text; none without writes."""
    if not did:
        return
    yield ""
    yield (
        f"{'KV caches by NIXL':<28} {'writes (job)':>14} {'writes (agent)':>14} {'payload (job)':>16} "
        f"{'payload (agent)':>16}"
    )
    for own, observed in zip(did, seen, strict=True):
        pair = f"{own.prefill} → {own.decode}"
        yield (
            f"{pair:<28} {own.operations:>14,} {observed.operations:>14,} {own.payload_bytes:>16,} "
            f"{observed.payload_bytes:>16,}"
        )
