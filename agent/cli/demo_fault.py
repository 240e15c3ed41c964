"""What the demo breaks on purpose, and what the agent says of it.

A rank that is stopped, a rail without a link, a rail that is slow: the same faults that tests/faults holds the agent
to.  The words are those of /stalls and of the table of causes (agent/facts/causes.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from railscope.agent.facts.causes import About, Cause, Where, facts_of, tier_of
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.facts.stall import Stall, rail_name
from railscope.exporters.top.words import format_amount, format_length
from railscope.testbed.faults import Fault, LinkDown, SlowRail, Stopped
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job

_log = logging.getLogger("railscope.demo")

_SLOW_MBIT: Final = 50
_SLOW_RATIO: Final = 0.1


@contextmanager
def stalls_untold() -> Iterator[None]:
    """Keep the daemon from logging stalls: the demo tells of them itself, while it does not kill the ranks."""
    logger = logging.getLogger("railscope.stalls")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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
                who = f"communicator {stall.comm} rank {stall.rank}"
                who = f"process {stall.pid}" if stall.comm == UNKNOWN else who
                whom = f" to {stall.peer or 'an unknown peer'}" if stall.library else ""
                _log.warning("%s stalls in %s%s: %s", who, stall.op, whom, why)


class FaultKind(StrEnum):
    """What the demo can break."""

    STALL = "stall"
    RAIL_DOWN = "rail-down"
    SLOW_RAIL = "slow-rail"


_CAUSES: Final = {
    FaultKind.STALL: Cause.PROCESS_STOPPED,
    FaultKind.RAIL_DOWN: Cause.RAIL_DOWN,
    FaultKind.SLOW_RAIL: Cause.RAIL_SLOW,
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of one job, not yet made."""

    kind: FaultKind
    fault: Fault
    words: str
    """What is broken, and by which command."""
    past: str
    """The same of some time ago: takes `ago`, such as `8 s ago`."""
    cause: Cause
    """What the agent has to call it."""
    pid: int | None = None
    """The process that has to be blamed."""
    peer: str = ""
    """Of a transfer: the other end that has to be named; empty: it is the job that is broken."""
    device: str = ""
    netns: str = ""
    """The rail that has to be blamed."""

    def is_named_by(self, stall: Stall) -> bool:
        """Whether this stall is put down to this fault, at its place."""
        found = stall.diagnosis
        if found.cause != self.cause:
            return False
        if self.peer:
            return (stall.peer, found.blamed_pid) == (self.peer, self.pid)
        if self.pid is not None:
            return stall.pid == self.pid
        return (found.device, found.netns) == (self.device, self.netns)


def slow_mbit(before_mbit: float) -> int:
    """To what a rail is shaped, in Mbit/s, that carried so much before.

    To a part of it: a job that sends less than what a shaper lets through, as with small messages or on a busy machine,
    would not notice.
    """
    return max(1, min(_SLOW_MBIT, round(before_mbit * _SLOW_RATIO)))


