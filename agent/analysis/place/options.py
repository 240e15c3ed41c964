"""The options of `railscope place`, apart from its work, so that the command line starts fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from railscope.agent.config.values import option_type, real, whole_number

_EXAMPLE: Final = """\
examples:
  railscope place recording/                       how the job is laid out, and what would be better
  railscope place recording/ --gpus-per-node 4     the same on smaller servers
  railscope place recording/ --epsilon 0.02 --network-share 0.2
                                                   links to spare, if the network takes a fifth of an iteration

Mappings are ranked by the bytes over their busiest NIC; with --c-nvlink, and --c-nic where no rail's speed was \
recorded, they have a time, too.

A leaf map is CSV: 'server,leaf' or 'server,rail,leaf' in its first line, then a line for each server or rail.
"""
_RATE: Final = option_type(real(1, 1e24, "number from 1 to 1e+24"))
"""Of bytes per second."""


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope place`."""
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="a recorded dataset; several are one job's"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=option_type(whole_number(1, 1024)),
        metavar="N",
        help="GPUs of a server (default: as recorded)",
    )
    parser.add_argument(
        "--top",
        type=option_type(whole_number(1, 10_000)),
        default=8,
        metavar="K",
        help="show the K best mappings (default 8)",
    )
    parser.add_argument(
        "--epsilon",
        type=option_type(real(0, 100, "number from 0 to 100")),
        default=0.05,
        metavar="SHARE",
        help="part by which an iteration may grow when links are taken away (default 0.05)",
    )
    parser.add_argument(
        "--network-share",
        type=option_type(real(0.0001, 1, "number from 0.0001 to 1")),
        default=1.0,
        metavar="SHARE",
        help="part of the iteration that communication between servers takes (default 1: all of it)",
    )
    parser.add_argument(
        "--leaf-map",
        type=Path,
        metavar="FILE",
        help="which leaf switch each server is at: CSV (default: as rails heard)",
    )
    parser.add_argument("--c-nic", type=_RATE, metavar="RATE", help="of one NIC, bytes/s (default: as recorded)")
    parser.add_argument("--c-nvlink", type=_RATE, metavar="RATE", help="of one GPU within a server, bytes/s")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
