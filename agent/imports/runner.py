"""Imports files: detects each file's format by its first bytes and runs that format's importer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TextIO

from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.replacement import finish_replacements
from railscope.agent.facts.counted import format_count
from railscope.agent.imports import (
    chakra,
    deepspeed,
    execution_trace,
    flight_dump,
    gpu_database,
    kineto,
    nccl_inspector,
    nccl_log,
    nccl_profiler,
    nccl_ras,
    railscope_recording,
    rocprof_json,
    torch_flight_recorder,
)
from railscope.agent.imports.communication_kernels import KernelNames
from railscope.agent.imports.earlier import find_content
from railscope.agent.imports.facts import FORMATS, ImportFailure, Problems
from railscope.agent.imports.kineto import NO_HOST
from railscope.agent.imports.parallel import Workers
from railscope.agent.imports.progress import Progress
from railscope.agent.imports.shares import can_share, import_shares
from railscope.agent.imports.sources import Source, Sources
from railscope.agent.imports.target import ImportedNode, ImportTarget

_JSON: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*[\[{]")

_TESTS: Final[tuple[tuple[str, Callable[[bytes], bool]], ...]] = (
    (railscope_recording.FORMAT, railscope_recording.has_format),
    (gpu_database.ROCPD, gpu_database.is_rocpd),
    (gpu_database.NSYS, gpu_database.is_nsys),
    (rocprof_json.FORMAT, rocprof_json.has_format),
    (nccl_inspector.FORMAT, nccl_inspector.has_format),
    (nccl_profiler.FORMAT, nccl_profiler.has_format),
    (nccl_ras.FORMAT, nccl_ras.has_format),
    (kineto.FORMAT, kineto.has_format),
    (torch_flight_recorder.FORMAT, flight_dump.has_format),
    (chakra.FORMAT, execution_trace.has_format),
    (chakra.FORMAT, chakra.has_format),
)
"""In this order: what comes first is the more certain.  Those of JSON are asked only of what begins as JSON does."""
_TEXT_TESTS: Final = (
    (nccl_ras.FORMAT, nccl_ras.has_format),
    (nccl_inspector.FORMAT, nccl_inspector.is_textfile),
    (nccl_log.FORMAT, nccl_log.has_format),
    (deepspeed.FORMAT, deepspeed.has_format),
)


def detect_format(source: Source) -> str | None:
    """Which importer a file is for; None: it has no format that is known."""
    return detect_format_of_head(source.head())


def detect_format_of_head(head: bytes) -> str | None:
    """As `detect_format`, from the first bytes."""
    if not head:
        return None
    binary = not _JSON.match(head)
    text_first = binary and not head.startswith(gpu_database.MAGIC) and (b"NCCL INFO " in head or b"comm op: " in head)
    if not text_first:
        for name, test in _TESTS:
            if test(head) and (not binary or name in (railscope_recording.FORMAT, *_BINARY)):
                return name
    for name, test in _TEXT_TESTS:
        if test(head):
            return name
    return None


_BINARY: Final = (torch_flight_recorder.FORMAT, chakra.FORMAT, gpu_database.NSYS, gpu_database.ROCPD)
"""Formats that are binary, or have a binary form as well."""


_SAID_BY_NAMES: Final[dict[str, Callable[[str], str]]] = {
    kineto.FORMAT: kineto.rank_text_in_name,
    chakra.FORMAT: chakra.rank_text_in_name,
    torch_flight_recorder.FORMAT: flight_dump.rank_text_in_name,
}
"""What only the names of files tell, by format: what two ranks did may look alike."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported."""

    folder: Path
    files: tuple[tuple[str, str], ...]
    """Each file and its format."""
    nodes: tuple[ImportedNode, ...]
    recordings: int
    """railscope's own recordings, which are not in `nodes`."""
    times_known: bool
    problems: Problems


