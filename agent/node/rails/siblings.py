"""Whether a rail's link is what those of its siblings are: the rails of the same machine that are the same product.

A link that came up slow, narrow or of the wrong kind before the agent did has no better past; only the others tell.
Of InfiniBand a single lane is known to be wrong without them: its cables have four, or two where one is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.counted import format_count
from railscope.probes.netdev.inventory import NetworkDevice
from railscope.probes.topology.machine import Hardware, Nic
from railscope.probes.topology.paths import Place
from railscope.probes.topology.pci import PciDevice

_LANES: Final = 4
"""Of an InfiniBand link that is whole (InfiniBand Architecture, volume 2: 1X, 2X, 4X; wider ones are of switches)."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """A rail's link beside those of its siblings."""

    speed_ratio: float | None
    """Speed / the greatest of its siblings; None: it is down, has none, or speeds are not known."""
    lanes_ratio: float | None
    """The same of lanes; less than 1 only where the speed is less, too, or nobody has another."""
    problem: str
    """What is wrong with it, as the end of a sentence about the rail; empty: nothing."""


NO_STATE: Final = LinkState(None, None, "")


def compare_links(rails: Iterable[Nic]) -> Mapping[Nic, LinkState]:
    """The link of every rail; parts of another port (virtual functions) are judged with that, and have no entry."""
    whole = [nic for nic in rails if not nic.function]
    return {
        nic: _state(nic, [other for other in whole if other is not nic and _is_sibling(other, nic)]) for nic in whole
    }


def port_of_netdev(device: NetworkDevice, function: PciDevice | None) -> Nic:
    """A network device, with its PCI function, as a port to compare; one of an unknown product has no siblings."""
    hardware = (
        Hardware(device.driver, "", function.model, function.greatest_link) if function and function.model else None
    )
    return Nic(
        device.name,
        None,
        Place(device.pci),
        device.speed_bytes_per_second,
        device.carrier,
        hardware or Hardware(),
        device.link_layer,
        pci_link=function.link if function else "",
    )


def _is_sibling(one: Nic, other: Nic) -> bool:
    return one.up is not False and one.hardware.same_as(other.hardware)


def _state(nic: Nic, siblings: list[Nic]) -> LinkState:
    if nic.up is False:
        return LinkState(None, None, "its link is down")
    layers = {other.link_layer for other in siblings}
    if len(layers) == 1 and nic.link_layer in _OTHER and layers == {_OTHER[nic.link_layer]}:
        return LinkState(None, None, f"it is set to {nic.link_layer}, and its siblings run {_OTHER[nic.link_layer]}")
    speed, best_speed = nic.speed_bytes_per_second, _greatest(other.speed_bytes_per_second for other in siblings)
    lanes, best_lanes = nic.lanes, _greatest(other.lanes for other in siblings)
    speed_ratio = speed / max(best_speed, speed) if speed and best_speed else None
    lanes_ratio = lanes / max(best_lanes, lanes) if lanes and best_lanes else None
    if speed_ratio is not None and speed_ratio < 1:
        fewer = f" on {format_count(lanes, 'lane')}" if lanes and lanes_ratio and lanes_ratio < 1 else ""
        others = f" on {format_count(best_lanes, 'lane')}" if fewer else ""
        problem = f"{_gigabits(speed)}{fewer}, and its siblings run at {_gigabits(best_speed)}{others}"
        return LinkState(speed_ratio, lanes_ratio, problem)
    if nic.link_layer == "InfiniBand" and lanes == 1:
        return LinkState(speed_ratio, 1 / _LANES, f"{_gigabits(speed)} on 1 lane, and an InfiniBand link has {_LANES}")
    # Two fast lanes carry what four slow ones do.
    whole_lanes = None if lanes_ratio is None else 1.0
    return LinkState(speed_ratio, whole_lanes, _pci_problem(nic, siblings))


_OTHER: Final = {"InfiniBand": "Ethernet", "Ethernet": "InfiniBand"}


def _pci_problem(nic: Nic, siblings: list[Nic]) -> str:
    """Why a card's way to memory is less than its siblings'."""
    own = _transfers(nic.pci_link)
    best = max(siblings, key=lambda other: _transfers(other.pci_link), default=nic)
    if not own or own >= _transfers(best.pci_link):
        return ""
    return f"its PCI link runs at {nic.pci_link}, and that of its siblings at {best.pci_link}"


def _transfers(link: str) -> float:
    """Lanes times transfers a second of a PCI link, `32.0 GT/s x16`; 0 where it is not known."""
    speed, _, width = link.partition(" GT/s x")
    return float(speed) * int(width) if width else 0.0


def _greatest(values: Iterable[int | None]) -> int:
    return max((value for value in values if value is not None), default=0)


def _gigabits(speed: int | None) -> str:
    return "unknown speed" if speed is None else f"{speed * 8 / 1e9:g} Gb/s"
