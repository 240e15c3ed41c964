"""The matrix as data: which fault, on which library and how many hosts, and what must be said of it.

Every fault has its place: by default the last host, its rank (one a host) and the last rail.  Limits are those of
AGENT: short, so that a run is short; what is named on a host is flagged after 2 s, what the kernel tells at once, and a
mere wait after AFTER_SECONDS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from railscope.testbed.job import GptShape, JobOptions, Moments, SkippedCall, SlowSteps, Writer

AFTER_SECONDS: Final = 6
AGENT: Final = ("--stall.after", f"{AFTER_SECONDS}s", "--probe.scan-interval", "500ms")
LINE_MBIT: Final = 400
"""Rate of every rail where one of them is to become slow: a veth has none of its own."""
PACE_SECONDS: Final = 60
"""Longer than `railscope diagnose` takes to call a rank slow."""
CRAWL_MBIT: Final = 40
"""All rails alike."""


class Library(StrEnum):
    """What the ranks call."""

    WORKLOAD = "workload"
    """The testbed's own library with NCCL's interface: calls are all that is seen."""
    NCCL = "nccl"
    """The real NCCL on the CUDA test double: completion, proxy operations and internals too."""


class Kind(StrEnum):
    """What happens."""

    STOP = "SIGSTOP"
    KILL = "SIGKILL"
    LINK_DOWN = "link down"
    SLOW = "rail at 10 %"
    SLOW_IN_SWITCH = "rail at 10 %, in the switch"
    AT_30_PERCENT = "rail at 30 %"
    AT_60_PERCENT = "rail at 60 %"
    FILTER = "nft drop"
    FILTER_IN_SWITCH = "drop in the switch"
    STARVE = "CPU-starved"
    SKIP = "skipped collective"
    NO_PEER = "init whose peer never comes"
    NO_SPLIT = "split that a rank leaves out"
    RECEIVES = "both receive first"
    REPLACE = "replaced by execve"
    FREEZE = "frozen control group"
    LARGE_DROPPED = "only large packets dropped"
    KILL_ALL = "whole job killed"
    KILL_HOST = "all ranks of a host killed"
    CIRCLE = "both receive, and exchanged before"
    SLOW_RANK = "straggler"
    DISAGREE = "another operation at the same place"
    LOSS = "2 % of the packets lost in the switch"
    FOREIGN = "foreign traffic"
    NOTHING = "nothing"


CALL_KINDS: Final = frozenset({Kind.NO_PEER, Kind.NO_SPLIT, Kind.RECEIVES})
"""What happens as the job begins: ranks stay inside a call."""
RAIL_KINDS: Final = frozenset(
    {Kind.LINK_DOWN, Kind.SLOW, Kind.SLOW_IN_SWITCH, Kind.FILTER, Kind.FILTER_IN_SWITCH, Kind.LARGE_DROPPED}
    | {Kind.AT_30_PERCENT, Kind.AT_60_PERCENT, Kind.LOSS}
)
MERELY_SLOW_MBIT: Final = {Kind.AT_30_PERCENT: 3 * LINE_MBIT // 10, Kind.AT_60_PERCENT: 6 * LINE_MBIT // 10}
"""Rate of a rail that is merely slow."""
IN_SWITCH: Final = frozenset({Kind.SLOW_IN_SWITCH, Kind.FILTER_IN_SWITCH, Kind.LARGE_DROPPED, Kind.LOSS})
"""Both ends of the way see the same."""
OF_NOBODY: Final = frozenset({Kind.RECEIVES, Kind.CIRCLE, Kind.DISAGREE})
"""No rank is to blame more than another."""
OF_THE_JOB: Final = frozenset({Kind.SKIP, Kind.REPLACE, Kind.CIRCLE, Kind.SLOW_RANK, Kind.DISAGREE})
"""The job itself does it."""


@dataclass(frozen=True, slots=True)
class Load:
    """One job: what its ranks do, in words that both libraries understand."""

    size_bytes: int = 1 << 20
    pace_us: int = 30_000
    ranks_per_host: int = 1
    pattern: str = "allreduce"
    """Of the NCCL driver; the workload library has AllReduce only, or a GPT."""
    shape: GptShape | None = None
    """Of a GPT for the workload library, whose ranks have several communicators each; None: one for all ranks."""
    iterations: int | None = None
    """None: until the scenario is over."""
    destroy: bool = True
    hold: bool = False
    """Ranks of the real NCCL stay after their last operation, as those of the workload library always do."""
    pause: Moments | None = None
    checkpoint: Moments | None = None
    checkpoint_by: Writer = Writer.SELF
    slow: SlowSteps | None = None
    warm_up_ms: int = 0
    late_ms: int = 0
    """How late the last rank comes to the making of the communicator."""
    skip: SkippedCall | None = None

    def options(self) -> JobOptions:
        """For the workload library."""
        return JobOptions(
            pattern="inference" if self.shape is None else "gpt",
            shape=self.shape,
            seconds=3600 if self.iterations is None else None,
            iterations=self.iterations,
            ranks_per_host=self.ranks_per_host,
            bytes=self.size_bytes if self.shape is None else None,
            calls=1 if self.shape is None else None,
            verify=False,
            batch=1_000_000_000,
            destroy=self.destroy,
            linger=True,
            pace_us=self.pace_us,
            pause=self.pause,
            checkpoint=self.checkpoint,
            checkpoint_by=self.checkpoint_by,
            slow=self.slow,
            warm_up_ms=self.warm_up_ms,
            late_ms=self.late_ms,
            hold=self.late_ms > 0,
            # A launcher names its job: by that and its rank a process is known that makes no communicator.
            environment={"TORCHELASTIC_RUN_ID": f"late-{self.late_ms}"} if self.late_ms else {},
            skip=self.skip,
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be said while the fault lasts."""

    causes: frozenset[str]
    """Each of them is right; none: nothing may be said at all."""
    host: int | None = None
    """On which host's agent; None: on any."""
    rank: int | None = None
    """To blame; None: nobody."""
    rail: int | None = None
    """To blame; None: none."""
    verdict: str = ""
    """The cause by `railscope diagnose`, where that names all ranks of the communicator; empty: one of the causes."""
    flag_allowed: bool = False
    """With no causes: a flag that clears by itself is no error, if it names the right one."""
    writer: int | None = None
    """With no causes: this rank, on host 0, writes to storage for longer than a wait may take.  Other hosts cannot know
    and may say that they wait, for it or for nobody; its own host, `railscope diagnose` and the alerts say nothing."""
    clears: bool = True
    within_seconds: float | None = None
    """It is named so soon after it happened; None: whenever its limit allows."""
    pace: bool = False
    """Nothing hangs: hosts call nobody stalled, unless by the right rail, and `railscope diagnose` and an alert tell at
    whose pace all go, a rank's or a rail's; with no causes neither does."""

    @property
    def silent(self) -> bool:
        return not self.causes


