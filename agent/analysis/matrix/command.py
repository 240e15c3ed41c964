"""`railscope matrix`: which GPU sent how much to which, beside what the model expects of the job's shape.

In the terminal, or as PNG, SVG or CSV; nothing of the analysis is loaded before the command runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from railscope.agent.analysis.tables.missing import not_installed
from railscope.agent.config.file import ConfigError
from railscope.agent.config.values import option_type, whole_number
from railscope.agent.estimate.options import add_shape_arguments, describes_a_job, request_from
from railscope.agent.model.shape import ShapeError

if TYPE_CHECKING:
    from railscope.agent.analysis.matrix.matrix import Matrix

FINE: Final = 0
COULD_NOT_RUN: Final = 2
_ENDINGS: Final = (".png", ".svg", ".csv")
_EXAMPLE: Final = """\
examples:
  railscope matrix recording/                                   a heat map in the terminal
  railscope matrix node-1/ node-2/ -o matrix.svg                a picture of one job's servers
  railscope matrix recording/ --estimate job.toml -o both.png   beside the predicted one

FILE of --estimate is TOML with the options of 'railscope estimate' as keys; the options themselves may be given, too.
"""


def add_matrix_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope matrix`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="DIR|FILE", help="recorded datasets, or files to import; read as one"
    )
    parser.add_argument(
        "-o", "--output", type=_picture_file, metavar="FILE", help="write FILE.png, FILE.svg or FILE.csv"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--iterations",
        type=option_type(whole_number(1, 1_000_000_000)),
        metavar="N",
        help="how many iterations the recording holds (default: as found in it)",
    )
    parser.add_argument(
        "--estimate", dest="file", type=Path, metavar="FILE", help="compare with the job that this TOML file describes"
    )
    add_shape_arguments(parser.add_argument_group("the job to compare with, as of 'railscope estimate'"))


def run_matrix(parsed: Any, out: TextIO) -> int:
    """Print or write the traffic matrix; returns 0, or 2 with one line on standard error."""
    try:
        from railscope.agent.analysis.matrix.matrix import make_matrix
        from railscope.agent.analysis.matrix.text import as_text, json_parts
        from railscope.agent.analysis.tables.datasets_of import as_datasets
        from railscope.agent.dataset.reader import DatasetError
        from railscope.agent.estimate.answer import estimate_of
    except ModuleNotFoundError as error:
        return _refused(not_installed(error))
    try:
        estimate = estimate_of(request_from(parsed)) if describes_a_job(parsed) else None
        with as_datasets(parsed.paths, apart=False) as folders:
            matrix = make_matrix(folders, estimate, parsed.iterations)
        if parsed.output is not None:
            _write(matrix, parsed.output)
    except (ConfigError, DatasetError, ShapeError) as error:
        return _refused(str(error))
    out.writelines(json_parts(matrix) if parsed.json else [as_text(matrix, maps=parsed.output is None)])
    if parsed.output is not None and not parsed.json:
        out.write(f"\nwrote {parsed.output}\n")
    return FINE


def _write(matrix: Matrix, path: Path) -> None:
    """Write the picture or the table, as the file's name ends.

    Raises:
        ConfigError: the file cannot be written, or what draws it is not installed.
    """
    from railscope.agent.analysis.matrix.text import as_csv_text, as_picture
    from railscope.agent.analysis.pictures.svg import svg_file

    match path.suffix:
        case ".csv":
            content = as_csv_text(matrix).encode()
        case ".svg":
            content = svg_file(as_picture(matrix)).encode()
        case _:
            try:
                from railscope.agent.analysis.pictures.png import png_bytes
            except ModuleNotFoundError as error:
                raise ConfigError(f"{not_installed(error)}, or write SVG") from None
            content = png_bytes(as_picture(matrix))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {error.strerror}") from None


def _refused(reason: str) -> int:
    print(f"railscope matrix: {reason}", file=sys.stderr)
    return COULD_NOT_RUN


def _picture_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _ENDINGS:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(_ENDINGS)}")
    return path
