"""Dumps of PyTorch's flight recorder (`TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_TRACE_BUFFER_SIZE`): one file a rank.

What a file holds, and where that is written, `flight_dump` says; here its entries become calls and operations.  A
coalesced group is one operation with the times of the entry that stands for it, and its calls are those of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from railscope.agent.dataset.files import UNNAMED_NODE
from railscope.agent.dataset.schema import WORDS
from railscope.agent.facts.counted import format_count
from railscope.agent.imports import flight_dump
from railscope.agent.imports.facts import ImportedCall, ImportedEnd, ImportedOperation, Problems
from railscope.agent.imports.flight_dump import Entry, FlightDump
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
_MOST_ROWS: Final = 1 << 15
"""Of columns that are not yet in the dataset."""
_MOST_MS: Final = 1e12
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
        those = f"{format_count(unfinished, 'operation')} {'is' if unfinished == 1 else 'are'}"
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


@dataclass(frozen=True, slots=True)
class _Plain:
    """What entries have in common that are one call each, of the same kind."""

    number: int
    """Which of the kinds that are not yet in the dataset."""
    counted: bool
    """Whether its calls have numbers that all ranks come to."""


class _Columns:
    """Complete operations of one call each, as nearly all are: a call and an operation, as columns."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.all_kinds: list[tuple[int, _Made]] = []
        """Instance, and what was called."""
        self.created_ns: list[int] = []
        self.begin_ns: list[int] = []
        self.end_ns: list[int] = []
        self.sequences: list[int | None] = []
        self.threads: list[int | None] = []

    def flush(self, target: ImportedRows, node: str) -> None:
        """Put them into the dataset."""
        if self.kinds:
            numbers = pa.array(np.array(self.kinds, np.int64))
            sequences = pa.array(self.sequences, pa.int64())
            calls = [(instance, made.kind.name, *made.calls[0]) for instance, made in self.all_kinds]
            both = {
                "instance": pa.array([instance for instance, *_ in calls], pa.int64()).take(numbers),
                "data_type": pa.array([kind for _, kind, *_ in calls], WORDS).take(numbers),
                "op": pa.array([one.op.name for _, _, one, _ in calls], WORDS).take(numbers),
                "peer": pa.array([one.peer for _, _, one, _ in calls], pa.int32()).take(numbers),
                "payload_bytes": pa.array([size for *_, size in calls], pa.int64()).take(numbers),
                "sequence": sequences,
            }
            created_ns = np.array(self.created_ns, np.int64)
            threads = pa.array(self.threads, pa.int64())
            target.add_columns(node, ImportedCall, {**both, "time_ns": created_ns, "tid": threads})
            times = {"begin_ns": np.array(self.begin_ns, np.int64), "end_ns": np.array(self.end_ns, np.int64)}
            source = pa.array(["cuda"], WORDS).take(pa.array(np.zeros(len(self.kinds), np.int64)))
            target.add_columns(node, ImportedOperation, {**both, **times, "source": source})


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
        self._plain: dict[str, _Plain | None] = {}
        """By what tells it; None: more than one call."""
        self._columns = _Columns()
        self._waits: set[tuple[str, bool, int | None]] = set()
        """Group and number of what is not complete."""

    def read(self) -> None:
        if self._dump.rank is None:
            self._problems.add_note("a dump's file name does not end with its rank: the rank is unknown")
        for number, where, entry in self._dump.entries():
            try:
                if self._is_plain(entry):
                    continue
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

    def _is_plain(self, entry: Entry) -> bool:
        """Whether an entry is one call whose operation is complete, and was seen before: then it is added."""
        created_ns, end_ns, length_ms = entry.time_created_ns, entry.time_discovered_completed_ns, entry.duration_ms
        if (
            type(created_ns) is not int
            or type(end_ns) is not int
            or type(length_ms) is not float
            or not 0 <= created_ns < flight_dump.MOST_NS
            or not 0 < end_ns < flight_dump.MOST_NS
            or not 0 <= length_ms < _MOST_MS
        ):
            return False
        told = (
            f"{entry.profiling_name}\n{entry.process_group}\n{entry.pg_id}\n{entry.input_dtypes}\n{entry.output_dtypes}"
            f"\n{entry.input_sizes}\n{entry.output_sizes}"
        )
        plain = self._plain.get(told)
        if plain is None:
            if told in self._plain or len(told) > _LONGEST_KEPT:
                return False
            plain = self._find_plain(told, entry)
            if plain is None:
                return False
        columns = self._columns
        columns.kinds.append(plain.number)
        columns.created_ns.append(created_ns)
        columns.begin_ns.append(end_ns - round(length_ms * 1e6))
        columns.end_ns.append(end_ns)
        columns.sequences.append(whole_number(entry.collective_seq_id) if plain.counted else None)
        columns.threads.append(None if entry.thread_id is None else whole_number(entry.thread_id))
        if len(columns.kinds) >= _MOST_ROWS:
            self._flush()
        return True

    def _find_plain(self, told: str, entry: Entry) -> _Plain | None:
        """What entries are that say the same as this one; None: they need a closer look each."""
        if len(self._plain) >= _MOST_KINDS:
            self._flush()
        plain = None
        name = text(entry.profiling_name)
        op = None if flight_dump.stands_for_others(entry) else parse_operation(name)
        if op is not None:
            group = self._dump.group(entry)
            made = self._made(op, name, entry, group)
            if len(made.calls) == 1:
                self._columns.all_kinds.append((self._instance(group.name), made))
                plain = _Plain(len(self._columns.all_kinds) - 1, op not in _TO_ONE)
        self._plain[told] = plain
        return plain

    def _flush(self) -> None:
        self._columns.flush(self._target, self._node)
        self._columns = _Columns()
        self._plain.clear()

    def _operation(self, entry: Entry) -> None:
        name = text(entry.profiling_name)
        op = parse_operation(name)
        if op is None:
            return
        group = self._dump.group(entry)
        created_ns = _created_ns(entry)
        made = self._made(op, name, entry, group)
        if entry.state is not None and not flight_dump.is_complete(entry):
            self._waits.add((group.name, *flight_dump.coalesced_key(entry)))
        instance = self._instance(group.name)
        sequence = _sequence(op, entry)
        for one, size_bytes in made.calls:
            self._target.add(
                self._node,
                ImportedCall(
                    time_ns=created_ns,
                    instance=instance,
                    tid=whole_number(entry.thread_id),
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

    def _made(self, op: Op, name: str, entry: Entry, group: Group) -> _Made:
        """What an entry stands for."""
        kind_name = flight_dump.data_type_name(entry)
        told = f"{name}\n{kind_name}\n{group.name}\n{entry.input_sizes}\n{entry.output_sizes}"
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

    def _end_coalesced(self, entry: Entry) -> None:
        group = self._dump.group(entry)
        keys = [(group.name, *key) for key in flight_dump.keys_of_others(entry)]
        if flight_dump.is_complete(entry):
            # What was called in it never completes by itself.
            self._waits.difference_update(keys)
        made = next((self._coalesced.pop(key) for key in keys if key in self._coalesced), [])
        if made:
            self._timed(entry, group, made)

    def _timed(self, entry: Entry, group: Group, made: Sequence[_Made]) -> None:
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
        self._flush()
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


def _sequence(op: Op, entry: Entry) -> int | None:
    return None if op in (*_TO_ONE, Op.SendRecv) else whole_number(entry.collective_seq_id)


def _created_ns(entry: Entry) -> int:
    value = flight_dump.created_ns(entry)
    if value is None:
        raise UnknownName("an entry without its time")
    return value
