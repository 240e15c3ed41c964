"""Summarises a report in a few sentences: the job's shape, its traffic, its share of communication time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Final

import numpy as np

from railscope.agent.analysis.facts.options import STRONG, WEAK
from railscope.agent.analysis.facts.quantities import (
    UNKNOWN,
    format_bytes,
    format_digits,
    format_integer,
    format_rate,
    format_seconds,
    format_share,
    format_time,
)
from railscope.agent.analysis.facts.report import NonUniformity, OwnerUse, RailUse, Report, TransferUse, Unknown
from railscope.agent.analysis.pictures.pictures import ROLE_NAMES
from railscope.agent.analysis.report.measurements import BY_NUMBER
from railscope.agent.analysis.report.report import has_times
from railscope.agent.analysis.timing.overlap import NETWORK_ONLY
from railscope.agent.facts.bound import StepShares, describe_bound
from railscope.agent.facts.counted import format_count

_MOST_PAIRS: Final = 3
"""Of transfers, that sentences tell of."""


def summarise(report: Report) -> tuple[str, ...]:
    """The report in sentences, the most important first; of what is not known there is none."""
    first, *of_steps = tuple(describe_steps(report)) or ("",)
    told = (*_job(report), *_shape(report), *_pattern(report), *_edges(report), *_time(report))
    return tuple(filter(None, (first, *told, *_owners(report), *_transfers(report), *of_steps, *_slow(report))))


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def unknown_by_reason(unknown: Iterable[Unknown]) -> list[tuple[str, list[str]]]:
    """Each reason once, in the order in which it comes first, with the names of the measurements that it is for."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for one in unknown:
        names[one.reason].append(BY_NUMBER[one.row].name)
    return list(names.items())


def format_link_utilisation(use: RailUse) -> str:
    """What part of the link's speed is used on average, of the busier direction."""
    known = [part for part in (use.transmit_utilisation, use.receive_utilisation) if part is not None]
    return format_share(max(known, default=None))


def most_uneven_iterations(report: Report) -> list[tuple[float, NonUniformity]]:
    """Iterations in which a pair sent more than another, after their begin (seconds since 1970); the worst first."""
    uneven = [(start, one) for start, one in _all_to_alls(report) if one.max_minus_min_bytes]
    return sorted(uneven, key=lambda row: (-row[1].relative, row[0]))


def describe_even_iterations(report: Report) -> str:
    """A sentence on iterations in which all pairs sent the same; empty if there are none."""
    found = _all_to_alls(report)
    alike = [one.total_bytes for _, one in found if not one.max_minus_min_bytes]
    if not alike:
        return ""
    of = "" if len(alike) == len(found) else f"{format_integer(len(alike))} of "
    return (
        f"In {of}{format_count(len(found), 'iteration')} every pair sent as much as any "
        "other: "
        f"{format_bytes(median(alike))} in all{' (median)' if len(alike) > 1 else ''}."
    )


def _owners(report: Report) -> Iterator[str]:
    """Who moved the rails' port bytes, both directions and all rails together."""
    sums, unsure_bytes = owner_sums(report)
    if sums:
        unsure = "" if unsure_bytes is None else f" (each ± {format_share(unsure_bytes / sum(sums.values()))})"
        yield f"The rails' port bytes were moved by {_shares_of(sums)}{unsure}."


def owner_sums(report: Report) -> tuple[dict[str, int], float | None]:
    """Port bytes of all rails and both directions by owner, and how many may be another's; None: not known."""
    sums: defaultdict[str, int] = defaultdict(int)
    unsure: list[float | None] = []
    for use in report.owners:
        sums[use.owner] += use.port_bytes
        unsure.append(None if use.error_ratio is None else use.error_ratio * use.port_bytes)
    known = [count for count in unsure if count is not None]
    return dict(sums), sum(known) if len(known) == len(unsure) else None


