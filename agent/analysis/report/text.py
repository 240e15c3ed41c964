"""A report as text for a terminal: one table a question, each short; what is longer is in the JSON.

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
    counted,
    digits,
    moment,
    numbers,
    rate,
    share,
    shortened,
    size,
    size_class,
    span,
    whole,
)
from railscope.agent.analysis.facts.report import CommunicatorUse, GpuFacts, Iteration, Report
from railscope.agent.analysis.report.communicator_words import carries, telling
from railscope.agent.analysis.report.report import has_times
from railscope.agent.analysis.report.words import (
    equal_iterations,
    least_equal,
    median_of,
    scaling_rows,
    unknown_by_reason,
    used_of_link,
)
from railscope.agent.analysis.traffic.sizes import cdf
from railscope.agent.facts.text_tables import printable_lines, table

MOST_ROWS: Final = 10
_COLUMNS: Final = 100


def as_text(report: Report) -> str:
    """Sections with a heading each, an empty line between them."""
    sections = (
        _job(report),
        _ops(report),
        _sizes(report),
        _communicators(report),
        _pairs(report),
        _servers(report),
        _rails(report),
        _latency(report),
        _anomalies(report),
        _composition(report),
        _iterations(report),
        _all_to_all(report),
        _bandwidth(report),
        _receives(report),
        _scaling(report),
        _sentences(
            "Not known", (f"{', '.join(names)}: {reason}" for reason, names in unknown_by_reason(report.unknown))
        ),
        _sentences("Losses", (loss for loss in report.losses if loss != report.several_jobs)),
    )
    return printable_lines("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


def _job(report: Report) -> list[str]:
    servers = Counter(gpu.server for gpu in report.gpus)
    of = f" on {counted(len(servers), 'server')}" if servers else ""
    made_up = "; simulated hardware" if report.simulated else ""
    when = f"{span(report.seconds)} from {moment(report.began_seconds)}" if has_times(report) else "times are not known"
    communicators = counted(len(report.communicators), "communicator")
    return [
        f"{counted(len(report.gpus), 'GPU')}{of}, {communicators}, {when}{made_up}",
        # Before any figure: they are of all of them.
        *textwrap.wrap(report.several_jobs or report.one_of_several, _COLUMNS, break_on_hyphens=False),
    ]


def _ops(report: Report) -> list[str]:
    calls = sum(use.calls for use in report.ops)
    rows = [
        (use.op, use.dtype, whole(use.calls), share(use.calls / calls), size(use.payload_bytes)) for use in report.ops
    ]
    return _section(
        f"Operations ({counted(calls, 'call')} of all recorded ranks, payload)",
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
        f"Sizes of calls ({counted(len(report.sizes), 'size')})",
        ("operation", "payload", "bytes", "calls", "of calls"),
        [_size_row(use, calls) for use in report.sizes.most_frequent(MOST_ROWS)],
        "<>>>>",
        len(report.sizes),
    )
    below = ", ".join(f"{percent} % up to {size(points.quantile_bytes(percent / 100))}" for percent in (50, 90, 99))
    return [*lines, f"  of calls {below}; the largest {size(points.quantile_bytes(1.0))}"]


def _size_row(use: SizeUse, calls: int) -> tuple[str, ...]:
    return (use.op, size(use.bytes), whole(use.bytes), whole(use.calls), share(use.calls / calls))


def _communicators(report: Report) -> list[str]:
    return _section(
        "Communicators (recorded ranks together, payload; of each role one at least)",
        ("communicator", "role", "ranks", "GPUs", "calls", "payload", "carries"),
        [_communicator_row(use) for use in telling(report.communicators, MOST_ROWS)],
        "<<><>><",
        len(report.communicators),
    )


def _communicator_row(use: CommunicatorUse) -> tuple[str, ...]:
    ranks = UNKNOWN if use.nranks is None else whole(use.nranks)
    if use.nranks is not None and len(use.gpus) < use.nranks:
        ranks = f"{len(use.gpus):,} of {use.nranks:,}"
    members = numbers(use.gpus)
    return (shortened(use.comm, 16), use.role, ranks, members, whole(use.calls), size(use.payload_bytes), carries(use))


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
            size(pair.wire_bytes),
            share(pair.wire_bytes / total),
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
    told = f"  directed pairs that talk: {len(traffic.pairs):,} of {possible:,} ({share(traffic.sparsity)})"
    return [*lines, told, *_wrapped(traffic.basis)]


def _gpu(gpu: GpuFacts) -> str:
    return f"{gpu.number} ({gpu.server})"


def _servers(report: Report) -> list[str]:
    traffic = report.matrix
    total = traffic.pairs.total_bytes
    if not total:
        return []
    if not traffic.between_servers_wire_bytes:
        return ["Between servers (wire bytes)", f"  nothing: all {size(total)} stay inside servers"]
    leaving = traffic.between_servers_wire_bytes
    rows = [("leave the servers", size(leaving), f"{share(leaving / total)} of {size(total)}")]
    for what, part in (("cross rails", traffic.cross_rail_wire_bytes), ("reach the spine", traffic.spine_wire_bytes)):
        rows.append((what, size(part), UNKNOWN if part is None else f"{share(part / leaving)} of that"))
    busiest = sorted(traffic.server_transmit_wire_bytes, key=lambda row: (-row[1], row[0]))
    rows += [(f"{server} sends", size(part), share(part / leaving)) for server, part in busiest[:MOST_ROWS]]
    return ["Between servers (wire bytes)", *table(rows, "<><"), *_more(len(busiest))]


def _rails(report: Report) -> list[str]:
    busiest = sorted(
        report.rails, key=lambda use: (-(use.transmit_bytes + use.receive_bytes), use.server, use.rail, use.device)
    )
    lines = _section(
        "Rails (port bytes: what the NICs counted; rates on average, and in the busiest second)",
        ("server", "rail", "device", "sent", "a second", "at most", "received", "a second", "at most", "of the link"),
        [
            (
                shortened(use.server, 20),
                use.rail or UNKNOWN,
                shortened(use.device, 16),
                size(use.transmit_bytes),
                rate(use.transmit_bytes_per_second),
                rate(use.peak_transmit_bytes_per_second),
                size(use.receive_bytes),
                rate(use.receive_bytes_per_second),
                rate(use.peak_receive_bytes_per_second),
                used_of_link(use),
            )
            for use in busiest
        ],
        "<<<>>>>>>>",
    )
    return [*lines, *_wrapped(report.shared_rails)]


def _latency(report: Report) -> list[str]:
    most = sorted(report.latency.rows, key=lambda row: (-row.count, row.op, row.payload_bytes or 0, row.source))
    return _section(
        "How long operations take",
        ("operation", "payload", "from", "count", "median", "90 %", "99 %", "longest"),
        [
            (
                row.op,
                size_class(row.payload_bytes, row.over_bytes),
                row.source,
                whole(row.count),
                *map(span, (row.p50_seconds, row.p90_seconds, row.p99_seconds, row.max_seconds)),
            )
            for row in most
        ],
        "<><>>>>>",
    )


def _anomalies(report: Report) -> list[str]:
    latency = report.latency
    if not latency.rows and not latency.anomaly_count:
        return []
    title = f"Far slower than usual, or stalled ({whole(latency.anomaly_count)})"
    if not latency.anomalies:
        return [title, "  none"]
    rows = [
        (
            moment(one.time_seconds),
            shortened(one.comm, 16),
            UNKNOWN if one.rank is None else str(one.rank),
            one.op,
            size(one.payload_bytes),
            span(one.seconds),
            span(one.typical_seconds),
            one.cause or UNKNOWN,
        )
        for one in latency.anomalies
    ]
    header = ("when", "communicator", "rank", "operation", "payload", "took", "usually", "cause")
    return [title, *table([header, *rows[:MOST_ROWS]], "<<><>>><"), *_more(latency.anomaly_count)]


def _composition(report: Report) -> list[str]:
    composition = report.composition
    lines = _section(
        "Composition (payload; a rank that takes part, on average)",
        ("for", "communicators", "calls", "payload", "calls of a rank", "payload of a rank"),
        [
            (
                role.role,
                whole(role.communicators),
                whole(role.calls),
                size(role.payload_bytes),
                whole(role.rank_calls),
                size(role.rank_payload_bytes),
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
        ("period", span(regularity.period_seconds), _spread(iterations)),
        ("duty cycle", share(regularity.duty_cycle), "of the time something was communicated"),
        ("recurrence", share(regularity.recurrence), "of iterations make the usual calls in the usual order"),
        ("communication", share(median_of(one.comm_ratio for one in iterations)), "of an iteration, median"),
        ("not overlapped", share(median_of(one.non_overlapped_ratio for one in iterations)), "of an iteration, median"),
    ]
    title = f"Iterations ({whole(regularity.iterations)}, of {counted(regularity.calls_per_iteration, 'call')} each)"
    return [title, *table(rows, "<><")]


def _spread(iterations: Sequence[Iteration]) -> str:
    if not iterations:
        return ""
    periods = [one.period_seconds for one in iterations]
    return f"{span(min(periods))} to {span(max(periods))}"


def _all_to_all(report: Report) -> list[str]:
    worst, equal = least_equal(report), equal_iterations(report)
    lines = _section(
        f"Unequal all-to-all ({counted(len(worst), 'iteration')}; the least equal first; wire bytes of a pair)",
        ("began", "max − min", "max / min", "(max − min) / mean", "in all"),
        [
            (
                f"+{span(start - report.began_seconds)}",
                size(one.max_minus_min_bytes),
                UNKNOWN if one.max_over_min is None else digits(one.max_over_min),
                digits(one.relative),
                size(one.total_bytes),
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
                size_class(row.payload_bytes, row.over_bytes),
                whole(row.count),
                rate(row.algbw_bytes_per_second),
                rate(row.busbw_bytes_per_second),
                share(row.utilisation),
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
        [(str(one.gpu), span(one.active_seconds), span(one.idle_seconds), share(one.bubble_ratio)) for one in most],
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
    return [title, *table([header, *rows[:MOST_ROWS]], sides), *_more(len(rows) if count is None else count)]


def _more(rows: int) -> list[str]:
    return [f"  … and {rows - MOST_ROWS:,} more"] if rows > MOST_ROWS else []


def _sentences(title: str, sentences: Iterable[str]) -> list[str]:
    told = [line for sentence in sentences for line in _wrapped(sentence, "- ")]
    return [title, *told] if told else []


def _wrapped(text: str, mark: str = "") -> list[str]:
    indent = " " * (2 + len(mark))
    return textwrap.wrap(text, _COLUMNS, initial_indent=f"  {mark}", subsequent_indent=indent, break_on_hyphens=False)
