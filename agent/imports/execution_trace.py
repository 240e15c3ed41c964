"""Execution traces as PyTorch itself writes them (`ExecutionTraceObserver`), which Chakra calls host traces: JSON.

    {"schema": "1.1.1-chakra.0.0.4", "pid": 71, "time": "2024-03-21 18:54:23", "start_ts": 350785410, "nodes": [
     {"id": 31, "name": "record_param_comms", "inputs": {"values": [[[14, 15, 0, 1024, 4, "cuda:0"]], [3, false],
      ["0", "default_pg"], 0, "allreduce", [], [], 0, 1, 2], "types": ["GenericList[Tensor(float)]", …]}, "attrs":
      [{"name": "collective_name", "type": "string", "value": "allreduce"}, …]}]}

From PyTorch 2.4 attributes say what is done (`collective_name`, `in_msg_nelems`, `dtype`, `pg_name`, …); before, the
values of the inputs do: tensors (their fourth number is their elements), numbers of the call, the group, the own rank
in it (of Send and Recv the peer), the name, the parts of an AllToAll, and last the size of the group.  In schema 1.0
inputs are these values alone, types stand beside them, a group is the address of an object, and only the parts of an
AllToAll tell its size.

There are no times in it: it tells the order, and nothing else.

Source: torch/csrc/profiler/standalone/execution_trace_observer.cpp and torch/csrc/distributed/c10d/ParamCommsUtils.hpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railscope.agent.dataset.files import UNNAMED_NODE
from railscope.agent.imports.facts import MOST_RANKS, ImportedCall, ImportedEnd, Problems
from railscope.agent.imports.json_stream import Element, JsonStream, small_number, text, whole_number
from railscope.agent.imports.kineto import NO_HOST
from railscope.agent.imports.sources import Source
from railscope.agent.imports.target import ImportTarget
from railscope.agent.imports.torch_names import (
    OP_OF,
    Group,
    Sizes,
    UnknownName,
    expand_transfers,
    parse_data_type,
    parse_operation,
    parse_whole_numbers,
    payload_bytes,
    rank_in_name,
)
from railscope.probes.nccl.abi import Op

_NODE: Final = "record_param_comms"
_TENSOR_TYPE: Final = re.compile(r"Tensor\(([^()]{1,60})\)")
_TENSOR_NUMBERS: Final = 5
_STEP_NS: Final = 1_000
_MOST_DEPTH: Final = 8
NO_COLLECTIVES: Final = "these execution traces have no collectives (record_param_comms)"


@dataclass(frozen=True, slots=True)
class _Said:
    """A node's attributes of its operation."""

    name: str
    sizes: Sizes
    type_name: str
    group: str
    description: str
    rank: int | None
    """The own rank in the group; of Send and Recv the peer's."""


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like PyTorch's execution trace."""
    return head.lstrip()[:1] == b"{" and b'"schema"' in head and b'"nodes"' in head


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None) -> None:
    """Put operations of PyTorch's execution traces into the dataset as calls; `node` None: the traces do not say."""
    base_ns = min(source.modified_ns for source in sources)
    called = 0
    for source in sources:
        trace = _Trace(source, target, problems, node or UNNAMED_NODE, base_ns)
        trace.read()
        called += trace.called
    if not called:
        problems.add_note(NO_COLLECTIVES)
        return
    target.times_known = False
    problems.add_note("timestamps are synthetic and give only the order: execution traces have none")
    if node is None:
        problems.add_note(NO_HOST)


class _Trace:
    """One file: one rank."""

    def __init__(self, source: Source, target: ImportTarget, problems: Problems, node: str, base_ns: int) -> None:
        """`base_ns`: where made-up times begin, on all ranks alike."""
        self._source = source
        self._base_ns = base_ns
        self._target = target
        self._problems = problems
        self._node = node
        self._rank = rank_in_name(source.label)
        self._pid: int | None = None
        self._count = 0
        self._instances: dict[tuple[str, int | None], int] = {}
        """By name and size of the group."""
        self._descriptions: dict[str, str] = {}
        self._own: dict[tuple[str, int | None], int] = {}
        """The own rank in each group."""
        self._sizes: dict[int, int] = {}
        """Of groups that are told by the address of an object."""

    @property
    def called(self) -> int:
        """How many operations it has."""
        return self._count

    def read(self) -> None:
        with self._source.open() as stream:
            for element in JsonStream(stream, {"nodes"}, self._skip).elements():
                if element.key == "pid":
                    self._pid = whole_number(element.value)
                elif element.key == "nodes":
                    self._node_of(element)
            if stream.damage:
                self._skip(0, stream.damage)
        for (name, _), rank in self._own.items():
            if self._rank is None and (name == "0" or self._descriptions.get(name) == "default_pg"):
                self._rank = rank
        ends = []
        for key, instance in self._instances.items():
            name, size = key
            description = self._descriptions.get(name, "")
            ends.append(
                ImportedEnd(
                    instance=instance,
                    comm=Group(name, description, size, ()).comm,
                    rank=self._own.get(key),
                    nranks=size,
                    pid=self._pid,
                    world_rank=self._rank,
                    group_name=description or None,
                )
            )
        self._target.add_ends(self._node, ends)

    def _node_of(self, element: Element) -> None:
        node = element.value
        if not isinstance(node, dict):
            self._skip(element.line, "a malformed node")
            return
        if node.get("name") != _NODE:
            return
        try:
            self._operation(_parse_attributes(node, self._sizes))
        except UnknownName as error:
            self._skip(element.line, str(error))

    def _operation(self, said: _Said) -> None:
        op = parse_operation(said.name)
        if op is None:
            return
        kind = parse_data_type(said.type_name)
        peer = said.rank if op in (Op.Send, Op.Recv) else None
        made = [(one, payload_bytes(kind, one.elements)) for one in expand_transfers(op, said.sizes, peer)]
        key = said.group, said.sizes.group
        if key not in self._instances:
            self._instances[key] = self._target.new_instance(self._node)
        if said.description:
            self._descriptions[said.group] = said.description
        if peer is None and said.rank is not None:
            self._own[key] = said.rank
        self._count += 1
        for one, size_bytes in made:
            self._target.add(
                self._node,
                ImportedCall(
                    time_ns=self._base_ns + self._count * _STEP_NS,
                    instance=self._instances[key],
                    op=one.op.name,
                    data_type=kind.name,
                    payload_bytes=size_bytes,
                    peer=one.peer,
                ),
            )

    def _skip(self, line: int, reason: str) -> None:
        self._problems.count_skipped(self._source.name, line, reason)


