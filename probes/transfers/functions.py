"""Which functions of other libraries than NCCL are probed, and where each keeps its arguments.

A function is described by the positions of its arguments in its C signature, as NCCL's are
(probes/nccl/functions/entry_points.py); a cookie turns them into what the programs of probes/bpf/transfers.bpf.c read.

Bytes are payload: what the arguments say, without headers.  Of a receive they are not known: its argument is the room
that there is.  Sources: ucp.h of UCX 1.22 (older functions than `nbx` call those), nixl.h and transfer_request.h of
NIXL 0.3 to 1.5, the MPI standard 4.0, nvshmemx.h of NVSHMEM 3, transfer_engine.h and transport.h of Mooncake 0.3, and
gloo/transport/unbound_buffer.h as in PyTorch and Debian.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from railscope.probes.libraries.communication import CommunicationLibrary, libraries_in
from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64, Elf, Symbol
from railscope.probes.libraries.elf_variables import find_variables
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.prologue import PROLOGUE_BYTES, probe_offset
from railscope.probes.transfers.records import Completion, Size

_NO_PLACE: Final = 15
_STACK_PLACE: Final = 8
_REGISTERS: Final = {EM_X86_64: 6, EM_AARCH64: 8}
_NO_OPERATION: Final = 255
"""Number of a function that transfers nothing."""


class Direction(Enum):
    """Where an operation's payload goes, as seen by who calls it."""

    TRANSMIT = "transmit"
    RECEIVE = "receive"
    BOTH = "both"
    """A collective: payload as its arguments say, as of NCCL's."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TransferOperation:
    """What a function does; its place in `OPERATIONS` is the number that programs know it by."""

    library: CommunicationLibrary
    op: str
    direction: Direction
    awaited: bool = True
    """Whether one that does not complete stalls: a receive may wait for a message that nobody owes."""
    sized: bool = True
    """Whether its bytes are among its arguments."""


@dataclass(frozen=True, slots=True)
class TransferFunction:
    """Positions (from 0) of the arguments; None: there is no such argument."""

    symbols: tuple[str, ...]
    """Its names in different builds; the first one that is there."""
    operation: TransferOperation | None
    """None: it transfers nothing, and tells of a request."""
    completion: Completion
    size: Size = Size.NONE
    elements: int | None = None
    unit: int | None = None
    """What tells an element's bytes."""
    buffer: int | None = None
    peer: int | None = None
    request: int | None = None
    element_shift: int = 0
    """Of `Size.ELEMENTS` the bytes of one, as a power of two; of MPI's 1: the count has 64 bits, 2: a request has; of
    `Size.MOONCAKE` the words (of 8 bytes) of a request."""


def _ucx() -> Iterator[TransferFunction]:
    library = CommunicationLibrary.UCX

    def function(symbol: str, operation: TransferOperation, unit: int, **places: int) -> TransferFunction:
        return TransferFunction((symbol,), operation, Completion.UCX, Size.UCX, unit=unit, **places)

    send = TransferOperation(library, "TagSend", Direction.TRANSMIT)
    receive = TransferOperation(library, "TagRecv", Direction.RECEIVE, awaited=False, sized=False)
    stream_receive = TransferOperation(library, "StreamRecv", Direction.RECEIVE, awaited=False, sized=False)
    # What is received was announced: its sender is waiting for it.
    message = TransferOperation(library, "AmRecv", Direction.RECEIVE, sized=False)
    put = TransferOperation(library, "Put", Direction.TRANSMIT)
    get = TransferOperation(library, "Get", Direction.RECEIVE)
    flush = TransferOperation(library, "Flush", Direction.NONE)
    yield function("ucp_tag_send_nbx", send, 4, peer=0, buffer=1, elements=2)
    yield function("ucp_tag_send_sync_nbx", send, 4, peer=0, buffer=1, elements=2)
    yield function("ucp_tag_recv_nbx", receive, 5)
    yield function("ucp_tag_msg_recv_nbx", message, 4)
    stream = TransferOperation(library, "StreamSend", Direction.TRANSMIT)
    yield function("ucp_stream_send_nbx", stream, 3, peer=0, buffer=1, elements=2)
    yield function("ucp_stream_recv_nbx", stream_receive, 4, peer=0)
    active = TransferOperation(library, "AmSend", Direction.TRANSMIT)
    yield function("ucp_am_send_nbx", active, 6, peer=0, buffer=4, elements=5)
    yield function("ucp_am_recv_data_nbx", message, 4)
    yield function("ucp_put_nbx", put, 5, peer=0, buffer=1, elements=2)
    yield function("ucp_get_nbx", get, 5, peer=0, buffer=1, elements=2)
    atomic = TransferOperation(library, "Atomic", Direction.BOTH)
    yield function("ucp_atomic_op_nbx", atomic, 6, peer=0, buffer=2, elements=3)
    yield function("ucp_ep_flush_nbx", flush, 1, peer=0)
    yield function("ucp_worker_flush_nbx", flush, 1)
    for symbol in ("ucp_request_free", "ucp_request_release"):
        yield TransferFunction((symbol,), None, Completion.ENDS_UCX, request=0)


