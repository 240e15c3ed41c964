"""The functions of CUDA and NCCL from which completion on a stream follows (probes/bpf/cuda.h), and those of CUDA's
driver that launch graphs or wait for the GPU (probes/bpf/driver_calls.bpf.c).

CUDA's are exported by libcudart, or by libcuda under other names with the same arguments; the handles are the same in
both.  `_ptsz` variants serve programs compiled with a default stream for each thread.  Sources: the CUDA runtime and
driver API references (Event Management, Stream Management), the exported names of libcudart.so.12 (12.9), and
src/group.cc of NCCL 2.18 to 2.32 for `ncclLaunchFinish`, which ends the launching of each group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from railscope.probes.libraries.elf import Elf, Symbol
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.entry_points import ENQUEUE_CHECK
from railscope.probes.nccl.functions.prologue import PROLOGUE_BYTES, ProbeOffset, probe_offset
from railscope.probes.nccl.records.cuda import CudaKind
from railscope.probes.nccl.records.driver_calls import DriverKind

_PER_THREAD: Final = 1 << 8

_RUNTIME: Final = {
    "cudaEventRecord": CudaKind.RECORD,
    "cudaEventRecordWithFlags": CudaKind.RECORD_FLAGS,
    "cudaEventQuery": CudaKind.ASK_EVENT,
    "cudaEventSynchronize": CudaKind.ASK_EVENT,
    "cudaStreamQuery": CudaKind.ASK_STREAM,
    "cudaStreamSynchronize": CudaKind.ASK_STREAM,
    "cudaEventDestroy": CudaKind.DROP_EVENT,
    "cudaStreamDestroy": CudaKind.DROP_STREAM,
}
_DRIVER: Final = {
    "cuEventRecord": CudaKind.RECORD,
    "cuEventRecordWithFlags": CudaKind.RECORD_FLAGS,
    "cuEventQuery": CudaKind.ASK_EVENT,
    "cuEventSynchronize": CudaKind.ASK_EVENT,
    "cuStreamQuery": CudaKind.ASK_STREAM,
    "cuStreamSynchronize": CudaKind.ASK_STREAM,
    "cuEventDestroy": CudaKind.DROP_EVENT,
    "cuEventDestroy_v2": CudaKind.DROP_EVENT,
    "cuStreamDestroy": CudaKind.DROP_STREAM,
    "cuStreamDestroy_v2": CudaKind.DROP_STREAM,
}
_FOLLOWED: Final = {
    "cuGraphLaunch": DriverKind.GRAPH_LAUNCH,
    "cuStreamSynchronize": DriverKind.STREAM_SYNC,
    "cuEventSynchronize": DriverKind.EVENT_SYNC,
    "cuCtxSynchronize": DriverKind.CONTEXT_SYNC,
    "cuCtxSynchronize_v2": DriverKind.CONTEXT_SYNC,  # CUDA 13: of a context that is named
}
_TAKES_STREAM: Final = frozenset({CudaKind.RECORD, CudaKind.RECORD_FLAGS, CudaKind.ASK_STREAM})
_DROPS: Final = frozenset({CudaKind.DROP_EVENT, CudaKind.DROP_STREAM})

FINISH_PROGRAM: Final = "cuda_finish"
LIBRARY_PROGRAMS: Final[Mapping[str, str]] = {
    "cuda_note": ENQUEUE_CHECK,
    "cuda_plan": "_Z16ncclLaunchKernelP8ncclCommP14ncclKernelPlan",
    "cuda_copy_plan": "_Z16ncclLaunchCeCollP8ncclCommP14ncclKernelPlan",
    "cuda_remote_plan": "_Z13ncclLaunchRmaP8ncclCommP14ncclKernelPlan",
    FINISH_PROGRAM: "_Z16ncclLaunchFinishP8ncclComm",
}
"""Programs that watch NCCL, with the function each is attached to."""
_NEEDED: Final = ("cuda_note", "cuda_plan", FINISH_PROGRAM)
"""Without these nothing is known of what stands on which stream, or of what is captured.  NCCL before 2.28 has no
plans of the other two kinds."""


class CudaInterface(Enum):
    """Which of the two libraries a file is; a process that maps both is watched at the runtime."""

    RUNTIME = "libcudart"
    DRIVER = "libcuda"


@dataclass(frozen=True, slots=True)
class CudaPoints:
    """Where the programs attach in a file of CUDA's."""

    interface: CudaInterface
    calls: tuple[ProbePoint, ...]
    """Functions whose return tells something."""
    drops: tuple[ProbePoint, ...]
    """Functions after which a handle may mean something else."""
    refused: tuple[str, ...]
    """Functions that are not probed, because the kernel would single-step every call or could not see the return."""
    followed: tuple[ProbePoint, ...] = ()
    """Functions of the driver that launch graphs or wait for the GPU."""


