"""What dumps of PyTorch's flight recorder tell of a job that hangs: how far each rank came, and what it waits in.

A rank's entries of a process group are numbered as those of all other ranks are.  An entry without its completion is
what the rank waits in; behind the last one the rank called nothing more, and `pg_status` knows numbers whose entries
the recorder has overwritten.  An entry that stands for a coalesced group tells of all that was called in it, whose own
entries never complete.

torchcomms numbers all calls of a process through, whatever their group: there the place among the group's own calls is
the number, as long as no entry was overwritten.

What must be alike on all ranks is the operation, and its size where NCCL asks for that: parts of an AllToAll, a Gather
or a Scatter may differ, and so may those of gathers of unequal tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from railscope.agent.cluster.fleet.dumps import Dumps, WaitedCollective
from railscope.agent.cluster.fleet.facts import Rank, Stall
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.quantities import format_rank_numbers
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.facts.stall import LastCollectives, find_disagreement
from railscope.agent.imports import flight_dump
from railscope.agent.imports.facts import Problems
from railscope.agent.imports.flight_dump import Entry, FlightDump
from railscope.agent.imports.json_stream import text, whole_number
from railscope.agent.imports.sources import Source
from railscope.agent.imports.torch_names import Group, UnknownName, parse_data_type, parse_operation, payload_bytes
from railscope.probes.nccl.abi import Op

_SIZED: Final = frozenset({Op.AllReduce, Op.Reduce, Op.Broadcast, Op.AllGather, Op.ReduceScatter})
"""Operations whose sizes must be the same on all ranks."""
_TYPED: Final = frozenset({Op.AllReduce, Op.Reduce, Op.ReduceScatter})
"""Operations whose data types must be; others move bytes."""
_TO_ONE: Final = ("Send", "Recv")
_UNEQUAL: Final = ("all_gather_v", "reduce_scatter_v")
_MOST_NUMBERS: Final = 1 << 15
"""Of a group, of one rank: more than the recorder keeps, unless it was told to keep very many."""
_BEFORE: Final = 8
"""Collectives before the first that is not complete, and `_BEHIND` behind it, which are compared."""
_BEHIND: Final = 64
_MOST_LISTED: Final = 4


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all ranks must call alike."""

    op: str
    payload_bytes: int | None
    data_type: str

    def __str__(self) -> str:
        size = "" if self.payload_bytes is None else f" of {self.payload_bytes} bytes"
        return f"{self.op}{size}{f' {self.data_type}' * bool(self.data_type)}"


@dataclass(slots=True)
class _Called:
    """Everything of one number: one call, or all of a coalesced group."""

    shapes: list[_Shape] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    created_ns: int | None = None
    done: bool = True
    whole: bool | None = None
    """Whether the entry that stands for all is complete; None: there is none."""

    @property
    def complete(self) -> bool:
        return self.done if self.whole is None else self.whole

    @property
    def shape(self) -> _Shape:
        """Of all calls of the number."""
        if len(self.shapes) == 1:
            return self.shapes[0]
        sizes = [one.payload_bytes for one in self.shapes]
        known = [size for size in sizes if size is not None]
        ops = " and ".join(dict.fromkeys(one.op for one in self.shapes)) or "a coalesced group"
        return _Shape(ops, sum(known) if known and len(known) == len(sizes) else None, "")


