"""Imports files that stand for themselves, such as a trace or a dump for each rank, on all processors.

Members of an archive are such files, where it is not compressed: of a compressed one every process would have to unpack
all that comes before its own.

Files are shared out, and each share is read and written by a process; what it comes to is put together in the order of
the files, so that the result does not depend on how many processors there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from railscope.agent.imports import kineto, torch_flight_recorder
from railscope.agent.imports.communication_kernels import KernelNames
from railscope.agent.imports.facts import Problems
from railscope.agent.imports.gpu_work import KernelTally
from railscope.agent.imports.imported_rows import MOST_SHARES, ImportedRows, NodeRows
from railscope.agent.imports.parallel import Workers, count_bytes
from railscope.agent.imports.sources import Source, Sources
from railscope.agent.imports.target import ImportTarget

_SHARES_OF_A_PROCESSOR: Final = 4
"""So that none waits long for the last one."""


_Place = tuple[Path, int]
"""A file, and where in it a source begins: 0, but for members of an archive."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process is told to import."""

    number: int
    """From 1."""
    format: str
    places: tuple[_Place, ...]
    folder: Path
    node: str | None
    names: KernelNames
    recordings: Mapping[str, int]
    """The number of each node's recording."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a share."""

    nodes: dict[str, NodeRows]
    written: list[Path]
    problems: Problems
    found: KernelTally | int
    """Of traces, the kernels that need words; of dumps, how many operations were not complete."""


def can_share(form: str, sources: Sequence[Source], workers: Workers) -> bool:
    """Whether these files can be read by several processes, and there are any."""
    independent = form in (kineto.FORMAT, torch_flight_recorder.FORMAT)
    return independent and workers.count > 0 and len(sources) > 1 and all(source.file is not None for source in sources)


def import_shares(
    form: str,
    sources: Sequence[Source],
    target: ImportTarget,
    problems: Problems,
    workers: Workers,
    node: str | None,
    names: KernelNames,
) -> None:
    """Import files of a format of which `can_share` says so; as one process would.

    Raises:
        ImportFailure: a process was killed.
        OSError: the dataset cannot be written.
    """
    find_node = kineto.find_node if form == kineto.FORMAT else torch_flight_recorder.find_node
    recordings = target.recordings_of(find_node(source.label, node) for source in sources)
    tally = KernelTally()
    unfinished = 0
    shares = [
        _Share(number, form, places, target.folder, node, names, recordings)
        for number, places in enumerate(_shared_out(sources, workers.count), 1)
    ]
    for done in workers.map(_import_share, shares):
        target.add_share(done.nodes, done.written)
        problems.add(done.problems)
        if isinstance(done.found, KernelTally):
            tally.add(done.found)
        else:
            unfinished += done.found
    if form == kineto.FORMAT:
        tally.add_notes(problems)
    else:
        torch_flight_recorder.add_notes(problems, unfinished, node)


def _import_share(share: _Share) -> _Done:
    problems = Problems()
    rows = ImportedRows(share.folder, share.recordings.__getitem__, share.number)
    found: KernelTally | int
    # What is wrong with archives was said when they were opened for the first time.
    with Sources(tuple(dict.fromkeys(path for path, _ in share.places)), Problems()) as opened:
        there = {(source.file, source.offset): source for source in opened}
        sources = [replace(there[place], count=count_bytes) for place in share.places]
        if share.format == kineto.FORMAT:
            found = kineto.read_files(sources, rows, problems, share.node, share.names)
        else:
            found = torch_flight_recorder.read_files(sources, rows, problems, share.node)
    rows.flush()
    return _Done(rows.nodes, rows.written, problems, found)


def _shared_out(sources: Sequence[Source], processors: int) -> list[tuple[_Place, ...]]:
    """Files one after the other, in shares of about the same size."""
    count = min(processors * _SHARES_OF_A_PROCESSOR, MOST_SHARES - 1)
    least_bytes = sum(source.size_bytes for source in sources) / count
    shares: list[tuple[_Place, ...]] = []
    own: list[_Place] = []
    size_bytes = 0
    for source in sources:
        assert source.file is not None, "only such are shared out"
        own.append((source.file, source.offset))
        size_bytes += source.size_bytes
        if size_bytes >= least_bytes:
            shares.append(tuple(own))
            own, size_bytes = [], 0
    return [*shares, tuple(own)] if own else shares
