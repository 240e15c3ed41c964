"""The matrix for a terminal, as JSON, as CSV and as a picture.

In a terminal a pair is two characters wide and one line high, which is about square; the darker its shade, the more
bytes, by their logarithm.  Where there are more GPUs than fit 80 columns, a square is several of them, and it says so.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from railscope.agent.analysis.facts.quantities import UNKNOWN, format_bytes, format_share
from railscope.agent.analysis.matrix.compared_pairs import PairBytes
from railscope.agent.analysis.matrix.matrix import Comparison, Matrix
from railscope.agent.analysis.pictures.heat import (
    HeatMap,
    byte_limits,
    draw_heat_map,
    heat_levels,
    heat_map,
    heat_map_of,
)
from railscope.agent.analysis.pictures.parts import Picture, join_horizontally
from railscope.agent.analysis.report.report_json import column_parts
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.text_tables import format_table
from railscope.probes.printable import printable_lines

_COLUMNS: Final = 80
_MOST_CELLS: Final = 36
_MOST_ROWS: Final = 10
_SIDES: Final = {"observed": "observed_wire_bytes", "predicted": "predicted_wire_bytes"}
"""Keys of the JSON that say what the bytes are."""
_SHADES: Final = "·░▒▓█"


def as_text(matrix: Matrix, *, maps: bool = True) -> str:
    """The traffic matrix for people: heat maps if wanted, sums, and the differences; at most 80 columns wide."""
    told = "simulated hardware: " if matrix.simulated else ""
    lines = [f"{told}{format_count(len(matrix.gpus), 'GPU')}, wire bytes from GPU (row) to GPU (column)"]
    lines += [*format_losses(matrix.losses), ""]
    if maps:
        lines += [*_maps(matrix), ""]
    lines += _pattern(matrix)
    if matrix.comparison is not None:
        lines += ["", *_differences(matrix.comparison)]
    for note in matrix.notes:
        lines += textwrap.wrap(note, _COLUMNS - 2, initial_indent="- ", subsequent_indent="  ")
    return printable_lines("\n".join(lines) + "\n")


def format_losses(losses: Sequence[str]) -> list[str]:
    """What is missing in the recording, as lines below the first one."""
    return [line for loss in losses for line in textwrap.wrap(loss, _COLUMNS, break_on_hyphens=False)]


def json_parts(matrix: Matrix) -> Iterator[str]:
    """One object, part by part: `gpus`, `matrix` (pairs that talked), sums of it, `comparison` (with its own `pairs`),
    `notes` and `losses`."""
    before: dict[str, Any] = {
        "folders": list(matrix.folders),
        "simulated": matrix.simulated,
        "gpus": [
            {"number": gpu.number, "server": gpu.server, "gpu": gpu.gpu, "world_rank": gpu.world_rank}
            for gpu in matrix.gpus
        ],
    }
    after: dict[str, Any] = {
        "sparsity": matrix.traffic.sparsity,
        "between_servers_wire_bytes": matrix.traffic.between_servers_wire_bytes,
        "basis": matrix.traffic.basis,
    }
    comparison = matrix.comparison
    yield f'{_open(before)},\n  "matrix": '
    yield from column_parts(matrix.traffic.pairs, indent=2)
    yield f',{_open(after)[1:]},\n  "comparison": '
    if comparison is None:
        yield "null"
    else:
        # One level deeper.
        yield _open(_comparison(comparison)).replace("\n", "\n  ") + ',\n    "pairs": '
        yield from column_parts(comparison.pairs, indent=4, names=_SIDES)
        yield "\n  }"
    yield f",{_open({'notes': list(matrix.notes), 'losses': list(matrix.losses)})[1:]}\n}}\n"


def _open(content: Mapping[str, Any]) -> str:
    """An object whose end is still to come."""
    return json.dumps(content, indent=2, ensure_ascii=False).removesuffix("\n}")


def as_csv_text(matrix: Matrix) -> str:
    """The traffic matrix as CSV: a line for each pair with bytes, observed or predicted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header = ["source", "destination", "source_server", "destination_server", "wire_bytes"]
    servers = matrix.servers
    if matrix.comparison is None:
        writer.writerow(header)
        for pair in matrix.traffic.pairs:
            ends = (pair.source, pair.destination)
            writer.writerow([*ends, *(servers[end] for end in ends), pair.wire_bytes])
    else:
        writer.writerow([*header, "predicted_wire_bytes"])
        for row in matrix.comparison.pairs:
            ends = (row.source, row.destination)
            writer.writerow([*ends, *(servers[end] for end in ends), row.observed, row.predicted])
    return out.getvalue()


def as_picture(matrix: Matrix) -> Picture:
    """The traffic matrix as a heat map, and the predicted one beside it in the same colours."""
    observed, predicted = _heats(matrix, 256)
    simulated = " (simulated hardware)" if matrix.simulated else ""
    if predicted is None or matrix.comparison is None:
        return draw_heat_map(observed, f"Wire bytes from GPU to GPU{simulated}")
    limits = byte_limits([observed, predicted])
    number = matrix.comparison.iterations
    of = "one iteration" if number is None else format_count(number, "iteration")
    return join_horizontally(
        [
            draw_heat_map(observed, f"Observed{simulated}", limits),
            draw_heat_map(predicted, f"Predicted, {of}", limits),
        ]
    )


def _heats(matrix: Matrix, most_cells: int) -> tuple[HeatMap, HeatMap | None]:
    observed = heat_map_of(matrix.traffic, matrix.servers, most_cells)
    if matrix.comparison is None:
        return observed, None
    pairs = matrix.comparison.pairs
    gpus = matrix.traffic.gpus
    return observed, heat_map(gpus, pairs.source, pairs.destination, pairs.predicted, matrix.servers, most_cells)