NIXL_TRANSFER: Final = TransferOperation(CommunicationLibrary.NIXL, "Transfer", Direction.BOTH)
"""Of builds of which it is not known where a request has its kind of operation."""
_NIXL_KINDS: Final = (
    TransferOperation(CommunicationLibrary.NIXL, "Read", Direction.RECEIVE),
    TransferOperation(CommunicationLibrary.NIXL, "Write", Direction.TRANSMIT),
)
"""In the order of nixl_xfer_op_t: the programs count them under the next two numbers."""


def _nixl() -> Iterator[TransferFunction]:
    # Methods: the first argument is the agent.
    yield TransferFunction(
        ("_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs",),
        NIXL_TRANSFER, Completion.STATUS, Size.NIXL, request=1,
    )  # fmt: skip
    yield TransferFunction(
        ("_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH", "_ZN9nixlAgent13getXferStatusEP12nixlXferReqH"),
        None, Completion.ENDS_STATUS, request=1,
    )  # fmt: skip
    yield TransferFunction(
        ("_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH", "_ZN9nixlAgent14releaseXferReqEP12nixlXferReqH"),
        None, Completion.ENDS_CANCELS, request=1,
    )  # fmt: skip


def _mpi() -> Iterator[TransferFunction]:
    """`Size.MPICH` stands for the size by a datatype of whichever MPI it is.

    A request is known by its value, which a call leaves where an argument points, so that its return has to be probed:
    programs copy requests from there, and one place is used for many.
    """

    def operation(op: str, direction: Direction = Direction.BOTH, **settings: bool) -> TransferOperation:
        return TransferOperation(CommunicationLibrary.MPI, op, direction, **settings)

    def function(
        name: str, what: TransferOperation | None, completion: Completion = Completion.RETURN,
        elements: int | None = None, unit: int | None = None, peer: int | None = None, request: int | None = None,
    ) -> Iterator[TransferFunction]:  # fmt: skip
        size = Size.NONE if elements is None else Size.MPICH
        one = TransferFunction((f"MPI_{name}",), what, completion, size, elements, unit, peer=peer, request=request)
        yield one
        # MPI 4 has another one with counts of 64 bits.
        yield replace(one, symbols=(f"MPI_{name}_c",), element_shift=1)

    def all_forms(
        name: str, what: TransferOperation, arguments: int,
        elements: int | None = None, unit: int | None = None, peer: int | None = None,
    ) -> Iterator[TransferFunction]:  # fmt: skip
        """A collective that blocks, one that does not, and one that is prepared, which has an MPI_Info, too."""
        yield from function(name, what, Completion.RETURN, elements, unit, peer)
        yield from function(f"I{name.lower()}", what, Completion.MPI, elements, unit, peer, arguments)
        yield from function(f"{name}_init", what, Completion.MPI_PREPARES, elements, unit, peer, arguments + 1)

    send = operation("Send", Direction.TRANSMIT)
    for name in ("Send", "Ssend", "Rsend", "Bsend"):
        yield from function(name, send, Completion.RETURN, 1, 2, 3)
        yield from function(f"I{name.lower()}", send, Completion.MPI, 1, 2, 3, 6)
        yield from function(f"{name}_init", send, Completion.MPI_PREPARES, 1, 2, 3, 6)
    both = operation("SendRecv")
    yield from function("Sendrecv", both, Completion.RETURN, 1, 2, 3)
    yield from function("Isendrecv", both, Completion.MPI, 1, 2, 3, 11)
    yield from function("Isendrecv_replace", both, Completion.MPI, 1, 2, 3, 8)
    receive = operation("Recv", Direction.RECEIVE, awaited=False, sized=False)
    yield from function("Recv", receive, peer=3)
    yield from function("Irecv", receive, Completion.MPI, peer=3, request=6)
    yield from function("Recv_init", receive, Completion.MPI_PREPARES, peer=3, request=6)
    yield from function("Mrecv", receive)
    yield from function("Imrecv", receive, Completion.MPI, request=4)
    collectives = {
        "Allreduce": ("AllReduce", 6, 2, 3),
        "Reduce": ("Reduce", 7, 2, 3),
        "Reduce_scatter_block": ("ReduceScatter", 6, 2, 3),
        "Bcast": ("Broadcast", 5, 1, 2),
        "Gather": ("Gather", 8, 1, 2),
        # With MPI_IN_PLACE what is sent is told by what is received.
        "Allgather": ("AllGather", 7, 4, 5),
        "Scatter": ("Scatter", 8, 4, 5),
        "Scan": ("Scan", 6, 2, 3),
        "Exscan": ("Scan", 6, 2, 3),
    }
    for name, (op, arguments, elements, unit) in collectives.items():
        yield from all_forms(name, operation(op), arguments, elements, unit)
    # Counts in arrays, or one that is for each rank.
    for name, op, arguments in (
        ("Alltoall", "AllToAll", 7), ("Alltoallv", "AllToAll", 9), ("Alltoallw", "AllToAll", 9),
        ("Allgatherv", "AllGather", 8), ("Gatherv", "Gather", 9), ("Scatterv", "Scatter", 9),
        ("Reduce_scatter", "ReduceScatter", 6),
    ):  # fmt: skip
        unsized = TransferOperation(CommunicationLibrary.MPI, f"{op}V", Direction.BOTH, sized=False)
        yield from all_forms(name, unsized, arguments)
    yield from all_forms("Barrier", operation("Barrier", Direction.NONE), 1)
    waiting = MPI_WAIT
    for name in ("Probe", "Mprobe"):
        yield from function(name, waiting)
    yield from _mpi_requests()


