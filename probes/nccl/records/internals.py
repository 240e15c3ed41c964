"""The BPF programs below NCCL's entry points share these with us: probes/bpf/internals.h as numpy dtypes.

`layout_record` fills the offsets that those programs read with, from the table of known builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.records.calls import NO_OFFSET, owned

Records = npt.NDArray[Any]

BUCKETS: Final = 32
UNKNOWN_BYTES: Final = (1 << 64) - 1
"""In `payload_bytes`: it cannot be told (Send and Recv of one launch are one operation here)."""
NO_NET_DEVICE: Final = -1
ALGORITHMS: Final = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
"""`NCCL_ALGO_*` by number, in the spelling of NCCL_ALGO; source: src/include/plugin/nccl_tuner.h, 2.32."""
PROTOCOLS: Final = ("LL", "LL128", "Simple")
"""`NCCL_PROTO_*` by number; same source."""


class InternalStat(IntEnum):
    """Slots of the programs' `internal_stats`; probes/bpf/internals.h says what each counts."""

    POSTS = 0
    STOPS = 1
    PLANS = 2
    REPLAYS = 3
    SENDS = 4
    STOPS_UNKNOWN = 5
    FULL = 6
    RING_FULL = 7
    UNREADABLE = 8


class NetworkKind(IntEnum):
    """Which of NCCL's own network transports sent something."""

    SOCKET = 0
    IB = 1


_OFFSETS: Final[Mapping[str, tuple[str, ...]]] = {
    "comm_shared_resources": ("ncclComm.sharedRes",),
    "comm_proxy_state": ("ncclComm.proxyState",),
    "comm_top_parent_local_ranks": ("ncclComm.topParentLocalRanks",),
    "comm_local_rank": ("ncclComm.localRank",),
    "state_lists": ("ncclProxyState.proxyOps",),
    "state_own_rank": ("ncclProxyState.tpRank", "?"),
    "state_list_count": ("ncclProxyState.peerArraySize", "?"),
    "list_size": ("sizeof ncclProxyOps",),
    "list_pool": ("ncclProxyOps.pool",),
    "list_next": ("ncclProxyOps.nextOps",),
    "operation_size": ("sizeof ncclProxyOp",),
    "operation_connection": ("ncclProxyOp.connection",),
    "operation_count": ("ncclProxyOp.opCount",),
    "operation_next": ("ncclProxyOp.next",),
    "operation_channel": ("ncclProxyOp.channelId",),
    "operation_function": ("ncclProxyOp.coll",),
    "operation_function_called": ("ncclProxyOp.collAPI", "?"),
    "operation_protocol": ("ncclProxyOp.protocol",),
    "operation_algorithm": ("ncclProxyOp.algorithm", "?"),
    "operation_peer": ("ncclProxyOp.peer", "?"),
    "operation_task": ("ncclProxyOp.task.coll", "?"),
    "task_function": ("ncclTaskColl.func", "?"),
    "task_count": ("ncclTaskColl.count", "?"),
    "task_data_type": ("ncclTaskColl.datatype", "?"),
    "task_channels": ("ncclTaskColl.nMaxChannels", "?"),
    "task_next": ("ncclTaskColl.next", "?"),
    "task_algorithm": ("ncclTaskColl.algorithm", "?"),
    "task_protocol": ("ncclTaskColl.protocol", "?"),
    "arguments_count": ("ncclProxyArgs.opCount",),
    "part_size": ("sizeof ncclProxySubArgs",),
    "part_connection": ("ncclProxySubArgs.connection",),
    "connection_send": ("ncclProxyConnection.send",),
    "connection_transport": ("ncclProxyConnection.transport",),
    "connection_resources": ("ncclProxyConnection.transportResources",),
    "send_net_device": ("sendNetResources.netDev", "?"),
    "receive_net_device": ("recvNetResources.netDev", "?"),
    "plan_comm": ("ncclKernelPlan.comm",),
    "plan_persistent": ("ncclKernelPlan.persistent",),
    "plan_has_proxy_operations": ("ncclKernelPlan.hasProxyOps", "?"),
    "plan_collectives": ("ncclKernelPlan.collOpCount",),
    "plan_tasks": ("ncclKernelPlan.collTaskQueue", "?"),
    "socket_device": ("ncclNetSocketComm.dev",),
    "ib_device_count": ("ncclIbSendComm.base.vProps.ndevs", "ncclIbSendComm.base.ndevs", "?"),
    "ib_devices": ("ncclIbSendComm.base.vProps.devs", "ncclIbSendComm.devs", "?"),
    "ib_slots": ("ncclIbSendComm.ctsFifo", "ncclIbSendComm.fifo", "?"),
    "ib_slot_size": ("sizeof ncclIbSendFifo", "?"),
    "ib_slot_requests": ("ncclIbSendFifo.nreqs", "?"),
    "ib_requests": ("ncclIbSendComm.sendReqs", "ncclIbSendComm.fifoReqs", "?"),
    "ib_request_bytes": ("ncclIbRequest.send.size", "?"),
    "ib_device_stride": ("sizeof ncclIbSendCommDev", "?"),
    "ib_resiliency": ("ncclIbSendComm.base.resiliency", "?"),
    "resiliency_comm": ("ncclIbResiliency.baseComm", "?"),
    "resiliency_count": ("ncclIbResiliency.ndevs", "?"),
    "resiliency_devices": ("ncclIbResiliency.devs", "?"),
    "resiliency_device_size": ("sizeof ncclIbResiliencyDev", "?"),
    "resiliency_device_state": ("ncclIbResiliencyDev.state", "?"),
    "send_net_comm": ("sendNetResources.netSendComm", "?"),
    "receive_net_comm": ("recvNetResources.netRecvComm", "?"),
}
"""Fields of struct internals_layout behind `known`, in their order: where each comes from, first choice first; `?`:
some version lacks it, and what needs it is then left out."""

