"""Calls of CUDA's driver as a test says they are: the kernel's tables are simulated."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from railscope.agent.node.completion.driver_calls import DriverReading
from railscope.probes.nccl.records.driver_calls import PROCESS, THREAD, DriverKind


class SimulatedDriverCalls:
    """What the programs would have written, by process and by thread."""

    def __init__(self) -> None:
        self.follows = True
        self.processes: dict[int, dict[str, int]] = {}
        self.threads: dict[int, dict[str, int]] = {}
        self.reads = 0

    def enter(self, now_ns: int, pid: int, tid: int, kind: DriverKind, *, uid: int = 0) -> None:
        """A thread goes into a call."""
        counts = self._counts(pid)
        counts["launches" if kind is DriverKind.GRAPH_LAUNCH else "waits"] += 1
        self.threads[tid] = {"start_ns": now_ns, "last_ns": now_ns, "tgid": pid, "uid": uid, "kind": int(kind)}

    def leave(self, now_ns: int, tid: int) -> None:
        """It returns."""
        thread = self.threads[tid]
        counts = self._counts(thread["tgid"])
        counts["launched" if thread["kind"] == DriverKind.GRAPH_LAUNCH else "waited"] += 1
        counts["longest_ns"] = max(counts["longest_ns"], now_ns - thread["start_ns"])
        counts["last_return_ns"] = now_ns
        thread.update(start_ns=0, last_ns=now_ns)

    def work(self, now_ns: int, pid: int, tid: int, *, steps: int = 1, took_ns: int = 1_000_000) -> None:
        """So many graphs were launched and waited for until now."""
        for _ in range(steps):
            for kind in (DriverKind.GRAPH_LAUNCH, DriverKind.STREAM_SYNC):
                self.enter(now_ns - took_ns, pid, tid, kind)
                self.leave(now_ns, tid)

    def _counts(self, pid: int) -> dict[str, int]:
        return self.processes.setdefault(pid, dict.fromkeys(PROCESS.names or (), 0))

    def read(self) -> DriverReading:
        self.reads += 1
        threads, processes = np.zeros(len(self.threads), THREAD), np.zeros(len(self.processes), PROCESS)
        for rows, values in ((self.threads.values(), threads), (self.processes.values(), processes)):
            for at, row in enumerate(rows):
                for name, value in row.items():
                    values[at][name] = value
        return DriverReading(
            np.array(list(self.threads), "<u4"), threads, np.array(list(self.processes), "<u4"), processes
        )

    def drop(self, threads: Iterable[tuple[int, int]]) -> None:
        for tid, last_ns in threads:
            if tid in self.threads and self.threads[tid]["last_ns"] == last_ns:
                del self.threads[tid]
