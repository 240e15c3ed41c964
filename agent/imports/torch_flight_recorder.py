"""Dumps of PyTorch's flight recorder (`TORCH_FR_BUFFER_SIZE`, `TORCH_NCCL_TRACE_BUFFER_SIZE`): one file a rank.

A dump is a pickle of plain data, or JSON with the same content:

    {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": [
     {"record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
      "profiling_name": "nccl:all_reduce", "time_created_ns": 1724779239936775119, "input_sizes": [[3, 4]],
      "input_dtypes": ["Float"], "output_sizes": [[3, 4]], "output_dtypes": ["Float"], "state": "completed",
      "time_discovered_started_ns": null, "time_discovered_completed_ns": 1724779239975811724, "is_p2p": false}]}

The rank is in the file's name alone (`nccl_trace_rank_3`).  `time_created_ns` is when the call was made; beginnings
and ends are when a thread that looks now and then has noticed them, and only `duration_ms` is the GPU's.  Send and
Recv have the ranks of the group in their name (`nccl:send 0->1`).

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp and ProcessGroupNCCL.cpp of PyTorch 2.4 to 2.9.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from railscope.agent.dataset.schema import UNNAMED_NODE
from railscope.agent.imports.facts import ImportedCall, ImportedEnd, ImportedOperation, Problems
from railscope.agent.imports.json_stream import JsonStream, text, whole_number
from railscope.agent.imports.kineto import NO_HOST, rank_in_name
from railscope.agent.imports.plain_pickle import PickleRefused, read_plain_pickle
from railscope.agent.imports.sources import Source, read_whole
from railscope.agent.imports.target import ImportTarget
from railscope.agent.imports.torch_names import (
    Group,
    Sizes,
    Transfer,
    UnknownName,
    expand_transfers,
    parse_data_type,
    parse_operation,
    parse_whole_numbers,
    payload_bytes,
)
from railscope.probes.nccl.abi import Op

FORMAT: Final = "torch-flight-recorder"
_PICKLE: Final = b"\x80"
_LARGEST_PICKLE_BYTES: Final = 1 << 29
_MOST_DIMENSIONS: Final = 64
_MOST_TENSORS: Final = 1 << 16
_MOST_NS: Final = 1 << 62
_PEERS: Final = re.compile(r"\S (\d{1,7})(?:->|<-)(\d{1,7})")
_LAST_NUMBER: Final = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle))?$")


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a dump of PyTorch's NCCL flight recorder."""
    if head[:1] == _PICKLE:
        return head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return any(word in head for word in (b'"pg_config"', b'"pg_status"', b'"nccl_comm_state"', b'"collective_seq_id"'))


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None) -> None:
    """Put what dumps of PyTorch's NCCL flight recorder hold into the dataset; `node` None: the files do not say."""
    for source in sources:
        _Dump(source, target, problems, node or UNNAMED_NODE).read()
    if node is None:
        problems.add_note(NO_HOST)


def rank_text_in_name(label: str) -> str:
    """The rank that only the name of a flight recorder's dump tells; empty: none."""
    number, named = _LAST_NUMBER.search(label), rank_in_name(label)
    if named is not None:
        return str(named)
    return "" if number is None else str(int(number[1]))


