"""Computes the figures of one recording that `compare` compares with another's, by row and name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Final

import numpy as np

from railscope.agent.analysis.compare.figures import Compared, Kind, Side, Unit, Value, compare_values, median_values
from railscope.agent.analysis.facts.options import STRONG, WEAK
from railscope.agent.analysis.facts.quantities import format_bytes, format_size_class
from railscope.agent.analysis.facts.report import Iteration
from railscope.agent.analysis.pictures.pictures import ROLE_NAMES
from railscope.agent.analysis.report.scaling import find_scaling, run_of, why_not_comparable, why_unlike
from railscope.agent.analysis.report.words import owner_sums
from railscope.agent.analysis.traffic.sizes import cdf
from railscope.agent.facts.counted import format_count

_WITHIN: Final = (
    "p is computed from the spread within the two recordings; a second start of the same job may differ by more.  "
    "Give more recordings of a side with --a-again and --b-again: p is then computed from the spread between them."
)
_BETWEEN: Final = (
    "p is computed from the spread between recordings: figures are medians of a side's recordings, and variation "
    "within a recording is ignored."
)


_WHOLE: Final = (
    "Counts and bytes are those of whole recordings, which may differ in length: it takes three iterations to tell "
    "where one ends, and they were not found in the calls of {}."
)
_UNLIKE: Final = (
    "A and B are different jobs, since {}.  Each figure is right by itself; none tells which of them does the same "
    "work faster, so no difference is tested."
)


def compare_sides(a: Side, b: Side) -> Compared:
    """Compare two recordings figure by figure."""
    return compare_runs([a], [b])


def compare_runs(a: Sequence[Side], b: Sequence[Side]) -> Compared:
    """Compare one recording or more of each side figure by figure; each side is called as its first one."""
    sides = [*a, *b]
    between_runs = len(sides) > 2
    by_iteration = all(side.iterations is not None for side in sides)
    kinds = {kind for side in sides for kind in side.latencies}
    unlike = why_unlike(*(run_of(name, side.report) for name, side in (("A", a[0]), ("B", b[0]))))
    caveats = [_UNLIKE.format(unlike)] if unlike else []
    unknown = [
        f"{letter} ({runs[0].name}; {option} N says how many)"
        for letter, option, runs in (("A", "--iterations", a), ("B", "--iterations-b", b))
        if any(side.iterations is None for side in runs)
    ]
    if unknown:
        caveats.append(_WHOLE.format(" and of ".join(unknown)))
    for side in sides:
        if not side.has_calls:
            caveats.append(f"{side.name}: no call was recorded, so its traffic is unknown.")
        caveats += [f"{side.name}: {note}" for note in side.notes]
    values = [[list(values_of(side, kinds, by_iteration=by_iteration)) for side in runs] for runs in (a, b)]
    first, second = (median_values(runs) if between_runs else runs[0] for runs in values)
    scaled, why_not = _scaling(a[0], b[0])
    if why_not:
        caveats.append(why_not)
    figures = compare_values(
        [*first, *(replace(value, value=1.0) for value in scaled)], [*second, *scaled], between_runs=between_runs
    )
    if unlike:
        figures = tuple(replace(figure, test=None, p=None) for figure in figures)
    tested = any(figure.test is not None for figure in figures)
    return Compared(
        a=_name(a),
        b=_name(b),
        predicted=False,
        simulated=any(side.report.simulated for side in sides),
        figures=figures,
        notes=(_BETWEEN if between_runs else _WITHIN,) if tested else (),
        caveats=tuple(dict.fromkeys(caveats)),
        between_runs=between_runs,
        unlike=unlike,
        incomplete=any(side.report.missing_calls for side in sides),
    )


def _name(runs: Sequence[Side]) -> str:
    again = len(runs) - 1
    return runs[0].name if not again else f"{runs[0].name}, and {format_count(again, 'recording')} more"


def _scaling(first: Side, second: Side) -> tuple[list[Value], str]:
    """Of sides with different numbers of GPUs: the second one's scaling factor, or both where nothing tells which.

    Where they are not one job there is none, and a sentence says why.
    """
    runs = [run_of(name, side.report) for name, side in (("A", first), ("B", second))]
    found = find_scaling(runs)
    if len(found) < 2 or found[0].gpus == found[1].gpus:
        return [], ""
    reason = why_not_comparable(*runs)
    if reason:
        return [], (
            f"There is no scaling factor: it is of one job on {runs[0].gpus:,} and on "
            f"{format_count(runs[1].gpus, 'GPU')}, and these "
            f"are not comparable, since {reason}."
        )
    factors = ((WEAK, found[1].weak_factor), (STRONG, found[1].strong_factor))
    doubt = "" if found[1].kind else "if it is "
    return [
        Value(14, f"scaling factor, {doubt}{kind} scaling", Unit.SHARE, factor)
        for kind, factor in factors
        if found[1].kind in (kind, None)
    ], ""


def values_of(side: Side, kinds: set[Kind], *, by_iteration: bool) -> Iterator[Value]:
    """Every figure of a recording, as comparisons pair them; latency and bandwidth of these kinds of operations."""
    yield Value(1, "GPUs", Unit.COUNT, len(side.report.gpus))
    yield Value(1, "servers", Unit.COUNT, len({gpu.server for gpu in side.report.gpus}))
    times = side.iterations if by_iteration and side.iterations is not None else 1
    suffix = " an iteration" if by_iteration else ""
    yield from _pattern(side, times, suffix)
    yield from _durations(side, kinds)
    yield from _composition(side, times, suffix)
    yield from _iterations(side)
    yield from _bandwidth(side, kinds)
    yield from _receives(side, times, suffix)


def iteration_value(
    row: int, name: str, unit: Unit, iterations: Sequence[Iteration], get: Callable[[Iteration], float | None]
) -> Value:
    """The median of a figure of iterations, with all of its values."""
    known = [value for value in map(get, iterations) if value is not None]
    return Value(row, name, unit, median(known) if known else None, np.array(known) if known else None)


def _pattern(side: Side, times: int, suffix: str) -> Iterator[Value]:
    report, traffic = side.report, side.traffic
    for op in sorted({use.op for use in side.ops}):
        uses = [use for use in side.ops if use.op == op]
        yield Value(1, f"{op} calls{suffix}", Unit.COUNT, sum(use.calls for use in uses) / times)
        yield Value(1, f"{op} payload{suffix}", Unit.BYTES, sum(use.payload_bytes for use in uses) / times)
    points = cdf(report.sizes)
    for share, name in ((0.5, "median size of calls"), (0.9, "90 % of calls are at most")):
        yield Value(2, name, Unit.BYTES, points.quantile_bytes(share))
    known = side.has_calls
    total = traffic.pairs.total_bytes
    yield Value(3, f"wire bytes between GPUs{suffix}", Unit.BYTES, total / times if known else None)
    yield Value(3, "pairs that talk", Unit.COUNT, len(traffic.pairs) if known else None)
    yield Value(4, "pairs that talk, of all", Unit.SHARE, traffic.sparsity if known else None)
    for name, count in (
        ("wire bytes between servers", traffic.between_servers_wire_bytes),
        ("wire bytes across rails", traffic.cross_rail_wire_bytes),
        ("wire bytes over the spine", traffic.spine_wire_bytes),
    ):
        yield Value(5, f"{name}{suffix}", Unit.BYTES, count / times if known and count is not None else None)
    moved, _ = owner_sums(report)
    for owner, port_bytes in sorted(moved.items()):
        yield Value(5, f"port bytes of {owner}, of all", Unit.SHARE, port_bytes / sum(moved.values()))


def _durations(side: Side, kinds: set[Kind]) -> Iterator[Value]:
    shown = _format_sizes(kinds)
    for row in side.report.latency.rows:
        kind = (row.op, row.payload_bytes, row.source)
        if kind in kinds:
            payload = row.payload_bytes
            name = (
                f"{row.op}{'' if payload is None else f' of {_format_class(shown, payload, row.over_bytes)}'} "
                f"({row.source})"
            )
            yield Value(6, f"median {name}", Unit.SECONDS, row.p50_seconds, side.latencies.get(kind), payload)
            yield Value(6, f"99th percentile of {name}", Unit.SECONDS, row.p99_seconds, payload_bytes=payload)
    if side.report.latency.rows:
        yield Value(6, "far slower than usual, or stalled", Unit.COUNT, side.report.latency.anomaly_count)


def _composition(side: Side, times: int, suffix: str) -> Iterator[Value]:
    for role in side.composition.roles:
        name = ROLE_NAMES.get(role.role, role.role)
        yield Value(7, f"{name} payload of a rank{suffix}", Unit.BYTES, role.rank_payload_bytes / times)


def _iterations(side: Side) -> Iterator[Value]:
    iterations, regularity = side.report.iterations, side.report.regularity
    yield iteration_value(9, "period", Unit.SECONDS, iterations, lambda one: one.period_seconds)
    yield Value(9, "duty cycle", Unit.SHARE, None if regularity is None else regularity.duty_cycle)
    yield Value(9, "recurrence", Unit.SHARE, None if regularity is None else regularity.recurrence)
    between = None if regularity is None else regularity.between
    if regularity is not None:
        yield Value(9, "other calls between iterations", Unit.SHARE, 0.0 if between is None else between.share)
    if between is not None:
        yield Value(9, "mean stretch of other calls", Unit.SECONDS, between.mean_seconds)
    yield iteration_value(
        10,
        "all-to-all (max − min) / mean",
        Unit.COUNT,
        iterations,
        lambda one: None if one.all_to_all is None else one.all_to_all.relative,
    )
    yield iteration_value(11, "communication", Unit.SECONDS, iterations, lambda one: one.comm_seconds)
    yield iteration_value(11, "communication ratio", Unit.SHARE, iterations, lambda one: one.comm_ratio)
    yield iteration_value(12, "not overlapped", Unit.SECONDS, iterations, lambda one: one.non_overlapped_seconds)
    yield iteration_value(12, "non-overlapped ratio", Unit.SHARE, iterations, lambda one: one.non_overlapped_ratio)


def _bandwidth(side: Side, kinds: set[Kind]) -> Iterator[Value]:
    compared = {(op, payload) for op, payload, _ in kinds}
    shown = _format_sizes(kinds)
    for row in side.report.bandwidth:
        if (row.op, row.payload_bytes) not in compared:
            continue
        name = f"{row.op} of {_format_class(shown, row.payload_bytes, row.over_bytes)}"
        yield Value(
            13,
            f"bus bandwidth of {name}",
            Unit.RATE,
            row.busbw_bytes_per_second,
            _rates(side, row.op, row.payload_bytes),
            row.payload_bytes,
        )
        if row.utilisation is not None:
            part = f"part of the links' rate of {name}"
            yield Value(13, part, Unit.SHARE, row.utilisation, payload_bytes=row.payload_bytes)


def _rates(side: Side, op: str, payload: int) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Of stretches of time; only their order matters, so bytes a second of the payload will do."""
    found = [medians for kind, medians in side.latencies.items() if kind[:2] == (op, payload) and len(medians)]
    if len(found) != 1:
        return None
    rates: np.ndarray[tuple[int], np.dtype[np.float64]] = payload / np.maximum(found[0], 1e-9)
    return rates


