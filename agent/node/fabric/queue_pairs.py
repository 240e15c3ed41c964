"""The queue pairs of this host's RDMA devices: who made them, how they are, and to which remote ones they lead.

Each reading makes the device look at every queue pair (probes/rdma/queue_pairs.py), so it is done seldom, and never for
more than a small share of the time.  The kernel names threads; processes are found through /proc.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.facts.hardware import BoundCounterFacts, NodeQueuePairs, QueuePairCount, QueuePairFacts
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.remarks import Remark
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant, tenant_of
from railscope.probes.clock import Clock
from railscope.probes.netdev.netlink import MalformedNetlink
from railscope.probes.rdma.netlink import RdmaNetlink
from railscope.probes.rdma.queue_pairs import QueuePair, QueuePairReading, process_of_thread, read_queue_pairs
from railscope.probes.shares import in_turns

_log = logging.getLogger("railscope.fabric")

COLLECTOR: Final = "qp"
PERIOD_NS: Final = 30_000_000_000
_SHARE: Final = 100
"""Queue pairs are read at most once in this many times the duration of a reading."""
_LONGEST_PAUSE_NS: Final = 600_000_000_000
_MOST_COUNTS: Final = 1024
"""Processes, devices and states that are told apart; what is beyond is told as one."""
MOST_QUEUE_PAIRS: Final = 65_536
"""That are told of: a job has some for each pair of ranks and rail, and whoever may open a device may make thousands.
Of more tenants take turns."""
_STATES: Final = {
    **dict.fromkeys(("RTR", "RTS", "SQD"), "connected"),  # one that only receives stays at RTR
    **dict.fromkeys(("ERR", "SQE"), "error"),
}
_NOT_CONNECTED: Final = "not_connected"
OTHERS: Final = "others"


@dataclass(frozen=True, slots=True)
class Kernel:
    """How the kernel is asked; replaced in tests."""

    read: Callable[[], QueuePairReading]
    process_of: Callable[[int], int | None]
    tenant_of: Callable[[int], Tenant] = lambda _pid: UNKNOWN_TENANT


def ask_kernel(procfs: Path) -> Kernel:
    """Over RDMA netlink, in the network namespace of the thread that reads."""

    def read() -> QueuePairReading:
        netlink = RdmaNetlink()
        try:
            return read_queue_pairs(netlink)
        finally:
            netlink.close()

    return Kernel(read, lambda thread: process_of_thread(procfs, thread), lambda pid: tenant_of(procfs, pid))


class QueuePairs:
    """Not thread-safe: one thread reads; `facts` is replaced as a whole."""

    def __init__(self, clock: Clock, kernel: Kernel) -> None:
        self._clock = clock
        self._kernel = kernel
        self._due_ns = 0
        self._failures = 0
        self._remark = Remark(_log, COLLECTOR, "are read again")
        self.facts = NodeQueuePairs()
        self.result: CollectorResult | None = None
        """None: not read yet, or this kernel tells nothing."""

    def update(self) -> None:
        """Read, if it is due."""
        before_ns = self._clock.monotonic_ns()
        if before_ns < self._due_ns:
            return
        error = ""
        told = True
        try:
            self.facts = self.read()
        except (OSError, MalformedNetlink) as refusal:
            told = not (isinstance(refusal, OSError) and refusal.errno in (errno.EPROTONOSUPPORT, errno.EPERM))
            error = (refusal.strerror if isinstance(refusal, OSError) else "") or str(refusal)
        now_ns = self._clock.monotonic_ns()
        self._failures = self._failures + 1 if error else 0
        pause_ns = min(PERIOD_NS << min(self._failures, 10), _LONGEST_PAUSE_NS)
        self._due_ns = now_ns + max(pause_ns, _SHARE * (now_ns - before_ns))
        self._remark.say(error if told else "")
        self.result = CollectorResult(COLLECTOR, not error, (now_ns - before_ns) / 1e9) if told else None

    def read(self) -> NodeQueuePairs:
        """Read now.

        Raises:
            OSError, MalformedNetlink: see `read_queue_pairs`.
        """
        reading = self._kernel.read()
        threads = {pair.thread for pair in reading.queue_pairs if pair.thread is not None}
        processes = {thread: self._kernel.process_of(thread) for thread in threads}
        pairs = [_pair(pair, processes.get(pair.thread) if pair.thread else None) for pair in reading.queue_pairs]
        left_out = max(0, len(pairs) - MOST_QUEUE_PAIRS)
        if left_out:
            pids = {pid for pid in processes.values() if pid is not None}
            tenants = {pid: self._kernel.tenant_of(pid) for pid in pids}
            pairs = in_turns(pairs, lambda pair: tenants.get(pair.pid) if pair.pid is not None else None)
            del pairs[MOST_QUEUE_PAIRS:]
        return NodeQueuePairs(
            read_ns=self._clock.monotonic_ns(),
            queue_pairs=tuple(pairs),
            counts=_counts(pairs, self._kernel.tenant_of),
            bound=tuple(
                BoundCounterFacts(one.device, one.port, one.number, one.queue_pairs, one.counters)
                for one in reading.bound
            ),
            left_out=left_out,
        )


def _pair(pair: QueuePair, process: int | None) -> QueuePairFacts:
    return QueuePairFacts(
        device=pair.device,
        port=pair.port,
        number=pair.number,
        remote_number=pair.remote_number,
        remote_address=pair.remote_address,
        kind=pair.kind,
        state=pair.state,
        pid=process,
        kernel_user=pair.kernel_user,
        services=pair.services,
    )


def _counts(pairs: Sequence[QueuePairFacts], tenant_of: Callable[[int], Tenant]) -> tuple[QueuePairCount, ...]:
    """Of processes; the kernel's own are none.

    Where there are too many, those with the fewest are told as one, of tenants that have many processes first.
    """
    found = Counter(
        (pair.device, UNKNOWN if pair.pid is None else str(pair.pid), _STATES.get(pair.state, _NOT_CONNECTED))
        for pair in pairs
        if not pair.kernel_user
    )
    ordered = found.most_common()
    if len(ordered) > _MOST_COUNTS:
        tenants = {pid: tenant_of(int(pid)) for pid in {pid for _device, pid, _state in found} if pid != UNKNOWN}
        ordered = in_turns(ordered, lambda one: tenants.get(one[0][1], UNKNOWN_TENANT))
    rest: Counter[tuple[str, str, str]] = Counter()
    for (device, _pid, state), count in ordered[_MOST_COUNTS:]:
        rest[device, OTHERS, state] += count
    return tuple(QueuePairCount(*key, count) for key, count in (*ordered[:_MOST_COUNTS], *rest.items()))
