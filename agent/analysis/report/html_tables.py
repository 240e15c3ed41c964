"""The tables of a report's page: each takes the report and gives its rows with units, the most telling first."""

from __future__ import annotations

from typing import Final

from railscope.agent.analysis.facts.quantities import (
    UNKNOWN,
    format_bytes,
    format_digits,
    format_integer,
    format_rate,
    format_seconds,
    format_share,
    format_size_class,
    format_time,
)
from railscope.agent.analysis.facts.report import Iteration, Regularity, Report
from railscope.agent.analysis.pictures.pictures import ROLE_NAMES
from railscope.agent.analysis.report.communicator_words import describe_calls, select_communicators
from railscope.agent.analysis.report.html_page import Element, table, tag
from railscope.agent.analysis.report.words import (
    describe_even_iterations,
    describe_failed_pairs,
    describe_other_calls,
    describe_slow_pairs,
    format_link_utilisation,
    median_of,
    most_uneven_iterations,
    owner_rows,
    scaling_rows,
    transfer_table,
)
from railscope.agent.facts.counted import format_count

_MOST: Final = 12


def operations(report: Report) -> list[Element]:
    """HTML table of operations: calls and payload by operation and data type."""
    calls = sum(use.calls for use in report.ops) or 1
    rows = [
        (
            use.op,
            use.dtype,
            format_integer(use.calls),
            format_share(use.calls / calls),
            format_bytes(use.known_payload_bytes),
        )
        for use in report.ops[:_MOST]
    ]
    return table(
        "Calls of all recorded ranks",
        ("operation", "data type", "calls", "part of calls", "payload"),
        rows,
        "<<>>>",
        len(report.ops),
    )


def sizes(report: Report) -> list[Element]:
    """HTML table of transfer sizes."""
    calls = report.sizes.total_calls or 1
    rows = [
        (use.op, format_bytes(use.bytes), f"{use.bytes:,}", format_integer(use.calls), format_share(use.calls / calls))
        for use in report.sizes.most_frequent(_MOST)
    ]
    header = ("operation", "payload", "bytes", "calls", "part of calls")
    return table("Most frequent sizes", header, rows, "<>>>>", len(report.sizes))


def pairs(report: Report) -> list[Element]:
    """HTML table of the pairs of GPUs that sent each other most."""
    total = report.matrix.pairs.total_bytes or 1
    gpus = {gpu.number: f"GPU {gpu.number} ({gpu.server})" for gpu in report.gpus}
    rows = [
        (
            gpus[pair.source],
            gpus[pair.destination],
            format_bytes(pair.wire_bytes),
            format_share(pair.wire_bytes / total),
        )
        for pair in report.matrix.pairs.busiest(_MOST)
    ]
    header = ("from", "to", "wire bytes", "part of all")
    return table("Busiest directed pairs", header, rows, "<<>>", len(report.matrix.pairs))


def edges(report: Report) -> list[Element]:
    """HTML table of traffic between GPUs, servers, rails and leaves."""
    traffic = report.matrix
    total = traffic.pairs.total_bytes
    leaving = traffic.between_servers_wire_bytes
    rows = [("between GPUs in all", format_bytes(total), "")]
    rows.append(
        ("between servers", format_bytes(leaving), f"{format_share(leaving / total if total else None)} of all")
    )
    for name, count in (
        ("from rail to rail", traffic.cross_rail_wire_bytes),
        (f"over the spine{', assumed' if traffic.spine_assumed else ''}", traffic.spine_wire_bytes),
    ):
        part = f"{format_share(count / leaving)} of what leaves servers" if count is not None and leaving else ""
        rows.append((name, format_bytes(count), part))
    return table("Wire bytes", ("where", "bytes", "part"), rows, "<><", len(rows))


def latency(report: Report) -> list[Element]:
    """HTML table of latencies by operation and size."""
    most = sorted(report.latency.rows, key=lambda row: (-row.count, row.op, row.payload_bytes or 0, row.source))
    rows = [
        (
            row.op,
            format_size_class(row.payload_bytes, row.over_bytes),
            row.source,
            format_integer(row.count),
            *map(format_seconds, (row.p50_seconds, row.p90_seconds, row.p99_seconds, row.max_seconds)),
        )
        for row in most[:_MOST]
    ]
    header = ("operation", "payload", "times from", "count", "median", "90 %", "99 %", "longest")
    return table("Begin to completion", header, rows, "<><>>>>>", len(most))


def anomalies(report: Report) -> list[Element]:
    """HTML table of the slowest operations."""
    rows = [
        (
            format_time(one.time_seconds),
            one.comm,
            UNKNOWN if one.rank is None else str(one.rank),
            one.op,
            format_bytes(one.payload_bytes),
            format_seconds(one.seconds),
            format_seconds(one.typical_seconds),
            one.cause or UNKNOWN,
        )
        for one in report.latency.anomalies[:_MOST]
    ]
    header = ("when", "communicator", "rank", "operation", "payload", "took", "usually", "cause")
    caption = f"Far slower than usual, or stalled: {report.latency.anomaly_count:,}"
    return table(caption, header, rows, "<<><>>><", report.latency.anomaly_count)


