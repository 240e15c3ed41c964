"""One file of PyTorch's flight recorder as entries and groups: a pickle of plain data, or JSON with the same content.

    {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "pg_status": {"0":
     {"last_enqueued_collective": 2, "last_started_collective": 2, "last_completed_collective": 1}}, "entries": [
     {"record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
      "profiling_name": "nccl:all_reduce", "time_created_ns": 1724779239936775119, "input_sizes": [[3, 4]],
      "input_dtypes": ["Float"], "output_sizes": [[3, 4]], "output_dtypes": ["Float"], "state": "completed",
      "time_discovered_started_ns": null, "time_discovered_completed_ns": 1724779239975811724, "is_p2p": false}]}

The rank is in the file's name alone (`nccl_trace_rank_3`).  `time_created_ns` is when the call was made; beginnings
and ends are when a thread that looks now and then has noticed them, and only `duration_ms` is the GPU's.  Send and
Recv have the ranks of the group in their name (`nccl:send 0->1`).  `pg_status` is by `pg_id`, `pg_config` by name.

What is called between two calls of PyTorch's coalescing manager, `batch_isend_irecv` among it, has an entry for each,
without times of their own, and one behind them that stands for all (`nccl:coalesced`, `nccl:ALLGATHER_coalesced`): it
has no tensors, and the same number.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp and ProcessGroupNCCL.cpp of PyTorch 2.4 to 2.10;
comms/torchcomms/hooks/fr/FlightRecorder.cpp of torchcomms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from railscope.agent.imports.json_stream import Batch, Element, JsonStream, text, whole_number
from railscope.agent.imports.plain_pickle import PickleRefused, read_plain_pickle
from railscope.agent.imports.sources import Source, read_whole
from railscope.agent.imports.torch_names import (
    Group,
    Sizes,
    Transfer,
    UnknownName,
    expand_transfers,
    parse_whole_numbers,
    rank_in_name,
)
from railscope.probes.nccl.abi import Op

_PICKLE: Final = b"\x80"
_LARGEST_PICKLE_BYTES: Final = 1 << 29
_MOST_DIMENSIONS: Final = 64
_MOST_TENSORS: Final = 1 << 16
MOST_NS: Final = 1 << 62
_PEERS: Final = re.compile(r"\S (\d{1,7})(?:->|<-)(\d{1,7})")
_LAST_NUMBER: Final = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle))?$")
EQUAL_SPLITS: Final = (
    "the dumps lack the split sizes of an AllToAll: equal splits are assumed if it sends and receives the same number "
    "of elements"
)


Where = Callable[[], int]
"""The line of an entry; 0 in a pickle, which has none."""
_HEADERS: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
"""Passes entries over."""


class Entry(msgspec.Struct, gc=False):
    """What is needed of an entry, as it stands there; its stack, which is most of it, is passed over."""

    record_id: Any = None
    pg_id: Any = None
    process_group: Any = None
    collective_seq_id: Any = None
    p2p_seq_id: Any = None
    profiling_name: Any = None
    thread_id: Any = None
    time_created_ns: Any = None
    time_discovered_started_ns: Any = None
    time_discovered_completed_ns: Any = msgspec.UNSET
    duration_ms: Any = None
    input_sizes: Any = None
    input_dtypes: Any = None
    output_sizes: Any = None
    output_dtypes: Any = None
    state: Any = None
    retired: Any = None
    is_p2p: Any = None

    @property
    def tells_state(self) -> bool:
        """Whether it says if the operation was complete."""
        return self.state is not None or self.time_discovered_completed_ns is not msgspec.UNSET


_NAMES: Final = frozenset(Entry.__struct_fields__)
_ENTRIES: Final = msgspec.json.Decoder(list[Entry]).decode


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a dump of PyTorch's NCCL flight recorder."""
    if head[:1] == _PICKLE:
        return head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return any(word in head for word in (b'"pg_config"', b'"pg_status"', b'"nccl_comm_state"', b'"collective_seq_id"'))


