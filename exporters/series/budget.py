"""The limit on exposed series, and the count of series dropped.

A node that starts thousands of short jobs would otherwise fill the monitoring server with communicators.  What is
given up first is decided in `families`; this module only remembers the limit and the loss.
"""

from __future__ import annotations

import threading
from typing import Final

DEFAULT_SERIES: Final = 20_000


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

    @property
    def dropped_total(self) -> int:
        """Series left out, added up over expositions: it rises for as long as something is missing."""
        return self._dropped

    def add_dropped(self, series: int) -> int:
        """Add `series` to the total and return the new total."""
        with self._lock:
            self._dropped += series
            return self._dropped
