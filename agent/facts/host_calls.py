"""The calls of NCCL and of CUDA's driver that are followed from entry to return, and the names by which they are shown.

Which of them every rank of a communicator must make decides who is missing (agent/cluster/verdict/culprits.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.nccl.records.driver_calls import DriverKind

CONNECT: Final = "connecting ranks"
"""What stands for the call where ranks are connected: it may be that of an operation, or of the end of a group."""
CALL_NAMES: Final[Mapping[LifecycleKind, str]] = {
    LifecycleKind.INIT: "ncclCommInitRank",  # and its variants
    LifecycleKind.INIT_ALL: "ncclCommInitAll",
    LifecycleKind.SPLIT: "ncclCommSplit",
    LifecycleKind.SHRINK: "ncclCommShrink",
    LifecycleKind.GROW: "ncclCommGrow",
    LifecycleKind.FINALIZE: "ncclCommFinalize",
    LifecycleKind.DESTROY: "ncclCommDestroy",
    LifecycleKind.ABORT: "ncclCommAbort",
    LifecycleKind.REVOKE: "ncclCommRevoke",
    LifecycleKind.SUSPEND: "ncclCommSuspend",
    LifecycleKind.RESUME: "ncclCommResume",
    LifecycleKind.CONNECT: CONNECT,
    LifecycleKind.INIT_WORK: "ncclCommInitRank",
    LifecycleKind.WINDOW: "ncclCommWindowRegister",
    LifecycleKind.DEVICE_COMM: "ncclDevCommCreate",
}

DRIVER_CALL_NAMES: Final[Mapping[DriverKind, str]] = {
    DriverKind.GRAPH_LAUNCH: "cuGraphLaunch",
    DriverKind.STREAM_SYNC: "cuStreamSynchronize",
    DriverKind.EVENT_SYNC: "cuEventSynchronize",
    DriverKind.CONTEXT_SYNC: "cuCtxSynchronize",
}
"""With their variants for the per-thread default stream."""


def _named(*kinds: LifecycleKind) -> frozenset[str]:
    return frozenset(CALL_NAMES[kind] for kind in kinds)


MAKES_FIRST: Final = _named(LifecycleKind.INIT, LifecycleKind.INIT_ALL)
"""They make a communicator of nothing: a rank that has it made the call, and the call returned."""
OF_SOME: Final = _named(
    LifecycleKind.CONNECT, LifecycleKind.SHRINK, LifecycleKind.GROW, LifecycleKind.ABORT, LifecycleKind.REVOKE
)
"""Not every rank need make them: a rank that does not is not missing."""
