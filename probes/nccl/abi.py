"""NCCL's public ABI as the probes need it: operations, data types, and where each function's arguments are.

The numbers are the contract between the BPF programs and everyone else: an `Op` is what the kernel writes into
its counters.  Sources: nccl.h of NCCL 2.32.3 and `ncclFunc_t` of src/include/nccl_common.h.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Final


class Op(IntEnum):
    """An operation, numbered as NCCL's own `ncclFunc_t` (2.32.3), so the kernel side copies it unchanged."""

    Broadcast = 0
    Reduce = 1
    AllGather = 2
    ReduceScatter = 3
    AllReduce = 4
    SendRecv = 5
    Send = 6
    Recv = 7
    AllToAll = 8
    Scatter = 9
    Gather = 10
    AllGatherV = 11
    PutSignal = 12
    Signal = 13
    WaitSignal = 14
    Unknown = 15


class DataType(IntEnum):
    """`ncclDataType_t`; the names are nccl.h's without the `nccl` prefix."""

    Int8 = 0
    Uint8 = 1
    Int32 = 2
    Uint32 = 3
    Int64 = 4
    Uint64 = 5
    Float16 = 6
    Float32 = 7
    Float64 = 8
    Bfloat16 = 9
    Float8e4m3 = 10
    Float8e5m2 = 11
    Unknown = 15


DATA_TYPE_BYTES: Final = {
    DataType.Int8: 1,
    DataType.Uint8: 1,
    DataType.Int32: 4,
    DataType.Uint32: 4,
    DataType.Int64: 8,
    DataType.Uint64: 8,
    DataType.Float16: 2,
    DataType.Float32: 4,
    DataType.Float64: 8,
    DataType.Bfloat16: 2,
    DataType.Float8e4m3: 1,
    DataType.Float8e5m2: 1,
    DataType.Unknown: 0,
}
"""Bytes of one element."""


@cache
def op_name(number: int) -> str:
    """NCCL's name of an operation, or `unknown` for a number this table does not know."""
    try:
        op = Op(number)
    except ValueError:
        return "unknown"
    return "unknown" if op is Op.Unknown else op.name


def data_type_name(number: int) -> str:
    """The data type in the form of Prometheus labels (`float32`, `bfloat16`, …), or `unknown`."""
    try:
        return DataType(number).name.lower()
    except ValueError:
        return "unknown"
