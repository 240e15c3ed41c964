"""The distance between two PCI functions, in NCCL's terms.

NCCL sorts paths by what lies between two devices (`PATH_*` in src/include/graph.h, computed in src/graph/paths.cc):
one PCI switch (PIX), several (PXB), the CPU's host bridge (PHB), the link between CPUs (SYS).  It sees a switch where
the PCI tree has two bridges, the switch's upstream and downstream port, and does not count the root port.

NCCL 2.19 and later merge two levels of Broadcom switches into one, and call PIX there what is PXB here; what is
nearest stays nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class PathType(IntEnum):
    """From near to far, with NCCL's numbers; what leads over other GPUs (NVB, P2C, PXN) is left out."""

    LOC = 0
    NVL = 1
    """NVLink: between GPUs only, and nothing that a PCI tree tells."""
    PIX = 4
    PXB = 5
    PHB = 8
    SYS = 9


@dataclass(frozen=True, slots=True)
class Place:
    """Where one PCI function sits."""

    address: str
    """`0000:18:00.0`; empty: not a PCI function."""
    switches: tuple[str, ...] = ()
    """Addresses of the PCI switches above it (their upstream ports), outermost first."""
    numa_node: int | None = None
    root: str = ""
    """The host bridge, `pci0000:15`; empty where it is not known."""


def shared_switches(one: Place, other: Place) -> tuple[str, ...]:
    """The PCI switches that lie above both places, outermost first."""
    shared = []
    for left, right in zip(one.switches, other.switches, strict=False):
        if left != right:
            break
        shared.append(left)
    return tuple(shared)


def path_type(one: Place, other: Place) -> PathType:
    """What lies between two places of the PCI topology, as NCCL calls it; SYS where nothing brings them nearer."""
    if one.address and one.address == other.address:
        return PathType.LOC
    shared = len(shared_switches(one, other))
    if shared:
        return PathType.PIX if shared == len(one.switches) == len(other.switches) else PathType.PXB
    same_node = one.numa_node is not None and one.numa_node == other.numa_node
    same_root = bool(one.root) and one.root == other.root
    return PathType.PHB if same_node or same_root else PathType.SYS