MPI_WAIT: Final = TransferOperation(CommunicationLibrary.MPI, "Wait", Direction.NONE, awaited=False)
"""What it waits for is counted for itself."""


def _mpi_requests() -> Iterator[TransferFunction]:
    """Functions that tell of requests.  The places of a count, a flag, and of numbers are those of other arguments."""

    def function(
        name: str, what: TransferOperation | None, completion: Completion, request: int, **places: int
    ) -> TransferFunction:
        return TransferFunction((f"MPI_{name}",), what, completion, Size.NONE, request=request, **places)

    yield function("Wait", MPI_WAIT, Completion.MPI_ONE, 0)
    yield function("Waitall", MPI_WAIT, Completion.MPI_ALL, 1, elements=0)
    yield function("Waitany", MPI_WAIT, Completion.MPI_ANY, 1, elements=0, unit=2)
    yield function("Waitsome", MPI_WAIT, Completion.MPI_SOME, 1, elements=0, unit=2, peer=3)
    yield function("Test", None, Completion.MPI_ONE, 0, buffer=1)
    yield function("Testall", None, Completion.MPI_ALL, 1, elements=0, buffer=2)
    yield function("Testany", None, Completion.MPI_ANY, 1, elements=0, unit=2, buffer=3)
    # It has no flag: that there are none is said by how many there are.
    yield function("Testsome", None, Completion.MPI_SOME, 1, elements=0, unit=2, peer=3)
    started = TransferOperation(
        CommunicationLibrary.MPI, "Start", Direction.BOTH, awaited=False, sized=False
    )  # of requests that were prepared before they could be seen
    yield function("Start", started, Completion.MPI_STARTS, 0)
    yield function("Startall", started, Completion.MPI_STARTS, 1, elements=0)
    yield function("Request_free", None, Completion.MPI_FREES, 0)


