"""Calls that do not return, as they are told of: from the look that finds one to the look that no longer does.

Whoever finds them describes each as a Stall, with a negative number of its own as its instance.  The numbers of all
finders come from one source, so that what is kept by instance is of one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from railscope.agent.facts.stall import Stall
from railscope.agent.node.stalls.detector import Changes
from railscope.probes.loading.maps import Records

CallKey = tuple[int, int]
"""A thread, and when its call began: numbers of threads are used again."""
PAUSE_NS: Final = 900_000_000
"""Between two looks: about one a second."""
MOST_OF_A_PROCESS: Final = 16
MOST_OF_A_USER: Final = 128
"""The oldest calls that are described."""
_KEPT_NS: Final = 600_000_000_000
"""As long as the lengths of those that returned are shown."""


class CallNumbers:
    """Instances of calls: negative, and never used again."""

    def __init__(self) -> None:
        self._last = 0

    def take(self) -> int:
        self._last -= 1
        return self._last


class ToldCalls:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._current: dict[CallKey, Stall] = {}
        self._ended: list[tuple[int, int]] = []
        """When stalls ended, and their numbers, oldest first."""

    @property
    def current(self) -> tuple[Stall, ...]:
        return tuple(self._current.values())

    def tell(self, now_ns: int, found: Mapping[CallKey, Stall]) -> Changes:
        """These are the calls that do not return, and no others."""
        begun = tuple(stall for key, stall in found.items() if key not in self._current)
        ended = tuple(replace(stall, ended_ns=now_ns) for key, stall in self._current.items() if key not in found)
        self._current = dict(found)
        self._ended += [(now_ns, stall.instance) for stall in ended]
        return Changes(begun, ended)

    def pop_forgotten(self, now_ns: int) -> list[int]:
        """Instances whose calls returned so long ago that they are not shown any more; told once."""
        old = [number for ended_ns, number in self._ended if now_ns - ended_ns >= _KEPT_NS]
        self._ended = self._ended[len(old) :]
        return old


def oldest_calls(tids: Records, calls: Records) -> tuple[Records, Records]:
    """The oldest calls of each process and of each user; dtypes with `start_ns`, `tgid` and `uid`."""
    for of, most in (("tgid", MOST_OF_A_PROCESS), ("uid", MOST_OF_A_USER)):
        order = np.lexsort((calls["start_ns"], calls[of]))
        tids, calls = tids[order], calls[order]
        _, first, inverse = np.unique(calls[of], return_index=True, return_inverse=True)
        kept = np.arange(len(calls)) - first[inverse] < most
        tids, calls = tids[kept], calls[kept]
    return tids, calls
