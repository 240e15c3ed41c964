"""The limit on exposed series, and the count of series dropped.

A node that starts thousands of short jobs would otherwise fill the monitoring server with communicators.  What is
given up first is decided in `trimming`; this module only remembers the limit and the loss.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

DEFAULT_SERIES: Final = 20_000
_MOST_USERS: Final = 1024
"""Beyond them a user is not known."""


class SeriesBudget:
    """The cap on series of one exposition, and the sum of what all expositions so far left out.

    One budget lives as long as the agent, so that `series_dropped_total` never falls.  Safe to use from several
    threads.
    """

    def __init__(self, limit: int = DEFAULT_SERIES, dropped: int = 0) -> None:
        """`dropped`: series that earlier expositions left out."""
        if limit < 1:
            raise ValueError(f"a limit of {limit} series exports nothing; give 1 or more")
        self.limit = limit
        self._lock = threading.Lock()
        self._dropped = dropped
        self._by_user: dict[int | None, int] = {}

    @property
    def dropped_total(self) -> int:
        """Series left out, added up over expositions: it rises for as long as something is missing."""
        return self._dropped

    def dropped_by_user(self) -> Mapping[int | None, int]:
        """Series of ranks that users lost because they had the most, by uid, None: not known; never falls."""
        with self._lock:
            return dict(self._by_user)

    def add_dropped(self, series: int, by_user: Mapping[int | None, int]) -> int:
        """Add `series` to the total and return the new total; `by_user`: of these, those of ranks, by uid."""
        with self._lock:
            self._dropped += series
            for uid, count in by_user.items():
                user = uid if uid in self._by_user or len(self._by_user) < _MOST_USERS else None
                self._by_user[user] = self._by_user.get(user, 0) + count
            return self._dropped
