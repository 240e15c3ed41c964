"""Log lines that a container runtime, a collector or a logger has wrapped into JSON, and colours of terminals.

    {"log":"host:71:71 [0] NCCL INFO …\\n","stream":"stderr","time":"2026-01-06T10:11:12.123Z"}       docker
    {"__REALTIME_TIMESTAMP":"1767694272123456","MESSAGE":"host:71:71 [0] NCCL INFO …"}                journalctl -o json
    {"labels":{…},"line":"host:71:71 [0] NCCL INFO …","timestamp":"2026-01-06T10:11:12.123Z"}         Loki
    2026-01-06T10:11:12+00:00	kube.train	{"log":"host:71:71 [0] NCCL INFO …","stream":"stderr"}     fluentd

The text may be at any name, and within an object; the time is at one of the names that are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_TIMES: Final = (
    "time",
    "timestamp",
    "@timestamp",
    "ts",
    "asctime",
    "_SOURCE_REALTIME_TIMESTAMP",
    "__REALTIME_TIMESTAMP",
    "date",
    "datetime",
    "timeUnixNano",
    "observedTimeUnixNano",
    "created",
)
"""The more telling first."""
_OBJECT: Final = '{"'
_FARTHEST: Final = 1_024
"""Letters of a line in front of its JSON."""
_DEEPEST: Final = 4
_CODES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\-_])")
_DECODER: Final = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class WrappedLine:
    """What a line of JSON holds."""

    before: str
    """What stands in front of the JSON."""
    texts: tuple[str, ...]
    """The lines of its message."""
    time: float | str | None
    """As it is written; None: it has none."""


def without_codes(line: str) -> str:
    """A line without what colours it or moves the cursor."""
    return _CODES.sub("", line) if "\x1b" in line else line


def unwrap_line(line: str, mark: str) -> WrappedLine | None:
    """The message with `mark` that a line holds in JSON, and its time; None: the line is its message itself."""
    at = line.find(_OBJECT, 0, _FARTHEST)
    if at < 0 or not 0 <= at < line.find(mark):
        return None
    try:
        value, _ = _DECODER.raw_decode(line, at)
    except (ValueError, RecursionError):
        return None
    message = _with_mark(value, mark, 0)
    if not isinstance(value, dict) or message is None:
        return None
    return WrappedLine(line[:at], tuple(without_codes(message).splitlines()), _time_of(value, 0))


def _with_mark(value: object, mark: str, depth: int) -> str | None:
    if isinstance(value, str):
        return value if mark in value else None
    if not isinstance(value, dict) or depth > _DEEPEST:
        return None
    return next((found for one in value.values() if (found := _with_mark(one, mark, depth + 1)) is not None), None)


def _time_of(value: Mapping[str, Any], depth: int) -> float | str | None:
    for name in _TIMES:
        found = value.get(name)
        if isinstance(found, str | int | float) and not isinstance(found, bool):
            return found
    inner = (one for one in value.values() if isinstance(one, dict)) if depth < _DEEPEST else ()
    return next((found for one in inner if (found := _time_of(one, depth + 1)) is not None), None)