def cuda_points(elf: Elf) -> CudaPoints | None:
    """Which of CUDA's functions in a file are probed; None when it exports none of them.

    A runtime that was linked statically into another library is not exported: that process is watched at the driver.

    Raises:
        ElfError: the file is damaged.
    """
    markers = {"cudaEventQuery": CudaInterface.RUNTIME, "cuEventQuery": CudaInterface.DRIVER}
    found = _exported(elf, tuple(markers))
    interface = next((markers[marker] for marker in markers if marker in found), None)
    if interface is None:
        return None
    functions = _RUNTIME if interface is CudaInterface.RUNTIME else _DRIVER
    variants = {
        name + suffix: int(kind) | (_PER_THREAD if suffix and kind in _TAKES_STREAM else 0)
        for name, kind in functions.items()
        for suffix in ("", "_ptsz")
    }
    calls: list[ProbePoint] = []
    drops: list[ProbePoint] = []
    refused: list[str] = []
    for name, symbol in _exported(elf, tuple(variants)).items():
        where = _where(elf, symbol)
        kind = CudaKind(variants[name] & 0xFF)
        if where is None or (kind not in _DROPS and not where.return_possible):
            refused.append(name)
            continue
        point = ProbePoint(name, symbol.file_offset + where.skip_bytes, variants[name])
        if all(point.file_offset != other.file_offset for other in calls + drops):
            (drops if kind in _DROPS else calls).append(point)
    followed = _followed(elf, refused) if interface is CudaInterface.DRIVER else ()
    return CudaPoints(interface, tuple(calls), tuple(drops), tuple(refused), followed)


def _followed(elf: Elf, refused: list[str]) -> tuple[ProbePoint, ...]:
    """Adds to `refused`."""
    kinds = {name + suffix: kind for name, kind in _FOLLOWED.items() for suffix in ("", "_ptsz")}
    points: dict[int, ProbePoint] = {}
    for name, symbol in _exported(elf, tuple(kinds)).items():
        where = _where(elf, symbol)
        if where is not None and where.return_possible:
            offset = symbol.file_offset + where.skip_bytes
            points.setdefault(offset, ProbePoint(name, offset, int(kinds[name])))
        elif name not in refused:
            refused.append(name)
    return tuple(points.values())


def library_points(elf: Elf, library: int) -> Mapping[str, ProbePoint]:
    """By program: where NCCL is watched, in a library known as number `library`; empty where that tells nothing.

    Raises:
        ElfError: the file is damaged.
    """
    symbols = elf.symbols(frozenset(LIBRARY_PROGRAMS.values()))
    points = {}
    for program, name in LIBRARY_PROGRAMS.items():
        where = _where(elf, symbols[name]) if name in symbols else None
        if where is not None:
            points[program] = ProbePoint(name, symbols[name].file_offset + where.skip_bytes, library << 32)
        elif name in symbols or program in _NEEDED:
            return {}
    return points


def _exported(elf: Elf, names: tuple[str, ...]) -> dict[str, Symbol]:
    return {name: symbol for name, symbol in elf.symbols(names).items() if symbol.table == ".dynsym"}


def _where(elf: Elf, symbol: Symbol) -> ProbeOffset | None:
    length = min(PROLOGUE_BYTES, symbol.size or PROLOGUE_BYTES)
    return probe_offset(elf.read_at(symbol.file_offset, length), elf.machine)
