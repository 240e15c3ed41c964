"""Finds out which hosts a store scrapes, at which interval, and which of them it lost.

Staleness is taken seriously: a host whose last scrape is old counts as silent, and what it said before is history.  A
host is the `instance` label; it is shown by `node`, `nodename` or `hostname` where the scrape configuration adds one,
else without its port.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import RECENT_SECONDS, Agent
from railscope.agent.cluster.fleet.prometheus import PrometheusError, Sample
from railscope.agent.facts import catalogue

REMEMBERED: Final = "1h"
"""How far back a host, or a rank of a stalled communicator, is looked for that says nothing any more."""
MOST_POINTS: Final = 200_000
"""Of one metric's history, over all its series."""
_SPAN_SECONDS: Final = 300.0
"""Over which the time between two scrapes is taken."""
_STEP: Final = "15s"
"""A host that was heard for less before it fell silent may be one of which nobody knows for how long it is."""
SILENT: Final = "for how long silent hosts have been so"
_HOST_LABELS: Final = ("node", "nodename", "hostname")


@dataclass(frozen=True, slots=True)
class Scrapes:
    """The times at which each host was scraped."""

    at: float
    agents: tuple[Agent, ...]
    names: Mapping[str, str]
    """Shown name of a host, by instance."""
    fresh: frozenset[str]
    """Instances whose series are of now."""
    scraped: Mapping[str, float]
    """When, by the store's clock, by instance."""
    interval_seconds: float | None
    """The longest usual time between two scrapes of a host; None: not known."""

    @property
    def spacing_seconds(self) -> float:
        """Seconds from scrape to scrape; what is usual for Prometheus where it is not known."""
        return self.interval_seconds or 15.0

    def promql_range(self, scrapes: float) -> str:
        """So many scrapes as a duration of PromQL."""
        return f"{1000 * scrapes * self.spacing_seconds:.0f}ms"


def read_scrapes(ask: Asker) -> Scrapes:
    """Which agents the store scrapes or scraped, when it did so last, and how often it does.

    Raises:
        PrometheusError: the store does not answer, or has no series of railscope.
    """
    stamp = catalogue.SNAPSHOT_TIMESTAMP.name
    found = ask.query_all(
        ever=f"last_over_time({catalogue.BUILD_INFO}[{REMEMBERED}])",
        up=f"up and on (job) group by (job) (last_over_time({catalogue.BUILD_INFO}[{REMEMBERED}]))",
        stamp=stamp,
        scraped=f"timestamp({stamp})",
        scrapes=f"count_over_time({stamp}[5m])",
        span=f"max_over_time({stamp}[5m]) - min_over_time({stamp}[5m])",
        started=catalogue.AGENT_START_TIME.name,
        failing=f"{catalogue.COLLECTOR_SUCCESS} == 0",
    )
    if not found["ever"]:
        raise PrometheusError(
            "the store holds no series of railscope within the last hour: does it scrape the agents (port 9779)?"
        )
    stamps, scraped = _by_instance(found["stamp"]), _by_instance(found["scraped"])
    count, span = _by_instance(found["scrapes"]), _by_instance(found["span"])
    answered, started = _by_instance(found["up"]), _by_instance(found["started"])
    names = host_names([*found["ever"], *found["up"]])
    # The stamps are the host's own: where its clock was set meanwhile, they may be a day apart.
    intervals = {
        one: min(seconds, _SPAN_SECONDS) / (count[one] - 1)
        for one, seconds in span.items()
        if seconds > 0 and count.get(one, 0) > 1
    }
    mixed = _mixed(found["started"])
    failing: dict[str, list[str]] = defaultdict(list)
    for sample in found["failing"]:
        failing[sample.labels.get("instance", "")].append(sample.labels.get("collector", ""))
    ever = {sample.labels.get("instance", "") for sample in found["ever"]}
    fresh = frozenset(
        one
        for one in ever
        # Series of a failed scrape end at once; those that were pushed to the store stay for minutes.
        if one in scraped and answered.get(one, 1.0) and ask.at - scraped[one] <= max(10.0, 3 * intervals.get(one, 0.0))
    )
    # Targets of the same scrape job that never answered may be agents too: they are down as well.
    known = ever | {one for one, value in answered.items() if not value}
    last = _last_heard(ask, known - fresh)

    def agent(one: str) -> Agent:
        up = one in fresh
        return Agent(
            host=names[one],
            up=up,
            silent_seconds=None if up or one not in last else max(0.0, ask.at - last[one]),
            started=started.get(one),
            clock_offset_seconds=stamps[one] - scraped[one] if up and one in stamps else None,
            failing=tuple(sorted(failing[one])),
            mixed_by=mixed.get(one, ()),
            address=one,
        )

    return Scrapes(
        ask.at,
        tuple(agent(one) for one in sorted(known)),
        names,
        fresh,
        scraped,
        max((intervals[one] for one in fresh if one in intervals), default=None),
    )


