"""Logs a problem once and counts it while it lasts."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

_MOST_SAID: Final = 3


class Troubles:
    """Logs what could not be read: each problem once, not at every read."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: frozenset[str] = frozenset()

    def say(self, errors: Collection[str], *, more: bool = False) -> None:
        """Log the current errors, one line each; `more`: in addition to those logged before."""
        news = [error for error in errors if error not in self._known]
        self._known = frozenset(errors) | (self._known if more else frozenset())
        for error in news[:_MOST_SAID]:
            self._log.warning("%s", error)
        if len(news) > _MOST_SAID:
            self._log.warning(
                "and %d more of the kind; 'railscope doctor' says what is missing", len(news) - _MOST_SAID
            )


class Remark:
    """A line that is logged when it changes."""

    def __init__(self, log: logging.Logger, flag: str, mended: str) -> None:
        """`mended` is logged when the problem is over."""
        self._log = log
        self._flag = flag
        self._mended = mended
        self._said = ""

    def say(self, line: str) -> None:
        if line == self._said:
            return
        self._said = line
        if line:
            self._log.warning("%s: %s", self._flag, line)
        else:
            self._log.info("%s: %s", self._flag, self._mended)
