"""Which of NCCL's functions are probed, and where each keeps its arguments.

A collective or point-to-point call is described by the positions of its arguments in the C signature; `cookie`
turns them into the attach cookie that one BPF program decodes for all of them (probes/bpf/nccl.h).  Signatures:
nccl.h of NCCL 2.32.3; RCCL's two spellings from rccl.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.calls import LifecycleKind

ENQUEUE_CHECK: Final = "_Z16ncclEnqueueCheckP8ncclInfo"
"""The one function that every collective and point-to-point call passes (2.18 to 2.32); not exported."""

_NO_PLACE: Final = 15
_STACK_PLACE: Final = 8
_REGISTERS: Final = {EM_X86_64: 6, EM_AARCH64: 8}

MACHINES: Final = frozenset(_REGISTERS)
"""ELF machine numbers whose calling convention is known here."""


@dataclass(frozen=True, slots=True)
class CollectiveFunction:
    """Positions (from 0) of the arguments in the C signature; None: there is no such argument."""

    symbol: str
    op: Op
    count: int | None
    data_type: int | None
    peer: int | None
    """Peer of Send and Recv, root of rooted operations."""
    comm: int
    stream: int


@dataclass(frozen=True, slots=True)
class InitFunction:
    """A function that makes communicators."""

    symbol: str
    kind: LifecycleKind
    new_comm: int
    nranks: int | None = None
    rank: int | None = None
    parent: int | None = None
    unique_id: int | None = None
    """Position of the id, by value or by pointer."""
    id_by_value: bool = False


@dataclass(frozen=True, slots=True)
class EndFunction:
    """A function that ends, revokes, suspends or resumes the communicator it is given first."""

    symbol: str
    kind: LifecycleKind


def _collectives() -> tuple[CollectiveFunction, ...]:
    base = (
        CollectiveFunction("ncclAllReduce", Op.AllReduce, 2, 3, None, 5, 6),
        CollectiveFunction("ncclReduceScatter", Op.ReduceScatter, 2, 3, None, 5, 6),
        CollectiveFunction("ncclReduce", Op.Reduce, 2, 3, 5, 6, 7),
        CollectiveFunction("ncclBroadcast", Op.Broadcast, 2, 3, 4, 5, 6),
        CollectiveFunction("ncclGather", Op.Gather, 2, 3, 4, 5, 6),
        CollectiveFunction("ncclScatter", Op.Scatter, 2, 3, 4, 5, 6),
        CollectiveFunction("ncclAllGather", Op.AllGather, 2, 3, None, 4, 5),
        CollectiveFunction("ncclAlltoAll", Op.AllToAll, 2, 3, None, 4, 5),
        CollectiveFunction("ncclSend", Op.Send, 1, 2, 3, 4, 5),
        CollectiveFunction("ncclRecv", Op.Recv, 1, 2, 3, 4, 5),
        CollectiveFunction("ncclPutSignal", Op.PutSignal, 1, 2, 3, 9, 10),
        CollectiveFunction("ncclSignal", Op.Signal, None, None, 0, 4, 5),
        CollectiveFunction("ncclWaitSignal", Op.WaitSignal, None, None, None, 2, 3),
    )
    with_config = tuple(
        CollectiveFunction(f.symbol + "Config", f.op, f.count, f.data_type, f.peer, f.comm, f.stream)
        for f in base
        if f.op not in (Op.PutSignal, Op.Signal, Op.WaitSignal)
    )
    rccl = (
        CollectiveFunction("ncclAllToAll", Op.AllToAll, 2, 3, None, 4, 5),
        # One count per peer, in arrays: calls are counted, payload is not known at entry.
        CollectiveFunction("ncclAllToAllv", Op.AllToAll, None, 6, None, 7, 8),
    )
    return base + with_config + rccl


COLLECTIVE_FUNCTIONS: Final = _collectives()
"""Exported entry points, probed where `ENQUEUE_CHECK` cannot be found.