def rank_text_in_name(label: str) -> str:
    """The rank that only the name of a flight recorder's dump tells; empty: none."""
    number, named = _LAST_NUMBER.search(label), rank_in_name(label)
    if named is not None:
        return str(named)
    return "" if number is None else str(int(number[1]))


class FlightDump:
    """One file: one rank."""

    def __init__(self, source: Source, skip: Callable[[int, str, int], None]) -> None:
        """`skip` is told the line, 0 where there are none, the reason, and the number of the entry that is left out."""
        rank = rank_text_in_name(source.label)
        self._source = source
        self._skip = skip
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Description and ranks by name."""
        self._known: dict[str, Group] = {}
        """By name, as far as they are known so far."""
        self.rank = int(rank) if rank else None
        """In the job; None: the file's name does not tell."""
        self.library_version = ""
        self.status: dict[str, Mapping[str, Any]] = {}
        """`pg_status`, by `pg_id` as text."""

    def entries(self) -> Iterator[tuple[int, Where, Entry]]:
        """Every entry with its number, from 1, and where it is; at the first one all groups are known."""
        with self._source.open(counted=False) as stream:
            pickled = stream.peek(1)[:1] == _PICKLE
        if not pickled:
            # `pg_config` may stand behind the entries.
            for _ in self._json(report=False):
                if self._groups:
                    break
        for number, (where, entry) in enumerate(self._pickle() if pickled else self._json(report=True), 1):
            if isinstance(entry, Entry):
                yield number, where, entry
            elif isinstance(entry, dict):
                yield number, where, Entry(**{name: value for name, value in entry.items() if name in _NAMES})
            else:
                self._skip(where(), "a malformed entry", number)

    def group(self, entry: Entry) -> Group:
        """The process group that an entry names."""
        named = entry.process_group
        said = [text(part) for part in named] if isinstance(named, list | tuple) else [text(named)]
        name = (said[0] if said else "") or str(whole_number(entry.pg_id))
        description, ranks = self._groups.get(name, ("", ()))
        if not description and len(said) > 1:
            description = said[1]
            self._groups[name] = description, ranks
            self._known.clear()
        return self.group_named(name)

    def group_named(self, name: str) -> Group:
        """The process group of this name."""
        group = self._known.get(name)
        if group is None:
            description, ranks = self._groups.get(name, ("", ()))
            group = self._known[name] = Group(name, description, len(ranks) or None, ranks)
        return group

    def _pickle(self) -> Iterator[tuple[Where, Any]]:
        with self._source.open() as stream:
            content = read_whole(stream, _LARGEST_PICKLE_BYTES)
            damage = stream.damage
        if damage or content is None:
            self._skip(0, damage or f"larger than {_LARGEST_PICKLE_BYTES} bytes: too large for a dump", 0)
            return
        try:
            dump = read_plain_pickle(content)
        except PickleRefused as error:
            self._skip(0, str(error), 0)
            return
        if not isinstance(dump, dict):
            self._skip(0, "the pickle is not a dump of the flight recorder", 0)
            return
        for key, value in dump.items():
            self._header(key, value)
        entries = dump.get("entries")
        for entry in entries if isinstance(entries, list) else []:
            yield _no_line, entry

    def _json(self, report: bool) -> Iterator[tuple[Where, Any]]:
        def skip(line: int, reason: str) -> None:
            if report:
                self._skip(line, reason, 0)

        with self._source.open(counted=report) as stream:
            decode = _ENTRIES if report else _HEADERS
            for one in JsonStream(stream, {"entries"}, skip).batches({"entries": decode, "": decode}):
                if isinstance(one, Batch):
                    for number, entry in enumerate(one.values):
                        yield partial(one.place, number), entry
                elif one.key in ("entries", ""):
                    yield partial(_line_of, one), one.value
                else:
                    self._header(one.key, one.value)
            if report and stream.damage:
                self._skip(0, stream.damage, 0)

    def _header(self, key: object, value: object) -> None:
        self._known.clear()
        if key == "comm_lib_version":
            self.library_version = text(value)
        elif key == "pg_status" and isinstance(value, dict):
            self.status = {str(name): status for name, status in value.items() if isinstance(status, dict)}
        elif key == "pg_config" and isinstance(value, dict):
            for name, group in value.items():
                if isinstance(group, dict) and isinstance(name, str):
                    self._groups[name] = text(group.get("desc")), parse_whole_numbers(group.get("ranks")) or ()