def owner_rows(report: Report) -> list[tuple[str, ...]]:
    """Rows of the table of owners: server, rail, device, direction, bytes, how many may be another's, who moved them.

    The busiest rail comes first.
    """
    found: defaultdict[tuple[str, str, str, str], list[OwnerUse]] = defaultdict(list)
    for use in report.owners:
        found[use.server, use.rail or UNKNOWN, use.device, use.direction].append(use)
    counts = {key: sum(use.port_bytes for use in uses) for key, uses in found.items()}
    return [
        (
            *(*key, format_bytes(counts[key]), format_share(found[key][0].error_ratio)),
            _shares_of({use.owner: use.port_bytes for use in found[key]}),
        )
        for key in sorted(counts, key=lambda key: (-counts[key], key))
    ]


def _shares_of(sums: Mapping[str, int]) -> str:
    """Owners with the part that each moved, who moved most first."""
    together = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{owner} {format_share(count / together)}" for owner, count in ordered if count)


def _transfers(report: Report) -> Iterator[str]:
    """What other libraries moved, which pairs failed, and which are slow."""
    moved: defaultdict[str, int] = defaultdict(int)
    for use in report.transfers:
        moved[use.library] += use.payload_bytes or 0
    told = [f"{library} {format_bytes(count)}" for library, count in sorted(moved.items()) if count]
    if told:
        yield f"Other libraries moved: {', '.join(told)}."
    yield from describe_failed_pairs(report)
    yield from describe_slow_pairs(report)


