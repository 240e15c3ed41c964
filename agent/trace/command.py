"""`railscope export`: recordings of one or several hosts as one trace for people to look at.

The file is written under another name first, so that what was there stays until all of it is on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol, TextIO

from railscope.agent.dataset.files import DatasetError
from railscope.agent.facts.communicator_names import matches_prefix
from railscope.agent.facts.counted import format_count
from railscope.agent.recording.file import RecordingError, read_recording
from railscope.agent.trace.from_recording import RecordingFile, make_timelines
from railscope.agent.trace.same_operations import SameOperations, join_operations
from railscope.agent.trace.timeline import HostTimeline, cut_timeline
from railscope.probes.installation import remedy_for_missing_extra
from railscope.probes.printable import printable

_MOST_NAMED: Final = 8


class TraceSummary(Protocol):
    """The summary of a written trace."""

    @property
    def calls(self) -> int: ...

    @property
    def operations(self) -> int: ...

    @property
    def unfinished(self) -> int: ...

    @property
    def rail_samples(self) -> int: ...


WriteTrace = Callable[[Sequence[HostTimeline], SameOperations, IO[bytes]], TraceSummary]


def run_export(parsed: Namespace, out: TextIO, write_trace: WriteTrace) -> int:
    """Write the trace for Perfetto and say what is in it; returns the exit status.

    Raises:
        RecordingError: something cannot be read, or the trace cannot be written, or there is nothing to write.
    """
    try:
        with contextlib.ExitStack() as opened:
            sources: list[_Source] = [_Files([path for path in parsed.sources if not path.is_dir()])]
            sources += [_open_dataset(path, opened) for path in parsed.sources if path.is_dir()]
            hosts = _chosen(sources, parsed.from_seconds, parsed.seconds, parsed.comm)
    except DatasetError as error:
        raise RecordingError(str(error)) from None
    same = join_operations(hosts)
    summary = _save(parsed.perfetto, lambda file: write_trace(hosts, same, file))
    if parsed.json:
        json.dump(_as_json(parsed.perfetto, hosts, summary, same), out, indent=1)
        print(file=out)
    else:
        for line in _lines(parsed.perfetto, hosts, summary, same):
            print(printable(line), file=out)
    return 0


class _Source(Protocol):
    """Where hosts are read from."""

    def window(self) -> tuple[int, int] | None:
        """First and last moment of what was recorded, time of day in ns; None: nothing was."""

    def comms(self) -> set[str]:
        """Communicators that were recorded by name."""

    def hosts(self, from_ns: int, until_ns: int, comms: Sequence[str]) -> tuple[HostTimeline, ...]:
        """What lies between two moments; with `comms`, of these communicators."""


class _Files:
    """Recordings' files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._hosts = make_timelines([RecordingFile(path, read_recording(path)) for path in dict.fromkeys(paths)])

    def window(self) -> tuple[int, int] | None:
        if not self._hosts:
            return None
        return min(host.began_ns for host in self._hosts), max(host.ended_ns for host in self._hosts)

    def comms(self) -> set[str]:
        return {one.comm for host in self._hosts for one in host.communicators if one.comm}

    def hosts(self, from_ns: int, until_ns: int, comms: Sequence[str]) -> tuple[HostTimeline, ...]:
        return tuple(
            cut_timeline(host, from_ns, until_ns, comms)
            for host in self._hosts
            if host.began_ns <= until_ns and host.ended_ns >= from_ns
        )


def _open_dataset(folder: Path, opened: contextlib.ExitStack) -> _Source:
    try:
        from railscope.agent.dataset.reader import open_dataset
        from railscope.agent.trace.from_dataset import DatasetTimelines
    except ImportError as error:
        raise RecordingError(
            f"{folder}: datasets need the package {error.name}: {remedy_for_missing_extra('analysis')}"
        ) from None
    return DatasetTimelines(opened.enter_context(open_dataset([folder])), str(folder))


def _chosen(
    sources: Sequence[_Source], from_seconds: float, seconds: float | None, comms: Sequence[str]
) -> tuple[HostTimeline, ...]:
    windows = [window for window in (source.window() for source in sources) if window is not None]
    if not windows:
        raise RecordingError("nothing was recorded: the given recordings contain no host")
    began_ns, ended_ns = min(began_ns for began_ns, _ in windows), max(ended_ns for _, ended_ns in windows)
    from_ns = (began_ns if from_seconds >= 0 else ended_ns) + round(from_seconds * 1e9)
    until_ns = ended_ns if seconds is None else from_ns + round(seconds * 1e9)
    recorded = sorted(set().union(*(source.comms() for source in sources)))
    chosen = [comm for comm in recorded if any(matches_prefix(comm, start) for start in comms)]
    if comms and not chosen:
        there = f"there are {_some(recorded)}" if recorded else "none is known by name"
        raise RecordingError(f"--comm {' '.join(comms)}: no such communicator was recorded: {there}")
    within = tuple(host for source in sources for host in source.hosts(from_ns, until_ns, chosen))
    if not within:
        raise RecordingError(
            f"--from {from_seconds:g}: nothing was recorded then: "
            f"the recordings hold {(ended_ns - began_ns) / 1e9:.1f} s in all"
        )
    for host in within:
        if (host.operations["begin_ns"] < 0).any() or (host.compute["begin_ns"] < 0).any():
            raise RecordingError(f"{host.source}: operations began before 1970, which a trace cannot have")
    return within


