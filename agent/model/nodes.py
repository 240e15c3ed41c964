"""What of a job's traffic leaves its nodes, and over which rails.

Ranks fill nodes in order: rank r is GPU r mod g of node r div g.  On a rail-optimised fabric every GPU has a NIC of
its own, and the NICs of the same local GPU meet at the same leaf switch; so a GPU's rail is its local index, and bytes
between different rails of different nodes cross the spine.  (NCCL may carry such bytes over NVLink to the GPU of the
right rail first, which spares the spine but not the NIC.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from railscope.agent.model.shape import ShapeError
from railscope.agent.model.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes that ranks fill in order.

    Raises:
        ShapeError: the ranks do not fill whole nodes.
    """

    ranks: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ShapeError(f"{self.gpus_per_node} GPUs a node: there must be at least one")
        if self.ranks % self.gpus_per_node:
            raise ShapeError(
                f"{self.ranks} ranks do not fill nodes of {self.gpus_per_node} GPUs: choose GPUs a node that divide "
                f"{self.ranks}"
            )

    @property
    def count(self) -> int:
        return self.ranks // self.gpus_per_node

    def inter_node_bytes(self, traffic: Traffic) -> int:
        """Wire bytes between ranks of different nodes."""
        return int(traffic.flows["bytes"][self._leaving(traffic)].sum())

    def nic_transmit_bytes(self, traffic: Traffic) -> NDArray[np.int64]:
        """What each rank sends to other nodes, over the NIC beside its GPU."""
        leaving = traffic.flows[self._leaving(traffic)]
        return Traffic(traffic.ranks, leaving).sent_bytes()

    def node_transmit_bytes(self, traffic: Traffic) -> NDArray[np.int64]:
        """What each node sends to others."""
        by_node: NDArray[np.int64] = (
            self.nic_transmit_bytes(traffic).reshape(self.count, self.gpus_per_node).sum(axis=1)
        )
        return by_node

    def cross_rail_bytes(self, traffic: Traffic) -> int:
        """Wire bytes between different rails of different nodes."""
        flows = traffic.flows
        other_rail = flows["source"] % self.gpus_per_node != flows["destination"] % self.gpus_per_node
        return int(flows["bytes"][self._leaving(traffic) & other_rail].sum())

    def _leaving(self, traffic: Traffic) -> NDArray[np.bool_]:
        flows = traffic.flows
        leaving: NDArray[np.bool_] = flows["source"] // self.gpus_per_node != flows["destination"] // self.gpus_per_node
        return leaving
