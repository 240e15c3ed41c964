"""Caches the rendered names and labels of series between scrapes, as only the values change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

from railscope.exporters.series.family import Family, LabelValues

_FORGOTTEN_AT_ONCE: Final = 64

_Beginning = TypeVar("_Beginning")


class PrefixCache(dict[LabelValues, _Beginning]):
    """What the series of one family begin with, by the values of their labels; made when first asked for."""

    def __init__(self, family: Family, make: Callable[[str, tuple[str, ...], LabelValues], _Beginning]) -> None:
        self.name = family.metric.name
        self.labels = family.labels
        self._make = make
        self._label_sets: list[LabelValues] = []
        self._in_order: list[_Beginning] = []
        """Of those."""

    def __missing__(self, values: LabelValues) -> _Beginning:
        beginning = self[values] = self._make(self.name, self.labels, values)
        return beginning

    def in_order(self, current: Sequence[tuple[LabelValues, object]]) -> list[_Beginning]:
        """What each of the current samples begins with; in the same order as before none is looked up."""
        label_sets = [values for values, _ in current]
        if label_sets != self._label_sets:
            self._in_order, self._label_sets = [self[values] for values in label_sets], label_sets
            self.forget_all_but(current)
        return self._in_order

    def forget_all_but(self, current: Collection[tuple[LabelValues, object]]) -> None:
        """Drop what is not among the current samples, once there is enough of it to be worth the walk."""
        if len(self) > len(current) + _FORGOTTEN_AT_ONCE:
            kept = {values: self[values] for values, _ in current}
            self.clear()
            self.update(kept)