def _no_line() -> int:
    return 0


def _line_of(element: Element) -> int:
    return element.line


def is_complete(entry: Entry) -> bool:
    """Whether an entry's operation was complete when the dump was made."""
    return entry.state == "completed" or entry.retired is True or bool(whole_number(entry.time_discovered_completed_ns))


def stands_for_others(entry: Entry) -> bool:
    """Whether an entry is the end of a coalesced group: what it moves stands in entries before it.

    The end is called `coalesced`, or by an OpType and that (ProcessGroupNCCL::endCoalescing).  A list of one shape
    without dimensions is no tensor there, as PyTorch's own tests write it; of `allreduce_coalesced` it is a scalar.
    """
    name = text(entry.profiling_name).rpartition(":")[2]
    if not name.lower().endswith("coalesced"):
        return False
    nothing: tuple[object, ...] = (
        ([], [[]]) if name.removesuffix("coalesced").isupper() or name == "coalesced" else ([],)
    )
    return all(not sizes or sizes in nothing for sizes in (entry.input_sizes, entry.output_sizes))


def coalesced_key(entry: Entry) -> tuple[bool, int | None]:
    """What an entry has in common with others that were called together: a number, and of which kind it is."""
    to_one = entry.is_p2p is True
    return to_one, whole_number(entry.p2p_seq_id if to_one else entry.collective_seq_id)


def keys_of_others(entry: Entry) -> tuple[tuple[bool, int | None], ...]:
    """By which keys to look for what an entry stands for: those of older releases do not say that it is point to
    point, and have the number of either kind."""
    numbers = [whole_number(one) for one in (entry.p2p_seq_id, entry.collective_seq_id)]
    return tuple(dict.fromkeys((coalesced_key(entry), *((True, number) for number in numbers))))


def named_peer(entry: Entry) -> int | None:
    """The other rank of a Send or Recv, in its group; None: it has none."""
    peers = _PEERS.search(text(entry.profiling_name))
    return int(peers[2]) if peers is not None else None


def transfers(op: Op, entry: Entry, group: Group, note: Callable[[str], None]) -> list[Transfer]:
    """The calls of NCCL that an entry stands for; `note` is told what had to be assumed.

    Raises:
        UnknownName: its sizes do not tell.
    """
    peer = named_peer(entry)
    inputs, outputs = _elements(entry.input_sizes), _elements(entry.output_sizes)
    if "coalesced" in text(entry.profiling_name).lower() and len(inputs) == len(outputs):
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
            note(EQUAL_SPLITS)
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


def data_type_name(entry: Entry) -> str:
    """PyTorch's name of an entry's data type; empty: it has none."""
    kinds = entry.input_dtypes or entry.output_dtypes
    return text(kinds[0] if isinstance(kinds, list | tuple) and kinds else kinds)


def created_ns(entry: Entry) -> int | None:
    """When an entry's call was made, time of day; None: it does not say."""
    value = whole_number(entry.time_created_ns)
    return value if value is not None and 0 <= value < MOST_NS else None


def entry_times(entry: Entry) -> tuple[int, int] | None:
    """When an entry's operation began and ended, time of day in ns; None: not known."""
    end_ns = whole_number(entry.time_discovered_completed_ns)
    if not end_ns or not 0 < end_ns < MOST_NS:
        return None
    length_ms = entry.duration_ms
    if isinstance(length_ms, int | float) and 0 <= length_ms < 1e12:
        return end_ns - round(length_ms * 1e6), end_ns
    begin_ns = whole_number(entry.time_discovered_started_ns)
    return (begin_ns, end_ns) if begin_ns and 0 < begin_ns < end_ns else None