_NVSHMEM_TYPES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("char", "schar", "uchar", "int8", "uint8"), 0),
    **dict.fromkeys(("short", "ushort", "int16", "uint16", "half", "bfloat16"), 1),
    **dict.fromkeys(("float", "int", "uint", "int32", "uint32"), 2),
    **dict.fromkeys(("double", "long", "ulong", "longlong", "ulonglong", "int64", "uint64", "size", "ptrdiff"), 3),
}
"""Bytes of an element, as a power of two."""


def _nvshmem() -> Iterator[TransferFunction]:
    """Work on a stream: when it is complete is not known to who calls."""

    def operation(op: str, direction: Direction) -> TransferOperation:
        return TransferOperation(CommunicationLibrary.NVSHMEM, op, direction)

    put, get = operation("Put", Direction.TRANSMIT), operation("Get", Direction.RECEIVE)
    for op, what in (("put", put), ("get", get)):
        for suffix in ("", "_nbi"):
            for name, shift in [("mem", 0), *((f"{width}", log) for log, width in enumerate((8, 16, 32, 64, 128)))]:
                symbol = f"nvshmemx_{op}{name}{suffix}_on_stream"
                yield TransferFunction(
                    (symbol,), what, Completion.UNSEEN, Size.ELEMENTS, elements=2, peer=3, element_shift=shift
                )
            for name, shift in _NVSHMEM_TYPES.items():
                symbol = f"nvshmemx_{name}_{op}{suffix}_on_stream"
                yield TransferFunction(
                    (symbol,), what, Completion.UNSEEN, Size.ELEMENTS, elements=2, peer=3, element_shift=shift
                )
    collectives = {
        "AllToAll": ("alltoall",),
        "AllGather": ("fcollect",),
        "Broadcast": ("broadcast",),
        "AllReduce": tuple(f"{reduction}_reduce" for reduction in ("sum", "prod", "min", "max", "and", "or", "xor")),
        "ReduceScatter": tuple(
            f"{reduction}_reducescatter" for reduction in ("sum", "prod", "min", "max", "and", "or", "xor")
        ),
    }
    for op, names in collectives.items():
        for name in names:
            for kind, shift in _NVSHMEM_TYPES.items():
                yield TransferFunction(
                    (f"nvshmemx_{kind}_{name}_on_stream",), operation(op, Direction.BOTH),
                    Completion.UNSEEN, Size.ELEMENTS, elements=3, element_shift=shift,
                )  # fmt: skip
    for symbol in ("nvshmemx_barrier_all_on_stream", "nvshmemx_sync_all_on_stream", "nvshmemx_quiet_on_stream"):
        yield TransferFunction((symbol,), operation("Barrier", Direction.NONE), Completion.UNSEEN)


MOONCAKE_TRANSFER: Final = TransferOperation(CommunicationLibrary.MOONCAKE, "Transfer", Direction.BOTH)
"""Of a batch of both kinds, or one whose requests have another length than this build's."""
_MOONCAKE_KINDS: Final = (
    TransferOperation(CommunicationLibrary.MOONCAKE, "Read", Direction.RECEIVE),
    TransferOperation(CommunicationLibrary.MOONCAKE, "Write", Direction.TRANSMIT),
)
"""In the order of TransferRequest::OpCode."""


_MOONCAKE_TASK_GROUPS: Final = (
    "_ZN8mooncake12TcpTransport23submitTransferTaskGroupERKSt6vectorIPNS_9Transport12TransferTaskESaIS4_EE"
)
"""Where a build has this, each request ends with the number of its group, a word more."""


def _mooncake() -> Iterator[TransferFunction]:
    """Methods that return an object: the first argument is where that goes, the second the engine."""
    yield TransferFunction(
        ("_ZN8mooncake14TransferEngine14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE",),
        MOONCAKE_TRANSFER, Completion.ENDED, Size.MOONCAKE, buffer=3, request=2, element_shift=6,
    )  # fmt: skip
    # Programs free a batch once all of it is complete, or has failed.
    yield TransferFunction(("_ZN8mooncake14TransferEngine11freeBatchIDEm",), None, Completion.ENDS_UCX, request=2)


