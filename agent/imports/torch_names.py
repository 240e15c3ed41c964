"""PyTorch's names for operations and data types as NCCL's, and its sizes of tensors as NCCL's counts.

Kineto, execution traces and the flight recorder name the same operations differently (`allreduce`, `nccl:all_reduce`,
`_allgather_base`), and give the elements of the inputs and of the outputs of one rank.  NCCL's count is what one rank
sends in an AllGather, what it receives in a ReduceScatter, and what goes to one peer in an AllToAll, a Scatter or a
Gather.

torchcomms and its libraries (ncclx, rccl, xccl) have names of their own (`all_gather_single`, `reduce_scatter_v`).

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and torch/csrc/profiler/util.cpp of PyTorch 2.1 to 2.10, its
torch/distributed/flight_recorder/components/types.py, and comms/torchcomms/hooks/common/OpNameHelper.hpp of torchcomms.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES
from railscope.agent.imports.json_stream import whole_number
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType, Op

_RANK_IN_FILE: Final = re.compile(r"rank[-_]?(\d{1,7})", re.IGNORECASE)
OP_OF: Final = {
    "allreduce": Op.AllReduce,
    "allreducecoalesced": Op.AllReduce,
    "allreducebarrier": Op.AllReduce,
    "inferenceallreduce": Op.AllReduce,
    "barrier": Op.AllReduce,
    "reduce": Op.Reduce,
    "reduceoop": Op.Reduce,
    "allgather": Op.AllGather,
    "allgatherbase": Op.AllGather,
    "allgatherintotensor": Op.AllGather,
    "allgatherintotensorcoalesced": Op.AllGather,
    "allgathercoalesced": Op.AllGather,
    "allgathersingle": Op.AllGather,
    "allgatherv": Op.AllGather,
    "reducescatter": Op.ReduceScatter,
    "reducescatterbase": Op.ReduceScatter,
    "reducescattertensor": Op.ReduceScatter,
    "reducescattertensorcoalesced": Op.ReduceScatter,
    "reducescattersingle": Op.ReduceScatter,
    "reducescatterv": Op.ReduceScatter,
    "reducescattercoalesced": Op.ReduceScatter,
    "broadcast": Op.Broadcast,
    "broadcastoop": Op.Broadcast,
    "broadcastobjectlist": Op.Broadcast,
    "alltoall": Op.AllToAll,
    "alltoallbase": Op.AllToAll,
    "alltoallv": Op.AllToAll,
    "alltoallsingle": Op.AllToAll,
    "alltoallvsingle": Op.AllToAll,
    "gather": Op.Gather,
    "gathersingle": Op.Gather,
    "scatter": Op.Scatter,
    "send": Op.Send,
    "isend": Op.Send,
    "recv": Op.Recv,
    "irecv": Op.Recv,
    "recvanysource": Op.Recv,
}
"""By the name without `nccl:` or `c10d::`, underlines and capitals."""

_NO_COMMUNICATION: Final = frozenset(
    """wait init coalesced startcoalescing endcoalescing unknown batchopissue split newwindow finalize""".split()
)
_TYPES: Final = {
    "float": DataType.Float32,
    "float32": DataType.Float32,
    "double": DataType.Float64,
    "float64": DataType.Float64,
    "half": DataType.Float16,
    "float16": DataType.Float16,
    "c10::half": DataType.Float16,
    "bfloat16": DataType.Bfloat16,
    "c10::bfloat16": DataType.Bfloat16,
    "int": DataType.Int32,
    "int32": DataType.Int32,
    "long": DataType.Int64,
    "long int": DataType.Int64,
    "int64": DataType.Int64,
    "byte": DataType.Uint8,
    "unsigned char": DataType.Uint8,
    "uint8": DataType.Uint8,
    "bool": DataType.Uint8,
    "char": DataType.Int8,
    "signed char": DataType.Int8,
    "int8": DataType.Int8,
    "float8_e4m3fn": DataType.Float8e4m3,
    "float8_e4m3fnuz": DataType.Float8e4m3,
    "float8_e5m2": DataType.Float8e5m2,
    "float8_e5m2fnuz": DataType.Float8e5m2,
}
"""By PyTorch's name in small letters; what NCCL has no type for travels as bytes."""
_OP_OF_KERNEL: Final = {
    "allreduce": Op.AllReduce.name,
    "allgather": Op.AllGather.name,
    "allgatherv": Op.AllGatherV.name,
    "reducescatter": Op.ReduceScatter.name,
    "alltoall": Op.AllToAll.name,
    "sendrecv": Op.SendRecv.name,
    "broadcast": Op.Broadcast.name,
    "reduce": Op.Reduce.name,
    "send": Op.Send.name,
    "recv": Op.Recv.name,
}
"""By the word of a kernel's name, in small letters."""
_OP_IN_KERNEL: Final = re.compile(
    "AllReduce|AllGatherV?|ReduceScatter|AllTo[aA]ll|SendRecv|Broadcast|Reduce|Send(?![a-z])|Recv(?![a-z])"
)
_ALGORITHMS: Final = {"RING": "Ring", "TREE": "Tree", "COLLNET": "CollNetDirect", "NVLS": "NVLS", "PAT": "PAT"}
_PROTOCOLS: Final = {"LL": "LL", "LL128": "LL128", "SIMPLE": "Simple"}


