"""A connection of NCCL's InfiniBand transport over several ports, forged in a process that has the library loaded.

It has no queue pairs, so that nothing is there to be moved where a port fails; what NCCL decides, and notes as the
state of the port, is its own doing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.memory.port_states import read_port_states
from railscope.probes.nccl.programs.failover import SYMBOL
from railscope.probes.nccl.records.failover import MOST_PORTS, FailoverLayout, PortState, failover_layout
from tests.root.caller import Caller

NEWEST = "2.32.3"
VENDOR_ERROR, QUEUE_PAIR = 0x81, 4711
_COMPLETION_BYTES = 48
"""Of an ibv_wc."""


@dataclass(frozen=True, slots=True)
class ForgedConnection:
    """One that sends."""

    caller: Caller
    layout: FailoverLayout
    handle: int
    """Address of ncclIbResiliencyHandleCompletionError."""
    net: int
    """What NCCL's transport calls the connection, a ncclIbSendComm."""
    resiliency: int

    @classmethod
    def over(
        cls, library: Path, caller: Caller, structures: Mapping[str, Structure], net: int, devices: Sequence[int]
    ) -> Self:
        """Make of zeroed memory at `net` a connection over these devices, as NCCL numbers them."""
        with library.open("rb") as file, Elf.open(file.fileno()) as elf:
            handle = caller.address_of(library, elf.symbols([SYMBOL])[SYMBOL].file_offset)
        layout = failover_layout(structures)
        assert layout is not None
        resiliency = caller.memory(structures["ncclIbResiliency"].size_bytes)
        fields = structures["ncclIbSendComm"].offsets
        numbers = net + fields["base.vProps.devs"]
        for address, value, size_bytes in (
            (resiliency + layout.comm, net, 8),
            (resiliency + layout.count, len(devices), 4),
            (net + layout.comm_resiliency, resiliency, 8),
            (net + fields["base.vProps.ndevs"], len(devices), 4),
            *((numbers + 4 * place, device, 4) for place, device in enumerate(devices)),
            (numbers + 4 * MOST_PORTS, 1, 1),  # isSend follows
        ):
            caller.store(address, value, size_bytes)
        return cls(caller, layout, handle, net, resiliency)

    def fail(self, place: int, status: int) -> int:
        """NCCL meets a completion with this status on the port; returns what it makes of that."""
        completion = self.caller.memory(_COMPLETION_BYTES)
        words = struct.pack("<QIIIIII", 0, status, 0xDEAD, VENDOR_ERROR, 0xDEAD, 0, QUEUE_PAIR)
        for at in range(0, len(words), 8):
            self.caller.store(completion + at, int.from_bytes(words[at : at + 8], "little"), 8)
        return self.caller.call_at(self.handle, 1, self.resiliency, completion, place)

    def states(self) -> tuple[int, ...] | None:
        memory = os.open(f"/proc/{self.caller.pid}/mem", os.O_RDONLY)
        try:
            return read_port_states(memory, self.net, self.resiliency, self.layout)
        finally:
            os.close(memory)

    def set_state(self, place: int, state: PortState) -> None:
        at = self.resiliency + self.layout.devices + place * self.layout.device_size + self.layout.device_state
        self.caller.store(at, state, 4)
