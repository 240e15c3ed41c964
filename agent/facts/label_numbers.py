"""What labels say of what is not known, and their numbers for JSON: a number, or null if it is not known.

Ranks and their count are text inside railscope, because a metric's label is, and because one may be `unknown`.
"""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = "unknown"
"""What a label says of what is not known."""
_LIMIT: Final = 1 << 31
_MOST_DIGITS: Final = 10
"""A launcher's environment variable may hold any text."""


def parse_number(label: str) -> int | None:
    """The number below 2^31 in a label; None if it has none, as `unknown` and an empty one."""
    if not (label.isascii() and label.isdecimal() and len(label) <= _MOST_DIGITS):
        return None
    number = int(label)
    return number if number < _LIMIT else None
