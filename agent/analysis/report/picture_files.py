"""The pictures of a report by name: `railscope report --pictures FOLDER` writes each as an SVG file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from railscope.agent.analysis.facts.report import Report
from railscope.agent.analysis.pictures import pictures
from railscope.agent.analysis.pictures.heat import draw_heat_map, heat_map_of
from railscope.agent.analysis.pictures.parts import Picture
from railscope.agent.analysis.pictures.svg import svg_file
from railscope.agent.config.file import ConfigError


def draw_pairs(report: Report) -> Picture | None:
    """Picture: wire bytes from GPU to GPU."""
    traffic = report.matrix
    if not traffic.pairs:
        return None
    heat = heat_map_of(traffic, [gpu.server for gpu in report.gpus], numbers=[gpu.number for gpu in report.gpus])
    return draw_heat_map(heat, "Wire bytes from GPU to GPU")


PICTURES: Final[dict[str, Callable[[Report], Picture | None]]] = {
    "sizes": lambda report: pictures.size_cdf(report.sizes),
    "pairs": draw_pairs,
    "servers": lambda report: pictures.server_bars(report.matrix),
    "latency": lambda report: pictures.latency_ranges(report.latency.rows),
    "composition": lambda report: pictures.composition_bars(report.composition),
    "iterations": lambda report: pictures.iteration_strip(report.iterations),
    "parallelism-time": lambda report: pictures.role_time_bars(report.role_times),
    "all-to-all": lambda report: pictures.non_uniformity_lines(report.iterations),
    "all-to-all-bytes": lambda report: pictures.all_to_all_bytes(report.iterations),
    "bandwidth": lambda report: pictures.bandwidth_lines(report.bandwidth),
    "receives": lambda report: pictures.receive_bars(report.receives),
}
"""By the name of the file, without its ending; None: the recording has nothing to draw there."""


def write_pictures(report: Report, folder: Path) -> Iterator[Path]:
    """Write every picture that the report has into a folder, which is made; yields the files.

    Raises:
        ConfigError: a file cannot be written.
    """
    file = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in PICTURES.items():
            picture = draw(report)
            if picture is not None:
                file = folder / f"{name}.svg"
                file.write_text(svg_file(picture), encoding="utf-8")
                yield file
    except OSError as error:
        # A full disk is an error without a file's name.
        raise ConfigError(f"{file}: cannot write the picture: {error.strerror}") from None
