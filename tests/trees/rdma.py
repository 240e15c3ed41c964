"""Simulated sysfs trees of RDMA hosts, made by code and named by scenario.

Nothing here was recorded on hardware.  The layout is the kernel's (Documentation/ABI/stable/sysfs-class-infiniband):
`class/infiniband/NAME` links to a folder under the PCI function's, whose `device` links back to the function.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

MLX5_COUNTERS: Final = {
    "VL15_dropped": 0,
    "excessive_buffer_overrun_errors": 0,
    "link_downed": 0,
    "link_error_recovery": 0,
    "local_link_integrity_errors": 0,
    "multicast_rcv_packets": 7,
    "multicast_xmit_packets": 8,
    "port_rcv_constraint_errors": 0,
    "port_rcv_data": 2_000,
    "port_rcv_errors": 0,
    "port_rcv_packets": 20,
    "port_rcv_remote_physical_errors": 0,
    "port_rcv_switch_relay_errors": 0,
    "port_xmit_constraint_errors": 0,
    "port_xmit_data": 1_000,
    "port_xmit_discards": 0,
    "port_xmit_packets": 10,
    "port_xmit_wait": 3,
    "symbol_error": 0,
    "unicast_rcv_packets": 13,
    "unicast_xmit_packets": 2,
}
MLX5_HW_COUNTERS: Final = {
    "duplicate_request": 0,
    "implied_nak_seq_err": 0,
    "local_ack_timeout_err": 0,
    "np_cnp_sent": 5,
    "np_ecn_marked_roce_packets": 6,
    "out_of_buffer": 0,
    "out_of_sequence": 0,
    "packet_seq_err": 0,
    "req_rnr_retries_exceeded": 0,
    "req_transport_retries_exceeded": 0,
    "rnr_nak_retry_err": 0,
    "roce_adp_retrans": 0,
    "roce_slow_restart": 0,
    "rp_cnp_handled": 4,
    "rp_cnp_ignored": 0,
    "rx_icrc_encapsulated": 0,
    "rx_read_requests": 1,
    "rx_write_requests": 9,
}

STATISTICS: Final = (
    "rx_bytes tx_bytes rx_packets tx_packets rx_errors tx_errors rx_dropped tx_dropped rx_crc_errors rx_missed_errors "
    "tx_carrier_errors multicast collisions"
).split()
"""Files of a network device's `statistics`; the kernel has a few more."""

DGX_H100_RAILS: Final = ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc")
"""PCI buses of the eight adapters."""


