"""The charts of a report: each function draws one part of it, or returns None if that part is empty.

Pictures are lists of boxes, lines and words of our own (picture_parts), because one description then gives SVG whose
text can be searched and whose colours follow the reader's theme, and PNG; a plotting library would bring tens of
megabytes and half a second to every report, and SVG without either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts import quantities
from railscope.agent.analysis.facts.fact_columns import Sizes
from railscope.agent.analysis.facts.report import (
    BandwidthRow,
    Composition,
    Iteration,
    LatencyRow,
    ReceiveUse,
    RoleTime,
    Traffic,
)
from railscope.agent.analysis.pictures.axes import (
    Axis,
    Scale,
    draw_horizontal_axis,
    draw_vertical_axis,
    enclosing_powers,
    linear_ticks,
    log_ticks,
    time_ticks,
)
from railscope.agent.analysis.pictures.charts import WIDTH, Bar, Piece, Series, line_chart, stacked_bars
from railscope.agent.analysis.pictures.parts import SERIES, Box, Line, Part, Picture, Words, text_width
from railscope.agent.analysis.traffic.sizes import cumulative_shares
from railscope.agent.facts.counted import format_count

_MOST_POINTS: Final = 360
"""Columns of a picture over time; more iterations are put together."""
_MOST_BARS: Final = 32
_MANY_ALIKE: Final = 5
"""So many bars that look equal are one."""
_SEEN_APART: Final = 100
"""Parts of the longest bar of which one can be seen."""
_MOST_NAMES: Final = 16
_MOST_LATENCIES: Final = 24
T = TypeVar("T")
N = TypeVar("N", int, float)
ROLE_NAMES: Final = {
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "embedding": "embedding sync",
    "ep": "expert parallel",
    "world": "whole job",
    "unknown": "not known",
}


def size_cdf(sizes: Sizes) -> Picture | None:
    """Picture: which part of an operation's calls is at most so large (transfer sizes)."""
    by_op = {op: sizes.sizes_of_op(number) for number, op in enumerate(sizes.op_names)}
    by_op = {op: found for op, found in by_op.items() if len(found[0])}
    if not by_op:
        return None
    ops = _most_frequent({op: int(calls.sum()) for op, (_, calls) in by_op.items()})
    ends = [float(max(size, 1)) for op in ops for size in (by_op[op][0][0], by_op[op][0][-1])]
    low, high = enclosing_powers(ends, 2.0)
    low, high = low / 2, high * 2
    # Send and Recv of a pipeline have one line, and the one drawn first would lie behind the other.
    alike: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for op in ops:
        points, last = [(low, 0.0)], 0.0
        for size, part in _cumulative(*by_op[op]):
            points += [(float(max(size, 1)), last), (float(max(size, 1)), part)]
            last = part
        points.append((high, 1.0))
        alike.setdefault(tuple(points), []).append(f"{_short(op)} ({format_count(int(by_op[op][1].sum()), 'call')})")
    series = [Series(" and ".join(names), f"series{place}", line) for place, (line, names) in enumerate(alike.items())]
    left_out = len(by_op) - len(ops)
    title = "Calls by size, cumulative" + (
        f" (without {format_count(left_out, 'rarer operation')})" if left_out else ""
    )
    return line_chart(
        title, series, _size_axis(low, high, "payload of a call"), _share_axis("calls of at most this size")
    )


def iteration_strip(iterations: Sequence[Iteration]) -> Picture | None:
    """Picture: over time, how long each iteration took and, where known, its communication and non-overlapped ratio."""
    if not iterations:
        return None
    groups = _grouped(iterations)
    begin, end = iterations[0].start, max(one.start + one.period_seconds for one in iterations)
    longest = max(one.period_seconds for one in iterations) or 1e-9
    knows_communication = any(one.comm_seconds is not None for one in iterations)
    knows_overlap = any(one.non_overlapped_seconds is not None for one in iterations)
    top, height, left = 74.0, 180.0, 64.0
    x = Scale(begin, end, left, WIDTH - 24)
    y = Scale(0.0, longest, top + height, top)
    title = "Iterations over time"
    if len(groups) < len(iterations):
        title += f" (each column: the mean of up to {len(groups[0])} iterations)"
    parts: list[Part] = [Words(0, 14, title, bold=True, points=13)]
    entries = [("series5", "communication, not overlapped"), ("series4", "communication while computing")]
    entries = entries if knows_overlap else [("series4", "communication")]
    # A legend of communication without any in the columns would read as: there was none.
    entries = [*entries, ("grid", "the rest")] if knows_communication else [("grid", "length of an iteration")]
    x_at = 0.0
    for paint, words in entries:
        parts += [Box(x_at, 28, 11, 11, paint), Words(x_at + 16, 38, words)]
        x_at += 34 + text_width(words)
    parts += _time_axes(x, y, begin, top, top + height)
    for group in groups:
        parts += _column(group, x, y)
    return Picture(WIDTH, top + height + 40, title, tuple(parts))