def import_paths(
    paths: Sequence[Path],
    folder: Path,
    chosen: str | None,
    node: str | None,
    ranks: int | None = None,
    names: KernelNames | None = None,
    progress: TextIO | None = None,
) -> Imported:
    """Import files of any known format into a dataset's folder.

    Args:
        chosen: the format of all files; None: each file's own beginning tells.
        node: the host of files that do not name theirs.
        ranks: how many ranks the job has, where files do not say; None: not known.
        names: what is known of kernels by their names; None: the table alone.
        progress: where to show how far it is; None: nowhere.

    Raises:
        ImportFailure: a file cannot be opened or is of no known format, or there is nothing in any of them.
        DatasetError: a recording of railscope's cannot be read.
        OSError: the dataset cannot be written.
    """
    problems = Problems()
    paths = list(dict.fromkeys(paths))
    finish_replacements(folder)
    there = _recorded(folder)
    with Sources(paths, problems) as opened, ExitStack() as stack:
        size_bytes = sum(source.size_bytes for source in opened)
        shown = Progress(size_bytes, progress)
        stack.callback(shown.clear)
        workers = stack.enter_context(Workers(size_bytes, shown))
        sources = [replace(source, count=shown.add) for source in opened]
        by_format = _sorted_by_format(sources, chosen, problems)
        nodes: list[ImportedNode] = []
        recordings, times_known, kept = 0, True, False
        for name, own in by_format.items():
            if name == railscope_recording.FORMAT:
                recordings = railscope_recording.import_files(own, folder, problems)
                continue
            before = problems.count
            content = find_content(own, name, _SAID_BY_NAMES.get(name, _nothing), folder)
            for copy in content.copies:
                problems.add_note(f"{copy} has the same content as another of these files: it is left out")
            for cut in content.cut_off:
                problems.add_note(
                    f"{cut} is the beginning of a file that was imported before: the longer import is kept"
                )
            kept |= bool(content.cut_off)
            if not content.sources:
                continue
            target = ImportTarget(folder, name, content)
            try:
                _import(name, content.sources, target, problems, _Said(node, ranks, names or KernelNames(), workers))
                if not target.empty:
                    nodes += target.finish(problems.count - before)
                    times_known &= target.times_known
            except BaseException:
                workers.stop()
                target.discard()
                raise
            if target.replaced:
                problems.add_note(
                    "these files, or their beginnings, were already in the dataset: their earlier import is replaced"
                )
            if target.another_job:
                problems.add_note(
                    "the dataset has another job with the same communicator names: this job's communicators are renamed"
                )
            if target.several_jobs:
                problems.add_note(
                    "these hosts may belong to any of several jobs in the dataset: they are assigned to the first; "
                    "if that is wrong, import all hosts of each job with one command into another folder"
                )
            if target.doubled:
                problems.add_note(
                    "a rank occurs twice in a communicator: if these files are of several jobs, import each job with "
                    "its own command"
                )
    if not nodes and not recordings and not kept:
        reasons = [str(problems.first[0])] if problems.first else [one for one in problems.notes if one != NO_HOST]
        reason = f" ({reasons[0]})" if reasons else ""
        raise ImportFailure(f"{paths[0]}: it contains no calls and no operations{reason}")
    others = len(there & _recorded(folder)) if nodes or recordings else 0
    if others:
        what = "another recording or import is" if others == 1 else f"{others} other recordings or imports are"
        problems.add_note(f"{what} in the folder too: a report covers all of them together")
    return Imported(
        folder=folder,
        files=tuple((source.name, name) for name, own in by_format.items() for source in own),
        nodes=tuple(nodes),
        recordings=recordings,
        times_known=times_known,
        problems=problems,
    )


def _recorded(folder: Path) -> set[tuple[Path, int]]:
    """What stands for each recording and import in a folder; one that is written anew is another."""
    return {(file, file.stat().st_mtime_ns) for file in table_files(folder, "recordings")}


def _nothing(_label: str) -> str:
    return ""


def _sorted_by_format(sources: Sequence[Source], chosen: str | None, problems: Problems) -> dict[str, list[Source]]:
    by_format: defaultdict[str, list[Source]] = defaultdict(list)
    if not sources and problems.first:
        raise ImportFailure(str(problems.first[0]))
    for source in sources:
        name = chosen or detect_format(source)
        if name is not None:
            by_format[name].append(source)
            continue
        reason = f"unknown format: choose one of {', '.join(FORMATS)} with --format"
        if len(sources) == 1:
            raise ImportFailure(f"{source.name}: {reason}")
        problems.count_skipped(source.name, 0, reason)
    if not by_format:
        known = ", ".join(FORMATS)
        raise ImportFailure(
            f"none of the {format_count(len(sources), 'file')} has a known format: choose one of {known} with --format"
        )
    return by_format


@dataclass(frozen=True, slots=True)
class _Said:
    """What the user says of files that do not."""

    node: str | None
    ranks: int | None
    names: KernelNames
    workers: Workers


def _import(name: str, sources: Sequence[Source], target: ImportTarget, problems: Problems, said: _Said) -> None:
    node = said.node
    if can_share(name, sources, said.workers):
        import_shares(name, sources, target, problems, said.workers, node, said.names)
    elif name == nccl_log.FORMAT:
        nccl_log.import_files(sources, target, problems, said.workers)
    elif name == nccl_inspector.FORMAT:
        nccl_inspector.import_files(sources, target, problems, said.workers)
    elif name == gpu_database.NSYS:
        gpu_database.import_nsys(sources, target, problems, node, said.names)
    elif name == gpu_database.ROCPD:
        gpu_database.import_rocpd(sources, target, problems, node, said.names)
    elif name == rocprof_json.FORMAT:
        rocprof_json.import_files(sources, target, problems, node, said.names)
    elif name == kineto.FORMAT:
        kineto.import_files(sources, target, problems, node, said.names)
    elif name == torch_flight_recorder.FORMAT:
        torch_flight_recorder.import_files(sources, target, problems, node)
    elif name == deepspeed.FORMAT:
        deepspeed.import_files(sources, target, problems, node, said.ranks)
    elif name == nccl_profiler.FORMAT:
        nccl_profiler.import_files(sources, target, problems, node)
    elif name == nccl_ras.FORMAT:
        nccl_ras.import_files(sources, target, problems)
    else:
        host_traces = [source for source in sources if _is_host_trace(source)]
        others = [source for source in sources if source not in host_traces]
        if host_traces:
            execution_trace.import_files(host_traces, target, problems, node)
        if others:
            chakra.import_files(others, target, problems, node, said.ranks)


def _is_host_trace(source: Source) -> bool:
    return execution_trace.has_format(source.head())
