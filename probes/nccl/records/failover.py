"""NCCL's failover of InfiniBand ports: what the programs of probes/bpf/failover.h write, as numpy dtypes.

A connection is one that NCCL's network plugin made (`ncclIbSendComm`, `ncclIbRecvComm`); it may use several ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.records.calls import owned

Records = npt.NDArray[Any]

MOST_PORTS: Final = 8
"""Of one connection: `NCCL_IB_MAX_DEVS_PER_NIC`, 4 before 2.30."""
FAILOVER_EVENT: Final = np.dtype(
    [
        *(("time_ns", "<u8"), ("comm", "<u8"), ("resiliency", "<u8"), ("tgid", "<u4"), ("tid", "<u4")),
        *((name, "<u4") for name in ("library", "queue_pair", "status", "vendor_error")),
        *(("result", "<i4"), ("place", "<u4"), ("count", "<u4"), ("state", "<u4"), ("devices", "<i4", MOST_PORTS)),
    ]
)
"""`result` 0: NCCL goes on; else it gives up with that `ncclResult_t`.  `place`: of the failed one among `devices`."""
FAILED_OVER_KEY: Final = np.dtype([("comm", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
FAILED_OVER: Final = np.dtype([("resiliency", "<u8")])
FAILOVER_CALL: Final = np.dtype(
    [
        *(("resiliency", "<u8"), ("comm", "<u8")),
        *((name, "<u4") for name in ("place", "count", "status", "vendor_error", "queue_pair", "tgid")),
    ]
)
SIZES: Final = {
    "failover_event": (owned(FAILOVER_EVENT), 104),
    "failed_over_key": (FAILED_OVER_KEY, 16),
    "failed_over_connection": (owned(FAILED_OVER), 16),
    "failover_call": (owned(FAILOVER_CALL), 48),
}
"""Each struct's dtype and the size that failover.h asserts, bytes."""

assert all(dtype.itemsize == size for dtype, size in SIZES.values())

STATUSES: Final = (
    "IBV_WC_SUCCESS",
    "IBV_WC_LOC_LEN_ERR",
    "IBV_WC_LOC_QP_OP_ERR",
    "IBV_WC_LOC_EEC_OP_ERR",
    "IBV_WC_LOC_PROT_ERR",
    "IBV_WC_WR_FLUSH_ERR",
    "IBV_WC_MW_BIND_ERR",
    "IBV_WC_BAD_RESP_ERR",
    "IBV_WC_LOC_ACCESS_ERR",
    "IBV_WC_REM_INV_REQ_ERR",
    "IBV_WC_REM_ACCESS_ERR",
    "IBV_WC_REM_OP_ERR",
    "IBV_WC_RETRY_EXC_ERR",
    "IBV_WC_RNR_RETRY_EXC_ERR",
    "IBV_WC_LOC_RDD_VIOL_ERR",
    "IBV_WC_REM_INV_RD_REQ_ERR",
    "IBV_WC_REM_ABORT_ERR",
    "IBV_WC_INV_EECN_ERR",
    "IBV_WC_INV_EEC_STATE_ERR",
    "IBV_WC_FATAL_ERR",
    "IBV_WC_RESP_TIMEOUT_ERR",
    "IBV_WC_GENERAL_ERR",
)
"""`enum ibv_wc_status` by number (libibverbs, infiniband/verbs.h)."""
SURVIVED: Final = ("IBV_WC_WR_FLUSH_ERR", "IBV_WC_RETRY_EXC_ERR")
"""The statuses after which NCCL moves; with any other it gives up (`ncclIbResiliencyCheckErrorNotFatal`)."""


class PortState(IntEnum):
    """`enum ncclIbResiliencyDevState`; in 2.29.7 there are the first two."""

    OK = 0
    ERROR = 1
    RECOVERING = 2
    RECOVERY_FAILED = 3
    RECOVERED = 4
    ERROR_PERMANENT = 5


class FailoverStat(IntEnum):
    """Slots of the programs' `failover_stats`; probes/bpf/failover.h says what each counts."""

    CALLS = 0
    RING_FULL = 1
    UNREADABLE = 2


def status_name(status: int) -> str:
    """A completion's status as libibverbs names it; a number that it does not have: `status_<n>`."""
    return STATUSES[status] if 0 <= status < len(STATUSES) else f"status_{status}"


@dataclass(frozen=True, slots=True)
class FailoverLayout:
    """Where a build keeps the state of a connection's ports: offsets in bytes."""

    comm_resiliency: int
    comm: int
    count: int
    devices: int
    device_size: int
    device_state: int


def failover_layout(structures: Mapping[str, Structure]) -> FailoverLayout | None:
    """Where a build keeps the state of a connection's ports; None: it cannot fail over, or its layout is not known."""
    connection, resiliency = structures.get("ncclIbSendComm"), structures.get("ncclIbResiliency")
    device = structures.get("ncclIbResiliencyDev")
    if connection is None or resiliency is None or device is None:
        return None
    offsets = (
        connection.offsets.get("base.resiliency"),
        *(resiliency.offsets.get(name) for name in ("baseComm", "ndevs", "devs")),
        device.size_bytes,
        device.offsets.get("state"),
    )
    known = [offset for offset in offsets if offset is not None]
    return FailoverLayout(*known) if len(known) == len(offsets) else None
