"""An agent's ledger of one rail, as its metrics show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.rail_ledger import Origin
from railscope.testbed.hosts import Fabric
from tests.fabric.agent_process import AgentProcess, metrics_of

ORIGINS: Final = frozenset(origin.value for origin in Origin)
Place = tuple[int, int, str]
"""Host, rail, direction."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Bytes by origin, and the same by owner."""

    origins: dict[str, float]
    owners: dict[str, float]
    error_ratio: float
    """0 where it is not shown: there were no bytes."""

    @property
    def bytes(self) -> float:
        return sum(self.origins.values())

    @property
    def explained_ratio(self) -> float:
        """Collectives with what belongs to them, over all bytes."""
        return sum(self.origins[origin] for origin in ("collective", "overhead", "retransmission")) / self.bytes


def ledgers(agent: AgentProcess, fabric: Fabric) -> dict[Place, Shown]:
    """Every rail's, in both directions, of one scrape."""
    hosts = {host.namespace: number for number, host in enumerate(fabric.hosts)}
    rails = {name: number for number, name in enumerate(fabric.rail_names)}
    origins: dict[Place, dict[str, float]] = {}
    owners: dict[Place, dict[str, float]] = {}
    errors: dict[Place, float] = {}
    for name, labels, value in metrics_of(agent.text()):
        if labels.get("netns") not in hosts or labels.get("device") not in rails or "direction" not in labels:
            continue
        place = hosts[labels["netns"]], rails[labels["device"]], labels["direction"]
        if name == "railscope_rail_bytes_by_origin_total":
            origins.setdefault(place, {})[labels["origin"]] = value
        elif name == "railscope_rail_bytes_by_owner_total":
            owners.setdefault(place, {})[labels["owner"]] = value
        elif name == "railscope_rail_ledger_error_ratio":
            errors[place] = value
    assert all(found.keys() | {"transfer"} == ORIGINS for found in origins.values())
    assert all(sum(found.values()) == sum(origins[place].values()) for place, found in owners.items())
    return {place: Shown(found, owners.get(place, {}), errors.get(place, 0.0)) for place, found in origins.items()}


class PortCounters:
    """What the kernel counts on every rail of a fabric from now on."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._before = dict(self._read())

    def since(self) -> dict[Place, int]:
        return {place: value - self._before[place] for place, value in self._read()}

    def _read(self) -> Iterator[tuple[Place, int]]:
        for host in range(len(self._fabric.hosts)):
            for rail in range(len(self._fabric.rail_names)):
                counters = self._fabric.counters(host, rail)
                yield (host, rail, "transmit"), counters.transmit_bytes
                yield (host, rail, "receive"), counters.receive_bytes


def settled(agent: AgentProcess, fabric: Fabric, ports: PortCounters) -> dict[Place, Shown]:
    """Ledgers that hold the ports' bytes; `ports` was made when the agent saw the rails already.

    A host is not watched for longer than its processes: a late packet of the kernel's own is in no ledger.
    """

    def whole() -> bool:
        counted, shown = ports.since(), ledgers(agent, fabric)
        return all(place in shown and shown[place].bytes >= 0.999 * value for place, value in counted.items())

    # Bytes that nothing explains wait for some readings, which a busy machine makes seldom.
    agent.until(whole, 120)
    return ledgers(agent, fabric)
