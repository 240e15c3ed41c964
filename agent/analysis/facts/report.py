"""The facts of a report, part by part; text, JSON and HTML render them.

Bytes are wire bytes where a name says `wire`, and payload (count × size of the data type) otherwise; times are
seconds; a GPU is named by its number in `Gpus`.  None is "not known", and `Report.unknown` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from railscope.agent.analysis.facts.fact_columns import Pairs, Sizes


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that a recording does not tell."""

    row: int
    """Number of the measurement, 1 to 17, in the list of `railscope.agent.analysis.report.measurements`."""
    reason: str
    """One sentence that says what was missing, and what to do to get it."""


def known_payload(payload_bytes: int, calls: int, unsized_calls: int) -> int | None:
    """Payload of calls of which some have no known size; None: none of them has one."""
    return None if unsized_calls and unsized_calls >= calls else payload_bytes


@dataclass(frozen=True, slots=True)
class OpUse:
    """All calls of one operation and data type (operations)."""

    op: str
    dtype: str
    calls: int
    payload_bytes: int
    unsized_calls: int = 0
    """Calls whose size is not known: `payload_bytes` is of the others."""

    @property
    def known_payload_bytes(self) -> int | None:
        """None: of no call the size is known."""
        return known_payload(self.payload_bytes, self.calls, self.unsized_calls)


@dataclass(frozen=True, slots=True)
class PeerLink:
    """What one rank of a communicator sends to another by Send (composition: a pipeline's neighbours)."""

    source: int | None
    """GPU; None: this rank was not recorded."""
    destination: int | None
    messages: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class CommunicatorUse:
    """One communicator, all its recorded ranks together (operations, composition)."""

    comm: str
    nranks: int | None
    gpus: tuple[int, ...]
    """Its recorded members, by rank."""
    role: str
    """`tp`, `pp`, `dp`, `embedding`, `ep`, `world`, or `unknown`."""
    calls: int
    payload_bytes: int
    """Of all calls but Recv: what is received was sent."""
    ops: tuple[OpUse, ...]
    links: tuple[PeerLink, ...] = ()
    """Of Sends and Receives, in the order of ranks; empty where there are more than four a rank."""

    @property
    def known_payload_bytes(self) -> int | None:
        """None: of no call the size is known."""
        return known_payload(self.payload_bytes, self.calls, sum(use.unsized_calls for use in self.ops))


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic matrix (bytes by GPU pair, sparsity, traffic between servers, rails and leaves)."""

    gpus: int
    """Number of GPUs that the pairs are among."""
    pairs: Pairs
    """Each directed pair that talked once, in order of source and destination."""
    sparsity: float | None
    """Active directed pairs / n(n−1); None: fewer than two GPUs."""
    unobserved_wire_bytes: int
    """Sent to or from ranks that were not recorded: in no pair."""
    unmodelled_calls: int
    """Calls whose traffic is unknown."""
    between_servers_wire_bytes: int
    cross_rail_wire_bytes: int | None
    """Between servers, from a GPU of one rail to a GPU of another; None: rails of GPUs are not known."""
    spine_wire_bytes: int | None
    """Between leaf switches; None: no leaf map was given, and the rails of GPUs are not known."""
    server_transmit_wire_bytes: tuple[tuple[str, int], ...]
    """By server: what left it."""
    basis: str
    """What the order of rings was taken from, in one sentence."""
    spine_assumed: bool = False
    """`spine_wire_bytes` takes the ports of a rail to be at one leaf switch, each rail at its own."""


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """How long operations of one kind took (latency)."""

    op: str
    payload_bytes: int | None
    """None: it could not be told."""
    source: str
    """What the times are: `proxy`, `cuda`, `kernel`."""
    count: int
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    max_seconds: float
    over_bytes: int | None = None
    """Sizes over this up to `payload_bytes` are put together; None: all are of `payload_bytes`."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One operation that took far longer than similar ones, or a stall (latency)."""

    time_seconds: float
    """Since 1970."""
    comm: str
    rank: int | None
    op: str
    payload_bytes: int | None
    seconds: float
    typical_seconds: float | None
    cause: str
    """Empty: not known."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency."""

    rows: tuple[LatencyRow, ...]
    anomalies: tuple[Anomaly, ...]
    """The worst first, at most as many as were asked for."""
    anomaly_count: int


