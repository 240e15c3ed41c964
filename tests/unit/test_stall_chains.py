"""Who is held up elsewhere, and by what in the end: what the search costs, and that it finds the end.

What is said of real shapes of jobs is in test_stall_several.
"""

from __future__ import annotations

from collections import Counter

from railscope.agent.facts.stall import InFlight
from railscope.agent.node.stalls.dependencies import Dependencies, Ranks
from railscope.agent.node.stalls.evidence import Elsewhere, ProcessFacts, RankFacts

PROCESSES = 8
RUNS = ProcessFacts("running", 1_500_000_000, 0.0, 0.0, 0, 0)
STOPPED = ProcessFacts("stopped", 1_500_000_000, 0.0, 0.0, 0, 0)
FLIGHT = InFlight("AllReduce", None, 0, "weak", "bytes lie unread")


class Crossed:
    """Eight communicators of the same eight processes, and each process in the operation of another one."""

    def __init__(self, stopped: int | None = None) -> None:
        self.looked_at: Counter[int] = Counter()
        self.stopped = stopped
        self.ranks = [
            RankFacts(
                instance=PROCESSES * comm + process,
                comm=f"{comm:016x}",
                rank=process,
                nranks=PROCESSES,
                pid=100 + process,
                enqueued=100,
                completed=None,
                last_call_ns=5000,
                in_flight=FLIGHT if comm == process else None,
            )
            for comm in range(PROCESSES)
            for process in range(PROCESSES)
        ]

    def waiting_elsewhere(self) -> tuple[Elsewhere, ...]:
        """Of the first communicator, as all its ranks but the first one ask."""
        by_comm: dict[str, list[RankFacts]] = {}
        by_process: dict[int, list[RankFacts]] = {}
        for rank in self.ranks:
            by_comm.setdefault(rank.comm, []).append(rank)
            by_process.setdefault(rank.pid, []).append(rank)
        ranks = Ranks(by_comm, by_process, self._facts_of, lambda _: (), self._lost_a_peer)
        return Dependencies(ranks).waiting_elsewhere(by_comm["0" * 16][1:])

    def _lost_a_peer(self, pid: int) -> bool:
        self.looked_at[pid] += 1
        return False

    def _facts_of(self, pid: int) -> ProcessFacts:
        self.looked_at[pid] += 1
        return STOPPED if pid == self.stopped else RUNS


def test_a_process_is_looked_at_a_few_times_where_ways_cross() -> None:
    crossed = Crossed()
    found = crossed.waiting_elsewhere()
    assert {one.pid for one in found} == set(range(101, 108))
    assert {one.why for one in found} == {""}
    assert max(crossed.looked_at.values()) <= 2


def test_the_end_of_a_chain_is_found_where_ways_cross() -> None:
    crossed = Crossed(stopped=107)
    found = crossed.waiting_elsewhere()
    assert {one.pid for one in found} == set(range(101, 107))
    assert all("process 107 of its rank 7 is stopped" in one.why for one in found)
