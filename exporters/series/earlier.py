"""What agents before this one counted, so that no total falls when an agent is replaced.

An agent counts from 0.  What the agents before it had shown by the time that they were last saved is added to each of
its counters and histograms, series by series:

* a total of the node is shown from the start, before this agent has counted anything of its kind;
* a total of a rail, link or collector is shown with the rail, link or collector;
* a total of a rank goes on where the rank's communicator is the same one, which communicator, rank and process tell;
  operations that were in flight when it was saved count as complete, because no agent saw their completion;
* a counter that begins with what a device counted is not added up: the device goes on counting while no agent runs.
  Only where the device now shows less than the earlier agent did, which had seen it begin anew, it goes on from there.

Values are kept as they are shown, before the series budget and before buckets are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeVar

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.series.buckets import full_histogram
from railscope.exporters.series.family import Family, LabelValues, Sample

OWN: Final = frozenset({catalogue.PROCESS_CPU.name, catalogue.AGENT_DARK_SECONDS.name})
"""Counters of this agent's process, or of all agents already: they are shown as they are."""
FROM_DEVICES: Final = frozenset(
    metric.name
    for metric in (
        catalogue.RAIL_TRANSMIT_BYTES,
        catalogue.RAIL_RECEIVE_BYTES,
        catalogue.RAIL_COUNTER,
        catalogue.RAIL_QUEUE_DROPS,
        catalogue.RAIL_QUEUE_OVERLIMITS,
        catalogue.RAIL_QUEUE_REQUEUES,
        catalogue.GPU_PCIE_TRANSMIT_BYTES,
        catalogue.GPU_PCIE_RECEIVE_BYTES,
        catalogue.NVLINK_TRANSMIT_BYTES,
        catalogue.NVLINK_RECEIVE_BYTES,
        catalogue.NVLINK_ERRORS,
        catalogue.GPU_NVLINK_TRANSMIT_BYTES,
        catalogue.GPU_NVLINK_RECEIVE_BYTES,
    )
)
"""Counters that begin with what the device counted."""


def is_continued(metric: Metric) -> bool:
    """Whether a metric is a total that goes on from one agent to the next."""
    return metric.kind != "gauge" and metric.name not in OWN


def is_of_rank(metric: Metric) -> bool:
    """Whether each series of a metric is one rank's, which its first two labels name."""
    return metric.labels[:2] == ("comm", "rank")


OF_NODE: Final = frozenset(
    metric.name
    for metric in catalogue.METRICS
    if is_continued(metric)
    and not is_of_rank(metric)
    and metric.name not in FROM_DEVICES
    and metric.labels[:1] not in (("rail",), ("gpu",), ("collector",))
)
"""Totals of the node: shown also while this agent has counted nothing of their kind."""
MOST_SERIES: Final = 20_000
"""Of one metric."""
_METRICS: Final = {metric.name: metric for metric in catalogue.METRICS}

Value = TypeVar("Value")

RankPids = Mapping[RankKey, int]
"""The process of each rank."""


@dataclass(slots=True)
class Totals:
    """Counters and histograms of one moment, by metric name and labels."""

    values: dict[str, dict[LabelValues, int | float]] = field(default_factory=dict)
    histograms: dict[str, dict[LabelValues, Histogram]] = field(default_factory=dict)
    """With all of their buckets, and without exemplars."""
    pids: dict[RankKey, int] = field(default_factory=dict)
    """Of the ranks that have values."""
    positions: dict[RankKey, int] = field(default_factory=dict)
    """Collectives that each of them has entered as far as agents know, counted or counted as missed."""


def rank_pids(snapshot: Snapshot) -> dict[RankKey, int]:
    """The pid of each rank in a snapshot, by which its series of an earlier agent are told from another rank's."""
    return {
        one.identity.key: one.identity.pid
        for one in snapshot.collectives.communicators
        if one.identity.pid and UNKNOWN not in one.identity.key
    }


