"""Some iterations' traffic beside each other, and how far they differ (paper B draws those of a mixture of experts).

How far two iterations differ is Σ|a − b| / Σ(a + b) over all pairs of GPUs: 0 where every pair sent the same, 1 where
no pair sent in both.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from railscope.agent.analysis.facts.options import DEFAULT_MEMORY_BYTES, DUCKDB
from railscope.agent.analysis.facts.quantities import format_bytes, format_seconds, format_share
from railscope.agent.analysis.facts.report import GpuFacts, Iteration, Traffic
from railscope.agent.analysis.matrix.compared_pairs import compared_pairs
from railscope.agent.analysis.matrix.text import format_losses, format_maps
from railscope.agent.analysis.pictures.heat import HeatMap, byte_limits, draw_heat_map, heat_map_of
from railscope.agent.analysis.pictures.parts import Picture, join_horizontally
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.engines import engine
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.tables.missing_calls import missing_calls_of
from railscope.agent.analysis.timing.iterations import called_ns, find_iterations
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.config.file import ConfigError
from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.text_tables import format_table
from railscope.probes.printable import printable_lines


@dataclass(frozen=True, slots=True)
class IterationTraffic:
    """What one iteration sent."""

    number: int
    """From 0."""
    iteration: Iteration
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two iterations differ."""

    one: int
    other: int
    """Their numbers."""
    ratio: float | None
    """Σ|a − b| / Σ(a + b); None: neither sent anything."""


@dataclass(frozen=True, slots=True)
class IterationMaps:
    """Everything that `railscope matrix --iteration` shows."""

    simulated: bool
    gpus: tuple[GpuFacts, ...]
    found: int
    """Iterations of the recording."""
    chosen: tuple[IterationTraffic, ...]
    differences: tuple[Difference, ...]
    """Of each two."""
    losses: tuple[str, ...] = ()
    """Calls that are missing in the recording, one sentence each."""


def make_iteration_maps(folders: Sequence[Path], numbers: Sequence[int]) -> IterationMaps:
    """The traffic of these iterations of the dataset in these folders, counted from 0.

    Raises:
        DatasetError: a folder is no dataset.
        ConfigError: it has no such iteration.
    """
    with engine(DUCKDB, DEFAULT_MEMORY_BYTES) as backend, open_dataset(folders, backend) as dataset:
        return iteration_maps_of(dataset, numbers)


def iteration_maps_of(dataset: Dataset, numbers: Sequence[int]) -> IterationMaps:
    """The traffic of iterations of an open dataset.

    Raises:
        ConfigError: it has no such iteration.
    """
    gpus = find_gpus(dataset)
    _, iterations, unknown = find_iterations(dataset, gpus)
    if not iterations:
        raise ConfigError(f"no iterations were found.  {' '.join(one.reason for one in unknown)}")
    if max(numbers) >= len(iterations):
        raise ConfigError(
            f"there is no iteration {max(numbers)}: {format_count(len(iterations), 'iteration')} were found, from 0 on"
        )
    chosen = []
    for number in dict.fromkeys(numbers):
        one = iterations[number]
        calls = dataset["calls"]
        moment = called_ns(calls)
        inside = calls.filter((moment >= one.from_ns) & (moment < one.to_ns))
        own = replace(dataset, tables={**dataset.tables, "calls": inside})
        chosen.append(IterationTraffic(number, one, find_traffic(own, gpus, count_calls(own))[0]))
    recordings = dataset.rows(dataset["recordings"].select("simulated").distinct())
    return IterationMaps(
        simulated=any(recordings["simulated"].to_pylist()),
        gpus=gpus.gpus,
        found=len(iterations),
        chosen=tuple(chosen),
        differences=tuple(_difference(one, other, len(gpus.gpus)) for one, other in combinations(chosen, 2)),
        losses=missing_calls_of(dataset),
    )


