"""What the agent knows of a node's hardware at one moment: GPUs, NVLinks, PCIe, modules, and what is at the other ends.

Parts of a `Snapshot`.  What is not known is the string "unknown" in a label, `None` in a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.traffic_owners import TrafficOwner


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU; what is not known is the string "unknown" or `None`."""

    gpu: str
    """NVML's index, which `comm_info` calls it by too."""
    uuid: str
    pci: str
    """As sysfs writes it: 0000:1b:00.0."""
    name: str
    numa: str
    fabric: str
    """State of the NVLink fabric: `not_supported`, `not_started`, `in_progress`, `completed`."""
    fabric_unhealthy: tuple[str, ...]
    """What the fabric's health mask complains of."""
    pcie_transmit_bytes: int | None
    """As the GPU counts them, never falling."""
    pcie_receive_bytes: int | None
    refresh_seconds: float | None
    """How often the NVLink byte counters change, measured; None: not yet seen."""
    fabric_health_mask: int | None = None
    """As NVML shows it."""
    fabric_error: int | None = None
    """nvmlReturn_t of the registration with the fabric, 0: it succeeded; None: it is not done."""
    fabric_cluster: str = ""
    """UUID of the fabric's cluster; empty: none."""
    fabric_clique: str = ""
    ecc_errors: tuple[tuple[str, str, int], ...] = ()
    """(`corrected` or `uncorrected`, `volatile` or `aggregate`, count), as the GPU counts."""
    remapped_rows: tuple[tuple[str, int], ...] = ()
    """(errors that were the reason, rows of memory)."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pcie_errors: tuple[tuple[str, int], ...] = ()
    """(kind, count), replays among them; the totals never fall."""
    slowed_by: tuple[str, ...] | None = None
    """What holds its clocks down."""
    recovery_action: str | None = None
    """What the driver asks for: `none`, `gpu_reset`, …"""

    @property
    def pci_bus_id(self) -> str:
        """Its PCI address as NVML and dcgm-exporter write it."""
        return self.pci if self.pci == UNKNOWN else format_pci_bus_id(self.pci)


def format_pci_bus_id(address: str) -> str:
    """A PCI address as NVML and dcgm-exporter write it: eight digits of the domain, capitals, 00000000:1B:00.0.

    An address that is none stays as it is (nvml.h, NVML_DEVICE_PCI_BUS_ID_FMT).
    """
    try:
        domain, bus, rest = address.split(":")
        device, function = rest.split(".")
        numbers = [int(part, 16) for part in (domain, bus, device, function)]
    except ValueError:
        return address
    return "{:08X}:{:02X}:{:02X}.{:X}".format(*numbers)


ALL_LINKS: Final = "all"
"""The link of what a GPU counts for all of its NVLinks together: no label shows it, or sums would count twice."""


@dataclass(frozen=True, slots=True)
class NvlinkFacts:
    """One NVLink of one GPU and what it carried; None: the driver does not tell."""

    gpu: str
    link: str
    """Number of the link, or `ALL_LINKS`."""
    up: bool | None
    transmit_bytes: int | None
    """As the GPU counts them, never falling."""
    receive_bytes: int | None
    counted: str
    """Which bytes: `data` (payload), `link` or `raw` (payload and protocol); empty: none are counted."""
    errors: tuple[tuple[str, int], ...]
    """(kind, count), as the GPU counts."""
    speed_bytes_per_second: int | None
    """Of one direction."""
    remote: str
    """PCI address of the GPU or switch at the other end."""
    remote_type: str
    """`gpu`, `switch`, `ibm_npu`, `unknown`."""
    transmit_utilization: float | None = None
    """Bytes over what its speed allows, of the last correlation window; None: one of them is not known."""
    receive_utilization: float | None = None
    bit_error_ratios: tuple[tuple[str, float], ...] = ()
    """(`effective` or `symbol`, errors of one bit or symbol)."""
    fec_blocks: tuple[tuple[str, int], ...] = ()
    """(symbols that error correction mended in a block, blocks); the totals never fall."""


@dataclass(frozen=True, slots=True)
class PcieFacts:
    """The PCIe link of a rail's device or a GPU; None: cannot be known."""

    device: str
    """`mlx5_0`, `eth2`, `gpu0`."""
    pci: str
    lanes: int | None
    lanes_possible: int | None
    """What both ends of the link can."""
    speed_gigatransfers: float | None
    """10^9 transfers a second and lane; a GPU lowers it while idle."""
    speed_possible_gigatransfers: float | None
    errors: tuple[tuple[str, str, str, int], ...]
    """(PCI function that counts, the device or the port above it; `correctable`, `non_fatal` or `fatal`; name of the
    error; count since boot)."""


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """The module of a rail's port and its error correction; None and empty: not told."""

    rail: str
    device: str
    """The network device."""
    form: str = ""
    """`qsfp28`, `osfp`, …"""
    temperature_celsius: float | None = None
    receive_watts: float | None = None
    """Light of the weakest lane."""
    transmit_watts: float | None = None
    alarms: tuple[tuple[str, str], ...] = ()
    """(lane, empty for the whole module; which of the module's own limits was passed)."""
    corrected_blocks: int | None = None
    """Blocks that forward error correction mended, as the driver counts."""
    uncorrectable_blocks: int | None = None
    fec_histogram: tuple[tuple[int, int, int], ...] = ()
    """(fewest, most corrected symbols of a block, blocks)."""

    @property
    def told(self) -> bool:
        """Whether anything is known of it."""
        return bool(self.form) or self.corrected_blocks is not None or self.uncorrectable_blocks is not None


