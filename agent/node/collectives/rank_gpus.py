"""Which of the host's GPUs a rank uses: its number in the host's NVML, its UUID, and its PCI address.

NCCL keeps two numbers of a GPU in a communicator, and neither is the host's for certain.  CUDA's counts what
CUDA_VISIBLE_DEVICES leaves.  NVML's counts what the process may open, which in a container, or in a job whose devices
the batch system constrains, is a part of the host's GPUs.  The PCI address is the same everywhere, so the GPU is found
by it among those that NVML lists for this host.  Where this host's NVML is not read, NCCL's number from NVML is taken
of processes that nothing confines.

Sources: `busIdToInt64()` and `int64ToBusId()` in NCCL's misc/utils.cc (domain, bus, device and function as hexadecimal
digits one after the other), `ncclCommInitRankFunc()` in its init.cc (`busId`, `nvmlDev`), nvml.h
(NVML_DEVICE_PCI_BUS_ID_FMT).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from railscope.agent.facts.hardware import GpuFacts, format_pci_bus_id
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import NO_GPU, RankGpu

_FUNCTION_BITS: Final = 4
"""Bits of a hexadecimal digit: NCCL leaves out the colons and the dot."""


class RankGpus:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, is_confined: Callable[[int], bool]) -> None:
        """`is_confined` knows by pid whether a process may see a part of the host's GPUs only; true: perhaps."""
        self._is_confined = is_confined
        self._gpus: dict[str, RankGpu] = {}
        """Those of the host, by PCI address."""

    def set_host_gpus(self, gpus: tuple[GpuFacts, ...]) -> bool:
        """Take over the GPUs that NVML lists for this host; returns whether any of them is another one now."""
        found = {one.pci_bus_id: RankGpu(one.gpu, one.uuid, one.pci_bus_id) for one in gpus if one.pci != UNKNOWN}
        changed = found != self._gpus
        self._gpus = found
        return changed

    def find(self, tgid: int, bus_id: int | None, nvml_dev: int | None) -> RankGpu:
        """The GPU of a process, from what NCCL says of it; None: it says nothing."""
        address = UNKNOWN if bus_id is None else format_nccl_bus_id(bus_id)
        known = self._gpus.get(address)
        if known is not None:
            return known
        if self._gpus or nvml_dev is None or self._is_confined(tgid):
            return RankGpu(pci_bus_id=address) if bus_id is not None else NO_GPU
        return RankGpu(str(nvml_dev), pci_bus_id=address)


def format_nccl_bus_id(bus_id: int) -> str:
    """NCCL's number of a PCI function as NVML writes its address: 0x1b000 is 00000000:1B:00.0."""
    function, device = bus_id & 0xF, bus_id >> _FUNCTION_BITS & 0xFF
    bus, domain = bus_id >> 3 * _FUNCTION_BITS & 0xFF, bus_id >> 5 * _FUNCTION_BITS
    return format_pci_bus_id(f"{domain:x}:{bus:x}:{device:x}.{function:x}")
