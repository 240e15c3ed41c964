"""Chakra execution traces, one file a rank: messages (`NAME.RANK.et`), or the JSON that Chakra's jsonizer makes of it.

A trace is a graph of nodes; the ones that communicate name the operation and its bytes:

    {"id": "435", "name": "ncclDevKernel_AllReduce_…", "type": "COMM_COLL_NODE", "startTimeMicros": "12",
     "durationMicros": "28", "attr": [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val":
     "212480"}, {"name": "pg_name", "stringVal": "0"}]}

`comm_size` is what one rank puts in, which is n times NCCL's count for ReduceScatter and AllToAll.  How many ranks a
group has is what the trace says: `pg_size` or `pg_ranks` of a node, or the list of groups that PyTorch's trace begins
with, which the converter keeps as the inputs of its node.  Most traces say nothing; then the files tell it if they are
those of all ranks, which only the user knows, and otherwise it is unknown.  Send and Recv have the peer in `comm_dst`
and `comm_src`, as a rank of the job.  The host's side of an operation (`is_cpu_op`) has no `comm_type` and is not
counted again.

Many traces have no times: then they tell the order of each rank, and nothing else.  What PyTorch itself writes and
Chakra calls "host trace" is the business of `execution_trace`.

Source: schema/protobuf/et_def.proto, src/converter, src/feeder and src/jsonizer of Chakra 1.0 (schema 0.0.4);
torch/csrc/profiler/standalone/execution_trace_observer.cpp (`## process_group:init ##`).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES, UNNAMED_NODE
from railscope.agent.imports.chakra_messages import (
    BrokenMessage,
    attribute_values,
    decode_metadata,
    decode_node,
    split_messages,
)
from railscope.agent.imports.facts import (
    MOST_RANKS,
    ImportedCall,
    ImportedEnd,
    ImportedKernel,
    ImportedOperation,
    Problems,
)
from railscope.agent.imports.json_stream import JsonStream, small_number, text, whole_number
from railscope.agent.imports.kineto import NO_HOST
from railscope.agent.imports.sources import Source
from railscope.agent.imports.target import ImportTarget
from railscope.agent.imports.torch_names import parse_kernel_name, parse_whole_numbers, rank_in_name
from railscope.probes.nccl.abi import Op

FORMAT: Final = "chakra"
_COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7
_DESCRIPTION: Final = -1
"""Of the first message: no node, and no number of Chakra's."""
_TYPES: Final = {
    "COMP_NODE": _COMPUTE,
    "COMM_SEND_NODE": _SEND,
    "COMM_RECV_NODE": _RECEIVE,
    "COMM_COLL_NODE": _COLLECTIVE,
}
_COLLECTIVES: Final = (
    Op.AllReduce,
    Op.Reduce,
    Op.AllGather,
    Op.Gather,
    Op.Scatter,
    Op.Broadcast,
    Op.AllToAll,
    Op.ReduceScatter,
    Op.ReduceScatter,
    None,
)
"""By Chakra's `CollectiveCommType`; a barrier moves nothing."""
_COLLECTIVE_NAMES: Final = (
    "ALL_REDUCE REDUCE ALL_GATHER GATHER SCATTER BROADCAST ALL_TO_ALL REDUCE_SCATTER REDUCE_SCATTER_BLOCK BARRIER"
).split()
_SHARED: Final = frozenset({Op.ReduceScatter, Op.AllToAll})
_RANK: Final = re.compile(r"\.(\d{1,7})\.(?:et|json)$")
_GROUPS: Final = "## process_group:init ##"
_OF_ALL: Final = frozenset({"", "0", "default_pg"})
"""Groups of all ranks of the job, in which a rank has its number of the job."""
_LONGEST_PREFIX: Final = 10
"""Bytes of a length."""
_MADE_UP_STEP_NS: Final = 1_000
_MOST_MICROSECONDS: Final = 1 << 52
_GRAPH: Final = re.compile(rb'"workload_graph"\s*:')