def _maps(matrix: Matrix) -> list[str]:
    observed, predicted = _heats(matrix, _MOST_CELLS)
    return format_maps([("observed", observed), *([("predicted", predicted)] if predicted is not None else [])])


def format_maps(titled: Sequence[tuple[str, HeatMap]]) -> list[str]:
    """Heat maps below each other in the same shades, as lines for a terminal of 80 columns."""
    heats = [heat for _, heat in titled]
    low, high = byte_limits(heats)
    if not any(heat.bytes.any() for heat in heats):
        return ["no pair communicated"]
    lines: list[str] = []
    for title, heat in titled:
        lines += [*_map(title, heat, low, high), ""]
    lines += _key(low, high)
    return [*lines, f"  {heats[0].note}"] if heats[0].note else lines


def _map(title: str, heat: HeatMap, low: int, high: int) -> list[str]:
    levels = heat_levels(heat.bytes, low, high, len(_SHADES))
    each = heat.gpus_a_cell
    every = 4 if heat.side > 4 else 1
    head = "".join(f"{cell * each:<{2 * every}}" for cell in range(0, heat.side, every))
    lines = [title, f"       {head}".rstrip()]
    for row in range(heat.side):
        shades = "".join(" " * 2 if level < 0 else _SHADES[level] * 2 for level in levels[row].tolist())
        lines.append(f"{row * each:>5} │{shades}│")
    return lines


def _key(low: int, high: int) -> list[str]:
    """From how many bytes on each shade is."""
    if high <= low:
        return [f"  {_SHADES[-1] * 2} {format_bytes(high)}"]
    steps = [low * (high / low) ** (level / len(_SHADES)) for level in range(len(_SHADES))]
    return ["  " + "  ".join(f"{shade * 2} {format_bytes(step)}" for shade, step in zip(_SHADES, steps, strict=True))
            + f"  up to {format_bytes(high)}"]  # fmt: skip


def _pattern(matrix: Matrix) -> list[str]:
    traffic = matrix.traffic
    total = traffic.pairs.total_bytes
    possible = traffic.gpus * (traffic.gpus - 1)
    lines = [f"pairs that talk: {len(traffic.pairs):,} of {possible:,} ({format_share(traffic.sparsity)})"]
    if total:
        leaving = traffic.between_servers_wire_bytes
        lines.append(
            f"wire bytes: {format_bytes(total)}, between servers {format_bytes(leaving)} "
            f"({format_share(leaving / total)})"
        )
    return lines + textwrap.wrap(traffic.basis, _COLUMNS)


def _differences(comparison: Comparison) -> list[str]:
    number = comparison.iterations
    only_seen, only_predicted = comparison.only_observed, comparison.only_predicted
    both = len(comparison.pairs) - len(only_seen) - len(only_predicted)
    of = "one iteration" if number is None else format_count(number, "iteration")
    rows = [
        ("pairs in both", f"{both:,}"),
        ("pairs only observed", f"{len(only_seen):,}"),
        ("pairs only predicted", f"{len(only_predicted):,}"),
    ]
    if number is not None:
        rows += [
            ("observed", _both(comparison.pairs.observed_bytes)),
            ("predicted", _both(comparison.pairs.predicted_bytes)),
            ("accuracy of all bytes", _accuracy(comparison.accuracy)),
            ("accuracy by pairs", _accuracy(comparison.pair_accuracy)),
        ]
    lines = [f"Against the prediction of {of}", *format_table(rows, "<<")]
    shown = comparison.different if number is not None else [*only_seen[:_MOST_ROWS], *only_predicted[:_MOST_ROWS]]
    count = len(shown) if number is not None else len(only_seen) + len(only_predicted)
    if not count:
        return [*lines, "  every pair is as predicted" + ("" if number is None else ", to the byte")]
    title = "Largest differences" if number is not None else "Pairs on one side only"
    cells = [("from", "to", "observed", "predicted", "difference"), *(_row(pair) for pair in shown[:_MOST_ROWS])]
    more = [f"  … and {count - _MOST_ROWS:,} more: see --json"] if count > _MOST_ROWS else []
    return [*lines, "", title, *format_table(cells, ">>>>>"), *more]


def _both(count: int) -> str:
    return f"{format_bytes(count)} = {count:,} B"


def _row(pair: PairBytes) -> tuple[str, ...]:
    more = pair.observed - pair.predicted
    sign = "+" if more > 0 else "−"
    return (
        str(pair.source),
        str(pair.destination),
        format_bytes(pair.observed) if pair.observed else UNKNOWN,
        format_bytes(pair.predicted) if pair.predicted else UNKNOWN,
        f"{sign}{format_bytes(abs(more))}",
    )


def _accuracy(value: float | None) -> str:
    """`100 %` only where it is exactly that."""
    if value is None:
        return UNKNOWN
    return "100 %" if value == 1 else f"{100 * value:.2f} %" if value < 0.9999 else "above 99.99 %"


def _comparison(comparison: Comparison) -> dict[str, Any]:
    number = comparison.iterations
    return {
        "iterations": number,
        "observed_wire_bytes": comparison.pairs.observed_bytes,
        "predicted_wire_bytes": comparison.pairs.predicted_bytes,
        "accuracy": comparison.accuracy,
        "pair_accuracy": comparison.pair_accuracy,
        "only_observed": len(comparison.only_observed),
        "only_predicted": len(comparison.only_predicted),
    }