@dataclass(slots=True)
class _End:
    """One rank's end of one process group."""

    group: Group
    collectives: dict[int, _Called] = field(default_factory=dict)
    to_one: dict[int, _Called] = field(default_factory=dict)
    enqueued: int | None = None
    """By `pg_status`, as `completed`."""
    completed: int | None = None
    comparable: bool = True
    """Its numbers are those of other ranks."""

    @property
    def entered(self) -> int | None:
        known = [number for number in (self.enqueued, max(self.collectives, default=None)) if number is not None]
        return max(known, default=None)

    @property
    def open(self) -> int | None:
        """The first collective that is not complete; None: all are."""
        found = min((number for number, one in self.collectives.items() if not one.complete), default=None)
        if found is None and self.enqueued is not None and self.completed is not None:
            # Of a number that has an entry the entry knows better.
            after = range(max(self.completed, 0) + 1, min(self.enqueued, self.completed + _MOST_NUMBERS) + 1)
            found = next((number for number in after if number not in self.collectives), None)
        return found

    @property
    def waits_for(self) -> tuple[str, int | None] | None:
        """The first Send, Recv or batch of them that is not complete, and its peer; None: all are."""
        found = min((number for number, one in self.to_one.items() if not one.complete), default=None)
        if found is None:
            return None
        called = self.to_one[found]
        receives = [peer for peer, shape in zip(called.peers, called.shapes, strict=True) if shape.op == "Recv"]
        ops = {shape.op for shape in called.shapes}
        peer = (receives or called.peers)[0]
        return (ops.pop() if len(ops) == 1 else "SendRecv"), peer if peer >= 0 else None


class _OneRank:
    """One dump."""

    def __init__(self, source: Source, problems: Problems) -> None:
        def skip(line: int, reason: str, entry: int) -> None:
            problems.count_skipped(source.name, line, reason, entry)

        self._dump = FlightDump(source, skip)
        self.ends: dict[str, _End] = {}
        """By communicator."""
        self.latest_ns = 0
        self.tells_state = True
        self._counts: Counter[str] | None = Counter() if _is_numbered_through(self._dump) else None
        """Calls by group so far, where calls are numbered through; None: they are not."""
        self.overwritten = False
        """Entries are gone: the first that is left is not the first that there was."""
        self._read()

    @property
    def rank(self) -> int | None:
        return self._dump.rank

    def _read(self) -> None:
        by_id: dict[str, str] = {}
        first = True
        for _, _, entry in self._dump.entries():
            if first:
                self.overwritten = (whole_number(entry.record_id) or 0) > 0
                first = False
            group = self._dump.group(entry)
            end = self.ends.setdefault(group.comm, _End(group))
            by_id[str(entry.pg_id)] = group.comm
            self._record(end, entry)
        if self._counts is not None and self.overwritten:
            for end in self.ends.values():
                end.comparable = False
        for name, status in self._dump.status.items():
            if name in by_id and self._counts is None:
                end = self.ends[by_id[name]]
                end.enqueued = _number(status, "last_enqueued_collective")
                end.completed = _number(status, "last_completed_collective")

    def _record(self, end: _End, entry: Entry) -> None:
        self.tells_state &= entry.tells_state
        done = flight_dump.is_complete(entry)
        moments = (entry.time_created_ns, entry.time_discovered_completed_ns)
        self.latest_ns = max(self.latest_ns, *(whole_number(one) or 0 for one in moments))
        if flight_dump.stands_for_others(entry):
            self._record_whole(end, entry, done)
            return
        shape = _shape(entry, end.group)
        if shape is None:
            return
        to_one, number = flight_dump.coalesced_key(entry)
        to_one |= shape.op in _TO_ONE
        if self._counts is not None and not to_one:
            self._counts[end.group.comm] += 1
            number = self._counts[end.group.comm]
        if number is None:
            return
        called = _of_number(end.to_one if to_one else end.collectives, number)
        called.shapes.append(shape)
        peer = flight_dump.named_peer(entry)
        called.peers.append(-1 if peer is None else peer)
        called.done &= done
        if called.created_ns is None:
            called.created_ns = flight_dump.created_ns(entry)

    @staticmethod
    def _record_whole(end: _End, entry: Entry, done: bool) -> None:
        for to_one, number in flight_dump.keys_of_others(entry):
            of_kind = end.to_one if to_one else end.collectives
            if number in of_kind:
                of_kind[number].whole = done
                return
        to_one, number = flight_dump.coalesced_key(entry)
        if number is not None and not to_one:
            called = _of_number(end.collectives, number)
            called.whole, called.created_ns = done, flight_dump.created_ns(entry)


