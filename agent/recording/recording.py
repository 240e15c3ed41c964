"""The content of a flight recording: the last moments of a host, with all that a reader needs later.

Events are numpy structured arrays, oldest first; the probes' own dtypes where there are such.  Every `…_ns` in them is
CLOCK_MONOTONIC of the recorded host; `clocks` lead from there to the time of day.  Who is who stands beside them:
`instance` of a call or a completion names a communicator, `device` of a sample or a link event names a rail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from railscope.agent.facts.clocks import ClockReading
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.records.calls import CALL_EVENT, LIFECYCLE_EVENT, LifecycleKind
from railscope.probes.nccl.records.internals import COMPLETION_EVENT, CONNECTION, OPERATION

NOT_SEEN: Final = "completion was not observed (level counts, or no network part)"
"""Where a recording has no operations that completed and none that did not."""
FILE_SUFFIX: Final = ".npz"
"""How names of recordings' files end; `record -o` of any other name means a dataset's folder."""
FORMAT_VERSION: Final = 5
"""Of the file; another dtype, other fields or another meaning of one is another version."""
STALL: Final = "stall"
SIGNAL: Final = "signal"
"""Why an agent makes a recording by itself, and when it is asked to."""
UNKNOWN_CARRIER: Final = -1
_BIRTHS: Final = (
    LifecycleKind.INIT,
    LifecycleKind.INIT_ALL,
    LifecycleKind.SPLIT,
    LifecycleKind.SHRINK,
    LifecycleKind.GROW,
)

RAIL_SAMPLE: Final = np.dtype(
    [("time_ns", "<u8"), ("transmit_bytes", "<u8"), ("receive_bytes", "<u8"), ("device", "<u4"), ("reserved", "<u4")]
)
"""Port bytes as the device itself counted them at one moment; where they fall, it has begun anew."""
LINK_EVENT: Final = np.dtype(
    [
        *(("time_ns", "<u8"), ("speed_bytes_per_second", "<u8"), ("carrier_changes", "<u8"), ("device", "<u4")),
        *(("up", "i1"), ("carrier", "i1"), ("present", "u1"), ("reserved", "u1")),
    ]
)
"""How a rail's link was found when something about it had changed, the first time included.  `up` and `carrier`: 1,
0, or -1 where it is not known.  `carrier_changes` counts the flaps in between, too; `present` 0: the device is gone."""
LOSS: Final = np.dtype([("time_ns", "<u8"), ("calls", "<u8"), ("completions", "<u8"), ("lifecycle", "<u8")])
"""Events that the kernel's rings had no room for, as totals: what two moments differ by was lost between them."""

KINDS: Final[Mapping[str, np.dtype[Any]]] = {
    "calls": CALL_EVENT,
    "completions": COMPLETION_EVENT,
    "rail_samples": RAIL_SAMPLE,
    "link_events": LINK_EVENT,
    "lifecycle": LIFECYCLE_EVENT,
    "losses": LOSS,
    "open_operations": OPERATION,
    "connections": CONNECTION,
}
"""Every array of a recording, by name."""


@dataclass(frozen=True, slots=True)
class RecordedCommunicator:
    """What one rank's end of one communicator did until the recording was made."""

    instance: int
    """What calls, completions and lifecycle events call it by."""
    identity: RankIdentity
    """In the file its fields lie among the others."""
    enqueued: int
    completed: int | None
    inflight_seconds: float | None
    alive: bool


@dataclass(frozen=True, slots=True)
class RecordedOwner:
    """Port bytes of one rail and direction that one owner moved and that came from one origin, as its ledger has them.

    Text, as of a stall: a release that knows other owners may read it.
    """

    direction: str
    """`transmit` or `receive`."""
    owner: str
    origin: str
    port_bytes: int
    error_ratio: float | None
    """Of all bytes of this rail and direction: half the width of the band that an owner or an origin may lie in."""


@dataclass(frozen=True, slots=True)
class RecordedRail:
    """One device whose bytes or link were recorded."""

    device: int
    """What samples and link events call it by."""
    name: str
    rail: str
    """The rail's number; empty: no number is known."""
    netns: str
    """Its network namespace, as communicators have it; empty: the agent's own, or the host's (RDMA)."""
    netns_inode: int
    """0: the host's RDMA devices, or a recorded tree."""
    pci: str
    driver: str
    speed_bytes_per_second: int | None
    owners: tuple[RecordedOwner, ...] = ()
    """Whose its bytes were, from the recorder's beginning on; empty: not known, or the recording began later."""


