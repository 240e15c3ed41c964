"""The metric families of the fabric beyond a node's ports: switches, and queue pairs by process."""

from __future__ import annotations

from collections.abc import Iterator

from railscope.agent.facts import catalogue
from railscope.agent.facts.hardware import NodeFabric
from railscope.exporters.series.family_draft import Draft


def fabric_families(fabric: NodeFabric) -> Iterator[Draft]:
    """Nothing of rails whose switch was not heard, nor of processes without queue pairs."""
    yield Draft(
        catalogue.RAIL_SWITCH_INFO,
        (((one.rail, one.device, one.switch, one.port), 1) for one in fabric.neighbours),
    )
    yield Draft(
        catalogue.RDMA_QUEUE_PAIRS,
        (((one.device, one.pid, one.state), one.count) for one in fabric.queue_pairs.counts),
    )
