"""`railscope compare`: two recordings, or a recording against an estimate, figure by figure.

Nothing of the analysis is loaded before the command runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.analysis.tables.missing import not_installed
from railscope.agent.config.file import ConfigError
from railscope.agent.config.values import option_type, whole_number
from railscope.agent.estimate.options import request_from
from railscope.agent.model.shape import ShapeError

FINE: Final = 0
COULD_NOT_RUN: Final = 2
_EXAMPLE: Final = """\
examples:
  railscope compare tcp/ roce/          the same job twice: what differs, and whether by chance
  railscope compare recording/ job.toml how well the model predicts it
  railscope compare tcp/ roce/ --a-again tcp-2/ tcp-3/ --b-again roce-2/ roce-3/
                                        several recordings of each: what differs by more than they do

job.toml has the options of 'railscope estimate' as keys.
"""


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope compare`."""
    parser.epilog = _EXAMPLE
    parser.add_argument("a", type=Path, metavar="A", help="a recorded dataset, or a file to import")
    parser.add_argument("b", type=Path, metavar="B", help="another one, or a TOML file of 'estimate'")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--leaf-map", type=Path, metavar="FILE", help="which leaf switch each server is at: CSV")
    for side in "ab":
        parser.add_argument(
            f"--{side}-again",
            nargs="+",
            type=Path,
            default=[],
            metavar="DIR|FILE",
            help=f"more recordings of {side.upper()}: differences are then compared with those between recordings",
        )
        parser.add_argument(
            "--iterations" if side == "a" else "--iterations-b",
            type=option_type(whole_number(1, 1_000_000_000)),
            metavar="N",
            help=f"how many iterations {side.upper()} holds (default: as found in it)",
        )


def run_compare(parsed: Any, out: TextIO) -> int:
    """Print the comparison of two recordings; returns 0, or 2 with one line on standard error."""
    try:
        from railscope.agent.analysis.compare.compare import compare_runs
        from railscope.agent.analysis.compare.estimate import UnlikeJobs, compare_with_estimate
        from railscope.agent.analysis.compare.figures import read_side
        from railscope.agent.analysis.compare.text import as_json_text, as_text
        from railscope.agent.analysis.tables.datasets_of import as_datasets
        from railscope.agent.analysis.tables.leaf_map import read_leaf_map
        from railscope.agent.dataset.reader import DatasetError
        from railscope.agent.estimate.answer import estimate_of
    except ModuleNotFoundError as error:
        return _refused(not_installed(error))
    try:
        # A file that describes a job is read first: a typing error in it is reported before a long recording is read.
        estimate = estimate_of(request_from(_as_estimate(parsed))) if parsed.b.suffix == ".toml" else None
        if estimate is not None and (parsed.a_again or parsed.b_again):
            return _refused("--a-again and --b-again take recordings: an estimate is compared with one recording")
        leaf_map = None if parsed.leaf_map is None else read_leaf_map(parsed.leaf_map)
        of_a, of_b = [parsed.a, *parsed.a_again], [] if estimate is not None else [parsed.b, *parsed.b_again]
        with as_datasets([*of_a, *of_b], apart=True) as folders:
            sides = [
                read_side(folder, str(path), iterations, leaf_map)
                for folder, path, iterations in zip(
                    folders,
                    [*of_a, *of_b],
                    [parsed.iterations] * len(of_a) + [parsed.iterations_b] * len(of_b),
                    strict=True,
                )
            ]
        if estimate is not None:
            compared = compare_with_estimate(sides[0], estimate, str(parsed.b))
        else:
            compared = compare_runs(sides[: len(of_a)], sides[len(of_a) :])
    except (ConfigError, DatasetError, ShapeError, UnlikeJobs) as error:
        return _refused(str(error))
    except ModuleNotFoundError as error:
        return _refused(not_installed(error))
    out.write(as_json_text(compared) if parsed.json else as_text(compared))
    return FINE


def _as_estimate(parsed: Any) -> argparse.Namespace:
    """As the options of `railscope estimate` would be."""
    return argparse.Namespace(file=parsed.b, json=parsed.json)


def _refused(reason: str) -> int:
    print(f"railscope compare: {reason}", file=sys.stderr)
    return COULD_NOT_RUN
