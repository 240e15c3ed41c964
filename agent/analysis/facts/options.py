"""The options of `railscope report`, apart from its work, so that the command line starts fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from railscope.agent.config.values import option_type, size_bytes

DUCKDB: Final = "duckdb"
SPARK: Final = "spark"
WEAK: Final = "weak"
STRONG: Final = "strong"
DEFAULT_MEMORY_BYTES: Final = 3_000_000_000
"""What the engine may keep in memory."""

_EXAMPLE: Final = """\
examples:
  railscope report recording/                          what one job did, as tables
  railscope report node-1/ node-2/ --html report.html  servers of one job, with pictures
  railscope report --runs 8gpus/ 16gpus/ 32gpus/       several runs: their scaling

A leaf map is CSV: 'server,leaf' or 'server,rail,leaf' in its first line, then a line for each server or rail.
"""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope report`."""
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="DIR|FILE", help="a recorded dataset, or a file that can be imported"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="also write the page's pictures into this folder, as SVG files"
    )
    parser.add_argument(
        "--only",
        type=_named,
        metavar="COMM|JOB",
        help="of several jobs, the one with this communicator (hash or prefix of it) or job identifier",
    )
    parser.add_argument("--leaf-map", type=Path, metavar="FILE", help="which leaf switch each server is at: CSV")
    parser.add_argument(
        "--runs", action="store_true", help="each path is a run of its own; the report is the first's, with scaling"
    )
    parser.add_argument(
        "--scaling",
        choices=(WEAK, STRONG),
        help="of --runs: whether the batch grows with the GPUs (weak) or stays the same (default: as recorded)",
    )
    parser.add_argument("--engine", choices=(DUCKDB, SPARK), default=DUCKDB, help="query engine (default: duckdb)")
    parser.add_argument(
        "--memory",
        type=option_type(size_bytes("128MiB", "64GiB")),
        default=DEFAULT_MEMORY_BYTES,
        metavar="SIZE",
        help="maximum memory of the engine, such as 2GiB; it spills the rest to disk (default: 3 GB)",
    )


def _named(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("write a communicator's hash or a prefix of it, or a job's identifier")
    return text
