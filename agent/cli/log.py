"""Lines on standard error: the daemon's log in logfmt or JSON, as Prometheus exporters write it, and commands' errors.

Names in messages come from tenants: of paths, processes, devices.  Here is the one place where they become a line, and
nothing in it is obeyed by a terminal: what is no printable ASCII is escaped, and what is long is cut.

In the journal (systemd's, if standard error leads there) a line begins with its priority, `<4>` of a warning, so that
`journalctl -p warning` finds it; source: sd-daemon(3).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, TextIO

_MOST_CHARACTERS: Final = 4096
"""Of a message: a name can have thousands, and a line of the journal is for people."""
_PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
"""Least level of each priority; source: syslog(3)."""


class LogfmtFormatter(logging.Formatter):
    """`ts=… level=… component=… msg="…"`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        return " ".join(f"{name}={json.dumps(value) if name == 'msg' else value}" for name, value in fields.items())


class JsonFormatter(logging.Formatter):
    """One object a line with the same fields."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record))


class JournalFormatter(logging.Formatter):
    """A line of another formatter behind its priority."""

    def __init__(self, line: logging.Formatter) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return f"<{priority}>{self._line.format(record)}"


def _fields(record: logging.LogRecord) -> dict[str, str]:
    message = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        message += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    if len(message) > _MOST_CHARACTERS:
        message = f"{message[:_MOST_CHARACTERS]}... ({len(message)} characters)"
    # DEL alone is ASCII, obeyed by terminals, and not escaped by JSON.
    return {
        "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "component": record.name.removeprefix("railscope."),
        "msg": message.replace("\x7f", "\\x7f"),
    }


def set_up_logging(level: str, log_format: str) -> None:
    """Send the log to standard error; `level` is debug, info, warn or error, `log_format` logfmt or json."""
    handler = logging.StreamHandler(sys.stderr)
    formatter: logging.Formatter = JsonFormatter() if log_format == "json" else LogfmtFormatter()
    if _is_journal(sys.stderr, os.environ):
        formatter = JournalFormatter(formatter)
        sys.excepthook = _print_exception
        threading.excepthook = lambda of: _print_exception(of.exc_type, of.exc_value, of.exc_traceback)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel({"warn": logging.WARNING}.get(level, logging.getLevelNamesMapping().get(level.upper(), logging.INFO)))


def _print_exception(kind: type[BaseException], error: BaseException | None, at: TracebackType | None) -> None:
    """A defect's traceback, every line of it an error's."""
    for part in traceback.format_exception(kind, error, at):
        for line in part.splitlines():
            print_error(line)


def print_error(line: str) -> None:
    """Print one line on standard error, an error's in the journal; what a terminal would obey is replaced."""
    from railscope.probes.printable import printable  # only ever for an error

    priority = "<3>" if _is_journal(sys.stderr, os.environ) else ""
    print(f"{priority}{printable(line)}", file=sys.stderr)


def _is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether the stream leads to the journal itself, not to a file or pipe that a child of a service was given.

    Source: JOURNAL_STREAM in systemd.exec(5), device and inode.
    """
    named = environment.get("JOURNAL_STREAM")
    if not named:
        return False
    try:
        state = os.fstat(stream.fileno())
    except (OSError, ValueError):  # a test's own stream has no descriptor
        return False
    return named == f"{state.st_dev}:{state.st_ino}"