def _receives(side: Side, times: int, suffix: str) -> Iterator[Value]:
    receives, regularity = side.report.receives, side.report.regularity
    if not receives:
        return
    active = fmean(use.active_seconds for use in receives) / times
    idle = fmean(use.idle_seconds for use in receives) / times
    if suffix and regularity is not None and regularity.has_other_calls:
        # What an evaluation receives is no iteration's.
        active = fmean(one for use in receives if (one := use.iteration_active_seconds) is not None)
        idle = fmean(one for use in receives if (one := use.iteration_idle_seconds) is not None)
    yield Value(16, f"transfer of a GPU's receives{suffix}", Unit.SECONDS, active)
    yield Value(16, f"waiting of a GPU's receives{suffix}", Unit.SECONDS, idle)
    ratios = [use.bubble_ratio for use in receives if use.bubble_ratio is not None]
    yield Value(16, "bubble ratio", Unit.SHARE, fmean(ratios) if ratios else None)


def _format_class(shown: Mapping[int, str], payload: int, over: int | None) -> str:
    """A size, or sizes that are put together."""
    return shown[payload] if over is None else format_size_class(payload, over)


def _format_sizes(kinds: set[Kind]) -> dict[int, str]:
    """How each size of both sides is shown: to the byte where another one would look the same."""
    payloads = {payload for _, payload, _ in kinds if payload is not None}
    alike = Counter(map(format_bytes, payloads))
    return {
        payload: format_bytes(payload) if alike[format_bytes(payload)] == 1 else f"{payload:,} B"
        for payload in payloads
    }