LAYOUT: Final = np.dtype([("known", "<u4"), *((name, "<u4") for name in _OFFSETS)])

PROXY_COMMUNICATOR: Final = np.dtype(
    [
        *((name, "<u8") for name in ("group", "list", "posted_sequence", "before_sequence", "posted", "completed")),
        *((name, "<u8") for name in ("launches", "completed_launch", "completed_ns", "previous_ns")),
        *((name, "<u8") for name in ("captured", "replayed")),
        *(("instance", "<u4"), ("elsewhere", "<u4")),
    ]
)
CONNECTION_KEY: Final = np.dtype([("connection", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
CONNECTION: Final = np.dtype(
    [
        *((name, "<u8") for name in ("group", "comm", "posted", "completed", "last_ns", "net_comm")),
        *(("net_device", "<i4"), ("peer", "<i4"), ("instance", "<u4")),
        *((name, "u1") for name in ("network", "send", "channel", "reserved")),
    ]
)
OPERATION_KEY: Final = np.dtype([("group", "<u8"), ("operation", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
OPERATION: Final = np.dtype(
    [
        *((name, "<u8") for name in ("posted_ns", "comm", "launch", "sequence", "before_sequence", "payload_bytes")),
        *((name, "<u4") for name in ("instance", "remaining", "parts", "net_devices")),
        *((name, "u1") for name in ("op", "data_type", "algorithm", "protocol", "channels")),
        ("reserved", "u1", 3),
    ]
)
PART_KEY: Final = np.dtype([("connection", "<u8"), ("operation", "<u8"), ("tgid", "<u4"), ("reserved", "<u4")])
PART: Final = np.dtype([("launch", "<u8"), ("posted", "<u4"), ("instance", "<u4")])
COMPLETION_EVENT: Final = np.dtype(
    [
        *((name, "<u8") for name in ("time_ns", "posted_ns", "comm", "sequence", "payload_bytes", "duration_ns")),
        *((name, "<u4") for name in ("tgid", "instance", "net_devices")),
        *((name, "u1") for name in ("op", "data_type", "algorithm", "protocol", "channels")),
        *(("reserved", "u1", 3), ("reserved2", "<u4")),
    ]
)
DISTRIBUTION: Final = np.dtype([("count", "<u8"), ("sum", "<u8"), ("buckets", "<u8", BUCKETS)])
"""`sum` and the buckets' bounds: ns in `durations` (2^(10+i)), bytes per second in `bandwidths` (2^(16+i))."""
UNKNOWN_SIZE: Final = 255
"""In `size_bucket`: the payload cannot be told."""
HISTORY_KEY: Final = np.dtype([("instance", "<u4"), ("op", "u1"), ("size_bucket", "u1"), ("reserved", "u1", (2,))])
HISTORY: Final = np.dtype([(name, "<u8") for name in ("operations", "duration_ns", "payload_bytes")])
LAUNCH_KEY: Final = np.dtype([(name, "u1") for name in ("op", "algorithm", "protocol", "channels")])
SENT_KEY: Final = np.dtype([("tgid", "<u4"), ("device", "<i2"), ("network", "u1"), ("library", "u1")])
SENT: Final = np.dtype([("last_ns", "<u8"), ("messages", "<u8"), ("bytes", "<u8")])

SIZES: Final = {
    "internals_layout": (LAYOUT, 236),
    "proxy_communicator": (PROXY_COMMUNICATOR, 104),
    "connection_key": (CONNECTION_KEY, 16),
    "connection": (owned(CONNECTION), 72),
    "operation_key": (OPERATION_KEY, 24),
    "operation": (owned(OPERATION), 80),
    "part_key": (PART_KEY, 24),
    "part": (owned(PART), 24),
    "completion_event": (owned(COMPLETION_EVENT), 80),
    "distribution": (DISTRIBUTION, 272),
    "history_key": (HISTORY_KEY, 8),
    "history": (owned(HISTORY), 32),
    "launch_key": (LAUNCH_KEY, 4),
    "sent_key": (SENT_KEY, 8),
    "sent": (owned(SENT), 32),
}
"""Every struct of the header: its dtype here, and its bytes."""


def layout_record(structures: Mapping[str, Structure]) -> Records | None:
    """The layouts of a build as one record of dtype LAYOUT, or None where it lacks something that the programs need."""
    record = np.zeros(1, LAYOUT)
    record["known"] = 1
    for field, sources in _OFFSETS.items():
        found = next((offset for source in sources if (offset := _offset(structures, source)) is not None), None)
        if found is None and "?" not in sources:
            return None
        record[field] = NO_OFFSET if found is None else found
    if record["state_list_count"] == NO_OFFSET:
        record["state_own_rank"] = NO_OFFSET  # lists are numbered by local rank there
    if _offset(structures, "ncclIbSendComm.base.vProps.devs") is not None:
        record["ib_device_stride"] = 4  # an array of int
    return record


def _offset(structures: Mapping[str, Structure], source: str) -> int | None:
    """Offset of `structure.field`, or size of a structure (`sizeof structure`)."""
    if source.startswith("sizeof "):
        structure = structures.get(source.removeprefix("sizeof "))
        return structure.size_bytes if structure is not None else None
    name, _, field = source.partition(".")
    structure = structures.get(name)
    return structure.offsets.get(field) if structure is not None else None
