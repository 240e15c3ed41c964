"""What the agent knows at one moment, as one immutable value.

A `Snapshot` holds five facts: collectives, rails, GPUs, stalls and the agent's own health.  Each is built whole by the
room of agent/node that knows it; exporters, the demo and the terminal only read them.  Three notions of bytes are kept
apart by name: payload (count × dtype size), wire (payload × algorithm factor: what should leave the node), port
(what the network device counted).  What is not known is the string "unknown" in a label, `None` in a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rail_ledger import RailLedger
from railscope.agent.facts.rank_identity import Labels, RankIdentity, RankKey
from railscope.agent.facts.slowness import Slowness
from railscope.agent.facts.stall import LastCollectives, ProcessStack, Stall
from railscope.agent.facts.transfers import NodeTransfers


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One of the things that a bucket counted."""

    labels: Labels
    """At most 128 characters in all: names and values."""
    value: float
    """In the metric's unit."""
    realtime_ns: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by bucket, not cumulative."""

    bounds: tuple[float, ...]
    """Upper bounds, inclusive, ascending, without +Inf; in the metric's unit."""
    counts: tuple[int, ...]
    """One more than `bounds`: the last counts what lies above every bound."""
    sum: float | None
    """Sum of what was observed, in the metric's unit; None where the kernel kept only buckets."""
    exemplars: tuple[Exemplar | None, ...] = ()
    """The last thing that each bucket counted, None where that is not known; empty: it is known of none."""

    def quantile(self, part: float) -> float | None:
        """What this part (0 to 1) lies below, as Prometheus' histogram_quantile estimates it; None: it is empty.

        Above the last bound it is that bound.
        """
        together = sum(self.counts)
        if not together:
            return None
        wanted, below, lower = part * together, 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        return lower


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """The node's exact total for one kind of call; never falls, also when processes end."""

    op: str
    dtype: str
    gpu: str
    calls: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class OpHistogram:
    op: str
    histogram: Histogram


@dataclass(frozen=True, slots=True)
class OpTotal:
    """Calls and payload of one op on one communicator, from one rank."""

    op: str
    calls: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class CommunicatorFacts:
    """What one rank's end of one communicator did: what `comm_info` and the `comm_*` series show."""

    identity: RankIdentity
    enqueued: int
    """Operations given to NCCL on this communicator so far."""
    estimated: int = field(default=0, kw_only=True)
    """Of those, such as met no probe, by NCCL's own numbers (agent/node/collectives/watched.py)."""
    ops: tuple[OpTotal, ...]
    alive: bool
    """False once the communicator was destroyed or its process ended; it stays readable for a while."""
    completed: int | None = None
    """Of those, known to be complete; None: cannot be known."""
    inflight_seconds: float | None = None
    """Age of the oldest operation handed to the network and not complete, 0: none; None: cannot be known."""
    captured: int = 0
    """Collectives captured into CUDA graphs so far."""
    replayed: int = 0
    """Collectives that replayed graphs ran: they are not among the enqueued ones."""
    instance: int = 0
    """What events call it by; 0: none can name it."""
    whole: bool = False
    """Seen from its first call on: `enqueued` counts all of them."""
    position: int | None = None
    """Collectives entered since the communicator was made, as NCCL counts them: comparable with that of every other
    rank.  None: cannot be known."""
    tenant: str = UNKNOWN
    """Whose its process is: the user, and the container where there is one."""
    signature: int | None = None
    """What its collectives were up to a checkpoint, as `comm_signature` shows it; None: cannot be known."""
    last: LastCollectives[str] | None = None
    """Of one that has ended: its last collectives, for ranks elsewhere that wait; None: unknown, or of no use."""


@dataclass(frozen=True, slots=True)
class CommunicatorStall:
    """How long one rank's end of a communicator has stalled for one cause, all told.

    It holds no RankIdentity: its series carry the rank's key alone, and `comm_info` the rest.
    """

    comm: str
    rank: str
    cause: str
    seconds: float
    current: Stall | None
    """The stall that goes on now; None: it moves."""


