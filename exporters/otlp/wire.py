"""What the agent and the sending process tell each other: settings, exports and reports."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from railscope.exporters.series.family import Family

Result = Literal["success", "failure", "dropped"]
LENGTH: Final = struct.Struct("<I")
"""What stands before each export."""


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """Where to, and how; all as text and numbers, since they travel as JSON."""

    endpoint: str
    timeout_seconds: float
    headers_file: str = ""
    """Lines `Name: value`; empty: those of OTEL_EXPORTER_OTLP_HEADERS."""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""


@dataclass(frozen=True, slots=True)
class Export:
    """What is pushed at once."""

    realtime_ns: int
    """When it was so."""
    start_realtime_ns: int
    """Since when the agent's totals count."""
    boot_realtime_ns: int
    """Since when devices count, at the earliest."""
    version: str
    resource: Mapping[str, str]
    """Attributes of this host and agent."""
    packed: tuple[bytes, ...]
    """The families, each pickled by itself: a large one holds the agent's interpreter lock no longer than it must."""

    def families(self) -> tuple[Family, ...]:
        """What is pushed; only for what the agent itself packed."""
        return tuple(pickle.loads(one) for one in self.packed)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of one attempt, or of an export that was given up."""

    result: Result
    seconds: float = 0.0
    points: int = 0
    error: str = ""


def parse_report(line: bytes) -> Report | None:
    """What a line of the sending process reports; None: it is no report."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict) or told.get("result") not in get_args(Result):
        return None
    seconds, points, error = told.get("seconds"), told.get("points"), told.get("error")
    if not isinstance(seconds, int | float) or not isinstance(points, int) or not isinstance(error, str):
        return None
    return Report(told["result"], float(seconds), points, error)
