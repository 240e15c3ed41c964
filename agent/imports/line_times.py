"""Times of log lines: parsed from the prefix, or made up to keep the order if there is none.

Container runtimes, schedulers, launchers and loggers each write times in a form of their own:

    2026-01-06T10:11:12.123456789Z · 2026-01-06 10:11:12,345 · 2026/01/06 10:11:12 · 2026-01-06 10:11:12 UTC
    Jan 06 10:11:12 (syslog, journald) · Tue Jan  6 10:11:12 2026 (mpirun) · 06/Jan/2026:10:11:12 +0000
    I0106 10:11:12.345678 (glog) · 01-06 10:11:12 (vLLM) · 1767694272.123456 (journald, fluentd) · [10:11:12.345] (NCCL)

What such a form leaves out is taken from when the file was last written: the year, or the day, and said.

Whether a log has times is decided at its first call.  Equal times, which those that only count seconds often are, are
told apart by one nanosecond a call, so that the order of calls stays.  A time before the last one is taken as it is.
"""

from __future__ import annotations

import re
from collections import deque
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

from railscope.agent.imports.facts import Problems

_CLOCK: Final = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH: Final = rf"(?P<month>{'|'.join(_MONTHS)})"
_ZONE: Final = r"(?P<zone> ?(?:Z|UTC|GMT)\b|(?: (?=[+-]\d{4}\b))?[+-]\d\d:?\d\d)?"
_FORMS: Final = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"(?P<year>\d{{4}})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]{_CLOCK}{_ZONE}(?!\d)",
        rf"\b{_MONTH} +(?P<day>\d\d?) {_CLOCK} (?P<year>\d{{4}})(?!\d)",
        rf"\b(?P<day>\d\d)/{_MONTH}/(?P<year>\d{{4}})[: ]{_CLOCK}{_ZONE}(?!\d)",
        rf"\b{_MONTH} +(?P<day>\d\d?) {_CLOCK}(?! ?\d)",
        rf"(?<![\w-])[IWEF](?P<month>\d\d)(?P<day>\d\d) {_CLOCK}(?!\d)",
        rf"(?<![\w/-])(?P<month>\d\d)[-/](?P<day>\d\d) {_CLOCK}(?!\d)",
        r"(?<![\w.:])(?P<epoch>1\d{9})\.(?P<fraction>\d{3,9})(?![\d.])",
        r"(?<![\w.:])(?P<epoch>1\d{9})(?P<digits>\d{3}|\d{6}|\d{9})(?![\w.:])",
        rf"^\W*{_CLOCK}(?=[\])\s]|$)",
        rf"[\s\[]{_CLOCK}\]?\s*$",
    )
)
"""The more complete first."""
_SHORTEST: Final = len("00:00:00")
_MOST_NS: Final = 1 << 62
_SECOND_NS: Final = 1_000_000_000
_DAY_NS: Final = 86_400 * _SECOND_NS
_OUT_OF_ORDER_NS: Final = 2_000_000_000
"""Several processes that write into one file may be so far apart."""
_LATEST_TIMES: Final = 1 << 12
_MADE_UP_STEP_NS: Final = 1_000
"""From one line to the next."""
_POWERS: Final = tuple(10 ** (9 - digits) for digits in range(10))
_EPOCH_UNITS: Final = ((1 << 57, 1), (1 << 47, 1_000), (1 << 37, 1_000_000), (0, _SECOND_NS))
"""Nanoseconds of a unit, by the least number of it that is a time of our days."""


