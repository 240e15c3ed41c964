"""Which network devices a configuration names as rails: `eth2`, `eth*`, `eth2=0`."""

from __future__ import annotations

from dataclasses import dataclass

from railscope.agent.config.values import split_list


@dataclass(frozen=True, slots=True)
class RailPattern:
    """One entry of the configuration."""

    glob: str
    rail: str
    """Number given to it; empty for its position."""


def parse_rail_pattern(text: str) -> RailPattern:
    """The pattern of `--rail.devices` that `eth2`, `eth*` or `eth2=0` is.

    Raises:
        ValueError: the entry has no name, holds several, or gives a number to a pattern that several devices can match.
    """
    glob, equals, rail = (part.strip() for part in text.partition("="))
    if not glob or (equals and not rail):
        raise ValueError(f"rail pattern {text!r}: write a device name, a pattern such as eth*, or eth2=0")
    if len(split_list(text)) > 1:
        raise ValueError(f"rail pattern {text!r}: write each device as an entry of its own")
    if rail and not (rail.isascii() and rail.isdigit()):
        raise ValueError(f"rail pattern {text!r}: a rail is a number: write {glob}=0")
    if rail and set(glob) & set("*?["):
        raise ValueError(f"rail pattern {text!r}: give a rail number to one device name, not to a pattern")
    return RailPattern(glob, rail)
