"""Which network devices there are, and what each one is.

Three readers of the same facts.  `NetlinkInventory` asks the kernel inside a network namespace and knows everything;
`SysfsInventory` reads a folder, ours or a recorded one; `ProcInventory` is what is left without the right to enter a
namespace: names from `/proc/PID/net/dev`.  What a reader cannot know is None or `unknown`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

from railscope.probes.netdev.bonds import bond_members, member_link
from railscope.probes.netdev.ethtool import BYTES_PER_MEGABIT, PCI_ADDRESS, Ethtool
from railscope.probes.netdev.links import ARPHRD_LOOPBACK, answer_bytes, kind_of_undeclared, link_layer, read_links
from railscope.probes.netdev.netlink import AnswerTooLong, NetlinkSocket

UNKNOWN: Final = "unknown"
_HEAD_LINES: Final = 2
"""Of /proc/PID/net/dev, before the first device."""


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """One network device."""

    name: str
    index: int
    """The kernel's number for it, never used again for another device; 0 where it cannot be known."""
    netns: int
    """Inode of its network namespace; 0 for a recorded tree."""
    kind: str
    """`physical`, `loopback`, `representor`, or what `ip link add` was told: `veth`, `bond`, `vlan`, `bridge`, …

    Sysfs does not tell all of these apart: what it cannot name is `virtual`.
    """
    link_layer: str
    """`Ethernet`, `InfiniBand` or `unknown`."""
    driver: str
    """Empty where there is none."""
    pci: str
    """PCI address, `0000:18:00.0`; empty where there is none."""
    numa_node: int | None
    up: bool | None
    """Switched on by the administrator."""
    carrier: bool | None
    """Connected to something that answers; None while it is switched off."""
    speed_bytes_per_second: int | None
    mtu: int | None
    master: str
    """Name of the bond or bridge it belongs to; empty for none."""
    slaves: tuple[str, ...]
    carrier_changes: int | None
    """How often the carrier came or went since the device was made."""
    bond_link: bool | None = None
    """Whether the bond that it belongs to takes its link for up; None: it belongs to none, or it cannot be known."""


class Inventory(Protocol):
    """A reader of one namespace's devices."""

    def read(self) -> tuple[NetworkDevice, ...]:
        """Every device, in the kernel's order.

        Raises:
            AnswerTooLong: there are more devices than are looked at.
            OSError, ValueError: nothing can be read; one strange device is only less well known.
        """
        ...

    def close(self) -> None: ...


class NetlinkInventory:
    """Devices of the network namespace of the thread that makes it, from rtnetlink and ethtool."""

    def __init__(self, netns: int, sysfs: Path, most_devices: int | None = None) -> None:
        """`sysfs` gives NUMA nodes: PCI addresses are the same in every network namespace.  `most_devices`: None, or
        how many are looked at: where there are more, `read` says so once, and nothing after.

        Raises:
            OSError: the kernel refuses a socket.
        """
        self._netns = netns
        self._sysfs = sysfs
        self._most_devices = most_devices
        self._netlink = NetlinkSocket(most_bytes=answer_bytes(most_devices))
        try:
            self._ethtool = Ethtool()
        except OSError:
            self._netlink.close()
            raise

    def close(self) -> None:
        self._netlink.close()
        self._ethtool.close()

    def read(self) -> tuple[NetworkDevice, ...]:
        """See `Inventory.read`."""
        links = read_links(self._netlink)
        if self._most_devices is not None and len(links) > self._most_devices:
            raise AnswerTooLong(f"{len(links)} network devices, of which {self._most_devices} may be looked at")
        slaves: defaultdict[int | None, list[str]] = defaultdict(list)
        for link in links.values():
            slaves[link.master].append(link.name)
        devices = []
        for link in links.values():
            driver, pci = self._ethtool.driver(link.name)
            master = links.get(link.master or 0)
            devices.append(
                NetworkDevice(
                    name=link.name,
                    index=link.index,
                    netns=self._netns,
                    kind=link.kind,
                    link_layer=link.link_layer,
                    driver=driver,
                    pci=pci,
                    numa_node=_numa_node(self._sysfs / "bus" / "pci" / "devices" / pci) if pci else None,
                    up=link.up,
                    carrier=link.carrier if link.up else None,
                    speed_bytes_per_second=self._ethtool.speed_bytes_per_second(link.name),
                    mtu=link.mtu,
                    master=master.name if master else "",
                    slaves=tuple(slaves.get(link.index, ())),
                    carrier_changes=link.carrier_changes,
                    bond_link=link.bond_link,
                )
            )
        return tuple(devices)