@dataclass(frozen=True, slots=True)
class HardwareEvent:
    """What the kernel's log said of ill hardware, so far."""

    kind: str
    """`xid`, `sxid`, `pcie`, `nic`, `machine_check`."""
    code: str
    pci: str
    """Empty: not told."""
    severity: str
    count: int
    last_seconds: float
    """When it was last, since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """The condition of the node's hardware; built by agent/node/condition."""

    pcie: tuple[PcieFacts, ...] = ()
    modules: tuple[ModuleFacts, ...] = ()
    events: tuple[HardwareEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class NeighbourFacts:
    """The switch at the other end of a rail's cable, as it says itself (LLDP)."""

    rail: str
    device: str
    """The network device."""
    switch: str
    port: str
    """Of the switch."""


@dataclass(frozen=True, slots=True)
class QueuePairFacts:
    """One RDMA queue pair, as the kernel knows it; None and empty: not told."""

    device: str
    port: int | None
    """None before it is tied to one."""
    number: int
    remote_number: int | None
    """None before it is connected."""
    remote_address: str
    """Told of those that rdma_cm connected."""
    kind: str
    """`RC`, `UC`, `UD`, `DRIVER`, …"""
    state: str
    """`RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE`, `ERR`."""
    pid: int | None
    """None: the kernel's own, or the thread that made it has ended."""
    kernel_user: str
    """What in the kernel made it; empty: a process did."""
    services: tuple[int, ...] = ()
    """Ports of rdma_cm at both of its ends; none where that did not connect it."""


@dataclass(frozen=True, slots=True)
class QueuePairCount:
    """How many queue pairs a process has on a device, by what has become of them."""

    device: str
    pid: str
    """`unknown`: the thread that made them has ended; `others`: of too many processes to tell each."""
    state: str
    """`connected`, `not_connected`, `error`."""
    count: int


@dataclass(frozen=True, slots=True)
class BoundCounterFacts:
    """What a device counts for some of its queue pairs, because somebody has bound a counter to them."""

    device: str
    port: int
    number: int
    queue_pairs: tuple[int, ...]
    counters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class NodeQueuePairs:
    """All queue pairs of the host, as they were last read."""

    read_ns: int | None = None
    """Monotonic time; None: never."""
    queue_pairs: tuple[QueuePairFacts, ...] = ()
    counts: tuple[QueuePairCount, ...] = ()
    bound: tuple[BoundCounterFacts, ...] = ()
    left_out: int = 0
    """Queue pairs beyond the most that are taken."""


@dataclass(frozen=True, slots=True)
class NodeFabric:
    """What this host knows of the fabric beyond its ports; built by agent/node/fabric."""

    neighbours: tuple[NeighbourFacts, ...] = ()
    queue_pairs: NodeQueuePairs = NodeQueuePairs()
    queue_pair_owners: Mapping[tuple[str, int], frozenset[TrafficOwner]] = field(default_factory=dict)
    """By device and number, who may own what a queue pair carries; what is not there was not asked about yet."""


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """GPUs of this node as NVML shows them; built by agent/node/nvlink."""

    devices: tuple[GpuFacts, ...] = ()
    nvlinks: tuple[NvlinkFacts, ...] = ()