ncclBcast is left out: it calls ncclBroadcast.
"""

INIT_FUNCTIONS: Final = (
    InitFunction("ncclCommInitRank", LifecycleKind.INIT, 0, nranks=1, unique_id=2, id_by_value=True, rank=3),
    InitFunction("ncclCommInitRankConfig", LifecycleKind.INIT, 0, nranks=1, unique_id=2, id_by_value=True, rank=3),
    InitFunction("ncclCommInitRankScalable", LifecycleKind.INIT, 0, nranks=1, rank=2, unique_id=4),
    InitFunction("ncclCommInitAll", LifecycleKind.INIT_ALL, 0, nranks=1),
    InitFunction("ncclCommSplit", LifecycleKind.SPLIT, 3, parent=0),
    InitFunction("ncclCommShrink", LifecycleKind.SHRINK, 3, parent=0),
    InitFunction("ncclCommGrow", LifecycleKind.GROW, 4, nranks=1, unique_id=2, rank=3, parent=0),
)

END_FUNCTIONS: Final = (
    EndFunction("ncclCommFinalize", LifecycleKind.FINALIZE),
    EndFunction("ncclCommDestroy", LifecycleKind.DESTROY),
    EndFunction("ncclCommAbort", LifecycleKind.ABORT),
    EndFunction("ncclCommRevoke", LifecycleKind.REVOKE),
    EndFunction("ncclCommSuspend", LifecycleKind.SUSPEND),
    EndFunction("ncclCommResume", LifecycleKind.RESUME),
)


@dataclass(frozen=True, slots=True)
class FollowedFunction:
    """A function in which a job may wait for its ranks, and that is followed from entry to return for that alone."""

    kind: LifecycleKind
    symbols: tuple[str, ...]
    """Its names in different versions; the first one that is there."""
    comm: int | None
    """Position of the communicator; None: it has none."""


FOLLOWED_FUNCTIONS: Final = (
    FollowedFunction(
        LifecycleKind.CONNECT,
        # 2.27 and newer; 2.18 to 2.26.  Not exported.
        (
            "_Z21ncclTransportP2pSetupP8ncclCommP13ncclTopoGraphi",
            "_Z21ncclTransportP2pSetupP8ncclCommP13ncclTopoGraphiPi",
        ),
        comm=0,
    ),
    FollowedFunction(LifecycleKind.INIT_WORK, ("_ZL20ncclCommInitRankFuncP12ncclAsyncJob",), comm=None),
    FollowedFunction(LifecycleKind.WINDOW, ("ncclCommWindowRegister",), comm=0),
    # 2.28 and newer: every rank makes it, and its kernels communicate by themselves from then on.
    FollowedFunction(LifecycleKind.DEVICE_COMM, ("ncclDevCommCreate",), comm=0),
)
"""Where calls wait for other ranks beside those above.

ncclGroupEnd, which some programs call as often as operations, is not among them: what it waits for is an init, or that
ranks are connected, and both happen here, rarely, on the caller's thread or on another.
"""

SYMBOLS: Final = frozenset(
    [ENQUEUE_CHECK]
    + [f.symbol for f in COLLECTIVE_FUNCTIONS]
    + [f.symbol for f in INIT_FUNCTIONS]
    + [f.symbol for f in END_FUNCTIONS]
    + [symbol for f in FOLLOWED_FUNCTIONS for symbol in f.symbols]
)
"""Every symbol that is looked up in a library."""


def _place(position: int | None, machine: int) -> int:
    if position is None:
        return _NO_PLACE
    registers = _REGISTERS[machine]
    return position if position < registers else _STACK_PLACE + position - registers


def collective_cookie(function: CollectiveFunction, machine: int, library: int, stack_bytes: int) -> int:
    """BPF cookie of an exported entry point of NCCL probed where its prologue has pushed `stack_bytes`."""
    return (
        int(function.op)
        | _place(function.comm, machine) << 8
        | _place(function.count, machine) << 12
        | _place(function.data_type, machine) << 16
        | _place(function.peer, machine) << 20
        | _place(function.stream, machine) << 24
        | library << 32
        | stack_bytes << 48
    )


def enqueue_check_cookie(library: int) -> int:
    """BPF cookie of `ENQUEUE_CHECK`, whose only argument points to the call's description."""
    return 1 << 28 | library << 32


def init_cookie(function: InitFunction, machine: int, library: int) -> int:
    """BPF cookie of a function that makes communicators, the same for entry and return."""
    rank, unique_id = function.rank, function.unique_id
    by_value = function.id_by_value and machine == EM_X86_64
    id_place = _place(unique_id, machine)
    if by_value:
        # The 128 bytes are the first stack argument and use no register: what follows moves up.
        id_place = _STACK_PLACE
        rank = None if rank is None else rank - 1
    return (
        int(function.kind)
        | _place(function.new_comm, machine) << 8
        | _place(function.nranks, machine) << 12
        | _place(rank, machine) << 16
        | _place(function.parent, machine) << 20
        | id_place << 24
        | int(by_value) << 28
        | library << 32
    )


def end_cookie(function: EndFunction, machine: int, library: int) -> int:
    """BPF cookie of a function that ends a communicator, its first argument; the same for entry and return."""
    return int(function.kind) | _NO_PLACE << 8 | _place(0, machine) << 20 | library << 32


def followed_cookie(function: FollowedFunction, machine: int, library: int) -> int:
    """BPF cookie of a function that is followed; the same for entry and return."""
    return int(function.kind) | _place(function.comm, machine) << 20 | library << 32