def _is_numbered_through(dump: FlightDump) -> bool:
    """Whether calls of all groups, and of point to point, have one sequence of numbers: that of the entries."""
    groups = set()
    before = -1
    for _, _, entry in dump.entries():
        number = whole_number(entry.collective_seq_id)
        if number is None or number <= before or number != whole_number(entry.record_id):
            return False
        before = number
        groups.add(str(entry.process_group))
        if not entry.is_p2p and flight_dump.named_peer(entry) is not None:
            groups.add("")
    return len(groups) > 1


def _of_number(calls: dict[int, _Called], number: int) -> _Called:
    if number not in calls and len(calls) >= _MOST_NUMBERS:
        del calls[min(calls)]
    return calls.setdefault(number, _Called())


def _number(status: Mapping[str, Any], name: str) -> int | None:
    value = whole_number(status.get(name))
    return value if value is not None and value >= 0 else None


def _shape(entry: Entry, group: Group) -> _Shape | None:
    """What an entry is, as far as all ranks must call it alike; None: nothing that is communication."""
    name = text(entry.profiling_name)
    try:
        op = parse_operation(name)
    except UnknownName:
        return _Shape(name[:60], None, "")
    if op is None:
        return None
    if op.name in _TO_ONE:
        return _Shape(op.name, None, "")
    if op not in _SIZED or any(one in name for one in _UNEQUAL) or _is_unequal(entry):
        return _Shape(op.name, None, "")
    try:
        kind = parse_data_type(flight_dump.data_type_name(entry))
        made = flight_dump.transfers(op, entry, group, _no_note)
        size = sum(payload_bytes(kind, one.elements) for one in made)
    except UnknownName:
        return _Shape(op.name, None, "")
    return _Shape(op.name, size, kind.name.lower() if op in _TYPED else "")


def _no_note(_text: str) -> None:
    return


def _is_unequal(entry: Entry) -> bool:
    """Whether an operation gathers or scatters tensors of different sizes."""
    if "coalesced" in text(entry.profiling_name).lower():
        return False
    for sizes in (entry.input_sizes, entry.output_sizes):
        if isinstance(sizes, list | tuple) and len({repr(one) for one in sizes[:_MOST_NUMBERS]}) > 1:
            return True
    return False


def read_flight_dumps(sources: Sequence[Source], problems: Problems) -> Dumps:
    """What dumps of one job's ranks tell together; a file whose name tells no rank is left out, and counted."""
    dumps: dict[int, _OneRank] = {}
    for source in sources:
        one = _OneRank(source, problems)
        if one.rank is None:
            problems.count_skipped(source.name, 0, "its name does not end with the rank: it is left out")
        elif one.rank in dumps:
            problems.count_skipped(source.name, 0, f"another file is of rank {one.rank}, too: it is left out")
        else:
            dumps[one.rank] = one
    groups: dict[str, Group] = {}
    for one in dumps.values():
        for comm, end in one.ends.items():
            groups.setdefault(comm, end.group)
    ranks: list[Rank] = []
    waited: list[WaitedCollective] = []
    for comm, group in sorted(groups.items()):
        of_group, found = _group(comm, group, dumps)
        ranks += of_group
        waited += [found] if found is not None else []
    latest_ns = max((one.latest_ns for one in dumps.values()), default=0)
    latest_ns = latest_ns or max((source.modified_ns for source in sources), default=0)
    told = len(dumps)
    silent = sorted(number for number, one in dumps.items() if not one.tells_state)
    return Dumps(
        at=latest_ns / 1e9,
        ranks=tuple(ranks),
        names=tuple((comm, group.description) for comm, group in groups.items() if group.description),
        waited=tuple(waited),
        told=(f"{format_count(told, 'dump')} of PyTorch's flight recorder",),
        lacking=tuple(_lacking(groups.values(), dumps)),
        open=(f"entries of {format_rank_numbers(map(str, silent))} do not say whether they completed",) * bool(silent),
    )