def plan_fault(
    kind: FaultKind, fabric: Fabric, job: Job, rank: int, carried: Mapping[tuple[str, str], float]
) -> PlannedFault:
    """The fault at a rank, or at the second rail of its host.

    `carried`: bytes per second of each rail so far, by namespace and device.
    """
    host = fabric.hosts[rank // job.options.ranks_per_host]
    index, rail = host.index, len(host.rails) - 1
    device, where = host.rails[rail], f"{host.rails[rail]} of host{host.index}"
    if kind is FaultKind.STALL:
        pid = job.pids[rank]
        return plan_stop(f"rank {rank} (pid {pid}, on host{index})", pid)
    if kind is FaultKind.RAIL_DOWN:
        words = f"{where} loses its link: ip -n {host.namespace} link set {device} down"
        past = f"{where} lost its link {{ago}}, by ip -n {host.namespace} link set {device} down"
        fault: Fault = LinkDown(fabric, index, rail)
    else:
        before_mbit = carried.get((host.namespace, device), 0.0) * 8 / 1e6
        rate_mbit = slow_mbit(before_mbit)
        words = (
            f"{where} sends no more than {rate_mbit} Mbit/s from now on, and sent {before_mbit:,.0f} before: a "
            "queueing discipline (tc-tbf)"
        )
        past = f"{words.replace(' from now on', '')}; that began {{ago}}"
        fault = SlowRail(fabric, index, rail, rate_mbit=rate_mbit)
    return PlannedFault(kind, fault, words, past, _CAUSES[kind], device=device, netns=host.namespace)


def plan_stop(who: str, pid: int, peer: str = "") -> PlannedFault:
    """A process is stopped; `peer` is its name where others send to it."""
    kind = FaultKind.STALL
    words, past = f"{who} is stopped: kill -STOP {pid}", f"{who} was stopped {{ago}} by kill -STOP {pid}"
    return PlannedFault(kind, Stopped(pid), words, past, _CAUSES[kind], pid=pid, peer=peer)


def describe_process(pid: int) -> str:
    """What has become of a process that was stopped, by its state in proc_pid_stat(5)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "has ended"
    if state in (b"Z", b"X"):
        return "has ended"
    return "is still stopped" if state in (b"T", b"t") else "runs again"


def stalls_of(snapshot: Snapshot, pids: Collection[int]) -> tuple[Stall, ...]:
    """The stalls of these processes that go on, those first whose culprit is known, by the best evidence, and which end
    of a rail it is."""
    mine = [stall for stall in snapshot.stalls.current if stall.pid in pids]

    def place(stall: Stall) -> tuple[bool, int, bool, str]:
        found = stall.diagnosis
        return not found.culprit, tier_of(found.cause), found.either_end, stall.rank

    return tuple(sorted(mine, key=place))


def verdict_lines(stalls: Sequence[Stall], now_ns: int) -> Iterator[str]:
    """What the agent says of stalls, as `/stalls` has it; `now_ns` is CLOCK_MONOTONIC."""
    for stall in stalls:
        found = stall.diagnosis
        size = "" if stall.payload_bytes is None else f" of {format_amount(stall.payload_bytes, 'B')}"
        length = format_length(stall.length_ns(now_ns) / 1e9)
        size += f" to {stall.peer or 'an unknown peer'}" if stall.library else ""
        yield f"  {_who(stall)}: stalled in {stall.op}{size} for {length}"
        blamed = "" if found.blamed_rank is None else f", blames rank {found.blamed_rank}"
        if found.blamed_pid is not None:
            blamed = f", blames process {found.blamed_pid}"
        if found.device:
            end = " or its other end" if found.either_end else ""
            blamed = f", blames {rail_name(found.rail, found.device, found.netns)}{end}"
        yield f"    cause {found.cause.value}{blamed}: {facts_of(found.cause).meaning}"
        for sentence in found.evidence:
            yield f"    evidence: {sentence}"


def _who(stall: Stall) -> str:
    if stall.comm == UNKNOWN:
        return f"process {stall.pid}"
    return f"communicator {stall.comm}, rank {stall.rank} (pid {stall.pid})"


def next_step_lines(stall: Stall) -> Iterator[str]:
    """What to run next, by the table of causes."""
    facts = facts_of(stall.diagnosis.cause)
    netns = stall.diagnosis.netns
    values = {
        "rank": stall.rank,
        "pid": str(stall.diagnosis.blamed_pid or stall.pid),
        "gpu": "GPU",
        "device": stall.diagnosis.device,
        "inside": f"ip netns exec {netns} " if netns else "",
    }
    if facts.about not in (About.RANK, About.RAIL):
        return
    for step in facts.now:
        if step.command and step.where is Where.HOST:
            yield f"  {step.command.format(**values)}   # {step.why.format(**values)}"
