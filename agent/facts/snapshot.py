"""What the agent knows at one moment, as one immutable value.

A `Snapshot` holds five facts: collectives, rails, hardware (`hardware.py`), stalls and the agent's own health.  Each is
built whole by the room of agent/node that knows it; exporters, the demo and the terminal only read them.  Three notions
of bytes are kept apart by name: payload (count × dtype size), wire (payload × algorithm factor: what should leave the
node), port (what the network device counted).  What is not known is the string "unknown" in a label, `None` in a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from railscope.agent.facts.hardware import NodeCondition, NodeFabric, NodeGpus
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rail_ledger import RailLedger
from railscope.agent.facts.rank_identity import RankIdentity, RankKey
from railscope.agent.facts.slowness import Slowness
from railscope.agent.facts.stall import LastCollectives, ProcessStack, Stall
from railscope.agent.facts.transfers import NodeTransfers


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
    gpus: NodeGpus = field(default_factory=NodeGpus)
    condition: NodeCondition = field(default_factory=NodeCondition)
    fabric: NodeFabric = field(default_factory=NodeFabric)
    stalls: NodeStalls = NodeStalls()
    transfers: NodeTransfers = field(default_factory=NodeTransfers)
    """Of libraries other than NCCL."""
    health: AgentHealth = field(default_factory=AgentHealth)