@dataclass(frozen=True, slots=True)
class ChakraNode:
    """One node of a trace."""

    number: int
    """Of the message or line."""
    kind: int
    name: str
    start_us: int | None
    duration_us: int
    attributes: Mapping[str, Any]
    """Numbers, texts and truth values by name; others are left out."""
    inputs: str = ""
    """As PyTorch wrote them, of the node that lists the groups."""

    @property
    def op(self) -> Op | None:
        """What it does; None: nothing that is communication."""
        if self.kind == _SEND:
            return Op.Send
        if self.kind == _RECEIVE:
            return Op.Recv
        kind = self.attributes.get("comm_type")
        number = _COLLECTIVE_NAMES.index(kind) if kind in _COLLECTIVE_NAMES else whole_number(kind)
        if self.kind != _COLLECTIVE or number is None or not 0 <= number < len(_COLLECTIVES):
            return None
        return _COLLECTIVES[number]

    @property
    def group(self) -> str:
        return str(self.attributes.get("pg_name", ""))[:200]

    @property
    def group_size(self) -> int | None:
        """As the node itself says; None: it does not."""
        size = small_number(self.attributes.get("pg_size", self.attributes.get("group_size")))
        return size if size is not None and 0 < size <= MOST_RANKS else None

    @property
    def group_ranks(self) -> tuple[int, ...]:
        """Ranks of the job in its group; empty: it does not say."""
        return parse_whole_numbers(self.attributes.get("pg_ranks", "")) or ()


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a Chakra execution trace."""
    if _is_of_feeder(head) and b'"NodeType"' in head:
        return True
    if (
        b'"startTimeMicros"' in head
        or b'"durationMicros"' in head
        or b'"ctrlDeps"' in head
        or b"COMM_COLL_NODE" in head
    ):
        return _is_json(head)
    first = _next_message(head, 0)
    if first is None:
        return False
    begin, end = first
    if begin == end:
        # GlobalMetadata that says nothing: the first node has to tell.
        node = _next_message(head, end)
        return node is not None and _begins_as_node(head[slice(*node)])
    return _begins_as_metadata(head[begin:end])


def _is_json(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"


def _is_of_feeder(head: bytes) -> bool:
    """Whether it is the feeder's JSON: one object that holds the nodes."""
    return _is_json(head) and _GRAPH.search(head) is not None


def _next_message(head: bytes, at: int) -> tuple[int, int] | None:
    """Where the message behind a length begins and ends; None: there is no length."""
    length = 0
    for place in range(_LONGEST_PREFIX):
        if at + place >= len(head):
            return None
        length |= (head[at + place] & 0x7F) << (7 * place)
        if head[at + place] < 0x80:
            return at + place + 1, at + place + 1 + length
    return None


def _begins_as_metadata(message: bytes) -> bool:
    """GlobalMetadata begins with a version (field 1), or with an attribute (field 2), which begins with its name."""
    if message[:1] == b"\x12":
        attribute = _next_message(message, 1)
        return attribute is not None and _begins_with_text(message[attribute[0] :])
    return _begins_with_text(message)


def _begins_as_node(message: bytes) -> bool:
    """A node begins with its number (field 1) and its name (field 2)."""
    number = _next_message(message, 1) if message[:1] == b"\x08" else (0, 0)
    return number is not None and _begins_with_text(message[number[0] :], b"\x12")


def _begins_with_text(message: bytes, tag: bytes = b"\x0a") -> bool:
    text_at = _next_message(message, 1) if message[:1] == tag else None
    said = message[slice(*text_at)] if text_at is not None else b""
    return bool(said) and text_at is not None and text_at[1] <= len(message) and said.isascii() and _printable(said)


def _printable(said: bytes) -> bool:
    return said.decode("ascii").isprintable()


