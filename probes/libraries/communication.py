"""Which communication libraries a file defines, whatever it is called and wherever it lies.

A wheel's libraries have hashes in their names (auditwheel), and a program may have one linked into it: so a library is
known by a function that it defines.  Each marker is public, or of the class that programs call, and in all builds of
the versions named; a file that only imports it, as every user of the library does, does not count.

Sources: ucp.h of UCX (since 1.2), nixl.h of NIXL (0.3 to 1.5), transfer_engine.h of Mooncake (0.3), nvshmemx_api.h of
NVSHMEM (since 2.0), mpi.h (the MPI standard), gloo/transport/tcp/device.h as in PyTorch.  RCCL has NCCL's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from railscope.probes.libraries.elf import EM_AARCH64, EM_X86_64, Elf


class CommunicationLibrary(Enum):
    """As labels call it."""

    NCCL = "nccl"
    NVSHMEM = "nvshmem"
    UCX = "ucx"
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    MPI = "mpi"
    GLOO = "gloo"


NO_LIBRARY: Final[frozenset[CommunicationLibrary]] = frozenset()
MARKERS: Final[Mapping[CommunicationLibrary, str]] = {
    CommunicationLibrary.NCCL: "ncclAllReduce",
    CommunicationLibrary.NVSHMEM: "nvshmemx_putmem_on_stream",
    CommunicationLibrary.UCX: "ucp_init_version",
    CommunicationLibrary.NIXL: "_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs",
    CommunicationLibrary.MOONCAKE: "_ZN8mooncake14TransferEngine15allocateBatchIDEm",
    CommunicationLibrary.MPI: "MPI_Allreduce",
    CommunicationLibrary.GLOO: "_ZN4gloo9transport3tcp12CreateDeviceERKNS1_4attrE",
}
"""A file that defines this function contains the library."""


_MACHINES: Final = frozenset({EM_X86_64, EM_AARCH64})


def libraries_in(elf: Elf) -> frozenset[CommunicationLibrary]:
    """The communication libraries that a file defines, for a processor whose calls railscope can read; as a rule none.

    Raises:
        ElfError: the file is damaged.
    """
    if elf.machine not in _MACHINES:
        return NO_LIBRARY
    defined = elf.symbols(MARKERS.values())
    return frozenset(library for library, marker in MARKERS.items() if marker in defined)
