"""What stalls are judged by: one rank's end of a communicator, its process, its rails, at one moment.

`agent/stall_watch.py` gathers these, `agent/blame.py` finds who is to blame, `agent/stalls.py` decides what a stall is.
Times are CLOCK_MONOTONIC, ns; what is not known is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from railscope.probes.process_state import Condition

Strength = Literal["strong", "weak"]
"""`weak`: nothing saw the operation itself; that one is in flight follows from other signs."""


class Cause(StrEnum):
    """Why an operation stalls, best founded first."""

    PROCESS_GONE = "process_gone"
    PROCESS_STOPPED = "process_stopped"
    RAIL_DOWN = "rail_down"
    RAIL_FILTERED = "rail_filtered"
    RAIL_LOSSY = "rail_lossy"
    RAIL_SLOW = "rail_slow"
    GPU_NOT_PROGRESSING = "gpu_not_progressing"
    RANK_BEHIND = "rank_behind"
    UNSEEN = "unseen"
    UNKNOWN = "unknown"


OF_A_PROCESS: Final[frozenset[str]] = frozenset({Cause.PROCESS_GONE, Cause.PROCESS_STOPPED})
"""Causes that are seen by themselves: weak is then only how one knows that an operation is in flight."""

LEAST_WRITTEN_BYTES: Final = 1 << 20
"""To storage, within about a second: less is a log, and no checkpoint."""


def rail_name(rail: str, device: str, netns: str) -> str:
    """`rail 1 (eth1)`, with the namespace's label where the device's name is in several; `rail 1` without a device."""
    place = f"{device} in {netns}" if device and netns else device
    return f"rail {rail} ({place})" if place else f"rail {rail}"


@dataclass(frozen=True, slots=True)
class OwnHistory:
    """How long operations of one communicator, kind and size took before."""

    operations: int
    mean_ns: float
    """Over minutes, without the last few seconds."""
    longest_ns: float
    """The longest mean of any second of the last minutes."""
    recent_mean_ns: float | None
    """Over the last few seconds; None: too little happened in them."""

    @property
    def ratio(self) -> float:
        """How many times as long as before they took of late; 1: not known to differ."""
        # Clocks are read in whole nanoseconds: what took none before took less than one.
        return 1.0 if self.recent_mean_ns is None else self.recent_mean_ns / max(self.mean_ns, 1.0)


@dataclass(frozen=True, slots=True)
class InFlight:
    """The oldest operation of a communicator that is not complete."""

    op: str
    """NCCL's name; `unknown` where only its being in flight is known."""
    payload_bytes: int | None
    since_ns: int
    """When it was handed over; at counts alone, the last call."""
    strength: Strength
    sign: str
    """How it is known to be in flight, as a sentence."""
    history: OwnHistory | None = None
    nothing_sent: bool = False
    """Its process has sent nothing at all since it was handed over, although this operation begins with a send."""
    calls_before: int | None = None
    """Calls on the communicator that come before it: a rank that made no more has not made this one; None: unknown."""
    one_of: int = 1
    """Communicators of its process to which the sign may as well belong, this one included."""
    missing: bool = False
    """All others wait in it for this rank, whose process sleeps and does not read what it is sent."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's end of one communicator."""

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
    comparable: bool = True
    """It is known where it stands among the ranks: there were collectives only, and they are numbered alike."""
    unseen_calls: int = 0
    """What to add to the number of a call to compare it with those of other ranks: calls that nobody saw, less those
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
    """To storage, within the window."""
    moved_bytes: int | None
    """Acknowledged and received by its connections within the window; None: not known."""

    @property
    def writing(self) -> bool:
        """To storage, and not a little: a checkpoint."""
        return self.window_ns > 0 and self.written_bytes >= LEAST_WRITTEN_BYTES

    @property
    def computing(self) -> bool:
        """Doing something of its own: a long computation, a checkpoint."""
        return self.writing or (self.window_ns > 0 and self.busy_ratio >= 0.5)

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
    """One rail, as one process's connections and the device's own counters show it over the last moments."""

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
    unanswered_ns: int = 0
    """The longest that any of those has waited."""
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
    unread_bytes: int = 0
    """Received on its connections, and not read by the process."""
    losses: tuple[tuple[str, int], ...] = ()
    """Error and loss counters that grew within the window, by how much."""
    port_bytes: int = 0
    """What the device counted within the window, in both directions, whoever moved it."""
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
        return f"rank {self.rank} of this host is held up itself, in {where}{because}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything around one rank that is suspected."""

    process: ProcessFacts
    rails: tuple[RailSigns, ...]
    """Those that it uses, or all of its namespace where that is not known."""
    peers: tuple[RankFacts, ...]
    """Other ranks of the communicator on this host."""
    peer_processes: tuple[tuple[int, ProcessFacts], ...] = ()
    """By pid, of those peers."""
    waits_for: tuple[int, ...] = ()
    """Ranks from which the operation waits to receive."""
    hidden: str = ""
    """Why its connections cannot be seen; empty: they can."""
    others: int = 0
    """Other communicators of its process, to which closed connections and unread bytes may as well belong."""
    gone: tuple[GonePeer, ...] = ()
    """Peers of this host whose process ended while it was in use, the first one first."""
    elsewhere: tuple[Elsewhere, ...] = ()
    """Peers that are not in this communicator's operation, as far as one sees, because another one holds them up."""
    sends: bool | None = None
    """Whether the process handed anything to a network device within the last moments; None: not observed."""

    @property
    def unread_bytes(self) -> int:
        """What peers sent and this rank does not read: on every rail where it is connected, or it waits for another."""
        connected = [rail for rail in self.rails if rail.connections]
        return sum(rail.unread_bytes for rail in connected) if all(rail.unread_bytes for rail in connected) else 0

    def of_peer(self, pid: int) -> ProcessFacts | None:
        return next((facts for number, facts in self.peer_processes if number == pid), None)


@dataclass(frozen=True, slots=True)
class Blame:
    """Who is to blame, and why one thinks so."""

    cause: Cause
    evidence: tuple[str, ...]
    """Sentences, the weightiest first."""
    culprit: bool
    """Whether somebody on this host is to blame: such a finding needs less time than a mere wait."""
    excused: bool = False
    """Whoever is waited for is seen at work that comes to an end, as a checkpoint does: no stall, however long."""
    blamed_rank: int | None = None
    rail: str = ""
    device: str = ""
    netns: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """One rank's operation that does not come to its end."""

    instance: int
    comm: str
    rank: str
    nranks: str
    pid: int
    op: str
    payload_bytes: int | None
    since_ns: int
    """When the operation was handed over."""
    flagged_ns: int
    realtime_offset_ns: int
    """The time of day less CLOCK_MONOTONIC, read once when it was found: what is told of its times never changes."""
    strength: Strength
    blame: Blame
    slow: bool = False
    """Operations complete, but take much longer than they did; False: one does not complete."""
    ended_ns: int | None = None

    @property
    def since_realtime_ns(self) -> int:
        return self.since_ns + self.realtime_offset_ns

    @property
    def flagged_realtime_ns(self) -> int:
        return self.flagged_ns + self.realtime_offset_ns

    @property
    def ended_realtime_ns(self) -> int | None:
        return None if self.ended_ns is None else self.ended_ns + self.realtime_offset_ns

    def length_ns(self, now_ns: int) -> int:
        return max(0, (self.ended_ns or now_ns) - self.since_ns)