def import_files(
    sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None, all_ranks: int | None = None
) -> None:
    """Put communication and timed compute nodes of Chakra traces into the dataset.

    Args:
        node: the host; None: they do not say.
        all_ranks: how many ranks the job has, as the user says; None: not known.
    """
    ranks = [_rank(source, place) for place, source in enumerate(sources)]
    if len(set(ranks)) != len(ranks):
        problems.add_note("two files name the same rank: they are read in the order of the command line")
        ranks = list(range(len(sources)))
    groups = _Groups(all_ranks, complete=all_ranks == len(sources))
    for source, rank in zip(sources, ranks, strict=True):
        for found in _nodes(source, Problems()):
            groups.record(found, rank)
    where = node or UNNAMED_NODE
    base_ns = min(source.modified_ns for source in sources)
    for source, rank in zip(sources, ranks, strict=True):
        _Trace(source, target, problems, where, rank, groups, base_ns).read()
    if groups.unknown:
        problems.add_note(
            "these traces do not say how many ranks their groups have, so payload of ReduceScatter and AllToAll is "
            "unknown: with the files of all N ranks of the job, --ranks N says it"
        )
    if node is None:
        problems.add_note(NO_HOST)


class _Groups:
    """What all files together say of the process groups."""

    def __init__(self, all_ranks: int | None, *, complete: bool) -> None:
        """`complete`: the files are those of all ranks of the job."""
        self._all_ranks = all_ranks
        self._complete = complete
        self._users: defaultdict[str, set[int]] = defaultdict(set)
        """Ranks whose files use a group."""
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}
        self.unknown = False
        """It was asked for the size of a group that is not known."""

    def record(self, found: ChakraNode, rank: int) -> None:
        """Record what a node of a rank's file says."""
        if found.name == _GROUPS:
            self._record_list(found.inputs)
        if found.op is not None:
            self._users[found.group].add(rank)
            if found.group_size is not None:
                self._sizes[found.group] = found.group_size
            if found.group_ranks:
                self._ranks[found.group] = found.group_ranks

    def _record_list(self, inputs: str) -> None:
        """The list of groups, a text of JSON in a list of one."""
        try:
            listed = json.loads(inputs[inputs.index("[{") : inputs.rindex("}]") + 2].replace('\\"', '"'))
        except (ValueError, RecursionError):
            return
        for one in listed if isinstance(listed, list) else []:
            name = text(one.get("pg_name"))[:200] if isinstance(one, dict) else ""
            size = small_number(one.get("group_size")) if name else None
            if size is not None and 0 < size <= MOST_RANKS:
                self._sizes[name] = size
                # The group of all ranks lists none.
                ranks = parse_whole_numbers(one.get("ranks")) or ()
                if len(ranks) == size:
                    self._ranks[name] = ranks

    def size(self, group: str) -> int | None:
        """Ranks of a group; None: not known."""
        ranks = self.ranks(group)
        size = len(ranks) if ranks else self._sizes.get(group, self._all_ranks if group in _OF_ALL else None)
        self.unknown |= size is None
        return size

    def ranks(self, group: str) -> tuple[int, ...]:
        """Ranks of the job by rank in the group; empty: not all of them are known."""
        said = self._ranks.get(group)
        if said is not None:
            return said
        users = tuple(sorted(self._users[group]))
        return users if self._complete or len(users) == self._sizes.get(group) else ()

    def rank_in(self, group: str, rank: int) -> int | None:
        """Rank in a group of a rank of the job; None: not known, or no member."""
        ranks = self.ranks(group)
        if ranks:
            return ranks.index(rank) if rank in ranks else None
        size = self.size(group)
        return rank if group in _OF_ALL and (size is None or rank < size) else None

    def comm(self, group: str) -> str:
        """A name of the communicator that all ranks come to."""
        members = ",".join(map(str, self.ranks(group))) or f"of {self._sizes.get(group)}"
        return f"pg-{group or 'all'}-{hashlib.sha256(members.encode()).hexdigest()[:8]}"


def _rank(source: Source, place: int) -> int:
    named = rank_text_in_name(source.label)
    return int(named) if named else place


def rank_text_in_name(label: str) -> str:
    """The rank that the name of a Chakra trace's file tells; empty: none."""
    found = _RANK.search(label)
    named = int(found[1]) if found is not None else rank_in_name(label)
    return "" if named is None else str(named)


