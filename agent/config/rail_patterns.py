"""Which network devices a configuration names as rails: `eth2`, `eth*`, `eth2=0`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RailPattern:
    """One entry of the configuration."""

    glob: str
    rail: str
    """Number given to it; empty for its position."""


def parse_rail_patterns(texts: Iterable[str]) -> tuple[RailPattern, ...]:
    """Patterns from `eth2`, `eth*` or `eth2=0`.

    Raises:
        ValueError: an entry has no name, or a number is given to a pattern that several devices can match.
    """
    patterns = []
    for text in texts:
        glob, equals, rail = (part.strip() for part in text.partition("="))
        if not glob or (equals and not rail):
            raise ValueError(f"rail pattern {text!r}: write a device name, a pattern such as eth*, or eth2=0")
        if rail and not (rail.isascii() and rail.isdigit()):
            raise ValueError(f"rail pattern {text!r}: a rail is a number: write {glob}=0")
        if rail and set(glob) & set("*?["):
            raise ValueError(f"rail pattern {text!r}: give a rail number to one device name, not to a pattern")
        patterns.append(RailPattern(glob, rail))
    return tuple(patterns)
