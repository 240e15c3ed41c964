"""The dataset that importers write to: one recording for each node that the data names.

Rows go to disk in batches, so what is in memory does not grow with what is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from railscope.agent.dataset.files import UNNAMED_NODE, node_folder
from railscope.agent.dataset.leftovers import has_row, remove_recordings
from railscope.agent.dataset.replacement import remove_replaced, replacing
from railscope.agent.dataset.schema import SCHEMA_VERSION
from railscope.agent.imports.earlier import Content
from railscope.agent.imports.facts import ImportedCall, ImportedEnd, ImportedKernel, ImportedOperation
from railscope.agent.imports.imported_rows import ImportedRows, NodeRows, fit_name
from railscope.agent.imports.job_names import find_tag, with_tag


@dataclass(frozen=True, slots=True)
class ImportedNode:
    """What was put into the dataset for one node."""

    node: str
    communicator_ends: int
    calls: int
    operations: int
    kernels: int


class ImportTarget(ImportedRows):
    """Takes what one importer finds in files of one format."""

    def __init__(self, folder: Path, source: str, content: Content) -> None:
        """`source` is the name of the format, for `recordings.source`; `content` stands for what is in the files.

        Numbers of recordings follow from both and the node.  What is imported again has the next number that is free,
        and earlier imports that it replaces go when all of this one is there: until then they count, and this one does
        not.
        """
        super().__init__(folder, self._free_number)
        self._source = source
        self._content = content
        self._replaces = {recording for earlier in content.replaces for recording in earlier.recordings}
        """Folder of the node and number of each recording that goes when this import is there."""
        self._in_shares = False
        """Other processes write parts."""
        self.replaced = False
        """The same was in the dataset before, and gave way."""
        self.doubled = False
        """A rank of a communicator was found twice: the files are not those of one job."""
        self.another_job = False
        """Communicators have the names of others in the dataset, and got names of their own."""
        self.several_jobs = False
        """More than one job in the dataset may be the one that these are of."""

    @property
    def empty(self) -> bool:
        """Whether nothing was found."""
        return not any(
            one.counts or any(one.rows.values()) or any(one.columns.values()) or one.ends for one in self.nodes.values()
        )

    def finish(self, lines_skipped: int) -> tuple[ImportedNode, ...]:
        """Write what is left; `lines_skipped` stands in the first node's recording, since no node owns them.

        Raises:
            OSError: something cannot be written, or what was there before not be removed; call `discard`.
        """
        self.flush()
        self._name_apart()
        places = _places({name: one.ends for name, one in self.nodes.items()})
        for name, one in sorted(self.nodes.items()):
            began_ns = one.began_ns or 0
            if one.ends:
                rows = [_end_row(end, *places[name, end.instance]) for end in one.ends]
                self.written.append(one.writer.add_rows("communicators", rows, began_ns))
            if one.connections:
                links = [link._asdict() for link in one.connections]
                self.written.append(one.writer.add_rows("connections", links, began_ns))
        new = [(_place(self._folder, name), one.writer.recording) for name, one in self.nodes.items()]
        with replacing(self._folder, new, self._replaces):
            try:
                result = self._write_recordings(lines_skipped)
            except BaseException:
                # Before what hides them ends.
                self.discard()
                raise
        # From here on this import is the one that stays, whatever becomes of the others.
        self.written.clear()
        remove_replaced(self._folder, new, self._replaces)
        self.replaced = bool(self._replaces)
        return result

    def _write_recordings(self, lines_skipped: int) -> tuple[ImportedNode, ...]:
        result = []
        for number, (name, one) in enumerate(sorted(self.nodes.items())):
            began_ns, ended_ns = one.began_ns or 0, one.ended_ns or 0
            recording = {
                "schema_version": SCHEMA_VERSION,
                "source": self._source,
                "railscope": metadata.version("railscope"),
                "simulated": False,
                "began_ns": began_ns,
                "ended_ns": ended_ns,
                "clock_error_ns": self.clock_error_ns,
                "lines_skipped": 0 if number else lines_skipped,
                "compute_recorded": one.counts[ImportedKernel] > 0,
                "times_known": self.times_known,
            }
            self.written.append(one.writer.add_rows("recordings", [recording], began_ns, self._content.metadata))
            result.append(
                ImportedNode(
                    node=name,
                    communicator_ends=sum(end.attributed is not False for end in one.ends),
                    calls=one.counts[ImportedCall],
                    operations=one.counts[ImportedOperation],
                    kernels=one.counts[ImportedKernel],
                )
            )
        return tuple(result)

    def _name_apart(self) -> None:
        """Give communicators names that are not those of another job in the dataset."""
        ends = [end for one in self.nodes.values() for end in one.ends]
        ends = [end for end in ends if end.comm is not None]
        ranked = [(end.comm, end.rank) for end in ends if end.rank is not None]
        self.doubled = len(ranked) != len(set(ranked))
        moments = [one.began_ns for one in self.nodes.values() if one.began_ns is not None]
        moments += [one.ended_ns for one in self.nodes.values() if one.ended_ns is not None]
        window = (min(moments), max(moments)) if moments and self.times_known else None
        gone = {one.writer.recording for one in self.nodes.values()}
        gone.update(recording for _, recording in self._replaces)
        named = [(fit_name(end.comm), end.rank) for end in ends if end.comm is not None]
        tag, self.several_jobs = find_tag(self._folder, self._source, named, window, gone)
        self.another_job = tag is None
        tag = self._content.digest.hex()[:8] if tag is None else tag
        for one in self.nodes.values():
            one.ends = [
                end if end.comm is None else replace(end, comm=with_tag(fit_name(end.comm), tag)) for end in one.ends
            ]

    def discard(self) -> None:
        """Take away what was written and does not count yet: what it replaces is still there, or was not removed."""
        for file in reversed(self.written):
            with contextlib.suppress(OSError):
                file.unlink()
        if self._in_shares:
            # Of those that came to no end nobody knows the files.
            places = [(_place(self._folder, name), one.writer.recording) for name, one in self.nodes.items()]
            with contextlib.suppress(OSError):
                remove_recordings(self._folder, places)

    @property
    def folder(self) -> Path:
        """The dataset's."""
        return self._folder

    def add_share(self, nodes: Mapping[str, NodeRows], written: Sequence[Path]) -> None:
        """Add what another process has written, of nodes for which `recordings_of` has given the numbers."""
        self.written += written
        for name, one in nodes.items():
            own = self.node(name)
            own.ends += one.ends
            own.connections += one.connections
            for kind, count in one.counts.items():
                own.counts[kind] += count
            own.began_ns = min((at for at in (own.began_ns, one.began_ns) if at is not None), default=None)
            own.ended_ns = max((at for at in (own.ended_ns, one.ended_ns) if at is not None), default=None)

    def recordings_of(self, nodes: Iterable[str]) -> dict[str, int]:
        """The numbers that other processes use to write rows of these nodes, which all have some."""
        self._in_shares = True
        return {fit_name(node): self.node(node).writer.recording for node in nodes}

    def _free_number(self, node: str) -> int:
        """The first number for this import of which there is no row; what one that was stopped has left of it goes."""
        place = _place(self._folder, node)
        for times in itertools.count():
            number = _number(self._content.digest, self._source, node, times)
            if not has_row(self._folder, place, number):
                break
            self._replaces.add((place, number))
        remove_recordings(self._folder, [(place, number)])
        return number