def composition(report: Report) -> list[Element]:
    """HTML table of what each parallelism calls and sends."""
    rows = [
        (
            ROLE_NAMES.get(role.role, role.role),
            format_integer(role.communicators),
            format_integer(role.calls),
            format_bytes(role.known_payload_bytes),
            format_digits(role.rank_calls),
            format_bytes(role.known_rank_payload_bytes),
        )
        for role in report.composition.roles
    ]
    header = ("for", "communicators", "calls", "payload", "calls a rank", "payload a rank")
    found = table("By parallelism", header, rows, "<>>>>>", len(rows))
    number = min((gpu.number for gpu in report.gpus), default=0)
    first = [
        (ROLE_NAMES.get(use.role, use.role), use.op, format_integer(use.calls), format_bytes(use.known_payload_bytes))
        for use in report.composition.ranks
        if use.gpu == number
    ]
    found += table(f"What GPU {number} calls", ("for", "operation", "calls", "payload"), first, "<<>>", len(first))
    uses = [
        (
            use.comm,
            ROLE_NAMES.get(use.role, use.role),
            _numbers(use.gpus),
            UNKNOWN if use.nranks is None else f"{len(use.gpus)} of {use.nranks}",
            format_integer(use.calls),
            format_bytes(use.known_payload_bytes),
            describe_calls(use),
        )
        for use in select_communicators(report.communicators, _MOST)
    ]
    columns = ("communicator", "for", "GPUs", "ranks recorded", "calls", "payload", "carries")
    return [*found, *table("Communicators", columns, uses, "<<<>>><", len(report.communicators))]


def iterations(report: Report) -> list[Element]:
    """HTML table of iterations."""
    regularity, all_of_them = report.regularity, report.iterations
    if regularity is None:
        return []
    periods = [one.period_seconds for one in all_of_them]
    rows = [
        (
            "iterations",
            format_integer(regularity.iterations),
            f"{format_count(regularity.calls_per_iteration, 'call')} each",
        ),
        ("period", format_seconds(regularity.period_seconds), f"median; {_range(periods)}"),
        ("spread of periods", format_share(regularity.spread), "(75th − 25th percentile) / median"),
        ("duty cycle", format_share(regularity.duty_cycle), "of the time operations were under way"),
        (
            "recurrence",
            format_share(regularity.recurrence),
            "of iterations make the most frequent one's calls in its order",
        ),
        (
            "recurrence without sizes",
            format_share(regularity.recurrence_without_sizes),
            "the same, sizes not looked at",
        ),
        *_ratios(all_of_them),
        *_others(regularity),
    ]
    found = table(regularity.basis, ("figure", "value", "meaning"), rows, "<><", len(rows))
    return [*found, *(tag("p", sentence) for sentence in describe_other_calls(report))]


def _others(regularity: Regularity) -> list[tuple[str, str, str]]:
    between = regularity.between
    if between is None:
        return []
    return [
        (
            "other calls between iterations",
            format_share(between.share),
            f"of the time: {format_count(between.stretches, 'stretch', 'es')}, mean "
            f"{format_seconds(between.mean_seconds)}, {format_count(between.calls, 'call')} of GPU {regularity.gpu}",
        )
    ]


def role_times(report: Report) -> list[Element]:
    """HTML table of communication time by kind of parallelism."""
    if not report.role_times:
        return []
    rows = [
        (
            one.role,
            format_seconds(one.seconds),
            format_share(one.ratio),
            format_seconds(one.non_overlapped_seconds),
            format_share(one.non_overlapped_ratio),
        )
        for one in report.role_times
    ]
    title = f"Communication by parallelism of GPU {report.role_times[0].gpu}, mean of an iteration; kinds may overlap"
    header = ("for", "time", "of an iteration", "not overlapped", "of an iteration")
    return table(title, header, rows, "<>>>>", len(rows))


def _ratios(all_of_them: tuple[Iteration, ...]) -> list[tuple[str, str, str]]:
    return [
        (
            "communication",
            format_seconds(median_of(one.comm_seconds for one in all_of_them)),
            "of an iteration, median",
        ),
        (
            "communication ratio",
            format_share(median_of(one.comm_ratio for one in all_of_them)),
            "median over iterations",
        ),
        (
            "not overlapped",
            format_seconds(median_of(one.non_overlapped_seconds for one in all_of_them)),
            "of an iteration, median: nothing was computed meanwhile",
        ),
        (
            "non-overlapped ratio",
            format_share(median_of(one.non_overlapped_ratio for one in all_of_them)),
            "median over iterations",
        ),
    ]


