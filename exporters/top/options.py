"""The options of `railscope top`, apart from its work, so that the command line starts fast."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Final

from railscope.agent.config.values import option_type, seconds, whole_number

DEFAULT_URL: Final = "http://127.0.0.1:9779"


def add_top_arguments(parser: ArgumentParser) -> None:
    """The options of `railscope top`."""
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"the agent (default: {DEFAULT_URL})")
    parser.add_argument(
        "--interval",
        type=option_type(seconds(0.1, 3600)),
        default=2.0,
        metavar="N",
        help="seconds between readings (2)",
    )
    parser.add_argument("--plain", action="store_true", help="lines of key=value pairs instead of a screen")
    parser.add_argument(
        "--count",
        type=option_type(whole_number(1, 1_000_000_000)),
        metavar="N",
        help="with --plain: end after N times (default: never)",
    )
    parser.add_argument("--user", default="", metavar="NAME", help="user name, if the agent requires a password")
    parser.add_argument("--password-file", type=Path, metavar="FILE", help="file with the user's password")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificates to trust instead of the system's")
    parser.add_argument("--insecure", action="store_true", help="accept any certificate of the agent")