def _save(path: Path, write: Callable[[IO[bytes]], TraceSummary]) -> TraceSummary:
    if path.is_dir():
        raise RecordingError(f"{path}: this is a folder: name a file, such as --perfetto {path}/job.pftrace")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            summary = write(file)
        partial.replace(path)
        return summary
    except OSError as error:
        raise RecordingError(f"{path}: the trace cannot be written: {error.strerror}") from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("perfetto", "google"):
            raise
        raise RecordingError(f"traces need the perfetto package: {remedy_for_missing_extra('traces')}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def describe_clock_agreement(hosts: Sequence[HostTimeline]) -> str:
    """How far times of the hosts of a trace may be apart from each other, in words; empty: there is only one clock."""
    clocks = {host.clock or number: host for number, host in enumerate(hosts)}
    if len(clocks) < 2:
        return f"{len(hosts)} recordings share one clock: their times compare exactly" if len(hosts) > 1 else ""
    unknown = _names(host.host for host in clocks.values() if host.error_ns is None)
    if unknown:
        return f"the clock error is unknown on {unknown}: times of different hosts may not compare"
    worst = sorted(host.error_ns or 0 for host in clocks.values())[-2:]
    return f"times of different hosts compare within {sum(worst) / 1e6:.3g} ms"


def _names(names: Iterator[str]) -> str:
    return ", ".join(sorted(set(names)))


def _lines(path: Path, hosts: Sequence[HostTimeline], summary: TraceSummary, same: SameOperations) -> Iterator[str]:
    yield f"wrote {path}"
    seconds = (max(host.ended_ns for host in hosts) - min(host.began_ns for host in hosts)) / 1e9
    simulated = " (SIMULATED hardware)" if any(host.simulated for host in hosts) else ""
    unfinished = f" and {summary.unfinished:,} unfinished" if _all_tell_unfinished(hosts) else ""
    yield (
        f"{seconds:.1f} s of {_names(host.host for host in hosts)}{simulated}: {format_count(summary.calls, 'call')}, "
        f"{format_count(summary.operations, 'completed operation')}{unfinished}, "
        f"{format_count(summary.rail_samples, 'rail sample')}"
    )
    for host in hosts:
        for text in host.missing:
            yield f"{host.host}: {text}"
    if not unfinished:
        yield "operations in flight at the end are unknown: folders contain operations once they are complete"
    if agreed := describe_clock_agreement(hosts):
        yield agreed
    yield f"arrows join what ranks did for {format_count(same.joined, 'operation')}"
    making_missed = [comm for comm in same.not_joined if comm in same.making_missed]
    for comms, why in (
        (making_missed, "some were first seen at a call, not at their making, so that earlier calls may be missing"),
        (same.not_known, "the recording does not tell whether they were watched from the first call on"),
    ):
        if comms:
            yield (
                f"not all ranks of {_some(comms)} are joined: {why}, "
                "and times do not tell which operations are the same"
            )
    yield "open it at https://ui.perfetto.dev, which reads it in the browser and sends it nowhere"


def _all_tell_unfinished(hosts: Sequence[HostTimeline]) -> bool:
    return all(host.tells_unfinished for host in hosts)


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def _as_json(path: Path, hosts: Sequence[HostTimeline], summary: TraceSummary, same: SameOperations) -> dict[str, Any]:
    return {
        "trace": str(path),
        "hosts": [
            {
                "host": host.host,
                "source": host.source,
                "simulated": host.simulated,
                "began_ns": host.began_ns,
                "ended_ns": host.ended_ns,
                "clock_error_ns": host.error_ns,
                "missing": list(host.missing),
            }
            for host in hosts
        ],
        "calls": summary.calls,
        "operations": summary.operations,
        "unfinished": summary.unfinished if _all_tell_unfinished(hosts) else None,
        "rail_samples": summary.rail_samples,
        "joined": same.joined,
        "not_joined": list(same.not_joined),
    }
