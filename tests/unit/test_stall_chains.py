"""Who is held up elsewhere, and by what in the end: what the search costs, and that it finds the end.

What is said of real shapes of jobs is in test_stall_several.
"""

from __future__ import annotations

from collections import Counter

from railscope.agent.facts.stall import InFlight
from railscope.agent.node.stalls.dependencies import Ranks, waiting_elsewhere
from railscope.agent.node.stalls.evidence import ProcessFacts, RankFacts

PROCESSES = 8
RUNS = ProcessFacts("running", 1_500_000_000, 0.0, 0.0, 0, 0)
STOPPED = ProcessFacts("stopped", 1_500_000_000, 0.0, 0.0, 0, 0)
FLIGHT = InFlight("AllReduce", None, 0, "weak", "bytes lie unread")


class Crossed:
    """Eight communicators of the same eight processes, and each process in the operation of another one."""

    def __init__(self, stopped: int | None = None) -> None:
        self.looked_at: Counter[str] = Counter()
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

    def asked(self) -> Ranks:
        return Ranks(self._of_comm, self._of_process, self._facts_of, lambda _: (), lambda _: False)

    def _of_comm(self, comm: str) -> list[RankFacts]:
        self.looked_at[comm] += 1
        return [one for one in self.ranks if one.comm == comm]

    def _of_process(self, pid: int) -> list[RankFacts]:
        return [one for one in self.ranks if one.pid == pid]

    def _facts_of(self, pid: int) -> ProcessFacts:
        return STOPPED if pid == self.stopped else RUNS


def test_ways_that_cross_are_looked_at_once_a_peer() -> None:
    crossed = Crossed()
    found = waiting_elsewhere([one for one in crossed.ranks if one.comm == "0" * 16 and one.rank], crossed.asked())
    assert {one.pid for one in found} == set(range(101, 108))
    assert {one.why for one in found} == {""}
    assert max(crossed.looked_at.values()) <= PROCESSES - 1


def test_the_end_of_a_chain_is_found_where_ways_cross() -> None:
    crossed = Crossed(stopped=107)
    found = waiting_elsewhere([one for one in crossed.ranks if one.comm == "0" * 16 and one.rank], crossed.asked())
    assert {one.pid for one in found} == set(range(101, 107))
    assert all("process 107 of its rank 7 is stopped" in one.why for one in found)