def _difference(one: IterationTraffic, other: IterationTraffic, gpus: int) -> Difference:
    sides = ((side.traffic.pairs.source, side.traffic.pairs.destination, side.traffic.pairs.wire_bytes)
             for side in (one, other))  # fmt: skip
    pairs = compared_pairs(gpus, *sides)
    total = pairs.observed_bytes + pairs.predicted_bytes
    return Difference(one.number, other.number, pairs.difference_bytes / total if total else None)


def draw_iteration_maps(maps: IterationMaps) -> Picture:
    """The iterations' heat maps from left to right, in the same colours."""
    heats = _heats(maps, 256)
    limits = byte_limits(heats)
    titles = [f"Iteration {one.number}" for one in maps.chosen]
    for place, difference in enumerate(maps.differences):
        if difference.one == maps.chosen[0].number and place + 1 < len(titles) and difference.ratio is not None:
            titles[place + 1] += f": differs by {format_share(difference.ratio)}"
    return join_horizontally([draw_heat_map(heat, title, limits) for heat, title in zip(heats, titles, strict=True)])


def format_iteration_maps(maps: IterationMaps, *, with_maps: bool = True) -> str:
    """The iterations for a terminal."""
    told = "simulated hardware: " if maps.simulated else ""
    lines = [
        f"{told}{format_count(len(maps.gpus), 'GPU')}, wire bytes from GPU (row) to GPU (column), by iteration "
        f"(0 to {maps.found - 1:,})",
        *format_losses(maps.losses),
        "",
    ]
    if with_maps:
        titles = [f"iteration {one.number}" for one in maps.chosen]
        lines += [*format_maps(list(zip(titles, _heats(maps, 36), strict=True))), ""]
    rows = [("iteration", "length", "wire bytes", "pairs")]
    rows += [
        (
            str(one.number),
            format_seconds(one.iteration.period_seconds),
            format_bytes(one.traffic.pairs.total_bytes),
            f"{len(one.traffic.pairs):,}",
        )
        for one in maps.chosen
    ]
    lines += format_table(rows, ">>>>")
    if maps.differences:
        cells = [("iteration", "and", "differ by")]
        cells += [(str(one.one), str(one.other), format_share(one.ratio)) for one in maps.differences]
        lines += ["", "Σ|a − b| / Σ(a + b) over pairs: 0 % where all pairs sent the same", *format_table(cells, ">>>")]
    return printable_lines("\n".join(lines) + "\n")


def iteration_maps_as_json(maps: IterationMaps) -> str:
    """One object: `iterations` with their pairs, `differences`, and `losses`."""
    content = {
        "simulated": maps.simulated,
        "found": maps.found,
        "iterations": [
            {
                "number": one.number,
                "start": one.iteration.start,
                "seconds": one.iteration.period_seconds,
                "matrix": [
                    {"source": pair.source, "destination": pair.destination, "wire_bytes": pair.wire_bytes}
                    for pair in one.traffic.pairs
                ],
            }
            for one in maps.chosen
        ],
        "differences": [{"one": one.one, "other": one.other, "ratio": one.ratio} for one in maps.differences],
        "losses": list(maps.losses),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def iteration_maps_as_csv(maps: IterationMaps) -> str:
    """A line for each pair, with its bytes in each iteration."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["source", "destination", *(f"wire_bytes_{one.number}" for one in maps.chosen)])
    columns = [{(pair.source, pair.destination): pair.wire_bytes for pair in one.traffic.pairs} for one in maps.chosen]
    for ends in sorted({ends for column in columns for ends in column}):
        writer.writerow([*ends, *(column.get(ends, 0) for column in columns)])
    return out.getvalue()


def _heats(maps: IterationMaps, most_cells: int) -> list[HeatMap]:
    servers = [gpu.server for gpu in maps.gpus]
    return [heat_map_of(one.traffic, servers, most_cells) for one in maps.chosen]