def _lacking(groups: Iterable[Group], dumps: Mapping[int, _OneRank]) -> Iterable[str]:
    members = {rank for group in groups for rank in group.ranks}
    if lost := sorted(members - dumps.keys()):
        yield f"no dump of {format_rank_numbers(map(str, lost))} of the job"
    if unknown := sorted({group.description or group.name for group in groups if not group.ranks}):
        yield f"the ranks of {', '.join(unknown[:_MOST_LISTED])} are not known"


def _group(comm: str, group: Group, dumps: Mapping[int, _OneRank]) -> tuple[list[Rank], WaitedCollective | None]:
    """The ranks of one communicator that were dumped, and the collective that they wait in."""
    ends = {
        number: one.ends.get(comm, _End(group))
        for number, one in dumps.items()
        if comm in one.ends or number in group.ranks
    }
    opens = {number: end.open for number, end in ends.items() if end.comparable}
    first = min((number for number in opens.values() if number is not None), default=None)
    last = _last_collectives(ends, first)
    ranks = [
        _rank(comm, group, number, end, last.get(number), overwritten=dumps[number].overwritten)
        for number, end in ends.items()
    ]
    if first is None:
        return ranks, None
    called = {number: end.collectives[first] for number, end in ends.items() if first in end.collectives}
    made = []
    for number, one in sorted(called.items()):
        shape, own = one.shape, group.rank_of(number)
        made.append((number if own is None else own, shape.op, shape.payload_bytes, shape.data_type))
    created = [one.created_ns for one in called.values() if one.created_ns]
    return ranks, WaitedCollective(
        comm=comm,
        number=first,
        op=Counter(op for _, op, *_ in made).most_common(1)[0][0] if made else "",
        made=tuple(made),
        since=min(created) / 1e9 if created else None,
    )


def _last_collectives(ends: Mapping[int, _End], first: int | None) -> dict[int, LastCollectives[str]]:
    """What the ranks called about the first collective that is not complete, of those that are to be compared.

    A rank that did not call it is compared only where it differs in an earlier one: else it is missing, and the others
    may still differ among themselves.
    """
    if first is None:
        return {}
    found: dict[int, LastCollectives[str]] = {}
    for number, end in ends.items():
        known = end.collectives
        if not known or not end.comparable:
            continue
        last = min(max(known), first + _BEHIND)
        shapes: list[str] = []
        while last - len(shapes) in known and last - len(shapes) >= first - _BEFORE:
            shapes.append(str(known[last - len(shapes)].shape))
        if shapes:
            found[number] = LastCollectives(last, tuple(reversed(shapes)))
    if find_disagreement(found, str) is not None:
        return found
    return {number: one for number, one in found.items() if one.last >= first}


def _rank(
    comm: str,
    group: Group,
    number: int,
    end: _End,
    last: LastCollectives[str] | None,
    *,
    overwritten: bool,
) -> Rank:
    own = group.rank_of(number)
    labels = {"nranks": str(group.size)} if group.size is not None else {}
    identity = rank_identity_from_labels(
        comm, str(number if own is None else own), labels, (("world_rank", str(number)),)
    )
    entered = end.entered
    if entered is None and not overwritten and not end.to_one:
        entered = 0
    first = end.open
    stall = None
    if first is not None:
        op = end.collectives[first].shape.op if first in end.collectives else ""
        stall = Stall(op, Cause.RANK_BEHIND, "strong")
    elif (waits := end.waits_for) is not None:
        stall = Stall(waits[0], Cause.RANK_BEHIND, "strong", "" if waits[1] is None else str(waits[1]))
    return Rank(
        identity,
        host="",
        enqueued=entered,
        completed=entered if first is None or entered is None else first - 1,
        position=None if entered is None or not end.comparable else Position(entered),
        stall=stall,
        last=last,
    )