@dataclass(frozen=True, slots=True)
class Scenario:
    """One line of the matrix."""

    name: str
    library: Library
    hosts: int
    kind: Kind
    expected: Expected
    loads: tuple[Load, ...] = (Load(),)
    """The first is the one that suffers; the others share its rails."""
    host: int = -1
    """Where it happens; negative: counted from the last."""
    rail: int = 1
    fault_seconds: float = 20.0
    """At most: it is undone two seconds after it was flagged, unless `full_length`."""
    full_length: bool = False
    warm_seconds: float = 6.0
    """From the first call to the fault, for the agent to learn what is usual."""
    line_mbit: int | None = None
    restart_agent: bool = False
    """Of the host where it happens, once the fault was flagged."""
    hide_host: bool = False
    """Prometheus does not scrape the host where it happens."""

    @property
    def control(self) -> bool:
        return self.expected.silent

    @property
    def place(self) -> int:
        """The host where it happens."""
        return self.host % self.hosts

    @property
    def target(self) -> int:
        """The rank to whom it happens: the first of its host."""
        return self.place * self.loads[0].ranks_per_host


NO_STALL: Final = Expected(frozenset())


_AT_ONCE_SECONDS: Final = 1.0
"""What the kernel tells, with time for a machine that is busy: it takes a quarter of that."""


def rank_fault(*causes: str, clears: bool = True, verdict: str = "", within_seconds: float | None = None) -> Expected:
    """Filled in by `fault`: the rank of the place."""
    return Expected(frozenset(causes), clears=clears, verdict=verdict, within_seconds=within_seconds)


