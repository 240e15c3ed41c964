"""`railscope compare`: two recordings, or a recording against an estimate, figure by figure.

Nothing of the analysis is loaded before the command runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final, TextIO

from agent.analysis.missing import not_installed
from agent.config_file import ConfigError
from agent.config_values import whole_number
from agent.estimate_options import request_from
from agent.model.shape import ShapeError

FINE: Final = 0
COULD_NOT_RUN: Final = 2
_EXAMPLE: Final = """\
examples:
  railscope compare tcp/ roce/          the same job twice: what differs, and whether by chance
  railscope compare recording/ job.toml how well the model predicts it

job.toml has the options of 'railscope estimate' as keys.
"""


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope compare`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    parser.add_argument("a", type=Path, metavar="A", help="a recorded dataset, or a file to import")
    parser.add_argument("b", type=Path, metavar="B", help="another one, or a TOML file of 'estimate'")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    for side in "ab":
        parser.add_argument(
            "--iterations" if side == "a" else "--iterations-b",
            type=_iterations,
            metavar="N",
            help=f"how many iterations {side.upper()} holds (default: as found in it)",
        )


def run_compare(parsed: Any, out: TextIO) -> int:
    """Print the comparison; returns 0, or 2 with one line on standard error."""
    try:
        from agent.analysis.compare import read_side
        from agent.analysis.compare_estimate import compare_with_estimate
        from agent.analysis.compare_figures import compare_sides
        from agent.analysis.compare_text import as_json_text, as_text
        from agent.analysis.datasets_of import as_datasets
        from agent.dataset.reader import DatasetError
        from agent.estimate_answer import estimate_of
    except ModuleNotFoundError as error:
        return _refused(not_installed(error))
    try:
        # A file that describes a job is read first: a typing error in it is told before a long recording is read.
        estimate = estimate_of(request_from(_as_estimate(parsed))) if parsed.b.suffix == ".toml" else None
        recorded = [parsed.a] if estimate is not None else [parsed.a, parsed.b]
        with as_datasets(recorded, apart=True) as folders:
            a = read_side(folders[0], str(parsed.a), parsed.iterations)
            if estimate is not None:
                compared = compare_with_estimate(a, estimate, str(parsed.b))
            else:
                compared = compare_sides(a, read_side(folders[1], str(parsed.b), parsed.iterations_b))
    except (ConfigError, DatasetError, ShapeError) as error:
        return _refused(str(error))
    out.write(as_json_text(compared) if parsed.json else as_text(compared))
    return FINE


def _as_estimate(parsed: Any) -> argparse.Namespace:
    """As the options of `railscope estimate` would be."""
    return argparse.Namespace(file=parsed.b, json=parsed.json)


def _refused(reason: str) -> int:
    print(f"railscope compare: {reason}", file=sys.stderr)
    return COULD_NOT_RUN


def _iterations(text: str) -> int:
    try:
        return whole_number(1, 1_000_000_000)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