def _place(folder: Path, node: str) -> str:
    """The name of a node's folders."""
    return node_folder(folder, "recordings", node).name


def _number(content: bytes, source: str, node: str, times: int) -> int:
    """A number that another recording has with a chance of one in 2^62; `times`: how often others have it already."""
    text = f"{content.hex()}\n{source}\n{node}" + (f"\n{times}" if times else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


def _end_row(end: ImportedEnd, local_ranks: int | None, node_rank: int | None) -> dict[str, Any]:
    said = {name: getattr(end, name) for name in end.__slots__}
    row = {name: fit_name(value) if isinstance(value, str) else value for name, value in said.items()}
    return {**row, "local_ranks": local_ranks, "node_rank": node_rank}


def _places(nodes: dict[str, list[ImportedEnd]]) -> dict[tuple[str, int], tuple[int | None, int | None]]:
    """Ranks on the node, and index of the node, of every end; known where all ranks and their hosts are.

    NCCL numbers the nodes of a communicator by their lowest rank.
    """
    by_comm: defaultdict[str, list[tuple[str, ImportedEnd]]] = defaultdict(list)
    result: dict[tuple[str, int], tuple[int | None, int | None]] = {}
    for node, ends in nodes.items():
        for end in ends:
            if end.comm is None:
                result[node, end.instance] = None, None
            else:
                by_comm[end.comm].append((node, end))
    for members in by_comm.values():
        hosts = {end.rank: node for node, end in members if end.rank is not None}
        complete = (
            len(hosts) == len(members)
            and {end.nranks for _, end in members} == {len(members)}
            and UNNAMED_NODE not in hosts.values()
        )
        order = list(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))
        counts = Counter(hosts.values())
        for node, end in members:
            result[node, end.instance] = (counts[node], order.index(node)) if complete else (None, None)
    return result
