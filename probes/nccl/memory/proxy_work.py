"""Reads from outside whether NCCL's proxy has network operations in progress.

A communicator's proxy thread keeps them in a list, `ncclProxyState.progressState.active` (src/include/proxy.h, NCCL
2.20 to 2.32); it is empty when nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.processes.memory import read_memory

_POINTER_BYTES = 8


@dataclass(frozen=True, slots=True)
class ProxyWorkLayout:
    """Offsets of one build, bytes."""

    comm_proxy_state: int
    state_active: int


def proxy_work_layout(structures: Mapping[str, Structure]) -> ProxyWorkLayout | None:
    """Where a build of NCCL keeps what its proxy thread works on; None: its layouts are not known."""
    comm, state = structures.get("ncclComm"), structures.get("ncclProxyState")
    if comm is None or state is None:
        return None
    proxy_state, active = comm.offsets.get("proxyState"), state.offsets.get("progressState.active")
    return None if proxy_state is None or active is None else ProxyWorkLayout(proxy_state, active)


def proxy_has_work(memory: int, comm: int, layout: ProxyWorkLayout) -> bool | None:
    """Whether the proxy of the communicator at this address has operations; None: that cannot be read.

    `memory` is a descriptor of the process's /proc/PID/mem.
    """
    state = _pointer(memory, comm + layout.comm_proxy_state)
    if not state:
        return None
    active = _pointer(memory, state + layout.state_active)
    return None if active is None else active != 0


def _pointer(memory: int, address: int) -> int | None:
    data = read_memory(memory, _POINTER_BYTES, address)
    return None if data is None else int.from_bytes(data, "little")