class LineTimes:
    """Feed every line's prefix to `read_prefix`, then ask `next_call_ns` for the time of each call in it."""

    def __init__(self, base_ns: int) -> None:
        """`base_ns`: when the file was last written, time of day; made-up times begin there."""
        self._base_ns = base_ns
        self._number = 0
        self._found_ns: int | None = None
        self._last_ns = 0
        self._given: dict[int, int] = {}
        """How many calls had a time, of the latest times."""
        self._stepped_back = False
        self._form: re.Pattern[str] | None = None
        """The one that the last time had, and where in its prefix that began."""
        self._at = 0
        self._second = ("", "")
        """The last time without its fraction: what stands before and behind that."""
        self._second_ns = 0
        self._text = ""
        self._like = ("", "", 0)
        """The last prefix with a fraction of a second: what stands before and behind it, and how many digits it has."""
        self._made_up: bool | None = None
        self._day_ns: int | None = None
        """The day of the last time, of those that have none."""
        self.resolution_ns: int | None = None
        """What the times that were found may be off by."""
        self._assumed: set[str] = set()
        """What times leave out."""

    @property
    def made_up(self) -> bool:
        """Whether the times of calls are made up."""
        return self._made_up is True

    def made_up_ns(self, number: int) -> int:
        """The time of the first call of a line, where times are made up."""
        return self._base_ns + number * _MADE_UP_STEP_NS

    def read_prefix(self, number: int, prefix: str) -> None:
        """Read the prefix of a line; of several times in it the last one counts."""
        self._number = number
        if self._made_up or len(prefix) < _SHORTEST:
            return
        before, behind, digits = self._like
        if digits and prefix.startswith(before) and prefix.endswith(behind):
            fraction = prefix[len(before) : len(prefix) - len(behind)]
            if len(fraction) == digits and fraction.isdecimal() and fraction.isascii():
                # As nearly always: the same second, in the same form.
                self._found_ns = self._second_ns + int(fraction) * _POWERS[digits]
                self._text = ""
                return
        found = self._where_the_last_was(prefix)
        if found is None and self._form is not None:
            found = self._last_of(self._form, prefix)
        if found is None:
            # Of several in a prefix, the one that stands next to the message is of who wrote it; of several forms that
            # fit the same one, the first.
            every = [one for form in _FORMS if (one := self._last_of(form, prefix)) is not None]
            found = max(
                every, key=lambda one: one.start("epoch" if "epoch" in one.re.groupindex else "second"), default=None
            )
        if found is None:
            return
        self._form, self._at = found.re, found.start()
        self._like = ("", "", 0)
        if found[0] != self._text:
            self._text = found[0]
            self._found_ns = self._time_ns(found)
            self._keep_like(prefix, found)

    def _keep_like(self, prefix: str, found: re.Match[str]) -> None:
        """Remember a prefix, so that those that differ in the fraction of the second alone are read fast."""
        fraction = found.groupdict().get("fraction")
        second = found.string[found.start() : found.start("fraction")] if fraction else ""
        if fraction and self._second == (second, found.string[found.end("fraction") : found.end()]):
            self._like = prefix[: found.start("fraction")], prefix[found.end("fraction") :], len(fraction)

    def read_number(self, number: int, value: float | str) -> None:
        """Read the time that stands beside a line's text: a text, or seconds, ms, µs or ns since 1970."""
        if isinstance(value, str):
            plain = value.strip()
            if not plain.isdecimal():
                self.read_prefix(number, value)
                return
            value = int(plain[:20])
        self._number = number
        if self._made_up or not 0 <= value < _MOST_NS:
            return
        unit_ns = next(unit_ns for least, unit_ns in _EPOCH_UNITS if value >= least)
        whole = int(value)
        now_ns = whole * unit_ns + round((value - whole) * unit_ns)
        if now_ns < _MOST_NS:
            self._found_ns = now_ns
            self._resolve(unit_ns if isinstance(value, int) else 1_000)

    def next_call_ns(self) -> int:
        """The time of a call in this line, ns."""
        if self._made_up is None:
            self._made_up = self._found_ns is None
        now_ns = self.made_up_ns(self._number) if self._made_up else self._found_ns or 0
        self._stepped_back |= self._last_ns - now_ns > _OUT_OF_ORDER_NS
        self._last_ns = now_ns
        if now_ns not in self._given and len(self._given) >= _LATEST_TIMES:
            self._given.clear()
        before = self._given.get(now_ns, 0)
        self._given[now_ns] = before + 1
        return now_ns + before

    def report_doubts(self, problems: Problems) -> None:
        """Add notes on doubtful times."""
        if "day" in self._assumed:
            problems.add_note("timestamps in these logs have no date: the day on which the file was written is assumed")
        elif "year" in self._assumed:
            problems.add_note("timestamps in these logs have no year: that of the file's last change is assumed")
        if "zone" in self._assumed:
            problems.add_note("timestamps in these logs have no time zone: UTC is assumed")
        if self._stepped_back:
            problems.add_note(
                "timestamps in these logs go backwards (end of daylight saving time, a clock that was set, or "
                "concatenated files): they are used unchanged"
            )

    def _where_the_last_was(self, prefix: str) -> re.Match[str] | None:
        """The time at the place where the last one was, if no other one can stand behind it; None: look for it."""
        found = self._form.match(prefix, self._at) if self._form is not None else None
        if found is not None and len(prefix) - found.end() >= _SHORTEST and ":" in prefix[found.end() :]:
            return None
        return found

    @staticmethod
    def _last_of(form: re.Pattern[str], prefix: str) -> re.Match[str] | None:
        return next(iter(deque(form.finditer(prefix), maxlen=1)), None)

    def _time_ns(self, found: re.Match[str]) -> int | None:
        said = found.groupdict()
        part = "fraction" if "fraction" in said else "digits"
        fraction = said[part] or ""
        begin, end = found.span(part) if fraction else (found.end(), found.end())
        second = found.string[found.start() : begin], found.string[end : found.end()]
        unit_ns: int = 10 ** (9 - len(fraction))
        fraction_ns = int(fraction or 0) * unit_ns
        self._resolve(unit_ns)
        if second == self._second:
            return self._second_ns + fraction_ns
        try:
            whole_ns = int(said["epoch"]) * _SECOND_NS if said.get("epoch") else self._calendar_ns(said)
        except (ValueError, OverflowError):
            return self._found_ns
        if not 0 <= whole_ns < _MOST_NS:
            return self._found_ns
        self._second, self._second_ns = second, whole_ns
        return whole_ns + fraction_ns

    def _calendar_ns(self, said: dict[str, str]) -> int:
        zone = (said.get("zone") or "").strip()
        if not zone:
            self._assumed.add("zone")
        where = timezone(_offset(zone)) if zone[:1] in ("+", "-") and zone else UTC
        clock = int(said["hour"]), int(said["minute"]), int(said["second"])
        written = datetime.fromtimestamp(self._base_ns // _SECOND_NS, UTC)
        if "day" not in said:
            self._assumed.add("day")
            return self._of_a_day(datetime(written.year, written.month, written.day, *clock, tzinfo=where))
        month = said["month"]
        number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
        if said.get("year"):
            return _ns(datetime(int(said["year"]), number, int(said["day"]), *clock, tzinfo=where))
        self._assumed.add("year")
        moment = datetime(written.year, number, int(said["day"]), *clock, tzinfo=where)
        # No log is written before what it tells of: what seems to lie ahead was last year.
        return _ns(moment if moment <= written + timedelta(days=1) else moment.replace(year=written.year - 1))

    def _of_a_day(self, moment: datetime) -> int:
        """A time of the day, of the same day as the last one, or of the next where it is long before that."""
        now_ns = _ns(moment)
        if self._day_ns is None:
            self._day_ns = now_ns - now_ns % _DAY_NS
        now_ns = self._day_ns + now_ns % _DAY_NS
        if self._found_ns is not None and self._found_ns - now_ns > _DAY_NS // 2:
            self._day_ns += _DAY_NS
            now_ns += _DAY_NS
        return now_ns

    def _resolve(self, resolution_ns: int) -> None:
        self.resolution_ns = max(self.resolution_ns or 0, resolution_ns)


def _ns(moment: datetime) -> int:
    return int(moment.timestamp()) * _SECOND_NS


def _offset(zone: str) -> timedelta:
    sign = -1 if zone[0] == "-" else 1
    return sign * timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
