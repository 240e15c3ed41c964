"""What a configuration file may hold, and what is said where it holds something else.

Apart from agent/config_file.py, which reads one, and takes a YAML parser that an agent without such a file does not
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class ConfigError(Exception):
    """The configuration cannot be used; one line that names the place and what is allowed."""


class Kind(Enum):
    """How a value is written in the file; the value is the words for it."""

    TEXT = "a text"
    INTEGER = "a whole number"
    BOOLEAN = "true or false"
    LIST = "a list, such as [a, b]"


@dataclass(frozen=True, slots=True)
class Key:
    """One key that the file may have."""

    name: str
    """`group.key`."""
    kind: Kind
    read: Callable[[str], object]
    """Makes the value of the text (of each entry, for a list); raises ValueError with one sentence."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean …?` if one of the allowed words is close, else nothing; leading dashes do not count."""
    import difflib  # only ever for an error

    names = {name.lstrip("-"): name for name in allowed}
    close = [names[name] for name in difflib.get_close_matches(word.lstrip("-"), names, n=1)]
    return f"; did you mean {close[0]}?" if close else ""