def all_to_all(report: Report) -> list[Element]:
    """HTML table of how unequal the all-to-alls are."""
    worst, equal = most_uneven_iterations(report), describe_even_iterations(report)
    rows = [
        (
            format_time(start),
            format_bytes(one.max_minus_min_bytes),
            UNKNOWN if one.max_over_min is None else format_digits(one.max_over_min),
            format_digits(one.relative),
            format_bytes(one.total_bytes),
        )
        for start, one in worst[:_MOST]
    ]
    header = ("iteration of", "max − min", "max / min", "(max − min) / mean", "in all")
    found = table("Least equal iterations", header, rows, "<>>>>", len(worst))
    return [*found, tag("p", equal)] if equal else found


def bandwidth(report: Report) -> list[Element]:
    """HTML table of bandwidth by operation and size."""
    most = sorted(report.bandwidth, key=lambda row: (-row.count, row.op, row.payload_bytes))
    rows = [
        (
            row.op,
            format_size_class(row.payload_bytes, row.over_bytes),
            format_integer(row.count),
            format_rate(row.algbw_bytes_per_second),
            format_rate(row.busbw_bytes_per_second),
            format_share(row.utilisation),
        )
        for row in most[:_MOST]
    ]
    header = ("operation", "payload", "count", "algorithm bandwidth", "bus bandwidth", "of the links")
    return table("Medians", header, rows, "<>>>>>", len(most))


def scaling(report: Report) -> list[Element]:
    """HTML table of how runs scale."""
    rows = scaling_rows(report)
    header = ("run", "GPUs", "iterations/s", "scaling", "weak factor", "strong factor")
    return table("Runs", header, rows, "<>><>>", len(rows))


def transfers(report: Report) -> list[Element]:
    """HTML table of what other libraries than NCCL moved, pair by pair."""
    header, rows, aligned = transfer_table(report)
    title = "Transfers of other libraries, as of KV caches: who moves how much to whom, the most first"
    told = [tag("p", sentence) for sentence in (*describe_failed_pairs(report), *describe_slow_pairs(report))]
    return [*table(title, header, rows[:_MOST], aligned, len(rows)), *told]


def rails(report: Report) -> list[Element]:
    """HTML table of rails and their port bytes."""
    busiest = sorted(
        report.rails, key=lambda use: (-(use.transmit_bytes + use.receive_bytes), use.server, use.rail, use.device)
    )
    rows = [
        (
            use.server,
            use.rail or UNKNOWN,
            use.device,
            format_bytes(use.transmit_bytes),
            _mean_and_peak(use.transmit_bytes_per_second, use.peak_transmit_bytes_per_second),
            format_bytes(use.receive_bytes),
            _mean_and_peak(use.receive_bytes_per_second, use.peak_receive_bytes_per_second),
            format_rate(use.speed_bytes_per_second),
            format_link_utilisation(use),
        )
        for use in busiest[:_MOST]
    ]
    header = ("server", "rail", "device", "sent", "mean, peak", "received", "mean, peak", "link", "part of it")
    return table("Port bytes of rails, the busiest first", header, rows, "<<<>>>>>>", len(busiest))


def owners(report: Report) -> list[Element]:
    """HTML table of who moved the port bytes of rails."""
    rows = owner_rows(report)
    header = ("server", "rail", "device", "direction", "bytes", "±", "moved by")
    title = "Owners of the rails' port bytes, the busiest rail first; ± is the part of them that may be another's"
    return table(title, header, rows[:_MOST], "<<<<>><", len(rows))


def _mean_and_peak(mean: float, peak: float) -> str:
    return f"{format_rate(mean)}, {format_rate(peak)}"


def receives(report: Report) -> list[Element]:
    """HTML table of receives by GPU."""
    longest = sorted(report.receives, key=lambda use: (-use.idle_seconds, use.gpu))
    rows = [
        (
            str(use.gpu),
            format_seconds(use.active_seconds),
            format_seconds(use.idle_seconds),
            format_share(use.bubble_ratio),
        )
        for use in longest[:_MOST]
    ]
    header = ("GPU", "transfers", "waits", "bubble ratio")
    return table("Longest waiting first", header, rows, ">>>>", len(longest))


def _numbers(gpus: tuple[int, ...]) -> str:
    """`0–7`, `0, 8, 16, 24`, or the first few."""
    if len(gpus) > 2 and gpus == tuple(range(gpus[0], gpus[0] + len(gpus))):
        return f"{gpus[0]}–{gpus[-1]}"
    shown = ", ".join(str(gpu) for gpu in gpus[:8])
    return shown if len(gpus) <= 8 else f"{shown}, … ({len(gpus)} in all)"


def _range(values: list[float]) -> str:
    return f"{format_seconds(min(values))} to {format_seconds(max(values))}" if values else ""