_LONGEST_KEPT: Final = 1 << 10
_MOST_KEPT: Final = 1 << 10
"""Names that occur again and again."""


class UnknownName(ValueError):
    """An operation or data type that NCCL's tables do not have; the message names it."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, and the communicator that it has."""

    name: str
    """PyTorch's name, unique in the job."""
    description: str
    """What it is for, such as `default_pg` or `tp`; empty: not said."""
    size: int | None
    ranks: tuple[int, ...]
    """Ranks of the job, by rank in the group; empty: not all of them are known."""

    @property
    def comm(self) -> str:
        """A name of the communicator that all ranks come to."""
        members = ",".join(map(str, self.ranks)) if self.ranks else f"of {self.size}"
        return f"pg-{self.name}-{hashlib.sha256(members.encode()).hexdigest()[:8]}"

    def rank_of(self, world_rank: int | None) -> int | None:
        """Rank in the group of a rank of the job; None: not known, or no member."""
        return self.ranks.index(world_rank) if world_rank in self.ranks else None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of one rank's tensors."""

    inputs: int
    outputs: int
    group: int | None
    """Ranks of the group; None: not known."""
    input_splits: tuple[int, ...] = ()
    """Elements of the first dimension for each peer; empty: equal parts."""
    output_splits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """What NCCL is called for."""

    op: Op
    elements: int
    """NCCL's count."""
    peer: int | None = None


def parse_operation(name: str) -> Op | None:
    """NCCL's operation by PyTorch's name; None: it is none, such as `wait`.

    Raises:
        UnknownName: the name is unknown.
    """
    if len(name) > _LONGEST_KEPT:
        return _operation_of(name)
    return _kept_operation_of(name)


def _operation_of(name: str) -> Op | None:
    plain = re.sub(r"^(?:c10d::|[a-z0-9]+:)|_", "", name.strip().lower().split(" ")[0])
    if plain in _NO_COMMUNICATION:
        return None
    try:
        return OP_OF[plain]
    except KeyError:
        raise UnknownName(f"an unknown operation: {name[:60]!r}") from None


_kept_operation_of: Final = lru_cache(maxsize=_MOST_KEPT)(_operation_of)


def parse_data_type(name: str) -> DataType:
    """NCCL's data type by PyTorch's name.

    Raises:
        UnknownName: NCCL has no such type.
    """
    try:
        return _TYPES[name.strip().lower().removeprefix("torch.")]
    except KeyError:
        raise UnknownName(f"an unknown data type: {name[:60]!r}") from None


def payload_bytes(kind: DataType, elements: int) -> int:
    """Bytes of so many elements of PyTorch's data type.

    Raises:
        UnknownName: no call can have so many.
    """
    size_bytes = elements * DATA_TYPE_BYTES[kind]
    if not 0 <= size_bytes <= LARGEST_PAYLOAD_BYTES:
        raise UnknownName(f"an impossible size: {elements} elements")
    return size_bytes