class RdmaTree:
    """A sysfs in the making."""

    def __init__(self, root: Path) -> None:
        self.sysfs = root
        self._folders: Iterator[int] = itertools.count()
        self._indexes: Iterator[int] = itertools.count(2)
        for kind in ("infiniband", "net"):
            (root / "class" / kind).mkdir(parents=True, exist_ok=True)

    def device(
        self,
        name: str,
        *,
        pci: str = "",
        driver: str = "mlx5_core",
        numa_node: int = 0,
        node_type: str = "1: CA",
        physical_function: str = "",
    ) -> Path:
        """Register a device, or register it anew as after a driver reload; returns its folder."""
        parent = self.function(pci, driver, numa_node) if pci else self.sysfs / "devices" / "virtual"
        # A number of its own keeps the old folder, and so its inode, from being used again.
        folder = parent / "infiniband" / f"registration{next(self._folders)}" / name
        folder.mkdir(parents=True)
        write(folder / "node_type", node_type)
        write(folder / "fw_ver", "28.39.1002")
        if pci:
            (folder / "device").symlink_to(parent)
        if physical_function:
            target = self.function(physical_function, driver, numa_node)
            if not (parent / "physfn").is_symlink():
                (parent / "physfn").symlink_to(target)
        link = self.sysfs / "class" / "infiniband" / name
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        return folder

    def function(self, pci: str, driver: str, numa_node: int) -> Path:
        """The folder of a PCI function."""
        folder = self.sysfs / "devices" / f"pci{pci[:7]}" / pci
        if not folder.exists():
            folder.mkdir(parents=True)
            write(folder / "numa_node", str(numa_node))
            drivers = self.sysfs / "bus" / "pci" / "drivers" / driver
            drivers.mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(drivers)
        return folder

    def gpu(self, pci: str, numa_node: int) -> None:
        """A GPU, as far as its place in the machine goes."""
        folder = self.function(pci, "nvidia", numa_node)
        write(folder / "class", "0x030200")
        write(folder / "vendor", "0x10de")
        devices = self.sysfs / "bus" / "pci" / "devices"
        devices.mkdir(exist_ok=True)
        (devices / pci).symlink_to(folder)

    def port(
        self,
        device: Path,
        number: int = 1,
        *,
        counters: Mapping[str, int | str] | None = None,
        hw_counters: Mapping[str, int | str] | None = None,
        state: str = "4: ACTIVE",
        physical_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        link_layer: str = "Ethernet",
        netdevs: tuple[str, ...] = (),
    ) -> Path:
        """Give a device a port; returns its folder.  None: the folder of counters is missing."""
        folder = device / "ports" / str(number)
        folder.mkdir(parents=True)
        for name, text in (
            ("state", state),
            ("phys_state", physical_state),
            ("rate", rate),
            ("link_layer", link_layer),
        ):
            write(folder / name, text)
        for group, values in (("counters", counters), ("hw_counters", hw_counters)):
            if values is not None:
                (folder / group).mkdir()
                for name, value in values.items():
                    write(folder / group / name, str(value))
        ndevs = folder / "gid_attrs" / "ndevs"
        ndevs.mkdir(parents=True)
        for index, netdev in enumerate(netdevs):
            write(ndevs / str(index), netdev)
        return folder

    def netdev(
        self,
        name: str,
        *,
        pci: str = "",
        driver: str = "mlx5_core",
        transmit_bytes: int = 0,
        receive_bytes: int = 0,
        statistics: Mapping[str, int] | None = None,
        speed_megabits: int = 400_000,
        carrier: bool = True,
        carrier_changes: int = 1,
        infiniband: bool = False,
    ) -> Path:
        """A network device, of a PCI function or virtual; returns its folder.

        `statistics` are those besides bytes that are not 0.  mlx5's show nothing of RDMA traffic.
        """
        function = self.function(pci, driver, 0) if pci else None
        parent = function or self.sysfs / "devices" / "virtual"
        folder = parent / "net" / name
        (folder / "statistics").mkdir(parents=True)
        facts = {
            "ifindex": next(self._indexes),
            "type": 32 if infiniband else 1,
            "flags": "0x1003",
            "carrier": int(carrier),
            "carrier_changes": carrier_changes,
            "speed": speed_megabits,
            "mtu": 4092 if infiniband else 9000,
            "dev_port": 0,
        }
        for file, value in facts.items():
            write(folder / file, str(value))
        counted = {"tx_bytes": transmit_bytes, "rx_bytes": receive_bytes, **(statistics or {})}
        for file in STATISTICS:
            write(folder / "statistics" / file, str(counted.get(file, 0)))
        if function is not None:
            (folder / "device").symlink_to(function)
        link = self.sysfs / "class" / "net" / name
        link.symlink_to(folder)
        return folder

    def bonded(self, name: str, members: Mapping[str, str]) -> None:
        """Make a network device a bond of others, with what it says of each one's link: `up`, `down`, …"""
        classes = self.sysfs / "class" / "net"
        bond = classes / name
        (bond / "bonding").mkdir()
        write(bond / "bonding" / "slaves", " ".join(members))
        for member, status in members.items():
            (classes / member / "master").symlink_to(os.path.realpath(bond))
            (classes / member / "bonding_slave").mkdir()
            write(classes / member / "bonding_slave" / "mii_status", status)

    def unplug(self, name: str) -> None:
        """Take a device away."""
        (self.sysfs / "class" / "infiniband" / name).unlink()

    def set(self, row: str, counter: str, value: int | str) -> None:
        """Set one counter, as `set("mlx5_0/1", "hw_counters/out_of_buffer", 3)`."""
        file = self.counter(row, counter)
        assert file.exists(), file
        write(file, str(value))

    def counter(self, row: str, counter: str) -> Path:
        device, number = row.split("/")
        return self.sysfs / "class" / "infiniband" / device / "ports" / number / counter


def write(file: Path, text: str) -> None:
    file.write_text(f"{text}\n")


def break_open(file: Path) -> None:
    """Make a file that nobody can open: a link to itself (ELOOP)."""
    file.unlink(missing_ok=True)
    file.symlink_to(file)


def break_kind(file: Path, kind: str) -> None:
    """Put something else where a file is expected: `folder` (EISDIR), `pipe` (would wait), `endless`, `huge`."""
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    elif kind == "huge":
        file.write_bytes(b"7" * (1 << 20))
    else:
        raise ValueError(kind)


