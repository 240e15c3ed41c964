"""Counts whom the server refuses or drops, by reason, and tells it in the log: a line a minute, not one each."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

_logger: Final = logging.getLogger("railscope.http")
_BETWEEN_LINES_SECONDS: Final = 60.0


class Reason(Enum):
    """Why a client was refused or dropped, as the metric's label has it."""

    CONNECTIONS = "connections"
    """Every place was taken by a request that waits for its answer."""
    HALF_OPEN = "half_open"
    """A newcomer needed the place of a request, or of a handshake, that was not complete."""
    UNREAD = "unread"
    """A newcomer needed the place of a client that did not take its answer, or its answer was too much to keep."""
    IDLE = "idle"
    """A newcomer needed the place of a client that had nothing to ask."""
    TIMEOUT = "timeout"
    """A request or handshake was not complete in time, or an answer not taken."""
    PASSWORD = "password"
    """The password was wrong."""
    PASSWORDS = "passwords"
    """Too many passwords waited to be checked."""
    HANDSHAKE = "handshake"
    """TLS could not be agreed on, or the certificate was refused."""
    FAILED = "failed"
    """The page could not be rendered."""


_LEVELS: Final = {
    Reason.IDLE: logging.DEBUG,
    Reason.TIMEOUT: logging.INFO,
    Reason.HANDSHAKE: logging.INFO,
    Reason.FAILED: logging.ERROR,
}


@dataclass(slots=True)
class _Silence:
    """After a line of one reason."""

    until: float
    since_then: int = 0
    last: str = ""


class Refusals:
    """Counters and log lines.  For one thread, but for `counts`."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Reason, 0)
        self._silences: dict[Reason, _Silence] = {}

    def record(self, reason: Reason, line: str, now: float) -> None:
        """One more, which `line` tells of."""
        self._counts[reason] += 1
        silence = self._silences.get(reason)
        if silence is None:
            self._silences[reason] = _Silence(now + _BETWEEN_LINES_SECONDS)
            _logger.log(_LEVELS.get(reason, logging.WARNING), "%s", line)
        else:
            silence.since_then += 1
            silence.last = line

    @property
    def due(self) -> float:
        """When `tell` has something to do next; infinite: not before the next refusal."""
        return min((silence.until for silence in self._silences.values()), default=math.inf)

    def tell(self, now: float) -> None:
        """Tell of those that were kept back for a minute."""
        for reason, silence in list(self._silences.items()):
            if silence.until > now:
                continue
            if not silence.since_then:
                del self._silences[reason]
                continue
            level = _LEVELS.get(reason, logging.WARNING)
            _logger.log(level, "%s; %d of this kind within a minute", silence.last, silence.since_then)
            self._silences[reason] = _Silence(now + _BETWEEN_LINES_SECONDS)

    def counts(self) -> Mapping[str, int]:
        """How many by the reason's label; from any thread."""
        return {reason.value: count for reason, count in self._counts.items()}