class _Dump:
    """One file: one rank."""

    def __init__(self, source: Source, target: ImportTarget, problems: Problems, node: str) -> None:
        rank = rank_text_in_name(source.label)
        self._source = source
        self._target = target
        self._problems = problems
        self._node = node
        self._rank = int(rank) if rank else None
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Description and ranks by name."""
        self._instances: dict[str, int] = {}
        self._version = ""

    def read(self) -> None:
        with self._source.open() as stream:
            pickled = stream.peek(1)[:1] == _PICKLE
        if self._rank is None:
            self._problems.add_note("a dump's file name does not end with its rank: the rank is unknown")
        if pickled:
            self._pickle()
        else:
            for _ in self._json(report=False):
                pass
            for line, entry in self._json(report=True):
                self._entry(line, entry)
        self._finish()

    def _pickle(self) -> None:
        with self._source.open() as stream:
            content = read_whole(stream, _LARGEST_PICKLE_BYTES)
            damage = stream.damage
        if damage or content is None:
            self._skip(0, damage or f"larger than {_LARGEST_PICKLE_BYTES} bytes: too large for a dump")
            return
        try:
            dump = read_plain_pickle(content)
        except PickleRefused as error:
            self._skip(0, str(error))
            return
        if not isinstance(dump, dict):
            self._skip(0, "the pickle is not a dump of the flight recorder")
            return
        for key, value in dump.items():
            self._header(key, value)
        entries = dump.get("entries")
        for number, entry in enumerate(entries if isinstance(entries, list) else [], 1):
            self._entry(number, entry)

    def _json(self, report: bool) -> Iterator[tuple[int, Any]]:
        """Entries with their lines; `pg_config` may stand behind them, so the first round only takes what it holds."""

        def ignore(_line: int, _reason: str) -> None:
            return

        with self._source.open() as stream:
            for element in JsonStream(stream, {"entries"}, self._skip if report else ignore).elements():
                if element.key in ("entries", ""):
                    yield element.line, element.value
                else:
                    self._header(element.key, element.value)
            if report and stream.damage:
                self._skip(0, stream.damage)

    def _header(self, key: object, value: object) -> None:
        if key == "comm_lib_version":
            self._version = text(value)
        elif key == "pg_config" and isinstance(value, dict):
            for name, group in value.items():
                if isinstance(group, dict) and isinstance(name, str):
                    self._groups[name] = text(group.get("desc")), parse_whole_numbers(group.get("ranks")) or ()

    def _entry(self, line: int, entry: object) -> None:
        if not isinstance(entry, dict):
            self._skip(line, "a malformed entry")
            return
        try:
            self._operation(entry)
        except UnknownName as error:
            self._skip(line, str(error))

    def _operation(self, entry: Mapping[str, Any]) -> None:
        name = text(entry.get("profiling_name"))
        op = parse_operation(name)
        if op is None:
            return
        created_ns = whole_number(entry.get("time_created_ns"))
        if created_ns is None or not 0 <= created_ns < _MOST_NS:
            raise UnknownName("an entry without its time")
        kinds = entry.get("input_dtypes") or entry.get("output_dtypes")
        kind = parse_data_type(text(kinds[0] if isinstance(kinds, list | tuple) and kinds else kinds))
        group = self._group(entry)
        instance = self._instance(group.name)
        peers = _PEERS.search(name)
        named = int(peers[2]) if peers is not None else None
        made = [(one, payload_bytes(kind, one.elements)) for one in _transfers(op, entry, group, named, self._problems)]
        sequence = None if op in (Op.Send, Op.Recv) else whole_number(entry.get("collective_seq_id"))
        for one, size_bytes in made:
            self._target.add(
                self._node,
                ImportedCall(
                    time_ns=created_ns,
                    instance=instance,
                    tid=whole_number(entry.get("thread_id")),
                    op=one.op.name,
                    data_type=kind.name,
                    payload_bytes=size_bytes,
                    peer=one.peer,
                    sequence=sequence,
                ),
            )
        times = _times(entry)
        if times is None:
            return
        alone, alone_bytes = made[0] if len(made) == 1 else (None, None)
        self._target.add(
            self._node,
            ImportedOperation(
                instance=instance,
                begin_ns=times[0],
                end_ns=times[1],
                op=op.name,
                data_type=kind.name,
                payload_bytes=alone_bytes,
                peer=None if alone is None else alone.peer,
                sequence=sequence,
                source="cuda",
            ),
        )

    def _group(self, entry: Mapping[str, Any]) -> Group:
        named = entry.get("process_group")
        said = [text(part) for part in named] if isinstance(named, list | tuple) else [text(named)]
        name = (said[0] if said else "") or str(whole_number(entry.get("pg_id")))
        description, ranks = self._groups.get(name, ("", ()))
        if not description and len(said) > 1:
            description = said[1]
            self._groups[name] = description, ranks
        return Group(name, description, len(ranks) or None, ranks)

    def _instance(self, name: str) -> int:
        if name not in self._instances:
            self._instances[name] = self._target.new_instance(self._node)
        return self._instances[name]

    def _finish(self) -> None:
        ends = []
        for name, instance in self._instances.items():
            description, ranks = self._groups.get(name, ("", ()))
            group = Group(name, description, len(ranks) or None, ranks)
            ends.append(
                ImportedEnd(
                    instance=instance,
                    comm=group.comm,
                    rank=group.rank_of(self._rank),
                    nranks=group.size,
                    world_rank=self._rank,
                    group_name=description or None,
                    nccl_version=self._version or None,
                )
            )
        self._target.add_ends(self._node, ends)

    def _skip(self, line: int, reason: str) -> None:
        self._problems.count_skipped(self._source.name, line, reason)


def _transfers(op: Op, entry: Mapping[str, Any], group: Group, peer: int | None, problems: Problems) -> list[Transfer]:
    inputs, outputs = _elements(entry.get("input_sizes")), _elements(entry.get("output_sizes"))
    if "coalesced" in text(entry.get("profiling_name")).lower() and len(inputs) == len(outputs):
        # One call of NCCL a tensor, in a group.
        return [
            one
            for own, other in zip(inputs, outputs, strict=True)
            for one in expand_transfers(op, Sizes(own, other, group.size), peer)
        ]
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if op is Op.AllToAll:
        if group.size and len(inputs) == len(outputs) == group.size > 1:
            splits = inputs, outputs
        elif sum(inputs) != sum(outputs):
            raise UnknownName("an AllToAll of unequal split sizes, which the dump lacks")
        else:
            problems.add_note(
                "the dumps lack the split sizes of an AllToAll: equal splits are assumed if it sends and receives "
                "the same number of elements"
            )
    return expand_transfers(op, Sizes(sum(inputs), sum(outputs), group.size, *splits), peer)


def _elements(sizes: object) -> tuple[int, ...]:
    """Elements of each tensor, from its dimensions."""
    if not isinstance(sizes, list | tuple) or len(sizes) > _MOST_TENSORS:
        raise UnknownName("an entry without its sizes")
    result = []
    for dimensions in sizes:
        known = parse_whole_numbers(list(dimensions)) if isinstance(dimensions, list | tuple) else None
        if known is None or len(known) > _MOST_DIMENSIONS:
            raise UnknownName("an entry without its sizes")
        result.append(math.prod(known))
    if not all(0 <= one < 1 << 58 for one in [*result, sum(result)]):
        raise UnknownName("impossible sizes")
    return tuple(result)


def _times(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """When the operation began and ended; None: not known."""
    end_ns = whole_number(entry.get("time_discovered_completed_ns"))
    if not end_ns or not 0 < end_ns < _MOST_NS:
        return None
    length_ms = entry.get("duration_ms")
    if isinstance(length_ms, int | float) and 0 <= length_ms < 1e12:
        return end_ns - round(length_ms * 1e6), end_ns
    begin_ns = whole_number(entry.get("time_discovered_started_ns"))
    return (begin_ns, end_ns) if begin_ns and 0 < begin_ns < end_ns else None
