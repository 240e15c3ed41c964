"""The options of `railscope export`, apart from its work, so that the command line starts fast."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Final

from railscope.agent.config.values import option_type, real

_LONGEST_SECONDS: Final = 1e9
_SHORTEST_SECONDS: Final = 1e-9


def add_export_arguments(parser: ArgumentParser) -> None:
    """The options of `railscope export`."""
    parser.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="recordings of one or several hosts, or folders of recorded datasets",
    )
    parser.add_argument(
        "--perfetto", required=True, type=Path, metavar="OUT", help="write a trace for https://ui.perfetto.dev here"
    )
    parser.add_argument(
        "--from",
        dest="from_seconds",
        type=option_type(real(-_LONGEST_SECONDS, _LONGEST_SECONDS, "number of seconds, such as 10 or -5")),
        default=0.0,
        metavar="N",
        help="begin N seconds after the first event could be recorded; negative: N seconds before the end",
    )
    parser.add_argument(
        "--seconds",
        type=option_type(real(_SHORTEST_SECONDS, _LONGEST_SECONDS, "number of seconds above 0")),
        metavar="N",
        help="for how long (default: to the end)",
    )
    parser.add_argument(
        "--comm",
        action="append",
        default=[],
        type=_comm,
        metavar="HASH",
        help="only this communicator, or those whose hash begins so; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object")


def _comm(text: str) -> str:
    if not re.fullmatch(r"[0-9a-zA-Z_.:-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a communicator hash, such as 00c0ffee00c0ffee")
    return text