def expand_transfers(op: Op, sizes: Sizes, peer: int | None) -> list[Transfer]:
    """The calls that PyTorch makes of NCCL for an operation; an AllToAll of unequal parts is a Send and Recv a peer.

    Raises:
        UnknownName: the sizes do not tell, or there is no such peer.
    """
    if peer is not None and sizes.group and peer >= sizes.group:
        raise UnknownName(f"{op.name} with rank {peer} of {sizes.group}")
    if op is Op.AllGather:
        return [Transfer(op, sizes.inputs)]
    if op is Op.ReduceScatter:
        return [Transfer(op, sizes.outputs)]
    if op is Op.AllToAll:
        return _all_to_all(sizes)
    if op in (Op.Gather, Op.Scatter):
        # The root alone has all parts; the others have theirs.
        known = [one for one in (sizes.inputs, sizes.outputs) if one]
        return [Transfer(op, min(known, default=0), peer)]
    if op is Op.Recv:
        return [Transfer(op, sizes.outputs or sizes.inputs, peer)]
    if op in (Op.Send, Op.Reduce, Op.Broadcast):
        return [Transfer(op, sizes.inputs or sizes.outputs, peer)]
    return [Transfer(op, sizes.inputs or sizes.outputs)]


def _all_to_all(sizes: Sizes) -> list[Transfer]:
    uneven = {*sizes.input_splits, *sizes.output_splits}
    if len(uneven) <= 1:
        if not sizes.group:
            raise UnknownName("an AllToAll of a group whose size is not known")
        if sizes.inputs % sizes.group:
            raise UnknownName(f"an AllToAll of {sizes.inputs} elements in {sizes.group} parts that are not given")
        return [Transfer(Op.AllToAll, sizes.inputs // sizes.group)]
    for splits in (sizes.input_splits, sizes.output_splits):
        if sizes.group and splits and len(splits) != sizes.group:
            raise UnknownName(f"an AllToAll of {len(splits)} parts among {sizes.group} ranks")
    return [
        *_parts(Op.Send, sizes.inputs, sizes.input_splits),
        *_parts(Op.Recv, sizes.outputs, sizes.output_splits),
    ]


def _parts(op: Op, elements: int, splits: Sequence[int]) -> list[Transfer]:
    whole = sum(splits)
    if not whole:
        return []
    if elements % whole or min(splits) < 0:
        raise UnknownName(f"{elements} elements in parts of {whole}")
    return [Transfer(op, part * (elements // whole), peer) for peer, part in enumerate(splits) if part]


def parse_whole_numbers(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers, or a text of one such as `[0, 1]`; None: it is none, or was cut short with `...`."""
    if isinstance(value, str):
        return _kept_numbers_of(value) if len(value) <= _LONGEST_KEPT else _numbers_of(value)
    return _all_whole(value) if isinstance(value, list) else None


def _numbers_of(text: str) -> tuple[int, ...] | None:
    inside = text.strip()
    if not (inside.startswith("[") and inside.endswith("]")):
        return None
    return _all_whole([part.strip() for part in inside[1:-1].split(",") if part.strip()])


_kept_numbers_of: Final = lru_cache(maxsize=_MOST_KEPT)(_numbers_of)


def _all_whole(parts: Sequence[object]) -> tuple[int, ...] | None:
    numbers = [whole_number(part) for part in parts]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


@dataclass(frozen=True, slots=True)
class KernelName:
    """The parts of an NCCL kernel's name; empty: absent."""

    op: str
    algorithm: str
    protocol: str


def parse_kernel_name(name: str) -> KernelName:
    """Parse the name of an NCCL kernel's function such as `ncclDevKernel_AllReduce_Sum_f32_RING_LL`.

    Of symmetric memory's (`ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16`) it is the operation alone, and
    RCCL's one kernel for everything (`ncclDevKernel_Generic_4`) says nothing.
    """
    return _kept_parts_of(name) if len(name) <= _LONGEST_KEPT else _parts_of(name)


def _parts_of(name: str) -> KernelName:
    plain = name.split("(")[0].split("<")[0]
    found = _OP_IN_KERNEL.search(plain)
    upper = {word.upper() for word in plain.split("_")[1:]}
    return KernelName(
        op=_OP_OF_KERNEL[found[0].lower()] if found is not None else "",
        algorithm=next((_ALGORITHMS[word] for word in _ALGORITHMS if word in upper), ""),
        protocol=next((_PROTOCOLS[word] for word in ("LL128", "LL", "SIMPLE") if word in upper), ""),
    )


_kept_parts_of: Final = lru_cache(maxsize=_MOST_KEPT)(_parts_of)


def rank_in_name(label: str) -> int | None:
    """The rank in the name of a file that PyTorch wrote, such as `rank3.json`, `trace_rank_3`; None: it has none."""
    found = _RANK_IN_FILE.search(label)
    return int(found[1]) if found is not None else None
