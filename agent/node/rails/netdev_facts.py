"""A rail that is a network device, as the snapshot has it: its link, its bytes, its counters with their severities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import RailLedger
from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.node.rails.counter_rules import TABLES_ONLY, OwnSeverities, Severity
from railscope.agent.node.rails.ethernet_facts import RailEthernet, pci_stalled
from railscope.agent.node.rails.siblings import NO_STATE, LinkState
from railscope.agent.node.sampling.state import DeviceTotals
from railscope.agent.node.sampling.totals import RATE_BOUNDS
from railscope.probes.netdev.inventory import NetworkDevice

SEVERITIES: Final[dict[str, Severity]] = {
    "carrier_changes": "page",
    "rx_errors": "warn",
    "tx_errors": "warn",
    "rx_dropped": "context",
    "tx_dropped": "warn",
    "rx_dropped_or_missed": "context",
    "rx_crc_errors": "warn",
    "rx_length_errors": "warn",
    "rx_over_errors": "warn",
    "rx_frame_errors": "warn",
    "rx_fifo_errors": "warn",
    "rx_missed_errors": "warn",
    "tx_aborted_errors": "warn",
    "tx_carrier_errors": "warn",
    "tx_fifo_errors": "warn",
    "tx_heartbeat_errors": "warn",
    "tx_window_errors": "warn",
}
"""How much an increase matters: `page` on any, `warn` on a rate that lasts, `context` to understand another finding.

A port that lost its carrier while a job ran has stalled it: `page`.  Damaged, lost and refused frames are `warn`: they
cost bandwidth, and a few of them happen.  The kernel also counts as dropped on receive what nobody on this host
listens to (a protocol without a handler, a VLAN that is not configured), which happens on healthy switches all the
time, so those are `context`; so is every counter that is not named here, such as packets (rx_packets), multicast
frames and collisions.  Source: `rtnl_link_stats64` in
Linux include/uapi/linux/if_link.h.
"""


def netns_labels(devices: Iterable[NetworkDevice], named: Mapping[int, str]) -> dict[tuple[int, str], str]:
    """The `netns` label of every (namespace, name): empty where the name is in one namespace only.

    `named` holds the names that namespaces have, by inode; one without a name is `net:[inode]`.
    """
    homes: defaultdict[str, set[int]] = defaultdict(set)
    for device in devices:
        homes[device.name].add(device.netns)
    return {
        (netns, name): named.get(netns, f"net:[{netns}]") if len(namespaces) > 1 else ""
        for name, namespaces in homes.items()
        for netns in namespaces
    }


def rail_facts(
    decision: RailDecision,
    totals: DeviceTotals | None,
    *,
    netns_label: str,
    gpu: str = UNKNOWN,
    carrier_changes: int | None = None,
    transmit_wire_bytes: int | None = None,
    transmit_collective_bytes: int | None = None,
    receive_wire_bytes: int | None = None,
    transmit_explained_ratio: float | None = None,
    receive_explained_ratio: float | None = None,
    ethernet: RailEthernet | None = None,
    ledger: RailLedger | None = None,
    utilization: tuple[float | None, float | None] = (None, None),
    bond_members: tuple[tuple[str, bool | None], ...] = (),
    connections_awaited: bool = False,
    own_severities: OwnSeverities = TABLES_ONLY,
    link: LinkState = NO_STATE,
) -> RailFacts:
    """The snapshot's facts of one rail; `totals` is None while no source has read it.

    `carrier_changes` is a total that never falls; None: it is not known.

    Many drivers show statistics of the kernel's once more, as rx_errors.  Those are the same events, so the kernel's
    are kept, which are read more often, and those of the driver left out also while the kernel's were not read yet.
    The driver's stay where they mean something else, which shows in the severity: the kernel's rx_dropped counts also
    what nobody listens to.

    Raises:
        ValueError: the device is not a rail.
    """
    device = decision.device
    if decision.rail is None:
        raise ValueError(f"{device.name} is not a rail: {decision.reason}")
    empty = Histogram(RATE_BOUNDS, (0,) * (len(RATE_BOUNDS) + 1), 0.0)
    counted = totals.counters if totals else ()
    of_kernel = dict(counted) if totals else SEVERITIES

    def severity(name: str) -> Severity:
        return own_severities.of(name, SEVERITIES.get(name, "context"))

    if carrier_changes is not None:
        counted = (*counted, ("carrier_changes", carrier_changes))
    return RailFacts(
        rail=decision.rail,
        device=device.name,
        port="",
        netdev=device.name,
        netns=netns_label,
        pci=device.pci or UNKNOWN,
        numa=UNKNOWN if device.numa_node is None else str(device.numa_node),
        gpu=gpu,
        link_layer=device.link_layer,
        driver=device.driver or UNKNOWN,
        up=is_up(device),
        speed_bytes_per_second=device.speed_bytes_per_second,
        transmit_bytes=totals.transmit_bytes if totals else None,
        receive_bytes=totals.receive_bytes if totals else None,
        speed_to_siblings=link.speed_ratio,
        transmit_wire_bytes=transmit_wire_bytes,
        transmit_collective_bytes=transmit_collective_bytes,
        receive_wire_bytes=receive_wire_bytes,
        transmit_explained_ratio=transmit_explained_ratio,
        receive_explained_ratio=receive_explained_ratio,
        transmit_rate=totals.transmit_rate if totals else empty,
        receive_rate=totals.receive_rate if totals else empty,
        counters=(
            *((name, severity(name), value) for name, value in counted),
            *(
                (one.name, one.severity, one.count)
                for one in (ethernet.counters if ethernet else ())
                if one.name not in of_kernel or severity(one.name) != one.severity
            ),
        ),
        queue=ethernet.queue if ethernet else None,
        tcp=ethernet.tcp if ethernet else None,
        tcp_awaited=connections_awaited,
        ledger=ledger,
        transmit_utilization=utilization[0],
        receive_utilization=utilization[1],
        bond_members=bond_members,
        pci_stalled=pci_stalled(ethernet.gauges) if ethernet else (),
    )


def members_of_bond(
    bond: NetworkDevice, devices: Mapping[tuple[int, str], NetworkDevice]
) -> tuple[tuple[str, bool | None], ...]:
    """The members of a bond, and whether their links are up, as the bond sees them or else by their carrier.

    `devices` are all of the bond's namespace, by namespace and name.  Empty for what is no bond.
    """
    if bond.kind != "bond":
        return ()
    members = [(name, devices.get((bond.netns, name))) for name in bond.slaves]
    return tuple(
        (name, None if member is None else is_up(member) if member.bond_link is None else member.bond_link)
        for name, member in members
    )


def is_up(device: NetworkDevice) -> bool | None:
    """Whether a rail's device is switched on and connected; None where one of them cannot be known."""
    if device.up is False or device.carrier is False:
        return False
    return True if device.up and device.carrier else None
