"""Renders a report as text for a terminal: one short table a question; the JSON has the full tables.

Bytes are shown in KiB, MiB, …; of sizes that are not whole in such a unit, JSON has the exact number.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from railscope.agent.analysis.facts.fact_columns import SizeUse
from railscope.agent.analysis.facts.quantities import (
    UNKNOWN,
    format_bytes,
    format_digits,
    format_integer,
    format_numbers,
    format_rate,
    format_seconds,
    format_share,
    format_size_class,
    format_time,
    shorten,
)
from railscope.agent.analysis.facts.report import CommunicatorUse, GpuFacts, Iteration, Report
from railscope.agent.analysis.report.communicator_words import describe_calls, select_communicators
from railscope.agent.analysis.report.report import has_times
from railscope.agent.analysis.report.words import (
    describe_even_iterations,
    describe_failed_pairs,
    describe_other_calls,
    describe_slow_pairs,
    describe_steps,
    format_link_utilisation,
    median_of,
    most_uneven_iterations,
    owner_rows,
    scaling_rows,
    transfer_table,
    unknown_by_reason,
)
from railscope.agent.analysis.traffic.sizes import cdf
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.text_tables import format_table
from railscope.probes.printable import printable_lines

MOST_ROWS: Final = 10
_COLUMNS: Final = 100


def as_text(report: Report) -> str:
    """The report for people: sections with a heading each, an empty line between them."""
    first_losses = (*report.missing_calls, report.several_jobs)
    sections = (
        _job(report),
        _ops(report),
        _sizes(report),
        _communicators(report),
        _pairs(report),
        _servers(report),
        _rails(report),
        _owners(report),
        _transfers(report),
        _latency(report),
        _anomalies(report),
        _composition(report),
        _iterations(report),
        _role_times(report),
        _all_to_all(report),
        _bandwidth(report),
        _receives(report),
        _scaling(report),
        _sentences(
            "Not known", (f"{', '.join(names)}: {reason}" for reason, names in unknown_by_reason(report.unknown))
        ),
        _sentences("Losses", (loss for loss in report.losses if loss not in first_losses)),
    )
    return printable_lines("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


def _job(report: Report) -> list[str]:
    servers = Counter(gpu.server for gpu in report.gpus)
    of = f" on {format_count(len(servers), 'server')}" if servers else ""
    made_up = "; simulated hardware" if report.simulated else ""
    when = (
        f"{format_seconds(report.seconds)} from {format_time(report.began_seconds)}"
        if has_times(report)
        else "times are not known"
    )
    communicators = format_count(len(report.communicators), "communicator")
    return [
        f"{format_count(len(report.gpus), 'GPU')}{of}, {communicators}, {when}{made_up}",
        # Before any figure: they are of all of them.
        *(
            line
            for told in (*report.missing_calls, report.several_jobs or report.one_of_several, *describe_steps(report))
            for line in textwrap.wrap(told, _COLUMNS, break_on_hyphens=False)
        ),
    ]


def _ops(report: Report) -> list[str]:
    calls = sum(use.calls for use in report.ops)
    rows = [
        (
            use.op,
            use.dtype,
            format_integer(use.calls),
            format_share(use.calls / calls),
            format_bytes(use.known_payload_bytes),
        )
        for use in report.ops
    ]
    return _section(
        f"Operations ({format_count(calls, 'call')} of all recorded ranks, payload)",
        ("operation", "data type", "calls", "of calls", "payload"),
        rows,
        "<<>>>",
    )


def _sizes(report: Report) -> list[str]:
    if not report.sizes:
        return []
    calls = report.sizes.total_calls
    points = cdf(report.sizes)
    lines = _section(
        f"Sizes of calls ({format_count(len(report.sizes), 'size')})",
        ("operation", "payload", "bytes", "calls", "of calls"),
        [_size_row(use, calls) for use in report.sizes.most_frequent(MOST_ROWS)],
        "<>>>>",
        len(report.sizes),
    )
    below = ", ".join(
        f"{percent} % up to {format_bytes(points.quantile_bytes(percent / 100))}" for percent in (50, 90, 99)
    )
    return [*lines, f"  of calls {below}; the largest {format_bytes(points.quantile_bytes(1.0))}"]


def _size_row(use: SizeUse, calls: int) -> tuple[str, ...]:
    return (
        use.op,
        format_bytes(use.bytes),
        format_integer(use.bytes),
        format_integer(use.calls),
        format_share(use.calls / calls),
    )


def _communicators(report: Report) -> list[str]:
    return _section(
        "Communicators (recorded ranks together, payload; of each role one at least)",
        ("communicator", "role", "ranks", "GPUs", "calls", "payload", "carries"),
        [_communicator_row(use) for use in select_communicators(report.communicators, MOST_ROWS)],
        "<<><>><",
        len(report.communicators),
    )


def _communicator_row(use: CommunicatorUse) -> tuple[str, ...]:
    ranks = UNKNOWN if use.nranks is None else format_integer(use.nranks)
    if use.nranks is not None and len(use.gpus) < use.nranks:
        ranks = f"{len(use.gpus):,} of {use.nranks:,}"
    members = format_numbers(use.gpus)
    return (
        shorten(use.comm, 16),
        use.role,
        ranks,
        members,
        format_integer(use.calls),
        format_bytes(use.known_payload_bytes),
        describe_calls(use),
    )


def _pairs(report: Report) -> list[str]:
    traffic = report.matrix
    if not traffic.pairs:
        return []
    total = traffic.pairs.total_bytes
    possible = traffic.gpus * (traffic.gpus - 1)
    gpus = {gpu.number: _gpu(gpu) for gpu in report.gpus}
    rows = [
        (
            gpus[pair.source],
            gpus[pair.destination],
            format_bytes(pair.wire_bytes),
            format_share(pair.wire_bytes / total),
        )
        for pair in traffic.pairs.busiest(MOST_ROWS)
    ]
    lines = _section(
        "Busiest pairs of GPUs (wire bytes, one direction)",
        ("from", "to", "bytes", "of all"),
        rows,
        "<<>>",
        len(traffic.pairs),
    )
    told = f"  directed pairs that talk: {len(traffic.pairs):,} of {possible:,} ({format_share(traffic.sparsity)})"
    return [*lines, told, *_wrapped(traffic.basis)]


def _gpu(gpu: GpuFacts) -> str:
    return f"{gpu.number} ({gpu.server})"


def _servers(report: Report) -> list[str]:
    traffic = report.matrix
    total = traffic.pairs.total_bytes
    if not total:
        return []
    if not traffic.between_servers_wire_bytes:
        return ["Between servers (wire bytes)", f"  nothing: all {format_bytes(total)} stay inside servers"]
    leaving = traffic.between_servers_wire_bytes
    rows = [("leave the servers", format_bytes(leaving), f"{format_share(leaving / total)} of {format_bytes(total)}")]
    spine = "reach the spine, assumed" if traffic.spine_assumed else "reach the spine"
    for what, part in (("cross rails", traffic.cross_rail_wire_bytes), (spine, traffic.spine_wire_bytes)):
        rows.append((what, format_bytes(part), UNKNOWN if part is None else f"{format_share(part / leaving)} of that"))
    busiest = sorted(traffic.server_transmit_wire_bytes, key=lambda row: (-row[1], row[0]))
    rows += [
        (f"{server} sends", format_bytes(part), format_share(part / leaving)) for server, part in busiest[:MOST_ROWS]
    ]
    return ["Between servers (wire bytes)", *format_table(rows, "<><"), *_more(len(busiest))]


def _rails(report: Report) -> list[str]:
    busiest = sorted(
        report.rails, key=lambda use: (-(use.transmit_bytes + use.receive_bytes), use.server, use.rail, use.device)
    )
    lines = _section(
        "Rails (port bytes: what the NICs counted; rates on average, and in the busiest second)",
        ("server", "rail", "device", "sent", "a second", "at most", "received", "a second", "at most", "of the link"),
        [
            (
                shorten(use.server, 20),
                use.rail or UNKNOWN,
                shorten(use.device, 16),
                format_bytes(use.transmit_bytes),
                format_rate(use.transmit_bytes_per_second),
                format_rate(use.peak_transmit_bytes_per_second),
                format_bytes(use.receive_bytes),
                format_rate(use.receive_bytes_per_second),
                format_rate(use.peak_receive_bytes_per_second),
                format_link_utilisation(use),
            )
            for use in busiest
        ],
        "<<<>>>>>>>",
    )
    return [*lines, *_wrapped(report.shared_rails)]


def _owners(report: Report) -> list[str]:
    return _section(
        "Owners of the rails' port bytes (± the part of them that may be another's)",
        ("server", "rail", "device", "", "bytes", "±", "moved by"),
        [
            (shorten(server, 20), rail or UNKNOWN, shorten(device, 16), *rest)
            for server, rail, device, *rest in owner_rows(report)
        ],
        "<<<<>><",
    )


def _transfers(report: Report) -> list[str]:
    header, rows, aligned = transfer_table(report)
    lines = _section(
        "Transfers of other libraries, as of KV caches (payload; time from the call to when its program knew the end)",
        header,
        [(shorten(server, 20), pid, what, shorten(peer, 24), *rest) for server, pid, what, peer, *rest in rows],
        aligned,
    )
    told = (*describe_failed_pairs(report), *describe_slow_pairs(report))
    return [*lines, *(line for sentence in told for line in _wrapped(sentence))]


def _latency(report: Report) -> list[str]:
    most = sorted(report.latency.rows, key=lambda row: (-row.count, row.op, row.payload_bytes or 0, row.source))
    return _section(
        "How long operations take",
        ("operation", "payload", "from", "count", "median", "90 %", "99 %", "longest"),
        [
            (
                row.op,
                format_size_class(row.payload_bytes, row.over_bytes),
                row.source,
                format_integer(row.count),
                *map(format_seconds, (row.p50_seconds, row.p90_seconds, row.p99_seconds, row.max_seconds)),
            )
            for row in most
        ],
        "<><>>>>>",
    )


def _anomalies(report: Report) -> list[str]:
    latency = report.latency
    if not latency.rows and not latency.anomaly_count:
        return []
    title = f"Far slower than usual, or stalled ({format_integer(latency.anomaly_count)})"
    if not latency.anomalies:
        return [title, "  none"]
    rows = [
        (
            format_time(one.time_seconds),
            shorten(one.comm, 16),
            UNKNOWN if one.rank is None else str(one.rank),
            one.op,
            format_bytes(one.payload_bytes),
            format_seconds(one.seconds),
            format_seconds(one.typical_seconds),
            one.cause or UNKNOWN,
        )
        for one in latency.anomalies
    ]
    header = ("when", "communicator", "rank", "operation", "payload", "took", "usually", "cause")
    return [title, *format_table([header, *rows[:MOST_ROWS]], "<<><>>><"), *_more(latency.anomaly_count)]


def _composition(report: Report) -> list[str]:
    composition = report.composition
    lines = _section(
        "Composition (payload; a rank that takes part, on average)",
        ("for", "communicators", "calls", "payload", "calls of a rank", "payload of a rank"),
        [
            (
                role.role,
                format_integer(role.communicators),
                format_integer(role.calls),
                format_bytes(role.known_payload_bytes),
                format_integer(role.rank_calls),
                format_bytes(role.known_rank_payload_bytes),
            )
            for role in composition.roles
        ],
        "<>>>>>",
    )
    shape = composition.parallelism
    if shape is not None:
        sure = "" if shape.certain else "perhaps "
        expert = f" × expert {shape.expert}" if shape.expert > 1 else ""
        words = f"{sure}pipeline {shape.pipeline} × tensor {shape.tensor} × data {shape.data}{expert}: {shape.reason}"
        lines = [*(lines or ["Composition"]), *_wrapped(words)]
    return lines


def _iterations(report: Report) -> list[str]:
    regularity, iterations = report.regularity, report.iterations
    if regularity is None:
        return []
    rows = [
        ("period", format_seconds(regularity.period_seconds), _spread(iterations)),
        ("duty cycle", format_share(regularity.duty_cycle), "of the time something was communicated"),
        ("recurrence", format_share(regularity.recurrence), "of iterations make the usual calls in the usual order"),
        ("communication", format_share(median_of(one.comm_ratio for one in iterations)), "of an iteration, median"),
        (
            "not overlapped",
            format_share(median_of(one.non_overlapped_ratio for one in iterations)),
            "of an iteration, median",
        ),
    ]
    title = (
        f"Iterations ({format_integer(regularity.iterations)}, of "
        f"{format_count(regularity.calls_per_iteration, 'call')} each)"
    )
    told = [line for sentence in describe_other_calls(report) for line in _wrapped(sentence)]
    return [title, *format_table(rows, "<><"), *told]


def _role_times(report: Report) -> list[str]:
    if not report.role_times:
        return []
    return _section(
        f"Communication by parallelism (GPU {report.role_times[0].gpu}, mean of an iteration; kinds may overlap)",
        ("for", "time", "of an iteration", "not overlapped", "of an iteration"),
        [
            (
                one.role,
                format_seconds(one.seconds),
                format_share(one.ratio),
                format_seconds(one.non_overlapped_seconds),
                format_share(one.non_overlapped_ratio),
            )
            for one in report.role_times
        ],
        "<>>>>",
    )


def _spread(iterations: Sequence[Iteration]) -> str:
    if not iterations:
        return ""
    periods = [one.period_seconds for one in iterations]
    return f"{format_seconds(min(periods))} to {format_seconds(max(periods))}"


def _all_to_all(report: Report) -> list[str]:
    worst, equal = most_uneven_iterations(report), describe_even_iterations(report)
    lines = _section(
        f"Unequal all-to-all ({format_count(len(worst), 'iteration')}; the least equal first; wire bytes of a pair)",
        ("began", "max − min", "max / min", "(max − min) / mean", "in all"),
        [
            (
                f"+{format_seconds(start - report.began_seconds)}",
                format_bytes(one.max_minus_min_bytes),
                UNKNOWN if one.max_over_min is None else format_digits(one.max_over_min),
                format_digits(one.relative),
                format_bytes(one.total_bytes),
            )
            for start, one in worst
        ],
        ">>>>>",
    )
    return [*(lines or ["Unequal all-to-all"]), *_wrapped(equal)] if equal else lines


def _bandwidth(report: Report) -> list[str]:
    most = sorted(report.bandwidth, key=lambda row: (-row.payload_bytes * row.count, row.op, row.payload_bytes))
    return _section(
        "Effective bandwidth (median; the bus's against the links' rate)",
        ("operation", "payload", "count", "algorithm", "bus", "utilisation"),
        [
            (
                row.op,
                format_size_class(row.payload_bytes, row.over_bytes),
                format_integer(row.count),
                format_rate(row.algbw_bytes_per_second),
                format_rate(row.busbw_bytes_per_second),
                format_share(row.utilisation),
            )
            for row in most
        ],
        "<>>>>>",
    )


def _receives(report: Report) -> list[str]:
    most = sorted(report.receives, key=lambda one: (-one.idle_seconds, one.gpu))
    return _section(
        "Receives (the longest waiting first)",
        ("GPU", "transferring", "waiting", "bubble"),
        [
            (
                str(one.gpu),
                format_seconds(one.active_seconds),
                format_seconds(one.idle_seconds),
                format_share(one.bubble_ratio),
            )
            for one in most
        ],
        ">>>>",
    )


def _scaling(report: Report) -> list[str]:
    return _section(
        "Scaling (against the first run; weak: the batch grows with the GPUs, strong: it stays the same)",
        ("run", "GPUs", "iterations/s", "scaling", "weak factor", "strong factor"),
        scaling_rows(report),
        "<>><>>",
    )


def _section(
    title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], sides: str, count: int | None = None
) -> list[str]:
    """A table of the first rows, of `count` where they are not all; nothing where there are none."""
    if not rows:
        return []
    return [title, *format_table([header, *rows[:MOST_ROWS]], sides), *_more(len(rows) if count is None else count)]


def _more(rows: int) -> list[str]:
    return [f"  … and {rows - MOST_ROWS:,} more"] if rows > MOST_ROWS else []


def _sentences(title: str, sentences: Iterable[str]) -> list[str]:
    told = [line for sentence in sentences for line in _wrapped(sentence, "- ")]
    return [title, *told] if told else []


def _wrapped(text: str, mark: str = "") -> list[str]:
    indent = " " * (2 + len(mark))
    return textwrap.wrap(text, _COLUMNS, initial_indent=f"  {mark}", subsequent_indent=indent, break_on_hyphens=False)
