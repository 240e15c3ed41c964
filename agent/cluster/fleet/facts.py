"""What is known of a fleet at one moment, as far as it matters to a stall: agents, ranks, rails.

agent/cluster/fleet/reader.py makes these facts from series, agent/cluster/verdict/verdict.py concludes from them.  A
host is called by one name everywhere; None is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.agent.facts.slowness import Slowness
from railscope.agent.facts.stall import LastCollectives

RECENT_SECONDS: Final = 60.0
"""What is a moment ago, where hosts are scraped often."""


@dataclass(frozen=True, slots=True)
class Agent:
    """railscope's agent on one host, as the store sees it."""

    host: str
    up: bool
    """It answered the last scrape, and that was not long ago."""
    silent_seconds: float | None = None
    """How long it has said nothing, by its own last time stamp; None: it is up, or was not seen within the hour."""
    started: float | None = None
    """Seconds since the Unix epoch; None: not told."""
    clock_offset_seconds: float | None = None
    """The host's clock less the store's, as far as one scrape interval can tell; None: not known."""
    failing: tuple[str, ...] = ()
    """Collectors whose last run failed."""
    mixed_by: tuple[str, ...] = ()
    """Labels that alone tell several agents of this instance apart, as where stores of clusters are one."""
    address: str = ""
    """At which it is scraped, as far as the store's label `instance` tells; empty: not known."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall that a host reports of one of its ranks."""

    op: str
    """Empty: the host does not know."""
    cause: str
    strength: str = "unknown"
    """`strong`, `weak` or `unknown`."""
    blamed_rank: str = ""
    rail: str = ""
    device: str = ""
    netns: str = ""


@dataclass(frozen=True, slots=True)
class Rank:
    """What the store tells of one rank's end of one communicator, or what is known of one that it does not tell of."""

    identity: RankIdentity
    host: str
    """Empty: not known."""
    present: bool = True
    """False: it was seen within the hour, and is not any more."""
    ended: bool = False
    """Its end of the communicator was destroyed or aborted, or its process has ended: it does not wait."""
    awaited: bool = False
    """Others are inside the call that makes the communicator, and its process has none: it did not call it."""
    enqueued: int | None = None
    completed: int | None = None
    """None: this cannot be known."""
    inflight_seconds: float | None = None
    position: Position | None = None
    """Where it stands in the communicator's sequence; None: not comparable with other ranks."""
    calls_per_second: float | None = None
    moving: bool = False
    """It entered an operation between its last scrapes."""
    usual_calls_per_second: float | None = None
    """Within the window, before it stalled; and `mean_` over all of it where the rank is counted from its first call
    on."""
    mean_calls_per_second: float | None = None
    stall: Stall | None = None
    last: LastCollectives[str] | None = None
    """Its last collectives, of one that stalls; None: unknown."""
    writing: bool = False
    """Its process makes no call and writes to storage, or did so a moment ago."""
    last_said: Stall | None = None
    """What its host said of it when it was last seen, of a rank that is not any more."""
    stalled_seconds: float | None = None
    """Length of its stalls within the window."""
    scraped: float | None = None
    """When its host was last heard: seconds since the Unix epoch, by the store's clock."""

    @property
    def comm(self) -> str:
        return self.identity.comm

    @property
    def rank(self) -> str:
        return self.identity.rank

    @property
    def world_rank(self) -> str:
        """Its rank in the whole job, as launchers number them; empty: not known."""
        return self.identity.of_job("world_rank")


@dataclass(frozen=True, slots=True)
class Rail:
    """One rail of one host; None: not known."""

    host: str
    rail: str
    device: str
    netns: str = ""
    up: bool | None = None
    speed: float | None = None
    """Bytes per second."""
    transmit: float | None = None
    """Bytes per second now, and `usual_` the most within the window."""
    receive: float | None = None
    usual_transmit: float | None = None
    backlog_bytes: float | None = None
    """The longest that its queue was at the last few scrapes."""
    unacknowledged_segments: float | None = None
    unsent_bytes: float | None = None
    """In the socket buffers of its TCP connections, and never sent."""
    round_trip_seconds: float | None = None
    retransmitted_ratio: float | None = None
    """Of the payload that its TCP connections sent."""
    events: tuple[tuple[str, str, float], ...] = ()
    """(counter, severity, increase within the window) of errors that matter."""

    @property
    def place(self) -> tuple[str, str]:
        """Its host and network namespace: two ends of a rail are in different ones."""
        return self.host, self.netns

    @property
    def mute(self) -> bool:
        """Data waits to be sent and nothing is under way: the host itself keeps it back, as its own filter does."""
        return bool(self.unsent_bytes) and self.unacknowledged_segments == 0


@dataclass(frozen=True, slots=True)
class HardwareSign:
    """What went wrong with hardware of a host."""

    host: str
    sentence: str
    """As agent/facts/hardware_evidence.py says it, without host and moment."""
    at: float | None = None
    """When it was, seconds since the Unix epoch by the store's clock; None: it is so."""
    rail: str = ""
    """Whose link, port or module it is; empty: of none."""
    device: str = ""
    gpu: str = ""
    """Of this GPU, as NVML counts; empty: of none, or not known."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A communicator that makes progress on a host with a stall."""

    comm: str
    host: str
    calls_per_second: float


@dataclass(frozen=True, slots=True)
class LongWait:
    """An operation in flight for long that no host calls a stall."""

    comm: str
    rank: str
    host: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that comes last in most operations of a communicator that makes progress, so that the others wait."""

    comm: str
    rank: str
    host: str
    waited_ratio: float
    """Of the others' time, 0 to 1, of late."""
    slowness: Slowness
    """By the store's clock; by its host's, where that counts calls."""
    stretch_seconds: float | None
    """Length of the stretches of time that are counted; None: calls that it made last among the ranks of its host are,
    and whether GPUs wait is not seen."""
    waited_seconds: float | None = None
    """By which the others wait for it in an operation."""
    times_median: float | None = None
    """Time that it takes from one operation to the next, by the median of the other ranks."""
    of_window: bool = False
    """It was slow already when the window began."""


