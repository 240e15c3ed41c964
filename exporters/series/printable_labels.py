"""Makes labels printable and bounded (probes/printable.py), and remembers from scrape to scrape which ones are.

A scrape shows some twenty thousand label sets, nearly all of them the same as a few seconds before.  To look at each of
their values costs as much as a third of the scrape; to find a label set among those that were looked at costs a tenth
of that.  What is remembered is what was shown last, and bounded; beyond the bound values are looked at in each scrape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain, islice
from typing import Final

from railscope.exporters.series.family import Family, LabelValues
from railscope.probes.printable import LONGEST_SHOWN, printable

MOST_REMEMBERED: Final = 40_000
"""Label sets of all metrics together, each some 150 bytes: twice the series of the default budget."""
_FORGOTTEN_AT_ONCE: Final = 64


class PrintableLabels:
    """Which label sets may be shown as they are.  One lives as long as the agent; for one thread at a time."""

    def __init__(self) -> None:
        self._fine: dict[str, set[LabelValues]] = {}
        """By metric."""
        self._shown: dict[str, list[LabelValues]] = {}
        """By metric: all of them as they were shown last, where each could be shown as it is and came once."""

    def were_shown(self, metric: str, label_sets: list[LabelValues]) -> bool:
        """Whether these were the last label sets of a metric, and none needed a change: most often they are."""
        return self._shown.get(metric) == label_sets

    def record_shown(self, metric: str, label_sets: list[LabelValues]) -> None:
        """Record all label sets of a metric, each of which can be shown as it is and comes once."""
        if len(label_sets) <= MOST_REMEMBERED - sum(map(len, self._shown.values())):
            self._shown[metric] = label_sets
        else:
            self._shown.pop(metric, None)

    def find_unprintable(self, metric: str, labels: Mapping[LabelValues, object]) -> Collection[LabelValues]:
        """Those of a metric's label sets that may not be shown as they are."""
        fine = self._fine.setdefault(metric, set())
        if fine.issuperset(labels):
            return ()
        new = [one for one in labels if one not in fine]
        wrong = {value for value in set(chain.from_iterable(new)) if not _is_fine(value)}
        found = {one for one in new if not wrong.isdisjoint(one)} if wrong else set()
        room = max(0, MOST_REMEMBERED - self.cached_label_sets())
        fine.update(islice((one for one in new if one not in found), room))
        return found

    def forget_all_but(self, shown: Iterable[Family]) -> None:
        """Drop the label sets that are not shown any more, once there are enough to be worth the walk."""
        current = {family.metric.name: family for family in shown}
        for metric in self._fine.keys() - current.keys():
            del self._fine[metric]
            self._shown.pop(metric, None)
        for metric, fine in self._fine.items():
            shown_now = current[metric].samples or current[metric].histograms
            if len(fine) > len(shown_now) + _FORGOTTEN_AT_ONCE:
                fine.intersection_update(labels for labels, _ in shown_now)

    def cached_label_sets(self) -> int:
        """How many label sets are remembered."""
        return sum(map(len, self._fine.values()))


def make_printable(labels: LabelValues) -> LabelValues:
    """The labels as they may be shown."""
    return tuple(None if value is None else printable(value, LONGEST_SHOWN) for value in labels)


def _is_fine(value: str | None) -> bool:
    return value is None or (len(value) <= LONGEST_SHOWN and value.isprintable())
