"""The options of `railscope top`, apart from its work, so that the command line starts fast."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import Final

DEFAULT_URL: Final = "http://127.0.0.1:9779"


def add_top_arguments(parser: ArgumentParser) -> None:
    """The options of `railscope top`."""
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"the agent (default: {DEFAULT_URL})")
    parser.add_argument("--interval", type=_interval, default=2.0, metavar="N", help="seconds between readings (2)")
    parser.add_argument("--plain", action="store_true", help="lines of key=value pairs instead of a screen")
    parser.add_argument("--count", type=_count, metavar="N", help="with --plain: end after N times (default: never)")
    parser.add_argument("--user", default="", metavar="NAME", help="user name, if the agent requires a password")
    parser.add_argument("--password-file", type=Path, metavar="FILE", help="file with the user's password")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificates to trust instead of the system's")
    parser.add_argument("--insecure", action="store_true", help="accept any certificate of the agent")


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0.1 and 3600")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)