@dataclass(frozen=True, slots=True)
class StallTotal:
    """Stalls that began on this node; never falls."""

    op: str
    cause: str
    count: int


@dataclass(frozen=True, slots=True)
class RankArrivals:
    """How often a rank made a call last among the ranks of its communicator on this host, and how long after them.

    It holds no RankIdentity: its series carry the rank's key alone, and `comm_info` the rest.
    """

    comm: str
    rank: str
    last: int
    lag_seconds: float
    """Sum over those calls of the time since the rank before it."""
    alone_seconds: float
    """Time in which it alone had not made a call that all others had made; of several such calls it counts once."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """A rank of this host for which the communicator's other ranks here wait in most operations, and nothing hangs."""

    comm: str
    rank: str
    waited_ratio: float
    """Of the others' time, of late."""
    waited_seconds: float
    """By which they wait in an operation, of late."""
    slowness: Slowness
    """In seconds since the Unix epoch."""
    seen: Literal["completions", "calls"]
    """By what: with calls it is not seen whether the GPUs wait, too."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Operations of one rank's end of a communicator that completed, and how long they took in sum.

    It holds no RankIdentity: its series carry the rank's key alone, and `comm_info` the rest.
    """

    comm: str
    rank: str
    operations: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PeerTotal:
    """What one rank sent to another rank of a communicator; never falls.  See agent/node/collectives/peer_bytes.py."""

    comm: str
    rank: str
    peer: str
    """The other rank, or `other`: all that have no total of their own."""
    basis: str
    """`call`: the calls name the peer; `ring`: it is the next one in a ring in the order of ranks."""
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class CompletedTotal:
    """Completed operations of one kind and size on this node; never falls."""

    op: str
    size_bytes: int
    """Upper bound of one operation's payload; more than half of it, for all but the smallest."""
    operations: int
    payload_bytes: int
    bus_bytes: int
    """Payload x nccl-tests' factor."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RailQueue:
    """What waits to be sent on a rail; the counters are those of its queueing discipline, and never fall."""

    discipline: str
    backlog_bytes: int
    queued_packets: int
    drops: int
    overlimits: int
    requeues: int


@dataclass(frozen=True, slots=True)
class RailTcp:
    """TCP connections of observed processes on a rail; the counters since railscope first saw the processes."""

    connections: int
    sending: int
    """Those that sent data within the last second, or have data under way: round trips and rates are theirs."""
    round_trip_mean_seconds: float | None
    round_trip_maximum_seconds: float | None
    round_trip_deviation_seconds: float | None
    """Mean of their deviations: larger than the round trip where single ones took long."""
    delivery_rate_bytes_per_second: int | None
    """Sum over the sending connections."""
    application_limited: int
    """Sending connections whose delivery rate says only what the application wanted to send."""
    unacknowledged_segments: int
    not_sent_bytes: int
    sent_bytes: int
    """Payload, retransmissions included."""
    acknowledged_bytes: int
    received_bytes: int
    retransmitted_bytes: int
    retransmitted_segments: int
    data_segments: int
    busy_seconds: float
    """Sum over connections of the time with data under way."""
    receive_window_limited_seconds: float
    send_buffer_limited_seconds: float


@dataclass(frozen=True, slots=True)
class RailFacts:
    """One network port that collectives use, and what it carried: the record that others of a rail are made from.

    A rail has no identity record as a rank has: it would hold `rail`, `device` and `netns` alone, which two ports of an
    RDMA device may share.
    """

    rail: str
    device: str
    port: str
    netdev: str
    netns: str
    """Label of the network namespace; empty where no other namespace has a device of this name."""
    pci: str
    numa: str
    gpu: str
    link_layer: str
    driver: str
    up: bool | None
    speed_bytes_per_second: int | None
    transmit_bytes: int | None
    """Port bytes as the device counts them, never falling.  None: it does not count them, or was not read yet."""
    receive_bytes: int | None
    transmit_wire_bytes: int | None
    """Wire bytes that the observed collectives should have put on this rail; None: cannot be known."""
    receive_wire_bytes: int | None
    transmit_explained_ratio: float | None
    receive_explained_ratio: float | None
    transmit_rate: Histogram
    """Distribution of short-interval rates, bytes per second."""
    receive_rate: Histogram
    counters: tuple[tuple[str, str, int], ...]
    """(counter, severity, value) of everything else that the device counts; values never fall."""
    transmit_collective_bytes: int | None = None
    """Bytes that collectives handed to this rail, as NCCL gave them to the device; None: not observed."""
    queue: RailQueue | None = None
    tcp: RailTcp | None = None
    """Connections of observed processes through this rail."""
    tcp_awaited: bool = False
    """Connections are to be read and have not been yet: that there are none known says nothing."""
    pinned: tuple[str, ...] = ()
    """Counters that stand at the most they can show: more may have happened since."""
    gauges: tuple[tuple[str, int], ...] = ()
    """(name, value of now) of what the device shows that rises and falls."""
    physical_state: str = ""
    """Of an RDMA port: `LinkUp`, `LinkErrorRecovery`, `Polling`, …; empty: not told."""
    firmware: str = ""
    board: str = ""
    """The vendor's name of the board; empty: not told."""
    bond_members: tuple[tuple[str, bool | None], ...] = ()
    """(network device, whether its link is up) of the members, where the rail is a bond; None: it cannot be known."""
    pci_stalled: tuple[tuple[str, float], ...] = ()
    """(`read` or `write`, part of the last second) in which the card waited for the PCIe bus; empty: not known."""
    ledger: RailLedger | None = None
    """Where its bytes came from; None: not known yet."""
    lanes: int | None = None
    """Of its link, in use; None: not known, or down."""
    speed_to_siblings: float | None = None
    """Speed / the greatest of the host's rails of the same product; None: not known, down, or it has no siblings."""
    lanes_to_siblings: float | None = None
    """The same of lanes, which count as fewer only where they are slower."""
    transmit_utilization: float | None = None
    """Port bytes over what the line rate allows, of the last correlation window; None: one of them is not known."""
    receive_utilization: float | None = None


