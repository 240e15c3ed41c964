"""Reads from outside in which state NCCL holds the ports of a connection that failed over.

They stand in its `ncclIbResiliency` (src/transport/net_ib/p2p_resiliency.h, NCCL 2.29.7 to 2.32), which points back to
the connection, and the connection to it, for as long as it is open.
"""

from __future__ import annotations

from railscope.probes.nccl.records.failover import MOST_PORTS, FailoverLayout
from railscope.probes.processes.memory import read_memory

_POINTER_BYTES = 8
_INT_BYTES = 4


def read_port_states(memory: int, comm: int, resiliency: int, layout: FailoverLayout) -> tuple[int, ...] | None:
    """States of a connection's ports, as `PortState` has them; None: it is closed, or cannot be read.

    `memory` is a descriptor of the process's /proc/PID/mem.
    """
    if _number(memory, comm + layout.comm_resiliency, _POINTER_BYTES) != resiliency:
        return None
    if _number(memory, resiliency + layout.comm, _POINTER_BYTES) != comm:
        return None
    count = _number(memory, resiliency + layout.count, _INT_BYTES)
    if count is None or not 0 < count <= MOST_PORTS:
        return None
    first = resiliency + layout.devices + layout.device_state
    states = tuple(_number(memory, first + place * layout.device_size, _INT_BYTES) for place in range(count))
    known = tuple(state for state in states if state is not None)
    return known if len(known) == count else None


def _number(memory: int, address: int, size_bytes: int) -> int | None:
    data = read_memory(memory, size_bytes, address)
    return None if data is None else int.from_bytes(data, "little")
