"""Dumps of PyTorch's flight recorder (`TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_TRACE_BUFFER_SIZE`): one file a rank.

What a file holds, and where that is written, `flight_dump` says; here its entries become calls and operations.  A
coalesced group is one operation with the times of the entry that stands for it, and its calls are those of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railscope.agent.dataset.schema import UNNAMED_NODE
from railscope.agent.imports import flight_dump
from railscope.agent.imports.facts import ImportedCall, ImportedEnd, ImportedOperation, Problems
from railscope.agent.imports.flight_dump import FlightDump
from railscope.agent.imports.imported_rows import ImportedRows
from railscope.agent.imports.json_stream import text, whole_number
from railscope.agent.imports.kineto import NO_HOST
from railscope.agent.imports.sources import Source
from railscope.agent.imports.torch_names import (
    Group,
    Transfer,
    UnknownName,
    parse_data_type,
    parse_operation,
    payload_bytes,
)
from railscope.probes.nccl.abi import DataType, Op

FORMAT: Final = "torch-flight-recorder"
_MOST_COALESCED: Final = 1 << 12
"""Groups whose end is awaited; of others it is not known any more what was in them."""
_MOST_KINDS: Final = 1 << 12
_LONGEST_KEPT: Final = 1 << 10
_TO_ONE: Final = frozenset({Op.Send, Op.Recv})


def import_files(sources: Sequence[Source], target: ImportedRows, problems: Problems, node: str | None) -> None:
    """Put what dumps of PyTorch's NCCL flight recorder hold into the dataset; `node` None: the files do not say."""
    add_notes(problems, read_files(sources, target, problems, node), node)


def read_files(sources: Sequence[Source], target: ImportedRows, problems: Problems, node: str | None) -> int:
    """As `import_files`, without its notes; returns how many operations are not complete."""
    unfinished = 0
    for source in sources:
        one = _Import(source, target, problems, find_node(source.label, node))
        one.read()
        unfinished += one.unfinished
    return unfinished


def add_notes(problems: Problems, unfinished: int, node: str | None) -> None:
    """Say what a reader of the figures should know of all dumps together."""
    if unfinished:
        those = "1 operation is" if unfinished == 1 else f"{unfinished:,} operations are"
        problems.add_note(
            f"{those} not complete in these dumps: if the job hangs, railscope diagnose FILE… says who is to blame"
        )
    if node is None:
        problems.add_note(NO_HOST)


def find_node(_label: str, node: str | None) -> str:
    """The host of a dump: dumps do not name theirs."""
    return node or UNNAMED_NODE


@dataclass(frozen=True, slots=True)
class _Made:
    """What an entry stands for."""

    op: Op
    kind: DataType
    calls: tuple[tuple[Transfer, int], ...]
    """With the payload of each."""