def _gloo() -> Iterator[TransferFunction]:
    """A function that fails throws, so that no return may be probed."""
    library = CommunicationLibrary.GLOO
    send = TransferOperation(library, "Send", Direction.TRANSMIT)
    receive = TransferOperation(library, "Recv", Direction.RECEIVE, awaited=False, sized=False)
    buffer = "_ZN4gloo9transport3tcp13UnboundBuffer"
    yield TransferFunction((f"{buffer}4sendEimmm",), send, Completion.UNSEEN, Size.ELEMENTS, elements=4, peer=1)
    yield TransferFunction((f"{buffer}4recvEimmm",), receive, Completion.UNSEEN, peer=1)
    yield TransferFunction((f"{buffer}4recvESt6vectorIiSaIiEEmmm",), receive, Completion.UNSEEN)
    for op, symbol in (
        ("AllReduce", "9allreduceERKNS_16AllreduceOptionsE"),
        ("AllGather", "9allgatherERNS_16AllgatherOptionsE"),
        ("AllGatherV", "10allgathervERNS_17AllgathervOptionsE"),
        ("AllToAll", "8alltoallERNS_15AlltoallOptionsE"),
        ("AllToAllV", "9alltoallvERNS_16AlltoallvOptionsE"),
        ("Broadcast", "9broadcastERNS_16BroadcastOptionsE"),
        ("Gather", "6gatherERNS_13GatherOptionsE"),
        ("GatherV", "7gathervERNS_14GathervOptionsE"),
        ("Reduce", "6reduceERNS_13ReduceOptionsE"),
        ("Scatter", "7scatterERNS_14ScatterOptionsE"),
        ("Barrier", "7barrierERNS_14BarrierOptionsE"),
    ):
        # Their payload is counted where they send it.
        collective = TransferOperation(library, op, Direction.NONE)
        yield TransferFunction((f"_ZN4gloo{symbol}",), collective, Completion.UNSEEN)


FUNCTIONS: Final[Mapping[CommunicationLibrary, tuple[TransferFunction, ...]]] = {
    CommunicationLibrary.UCX: tuple(_ucx()),
    CommunicationLibrary.NIXL: tuple(_nixl()),
    CommunicationLibrary.MPI: tuple(_mpi()),
    CommunicationLibrary.NVSHMEM: tuple(_nvshmem()),
    CommunicationLibrary.MOONCAKE: tuple(_mooncake()),
    CommunicationLibrary.GLOO: tuple(_gloo()),
}
_KINDS: Final = {NIXL_TRANSFER: _NIXL_KINDS, MOONCAKE_TRANSFER: _MOONCAKE_KINDS}
"""Of operations whose kind only a request tells: those that they are counted under then."""
_OPEN_MPI_MARKER: Final = "ompi_mpi_init"
_OPEN_MPI_COMPLETE: Final = "ompi_request_empty"
"""The request of everything that is complete when its call returns."""
_STANDARD_ABI: Final = "MPI_Abi_get_version"
_MPICH_ABI: Final = "MPIX_GPU_query_support"
"""MPICH 5 has a second library, with the handles of the MPI standard, which has the first of these alone."""
_MPICH_MARKERS: Final = ("MPIR_Err_create_code", "MPIR_Err_return_comm", "MPID_Abort", "MPIX_GPU_query_support")


def _operations() -> tuple[TransferOperation, ...]:
    """Numbered as they first occur; kinds follow the one for both."""
    found: dict[TransferOperation, None] = {}
    for functions in FUNCTIONS.values():
        for function in functions:
            if function.operation is not None:
                found.setdefault(function.operation)
                found.update(dict.fromkeys(_KINDS.get(function.operation, ())))
    return tuple(found)


OPERATIONS: Final = _operations()


@dataclass(frozen=True, slots=True)
class TransferPoints:
    """Where the programs attach in a library."""

    libraries: tuple[CommunicationLibrary, ...]
    """Whose functions are in the file: a program may have several linked into it."""
    calls: tuple[ProbePoint, ...]
    """Functions whose entry and return matter."""
    waits: tuple[ProbePoint, ...]
    """Those of MPI that wait for requests, ask about them or start them: entry and return matter."""
    entries: tuple[ProbePoint, ...]
    """Functions that transfer and of which the entry alone matters.  A probe on a return would end a C++ program whose
    exception passes through the function."""
    ends: tuple[ProbePoint, ...]
    """Functions that tell of a request at their entry."""
    refused: tuple[str, ...]
    """Functions that are not probed, because the kernel would single-step every call or could not see the return."""

    @property
    def every(self) -> tuple[ProbePoint, ...]:
        return (*self.calls, *self.waits, *self.entries, *self.ends)


