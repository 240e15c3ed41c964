"""Watches the fabric in two threads: who is at the other end of each cable, and which queue pairs there are.

What is found is published as immutable facts that anyone may take.  A device that does not answer for its queue pairs
delays nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from railscope.agent.facts.hardware import NodeFabric, NodeQueuePairs
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.fabric.neighbours import Neighbours
from railscope.agent.node.fabric.queue_pairs import QueuePairs

_TICK_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 1.0


class FabricWatch:
    """The daemon's thread tells what to watch and takes what was found; threads of this do all reading."""

    def __init__(self, neighbours: Neighbours | None, queue_pairs: QueuePairs | None) -> None:
        """None: these are not watched."""
        self._neighbours = neighbours
        self._queue_pairs = queue_pairs
        self._ports: tuple[tuple[str, str], ...] = ()
        self._has_rdma = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def set_ports(self, ports: tuple[tuple[str, str], ...], *, has_rdma: bool) -> None:
        """(rail, network device) in the agent's own network namespace, and whether there are RDMA devices."""
        self._ports, self._has_rdma = ports, has_rdma

    def start(self) -> None:
        works: list[tuple[str, Callable[[], None]]] = []
        if self._neighbours is not None:
            works.append(("lldp", self.update_neighbours))
        if self._queue_pairs is not None:
            works.append(("queue pairs", self.update_queue_pairs))
        for name, work in works:
            thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ask for the end; a thread that waits for a device is left behind."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        if self._neighbours is not None and not any(thread.is_alive() for thread in self._threads):
            self._neighbours.close()

    def update_neighbours(self) -> None:
        """Hear what came in."""
        if self._neighbours is not None:
            self._neighbours.update(self._ports)

    def update_queue_pairs(self) -> None:
        """Read queue pairs where they are due; a host without RDMA devices is not asked."""
        if self._queue_pairs is not None and self._has_rdma:
            self._queue_pairs.update()

    def facts(self) -> NodeFabric:
        """Everything, as it was last read."""
        return NodeFabric(
            self._neighbours.facts if self._neighbours is not None else (),
            self._queue_pairs.facts if self._queue_pairs is not None and self._has_rdma else NodeQueuePairs(),
        )

    def collectors(self) -> tuple[CollectorResult, ...]:
        """How reading goes; none of what this host has not."""
        results = [one.result for one in (self._neighbours, self._queue_pairs) if one is not None]
        return tuple(result for result in results if result is not None)

    def _run(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            work()
            self._stop.wait(_TICK_SECONDS)