def mlx5_roce_8rails(root: Path) -> RdmaTree:
    """Eight GPUs and eight RoCE adapters as in a DGX H100, whose numbers are not those of the rails; one for storage
    at half the speed; and eth0.  No PCI switches: NUMA nodes bring GPUs and adapters together."""
    tree = RdmaTree(root)
    for position, bus in enumerate(("1b", "43", "52", "61", "9d", "c3", "d1", "df")):
        tree.gpu(f"0000:{bus}:00.0", position // 4)
    numbers = (0, 3, 4, 5, 6, 9, 10, 11)
    for position, (number, bus) in enumerate(zip(numbers, DGX_H100_RAILS, strict=True)):
        pci = f"0000:{bus}:00.0"
        device = tree.device(f"mlx5_{number}", pci=pci, numa_node=position // 4)
        counters = MLX5_COUNTERS | {"port_xmit_data": 1_000 + number, "port_rcv_data": 2_000 + number}
        netdev = f"ens{int(bus, 16)}np0"
        tree.port(device, counters=counters, hw_counters={**MLX5_HW_COUNTERS, "lifespan": 10}, netdevs=(netdev, netdev))
        tree.netdev(netdev, pci=pci, transmit_bytes=700 + number, receive_bytes=800 + number)
    storage = tree.device("mlx5_1", pci="0000:29:00.0")
    tree.port(storage, counters=MLX5_COUNTERS, hw_counters=MLX5_HW_COUNTERS, rate="200 Gb/sec (2X NDR)")
    tree.netdev(
        "eth0",
        pci="0000:03:00.0",
        driver="igb",
        transmit_bytes=31,
        receive_bytes=32,
        statistics={"rx_crc_errors": 5},
        speed_megabits=1_000,
        carrier_changes=4,
    )
    return tree


def mlx5_ib_ndr(root: Path) -> RdmaTree:
    """One InfiniBand adapter; its network device is found through the PCI function."""
    tree = RdmaTree(root)
    device = tree.device("ibp24s0", pci="0000:18:00.0")
    tree.port(device, counters=MLX5_COUNTERS, hw_counters=MLX5_HW_COUNTERS, link_layer="InfiniBand")
    tree.netdev("ib0", pci="0000:18:00.0", transmit_bytes=41, receive_bytes=42, infiniband=True)
    return tree


def bnxt_re(root: Path) -> RdmaTree:
    """Broadcom: bytes in hw_counters, among numbers of what exists now; the PCI driver is bnxt_en."""
    tree = RdmaTree(root)
    device = tree.device("bnxt_re0", pci="0000:3b:00.0", driver="bnxt_en")
    hw_counters = {
        "active_qps": 12,
        "watermark_qps": 40,
        "tx_bytes": 111,
        "rx_bytes": 222,
        "tx_pkts": 3,
        "rx_pkts": 4,
        "to_retransmits": 5,
        "seq_err_naks_rcvd": 6,
        "oos_drop_count": 7,
        "duplicate_request": 8,
        "max_retry_exceeded": 1,
        "db_fifo_register": 3_000,
    }
    tree.port(device, hw_counters=hw_counters, rate="200 Gb/sec (4X HDR)", netdevs=("ens3f0np0",))
    tree.netdev(
        "ens3f0np0",
        pci="0000:3b:00.0",
        driver="bnxt_en",
        transmit_bytes=1_111,
        receive_bytes=2_222,
        speed_megabits=200_000,
    )
    return tree


def mana_ib(root: Path) -> RdmaTree:
    """Microsoft: words of its own for retries and timeouts, and values of now among the counters."""
    tree = RdmaTree(root)
    device = tree.device("mana_0", pci="7870:00:00.0", driver="mana")
    hw_counters = {
        "requester_timeout": 3,
        "requester_retries_exceeded": 1,
        "responder_oos": 2,
        "total_fatal_error": 0,
        "received_cnps": 7,
        "current_rate": 180,
        "num_qps_congested": 4,
        "tx_bytes": 5_000,
        "rx_bytes": 6_000,
    }
    tree.port(device, hw_counters=hw_counters, rate="200 Gb/sec (4X HDR)", netdevs=("enP30832s1",))
    return tree


def ionic(root: Path) -> RdmaTree:
    """AMD: unicast bytes of RDMA, and counters as its firmware names them."""
    tree = RdmaTree(root)
    device = tree.device("ionic_0", pci="0000:06:00.0", driver="ionic")
    hw_counters = {
        "tx_rdma_ucast_bytes": 7_000,
        "rx_rdma_ucast_bytes": 8_000,
        "tx_rdma_ack_timeout": 2,
        "req_tx_retry_excd_err": 1,
        "rx_rdma_cnp_pkts": 9,
    }
    tree.port(device, hw_counters=hw_counters, rate="400 Gb/sec (4X NDR)", netdevs=("benic1p1",))
    return tree


def irdma(root: Path) -> RdmaTree:
    """Intel: bytes of IPv4 and IPv6 apart."""
    tree = RdmaTree(root)
    device = tree.device("rocep202s0", pci="0000:ca:00.0", driver="ice")
    hw_counters = {
        "ip4InOctets": 1_000,
        "ip4OutOctets": 2_000,
        "ip6InOctets": 10,
        "ip6OutOctets": 20,
        "cnpHandled": 1,
        "cnpIgnored": 2,
        "cnpSent": 3,
        "RxECNMrkd": 4,
    }
    tree.port(device, hw_counters=hw_counters, rate="100 Gb/sec (4X EDR)", netdevs=("ens801f0",))
    tree.netdev(
        "ens801f0",
        pci="0000:ca:00.0",
        driver="ice",
        transmit_bytes=3_000,
        receive_bytes=4_000,
        statistics={"rx_dropped": 6, "tx_packets": 30},
        speed_megabits=100_000,
    )
    return tree


def efa(root: Path) -> RdmaTree:
    """Amazon: no network device, no InfiniBand counters; some counters are of the device as a whole."""
    tree = RdmaTree(root)
    device = tree.device("rdmap16s27", pci="0000:10:1b.0", driver="efa", node_type="8: unspecified")
    hw_counters = {"tx_bytes": 50, "rx_bytes": 60, "rdma_read_bytes": 30, "rx_drops": 1, "retrans_bytes": 2}
    tree.port(device, hw_counters=hw_counters, rate="100 Gb/sec (4X EDR)", link_layer="Unspecified")
    (device / "hw_counters").mkdir()
    write(device / "hw_counters" / "cmds_err", "9")
    return tree


def vf(root: Path) -> RdmaTree:
    """A virtual function beside its physical one; it may not read some of its counters."""
    tree = RdmaTree(root)
    physical = tree.device("mlx5_0", pci="0000:18:00.0")
    tree.port(physical, counters=MLX5_COUNTERS, hw_counters=MLX5_HW_COUNTERS, netdevs=("ens24np0",))
    virtual = tree.device("mlx5_2", pci="0000:18:00.2", physical_function="0000:18:00.0")
    port = tree.port(virtual, counters=MLX5_COUNTERS, hw_counters=MLX5_HW_COUNTERS, netdevs=("ens24v0",))
    tree.netdev("ens24np0", pci="0000:18:00.0", transmit_bytes=61, receive_bytes=62)
    tree.netdev("ens24v0", pci="0000:18:00.2", transmit_bytes=63, receive_bytes=64)
    break_open(port / "counters" / "symbol_error")
    break_kind(port / "counters" / "link_downed", "folder")
    return tree


def bond(root: Path) -> RdmaTree:
    """Two ports of an adapter bonded into one RDMA device; one of them has lost its link."""
    tree = RdmaTree(root)
    device = tree.device("mlx5_bond_0", pci="0000:18:00.0")
    tree.port(device, counters=MLX5_COUNTERS, hw_counters=MLX5_HW_COUNTERS, netdevs=("bond0", "bond0.100"))
    tree.netdev("bond0", transmit_bytes=71, receive_bytes=72, speed_megabits=200_000)
    tree.netdev("ens24f0np0", pci="0000:18:00.0", transmit_bytes=71, receive_bytes=70, speed_megabits=200_000)
    tree.netdev("ens24f1np1", pci="0000:18:00.1", receive_bytes=2, speed_megabits=200_000, carrier=False)
    tree.bonded("bond0", {"ens24f0np0": "up", "ens24f1np1": "down"})
    return tree


def switchdev(root: Path) -> RdmaTree:
    """mlx5 with its embedded switch on: counters of the virtual port, which belong to the device as a whole."""
    tree = RdmaTree(root)
    device = tree.device("mlx5_0", pci="0000:18:00.0")
    tree.port(device, counters=MLX5_COUNTERS, netdevs=("ens24np0",))
    (device / "hw_counters").mkdir()
    for name, value in (("vport_out_of_buffer", 2**32 - 2), ("vport_np_cnp_sent", 1), ("lifespan", 10)):
        write(device / "hw_counters" / name, str(value))
    return tree


def two_ports(root: Path) -> RdmaTree:
    """mlx4: two ports on one PCI function, one of them down; a network device for each."""
    tree = RdmaTree(root)
    device = tree.device("mlx4_0", pci="0000:05:00.0", driver="mlx4_core")
    tree.port(device, 1, counters=MLX5_COUNTERS, link_layer="InfiniBand", rate="56 Gb/sec (4X FDR)")
    tree.port(
        device,
        2,
        counters=MLX5_COUNTERS | {"port_xmit_data": 5},
        link_layer="Ethernet",
        rate="10 Gb/sec (1X QDR)",
        state="1: DOWN",
        physical_state="3: Disabled",
    )
    for name, port in (("ib0", "0"), ("ens5d1", "1")):
        (device / "device" / "net" / name).mkdir(parents=True)
        write(device / "device" / "net" / name / "dev_port", port)
    return tree


def hfi1(root: Path) -> RdmaTree:
    """Omni-Path: InfiniBand's counters, and hw_counters under names that nobody explains here."""
    tree = RdmaTree(root)
    device = tree.device("hfi1_0", pci="0000:af:00.0", driver="hfi1", numa_node=-1)
    tree.port(
        device,
        counters=MLX5_COUNTERS,
        hw_counters={"TxWords": 12, "RxPktDrop": 3},
        link_layer="InfiniBand",
        rate="100 Gb/sec (4X EDR)",
    )
    return tree


def rxe(root: Path) -> RdmaTree:
    """Soft-RoCE: no `device`, no InfiniBand counters, no bytes; link_downed is as wide as any other."""
    tree = RdmaTree(root)
    device = tree.device("rxe0")
    write(device / "parent", "eth0")
    hw_counters = {
        "sent_pkts": 10,
        "rcvd_pkts": 20,
        "duplicate_request": 1,
        "link_downed": 255,
        "retry_exceeded_err": 0,
    }
    tree.port(device, hw_counters=hw_counters, rate="2.5 Gb/sec (1X SDR)")
    tree.netdev("eth0", pci="0000:00:03.0", driver="virtio_net", transmit_bytes=81, receive_bytes=82, speed_megabits=-1)
    return tree


def degraded(root: Path) -> RdmaTree:
    """Four adapters: one came up at 10 Gb/s, one on a single lane; one of the others counts what it receives only."""
    tree = RdmaTree(root)
    rates = ("400 Gb/sec (4X NDR)", "10 Gb/sec (4X SDR)", "100 Gb/sec (1X NDR)", "400 Gb/sec (4X NDR)")
    for number, rate in enumerate(rates):
        tree.gpu(f"0000:{number + 1}b:00.0", 0)
        device = tree.device(f"mlx5_{number}", pci=f"0000:{number + 1}8:00.0")
        one_way = {"port_xmit_data": "N/A (no PMA)"} if number == 3 else {}
        tree.port(device, counters={**MLX5_COUNTERS, **one_way}, rate=rate, link_layer="InfiniBand")
    return tree


def pinned_counters(root: Path) -> RdmaTree:
    """An InfiniBand port whose narrow counters stand at their ends, and some one short of it."""
    tree = RdmaTree(root)
    device = tree.device("mlx5_0", pci="0000:18:00.0")
    counters = MLX5_COUNTERS | {
        "symbol_error": 65_535,
        "port_rcv_errors": 65_534,
        "link_downed": 255,
        "link_error_recovery": 254,
        "local_link_integrity_errors": 15,
        "excessive_buffer_overrun_errors": 14,
        "port_xmit_wait": 2**32 - 1,
    }
    tree.port(device, counters=counters, hw_counters=MLX5_HW_COUNTERS, link_layer="InfiniBand")
    return tree


def reset(root: Path) -> RdmaTree:
    """An adapter that has counted long, its 32-bit counters close to their end; `reload_driver` starts it anew."""
    tree = RdmaTree(root)
    device = tree.device("mlx5_0", pci="0000:18:00.0")
    tree.port(
        device,
        counters=MLX5_COUNTERS | {"port_xmit_data": 10**12, "port_rcv_data": 2 * 10**12, "link_downed": 3},
        hw_counters=MLX5_HW_COUNTERS | {"rx_write_requests": 2**32 - 10, "out_of_sequence": 5},
    )
    return tree


SCENARIOS: Final = (
    mlx5_roce_8rails,
    mlx5_ib_ndr,
    bnxt_re,
    mana_ib,
    ionic,
    irdma,
    efa,
    vf,
    bond,
    hfi1,
    rxe,
    pinned_counters,
    reset,
    degraded,
)
"""Those that the metrics of are kept; `switchdev` and `two_ports` are of single tests."""


def reload_driver(tree: RdmaTree, name: str = "mlx5_0", pci: str = "0000:18:00.0") -> None:
    """Register a device anew under its name, with all counters at 0."""
    device = tree.device(name, pci=pci)
    tree.port(device, counters=dict.fromkeys(MLX5_COUNTERS, 0), hw_counters=dict.fromkeys(MLX5_HW_COUNTERS, 0))