def transfer_points(elf: Elf) -> TransferPoints | None:
    """Which functions of a file are probed; None where it defines none of these libraries.

    Raises:
        ElfError: the file is damaged.
    """
    if elf.machine not in _REGISTERS:
        return None
    libraries = tuple(sorted(libraries_in(elf) & FUNCTIONS.keys(), key=lambda one: one.value))
    if not libraries:
        return None
    found: dict[str, dict[int, ProbePoint]] = {name: {} for name in ("calls", "waits", "entries", "ends")}
    refused: list[str] = []
    for library in libraries:
        functions = FUNCTIONS[library]
        symbols = elf.symbols(frozenset(symbol for function in functions for symbol in function.symbols))
        extra = _extra(elf, library)
        mpi = _mpi_of(elf) if library is CommunicationLibrary.MPI else None
        for function in functions:
            name = next((symbol for symbol in function.symbols if symbol in symbols), None)
            if name is None or (mpi is not None and (adapted := mpi.adapt(function)) is None):
                continue
            if mpi is not None and adapted is not None:
                function = adapted
            if function.size is Size.MOONCAKE and elf.symbols([_MOONCAKE_TASK_GROUPS]):
                function = replace(function, element_shift=7)
            where = _offset(elf, symbols[name])
            if where is None:
                refused.append(name)
                continue
            cookie = _cookie(function, elf.machine) | extra.get(function.completion, 0) << 48
            if mpi is not None:
                cookie |= mpi.complete_at(symbols[name].address + where - symbols[name].file_offset) << 40
            point = ProbePoint(name, where, cookie)
            found[_LIST_OF.get(function.completion, "calls")].setdefault(where, point)
    return TransferPoints(
        libraries, **{name: tuple(points.values()) for name, points in found.items()}, refused=tuple(refused)
    )


_LIST_OF: Final[Mapping[Completion, str]] = {
    **dict.fromkeys((Completion.ENDS_UCX, Completion.ENDS_CANCELS, Completion.MPI_FREES), "ends"),
    **dict.fromkeys((Completion.UNSEEN, Completion.ENDED), "entries"),
    **dict.fromkeys(
        (Completion.MPI_ONE, Completion.MPI_ALL, Completion.MPI_ANY, Completion.MPI_SOME, Completion.MPI_STARTS),
        "waits",
    ),
}
"""Of `TransferPoints`, by what a function tells; others are calls."""


def _offset(elf: Elf, symbol: Symbol) -> int | None:
    """Where a probe goes that sees arguments and return; None: nowhere."""
    length = min(PROLOGUE_BYTES, symbol.size or PROLOGUE_BYTES)
    where = probe_offset(elf.read_at(symbol.file_offset, length), elf.machine)
    return symbol.file_offset + where.skip_bytes if where is not None and where.return_possible else None


def _place(position: int | None, machine: int) -> int:
    if position is None:
        return _NO_PLACE
    registers = _REGISTERS[machine]
    return position if position < registers else _STACK_PLACE + position - registers


def _cookie(function: TransferFunction, machine: int) -> int:
    number = OPERATIONS.index(function.operation) if function.operation is not None else _NO_OPERATION
    return (
        number
        | _place(function.elements, machine) << 8
        | _place(function.unit, machine) << 12
        | _place(function.buffer, machine) << 16
        | _place(function.peer, machine) << 20
        | _place(function.request, machine) << 24
        | int(function.size) << 28
        | int(function.completion) << 32
        | function.element_shift << 36
    )


