"""The keys that a configuration file and the environment may set, and the errors for everything else.

Apart from agent/config/file.py, which reads one, and takes a YAML parser that an agent without such a file does not
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final


class ConfigError(Exception):
    """The configuration cannot be used: one line for each error, which names the place and what to write."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


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
    flag: str = ""
    """`--group.key` on the command line, as people write it elsewhere by mistake."""


@dataclass(frozen=True, slots=True)
class Written:
    """A value that a file or the environment sets, and where."""

    value: object
    place: str
    """`/etc/railscope/railscope.yml line 3`, `RAILSCOPE_WEB_LISTEN_ADDRESS`."""


VARIABLE_PREFIX: Final = "RAILSCOPE_"
"""Of every variable of the environment that sets a key."""
TRUE_WORDS: Final = frozenset({"true", "yes", "on"})
FALSE_WORDS: Final = frozenset({"false", "no", "off"})


def one_line(text: str | None) -> str:
    """The text of a configuration error on one line; of none, or an empty one: `cannot be parsed`."""
    return " ".join((text or "cannot be parsed").split())


def suggest_nearest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean …?` if one of the allowed words is close, else nothing; leading dashes do not count.

    What begins with the word, or has its letters in another order, is close to it.  Of a word such as `--collector.x`,
    whose group exists, the rest alone tells what was meant: if nothing in the group is close to it, all that is there
    is named.
    """
    import difflib  # only ever for an error

    typed = word
    names = {name.lstrip("-"): name for name in allowed}
    word = word.lstrip("-")
    group = word[: word.rfind(".") + 1]
    inside = {name.removeprefix(group): flag for name, flag in names.items() if name.startswith(group)}
    if not inside:
        group, inside = "", names
    folded = {name.casefold(): flag for name, flag in inside.items()}
    rest = word.removeprefix(group).casefold()
    begun = [name for name in folded if name.startswith(rest)] if len(rest) > 1 else []
    swapped = [name for name in folded if sorted(name) == sorted(rest)]
    close = begun if len(begun) == 1 else swapped or difflib.get_close_matches(rest, folded, n=1)
    if close and folded[close[0]] != typed:
        return f"; did you mean {folded[close[0]]}?"
    return f"; there are {', '.join(inside.values())}" if group else ""
