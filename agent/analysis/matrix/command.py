"""`railscope matrix`: which GPU sent how much to which, beside what the model expects of the job's shape.

Also what the model expects alone, before the job runs, and some iterations of a recording beside each other.

In the terminal, or as PNG, SVG or CSV; nothing of the analysis is loaded before the command runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from railscope.agent.analysis.tables.missing import not_installed
from railscope.agent.config.file import ConfigError
from railscope.agent.config.values import option_type, whole_number
from railscope.agent.estimate.options import add_shape_arguments, describes_a_job, request_from
from railscope.agent.model.shape import ShapeError

if TYPE_CHECKING:
    from railscope.agent.analysis.pictures.parts import Picture
    from railscope.agent.estimate.answer import Estimate

FINE: Final = 0
COULD_NOT_RUN: Final = 2
_ENDINGS: Final = (".png", ".svg", ".csv")
_EXAMPLE: Final = """\
examples:
  railscope matrix recording/                                   a heat map in the terminal
  railscope matrix node-1/ node-2/ -o matrix.svg                a picture of one job's servers
  railscope matrix recording/ --estimate job.toml -o both.png   beside the predicted one
  railscope matrix --predicted --estimate job.toml -o before.svg
                                                                the predicted one alone, before the job runs
  railscope matrix recording/ --iteration 3 4 -o beside.svg     two iterations, and how far they differ

FILE of --estimate is TOML with the options of 'railscope estimate' as keys; the options themselves may be given, too.
"""


def add_matrix_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope matrix`."""
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="DIR|FILE", help="recorded datasets, or files to import; read as one"
    )
    parser.add_argument(
        "-o", "--output", type=picture_file, metavar="FILE", help="write FILE.png, FILE.svg or FILE.csv"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--iterations",
        type=option_type(whole_number(1, 1_000_000_000)),
        metavar="N",
        help="how many iterations the recording holds (default: as found in it)",
    )
    parser.add_argument(
        "--iteration",
        nargs="+",
        type=option_type(whole_number(0, 1_000_000_000)),
        metavar="N",
        help="show these iterations beside each other, counted from 0, and how far they differ",
    )
    parser.add_argument(
        "--predicted",
        action="store_true",
        help="read no recording: show what the model expects of the job that --estimate or the options describe",
    )
    parser.add_argument(
        "--estimate", dest="file", type=Path, metavar="FILE", help="compare with the job that this TOML file describes"
    )
    add_shape_arguments(parser.add_argument_group("the job to compare with, as of 'railscope estimate'"))


def run_matrix(parsed: Any, out: TextIO) -> int:
    """Print or write the traffic matrix; returns 0, or 2 with one line on standard error."""
    if parsed.predicted:
        return _run_predicted(parsed, out)
    if not parsed.paths:
        return _refused("which recording?  Give its folder, or --predicted and the shape of a job")
    if parsed.iteration:
        return _run_iterations(parsed, out)
    try:
        from railscope.agent.analysis.matrix.matrix import make_matrix
        from railscope.agent.analysis.matrix.text import as_csv_text, as_picture, as_text, json_parts
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
            write_output(parsed.output, lambda: as_picture(matrix), lambda: as_csv_text(matrix))
    except (ConfigError, DatasetError, ShapeError) as error:
        return _refused(str(error))
    out.writelines(json_parts(matrix) if parsed.json else [as_text(matrix, maps=parsed.output is None)])
    if parsed.output is not None and not parsed.json:
        out.write(f"\nwrote {parsed.output}\n")
    return FINE


def _run_predicted(parsed: Any, out: TextIO) -> int:
    if parsed.paths or parsed.iteration:
        return _refused("--predicted reads no recording: leave its folder out, or leave out --predicted")
    try:
        from railscope.agent.estimate.answer import estimate_of
    except ModuleNotFoundError as error:
        return _refused(not_installed(error))
    try:
        return show_prediction(estimate_of(request_from(parsed)), parsed.output, out, as_json=parsed.json)
    except (ConfigError, ShapeError) as error:
        return _refused(str(error))


