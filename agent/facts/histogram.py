"""A histogram at one moment, with exemplars of what its buckets counted."""

from __future__ import annotations

from dataclasses import dataclass

from railscope.agent.facts.rank_identity import Labels


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One of the things that a bucket counted."""

    labels: Labels
    """At most 128 characters in all: names and values."""
    value: float
    """In the metric's unit."""
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by bucket, not cumulative."""

    bounds: tuple[float, ...]
    """Upper bounds, inclusive, ascending, without +Inf; in the metric's unit."""
    counts: tuple[int, ...]
    """One more than `bounds`: the last counts what lies above every bound."""
    sum: float | None
    """Sum of what was observed, in the metric's unit; None where the kernel kept only buckets."""
    exemplars: tuple[Exemplar | None, ...] = ()
    """The last thing that each bucket counted, None where that is not known; empty: it is known of none."""

    def quantile(self, part: float) -> float | None:
        """What this part (0 to 1) lies below, as Prometheus' histogram_quantile estimates it; None: it is empty.

        Above the last bound it is that bound.
        """
        together = sum(self.counts)
        if not together:
            return None
        wanted, below, lower = part * together, 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        return lower
