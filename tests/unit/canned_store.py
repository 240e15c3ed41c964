"""A store that answers what a test told it, and hosts, ranks and stalls to tell it of.  All of it is made up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from railscope.agent.cluster.fleet.facts import Fleet, Rank
from railscope.agent.cluster.fleet.prometheus import NoAnswerError, Sample, Series
from railscope.agent.cluster.fleet.reader import read_fleet

NOW = 1_000_000.0
COMM = "00000000000000aa"
HEARD = (
    "last_over_time(railscope_snapshot_timestamp_seconds)-last_over_time("
    "(railscope_snapshot_timestamp_seconds-timestamp(railscope_snapshot_timestamp_seconds)))"
    "orlast_over_time(railscope_snapshot_timestamp_seconds)"
)
"""When a host was heard for the last time, by the store's clock."""

Labels = dict[str, str]


def bare(expression: str) -> str:
    """An expression without matchers, ranges and spaces."""
    return re.sub(r"\{[^}]*\}|\[[^\]]*\]|\s", "", expression)


@dataclass
class CannedStore:
    """Answers by the metric a question is about, and by the function around it; all other answers are empty."""

    canned: dict[str, list[Sample]] = field(default_factory=dict)
    history: list[Series] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    evaluated: dict[str, list[Series]] = field(default_factory=dict)
    """What expressions were at equal steps, by the expression as with `say`."""
    unanswered: Callable[[str], bool] = lambda _: False
    """Of which questions no answer comes, by the question as it is asked."""

    def _ask(self, expression: str) -> None:
        self.asked.append(expression)
        if self.unanswered(expression):
            raise NoAnswerError("the store did not answer within 10 s")

    def say(self, expression: str, value: float, **labels: str) -> CannedStore:
        """`expression` as asked, without matchers, ranges and spaces: `max_over_time(x)`."""
        self.canned.setdefault(expression, []).append(Sample(labels, value))
        return self

    def query(self, expression: str, at: float | None = None) -> tuple[Sample, ...]:
        self._ask(expression)
        assert at is None or at == NOW
        if expression == "time()":
            return (Sample({}, NOW),)
        return tuple(self.canned.get(bare(expression), ()))

    def scrapes(self, selector: str, seconds: float, at: float) -> tuple[Series, ...]:
        self._ask(selector)
        assert seconds > 0
        assert at == NOW
        metric = selector.partition("{")[0]
        return tuple(one for one in self.history if one.labels.get("__for__", metric) == metric)

    def evaluations(self, expression: str, seconds: float, step_seconds: float, at: float) -> tuple[Series, ...]:
        self._ask(expression)
        assert seconds >= step_seconds > 0
        assert at == NOW
        return tuple(self.evaluated.get(bare(expression), ()))

    def warnings(self) -> tuple[str, ...]:
        return ()


def agent(
    store: CannedStore,
    instance: str,
    *,
    scraped: float = NOW - 0.5,
    up: int | None = 1,
    stamps_span: float = 300,
    **labels: str,
) -> None:
    """A host with an agent that was last scraped then; `stamps_span`: its time stamps of five minutes, by its clock."""
    store.say("last_over_time(railscope_build_info)", 1, instance=instance, **labels)
    store.say(HEARD, scraped, instance=instance)
    store.say("count_over_time(railscope_snapshot_timestamp_seconds)", 301, instance=instance)
    span = "max_over_time(railscope_snapshot_timestamp_seconds)-min_over_time(railscope_snapshot_timestamp_seconds)"
    store.say(span, stamps_span, instance=instance)
    if up is not None:
        found = "upandon(job)groupby(job)(last_over_time(railscope_build_info))"
        store.say(found, up, instance=instance, **labels)
    if up != 0:
        store.say("railscope_snapshot_timestamp_seconds", scraped - 0.1, instance=instance)
        store.say("timestamp(railscope_snapshot_timestamp_seconds)", scraped, instance=instance)


def rank(store: CannedStore, instance: str, number: int, *, enqueued: float | None = 10, **info: str) -> None:
    labels: Labels = {"instance": instance, "comm": COMM, "rank": str(number)}
    known = {"nranks": "2", "pid": str(100 + number), "gpu": "0"} | info
    store.say("last_over_time(railscope_comm_info)", 1, **labels, **known)
    if enqueued is not None:
        store.say("railscope_comm_enqueued_total", enqueued, **labels)
        store.say("railscope_comm_counted_from_start", 1, **labels)


def stalled(store: CannedStore, instance: str, number: int, cause: str, *, op: str = "AllReduce", **more: str) -> None:
    labels = {"instance": instance, "comm": COMM, "rank": str(number), "cause": cause}
    store.say("railscope_comm_stalled==1", 1, op=op, **labels)
    if more:
        store.say("railscope_comm_stall_info==1", 1, **labels, **more)


def read(store: CannedStore, comm: str | None = None) -> Fleet:
    return read_fleet(store, window_seconds=300, comm=comm)


def ranks_of(fleet: Fleet) -> dict[str, Rank]:
    return {one.rank: one for one in fleet.ranks}