def _parse_attributes(node: Mapping[str, Any], sizes: dict[int, int]) -> _Said:
    """What a node says; `sizes`: of groups by address, as far as nodes have told them, this one included."""
    attributes = _attributes(node)
    inputs, outputs = _values(node, "input"), _values(node, "output")
    values = inputs.get("values") if isinstance(inputs, dict) else None
    values = values if isinstance(values, list) else []
    place = next((at for at, one in enumerate(values) if isinstance(one, str) and _is_operation(one)), None)
    name = text(attributes.get("collective_name")) or (values[place] if place is not None else "")
    if not name:
        raise UnknownName("an operation without its name")
    # Behind the name: the parts of an AllToAll, and last the size of the group.
    behind = values[place + 1 :] if place is not None else []
    parts = [parse_whole_numbers(one) for one in behind[:2]]
    size = small_number(attributes.get("pg_size"))
    if size is None and len(behind) > 2:
        size = small_number(behind[-1])
    address = whole_number(values[place - 2]) if place is not None and place > 1 else None
    if address is not None and size is None:
        size = len(parts[0]) if parts and parts[0] else sizes.get(address)
        if size is not None and len(sizes) < MOST_RANKS:
            sizes[address] = size
    if size is not None and size > MOST_RANKS:
        raise UnknownName(f"a group of {size} ranks")
    splits = [
        parse_whole_numbers(attributes.get(f"{side}_split_size")) or (parts[at] if at < len(parts) else ()) or ()
        for at, side in enumerate(("in", "out"))
    ]
    groups = [one for one in values[: place or 0] if isinstance(one, list) and len(one) == 2 and _texts(one)]
    counts = [
        count if (count := whole_number(attributes.get(f"{side}_msg_nelems"))) is not None else _elements(tensors)
        for side, tensors in (("in", values[:1]), ("out", outputs.get("values") if isinstance(outputs, dict) else []))
    ]
    if not all(0 <= count < 1 << 58 for count in counts):
        raise UnknownName("impossible sizes")
    return _Said(
        name=name,
        sizes=Sizes(counts[0], counts[1], size, *splits),
        type_name=text(attributes.get("dtype")) or _type_name(inputs, outputs),
        group=text(attributes.get("pg_name")) or (groups[0][0] if groups else f"of-{size}-ranks"),
        description=text(attributes.get("pg_desc")) or (groups[0][1] if groups else ""),
        rank=small_number(values[place - 1]) if place else None,
    )


def _values(node: Mapping[str, Any], side: str) -> object:
    """The values of a node's inputs or outputs, with their types; those of older schemas lie side by side."""
    said = node.get(f"{side}s")
    return {"values": said, "types": node.get(f"{side}_types")} if isinstance(said, list) else said


def _attributes(node: Mapping[str, Any]) -> dict[str, Any]:
    listed = node.get("attrs")
    return {
        text(one.get("name")): one.get("value")
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict)
    }


def _is_operation(name: str) -> bool:
    return name.lower().replace("_", "") in OP_OF or name in ("wait", "init")


def _texts(values: list[Any]) -> bool:
    return all(isinstance(one, str) for one in values)


def _elements(values: object, depth: int = 0) -> int:
    """Elements of all tensors in a value: lists of tensors may be nested."""
    if not isinstance(values, list) or depth > _MOST_DEPTH:
        return 0
    if len(values) > _TENSOR_NUMBERS and isinstance(values[-1], str):
        return whole_number(values[3]) or 0
    return sum(_elements(one, depth + 1) for one in values)


def _type_name(*sides: object) -> str:
    """The data type of the first tensor."""
    for side in sides:
        types = side.get("types") if isinstance(side, dict) else None
        for one in types if isinstance(types, list) else []:
            found = _TENSOR_TYPE.search(one) if isinstance(one, str) else None
            if found is not None:
                return found[1]
    return "byte"
