"""Labels that hold a number, as documents for programs show them: a number, and null where it is not known.

Ranks and their count are text inside railscope, because a metric's label is, and because one may be `unknown`.
"""

from __future__ import annotations

from typing import Final

_LIMIT: Final = 1 << 31
_MOST_DIGITS: Final = 10
"""What a launcher wrote into an environment is anybody's text."""


def number_of(label: str) -> int | None:
    """The number below 2^31 that a label says; None where it says none, as `unknown` and an empty one do."""
    if not (label.isascii() and label.isdecimal() and len(label) <= _MOST_DIGITS):
        return None
    number = int(label)
    return number if number < _LIMIT else None