@dataclass(frozen=True, slots=True)
class _Mpi:
    """Which MPI a file holds."""

    size: Size
    """How it tells the size of a datatype; `Size.NONE`: it is neither of the two that are known."""
    complete: int | None
    """The address as linked of Open MPI's request of everything that is complete when its call returns."""

    def adapt(self, function: TransferFunction) -> TransferFunction | None:
        """A function as this MPI has it; None: nothing is to be learned from it."""
        if function.size is Size.MPICH:
            function = replace(function, size=self.size)
        if self.size is Size.OPEN_MPI:
            # Requests are pointers.
            return replace(function, element_shift=function.element_shift | 2)
        if self.size is Size.MPICH or function.completion < Completion.MPI:
            return function
        # What a request is is not known.
        if function.completion is Completion.MPI:
            return replace(function, completion=Completion.UNSEEN, request=None)
        if function.operation is MPI_WAIT:
            return replace(function, completion=Completion.RETURN, request=None)
        return None

    def complete_at(self, probed: int) -> int:
        """Words from a probed address, as linked, to where that request is, in 24 bits; 0: there is none so near."""
        if self.complete is None or self.complete % 8:
            return 0
        words = self.complete // 8 - probed // 8
        return words & 0xFFFFFF if -(1 << 23) <= words < 1 << 23 else 0


def _mpi_of(elf: Elf) -> _Mpi:
    if elf.symbols([_OPEN_MPI_MARKER]):
        variable = find_variables(elf, [_OPEN_MPI_COMPLETE], exported=True).get(_OPEN_MPI_COMPLETE)
        return _Mpi(Size.OPEN_MPI, None if variable is None else variable.address)
    found = elf.symbols((*_MPICH_MARKERS, _STANDARD_ABI))
    if not found.keys() & set(_MPICH_MARKERS) or (_STANDARD_ABI in found and _MPICH_ABI not in found):
        return _Mpi(Size.NONE, None)
    return _Mpi(Size.MPICH, None)


def _extra(elf: Elf, library: CommunicationLibrary) -> Mapping[Completion, int]:
    """By kind of function: where the library's own structures have something, as bits 48 and up of a cookie."""
    if library is CommunicationLibrary.UCX:
        return {Completion.ENDS_UCX: ucx_status_distance(elf)}
    if library is CommunicationLibrary.NIXL:
        return {Completion.STATUS: _nixl_kind_at(elf)}
    return {}


def ucx_status_distance(elf: Elf) -> int:
    """Bytes from a request back to its status, which its flags follow (ucp_request.h); 0: not known.

    Taken from the code of ucp_request_check_status(), which looks at the flags first, as the size of what lies in front
    of a request depends on the build.
    """
    symbol = elf.symbols(["ucp_request_check_status"]).get("ucp_request_check_status")
    if symbol is None or elf.machine != EM_X86_64:
        return 0
    import capstone  # 20 ms and 10 MB, where a process maps UCX

    disassembler = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    disassembler.detail = True
    code = elf.read_at(symbol.file_offset, min(PROLOGUE_BYTES, symbol.size or PROLOGUE_BYTES))
    found = []
    for instruction in disassembler.disasm(code, 0):
        for operand in instruction.operands:
            if operand.type == capstone.x86.X86_OP_MEM and instruction.reg_name(operand.mem.base) == "rdi":
                found.append(int(operand.mem.disp))
        if instruction.group(capstone.CS_GRP_CALL):
            break
    flags = found[0] if found else 0
    return 4 - flags if -4096 < flags < 0 and flags - 4 in found else 0


_NIXL_REQUEST: Final = "_ZN12nixlXferReqHC1ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_NIXL_KIND_AT: Final[Mapping[str, int]] = {
    f"{_NIXL_REQUEST}14nixl_xfer_op_t10nixl_mem_tS9_mRKSt8weak_ptrI17nixlRemoteSectionE": 180,  # 1.5
    f"{_NIXL_REQUEST}14nixl_xfer_op_t10nixl_mem_tS9_mm": 172,  # 1.4
    f"{_NIXL_REQUEST}14nixl_xfer_op_t10nixl_mem_tS9_m": 164,  # 1.1 to 1.3
}
"""By the constructor of nixlXferReqH that a build has: where a request has its kind of operation."""


def _nixl_kind_at(elf: Elf) -> int:
    found = elf.symbols(_NIXL_KIND_AT)
    return next((_NIXL_KIND_AT[symbol] for symbol in _NIXL_KIND_AT if symbol in found), 0)
