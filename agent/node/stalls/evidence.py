"""The evidence on which stalls are judged: a rank, its process and its rails at one moment.

`agent/node/stalls/watchdog.py` gathers these, `agent/node/stalls/root_cause.py` finds who is to blame,
`agent/node/stalls/detector.py` decides what a stall is.  Times are CLOCK_MONOTONIC, ns; what is not known is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.stall import Disagreement, InFlight, OwnHistory
from railscope.probes.processes.state import Condition

_SLEEPS_RATIO: Final = 0.05
LEAST_WRITTEN_BYTES: Final = 1 << 20
"""Within about a second: less is a log, and no checkpoint."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """How far one rank's end of one communicator came, and what it waits for: what ranks are compared by.

    It holds no RankIdentity: judging computes with the rank's number and the process, and asks nothing of the rest.
    """

    instance: int
    comm: str
    rank: int | None
    nranks: int | None
    pid: int
    enqueued: int
    completed: int | None
    """None: completion cannot be seen."""
    last_call_ns: int
    in_flight: InFlight | None
    slow: OwnHistory | None = None
    """History of operations that are slower than they used to be, though none is in flight for long."""
    slow_op: str = "unknown"
    """NCCL's name of those."""
    event_ns: int | None = None
    """When the kernel told that something happened to its process or its rails, of late; None: it did not."""
    comparable: bool = True
    """It is known where it stands among the ranks: there were collectives only, and they are numbered alike."""
    unseen_calls: int = 0
    """What to add to the number of a call to compare it with those of other ranks: calls not observed, less those
    that are not numbered."""

    @property
    def name(self) -> str:
        return "unknown" if self.rank is None else str(self.rank)

    @property
    def entered(self) -> int:
        """Calls since the communicator was made, if it is comparable."""
        return self.enqueued + self.unseen_calls


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process over the last moments."""

    condition: Condition
    window_ns: int
    """How long it was watched for the ratios; 0: only just looked at."""
    busy_ratio: float
    """Processors that it kept busy, 1.0: one."""
    waited_ratio: float
    """Threads that were ready to run and had no processor, on average."""
    written_bytes: int
    """To files, and to services through the network, by it and its descendants, within the window."""
    moved_bytes: int | None
    """Acknowledged and received by its connections within the window; None: not known."""
    freezer: str = ""
    """The file that thaws it where it is frozen; empty: it cannot be seen."""
    descendants_busy_ratio: float = 0.0
    """Processors that its descendants kept busy."""
    usual_pause: bool = False
    """It pauses where it did the last times, after which it went on, and no longer than twice as long."""

    @property
    def writing(self) -> bool:
        """Not a little: a checkpoint."""
        return self.window_ns > 0 and self.written_bytes >= LEAST_WRITTEN_BYTES

    @property
    def excused(self) -> bool:
        """It does work that comes to an end: a wait for it is no stall."""
        return self.writing or self.usual_pause

    @property
    def computing(self) -> bool:
        """Doing something of its own: a long computation, a checkpoint."""
        return self.excused or (self.window_ns > 0 and self.busy_ratio + self.descendants_busy_ratio >= 0.5)

    @property
    def starved(self) -> bool:
        """Ready to run, and hardly ever let.

        What gets more than a twentieth of a processor and does not come on waits for something else: NCCL's threads
        spin while they wait, and spin less on a busy host.  The kernel counts a wait when it ends: of a thread that a
        control group lets run once a second, 1.5 seconds may hold a single wait, of 0.85 s.
        """
        return self.window_ns > 0 and self.waited_ratio >= 0.5 and self.busy_ratio <= 0.05


@dataclass(frozen=True, slots=True)
class RailSigns:
    """One rail, as one process's connections and the device's own counters show it over the last moments.

    Not RailFacts, which hold the device's totals over all processes.
    """

    rail: str
    device: str
    netns: str
    """Label, as metrics have it."""
    up: bool | None
    window_ns: int
    carrier_lost_ns: int | None = None
    """When it last lost or gained its carrier while it was watched; None: it did not."""
    speed_bytes_per_second: int | None = None
    connections: int = 0
    """Of this process."""
    unanswered: int = 0
    """Of these, those that the network gives no answer."""
    peer_closed: int = 0
    """Of these, those whose other end was closed."""
    only_small_arrive: int = 0
    """Of these, those whose full segments are dropped while shorter ones behind them arrive."""
    segment_bytes: int = 0
    """The longest segment that any of those sends, payload alone."""
    unanswered_ns: int = 0
    """The longest that any without an answer has waited."""
    sent_bytes: int = 0
    """Within the window, retransmissions included; of the next three too."""
    retransmitted_bytes: int = 0
    moved_bytes: int = 0
    busy_ratio: float = 0.0
    """Share of the window in which data was under way, mean over the connections that sent."""
    peer_limited_ratio: float = 0.0
    """Share of that time in which it waited because the other end did not read."""
    round_trip_ns: int | None = None
    round_trip_deviation_ns: int | None = None
    """How far single ones are from it on average."""
    least_round_trip_ns: int | None = None
    """The shortest that was ever measured."""
    backlog_bytes: int | None = None
    """In the device's queue."""
    unacknowledged: int = 0
    """Of its connections, those with data under way."""
    unread_bytes: int = 0
    """Received on its connections, and not read by the process."""
    unsent_bytes: int = 0
    """Given to its connections, and not sent: the peer takes no more."""
    losses: tuple[tuple[str, int], ...] = ()
    """Error and loss counters that grew within the window, by how much."""
    port_bytes: int = 0
    """What the device counted within the window, in both directions, of all processes."""
    foreign_ratio: float = 0.0
    """Share of what the device carried within the window that suspected processes did not; 0 where they use no TCP."""
    surely_used: bool = True
    """False: it may as well carry nothing of this process."""