def show_prediction(estimate: Estimate, output: Path | None, out: TextIO, *, as_json: bool) -> int:
    """Print the predicted matrix, and write it where a file is named; returns 0.

    Raises:
        ConfigError: the file cannot be written, or what draws it is not installed.
    """
    from railscope.agent.analysis.matrix.predicted import (
        draw_prediction,
        format_prediction,
        prediction_as_csv,
        prediction_as_json,
    )

    if output is not None:
        write_output(output, lambda: draw_prediction(estimate), lambda: prediction_as_csv(estimate))
    out.write(prediction_as_json(estimate) if as_json else format_prediction(estimate, with_map=output is None))
    if output is not None and not as_json:
        out.write(f"\nwrote {output}\n")
    return FINE


def write_estimate_picture(estimate: Estimate, named: Path) -> Path:
    """Write the picture of `railscope estimate -o FILE`; returns where it is.

    Raises:
        ConfigError: the file cannot be written, has no ending of a picture, or what draws it is not installed.
    """
    try:
        from railscope.agent.analysis.matrix.predicted import draw_prediction, prediction_as_csv

        output = picture_file(str(named))
        write_output(output, lambda: draw_prediction(estimate), lambda: prediction_as_csv(estimate))
    except ModuleNotFoundError as error:
        raise ConfigError(not_installed(error)) from None
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None
    return output


def _run_iterations(parsed: Any, out: TextIO) -> int:
    if describes_a_job(parsed) or parsed.iterations is not None:
        return _refused("--iteration shows what was recorded: leave out --iterations and the shape of a job")
    try:
        from railscope.agent.analysis.matrix import iteration_maps
        from railscope.agent.analysis.tables.datasets_of import as_datasets
        from railscope.agent.dataset.reader import DatasetError
    except ModuleNotFoundError as error:
        return _refused(not_installed(error))
    try:
        with as_datasets(parsed.paths, apart=False) as folders:
            maps = iteration_maps.make_iteration_maps(folders, parsed.iteration)
        if parsed.output is not None:
            write_output(
                parsed.output,
                lambda: iteration_maps.draw_iteration_maps(maps),
                lambda: iteration_maps.iteration_maps_as_csv(maps),
            )
    except (ConfigError, DatasetError) as error:
        return _refused(str(error))
    if parsed.json:
        out.write(iteration_maps.iteration_maps_as_json(maps))
        return FINE
    out.write(iteration_maps.format_iteration_maps(maps, with_maps=parsed.output is None))
    if parsed.output is not None:
        out.write(f"\nwrote {parsed.output}\n")
    return FINE


def write_output(path: Path, draw: Callable[[], Picture], table: Callable[[], str]) -> None:
    """Write the picture or the table, as the file's name ends.

    Raises:
        ConfigError: the file cannot be written, or what draws it is not installed.
    """
    from railscope.agent.analysis.pictures.svg import svg_file

    match path.suffix:
        case ".csv":
            content = table().encode()
        case ".svg":
            content = svg_file(draw()).encode()
        case _:
            try:
                from railscope.agent.analysis.pictures.png import png_bytes
            except ModuleNotFoundError as error:
                raise ConfigError(f"{not_installed(error)}, or write SVG") from None
            content = png_bytes(draw())
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {error.strerror}") from None


def _refused(reason: str, command: str = "matrix") -> int:
    print(f"railscope {command}: {reason}", file=sys.stderr)
    return COULD_NOT_RUN


def picture_file(text: str) -> Path:
    """The type of an option that names the file to write.

    Raises:
        ArgumentTypeError: its name does not end as a picture or a table does.
    """
    path = Path(text)
    if path.suffix not in _ENDINGS:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(_ENDINGS)}")
    return path