class EarlierTotals:
    """Adds what earlier agents counted, and knows the sums.

    `add_to`, `add_to_histograms` and `record_shown` are for one thread at a time, as scrapes are made.
    """

    def __init__(self, saved: Totals | None = None) -> None:
        """`saved` None: there was no earlier agent."""
        base = saved or Totals()
        # No agent saw the completion of what was in flight then: it must not look as if it were in flight for ever.
        enqueued = base.values.get(catalogue.COMM_ENQUEUED.name, {})
        completed = base.values.get(catalogue.COMM_COMPLETED.name, {})
        for rank in completed:
            completed[rank] = max(completed[rank], enqueued.get(rank, 0))
        self._base: Final = base
        self._awaited = set(base.pids)
        """Ranks that an earlier agent knew, and this one has not met."""
        self._ranks: frozenset[RankKey] = frozenset()
        """Ranks whose totals are added, and the totals by metric."""
        self._of_ranks: dict[str, dict[LabelValues, int | float]] = {}
        self._offsets: dict[tuple[str, LabelValues], int | float] = {}
        """By counter of a device, once it was seen: what is added to it."""
        self._shown = Totals(
            {name: dict(series) for name, series in base.values.items()},
            {name: dict(series) for name, series in base.histograms.items()},
            dict(base.pids),
            dict(base.positions),
        )

    @property
    def totals(self) -> Totals:
        """What was last recorded, to be saved before anything else is recorded."""
        return self._shown

    def entered(self, rank: RankKey, pid: int) -> int:
        """Collectives of a rank that earlier agents counted, or counted as missed; 0: none, or another process's.

        Safe from any thread.
        """
        return self._base.positions.get(rank, 0) if self._base.pids.get(rank) == pid else 0

    def select_ranks(self, pids: RankPids) -> None:
        """Add the totals of ranks that an earlier agent counted and that still run; `pids` are of the ranks of now."""
        ranks = frozenset(rank for rank, pid in self._base.pids.items() if pids.get(rank) == pid)
        if ranks == self._ranks:
            return
        self._ranks = ranks
        for name, base in self._base.values.items():
            if is_of_rank(_METRICS[name]):
                self._of_ranks[name] = {labels: value for labels, value in base.items() if labels[:2] in ranks}

    def add_to(self, metric: Metric, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """The samples of a counter, and what earlier agents counted; no two samples have the same labels."""
        base = self._of_ranks if is_of_rank(metric) else self._base.values
        earlier = base.get(metric.name)
        if not earlier:
            return samples
        keys = _keys(metric, samples)
        if metric.name in FROM_DEVICES:
            return tuple(
                (labels, value + self._offset(metric.name, key, value))
                for key, (labels, value) in zip(keys, samples, strict=True)
            )
        added = [(one[0], one[1] + earlier.get(key, 0)) for key, one in zip(keys, samples, strict=True)]
        if metric.name in OF_NODE:
            known = {labels for labels, _ in samples}
            added += [one for one in earlier.items() if one[0] not in known]
        return tuple(added)

    def add_to_histograms(
        self, metric: Metric, histograms: dict[LabelValues, Histogram]
    ) -> dict[LabelValues, Histogram]:
        """Histograms with all of their buckets, and what earlier agents counted."""
        base = self._base.histograms.get(metric.name)
        if base is None:
            return histograms
        added = {labels: _sum(one, base.get(_key(metric, labels))) for labels, one in histograms.items()}
        if metric.name in OF_NODE:
            added.update({labels: one for labels, one in base.items() if labels not in added})
        return added

    def record_shown(self, shown: Iterable[Family], pids: RankPids, positions: Mapping[RankKey, int]) -> None:
        """Record what is about to be shown; what is not among it stays as it was, but for ranks that have gone."""
        self._awaited -= pids.keys()
        totals, base = self._shown, self._base
        totals.pids = {**{rank: base.pids[rank] for rank in self._awaited}, **pids}
        awaited = self._awaited & base.positions.keys()
        totals.positions = {**{rank: base.positions[rank] for rank in awaited}, **positions}
        for name in [name for name in totals.values if is_of_rank(_METRICS[name])]:
            totals.values[name] = {
                labels: value
                for labels, value in self._base.values.get(name, {}).items()
                if labels[:2] in self._awaited
            }
        for family in shown:
            if not is_continued(family.metric):
                continue
            name = family.metric.name
            if family.samples:
                values = totals.values.setdefault(name, {})
                if name in OF_NODE:
                    # All of it is shown, always: what is not has moved to other labels, such as a GPU's once known.
                    values.clear()
                keys = _keys(family.metric, family.samples)
                if not values:
                    values.update(zip(keys, [value for _, value in family.samples], strict=True))
                else:
                    for key, (_, value) in zip(keys, family.samples, strict=True):
                        if value >= values.get(key, 0):
                            values[key] = value
                _limit(values, keys)
            if family.histograms:
                histograms = totals.histograms.setdefault(name, {})
                for labels, histogram in family.histograms:
                    whole = full_histogram(histogram)
                    histograms[_key(family.metric, labels)] = Histogram(whole.bounds, whole.counts, whole.sum)
                _limit(histograms, (_key(family.metric, labels) for labels, _ in family.histograms))

    def _offset(self, name: str, labels: LabelValues, value: int | float) -> int | float:
        """By how much an earlier agent's total is above what a device shows at first sight."""
        key = name, labels
        if key not in self._offsets:
            self._offsets[key] = max(0, self._base.values[name].get(labels, 0) - value)
        return self._offsets[key]


def _keys(metric: Metric, samples: Sequence[Sample]) -> list[LabelValues]:
    """The key of each sample; nearly always its labels, of which there are thousands."""
    if samples and len(samples[0][0]) == len(metric.labels):
        return [labels for labels, _ in samples]
    return [_key(metric, labels) for labels, _ in samples]


def _key(metric: Metric, labels: LabelValues) -> LabelValues:
    """The labels of a series, without those that only other series of the moment have (`netns`)."""
    end = len(labels)
    while end > len(metric.labels) and not labels[end - 1]:
        end -= 1
    return labels[:end]


def _sum(one: Histogram, other: Histogram | None) -> Histogram:
    """Two histograms as one; the first alone where there is no other, or it was counted in other buckets."""
    if other is None or one.bounds != other.bounds:
        return one
    return replace(
        one,
        counts=tuple(a + b for a, b in zip(one.counts, other.counts, strict=True)),
        sum=None if one.sum is None or other.sum is None else one.sum + other.sum,
    )


def _limit(series: dict[LabelValues, Value], shown: Iterable[LabelValues]) -> None:
    """Forget what came first and is not shown any more: devices and jobs come and go for as long as agents run."""
    too_many = len(series) - MOST_SERIES
    if too_many > 0:
        kept = set(shown)
        for labels in list(islice((labels for labels in series if labels not in kept), too_many)):
            del series[labels]