@dataclass(frozen=True, slots=True)
class GonePeer:
    """A rank of a communicator whose process has ended."""

    rank: int | None
    pid: int

    @property
    def sentence(self) -> str:
        return f"process {self.pid} of rank {'unknown' if self.rank is None else self.rank} has ended"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A process of this host that does not come because of another communicator than the one that is asked about."""

    pid: int
    rank: str
    """In the communicator that is asked about."""
    comm: str
    """Which other one; empty: that cannot be told."""
    why: str = ""
    """What holds it up there in the end; empty: that is not seen on this host."""

    @property
    def sentence(self) -> str:
        where = f"communicator {self.comm}" if self.comm else "another of its communicators"
        because = f": {self.why}" if self.why else ""
        return f"rank {self.rank} of this host is itself stalled in {where}{because}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything around one rank that is suspected."""

    process: ProcessFacts
    rails: tuple[RailSigns, ...]
    """Those that it uses, or all of its namespace where that is not known."""
    peers: tuple[RankFacts, ...]
    """Other ranks of the communicator on this host."""
    peer_processes: Mapping[int, ProcessFacts] = field(default_factory=dict)
    """By pid, of all living ranks of the communicator on this host."""
    waits_for: tuple[int, ...] = ()
    """Ranks from which the operation waits to receive."""
    hidden: str = ""
    """Why its connections cannot be seen; empty: they can."""
    others: int = 0
    """Other communicators of its process, to which closed connections and unread bytes may as well belong."""
    gone: GonePeer | None = None
    """The first peer of this host whose process ended while it was in use."""
    elsewhere: tuple[Elsewhere, ...] = ()
    """Peers that are not in this communicator's operation, as far as one sees, because another one holds them up."""
    disagreement: Disagreement | None = None
    """The first of the last collectives that ranks of this host did not make alike; None: none, or unknown."""
    sends: bool | None = None
    """Whether the process handed anything to a network device within the last moments; None: not observed."""

    @property
    def unread_bytes(self) -> int:
        """What peers sent and this rank does not read: on every rail where it is connected, or it waits for another."""
        connected = [rail for rail in self.rails if rail.connections]
        return sum(rail.unread_bytes for rail in connected) if all(rail.unread_bytes for rail in connected) else 0

    @property
    def in_no_operation(self) -> bool:
        """Whether it neither reads what peers sent nor has anything to send.

        Inside an operation that another rank holds up both pile up.
        """
        return self.unread_bytes > 0 and not any(rail.unsent_bytes for rail in self.rails)

    @property
    def sleeps_beside_data(self) -> bool:
        """Whether its process sleeps, with bytes of peers unread on any rail: NCCL's threads spin in an operation."""
        unread = any(rail.unread_bytes for rail in self.rails)
        sleeps = self.process.window_ns > 0 and self.process.busy_ratio <= _SLEEPS_RATIO
        return unread and sleeps and not any(rail.unsent_bytes for rail in self.rails)

    def process_of_peer(self, pid: int) -> ProcessFacts | None:
        return self.peer_processes.get(pid)