class ProcInventory:
    """Names of a process's network devices, from `/proc/PID/net/dev`: all that an outsider without rights may see."""

    def __init__(self, process_folder: Path, netns: int, most_devices: int | None = None) -> None:
        """`most_devices`: as of `NetlinkInventory`."""
        self._file = process_folder / "net" / "dev"
        self._netns = netns
        self._most_devices = most_devices

    def close(self) -> None:
        """Nothing is kept open."""

    def read(self) -> tuple[NetworkDevice, ...]:
        """See `Inventory.read`."""
        most_lines = None if self._most_devices is None else self._most_devices + _HEAD_LINES + 1
        with self._file.open() as file:
            lines = list(islice(file, most_lines))
        if most_lines is not None and len(lines) == most_lines:
            raise AnswerTooLong(f"more network devices than the {self._most_devices} that may be looked at")
        names = [line.split(":", 1)[0].strip() for line in lines[_HEAD_LINES:] if ":" in line]
        return tuple(_device_of_name(name, self._netns) for name in names)


def _device_of_name(name: str, netns: int) -> NetworkDevice:
    return NetworkDevice(
        name=name,
        index=0,
        netns=netns,
        kind="loopback" if name == "lo" else UNKNOWN,
        link_layer=UNKNOWN,
        driver="",
        pci="",
        numa_node=None,
        up=None,
        carrier=None,
        speed_bytes_per_second=None,
        mtu=None,
        master="",
        slaves=(),
        carrier_changes=None,
    )


class SysfsInventory:
    """Devices of `SYSFS/class/net`: those of the namespace that mounted it, or a recorded tree's."""

    def __init__(self, sysfs: Path, netns: int = 0) -> None:
        self._folder = sysfs / "class" / "net"
        self._sysfs = sysfs
        self._netns = netns

    def close(self) -> None:
        """Nothing is kept open."""

    def read(self) -> tuple[NetworkDevice, ...]:
        """See `Inventory.read`."""
        return tuple(self._device(folder) for folder in device_folders(self._folder))

    def _device(self, folder: Path) -> NetworkDevice:
        hardware_type = _number(folder / "type") or 0
        pci = _pci_address(folder / "device")
        flags = _number(folder / "flags")
        carrier = _number(folder / "carrier")
        speed = _number(folder / "speed")
        return NetworkDevice(
            name=folder.name,
            index=_number(folder / "ifindex") or 0,
            netns=self._netns,
            kind=_kind(folder, hardware_type),
            link_layer=link_layer(hardware_type),
            driver=_link_name(folder / "device" / "driver"),
            pci=pci,
            numa_node=_numa_node(folder / "device") if pci else None,
            up=None if flags is None else bool(flags & 1),
            carrier=None if carrier is None else bool(carrier),
            speed_bytes_per_second=speed * BYTES_PER_MEGABIT if speed is not None and speed > 0 else None,
            mtu=_number(folder / "mtu"),
            master=_link_name(folder / "master"),
            slaves=_slaves(folder),
            carrier_changes=_number(folder / "carrier_changes"),
            bond_link=member_link(folder),
        )


def device_folders(class_net: Path) -> list[Path]:
    """The folders of network devices in `class/net`, which also holds files such as `bonding_masters`; by index, name.

    Raises:
        OSError: the folder cannot be listed.
    """
    folders = [entry for entry in class_net.iterdir() if entry.is_dir()]
    return sorted(folders, key=lambda folder: (_number(folder / "ifindex") or 0, folder.name))


def _kind(folder: Path, hardware_type: int) -> str:
    """As rtnetlink would say it, as far as sysfs shows: DEVTYPE in uevent, telling folders, a driver."""
    if hardware_type == ARPHRD_LOOPBACK:
        return "loopback"
    for line in _text(folder / "uevent").splitlines():
        if line.startswith("DEVTYPE="):
            return line.removeprefix("DEVTYPE=")
    for name, kind in (("bonding", "bond"), ("bridge", "bridge"), ("tun_flags", "tun")):
        if (folder / name).exists():
            return kind
    if (folder / "device").exists():
        return kind_of_undeclared(hardware_type, _text(folder / "phys_port_name"))
    return "virtual" if "virtual" in Path(os.path.realpath(folder)).parts else UNKNOWN


def _slaves(folder: Path) -> tuple[str, ...]:
    members = bond_members(folder.parent, folder.name)
    if members:
        return tuple(member.name for member in members)
    try:
        lower = sorted(entry.name for entry in (folder / "brif").iterdir())
    except OSError:
        return ()
    return tuple(lower)


def _pci_address(device: Path) -> str:
    """The PCI function that a device hangs on, also through a bus of its own, as virtio's."""
    for part in reversed(Path(os.path.realpath(device)).parts):
        if PCI_ADDRESS.fullmatch(part):
            return part
    return ""


def _numa_node(device: Path) -> int | None:
    node = _number(device / "numa_node")
    return node if node is not None and node >= 0 else None


def _link_name(link: Path) -> str:
    try:
        return link.readlink().name
    except OSError:
        return ""


def _text(file: Path) -> str:
    """What a file holds; empty where the kernel refuses, as for `carrier` of a device that is down."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file)
    try:
        return int(text, 0)
    except ValueError:
        return None