@dataclass(frozen=True, slots=True)
class Role:
    """What one kind of parallelism sent (composition), all its communicators and recorded ranks together."""

    role: str
    """As in `CommunicatorUse`."""
    communicators: int
    calls: int
    payload_bytes: int
    """Of all calls but Recv: what is received was sent."""
    rank_calls: float
    """Of one rank that takes part, on average."""
    rank_payload_bytes: float
    """As `payload_bytes`."""
    unsized_calls: int = 0
    """Calls whose size is not known: `payload_bytes` is of the others."""

    @property
    def known_payload_bytes(self) -> int | None:
        """None: of no call the size is known."""
        return known_payload(self.payload_bytes, self.calls, self.unsized_calls)

    @property
    def known_rank_payload_bytes(self) -> float | None:
        """None: of no call the size is known."""
        return None if self.known_payload_bytes is None else self.rank_payload_bytes


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The shape of the job, as its communicators show it."""

    pipeline: int
    tensor: int
    data: int
    expert: int
    certain: bool
    reason: str
    """Why it is taken to be so, or what else it could be."""
    alternatives: tuple[tuple[int, int, int], ...] = ()
    """Other (pipeline, tensor, data) that what was recorded allows."""


@dataclass(frozen=True, slots=True)
class RankUse:
    """What one GPU called for one kind of parallelism (composition, rank by rank as paper B's table 3)."""

    gpu: int
    role: str
    """As in `CommunicatorUse`."""
    op: str
    calls: int
    payload_bytes: int
    unsized_calls: int = 0
    """Calls whose size is not known: `payload_bytes` is of the others."""

    @property
    def known_payload_bytes(self) -> int | None:
        """None: of no call the size is known."""
        return known_payload(self.payload_bytes, self.calls, self.unsized_calls)


@dataclass(frozen=True, slots=True)
class Composition:
    """Composition."""

    roles: tuple[Role, ...]
    parallelism: Parallelism | None
    ranks: tuple[RankUse, ...] = ()
    """By GPU, role and operation."""


@dataclass(frozen=True, slots=True)
class NonUniformity:
    """All-to-all non-uniformity of an iteration, from wire bytes of all pairs of its groups."""

    max_minus_min_bytes: int
    max_over_min: float | None
    """None: a pair sent nothing."""
    relative: float
    """(max − min) / mean."""
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the job (regularity, all-to-all non-uniformity, communication ratio, non-overlapped ratio).

    One that was interrupted by other calls (`OtherCalls`) is not among them.
    """

    start: float
    """Seconds since 1970."""
    period_seconds: float
    """Its length."""
    comm_seconds: float | None
    """Union of its communication intervals, of the GPU that communicates longest; None: no operation has times."""
    comm_ratio: float | None
    non_overlapped_seconds: float | None
    """Communication while no compute ran; None: compute is not recorded."""
    non_overlapped_ratio: float | None
    all_to_all: NonUniformity | None
    from_ns: int = 0
    """What happened on any GPU from then on (since 1970) belongs to it: within the silence before its first call,
    half as long before it as it is usually silent, as hosts do not begin at the same moment."""
    to_ns: int = 0
    """What happened from then on belongs to the next one."""
    compute_seconds: float | None = None
    """Union of its kernels that are no communication, of the same GPU; None: compute is not recorded, or it is unknown
    whose it is."""


@dataclass(frozen=True, slots=True)
class RoleTime:
    """How long a GPU communicated for one kind of parallelism in an iteration, on average (communication ratio).

    Kinds overlap each other: their times may be more than the communication of an iteration.
    """

    gpu: int
    """The one that communicates longest, as of `Iteration`."""
    role: str
    """As in `CommunicatorUse`."""
    seconds: float
    """Union of its operations' intervals."""
    ratio: float
    """Of the iterations' length."""
    non_overlapped_seconds: float | None
    """Of these, while no compute ran; None: compute is not recorded."""
    non_overlapped_ratio: float | None


@dataclass(frozen=True, slots=True)
class OtherCalls:
    """What lies between iterations, and is none: an evaluation or a checkpoint, as a rule.

    The iteration that a stretch of it follows was interrupted: it is taken to have lasted as long as the median one.
    """

    stretches: int
    calls: int
    """Of the GPU whose calls were compared, in all stretches."""
    seconds: float
    """Of all stretches."""
    mean_seconds: float
    share: float
    """Of the time from the first iteration's begin to the last one's end: 0 to 1."""


@dataclass(frozen=True, slots=True)
class Regularity:
    """How regular the job is: all figures are of iterations alone, without what lies between them."""

    period_seconds: float
    """Median over iterations."""
    duty_cycle: float | None
    """Part of the time in which operations were under way, short gaps included; None: none of them has times, or
    nobody knows whether some kernels communicate."""
    recurrence: float
    """Part of iterations whose calls are those of the most frequent iteration, in the same order: 0 to 1."""
    iterations: int
    """All of them, those included that were interrupted by other calls: how long these took is not known, and they are
    in no other figure."""
    calls_per_iteration: int
    """Of the GPU, in the most frequent iteration."""
    gpu: int = 0
    """Whose calls were compared: of the GPU that makes most."""
    recurrence_without_sizes: float | None = None
    """The same where calls are equal that differ in size only."""
    spread: float | None = None
    """(75th − 25th percentile) / median of the iterations' lengths."""
    basis: str = ""
    """What the iterations were recognised by, in one sentence."""
    cut_by: str = "calls"
    """`kernels` of a trace, `calls`, or completed `operations`: whose begins the iterations' begins are."""
    between: OtherCalls | None = None
    """None: other calls interrupt no iteration."""
    before_seconds: float = 0.0
    """How long other calls were made before the first iteration; 0: not for longer than it takes."""
    behind_seconds: float = 0.0
    """The same, behind the last one."""

    @property
    def has_other_calls(self) -> bool:
        """Whether calls were recorded that are in no iteration, but for those of one that is not whole."""
        return self.between is not None or self.before_seconds > 0 or self.behind_seconds > 0


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """Effective bandwidth by operation and size (bandwidth utilisation)."""

    op: str
    payload_bytes: int
    count: int
    algbw_bytes_per_second: float
    """Median of payload / duration, with nccl-tests' meaning of size."""
    busbw_bytes_per_second: float
    utilisation: float | None
    """busbw over the rate of the links that it crosses; None: not known."""
    over_bytes: int | None = None
    """As of `LatencyRow`."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """One of several runs (scaling factor)."""

    name: str
    gpus: int
    iterations_per_second: float
    kind: str | None
    """`weak`: the batch grows with the GPUs; `strong`: it stays the same; None: it cannot be told."""
    factor: float | None
    """(throughput / GPUs) over the same of the first run, by the kind; None: by which one cannot be told."""
    weak_factor: float
    """As if it were weak scaling: throughput is iterations per second × GPUs."""
    strong_factor: float
    """As if it were strong scaling: throughput is iterations per second."""


@dataclass(frozen=True, slots=True)
class RailUse:
    """What one rail's port counted (traffic between servers, rails and leaves)."""

    server: str
    rail: str
    """Empty: not known."""
    device: str
    seconds: float
    """From the first reading to the last one."""
    transmit_bytes: int
    """Port bytes: what the device itself counted."""
    receive_bytes: int
    transmit_bytes_per_second: float
    """On average."""
    receive_bytes_per_second: float
    peak_transmit_bytes_per_second: float
    """In the busiest second."""
    peak_receive_bytes_per_second: float
    speed_bytes_per_second: int | None
    """Of the link, each way; None: not known."""
    transmit_utilisation: float | None
    """Average rate / speed."""
    receive_utilisation: float | None


@dataclass(frozen=True, slots=True)
class OwnerUse:
    """What one owner moved over one rail in one direction (traffic between servers, rails and leaves)."""

    server: str
    rail: str
    """As of `RailUse`."""
    device: str
    direction: str
    """`transmit` or `receive`."""
    owner: str
    """`nccl`, `ucx`, `storage`, …; `unknown`: nobody knows."""
    port_bytes: int
    share: float
    """Of all bytes of this rail and direction that have an owner."""
    error_ratio: float | None
    """Of the same: half the width of the band that each owner's may lie in; None: not known."""
    origins: Mapping[str, int]
    """Port bytes by where they came from: `collective`, `transfer`, `overhead`, …"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How much ranks wait for the slowest one of their communicator."""

    of_communication: float
    """Of the time in operations of all ranks that are compared: 0 to 1."""
    gpu: int
    """For which the others wait most."""


@dataclass(frozen=True, slots=True)
class ReceiveUse:
    """What one GPU's receives did."""

    gpu: int
    active_seconds: float
    """Transferring, at the pace of the fastest receives of this size."""
    idle_seconds: float
    """Waiting for the sender."""
    bubble_ratio: float | None
    iteration_active_seconds: float | None = None
    """Of the first, what lies in an iteration, on average; None: there are none."""
    iteration_idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU of the job."""

    number: int
    server: str
    pid: int | None
    gpu: str
    """Index on its server; empty: not known."""
    world_rank: int | None
    rail: str
    """Rail of its nearest NIC; empty: not known."""


@dataclass(frozen=True, slots=True)
class TransferUse:
    """What a process moved to or from one other end with a library other than NCCL (KV caches: prefill to decode)."""

    server: str
    pid: int
    library: str
    op: str
    direction: str
    """`transmit`, `receive`, `both` (a collective) or `none`."""
    peer: str
    """As the library calls it; empty: all that have no name."""
    operations: int
    payload_bytes: int | None
    """None: arguments do not tell."""
    failed: int
    mean_seconds: float | None
    """From the call to when its program learned that it is complete; None: none was seen to complete."""
    p50_seconds: float | None
    """Estimated from powers of two, as is the next one."""
    p99_seconds: float | None
    bytes_per_second: float | None
    """Payload of those that completed over the time that they took; None: not known."""
    times_as_long: float | None
    """Of a pair that is slow: its mean over the median of the other pairs' of the same library and operation."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a recording tells."""

    folders: tuple[str, ...]
    simulated: bool
    began_seconds: float
    """Since 1970."""
    seconds: float
    gpus: tuple[GpuFacts, ...]
    ops: tuple[OpUse, ...]
    sizes: Sizes
    communicators: tuple[CommunicatorUse, ...]
    matrix: Traffic
    latency: Latency
    composition: Composition
    regularity: Regularity | None
    iterations: tuple[Iteration, ...]
    bandwidth: tuple[BandwidthRow, ...]
    scaling: tuple[Scaling, ...] = ()
    receives: tuple[ReceiveUse, ...] = ()
    role_times: tuple[RoleTime, ...] = ()
    waiting: Waiting | None = None
    """None: no two ranks of a communicator have operations with times."""
    rails: tuple[RailUse, ...] = ()
    owners: tuple[OwnerUse, ...] = ()
    """By server, rail, device and direction; who moved most comes first."""
    transfers: tuple[TransferUse, ...] = ()
    """Of libraries other than NCCL, the most bytes first."""
    unknown: tuple[Unknown, ...] = field(default=())
    losses: tuple[str, ...] = ()
    """What was lost while it was recorded, or skipped as it was imported: one sentence each."""
    missing_calls: tuple[str, ...] = ()
    """Those of `losses` that say that calls are missing, so that what counts them is too small."""
    several_jobs: str = ""
    """The one of `losses` that says that there are several jobs; empty: there is one."""
    one_of_several: str = ""
    """That other jobs were left out; empty: none was."""
    shared_rails: str = ""
    """That `rails` are not of this job alone; empty: no other job is known to use them."""
