"""Which ranks go on without a port that failed, as NCCL moved their connections to another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import FailedOver
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import match_any
from railscope.agent.facts import catalogue

_PortKey = tuple[str, str]
"""Instance and device: what NCCL calls a port has no other name where a device has one port."""


def failed_over(
    ask: Asker, samples: Iterable[Sample], names: Mapping[str, str], rate_seconds: float
) -> tuple[FailedOver, ...]:
    """The ranks of an answer on `comm_degraded_connections`, and what the ports carry now.

    Args:
        names: of hosts, by instance.
        rate_seconds: over which rates are taken.
    """
    found = tuple(samples)
    if not found:
        return ()
    on = match_any("instance", sorted({one.labels.get("instance", "") for one in found}))
    sent: dict[_PortKey, float] = {}
    for one in ask(f"rate({catalogue.RAIL_TRANSMIT_BYTES.where(on)}[{rate_seconds:.0f}s])"):
        key = one.labels.get("instance", ""), one.labels.get("device", "")
        sent[key] = sent.get(key, 0.0) + one.value
    return tuple(
        FailedOver(
            comm=one.labels.get("comm", ""),
            rank=one.labels.get("rank", ""),
            host=names.get(instance := one.labels.get("instance", ""), "unknown"),
            rail=one.labels.get("rail", ""),
            device=one.labels.get("device", ""),
            port=one.labels.get("port", ""),
            carried_by=one.labels.get("carried_by", ""),
            status=one.labels.get("status", ""),
            vendor_error=one.labels.get("vendor_error", ""),
            connections=int(one.value),
            transmit=sent.get((instance, one.labels.get("device", ""))),
            carrier_transmit=sent.get((instance, one.labels.get("carried_by", ""))),
        )
        for one in found
    )
