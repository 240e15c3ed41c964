"""Times of log lines: parsed from the prefix, or made up to keep the order if there is none.

Whether a log has times is decided at its first call.  Equal times, which those that only count seconds often are, are
told apart by one nanosecond a call, so that the order of calls stays.  A time before the last one is taken as it is.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

from railscope.agent.imports.facts import Problems

_TIME: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?(?!\d)", re.ASCII
)
_MOST_NS: Final = 1 << 62
_OUT_OF_ORDER_NS: Final = 2_000_000_000
"""Several processes that write into one file may be so far apart."""
_LATEST_TIMES: Final = 1 << 12
_MADE_UP_STEP_NS: Final = 1_000
"""From one line to the next."""


class LineTimes:
    """Feed every line's prefix to `read_prefix`, then ask `next_call_ns` for the time of each call in it."""

    def __init__(self, base_ns: int) -> None:
        """`base_ns`: where made-up times begin, time of day."""
        self._base_ns = base_ns
        self._number = 0
        self._found_ns: int | None = None
        self._last_ns = 0
        self._given: dict[int, int] = {}
        """How many calls had a time, of the latest times."""
        self._stepped_back = False
        self._text = ""
        self._made_up: bool | None = None
        self.resolution_ns: int | None = None
        """What the times that were found may be off by."""
        self.zone_assumed = False
        """A time named no zone."""

    @property
    def made_up(self) -> bool:
        """Whether the times of calls are made up."""
        return self._made_up is True

    def read_prefix(self, number: int, prefix: str) -> None:
        """Read the prefix of a line; of several times in it the last one counts."""
        self._number = number
        if self._made_up or len(prefix) < len("2000-01-01 00:00:00"):
            return
        times = list(_TIME.finditer(prefix))
        if times and times[-1][0] != self._text:
            self._text = times[-1][0]
            self._found_ns = self._time_ns(times[-1])

    def next_call_ns(self) -> int:
        """The time of a call in this line, ns."""
        if self._made_up is None:
            self._made_up = self._found_ns is None
        now_ns = self._base_ns + self._number * _MADE_UP_STEP_NS if self._made_up else self._found_ns or 0
        self._stepped_back |= self._last_ns - now_ns > _OUT_OF_ORDER_NS
        self._last_ns = now_ns
        if now_ns not in self._given and len(self._given) >= _LATEST_TIMES:
            self._given.clear()
        before = self._given.get(now_ns, 0)
        self._given[now_ns] = before + 1
        return now_ns + before

    def report_doubts(self, problems: Problems) -> None:
        """Add notes on doubtful times."""
        if self.zone_assumed:
            problems.add_note("timestamps in these logs have no time zone: UTC is assumed")
        if self._stepped_back:
            problems.add_note(
                "timestamps in these logs go backwards (end of daylight saving time, a clock that was set, or "
                "concatenated files): they are used unchanged"
            )

    def _time_ns(self, found: re.Match[str]) -> int | None:
        year, month, day, hour, minute, second, fraction, zone = found.groups()
        try:
            where = UTC if zone in (None, "Z") else timezone(_offset(zone))
            moment = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=where)
            whole_ns = int(moment.timestamp()) * 1_000_000_000
        except (ValueError, OverflowError):
            return self._found_ns
        if not 0 <= whole_ns < _MOST_NS:
            return self._found_ns
        self.zone_assumed |= zone is None
        digits = len(fraction) if fraction else 0
        self.resolution_ns = max(self.resolution_ns or 0, 10 ** (9 - digits))
        return whole_ns + (int(fraction) * 10 ** (9 - digits) if fraction else 0)


def _offset(zone: str) -> timedelta:
    sign = -1 if zone[0] == "-" else 1
    return sign * timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