@dataclass(frozen=True, slots=True)
class RecordedStall:
    """The stall that a recording was made for, as `/stalls` shows it.

    Not the node's Stall: a file holds text and the time of day, and a release that knows other causes may read it.  It
    holds no RankIdentity: the recording's communicator of this name and rank does.
    """

    comm: str
    rank: str
    nranks: str
    """Empty: not known, as in a dataset folder."""
    pid: int
    """Of the process that waits; 0: not known, as in older dataset folders."""
    op: str
    peer: str
    """Other end of a transfer of another library, as that calls it, or an address; empty: not known, or NCCL's."""
    cause: str
    strength: str
    since_realtime_ns: int
    seconds: float
    blamed_rank: str
    blamed_pid: int
    """Process of the same host at a transfer's other end that is to blame; 0: none is known."""
    rail: str
    device: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened, in words."""

    time_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Recording:
    """One host's last moments."""

    railscope: str
    """Version of railscope that recorded."""
    host: str
    boot_id: str
    """Recordings of one boot share their monotonic clock; empty: not known."""
    kernel: str
    simulated: bool
    reason: str
    """Why it was made: `stall`, `signal`, `record`."""
    began_ns: int
    """What happened before is not in it, on the monotonic clock."""
    ended_ns: int
    clocks: tuple[ClockReading, ...]
    """Oldest first; the last one is of the end."""
    communicators: tuple[RecordedCommunicator, ...]
    rails: tuple[RecordedRail, ...]
    complete_from_ns: Mapping[str, int]
    """By kind: everything that the recorder was given since then is there; later than `began_ns` where memory was
    short."""
    stalls: tuple[RecordedStall, ...] = ()
    marks: tuple[Mark, ...] = ()
    arrays: Mapping[str, Records] = field(default_factory=dict)
    """By the names of `KINDS`; all of them are there."""

    @property
    def calls(self) -> Records:
        """NCCL calls as they entered the library: dtype CALL_EVENT."""
        return self.arrays["calls"]

    @property
    def completions(self) -> Records:
        """Operations that NCCL's network threads completed: dtype COMPLETION_EVENT."""
        return self.arrays["completions"]

    @property
    def rail_samples(self) -> Records:
        """Port bytes: dtype RAIL_SAMPLE."""
        return self.arrays["rail_samples"]

    @property
    def link_events(self) -> Records:
        """Links as they changed: dtype LINK_EVENT; what a rail was when the window began comes first."""
        return self.arrays["link_events"]

    @property
    def lifecycle(self) -> Records:
        """Communicators that came and went: dtype LIFECYCLE_EVENT."""
        return self.arrays["lifecycle"]

    @property
    def open_operations(self) -> Records:
        """Operations handed over and not complete at the end: dtype OPERATION."""
        return self.arrays["open_operations"]

    @property
    def connections(self) -> Records:
        """NCCL's network connections at the end: dtype CONNECTION."""
        return self.arrays["connections"]

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return (self.ended_ns - self.began_ns) / 1e9

    def numbered_from_start(self) -> dict[int, bool]:
        """By instance: whether its calls are numbered from its first one on, as those of other ranks are.

        They are where it was seen to be made.  Where the first that was seen of it was a call, earlier ones may be
        missing, and they count as not numbered so.  Of those that are missing, these events do not tell.
        """
        kinds, instances = self.lifecycle["kind"], self.lifecycle["instance"]
        late = dict.fromkeys(instances[kinds == LifecycleKind.SEEN].tolist(), False)
        return late | dict.fromkeys(instances[np.isin(kinds, _BIRTHS)].tolist(), True)

    def completion_seen(self) -> bool:
        """Whether anything told which operations completed, so that none unfinished means none."""
        living = [one for one in self.communicators if one.alive] or self.communicators
        told = not living or any(one.completed is not None for one in living)
        return told or bool(len(self.open_operations) or len(self.completions))

    def overwritten_seconds(self) -> dict[str, float]:
        """By kind: so much of the window's beginning is missing, since memory was short; only kinds with any."""
        return {
            kind: (complete_ns - self.began_ns) / 1e9
            for kind, complete_ns in self.complete_from_ns.items()
            if complete_ns > self.began_ns
        }

    def lost_events(self) -> dict[str, int]:
        """Events lost in the window by kind: the kernel's rings were full."""
        losses = self.arrays["losses"]
        if not len(losses):
            return {"calls": 0, "completions": 0, "lifecycle": 0}
        return {name: int(losses[-1][name]) - int(losses[0][name]) for name in ("calls", "completions", "lifecycle")}

    def realtime_ns(self, monotonic_ns: int) -> int:
        """The time of day of a moment: by the clock reading that is nearest to it."""
        nearest = min(reversed(self.clocks), key=lambda clock: abs(clock.monotonic_ns - monotonic_ns))
        return nearest.realtime_ns + monotonic_ns - nearest.monotonic_ns

    def realtime_error_ns(self) -> int | None:
        """The error bound of this recording's times of day; None: not known.

        The clock's own error, what reading it took, and how far the clock was stepped or slewed within the window.
        """
        errors = [clock.maximum_error_ns for clock in self.clocks if clock.synchronised]
        if len(errors) < len(self.clocks) or None in errors:
            return None
        offsets = [clock.realtime_ns - clock.monotonic_ns for clock in self.clocks]
        reading_ns = max(clock.uncertainty_ns for clock in self.clocks)
        return max(error or 0 for error in errors) + reading_ns + max(offsets) - min(offsets)
