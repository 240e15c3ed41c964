"""The facts of a stall: what is in flight, its usual duration, the cause, whom it names, where ranks disagree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.probes.processes.owner import ProcessOwner

Shape = TypeVar("Shape")
VERDICT_VERSION: Final = 1
"""Of the lines that the socket of verdicts writes: another number means that a field has another meaning."""
Confidence = Literal["low", "medium", "high"]
CONFIDENCES: Final[tuple[Confidence, ...]] = ("low", "medium", "high")
Strength = Literal["strong", "weak"]
"""`weak`: nothing saw the operation itself, and that one is in flight follows from other signs; or the other end of the
blamed rail may be the one to blame."""


def rail_name(rail: str, device: str, netns: str) -> str:
    """`rail 1 (eth1)`, with the namespace's label where the device's name is in several; `rail 1` without a device."""
    place = f"{device} in {netns}" if device and netns else device
    return f"rail {rail} ({place})" if place else f"rail {rail}"


def describe_operation(op: str, comm: str, rank: str, pid: int | str, peer: str = "") -> str:
    """Which operation, and whose: `AllReduce of rank 3 of 00c0ffee00c0ffee`, `nixl Write to decode-0 of process 4711`.

    `rank` may say of how many, too.  Where no communicator is known it is the process's.
    """
    whom = f" to {peer}" if peer else ""
    process = f"process {pid}" if pid and pid != UNKNOWN else "a process"
    whose = f"rank {rank} of {comm}" if comm not in ("", UNKNOWN) else process
    return f"{op}{whom} of {whose}"


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
    awaited: bool = False
    """Another rank is seen to wait for this one in it."""
    missing: bool = False
    """All others wait in it for this rank, whose process sleeps and does not read what it is sent."""
    estimated: bool = False
    """No probe is on calls: when the last one was made, and how many were, is known by NCCL's own numbers."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A collective that ranks of one communicator did not make alike, as NCCL asks them to."""

    number: int
    """Of the communicator's collectives, from 1; point to point has none."""
    made: tuple[tuple[tuple[int, ...], str], ...]
    """Ranks, and what they made there, as in `AllReduce of 4096 bytes float32`."""

    @property
    def odd_rank(self) -> int | None:
        """The only rank that differs from all others; None: no rank stands alone against several."""
        alone = [ranks[0] for ranks, _ in self.made if len(ranks) == 1]
        return alone[0] if len(self.made) == 2 and len(alone) == 1 else None

    @property
    def sentence(self) -> str:
        parts = [
            f"{what} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', …' * (len(ranks) > 8)}"
            for ranks, what in self.made
        ]
        return f"collective {self.number} is {', but '.join(parts)}"


@dataclass(frozen=True, slots=True)
class LastCollectives(Generic[Shape]):
    """The last collectives of one rank's end of a communicator, the latest last."""

    last: int
    """Number of the latest."""
    shapes: tuple[Shape, ...]

    @property
    def first(self) -> int:
        """Number of the earliest."""
        return self.last - len(self.shapes) + 1


_BETWEEN: Final = "; "
"""In a label that tells several shapes."""


def format_shapes(shapes: Iterable[str]) -> str:
    """As a label has them."""
    return _BETWEEN.join(shapes)


def parse_shapes(label: str) -> tuple[str, ...]:
    """The inverse of `format_shapes`."""
    return tuple(label.split(_BETWEEN)) if label else ()


def find_disagreement(
    ranks: Mapping[int, LastCollectives[Shape]], describe: Callable[[Shape], str]
) -> Disagreement | None:
    """The first collective, of those that are known of all of these ranks, that they did not make alike.

    None: there is none.  A rank that is behind has made fewer; those that it made are compared.
    """
    if len(ranks) < 2:
        return None
    for number in range(max(one.first for one in ranks.values()), min(one.last for one in ranks.values()) + 1):
        made: defaultdict[Shape, list[int]] = defaultdict(list)
        for rank, one in ranks.items():
            made[one.shapes[number - one.first]].append(rank)
        if len(made) > 1:
            groups = sorted((tuple(sorted(them)), describe(shape)) for shape, them in made.items())
            return Disagreement(number, tuple(groups))
    return None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The root cause that the evidence of one host supports, and the rank or rail to blame."""

    cause: Cause
    evidence: tuple[str, ...]
    """Sentences, the weightiest first."""
    culprit: bool
    """Whether the culprit is on this host: such a finding needs less time than a mere wait."""
    excused: bool = False
    """The awaited rank does work that comes to an end, as a checkpoint does: no stall, however long."""
    writes: bool = False
    """It is seen to write, and may pause in it now and then."""
    at_once: bool = False
    """Broken beyond doubt, and others wait because of it: where the kernel told when it began, no limit applies."""
    blamed_rank: int | None = None
    blamed_pid: int | None = None
    """Process at a transfer's other end that is to blame, where it is on this host; else None."""
    rail: str = ""
    device: str = ""
    netns: str = ""
    either_end: bool = False
    """The signs of this host do not tell which end of the rail is to blame: its other end has, or may have, the
    same."""


@dataclass(frozen=True, slots=True)
class Stall:
    """One rank's operation that does not complete in time."""

    instance: int
    """Of the communicator; of a call that does not return, a negative number of its own."""
    comm: str
    rank: str
    nranks: str
    pid: int
    op: str
    """An operation, or a call that does not return."""
    payload_bytes: int | None
    since_ns: int
    """When the operation was handed over."""
    flagged_ns: int
    realtime_offset_ns: int
    """The time of day less CLOCK_MONOTONIC, read once when it was found: its reported times never change."""
    flight_strength: Strength
    """How the operation is known to be in flight."""
    diagnosis: Diagnosis
    owner: ProcessOwner | None = None
    """Whose its process is; None: not known when it was found."""
    slow: bool = False
    """Operations complete, but take much longer than they did; False: one does not complete."""
    library: str = ""
    """Whose operation it is; empty: NCCL's."""
    peer: str = ""
    """Of a transfer of another library: its other end, as the library calls it, or by address; empty: not known."""
    ended_ns: int | None = None
    earlier: Diagnosis | None = None
    """What it was put down to before a process of it ended, if that was well founded."""

    @property
    def strength(self) -> Strength:
        """Of the evidence as a whole, as metrics, pages and recordings tell it."""
        return "weak" if self.diagnosis.either_end else self.flight_strength

    @property
    def confidence(self) -> Confidence:
        """How sure the verdict is, one of `CONFIDENCES`.

        `high`: the operation itself is seen to be in flight, and this host's evidence names the blamed rank or rail;
        `medium`: one of both holds; `low`: neither.
        """
        named = self.diagnosis.culprit and not self.diagnosis.either_end
        return CONFIDENCES[(self.flight_strength == "strong") + named]

    @property
    def is_call(self) -> bool:
        """Whether it is a call that does not return, and no operation."""
        return self.instance < 0

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


@dataclass(frozen=True, slots=True)
class ProcessStack:
    """Where the Python code of a process's main thread stood at one moment."""

    taken_ns: int
    """CLOCK_MONOTONIC."""
    lines: tuple[str, ...]
    """`function (file:line)`, innermost first; none: `why` says so."""
    why: str = ""