def transfer_table(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
    """What other libraries than NCCL moved, pair by pair: header, rows, and how columns are aligned.

    Failures have a column where there were any.
    """
    some_failed = any(use.failed for use in report.transfers)
    rows = [
        (
            use.server,
            str(use.pid),
            f"{use.library} {use.op}",
            use.peer or UNKNOWN,
            format_integer(use.operations),
            *([format_integer(use.failed)] if some_failed else []),
            format_bytes(use.payload_bytes),
            *map(format_seconds, (use.mean_seconds, use.p50_seconds, use.p99_seconds)),
            format_rate(use.bytes_per_second),
        )
        for use in report.transfers
    ]
    failed = ("failed",) if some_failed else ()
    header = ("server", "pid", "what", "to or from", "times", *failed, "payload", "mean", "p50", "p99", "bandwidth")
    return header, rows, "<><<" + ">" * (len(header) - 4)


def describe_failed_pairs(report: Report) -> Iterator[str]:
    """A sentence on each pair of which transfers failed, those with the most failures first."""
    failed = sorted((use for use in report.transfers if use.failed), key=lambda use: -use.failed)
    for use in failed[:_MOST_PAIRS]:
        yield (
            f"Of {format_integer(use.operations)} {use.library} {use.op} of process {use.pid} on {use.server} "
            f"{_whom(use)}, {format_integer(use.failed)} failed."
        )
    if len(failed) > _MOST_PAIRS:
        yield f"Transfers of {format_count(len(failed) - _MOST_PAIRS, 'more pair')} failed, too."


def _whom(use: TransferUse) -> str:
    return f"{'from' if use.direction == 'receive' else 'to'} {use.peer or 'peers without names'}"


def describe_slow_pairs(report: Report) -> Iterator[str]:
    """A sentence on each pair whose transfers take much longer than those of the others, the slowest first."""
    slow = [use for use in report.transfers if use.times_as_long is not None]
    for use in sorted(slow, key=lambda use: -(use.times_as_long or 0.0))[:_MOST_PAIRS]:
        yield (
            f"{use.library} {use.op} of process {use.pid} on {use.server} {_whom(use)} takes "
            f"{format_digits(use.times_as_long or 0.0)} times as long as those of the other pairs: "
            f"{format_seconds(use.mean_seconds)} on average, 99 % within {format_seconds(use.p99_seconds)}."
        )
    if len(slow) > _MOST_PAIRS:
        more = len(slow) - _MOST_PAIRS
        yield f"{format_count(more, 'more pair')} {'is' if more == 1 else 'are'} slow."


def _all_to_alls(report: Report) -> list[tuple[float, NonUniformity]]:
    return [(one.start, one.all_to_all) for one in report.iterations if one.all_to_all is not None]


def scaling_rows(report: Report) -> list[tuple[str, ...]]:
    """Rows of the table of scaling: name, GPUs, iterations a second, kind, and the factor that applies."""
    return [
        (
            one.name,
            format_integer(one.gpus),
            format_digits(one.iterations_per_second),
            one.kind or UNKNOWN,
            UNKNOWN if one.kind == STRONG else f"{one.weak_factor:.3f}",
            UNKNOWN if one.kind == WEAK else f"{one.strong_factor:.3f}",
        )
        for one in report.scaling
    ]


def describe_steps(report: Report) -> Iterator[str]:
    """What bounds the job's steps, the verdict first (agent/facts/bound.py); without steps, its calls per second."""
    shares = _shares(report)
    calls = sum(use.calls for use in report.ops)
    if shares is not None:
        yield from describe_bound(shares, "" if report.waiting is None else f"GPU {report.waiting.gpu}")
    elif calls and report.seconds and has_times(report):
        yield f"The job has no steps that are known; it makes {format_digits(calls / report.seconds)} calls/s."


def _shares(report: Report) -> StepShares | None:
    if not report.iterations:
        return None
    busy = median_of(one.comm_ratio for one in report.iterations)
    alone = median_of(one.non_overlapped_ratio for one in report.iterations)
    computing = median_of(
        None if one.compute_seconds is None else min(1.0, one.compute_seconds / one.period_seconds)
        for one in report.iterations
    )
    if busy is None:
        return StepShares(None, 0.0, 0.0, 0.0, 1.0, hidden_known=False)
    known = alone is not None and computing is not None
    communication = alone if known and alone is not None else busy
    computation = computing if known and computing is not None else 0.0
    rest = max(0.0, 1.0 - communication - computation)
    seen = _is_all_seen(report)
    shares = StepShares(
        waiting=None,
        communication=communication,
        computation=computation,
        idle=rest if seen else 0.0,
        unknown=0.0 if seen else rest,
        hidden_known=known,
    )
    return shares if report.waiting is None else shares.with_waiting(report.waiting.of_communication)


def _is_all_seen(report: Report) -> bool:
    """Whether operations of all communicators have times: those of NCCL's proxy threads lack what stays in a server."""
    if not any(one.reason == NETWORK_ONLY for one in report.unknown):
        return True
    server = {gpu.number: gpu.server for gpu in report.gpus}
    return all(
        len(one.gpus) != one.nranks or len({server[gpu] for gpu in one.gpus}) > 1
        for one in report.communicators
        if one.calls and len(one.gpus) > 1
    )


def _job(report: Report) -> Iterator[str]:
    servers = len({gpu.server for gpu in report.gpus})
    calls = sum(use.calls for use in report.ops)
    # What is received was sent, and counts there, as in the table of what the traffic is for.
    sent = [use for use in report.ops if use.op != "Recv"] or list(report.ops)
    payload = sum(use.payload_bytes for use in sent)
    when = f"for {format_seconds(report.seconds)} from {format_time(report.began_seconds)}"
    told = when if has_times(report) else "at times that are not known"
    yield f"{format_count(len(report.gpus), 'GPU')} on {format_count(servers, 'server')} were recorded {told}."
    if report.ops:
        most = max(sent, key=lambda use: (use.payload_bytes, use.calls, use.op))
        yield (
            f"They made {format_count(calls, 'call')} of {format_bytes(payload)} payload in "
            f"{format_count(len(report.communicators), 'communicator')}; most bytes are {most.op} of {most.dtype} "
            f"({format_share(most.payload_bytes / payload if payload else 0.0)})."
        )


def _shape(report: Report) -> Iterator[str]:
    shape = report.composition.parallelism
    if shape is not None:
        expert = f" × expert {shape.expert}" if shape.expert > 1 else ""
        sure = "The job is" if shape.certain else "The job is perhaps"
        reason = f"{shape.reason.rstrip('.')}."
        yield f"{sure} pipeline {shape.pipeline} × tensor {shape.tensor} × data {shape.data}{expert}: {reason}"
    roles = sorted(report.composition.roles, key=lambda role: (-role.payload_bytes, role.role))
    total = sum(role.payload_bytes for role in roles)
    if total:
        parts = [
            f"{ROLE_NAMES.get(role.role, role.role)} {format_share(role.payload_bytes / total)}"
            for role in roles
            if role.payload_bytes
        ]
        yield f"Of the payload: {', '.join(parts)}."


def _pattern(report: Report) -> Iterator[str]:
    traffic = report.matrix
    if traffic.sparsity is not None and traffic.pairs:
        possible = traffic.gpus * (traffic.gpus - 1)
        yield (
            f"{len(traffic.pairs):,} of {possible:,} directed pairs of GPUs talk ({format_share(traffic.sparsity)}), "
            "and "
            f"{_half(report)} of them carry half of the bytes."
        )


def _half(report: Report) -> str:
    reached = np.sort(report.matrix.pairs.wire_bytes)[::-1]
    np.cumsum(reached, out=reached)
    return f"{int(np.searchsorted(reached, (report.matrix.pairs.total_bytes + 1) // 2)) + 1:,}"


def _edges(report: Report) -> Iterator[str]:
    traffic = report.matrix
    total = traffic.pairs.total_bytes
    if not total or len(traffic.server_transmit_wire_bytes) < 2:
        return
    leaving = traffic.between_servers_wire_bytes
    if not leaving:
        yield f"Nothing leaves the servers: all {format_bytes(total)} stay inside."
        return
    words = (
        f"{format_bytes(leaving)} leave the servers, {format_share(leaving / total)} of {format_bytes(total)} on the "
        "wire"
    )
    if traffic.cross_rail_wire_bytes is not None:
        words += f"; {format_share(traffic.cross_rail_wire_bytes / leaving)} of that crosses rails"
    if traffic.spine_wire_bytes is not None:
        assumed = ", if each rail has one leaf switch" if traffic.spine_assumed else ""
        words += f"; {format_share(traffic.spine_wire_bytes / leaving)} of that reaches the spine{assumed}"
    yield f"{words}."


def _time(report: Report) -> Iterator[str]:
    regularity = report.regularity
    if regularity is None:
        return
    yield (
        f"{format_count(regularity.iterations, 'iteration')} of {format_seconds(regularity.period_seconds)} (median) "
        "were seen; "
        f"{format_share(regularity.recurrence)} of them make the same "
        f"{format_count(regularity.calls_per_iteration, 'call')} "
        "in the same order."
    )
    yield from describe_other_calls(report)
    ratio = median_of(one.comm_ratio for one in report.iterations)
    alone = median_of(one.non_overlapped_ratio for one in report.iterations)
    if ratio is not None:
        words = f"Communication takes {format_share(ratio)} of an iteration (median)"
        yield (
            f"{words}, and {format_share(alone)} is not overlapped with computation."
            if alone is not None
            else f"{words}."
        )


def describe_other_calls(report: Report) -> Iterator[str]:
    """A sentence on what lies between iterations, and one on what lies before and behind them."""
    regularity = report.regularity
    if regularity is None:
        return
    between = regularity.between
    if between is not None:
        one = between.stretches == 1
        each = "" if one else f", {format_seconds(between.mean_seconds)} each on average"
        yield (
            f"Between iterations {'lies' if one else 'lie'} {format_count(between.stretches, 'stretch', 'es')} of "
            f"other calls (evaluation, checkpoint): {format_seconds(between.seconds)}, {format_share(between.share)} "
            f"of the time{each}; {'it is' if one else 'they are'} in no figure of iterations."
        )
    edges = [
        f"for {format_seconds(seconds)} {where}"
        for seconds, where in (
            (regularity.before_seconds, "before the first iteration"),
            (regularity.behind_seconds, "behind the last one"),
        )
        if seconds
    ]
    if edges:
        yield f"Other calls were made {' and '.join(edges)}."


def _slow(report: Report) -> Iterator[str]:
    latency = report.latency
    if latency.anomaly_count:
        worst = latency.anomalies[0] if latency.anomalies else None
        words = f"{format_count(latency.anomaly_count, 'operation')} stalled or took far longer than usual"
        if worst is not None:
            usual = "" if worst.typical_seconds is None else f" instead of {format_seconds(worst.typical_seconds)}"
            words += f"; the worst, {worst.op}, took {format_seconds(worst.seconds)}{usual}"
        yield f"{words}."
    elif latency.rows:
        yield "No operation took far longer than usual."
