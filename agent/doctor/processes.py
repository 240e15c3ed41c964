"""Whose the processes with NCCL are, which programs they run, and how busy they are.

A command line is shown without its arguments, because what the doctor says is put into reports; `--command-lines` shows
all of it, as far as the reader may see it.  Either way it is bounded, and loses what a terminal would obey.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from railscope.agent.doctor.findings import Finding, ProcessReport
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.rank_process import describe_process
from railscope.probes.clock import Clock
from railscope.probes.processes.owner import ProcessUsage, command_line, owner_of, usage_of
from railscope.probes.processes.processes import ProcessIdentity

MOST_TOLD: Final = 32
"""In text; JSON tells of all that are reported."""
MOST_REPORTED: Final = 4096
_MOST_CHARACTERS: Final = 512
"""Of a command line."""
_WATCHED_SECONDS: Final = 0.5


def check_processes(
    procfs: Path, identities: Iterable[ProcessIdentity], clock: Clock, *, command_lines: bool
) -> tuple[list[Finding], tuple[ProcessReport, ...]]:
    """One finding and one report for each process with NCCL that still lives; takes half a second if there are any."""
    chosen = sorted(identities, key=lambda identity: identity.pid)[:MOST_REPORTED]
    if not chosen:
        return [], ()
    before = {identity: usage_of(procfs, identity, clock) for identity in chosen}
    clock.sleep(_WATCHED_SECONDS)
    findings, reports = [], []
    for identity in chosen:
        owner, usage = owner_of(procfs, identity), usage_of(procfs, identity, clock)
        if owner is None and usage is None:
            continue
        words = command_line(procfs, identity.pid) if command_lines else ()
        report = ProcessReport(
            pid=identity.pid,
            user=owner.user if owner is not None else "",
            program=owner.program if owner is not None else "",
            command_line=" ".join(words)[:_MOST_CHARACTERS] if command_lines else None,
            cpu_ratio=_cpu_ratio(before[identity], usage),
            resident_bytes=usage.resident_bytes if usage is not None else None,
            threads=usage.threads if usage is not None else None,
            start_realtime_ns=usage.start_realtime_ns if usage is not None else None,
        )
        findings.append(Finding("process", "ok", f"{describe_process(identity.pid, owner)}{_taken(report)}"))
        reports.append(report)
    more = len(findings) - MOST_TOLD
    if more > 0:
        findings[MOST_TOLD:] = [Finding("process", "ok", f"{more} more with NCCL (--json lists them)")]
    return findings, tuple(reports)


def _cpu_ratio(before: ProcessUsage | None, now: ProcessUsage | None) -> float | None:
    if before is None or now is None or now.read_realtime_ns <= before.read_realtime_ns:
        return None
    used = now.cpu_seconds - before.cpu_seconds
    return max(0.0, used) * 1e9 / (now.read_realtime_ns - before.read_realtime_ns)


def _taken(report: ProcessReport) -> str:
    parts = []
    if report.cpu_ratio is not None:
        parts.append(f"{report.cpu_ratio:.0%} of a processor")
    if report.resident_bytes is not None:
        parts.append(f"{report.resident_bytes / 1e9:.1f} GB resident")
    if report.threads is not None:
        parts.append(format_count(report.threads, "thread"))
    if report.command_line:
        parts.append(f"command line: {report.command_line}")
    return f": {', '.join(parts)}" if parts else ""