_EXPECTED: Final = {
    Kind.STOP: rank_fault("process_stopped", within_seconds=_AT_ONCE_SECONDS),
    Kind.KILL: rank_fault("process_gone", clears=False),
    Kind.STARVE: rank_fault("rank_behind"),
    Kind.SKIP: rank_fault("rank_behind", clears=False),
    Kind.NO_PEER: rank_fault("inside_call", clears=False),
    Kind.NO_SPLIT: rank_fault("inside_call", clears=False),
    Kind.RECEIVES: rank_fault("inside_call", clears=False),
    Kind.CIRCLE: rank_fault("rank_behind", clears=False, verdict="deadlock"),
    # That all processes of a host end together is an end there; the other hosts' ranks wait.
    Kind.KILL_HOST: rank_fault("peer_left", "rank_behind", clears=False),
    Kind.DISAGREE: rank_fault("rank_behind", clears=False, verdict="ranks_disagree"),
    Kind.REPLACE: rank_fault("process_gone", clears=False),
    Kind.FREEZE: rank_fault("process_frozen"),
    # Where TCP has no SACK, what arrives beyond a missing segment is forgotten at the next time-out.
    Kind.LARGE_DROPPED: rank_fault("rail_mtu", "rail_filtered"),
    Kind.LINK_DOWN: rank_fault("rail_down", within_seconds=_AT_ONCE_SECONDS),
    Kind.SLOW_RANK: replace(rank_fault("rank_slow"), pace=True),
    **dict.fromkeys((Kind.AT_30_PERCENT, Kind.AT_60_PERCENT), replace(rank_fault("rail_slow"), pace=True)),
    Kind.LOSS: replace(rank_fault("rail_lossy"), pace=True),
    Kind.SLOW: rank_fault("rail_slow"),
    Kind.SLOW_IN_SWITCH: rank_fault("rail_slow", "rail_lossy"),
    Kind.FILTER: rank_fault("rail_filtered"),
    Kind.FILTER_IN_SWITCH: rank_fault("rail_filtered", "rail_lossy"),
}


_SEEN_ELSEWHERE: Final = IN_SWITCH | CALL_KINDS | OF_NOBODY | {Kind.SKIP, Kind.KILL_HOST}
NEVER_MS: Final = 3_600_000


def fault(kind: Kind, library: Library, hosts: int, name: str = "", **settings: Any) -> Scenario:
    """A scenario with what is expected of its kind, named after it."""
    scenario = Scenario(name or kind.value, library, hosts, kind, NO_STALL, **settings)
    usual = _EXPECTED[kind]
    expected = Expected(
        causes=usual.causes,
        # A rank that skips a call has nothing in flight: the others' agents say that they wait.  Of what happens in
        # the switch both ends of the way see the same.  Who is inside a call is told of by his own host, which cannot
        # know who is missing.
        host=None if kind in _SEEN_ELSEWHERE else scenario.place,
        rank=None if kind in RAIL_KINDS or kind in OF_NOBODY else scenario.target,
        rail=scenario.rail if kind in RAIL_KINDS else None,
        clears=usual.clears,
        verdict=usual.verdict,
        within_seconds=usual.within_seconds,
        pace=usual.pace,
    )
    return replace(scenario, expected=expected)


def long_checkpoint(name: str, library: Library, load: Load) -> Scenario:
    """Rank 0 writes for longer than the limit of a mere wait, at least once from its beginning to its end."""
    writes = replace(load, checkpoint=Moments(40, 14_000))
    expected = Expected(frozenset(), writer=0)
    return Scenario(name, library, 2, Kind.NOTHING, expected, loads=(writes,), warm_seconds=0.5, fault_seconds=20)


def even_pace(name: str, library: Library, load: Load, line_mbit: int | None = None) -> Scenario:
    """A job without a rank or a rail that is slower than the others most of the time."""
    expected = Expected(frozenset(), pace=True)
    scenario = Scenario(name, library, 2, Kind.NOTHING, expected, loads=(load,), warm_seconds=1)
    return replace(scenario, fault_seconds=PACE_SECONDS, line_mbit=line_mbit)


def control(name: str, library: Library, hosts: int = 2, kind: Kind = Kind.NOTHING, **settings: Any) -> Scenario:
    """A scenario in which nobody may be called stalled."""
    return Scenario(name, library, hosts, kind, NO_STALL, **settings)
