"""Parses the values of options and of the configuration file.

Each reader takes a text and raises ValueError with one sentence that says what is wrong and what is allowed; the
command line and the configuration file share them, so that both accept the same and complain alike.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

_NANOSECONDS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_DURATION_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ns|us|µs|ms|s|m|h|d)")
_DURATION: Final = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_SIZE: Final = re.compile(r"([0-9]{1,15})(B|KiB|MiB|GiB)?")
_SIZE_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_INTEGER: Final = re.compile(r"[0-9]{1,18}")
_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]*):(?P<port>[0-9]{1,5})")
_BETWEEN_ENTRIES: Final = re.compile(r",(?![^\[\]]*\])")


Value = TypeVar("Value")


def option_type(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """A reader as the type of a command's option: argparse shows the sentence of one kind of error only."""

    def argument(text: str) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


def split_list(text: str) -> list[str]:
    """What stands between commas; a comma within [] belongs to the pattern, as in eth[0,2]."""
    return [entry.strip() for entry in _BETWEEN_ENTRIES.split(text)]


@dataclass(frozen=True, slots=True)
class ListenAddress:
    host: str
    """Without brackets; empty: every address of the host."""
    port: int
    """0: any free port."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_address(text: str) -> ListenAddress:
    """Parse an option's address: `127.0.0.1:9779`, `[::1]:9779`, `:9779`."""
    found = _ADDRESS.fullmatch(text)
    if not found or int(found["port"]) > 65535:
        raise ValueError(f"{text!r} is not an address: write HOST:PORT, such as 127.0.0.1:9779, [::1]:9779 or :9779")
    return ListenAddress(found["host"].strip("[]"), int(found["port"]))


def duration_ns(shortest: str, longest: str) -> Callable[[str], int]:
    """Reader of durations such as `100ms`, `1.5s` or `1m30s`, as nanoseconds, between two bounds."""
    low, high = _duration(shortest), _duration(longest)

    def read(text: str) -> int:
        value = _duration(text)
        if not low <= value <= high:
            raise ValueError(f"{text} is out of range: allowed is {shortest} to {longest}")
        return value

    return read


def _duration(text: str) -> int:
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration: write a number with its unit, such as 100ms, 10s or 5m")
    return int(sum(Decimal(number) * _NANOSECONDS[unit] for number, unit in _DURATION_PART.findall(text)))


def size_bytes(smallest: str, largest: str) -> Callable[[str], int]:
    """Reader of sizes such as `65536`, `64KiB` or `8MiB`, as bytes, between two bounds."""
    low, high = _size(smallest), _size(largest)

    def read(text: str) -> int:
        value = _size(text)
        if not low <= value <= high:
            raise ValueError(f"{text} is out of range: allowed is {smallest} to {largest}")
        return value

    return read


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB or GiB, such as 64KiB")
    return int(found[1]) * _SIZE_UNITS[found[2] or "B"]


def power_of_two_bytes(smallest: str, largest: str) -> Callable[[str], int]:
    """Reader of a ring buffer's size: the kernel takes powers of two only."""
    in_range = size_bytes(smallest, largest)

    def read(text: str) -> int:
        value = in_range(text)
        if value & (value - 1):
            raise ValueError(f"{text} is not a power of two, such as 4MiB, 8MiB or 16MiB")
        return value

    return read


def whole_number(smallest: int, largest: int) -> Callable[[str], int]:
    """Reader of an option's whole number between two bounds."""

    def read(text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError(f"{text!r} is not a whole number: allowed is {smallest} to {largest}")
        value = int(text)
        if not smallest <= value <= largest:
            raise ValueError(f"{text} is out of range: allowed is {smallest} to {largest}")
        return value

    return read


def power_of_two(largest: int) -> Callable[[str], int]:
    """Reader of an option's power of two between two bounds."""
    in_range = whole_number(1, largest)

    def read(text: str) -> int:
        value = in_range(text)
        if value & (value - 1):
            raise ValueError(f"{text} is not a power of two: allowed are 1, 2, 4, … {largest}")
        return value

    return read


def percentage(smallest: float, largest: float) -> Callable[[str], float]:
    """Reader of an option's share such as `1%` or `0.5`, in percent; the result is a ratio."""

    def read(text: str) -> float:
        try:
            value = float(text.removesuffix("%"))
        except ValueError:
            raise ValueError(f"{text!r} is not a percentage such as 1% or 0.5%") from None
        if not smallest <= value <= largest:
            raise ValueError(f"{text!r} is out of range: {smallest:g}% to {largest:g}%")
        return value / 100

    return read


def decimal(smallest: float, largest: float) -> Callable[[str], float]:
    """Reader of an option's decimal number between two bounds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number such as 8 or 2.5") from None
        if not smallest <= value <= largest:
            raise ValueError(f"{text} is out of range: allowed is {smallest:g} to {largest:g}")
        return value

    return read


def real(smallest: float, largest: float, what: str) -> Callable[[str], float]:
    """Reader of an option's number; an error calls it no `what`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not smallest <= value <= largest:
            raise ValueError(f"{text!r} is not a {what}")
        return value

    return read


def seconds(shortest: float, longest: float) -> Callable[[str], float]:
    """Reader of an option's plain number of seconds."""
    return real(shortest, longest, f"number of seconds between {shortest:g} and {longest:g}")


def one_of(*allowed: str) -> Callable[[str], str]:
    """Reader of an option that is one of several words."""

    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not allowed: choose {', '.join(allowed[:-1])} or {allowed[-1]}")
        return text

    return read


def prom_file(text: str) -> Path:
    """Reader of an option that names a file for node_exporter's textfile collector.

    Raises:
        ValueError: it does not end in `.prom`.
    """
    path = Path(text)
    if path.suffix != ".prom":
        raise ValueError(f"'{text}' does not end in .prom, and node_exporter reads no other file")
    return path


def folder(text: str) -> Path:
    """Reader of an option that names a folder; it need not exist."""
    if not text:
        raise ValueError("'' is not a folder's path")
    return Path(text)


def optional_file(text: str) -> Path | None:
    """Reader of an option that names a file; the empty text is none."""
    return Path(text) if text else None


def otlp_endpoint(text: str) -> str | None:
    """Reader of the option for where metrics are pushed; without a path it is OTLP's own.  The empty text is none."""
    if not text:
        return None
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and url.hostname and (url.port is None or url.port > 0)
    except ValueError:
        good = False
    if not good or url.username is not None or url.query or url.fragment or not text.isprintable() or " " in text:
        # It may hold a password: what was written is not repeated.
        raise ValueError("that is no URL of an endpoint: write one such as http://collector:4318, without a password")
    return text if url.path.strip("/") else f"{url.scheme}://{url.netloc}/v1/metrics"


def label_text(text: str) -> str | None:
    """Reader of an option that a label shows; the empty text is none."""
    if len(text) > 253 or not text.isprintable() or text != text.strip():
        raise ValueError(f"{text!r} is no name for a label: write at most 253 printable characters, such as gpu-17")
    return text or None


def telemetry_path(text: str) -> str:
    """Reader of the option for the path under which metrics are served."""
    if not re.fullmatch(r"/[\w.~/-]+", text, re.ASCII) or text in ("/healthz", "/readyz"):
        raise ValueError(f"{text!r} is not a path for metrics: write one such as /metrics (not /, /healthz or /readyz)")
    return text