@dataclass(frozen=True, slots=True)
class OwnProcessFacts:
    """What the agent's own process takes."""

    cpu_seconds: float
    """User and system time, of all threads, since it began."""
    resident_bytes: int
    virtual_bytes: int
    open_descriptors: int
    most_descriptors: int
    """The soft limit."""
    start_seconds: float
    """Since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class CollectorResult:
    """How the last run of one source went."""

    collector: str
    success: bool
    duration_seconds: float
    reads_missed: int | None = None
    """Reads that were due and left out because the reader came too late; None: this source has no beat."""


@dataclass(frozen=True, slots=True)
class AttachedProbe:
    library: str
    nccl_version: str
    program: str
    attached: bool
    layout_source: str
    """How struct layouts of this library are known: `build-id`, `dwarf`, `accessors`, `unknown`."""


@dataclass(frozen=True, slots=True)
class ProbeLevel:
    """How much is observed of one library: -1 watch, 0 counts, 1 completion, 2 rails, 3 all (probes/nccl's `Level`)."""

    library: str
    nccl_version: str
    level: int
    highest: int
    """What the library and its known struct layouts allow."""


@dataclass(frozen=True, slots=True)
class LaunchTotal:
    """How often collectives were launched in one way, on this node."""

    op: str
    algorithm: str
    protocol: str
    channels: int
    launches: int


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


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """How long operations took of which the recorder's rings told, and who came last to them."""

    by_rank: tuple[RankTimes, ...] = ()
    by_size: tuple[CompletedTotal, ...] = ()
    arrivals: tuple[RankArrivals, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeCompletion:
    """What is seen below NCCL's calls; empty where nothing is."""

    durations: tuple[OpHistogram, ...] = ()
    """Seconds from hand-over to the last network completion: an upper bound of the network part."""
    cuda_durations: tuple[OpHistogram, ...] = ()
    """Seconds from the call to when the job learned through a CUDA event that it is complete: a late upper bound."""
    bandwidths: tuple[OpHistogram, ...] = ()
    """Bus bandwidth, bytes per second, from `durations`."""
    launches: tuple[LaunchTotal, ...] = ()


@dataclass(frozen=True, slots=True)
class UnjoinedProcess:
    """A process that maps NCCL and was given a rank of its job by its launcher, and of which no call names a living
    communicator."""

    pid: int
    job: str
    """Empty: not known."""
    world_rank: str
    world_size: str


@dataclass(frozen=True, slots=True)
class FailedOver:
    """Connections of a rank that NCCL moved off a port which failed, and that keep off it; it goes on without."""

    comm: str
    rank: str
    """Both `unknown` where no more than the connection is known."""
    device: str
    """As libibverbs names it."""
    port: str
    carried_by: str
    """The device that carries the port's share."""
    status: str
    """Of the completion that told NCCL, as libibverbs names it."""
    vendor_error: int
    """Its vendor's number."""
    connections: int
    """Of both directions; to one peer a rank has several."""


@dataclass(frozen=True, slots=True)
class JobSteps:
    """The steps of a job, as its lowest rank on this host made them; only of jobs whose calls repeat.

    It holds no RankIdentity: its series carry the rank's key alone, and `comm_info` the rest.
    """

    comm: str
    rank: str
    steps: int
    lengths: Histogram
    """Seconds from a step's first call to the next one's; without steps in which other calls took most of the time."""
    silent_seconds: float
    """Of those: between a step's last call and the next one's first."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of those steps by what they were spent on, of steps whose operations have ended; see
    agent/node/steps/parts.py."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the job began here by what they went into; see agent/node/steps/goodput.py."""


@dataclass(frozen=True, slots=True)
class EstimatedCalls:
    """Calls of one operation that met no probe, as NCCL's own numbers tell them (agent/node/collectives/watched.py)."""

    op: str
    calls: int
    payload_bytes: int | None
    """From the mean payload of calls that were counted for a moment; None: none were yet."""
    payload_error_ratio: float | None
    """Standard error of the payload, as a share of it; None: unknown."""


@dataclass(frozen=True, slots=True)
class NodeCollectives:
    """The NCCL calls of this node's programs and their completion; built by agent/node/collectives."""

    totals: tuple[CollectiveTotal, ...] = ()
    sizes: tuple[OpHistogram, ...] = ()
    """Payload of a call, bytes."""
    estimated: tuple[EstimatedCalls, ...] = ()
    """Beside the totals."""
    enqueue_times: tuple[OpHistogram, ...] = ()
    """Host time of a call, seconds."""
    communicators: tuple[CommunicatorFacts, ...] = ()
    """Oldest first."""
    peers: tuple[PeerTotal, ...] = ()
    """Empty unless they are asked for."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Communicators' events (`init`, `abort`, …) so far, by kind."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """NCCL errors on communicators so far, by result."""
    failed_over: Mapping[str, int] | None = None
    """Connections so far that NCCL moved off a port, by the status that a completion had; None: that is not seen."""
    degraded: tuple[FailedOver, ...] = ()
    """What keeps off a port now."""
    identity_conflicts: int | None = None
    """Communicators so far that gave a name which other processes had first; None: calls are not observed."""
    completion: NodeCompletion = NodeCompletion()
    times: NodeTimes = NodeTimes()
    unjoined: tuple[UnjoinedProcess, ...] = ()
    jobs: tuple[JobSteps, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """GPUs of this node as NVML shows them; built by agent/node/nvlink."""

    devices: tuple[GpuFacts, ...] = ()
    nvlinks: tuple[NvlinkFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class DriverCallsOfProcess:
    """Calls of CUDA's driver that one process made since it was followed."""

    pid: int
    graph_launches: int
    inside: str
    """The call in which a thread of it has been for longest; empty: it is in none."""
    inside_seconds: float


@dataclass(frozen=True, slots=True)
class NodeStalls:
    """Current and recent stalls of this node; built by agent/node/stalls."""

    lengths: tuple[CommunicatorStall, ...] = ()
    totals: tuple[StallTotal, ...] = ()
    ended: tuple[Stall, ...] = ()
    """The last ones, oldest first."""
    writing: tuple[RankKey, ...] = ()
    """Ranks whose processes write to storage while none of their communicators is called."""
    last: tuple[tuple[RankKey, LastCollectives[str]], ...] = ()
    """The last collectives of ranks that stall now, as far as they are known."""
    slow: tuple[RankPace, ...] = ()
    stacks: Mapping[tuple[str, int], ProcessStack] = field(default_factory=dict)
    """By communicator and rank: of those of this host to which stalls are put down, where that is asked for."""
    driver_calls: tuple[DriverCallsOfProcess, ...] = ()
    """By process, of those that are followed."""

    @property
    def current(self) -> tuple[Stall, ...]:
        """Those that go on now."""
        return tuple(one.current for one in self.lengths if one.current is not None)


@dataclass(frozen=True, slots=True)
class ProbeHealth:
    """What the probes are attached to, what they cost and what they lost; built by agent/node/daemon."""

    processes_observed: int = 0
    attached: tuple[AttachedProbe, ...] = ()
    levels: tuple[ProbeLevel, ...] = ()
    events_lost: Mapping[str, int] = field(default_factory=dict)
    """By reason; every reason is present from the start, with 0."""
    seen_late_unchecked: int = 0
    """Communicators that were not seen from their first call on, and of whose earlier calls nothing is known."""
    limits_reached: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """What users lost at limits of their own, by limit and uid."""
    overhead_seconds: Mapping[str, float] = field(default_factory=dict)
    """By program: calibrated cost that the probes put on the observed processes, seconds."""


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """How late the agent's loop was: after the moment that its schedule wanted, or in a turn that took long."""

    late_seconds: float
    """The longest, since the agent began."""
    late_recent_seconds: float
    """The longest within the last five minutes."""


@dataclass(frozen=True, slots=True)
class AgentHealth:
    """How the agent itself does; built by agent/node/daemon."""

    started_realtime_ns: int = 0
    """When the agent began; 0: unknown."""
    own_process: OwnProcessFacts | None = None
    """None: it is not read."""
    loop: LoopFacts | None = None
    """None: there is no loop."""
    collectors: tuple[CollectorResult, ...] = ()
    probes: ProbeHealth = field(default_factory=ProbeHealth)
    recordings: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Flight recordings, by reason (`stall`, `signal`) and result (`written`, `failed`)."""
    http_refused: Mapping[str, int] = field(default_factory=dict)
    """Connections and requests that the HTTP server refused or closed, by reason; empty where there is none."""
    otlp_exports: Mapping[str, int] = field(default_factory=dict)
    """Pushes of the metrics, by result; empty: nothing is pushed."""
    series_dropped: Mapping[str, int] = field(default_factory=dict)
    """By reason, without what the exporter's own budget drops."""
    dark_seconds: float | None = None
    """In which no agent counted, since the first one of this boot; None: totals are not kept, so nobody knows."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What this host is called; empty: not known."""

    name: str = ""
    """By Kubernetes or the operator, else the host name."""
    hostname: str = ""
    """By the kernel."""
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is exported, at one moment: `Observer.snapshot` puts it together from what each room built."""

    realtime_ns: int
    version: str
    kernel: str
    node: NodeIdentity = NodeIdentity()
    monotonic_ns: int = 0
    """The same moment as `realtime_ns`, as events are stamped."""
    revision: str = "unknown"
    """The commit that this railscope was built from."""
    simulated: bool = False
    """True when an input is recorded or synthesised (another sysfs or procfs root, a stub); shown in `build_info`."""
    collectives: NodeCollectives = field(default_factory=NodeCollectives)
    rails: tuple[RailFacts, ...] = ()
    """Built by agent/node/rails: RDMA ports, then network devices."""
    gpus: NodeGpus = NodeGpus()
    condition: NodeCondition = NodeCondition()
    fabric: NodeFabric = NodeFabric()
    stalls: NodeStalls = NodeStalls()
    transfers: NodeTransfers = field(default_factory=NodeTransfers)
    """Of libraries other than NCCL."""
    health: AgentHealth = field(default_factory=AgentHealth)
