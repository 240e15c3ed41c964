"""The daemon's log lines: logfmt or JSON on standard error, as Prometheus exporters write them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class LogfmtFormatter(logging.Formatter):
    """`ts=… level=… component=… msg="…"`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        return " ".join(f"{name}={json.dumps(value) if name == 'msg' else value}" for name, value in fields.items())


class JsonFormatter(logging.Formatter):
    """One object a line with the same fields."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record))


def _fields(record: logging.LogRecord) -> dict[str, str]:
    message = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        message += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    return {
        "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "component": record.name.removeprefix("railscope."),
        "msg": message,
    }


def set_up_logging(level: str, log_format: str) -> None:
    """Send the log to standard error; `level` is debug, info, warn or error, `log_format` logfmt or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else LogfmtFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel({"warn": logging.WARNING}.get(level, logging.getLevelNamesMapping().get(level.upper(), logging.INFO)))
