"""Who moved bytes over a rail: the closed set of owners that ledgers, metrics and faces tell apart."""

from __future__ import annotations

from enum import Enum


class TrafficOwner(Enum):
    """Of port bytes, as labels call it.  Every byte has exactly one, and `unknown` is the honest rest."""

    NCCL = "nccl"
    """NCCL and RCCL, moved by their own threads."""
    GIN = "gin"
    """NCCL from the device (GIN): no call of the host moves them."""
    NVSHMEM = "nvshmem"
    UCX = "ucx"
    """UCX, where no library above it is known: NIXL and MPI may send through it, and own the bytes then."""
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    MPI = "mpi"
    GLOO = "gloo"
    STORAGE = "storage"
    """Sockets of the kernel's own clients of storage (NFS, NVMe/TCP, iSCSI, Ceph, Lustre)."""
    TCP_OTHER = "tcp_other"
    """TCP of processes that map no communication library, or of such that do and by sockets of none."""
    RDMA_OTHER = "rdma_other"
    """RDMA of processes that map no communication library."""
    UNKNOWN = "unknown"
    """What nobody tells: UDP, other hosts' broadcasts, connections that came and went unseen, processes that may not be
    looked at, and RDMA without evidence of queue pairs."""


NAMED_LIBRARIES = frozenset(
    {
        *(TrafficOwner.NVSHMEM, TrafficOwner.UCX, TrafficOwner.NIXL, TrafficOwner.MOONCAKE, TrafficOwner.MPI),
        TrafficOwner.GLOO,
    }
)
"""Communication libraries other than NCCL."""
