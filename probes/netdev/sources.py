"""The best readers of network devices that the agent's rights allow, for one namespace or a recorded tree.

Inside a namespace the kernel tells everything; entering another one takes CAP_SYS_ADMIN.  Without it, or where
netlink is shut off, names and bytes of `/proc/PID/net/dev` remain, and what is lost is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from railscope.probes.clock import Clock
from railscope.probes.netdev.counters import CounterSource
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.netdev.inventory import Inventory, NetlinkInventory, ProcInventory, SysfsInventory
from railscope.probes.netdev.netlink import AnswerTooLong
from railscope.probes.netdev.procfs_counters import ProcNetDevCounters
from railscope.probes.netdev.rtnetlink_counters import NetlinkCounters
from railscope.probes.netdev.sysfs_counters import SysfsCounters
from railscope.probes.processes.namespaces import NamespaceDenied, NamespaceError, NetworkNamespace, run_inside


@dataclass(frozen=True, slots=True)
class DeviceSources:
    """What reads the devices of one namespace."""

    netns: int
    inventory: Inventory
    counters: CounterSource
    events: LinkEvents | None
    """None where nothing announces changes: read the inventory again now and then."""
    level: Literal["netlink", "proc", "sysfs"]
    reason: str
    """Why it is not `netlink`; empty when it is."""

    def close(self) -> None:
        """Close inventory and events; `counters` belong to whom they were given to, as a sampler."""
        self.inventory.close()
        if self.events is not None:
            self.events.close()


def open_namespace(
    namespace: NetworkNamespace, *, procfs: Path, sysfs: Path, clock: Clock, most_devices: int | None = None
) -> DeviceSources:
    """Readers of network devices for one network namespace, in which so many are looked at (None: all).

    `sysfs` gives NUMA nodes of PCI devices, which do not depend on the namespace.  Open sockets keep the namespace
    alive: close these as soon as its last process has gone.

    Raises:
        NamespaceError: the process that the namespace was found through has gone.
        AnswerTooLong: there are more devices.
    """
    try:
        return run_inside(namespace, lambda: _netlink_sources(namespace.inode, sysfs, clock, most_devices))
    except AnswerTooLong:
        raise
    except NamespaceDenied:
        reason = "no right to enter the network namespace: grant CAP_SYS_ADMIN for link speed, state and events"
    except (OSError, ValueError) as error:
        reason = f"netlink does not work here: {error}"
    return _proc_sources(namespace, procfs, clock, reason, most_devices)


def recorded_sources(sysfs: Path, *, clock: Clock) -> DeviceSources:
    """Readers of network devices for a recorded sysfs tree, or the machine's own without netlink; the namespace is 0.

    Raises:
        OSError: there is no `class/net` in it.
    """
    return DeviceSources(0, SysfsInventory(sysfs), SysfsCounters(sysfs, clock), None, "sysfs", f"read from {sysfs}")


def _netlink_sources(netns: int, sysfs: Path, clock: Clock, most_devices: int | None) -> DeviceSources:
    """Runs inside the namespace."""
    counters = NetlinkCounters(clock, most_devices)
    try:
        inventory = NetlinkInventory(netns, sysfs, most_devices)
        try:
            events = LinkEvents(netns, most_devices)
        except (OSError, ValueError):
            inventory.close()
            raise
    except (OSError, ValueError):
        counters.close()
        raise
    return DeviceSources(netns, inventory, counters, events, "netlink", "")


def _proc_sources(
    namespace: NetworkNamespace, procfs: Path, clock: Clock, reason: str, most_devices: int | None
) -> DeviceSources:
    folder = procfs / "self" if namespace.own else namespace.process_folder
    try:
        counters = ProcNetDevCounters(folder, clock)
    except OSError as error:
        raise NamespaceError(f"{folder}/net/dev: {error.strerror}: the process has ended, or is not ours") from None
    inventory = ProcInventory(folder, namespace.inode, most_devices)
    return DeviceSources(namespace.inode, inventory, counters, None, "proc", reason)
