"""The options of `railscope place`, apart from its work, so that the command line starts fast."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

_EXAMPLE: Final = """\
examples:
  railscope place recording/                       how the job is laid out, and what would be better
  railscope place recording/ --gpus-per-node 4     the same on smaller servers
  railscope place recording/ --epsilon 0.02 --network-share 0.2
                                                   links to spare, if the network takes a fifth of an iteration

Mappings are ranked by the bytes over their busiest NIC; with --c-nvlink, and --c-nic where no rail's speed was
recorded, they have a time, too.
"""


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope place`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="a recorded dataset; several are one job's"
    )
    parser.add_argument(
        "--gpus-per-node", type=_whole(1, 1024), metavar="N", help="GPUs of a server (default: as recorded)"
    )
    parser.add_argument(
        "--top", type=_whole(1, 10_000), default=8, metavar="K", help="show the K best mappings (default 8)"
    )
    parser.add_argument(
        "--epsilon",
        type=_real(0, 100),
        default=0.05,
        metavar="SHARE",
        help="part by which an iteration may grow when links are taken away (default 0.05)",
    )
    parser.add_argument(
        "--network-share",
        type=_real(0.0001, 1),
        default=1.0,
        metavar="SHARE",
        help="part of the iteration that communication between servers takes (default 1: all of it)",
    )
    parser.add_argument(
        "--c-nic", type=_real(1, 1e24), metavar="RATE", help="of one NIC, bytes/s (default: as recorded)"
    )
    parser.add_argument("--c-nvlink", type=_real(1, 1e24), metavar="RATE", help="of one GPU within a server, bytes/s")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _whole(smallest: int, largest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not smallest <= int(text) <= largest:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {smallest} to {largest}")
        return int(text)

    return read


def _real(smallest: float, largest: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not smallest <= value <= largest:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {smallest:g} to {largest:g}")
        return value

    return read