class _Trace:
    """One file: one rank."""

    def __init__(
        self,
        source: Source,
        target: ImportTarget,
        problems: Problems,
        node: str,
        rank: int,
        groups: _Groups,
        base_ns: int,
    ) -> None:
        """`base_ns`: where made-up times begin, on all ranks alike."""
        self._source = source
        self._target = target
        self._problems = problems
        self._node = node
        self._rank = rank
        self._groups = groups
        self._base_ns = base_ns
        self._instances: dict[str, int] = {}
        self._timed: bool | None = None
        self._count = 0
        self._pid: int | None = None
        """As the first message says, which describes the trace."""

    def read(self) -> None:
        for found in _nodes(self._source, self._problems):
            op = found.op
            if found.kind == _DESCRIPTION:
                self._pid = whole_number(found.attributes.get("pid"))
            elif op is not None and "comm_size" in found.attributes:
                self._communication(found, op)
            elif found.kind == _COMPUTE and found.attributes.get("is_cpu_op") is not True:
                self._computed(found)
        if self._timed is False:
            self._target.times_known = False
            self._problems.add_note("timestamps are synthetic and give only the order: these traces have none")
        ends = []
        for group, instance in self._instances.items():
            ends.append(
                ImportedEnd(
                    instance=instance,
                    comm=self._groups.comm(group),
                    rank=self._groups.rank_in(group, self._rank),
                    nranks=self._groups.size(group),
                    pid=self._pid,
                    world_rank=self._rank,
                    group_name=group or None,
                )
            )
        self._target.add_ends(self._node, ends)

    def _computed(self, found: ChakraNode) -> None:
        """A kernel; without a time, or a process that it belongs to, it tells nothing."""
        if found.start_us and self._pid is not None:
            begin_ns = found.start_us * 1000
            end_ns = begin_ns + found.duration_us * 1000
            self._target.add(self._node, ImportedKernel(self._pid, None, begin_ns, end_ns, found.name[:200]))

    def _communication(self, found: ChakraNode, op: Op) -> None:
        said = found.attributes["comm_size"]
        size_bytes = whole_number(said)
        if said is not None and (size_bytes is None or not 0 <= size_bytes <= LARGEST_PAYLOAD_BYTES):
            self._problems.count_skipped(self._source.name, found.number, "a node with an impossible comm_size")
            return
        begin_ns = self._time_ns(found)
        if begin_ns is None:
            self._problems.count_skipped(
                self._source.name, found.number, "a node without its time, where others have theirs"
            )
            return
        payload_bytes: int | None = size_bytes
        if op in _SHARED and size_bytes is not None:
            ranks = self._groups.size(found.group)
            if ranks is not None and size_bytes % ranks:
                self._problems.count_skipped(
                    self._source.name, found.number, f"{op.name} of {size_bytes} bytes among {ranks} ranks"
                )
                return
            payload_bytes = None if ranks is None else size_bytes // ranks
        other = whole_number(found.attributes.get("comm_dst" if op is Op.Send else "comm_src"))
        to_one = op in (Op.Send, Op.Recv) and other is not None
        peer = self._groups.rank_in(found.group, other) if to_one and other is not None else None
        if found.group not in self._instances:
            self._instances[found.group] = self._target.new_instance(self._node)
        instance = self._instances[found.group]
        self._target.add(
            self._node,
            ImportedCall(
                time_ns=begin_ns,
                instance=instance,
                op=op.name,
                payload_bytes=payload_bytes,
                peer=peer,
            ),
        )
        if not found.duration_us or not self._timed:
            return
        kernel = parse_kernel_name(found.name)
        self._target.add(
            self._node,
            ImportedOperation(
                instance=instance,
                begin_ns=begin_ns,
                end_ns=begin_ns + found.duration_us * 1000,
                op=op.name,
                payload_bytes=payload_bytes,
                algorithm=kernel.algorithm or None,
                protocol=kernel.protocol or None,
                peer=peer,
                source="kernel",
            ),
        )

    def _time_ns(self, found: ChakraNode) -> int | None:
        """When it began; None: it does not say, and the first one did."""
        if self._timed is None:
            self._timed = bool(found.start_us)
        self._count += 1
        if self._timed:
            return found.start_us * 1000 if found.start_us else None
        return self._base_ns + self._count * _MADE_UP_STEP_NS