class _Import:
    """One file: one rank."""

    def __init__(self, source: Source, target: ImportedRows, problems: Problems, node: str) -> None:
        self._source = source
        self._dump = FlightDump(source, self._skip)
        self._target = target
        self._problems = problems
        self._node = node
        self._instances: dict[str, int] = {}
        self._coalesced: defaultdict[tuple[str, bool, int | None], list[_Made]] = defaultdict(list)
        """What was called together, by group and number, until its end comes."""
        self._kinds: dict[str, _Made] = {}
        """By what tells it: a job makes the same calls again and again."""
        self._waits: set[tuple[str, bool, int | None]] = set()
        """Group and number of what is not complete."""

    def read(self) -> None:
        if self._dump.rank is None:
            self._problems.add_note("a dump's file name does not end with its rank: the rank is unknown")
        for number, where, entry in self._dump.entries():
            try:
                if flight_dump.stands_for_others(entry):
                    self._end_coalesced(entry)
                else:
                    self._operation(entry)
            except UnknownName as error:
                self._skip(where(), str(error), number)
        self._finish()

    @property
    def unfinished(self) -> int:
        """How many operations are not complete."""
        return len(self._waits)

    def _operation(self, entry: Mapping[str, Any]) -> None:
        name = text(entry.get("profiling_name"))
        op = parse_operation(name)
        if op is None:
            return
        group = self._dump.group(entry)
        created_ns = _created_ns(entry)
        made = self._made(op, name, entry, group)
        if "state" in entry and not flight_dump.is_complete(entry):
            self._waits.add((group.name, *flight_dump.coalesced_key(entry)))
        instance = self._instance(group.name)
        sequence = _sequence(op, entry)
        for one, size_bytes in made.calls:
            self._target.add(
                self._node,
                ImportedCall(
                    time_ns=created_ns,
                    instance=instance,
                    tid=whole_number(entry.get("thread_id")),
                    op=one.op.name,
                    data_type=made.kind.name,
                    payload_bytes=size_bytes,
                    peer=one.peer,
                    sequence=sequence,
                ),
            )
        if flight_dump.entry_times(entry) is not None:
            self._timed(entry, group, [made])
        elif len(self._coalesced) < _MOST_COALESCED:
            self._coalesced[group.name, *flight_dump.coalesced_key(entry)].append(made)

    def _made(self, op: Op, name: str, entry: Mapping[str, Any], group: Group) -> _Made:
        """What an entry stands for."""
        kind_name = flight_dump.data_type_name(entry)
        told = f"{name}\n{kind_name}\n{group.name}\n{entry.get('input_sizes')}\n{entry.get('output_sizes')}"
        made = self._kinds.get(told)
        if made is None:
            kind = parse_data_type(kind_name)
            found = flight_dump.transfers(op, entry, group, self._problems.add_note)
            made = _Made(op, kind, tuple((one, payload_bytes(kind, one.elements)) for one in found))
            if len(told) <= _LONGEST_KEPT:
                if len(self._kinds) >= _MOST_KINDS:
                    self._kinds.clear()
                self._kinds[told] = made
        return made

    def _end_coalesced(self, entry: Mapping[str, Any]) -> None:
        group = self._dump.group(entry)
        keys = [(group.name, *key) for key in flight_dump.keys_of_others(entry)]
        if flight_dump.is_complete(entry):
            # What was called in it never completes by itself.
            self._waits.difference_update(keys)
        made = next((self._coalesced.pop(key) for key in keys if key in self._coalesced), [])
        if made:
            self._timed(entry, group, made)

    def _timed(self, entry: Mapping[str, Any], group: Group, made: Sequence[_Made]) -> None:
        """Add the one operation that some calls are, where its times are known."""
        times = flight_dump.entry_times(entry)
        if times is None:
            return
        ops = {one.op for one in made}
        op = made[0].op if len(ops) == 1 else Op.SendRecv if ops <= _TO_ONE else Op.Unknown
        if op is Op.Unknown:
            return
        calls = [call for one in made for call in one.calls]
        alone, alone_bytes = calls[0] if len(calls) == 1 else (None, None)
        kinds = {one.kind for one in made}
        self._target.add(
            self._node,
            ImportedOperation(
                instance=self._instance(group.name),
                begin_ns=times[0],
                end_ns=times[1],
                op=op.name,
                data_type=kinds.pop().name if len(kinds) == 1 else None,
                payload_bytes=alone_bytes,
                peer=None if alone is None else alone.peer,
                sequence=_sequence(op, entry),
                source="cuda",
            ),
        )

    def _instance(self, name: str) -> int:
        if name not in self._instances:
            self._instances[name] = self._target.new_instance(self._node)
        return self._instances[name]

    def _finish(self) -> None:
        ends = []
        for name, instance in self._instances.items():
            group = self._dump.group_named(name)
            ends.append(
                ImportedEnd(
                    instance=instance,
                    comm=group.comm,
                    rank=group.rank_of(self._dump.rank),
                    nranks=group.size,
                    world_rank=self._dump.rank,
                    group_name=group.description or None,
                    nccl_version=self._dump.library_version or None,
                )
            )
        self._target.add_ends(self._node, ends)

    def _skip(self, line: int, reason: str, entry: int) -> None:
        self._problems.count_skipped(self._source.name, line, reason, entry)


def _sequence(op: Op, entry: Mapping[str, Any]) -> int | None:
    return None if op in (*_TO_ONE, Op.SendRecv) else whole_number(entry.get("collective_seq_id"))


def _created_ns(entry: Mapping[str, Any]) -> int:
    value = flight_dump.created_ns(entry)
    if value is None:
        raise UnknownName("an entry without its time")
    return value
