"""Chakra execution traces, one file a rank: messages (`NAME.RANK.et`), or the JSON that Chakra's jsonizer makes of it.

A trace is a graph of nodes; the ones that communicate name the operation and its bytes:

    {"id": "435", "name": "ncclDevKernel_AllReduce_…", "type": "COMM_COLL_NODE", "startTimeMicros": "12",
     "durationMicros": "28", "attr": [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val":
     "212480"}, {"name": "pg_name", "stringVal": "0"}]}

`comm_size` is what one rank puts in, which is n times NCCL's count for ReduceScatter and AllToAll; n is the number of
ranks whose files use the group.  Send and Recv have the peer in `comm_dst` and `comm_src`, as a rank of the job.  The
host's side of an operation (`is_cpu_op`) has no `comm_type` and is not counted again.

Many traces have no times: then they tell the order of each rank, and nothing else.  What PyTorch itself writes and
Chakra calls "host trace" is the business of `execution_trace`.

Source: schema/protobuf/et_def.proto, src/converter and src/jsonizer of Chakra 1.0 (schema 0.0.4).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railscope.agent.dataset.schema import LARGEST_PAYLOAD_BYTES, UNNAMED_NODE
from railscope.agent.imports.chakra_messages import (
    BrokenMessage,
    attribute_values,
    decode_metadata,
    decode_node,
    split_messages,
)
from railscope.agent.imports.facts import ImportedCall, ImportedEnd, ImportedKernel, ImportedOperation, Problems
from railscope.agent.imports.json_stream import JsonStream, text, whole_number
from railscope.agent.imports.kineto import NO_HOST, rank_in_name
from railscope.agent.imports.sources import Source
from railscope.agent.imports.target import ImportTarget
from railscope.agent.imports.torch_names import parse_kernel_name
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
_MADE_UP_STEP_NS: Final = 1_000
_MOST_MICROSECONDS: Final = 1 << 52


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


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a Chakra execution trace."""
    if (
        b'"startTimeMicros"' in head
        or b'"durationMicros"' in head
        or b'"ctrlDeps"' in head
        or b"COMM_COLL_NODE" in head
    ):
        return head.lstrip()[:1] == b"{"
    # The first message is GlobalMetadata: a version (field 1) or an attribute (field 2), whose first field is a name.
    if len(head) < 8 or head[1] not in (0x0A, 0x12) or head[0] == 0:
        return False
    if head[1] == 0x12:
        return head[3] == 0x0A and (head[0] >= 0x80 or head[2] <= head[0])
    return head[2] < head[0] and head[3 : 3 + head[2]].isascii() and head[3 : 3 + head[2]].decode("ascii").isprintable()


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None) -> None:
    """Put communication and timed compute nodes of Chakra traces into the dataset; `node` None: they do not say."""
    ranks = [_rank(source, place) for place, source in enumerate(sources)]
    if len(set(ranks)) != len(ranks):
        problems.add_note("two files name the same rank: they are read in the order of the command line")
        ranks = list(range(len(sources)))
    members: defaultdict[str, set[int]] = defaultdict(set)
    for source, rank in zip(sources, ranks, strict=True):
        for found in _nodes(source, Problems()):
            if found.op is not None:
                members[found.group].add(rank)
    where = node or UNNAMED_NODE
    base_ns = min(source.modified_ns for source in sources)
    for source, rank in zip(sources, ranks, strict=True):
        _Trace(source, target, problems, where, rank, members, base_ns).read()
    if node is None:
        problems.add_note(NO_HOST)


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
        members: Mapping[str, set[int]],
        base_ns: int,
    ) -> None:
        """`base_ns`: where made-up times begin, on all ranks alike."""
        self._source = source
        self._target = target
        self._problems = problems
        self._node = node
        self._rank = rank
        self._members = members
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
            ranks = sorted(self._members[group])
            digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:8]
            ends.append(
                ImportedEnd(
                    instance=instance,
                    comm=f"pg-{group or 'all'}-{digest}",
                    rank=ranks.index(self._rank),
                    nranks=len(ranks),
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
        size_bytes = whole_number(found.attributes["comm_size"])
        if size_bytes is None or not 0 <= size_bytes <= LARGEST_PAYLOAD_BYTES:
            self._problems.count_skipped(self._source.name, found.number, "a node with an impossible comm_size")
            return
        begin_ns = self._time_ns(found)
        if begin_ns is None:
            self._problems.count_skipped(
                self._source.name, found.number, "a node without its time, where others have theirs"
            )
            return
        ranks = sorted(self._members[found.group])
        payload_bytes = size_bytes
        if op in _SHARED:
            if size_bytes % len(ranks):
                self._problems.count_skipped(
                    self._source.name, found.number, f"{op.name} of {size_bytes} bytes among {len(ranks)} ranks"
                )
                return
            payload_bytes = size_bytes // len(ranks)
        other = whole_number(found.attributes.get("comm_dst" if op is Op.Send else "comm_src"))
        peer = ranks.index(other) if op in (Op.Send, Op.Recv) and other in ranks else None
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
        said = parse_kernel_name(found.name)
        self._target.add(
            self._node,
            ImportedOperation(
                instance=instance,
                begin_ns=begin_ns,
                end_ns=begin_ns + found.duration_us * 1000,
                op=op.name,
                payload_bytes=payload_bytes,
                algorithm=said.algorithm or None,
                protocol=said.protocol or None,
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
    with source.open() as stream:
        if stream.peek(1)[:1] == b"{":

            def skip(line: int, reason: str) -> None:
                problems.count_skipped(source.name, line, reason)

            for element in JsonStream(stream, (), skip).elements():
                if not isinstance(element.value, dict):
                    skip(element.line, "a malformed node")
                else:
                    yield _of_json(element.line, element.value)
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
    )


def _of_json(line: int, node: Mapping[str, Any]) -> ChakraNode:
    attributes: dict[str, Any] = {}
    listed = node.get("attr")
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict):
            attributes.update({text(one.get("name")): value for key, value in one.items() if key.endswith("Val")})
    start_us = whole_number(node.get("startTimeMicros"))
    duration_us = whole_number(node.get("durationMicros")) or 0
    return ChakraNode(
        number=line,
        kind=_TYPES.get(text(node.get("type")), 0) if "type" in node or "id" in node else _DESCRIPTION,
        name=text(node.get("name")),
        start_us=start_us if start_us is not None and 0 < start_us < _MOST_MICROSECONDS else None,
        duration_us=duration_us if 0 <= duration_us < _MOST_MICROSECONDS else 0,
        attributes=attributes,
    )
