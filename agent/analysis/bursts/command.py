"""`railscope bursts`: the burst calendar of recorded datasets, as text or JSON (`bursts`)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from railscope.agent.analysis.facts.options import DEFAULT_MEMORY_BYTES, DUCKDB
from railscope.agent.analysis.facts.quantities import UNKNOWN
from railscope.agent.analysis.tables.missing import not_installed
from railscope.agent.facts.counted import format_count
from railscope.probes.printable import printable_lines

if TYPE_CHECKING:
    from railscope.agent.analysis.bursts.bursts import BurstCalendar, Calendar, Declined, Forecast

FINE: Final = 0
COULD_NOT_RUN: Final = 2
_UNTIMED: Final = (
    "no operation has times, so its sending time is unknown: record at level completion, or import a GPU trace"
)
_EXAMPLE: Final = """\
example, two jobs that were recorded at the same time:
  railscope bursts /data/job-a /data/job-b
"""


def add_bursts_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `railscope bursts`."""
    parser.epilog = _EXAMPLE
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="DIR|FILE", help="recorded datasets or recording files; read as one"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run_bursts(parsed: Any, out: TextIO) -> int:
    """Print the burst calendar; returns 0, or 2 where it cannot be made, with one line on standard error."""
    try:
        from railscope.agent.analysis.bursts.bursts import find_bursts
        from railscope.agent.analysis.tables.datasets_of import as_datasets
        from railscope.agent.analysis.tables.engines import engine
        from railscope.agent.dataset.reader import DatasetError, open_dataset
    except ModuleNotFoundError as error:
        print(f"railscope bursts: {not_installed(error)}", file=sys.stderr)
        return COULD_NOT_RUN
    try:
        with (
            as_datasets(parsed.paths, apart=False) as folders,
            engine(DUCKDB, DEFAULT_MEMORY_BYTES) as backend,
            open_dataset(folders, backend) as dataset,
        ):
            calendar = find_bursts(dataset)
    except DatasetError as error:
        print(f"railscope bursts: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    if parsed.json:
        json.dump(asdict(calendar), out, indent=2)
        out.write("\n")
    else:
        out.write(as_text(calendar))
    return FINE


def as_text(calendar: BurstCalendar) -> str:
    """The burst calendar in words, with numbers that people compare at a glance."""
    lines = []
    for title, entries in (("Rails", calendar.rails), ("Jobs", calendar.jobs)):
        if entries:
            lines += [title, *(_line(entry) for entry in entries), ""]
    untimed = [job.subject for job in calendar.jobs if job.duty_cycle is None] if len(calendar.jobs) > 1 else []
    if calendar.forecasts or untimed:
        lines += ["Meeting", *(_meeting(forecast) for forecast in calendar.forecasts)]
        lines += [f"  {subject}: {_UNTIMED}" for subject in untimed] + [""]
    if calendar.declined:
        lines += ["No calendar", *(f"  {one.subject}: {one.reason}{_sends(one)}" for one in calendar.declined), ""]
    if not lines:
        lines = ["The recording contains neither rails nor jobs: record while a job runs.", ""]
    return printable_lines("\n".join(lines[:-1]) + "\n")


def _sends(one: Declined) -> str:
    """What is known without a period."""
    if one.duty_cycle is None:
        return ""
    bursts = (
        ""
        if one.bursts is None
        else f", in {format_count(one.bursts, 'burst')} of {_mib(one.burst_bytes or 0)} (median)"
    )
    return f"; it sends {one.duty_cycle:.0%} of the time{bursts}"


def _line(entry: Calendar) -> str:
    duty = UNKNOWN if entry.duty_cycle is None else f"{entry.duty_cycle:.0%}"
    last = datetime.fromtimestamp(entry.last_begin, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return (
        f"  {entry.subject}: every {_seconds(entry.period_seconds)}, duty cycle {duty}, "
        f"{entry.bursts_per_period:.1f} bursts a period of {_mib(entry.burst_bytes)} ({_mib(entry.period_bytes)} a "
        f"period), regularity {entry.regularity:.2f}, last from {last} UTC; by {entry.basis}"
    )


def _meeting(forecast: Forecast) -> str:
    where = f"share {', '.join(forecast.servers)}" if forecast.servers else "share no server"
    head = f"  {forecast.first} and {forecast.second} ({where}): "
    if forecast.coincidence is None or forecast.shift_seconds is None or forecast.coincidence_shifted is None:
        return (
            f"{head}their periods drift against each other: both send {forecast.unrelated:.1%} of the time, and "
            "shifting does not help"
        )
    holds = "" if forecast.holds_seconds is None else f"; holds for about {_seconds(forecast.holds_seconds)}"
    if forecast.coincidence - forecast.coincidence_shifted < 0.0005:
        advice = "shifting does not reduce it"
    else:
        advice = f"the second one {_seconds(forecast.shift_seconds)} later: {forecast.coincidence_shifted:.1%}"
    return (
        f"{head}both send {forecast.coincidence:.1%} of the time ({forecast.unrelated:.1%} at random); {advice}{holds}"
    )


def _seconds(value: float) -> str:
    if value >= 120:
        return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB" if count >= 1 << 20 else f"{count / 1024:,.1f} KiB"
