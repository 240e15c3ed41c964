"""The environment of another's process, read only by name and only in a form that fits a label.

An environment holds secrets: nothing of it may reach a metric but what is asked for here.  Its owner writes it as he
likes: values are cut to 128 characters and lose what moves a cursor, hides or reverses text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from railscope.probes.printable import printable

LONGEST: Final = 128
"""Characters of a value."""


class Variables:
    """The environment of one process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, *names: str) -> str:
        """The first of these variables that is set, cut and cleaned."""
        for name in names:
            value = clean(self._environment.get(name, ""))
            if value:
                return value
        return ""

    def number(self, name: str) -> str:
        """A variable that holds a whole number, else nothing."""
        value = self.text(name) if name else ""
        return value if value.isascii() and value.isdigit() else ""

    def has(self, name: str) -> bool:
        return name in self._environment


def clean(value: str) -> str:
    """Without what moves a cursor, hides or reverses text, and no longer than a label should be."""
    return printable(value[: 4 * LONGEST], instead="").strip()[:LONGEST]
