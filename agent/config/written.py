"""Writes values as a person writes them in the configuration file: `1m30s`, `64KiB`, `[eth0, eth1=3]`.

What is written here is read back as the same value.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.config.values import ListenAddress

_TIMES: Final = (
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
)
_SIZES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_PLAIN: Final = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./:%=+-]*(?<!:)")
"""What YAML takes as it stands, in a list too."""
_NOTHING: Final = frozenset({"null", "Null", "NULL"})


def format_value(field: str, value: object) -> str:
    """A value of `Config` as YAML; the field's name tells the unit."""
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(_text(field, entry)) for entry in value)}]"
    return _quoted(_text(field, value))


def _text(field: str, value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case RailPattern():
            return f"{value.glob}={value.rail}" if value.rail else value.glob
        case int() if field.endswith("_ns"):
            return _duration(value)
        case int() if field.endswith("_bytes"):
            return _size(value)
        case float() if field.endswith("_ratio"):
            return f"{value * 100:.12g}%"
        case float():
            return f"{value:.12g}"
        case int() | str() | Path() | ListenAddress():
            return str(value)
    raise TypeError(f"{field}: a {type(value).__name__} has no form in the file")


def _duration(nanoseconds: int) -> str:
    parts = []
    for unit, size in _TIMES:
        number, nanoseconds = divmod(nanoseconds, size)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"


def _size(size_bytes: int) -> str:
    for unit, size in _SIZES:
        if size_bytes and size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)


def _quoted(text: str) -> str:
    """The text, in double quotes where YAML would take it for something else."""
    return text if _PLAIN.fullmatch(text) and text not in _NOTHING else json.dumps(text)