@dataclass(frozen=True, slots=True)
class FailedOver:
    """A rank that goes on without a port which failed: NCCL moved connections to another one."""

    comm: str
    rank: str
    """Both `unknown` where only the connections are known."""
    host: str
    rail: str
    """Empty: the port is none."""
    device: str
    port: str
    carried_by: str
    """The device that carries its share."""
    status: str
    """Of the completion that told NCCL, as libibverbs names it, and its vendor's number."""
    vendor_error: str
    connections: int
    transmit: float | None = None
    """Port bytes per second that the device sends now, and `carrier_` the one that carries its share; None: unknown."""
    carrier_transmit: float | None = None


@dataclass(frozen=True, slots=True)
class SlowRail:
    """A rail that carries less than its siblings while it sends, or loses packets, though nothing hangs."""

    host: str
    rail: str
    device: str
    netns: str
    cause: str
    """`rail_slow` or `rail_lossy`."""
    slowness: Slowness
    stretch_seconds: float
    pace_ratio: float | None = None
    """Of the best sibling's; None: it is as fast."""
    retransmitted_ratio: float | None = None
    """Of the payload; None: little."""
    backlog_bytes: float = 0.0
    """The longest that its queue was of late."""
    of_window: bool = False
    """It was so already when the window began."""


@dataclass(frozen=True, slots=True)
class StallHistory:
    """When hosts called a communicator stalled within the window, as their scrapes show; now may be among it."""

    comm: str
    times: int
    """How often it began: between two of them no host called it stalled."""
    first: float
    """Seconds since the Unix epoch, by the store's clock."""
    last: float
    telling: float
    """The latest of its last moments at which the best founded cause was said by most."""
    said: tuple[tuple[str, str, Stall], ...]
    """(host, rank, what was said) at that moment."""
    wrote: bool = False
    """Within the window one of its ranks wrote to storage while it made no call."""


@dataclass(frozen=True, slots=True)
class BriefStall:
    """A stall of the last moments that was too short for a scrape to show it."""

    comm: str
    host: str
    cause: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ReportedStall:
    """What a host says of one of its ranks, where the store did not answer what more it takes to judge it."""

    comm: str
    host: str
    rank: str
    stall: Stall


@dataclass(frozen=True, slots=True)
class SilentProcess:
    """A process with NCCL that was there when its host's agent came, and of which that has seen no call."""

    host: str
    pid: str
    job: str
    """Empty: not known."""
    world_rank: str
    """As its launcher numbers it; empty: it was given none."""
    agent_seconds: float
    """For how long the agent has been there."""


@dataclass(frozen=True, slots=True)
class StuckTransfer:
    """A transfer of a library other than NCCL that its host calls a stall."""

    host: str
    library: str
    op: str
    pid: str
    """Of the process that waits; empty: not told."""
    peer: str
    """Its other end, as the library calls it, or an address; empty: not known."""
    cause: str
    blamed_pid: str
    """Process of the same host that is to blame; empty: none is known."""
    seconds: float
    evidence: tuple[str, ...] = ()
    """What the host said, where a file keeps that."""


@dataclass(frozen=True, slots=True)
class PastTransfer:
    """A transfer that its host called a stall within the window, and calls so no more."""

    transfer: StuckTransfer
    """As it was told of last."""
    last: float
    """When that was, seconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that a verdict may rest on."""

    at: float
    """Seconds since the Unix epoch, by the store's clock."""
    window_seconds: float
    scrape_seconds: float | None
    """The longest usual time between two scrapes of a host."""
    agents: tuple[Agent, ...]
    ranks: tuple[Rank, ...] = ()
    """Of communicators that are stalled, or were a moment ago, of those with a slow rank, of those that stand `apart`,
    and of the one asked for; where any is stalled, of those with a rank that writes to storage, too."""
    rails: tuple[Rail, ...] = ()
    hardware: tuple[HardwareSign, ...] = ()
    """Of all hosts, where anything is stalled or slow."""
    moving: tuple[Moving, ...] = ()
    waiting: tuple[LongWait, ...] = ()
    slow_rails: tuple[SlowRail, ...] = ()
    """The worst first."""
    slow: tuple[SlowRank, ...] = ()
    """Most waited for first; of communicators that are not stalled, and were not a moment ago."""
    failed_over: tuple[FailedOver, ...] = ()
    apart: tuple[str, ...] = ()
    """Communicators that stand, with ranks that entered different numbers of operations, and that no host calls
    stalled."""
    communicators: int = 0
    """How many there are in all."""
    history: tuple[StallHistory, ...] = ()
    """Of every communicator that was stalled within the window, the latest first."""
    brief: tuple[BriefStall, ...] = ()
    recent_seconds: float = RECENT_SECONDS
    """A stall that ended no longer ago still matters: what is on and off is off for less."""
    reported: tuple[ReportedStall, ...] = ()
    """Stalls that hosts report, where the ranks concerned could not be read; empty where they are among `ranks`."""
    silent: tuple[SilentProcess, ...] = ()
    stuck_transfers: tuple[StuckTransfer, ...] = ()
    """Of libraries other than NCCL, the oldest first."""
    past_transfers: tuple[PastTransfer, ...] = ()
    """Likewise, the latest first."""
    unanswered: tuple[tuple[str, str], ...] = ()
    """What is not known because the store did not answer, and why it did not."""