def composition_bars(composition: Composition) -> Picture | None:
    """Picture: which parallelism makes which part of the calls and of the payload (composition)."""
    roles = [role for role in composition.roles if role.calls]
    if not roles:
        return None
    paints = {role.role: f"series{place % SERIES}" for place, role in enumerate(roles)}
    bars = []
    quantities_of: tuple[tuple[str, Callable[[int], str], list[int]], ...] = (
        ("payload", quantities.format_bytes, [role.payload_bytes for role in roles]),
        ("calls", quantities.format_integer, [role.calls for role in roles]),
    )
    for label, shown, values in quantities_of:
        total = sum(values)
        pieces = [
            Piece(
                paints[role.role],
                value / total if total else 0.0,
                quantities.format_share(value / total if total else 0.0),
                f"{ROLE_NAMES.get(role.role, role.role)}: {shown(value)}",
            )
            for role, value in zip(roles, values, strict=True)
        ]
        bars.append(Bar(label, tuple(pieces), shown(total)))
    entries = [(paints[role.role], _short(ROLE_NAMES.get(role.role, role.role))) for role in roles]
    return stacked_bars("Who sends: parts of payload and of calls", bars, entries, whole=1.0)


def server_bars(traffic: Traffic) -> Picture | None:
    """Picture: what left each server (traffic between servers, rails and leaves)."""
    servers = traffic.server_transmit_wire_bytes
    if len(servers) < 2:
        return None
    most = max(count for _, count in servers) or 1
    folded = _folded(servers, lambda row: (row[1] / most,))
    shown = sorted(folded, key=lambda rows: -rows[0][1])[:_MOST_BARS] if len(folded) > _MOST_BARS else folded
    bars = []
    for rows in shown:
        label, each = _label([name for name, _ in rows], "servers")
        counts = [count for _, count in rows]
        words = quantities.format_bytes(sum(counts) // len(rows)) + each
        told = _range(min(counts), max(counts), quantities.format_bytes, [name for name, _ in rows])
        bars.append(Bar(label, (Piece("series0", sum(counts) / len(rows), "", told),), words))
    title = "Wire bytes that left each server"
    return stacked_bars(title if len(shown) == len(folded) else f"{title}: the {_MOST_BARS} busiest", bars, ())


def latency_ranges(rows: Sequence[LatencyRow]) -> Picture | None:
    """Picture: median, 90th and 99th percentile and longest by operation and size (latency)."""
    usable = [row for row in rows if row.max_seconds > 0]
    if not usable:
        return None
    shown = sorted(usable, key=lambda row: (-row.count, row.op, row.payload_bytes or 0, row.source))[:_MOST_LATENCIES]
    shown.sort(key=lambda row: (row.op, row.payload_bytes or 0, row.source))
    title = "How long operations take"
    if len(shown) < len(usable):
        title += f": the {len(shown)} most frequent of {len(usable)} operations and sizes"
    low, high = enclosing_powers(
        [max(value, 1e-9) for row in shown for value in (row.p50_seconds, row.max_seconds)], 10.0
    )
    labels = [
        f"{_short(row.op)}, {quantities.format_size_class(row.payload_bytes, row.over_bytes)} ({_short(row.source)})"
        for row in shown
    ]
    left = max(text_width(label) for label in labels) + 12
    top = 56.0
    bottom = top + 22 * len(shown) + 6
    scale = Scale(low, high, left, WIDTH - 24, logarithmic=True)
    parts: list[Part] = [Words(0, 14, title, bold=True, points=13)]
    x_at = 0.0
    for paint, words in (("series0", "median"), ("series5", "90 %"), ("series4", "to 99 %"), ("muted", "longest")):
        parts += [Box(x_at, 28, 11, 11, paint), Words(x_at + 16, 38, words)]
        x_at += 34 + text_width(words)
    parts += draw_horizontal_axis(
        Axis(scale, log_ticks(low, high, 10.0), quantities.format_seconds, "begin to completion"), top, bottom
    )
    for place, (row, label) in enumerate(zip(shown, labels, strict=True)):
        y = top + 8 + 22 * place
        p50, p90, p99, longest = (
            scale.pixel_of(value) for value in (row.p50_seconds, row.p90_seconds, row.p99_seconds, row.max_seconds)
        )
        words = (
            f"{label}: {format_count(row.count, 'operation')}, median {quantities.format_seconds(row.p50_seconds)}, 90 "
            "% within "
            f"{quantities.format_seconds(row.p90_seconds)}, 99 % within {quantities.format_seconds(row.p99_seconds)}, "
            "longest "
            f"{quantities.format_seconds(row.max_seconds)}"
        )
        parts += [
            Words(left - 8, y + 9, label, "end"),
            Line(((p50, y + 5), (longest, y + 5)), "muted", 1.0),
            Line(((longest, y), (longest, y + 10)), "muted", 1.5),
            Box(p50, y + 1, max(p99 - p50, 1.0), 8, "series4", words),
            Box(p90 - 1, y + 1, 2, 8, "series5", words),
            Box(p50 - 3, y, 6, 10, "series0", words),
        ]
    return Picture(WIDTH, bottom + 40, title, tuple(parts))


def bandwidth_lines(rows: Sequence[BandwidthRow]) -> Picture | None:
    """Picture: bus bandwidth by size (bandwidth utilisation)."""
    by_op: defaultdict[str, list[BandwidthRow]] = defaultdict(list)
    for row in rows:
        by_op[row.op].append(row)
    if not by_op:
        return None
    ops = _most_frequent({op: sum(row.count for row in found) for op, found in by_op.items()})
    low, high = enclosing_powers([float(max(row.payload_bytes, 1)) for op in ops for row in by_op[op]], 2.0)
    fastest = max(row.busbw_bytes_per_second for op in ops for row in by_op[op]) or 1.0
    series = []
    for place, op in enumerate(ops):
        found = sorted(by_op[op], key=lambda row: row.payload_bytes)
        series.append(
            Series(
                _short(op),
                f"series{place}",
                tuple((float(max(row.payload_bytes, 1)), row.busbw_bytes_per_second) for row in found),
                marked=len(found) <= 64,
                titles=tuple(
                    f"{op}, {quantities.format_size_class(row.payload_bytes, row.over_bytes)}: "
                    f"{quantities.format_rate(row.busbw_bytes_per_second)}, "
                    f"{quantities.format_share(row.utilisation)} of the link"
                    for row in found
                )
                if len(found) <= 64
                else (),
            )
        )
    y = Axis(Scale(0.0, fastest, 0, 0), linear_ticks(0.0, fastest), quantities.format_rate, "bus bandwidth, median")
    return line_chart("Bandwidth by size", series, _size_axis(low, high, "payload of an operation"), y)


def non_uniformity_lines(iterations: Sequence[Iteration]) -> Picture | None:
    """Picture: how unequal the pairs of each iteration's all-to-all are (all-to-all non-uniformity)."""
    points = [(number, one.all_to_all.relative) for number, one in enumerate(iterations) if one.all_to_all is not None]
    if not points:
        return None
    every = -(-len(points) // _MOST_POINTS)
    most = max(value for _, value in points) or 1.0
    means = [
        (float(points[first][0]), float(np.mean([value for _, value in points[first : first + every]])))
        for first in range(0, len(points), every)
    ]
    last = float(max(points[-1][0], 1))
    title = "All-to-all: (max − min) / mean of pairs' bytes"
    return line_chart(
        title if every == 1 else f"{title} (each point: the mean of up to {every} iterations)",
        [Series("(max − min) / mean", "series0", tuple(means))],
        Axis(Scale(0.0, last, 0, 0), _whole_ticks(last), quantities.format_integer, "iteration"),
        Axis(Scale(0.0, most, 0, 0), linear_ticks(0.0, most), quantities.format_digits, "(max − min) / mean"),
        180.0,
    )


def all_to_all_bytes(iterations: Sequence[Iteration]) -> Picture | None:
    """Picture: over iterations, all bytes of their all-to-alls, and how far the largest pair is from the smallest."""
    known = [(number, one.all_to_all) for number, one in enumerate(iterations) if one.all_to_all is not None]
    if not known:
        return None
    every = -(-len(known) // _MOST_POINTS)
    groups = [known[first : first + every] for first in range(0, len(known), every)]
    lines = [
        ("all pairs together", [float(np.mean([found.total_bytes for _, found in group])) for group in groups]),
        ("max − min of pairs", [float(np.mean([found.max_minus_min_bytes for _, found in group])) for group in groups]),
    ]
    numbers = [float(group[0][0]) for group in groups]
    most = max(max(values) for _, values in lines) or 1.0
    last = float(max(known[-1][0], 1))
    title = "All-to-all: bytes of an iteration"
    return line_chart(
        title if every == 1 else f"{title} (each point: the mean of up to {every} iterations)",
        [
            Series(name, f"series{place}", tuple(zip(numbers, values, strict=True)))
            for place, (name, values) in enumerate(lines)
        ],
        Axis(Scale(0.0, last, 0, 0), _whole_ticks(last), quantities.format_integer, "iteration"),
        Axis(Scale(0.0, most, 0, 0), _byte_ticks(most), _format_whole_bytes, "wire bytes"),
        180.0,
    )


def role_time_bars(role_times: Sequence[RoleTime]) -> Picture | None:
    """Picture: how long a GPU communicates in an iteration for each kind of parallelism, overlapped and not."""
    if not role_times:
        return None
    knows_overlap = role_times[0].non_overlapped_seconds is not None
    bars = []
    for one in role_times:
        alone = one.non_overlapped_seconds or 0.0
        pieces = [
            Piece("series5", alone, "", f"not overlapped: {quantities.format_seconds(alone)}"),
            Piece("series4", one.seconds - alone, "", quantities.format_seconds(one.seconds - alone)),
        ]
        total = f"{quantities.format_seconds(one.seconds)}, {quantities.format_share(one.ratio)} of an iteration"
        bars.append(Bar(ROLE_NAMES.get(one.role, one.role), tuple(pieces), total))
    entries = [("series4", "communication")]
    if knows_overlap:
        entries = [("series5", "communication, not overlapped"), ("series4", "communication while computing")]
    return stacked_bars(f"Communication of GPU {role_times[0].gpu} in an iteration, by parallelism", bars, entries)


def receive_bars(receives: Sequence[ReceiveUse]) -> Picture | None:
    """Picture: what receives did, by GPU (receives)."""
    if not receives:
        return None
    longest = max(use.active_seconds + use.idle_seconds for use in receives) or 1.0
    in_order = sorted(receives, key=lambda use: use.gpu)
    folded = _folded(in_order, lambda use: (use.active_seconds / longest, use.idle_seconds / longest))
    shown = folded
    if len(folded) > _MOST_BARS:
        shown = sorted(folded, key=lambda uses: -(uses[0].active_seconds + uses[0].idle_seconds))[:_MOST_BARS]
        shown.sort(key=lambda uses: uses[0].gpu)
    bars = []
    for uses in shown:
        names = [f"GPU {use.gpu}" for use in uses]
        label, each = _label(names, "GPUs")
        active, idle = [use.active_seconds for use in uses], [use.idle_seconds for use in uses]
        pieces = tuple(
            Piece(
                paint,
                sum(seconds) / len(uses),
                "",
                f"{what}: {_range(min(seconds), max(seconds), quantities.format_seconds, names)}",
            )
            for paint, what, seconds in (("series2", "transfers", active), ("series1", "waits", idle))
        )
        bars.append(Bar(label, pieces, quantities.format_seconds(sum(active + idle) / len(uses)) + each))
    title = "Receives: transfer and waiting"
    if len(shown) < len(folded):
        title += f", of the {_MOST_BARS} GPUs that receive longest"
    return stacked_bars(title, bars, [("series2", "transfers"), ("series1", "waits for the sender")])


def _byte_ticks(most: float) -> tuple[float, ...]:
    """Round numbers of the unit in which the largest is shown."""
    unit = 1024.0 ** max(0, int(math.log2(max(most, 1.0)) // 10))
    return tuple(tick * unit for tick in linear_ticks(0.0, most / unit))


def _format_whole_bytes(count: float) -> str:
    return quantities.format_bytes(round(count))


def _folded(rows: Sequence[T], shape: Callable[[T], tuple[float, ...]]) -> list[list[T]]:
    """Rows whose bars look equal, together, where they are many; the others alone.

    Args:
        rows: in their order, which is kept; those that look equal stand where the first of them did.
        shape: lengths of a row's pieces, as shares of the longest bar.
    """
    alike: defaultdict[tuple[int, ...], list[T]] = defaultdict(list)
    for row in rows:
        alike[tuple(round(_SEEN_APART * part) for part in shape(row))].append(row)
    folded: list[list[T]] = []
    for row in rows:
        equal = alike[tuple(round(_SEEN_APART * part) for part in shape(row))]
        if len(equal) < _MANY_ALIKE:
            folded.append([row])
        elif equal[0] is row:
            folded.append(equal)
    return folded


def _label(names: Sequence[str], of: str) -> tuple[str, str]:
    """What a bar is called, and what follows its value."""
    return (names[0], "") if len(names) == 1 else (f"{len(names)} {of} alike", " each")


def _range(least: N, most: N, shown: Callable[[N], str], names: Sequence[str]) -> str:
    """What is told of a bar: the value, or the range of values of those that it stands for, and their names."""
    if len(names) == 1:
        return shown(most)
    values = shown(most) if shown(least) == shown(most) else f"{shown(least)} to {shown(most)}"
    return f"{values}: {', '.join(names[:_MOST_NAMES])}" + (" and others" if len(names) > _MOST_NAMES else "")


def _short(name: str) -> str:
    """Of an operation, a source or a role: only imported data has names that do not fit."""
    return quantities.shorten(name, 18)


def _most_frequent(calls: dict[str, int]) -> list[str]:
    """As many operations as there are colours, the most frequent first."""
    return sorted(calls, key=lambda op: (-calls[op], op))[:SERIES]


def _cumulative(sizes: NDArray[np.int64], calls: NDArray[np.int64]) -> list[tuple[int, float]]:
    """Size and the part of calls up to it; of sizes that would lie on one pixel only the last."""
    columns = np.floor(np.log2(np.maximum(sizes, 1)) * 16)
    last = np.append(np.diff(columns) > 0, True)
    return list(zip(sizes[last].tolist(), cumulative_shares(calls)[last].tolist(), strict=True))


def _size_axis(low: float, high: float, title: str) -> Axis:
    return Axis(Scale(low, high, 0, 0, logarithmic=True), log_ticks(low, high, 2.0), quantities.format_bytes, title)


def _share_axis(title: str) -> Axis:
    return Axis(Scale(0.0, 1.0, 0, 0), (0.0, 0.25, 0.5, 0.75, 1.0), quantities.format_share, title)


def _whole_ticks(last: float) -> tuple[float, ...]:
    return tuple(sorted({float(round(tick)) for tick in linear_ticks(0.0, last)}))


def _grouped(iterations: Sequence[Iteration]) -> list[Sequence[Iteration]]:
    every = -(-len(iterations) // _MOST_POINTS)
    return [iterations[first : first + every] for first in range(0, len(iterations), every)]


def _column(group: Sequence[Iteration], x: Scale, y: Scale) -> list[Part]:
    """The group's mean iteration: a box each for communication alone, other communication, and the rest."""
    left = x.pixel_of(group[0].start)
    right = x.pixel_of(group[-1].start + group[-1].period_seconds)
    period = float(np.mean([one.period_seconds for one in group]))
    comm = _mean([one.comm_seconds for one in group])
    alone = _mean([one.non_overlapped_seconds for one in group])
    words = f"{quantities.format_time(group[0].start)}: {quantities.format_seconds(period)}"
    if comm is not None:
        words += f", of it communication {quantities.format_seconds(comm)}"
    if alone is not None:
        words += f", not overlapped {quantities.format_seconds(alone)}"
    gap = 1.0 if right - left > 4 else 0.0
    steps = [(0.0, alone or 0.0, "series5"), (alone or 0.0, comm or 0.0, "series4"), (comm or 0.0, period, "grid")]
    return [
        Box(left, y.pixel_of(high), max(right - left - gap, 0.5), y.pixel_of(low) - y.pixel_of(high), paint, words)
        for low, high, paint in steps
        if high > low
    ]


def _time_axes(x: Scale, y: Scale, begin: float, top: float, bottom: float) -> list[Part]:
    seconds = x.high - begin
    elapsed = Axis(
        Scale(0.0, seconds, x.first, x.last), time_ticks(seconds), quantities.format_seconds, "time since the first"
    )
    length = Axis(y, linear_ticks(0.0, y.high), quantities.format_seconds, "length of an iteration")
    return [*draw_vertical_axis(length, x.first, x.last), *draw_horizontal_axis(elapsed, top, bottom)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