def _last_heard(ask: Asker, silent: Collection[str]) -> dict[str, float]:
    """When hosts were heard for the last time that are silent, by the store's clock.

    It is the host's own time stamp less what its clock was off by when it was heard; of an agent that was silent again
    before it was asked by how much, as the host has it.
    """
    if not silent:
        return {}
    stamp = catalogue.SNAPSHOT_TIMESTAMP.where(match_any("instance", silent))
    question = (
        f"last_over_time({stamp}[{REMEMBERED}]) - "
        f"last_over_time(({stamp} - timestamp({stamp}))[{REMEMBERED}:{_STEP}]) "
        f"or last_over_time({stamp}[{REMEMBERED}])"
    )
    return _by_instance(ask.attempt(SILENT, lambda: ask(question)))


def _by_instance(samples: Iterable[Sample]) -> dict[str, float]:
    """One value a host; of replicas' the greatest."""
    found: dict[str, float] = {}
    for sample in samples:
        instance = sample.labels.get("instance", "")
        found[instance] = max(found.get(instance, sample.value), sample.value)
    return found


def _mixed(started: Iterable[Sample]) -> dict[str, tuple[str, ...]]:
    """Labels that differ between agents of one instance: two targets with the same start time are one agent."""
    by_instance: dict[str, list[Sample]] = defaultdict(list)
    for sample in started:
        by_instance[sample.labels.get("instance", "")].append(sample)
    found = {}
    for instance, samples in by_instance.items():
        if len({sample.value for sample in samples}) > 1:
            labels = {label for sample in samples for label in sample.labels.items()}
            times = Counter(name for name, _ in labels)
            found[instance] = tuple(sorted(name for name, count in times.items() if count > 1))
    return found


def host_names(samples: Iterable[Sample]) -> dict[str, str]:
    """What each instance is called; by its full name where a shorter one would not be unique."""
    short: dict[str, str] = {}
    for sample in samples:
        instance = sample.labels.get("instance", "")
        given = next((sample.labels[name] for name in _HOST_LABELS if sample.labels.get(name)), "")
        if given or instance not in short:
            short[instance] = given or re.sub(r":\d+$", "", instance) or "unknown"
    times = Counter(short.values())
    return {instance: name if times[name] == 1 else instance for instance, name in short.items()}


def rate_seconds_of(interval_seconds: float | None) -> float:
    """Over how long a rate is taken: a few scrapes, so that it follows a fault soon."""
    return max(5.0, round(4 * (interval_seconds or 15.0)))


def recent_seconds_of(interval_seconds: float | None) -> float:
    """How long ago a stall may have ended that still matters: two scrapes of every host at least."""
    return max(RECENT_SECONDS, 2 * (interval_seconds or 0.0))


def match_any(label: str, values: Iterable[str]) -> str:
    """A matcher of Prometheus for any of these values."""
    return f'{label}=~"{_quoted("|".join(re.escape(value) for value in sorted(values)))}"'


def match_prefix(label: str, text: str) -> str:
    """A matcher of Prometheus for all values that begin so."""
    return f'{label}=~"{_quoted(re.escape(text))}.*"'


def _quoted(expression: str) -> str:
    return expression.replace("\\", "\\\\").replace('"', '\\"')
