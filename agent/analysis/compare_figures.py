"""The figures of one recording, as `compare` holds them against another's: every row that it knows, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

import numpy as np

from agent.analysis.compare import Compared, Kind, Side, Unit, Value, compare_values
from agent.analysis.pictures import ROLE_NAMES
from agent.analysis.quantities import size
from agent.analysis.report_facts import Iteration
from agent.analysis.sizes import cdf, quantile_bytes


def compare_sides(a: Side, b: Side) -> Compared:
    """Two recordings."""
    by_iteration = a.iterations is not None and b.iterations is not None
    kinds = {kind for side in (a, b) for kind in side.latencies}
    notes = (
        [] if by_iteration else ["Iterations were not found on both sides: counts and bytes are of whole recordings."]
    )
    for side in (a, b):
        if not side.has_calls:
            notes.append(f"{side.name}: no call was recorded, so nobody knows what it sent.")
        notes += [f"{side.name}: {note}" for note in side.notes]
    return Compared(
        a=a.name,
        b=b.name,
        predicted=False,
        simulated=a.report.simulated or b.report.simulated,
        figures=compare_values(
            list(values_of(a, kinds, by_iteration=by_iteration)), list(values_of(b, kinds, by_iteration=by_iteration))
        ),
        notes=tuple(notes),
    )


def values_of(side: Side, kinds: set[Kind], *, by_iteration: bool) -> Iterator[Value]:
    """Every figure of a recording; latency and bandwidth of these kinds of operations."""
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
        yield Value(2, name, Unit.BYTES, quantile_bytes(points, share) if points else None)
    known = side.has_calls
    total = sum(pair.wire_bytes for pair in traffic.pairs)
    yield Value(3, f"wire bytes between GPUs{suffix}", Unit.BYTES, total / times if known else None)
    yield Value(3, "pairs that talk", Unit.COUNT, len(traffic.pairs) if known else None)
    yield Value(4, "sparsity", Unit.SHARE, traffic.sparsity if known else None)
    for name, count in (
        ("wire bytes between servers", traffic.between_servers_wire_bytes),
        ("wire bytes across rails", traffic.cross_rail_wire_bytes),
        ("wire bytes over the spine", traffic.spine_wire_bytes),
    ):
        yield Value(5, f"{name}{suffix}", Unit.BYTES, count / times if known and count is not None else None)


def _durations(side: Side, kinds: set[Kind]) -> Iterator[Value]:
    shown = _shown_sizes(kinds)
    for row in side.report.latency.rows:
        kind = (row.op, row.payload_bytes, row.source)
        if kind in kinds:
            payload = row.payload_bytes
            name = f"{row.op}{'' if payload is None else f' of {shown[payload]}'} ({row.source})"
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
    shown = _shown_sizes(kinds)
    for row in side.report.bandwidth:
        if (row.op, row.payload_bytes) not in compared:
            continue
        name = f"{row.op} of {shown[row.payload_bytes]}"
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
    receives = side.report.receives
    if not receives:
        return
    yield Value(
        16, f"transfer of a GPU's receives{suffix}", Unit.SECONDS, fmean(use.active_seconds for use in receives) / times
    )
    yield Value(
        16, f"waiting of a GPU's receives{suffix}", Unit.SECONDS, fmean(use.idle_seconds for use in receives) / times
    )
    ratios = [use.bubble_ratio for use in receives if use.bubble_ratio is not None]
    yield Value(16, "bubble ratio", Unit.SHARE, fmean(ratios) if ratios else None)


def _shown_sizes(kinds: set[Kind]) -> dict[int, str]:
    """How each size of both sides is shown: to the byte where another one would look the same."""
    payloads = {payload for _, payload, _ in kinds if payload is not None}
    alike = Counter(map(size, payloads))
    return {payload: size(payload) if alike[size(payload)] == 1 else f"{payload:,} B" for payload in payloads}