def _nodes(source: Source, problems: Problems) -> Iterator[ChakraNode]:
    """The nodes of a file."""
    head = source.head()
    of_graph = _is_of_feeder(head)
    with source.open() as stream:
        if _is_json(head):

            def skip(line: int, reason: str) -> None:
                problems.count_skipped(source.name, line, reason)

            for element in JsonStream(stream, {"workload_graph"} if of_graph else (), skip).elements():
                if of_graph and element.key != "workload_graph":
                    continue
                if not isinstance(element.value, dict):
                    skip(element.line, "a malformed node")
                else:
                    yield (_of_graph if of_graph else _of_json)(element.line, element.value)
        else:
            yield from _of_messages(source, stream, problems)
        if stream.damage:
            problems.count_skipped(source.name, 0, stream.damage)


def _of_messages(source: Source, stream: Any, problems: Problems) -> Iterator[ChakraNode]:
    number = 0
    try:
        for number, message in enumerate(split_messages(stream), 1):
            try:
                yield _description(message) if number == 1 else _of_message(number, message)
            except BrokenMessage as error:
                problems.count_skipped(source.name, number, f"a malformed node: {error}")
    except BrokenMessage as error:
        problems.count_skipped(source.name, number + 1, f"{error}: the rest is left out")


def _description(message: bytes) -> ChakraNode:
    """GlobalMetadata, which stands in front of the nodes."""
    return ChakraNode(1, _DESCRIPTION, "", None, 0, attribute_values(decode_metadata(message).attr))


def _of_message(number: int, message: bytes) -> ChakraNode:
    node = decode_node(message)
    start_us = node.start_time_micros
    return ChakraNode(
        number=number,
        kind=node.type,
        name=node.name,
        start_us=start_us if 0 < start_us < _MOST_MICROSECONDS else None,
        duration_us=min(node.duration_micros, _MOST_MICROSECONDS),
        attributes=attribute_values(node.attr),
        inputs=node.inputs.values if node.name == _GROUPS else "",
    )


def _of_graph(line: int, node: Mapping[str, Any]) -> ChakraNode:
    """A node of the feeder's JSON."""
    kind = whole_number(node.get("NodeType")) or 0
    attributes = {name: value for name, value in node.items() if isinstance(value, int | str)}
    communicates = kind in (_SEND, _RECEIVE, _COLLECTIVE) and node.get("is_cpu_op") is not True
    if communicates and "comm_type" not in attributes:
        said = parse_kernel_name(text(node.get("Name"))).op
        number = next((at for at, op in enumerate(_COLLECTIVES) if op is not None and op.name == said), None)
        attributes |= {"comm_type": number} if number is not None else {}
    return ChakraNode(
        number=line,
        kind=kind,
        name=text(node.get("Name")),
        start_us=None,
        duration_us=0,
        attributes={"comm_size": None, **attributes} if communicates else attributes,
    )


def _of_json(line: int, node: Mapping[str, Any]) -> ChakraNode:
    attributes: dict[str, Any] = {}
    listed = node.get("attr")
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict):
            attributes.update({text(one.get("name")): value for key, value in one.items() if key.endswith("Val")})
    inputs = node.get("inputs")
    start_us = whole_number(node.get("startTimeMicros"))
    duration_us = whole_number(node.get("durationMicros")) or 0
    return ChakraNode(
        number=line,
        kind=_TYPES.get(text(node.get("type")), 0) if "type" in node or "id" in node else _DESCRIPTION,
        name=text(node.get("name")),
        start_us=start_us if start_us is not None and 0 < start_us < _MOST_MICROSECONDS else None,
        duration_us=duration_us if 0 <= duration_us < _MOST_MICROSECONDS else 0,
        attributes=attributes,
        inputs=text(inputs.get("values")) if isinstance(inputs, dict) and node.get("name") == _GROUPS else "",
    )
