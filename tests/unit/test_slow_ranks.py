"""Which ranks of a host the others wait for in most stretches of time.  Totals are made up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from railscope.agent.facts.snapshot import RankArrivals, RankPace, RankTimes
from railscope.agent.node.collectives.slow_ranks import STRETCH_NS, SlowRanks

COMM = "00000000000000aa"
OFFSET_NS = 1_750_000_000_000_000_000
STRETCH_SECONDS = STRETCH_NS / 1e9


@dataclass
class Host:
    """Ranks 0, 1 and 2 of one communicator, which make ten operations in a stretch."""

    seen: str
    now_ns: int = 0
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys("012", 0.0))
    last: dict[str, int] = field(default_factory=lambda: dict.fromkeys("012", 0))
    alone: dict[str, float] = field(default_factory=lambda: dict.fromkeys("012", 0.0))
    operations: int = 0

    def __post_init__(self) -> None:
        self.slow = SlowRanks(lambda: OFFSET_NS)
        self._tell()

    def run(self, late: str, seconds: float = 0.4, stretches: int = 1, operations: int = 10) -> Host:
        """This rank comes late to each operation; empty: none does."""
        for _ in range(stretches):
            self.now_ns += STRETCH_NS
            self.operations += operations
            for rank in self.spent:
                self.spent[rank] += operations * (0.001 if rank == late or not late else 0.001 + seconds)
            self.last[late or "0"] += operations  # somebody is last, be it by a moment
            self.alone[late or "0"] += operations * (seconds if late else 0.001)
            self._tell()
        return self

    def _tell(self) -> None:
        ranks = [(COMM, rank) for rank in self.spent]
        times = [RankTimes(*key, self.operations, self.spent[key[1]]) for key in ranks]
        # Of calls that are made ahead many are late at once.
        arrivals = [
            RankArrivals(*key, self.last[key[1]], 100 * self.alone[key[1]], self.alone[key[1]]) for key in ranks
        ]
        assert self.slow.is_due(self.now_ns)
        self.slow.update(self.now_ns, times if self.seen == "completions" else (), arrivals)

    @property
    def found(self) -> list[RankPace]:
        return list(self.slow.found)


@pytest.mark.parametrize("seen", ["completions", "calls"])
def test_a_rank_that_is_late_in_each_operation_is_slow_by_so_much_since_it_began(seen: str) -> None:
    host = Host(seen).run("", stretches=10).run("1", stretches=8)
    (found,) = host.found
    assert (found.comm, found.rank, found.seen) == (COMM, "1", seen)
    assert round(found.waited_seconds, 6) == 0.4
    assert round(found.waited_ratio, 6) == 0.8
    assert (found.slowness.waited, found.slowness.stretches, found.slowness.operations) == (8, 8, 80)
    assert found.slowness.since == OFFSET_NS / 1e9 + 10 * STRETCH_SECONDS
    assert not host.run("").run("").found, "it is as fast as the others again"


@pytest.mark.parametrize("seen", ["completions", "calls"])
@pytest.mark.parametrize(
    "course",
    [[("", 0.4)] * 12, [("1", 0.1)] * 12, [("1", 0.4), *[("", 0.4)] * 11], [("0", 0.4), ("1", 0.4), ("2", 0.4)] * 6],
    ids=["nobody is late", "a little late", "a warm-up step", "in turn"],
)
def test_who_is_late_now_and_then_or_a_little_is_not_slow(seen: str, course: list[tuple[str, float]]) -> None:
    host = Host(seen)
    for late, seconds in course:
        host.run(late, seconds)
        assert not host.found


def test_a_communicator_that_rests_or_is_forgotten_has_no_slow_rank() -> None:
    host = Host("calls").run("1", stretches=8)
    assert host.found
    host.run("", operations=0)
    host.run("", operations=0)
    host.run("", operations=0)
    assert not host.found
    host = Host("calls").run("1", stretches=8)
    host.slow.update(host.now_ns + STRETCH_NS, (), ())
    assert not host.found


def test_a_stretch_is_not_over_before_its_time() -> None:
    host = Host("calls")
    assert not host.slow.is_due(STRETCH_NS - 1)
    assert host.slow.is_due(STRETCH_NS)
