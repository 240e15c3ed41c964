"""Computes the increase of a counter between two readings.

None where it cannot: a series that is new, gone, or fell (the agent or the device began again).
"""

from __future__ import annotations

from collections.abc import Mapping


def increase(before: float | None, now: float | None) -> float | None:
    """By how much a counter rose between two scrapes of `railscope top`."""
    return None if before is None or now is None or now < before else now - before


def per_second(before: float | None, now: float | None, span_seconds: float | None) -> float | None:
    """A counter's rate of increase between two scrapes of `railscope top`; `span_seconds` None: it is not known."""
    more = increase(before, now)
    return None if more is None or span_seconds is None else more / span_seconds


def ratio(part: float | None, whole: float | None) -> float | None:
    """The ratio of two figures of `railscope top`, None of nothing."""
    return None if part is None or not whole else part / whole


def increased_errors(before: Mapping[str, float] | None, now: Mapping[str, float]) -> tuple[tuple[str, int], ...]:
    """(name, by how much it rose) of the counters that rose, the most first; `before` None: no earlier reading.

    Errors are shown from the first one on: one that was not there was 0.
    """
    if before is None:
        return ()
    rises = ((name, increase(before.get(name, 0.0), value)) for name, value in now.items())
    return tuple(sorted(((name, int(more)) for name, more in rises if more), key=lambda one: (-one[1], one[0])))
