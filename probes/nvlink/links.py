"""Reads what one GPU's NVLinks have carried, from NVML's field values, and how often those change.

NVML answers for each value apart: a successful call may hold values that this GPU or driver does not support, and
those are left out rather than shown as 0.  What is supported is learnt by asking for everything, so a sweep asks only
for what has an answer.  A link tells some twenty values, of which all but its bytes hardly ever change: what is made of
them is made anew only for links where one did.

Bytes come from the first of three pairs of counters that a link supports, and a link says which:

* `data`: payload, in KiB (Ampere, Hopper);
* `link`: bytes on the link (the counters that came with NVLink 5);
* `raw`: payload and protocol, in KiB.

Where no single link can be asked, the sum over all links is taken.  Meaning and units: field values in NVIDIA's NVML
API reference.  `nvmlDeviceGetPcieThroughput` is not used: it blocks for 20 ms and gives a rate; the cumulative
counters of PCIe bytes are read where they have 64 bits, since narrower ones could wrap unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, TypeVar

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.nvlink.nvml import (
    ALL_LINKS,
    SUCCESS,
    Fabric,
    FieldValues,
    Handle,
    NvmlError,
    NvmlSession,
    Questions,
)

MOST_LINKS: Final = 36
"""NVML_NVLINK_MAX_LINKS of the newest bindings."""

_KIB: Final = 1024
_LOOK_NS: Final = 250_000_000
_PAUSE_SECONDS: Final = 0.002
_FEWEST_CHANGES: Final = 4


@dataclass(frozen=True, slots=True)
class ByteCounters:
    """One way in which transmitted and received bytes are counted."""

    counted: str
    transmit_field: int
    receive_field: int
    unit_bytes: int

    @property
    def fields(self) -> tuple[int, int]:
        return self.transmit_field, self.receive_field


BYTE_COUNTERS: Final = (
    ByteCounters("data", 138, 139, _KIB),
    ByteCounters("link", 202, 204, 1),
    ByteCounters("raw", 140, 141, _KIB),
)
"""Best first."""

ERROR_FIELDS: Final = {
    161: "replay",
    162: "recovery",
    163: "crc",
}
"""By link."""
NEWER_ERROR_FIELDS: Final = {
    206: "malformed_packet",
    207: "buffer_overrun",
    208: "receive",
    209: "receive_remote",
    210: "receive_general",
    211: "local_link_integrity",
    212: "transmit_discard",
    213: "recovery_successful",
    214: "recovery_failed",
    215: "recovery_events",
    219: "effective",
    221: "symbol",
}
"""By link; they came with NVLink 5."""
GPU_ERROR_FIELDS: Final = {38: "crc_flit", 45: "crc_data", 52: "replay", 59: "recovery"}
"""Summed over a GPU's links; used where links cannot be asked."""
SPEED_FIELD: Final = 164
"""MB/s of one direction."""
_SPEED_UNIT_BYTES: Final = 1_000_000
_STATE_FIELD: Final = 165
"""Of a link, from Hopper on (NCCL asks for it so, src/graph/xml.cc); elsewhere a call tells it, link by link."""
_PCIE_TRANSMIT: Final = (197, 0)
_PCIE_RECEIVE: Final = (198, 0)
"""Field and scope."""

_REMOTE_TYPES: Final = {0: "gpu", 1: "ibm_npu", 2: "switch"}

_LEARN_NS: Final = 30_000_000_000
"""How often everything is asked for again: links come up, get other neighbours, the fabric completes."""

_NOTHING: Final = FieldValues(np.zeros(0, np.uint32), np.zeros(0, np.uint64), np.zeros(0, np.bool_))

_Wanted = tuple[int, int]
"""Field and scope."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class LinkReading:
    """One link at one moment; None: not supported."""

    link: int | None
    """None: all links of the GPU together."""
    up: bool | None
    """Whether the link is active or asleep; None for all together."""
    counted: str | None
    """Which bytes: `data`, `link`, `raw`."""
    transmit_bytes: int | None
    receive_bytes: int | None
    errors: tuple[tuple[str, int], ...]
    """(kind, count)."""
    speed_bytes_per_second: int | None
    remote: str | None
    """PCI address of the GPU or switch at the other end."""
    remote_type: str | None
    """`gpu`, `switch`, `ibm_npu`."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All links of one GPU at one moment."""

    before_ns: int
    """Monotonic time when the read began."""
    after_ns: int
    links: tuple[LinkReading, ...]
    fabric: Fabric | None
    pcie_transmit_bytes: int | None
    pcie_receive_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Neighbour:
    remote: str | None
    remote_type: str | None


@dataclass(frozen=True, slots=True)
class _Places:
    """Where in a sweep's answers those of one link stand: to look each up by its name takes longer than to ask."""

    kind: ByteCounters | None
    transmit: int
    receive: int
    """Among what moves."""
    errors: tuple[tuple[str, int], ...]
    """(kind of error, place); this and what follows among what rests."""
    speed: int | None
    state: int | None

    def resting(self, told: Sequence[int | None]) -> _Resting:
        speed = None if self.speed is None else told[self.speed]
        state = None if self.state is None else told[self.state]
        return _Resting(
            up=None if state is None else state != 0,
            errors=tuple([(kind, count) for kind, place in self.errors if (count := told[place]) is not None]),
            speed_bytes_per_second=None if speed is None else speed * _SPEED_UNIT_BYTES,
        )


@dataclass(frozen=True, slots=True)
class _Resting:
    """What hardly ever changes of a link; None and empty: not told."""

    up: bool | None
    errors: tuple[tuple[str, int], ...]
    speed_bytes_per_second: int | None


class _Sweep:
    """What is asked of one GPU in one call: first what moves, the counters of bytes, then what rests."""

    def __init__(
        self,
        counters: Mapping[int, ByteCounters],
        errors: Mapping[int, Sequence[tuple[str, _Wanted]]],
        others: Sequence[_Wanted],
        pcie: Sequence[_Wanted],
        links: Sequence[int],
    ) -> None:
        """By scope `counters` and `errors`; `others` are speeds and states, `pcie` counters of bytes."""
        moving = [(field, scope) for scope, kind in counters.items() for field in kind.fields] + list(pcie)
        owned = [(scope, pair) for scope, pairs in errors.items() for _, pair in pairs]
        owned += [(pair[1], pair) for pair in others]
        resting = [pair for _, pair in owned]
        at, then = ({pair: place for place, pair in enumerate(pairs)} for pairs in (moving, resting))
        self._moving = len(moving)
        self.questions = Questions(moving + resting)
        self.places = {
            scope: _Places(
                kind := counters.get(scope),
                at[kind.transmit_field, scope] if kind is not None else 0,
                at[kind.receive_field, scope] if kind is not None else 0,
                tuple((name, then[pair]) for name, pair in errors.get(scope, ())),
                then.get((SPEED_FIELD, scope)),
                then.get((_STATE_FIELD, scope)),
            )
            for scope in (*links, ALL_LINKS)
        }
        """By link, and ALL_LINKS."""
        self.pcie = at.get(_PCIE_TRANSMIT), at.get(_PCIE_RECEIVE)
        """Places of the bytes transmitted and received over PCIe."""
        self._owners = np.array([scope for scope, _ in owned], np.int64)
        self._last: FieldValues | None = None
        self._resting = {scope: places.resting([None] * len(resting)) for scope, places in self.places.items()}

    def __bool__(self) -> bool:
        return self.questions.length.value > 0

    def moving(self, answers: FieldValues) -> list[int | None]:
        return answers.part(0, self._moving).told()

    def resting(self, answers: FieldValues) -> Mapping[int, _Resting]:
        """By scope; equal answers give the same objects again."""
        now, last = answers.part(self._moving), self._last
        if last is None:
            changed = set(self._owners.tolist())
        else:
            changed = set(self._owners[(now.values != last.values) | (now.codes != last.codes)].tolist())
        self._last = now
        if changed:
            told = now.told()
            self._resting |= {scope: self.places[scope].resting(told) for scope in changed}
        return self._resting


class GpuLinks:
    """Reads one GPU; not thread-safe."""

    def __init__(self, session: NvmlSession, gpu: Handle, clock: Clock, *, phase: float = 0.0) -> None:
        """`phase`: by what share of its period learning comes earlier, so that GPUs do it in turn."""
        self._session = session
        self._gpu = gpu
        self._clock = clock
        self._phase_ns = round(phase * _LEARN_NS)
        self._learnt: int | None = None
        """In which period everything was asked for last."""
        self._neighbours: dict[int, _Neighbour] = {}
        """By link: those that the GPU has."""
        self._counters: dict[int, ByteCounters] = {}
        """By scope: how its bytes are counted."""
        self._sweep = _Sweep({}, {}, (), (), ())
        self._fabric: Fabric | None = None
        self._trouble: NvmlError | None = None
        """Why something could not be learnt although it may be supported."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Links that the GPU has; none before a read."""
        return tuple(self._neighbours)

    @property
    def first_byte_field(self) -> tuple[int, int] | None:
        """Field and scope of one byte counter, to see how often it changes; None before a read, or without any."""
        return next(((kind.transmit_field, scope) for scope, kind in self._counters.items()), None)

    def read(self) -> GpuReading:
        """Read every link.

        Raises:
            NvmlError: the GPU or the driver does not answer, or nothing of what it supports could be read.
        """
        before_ns = self._clock.monotonic_ns()
        period = (before_ns + self._phase_ns) // _LEARN_NS
        if self._learnt != period:
            self._find_fields()
            self._learnt = period
        answers = self._ask(self._sweep.questions) if self._sweep else _NOTHING
        moving, resting = self._sweep.moving(answers), self._sweep.resting(answers)
        states = {
            link: self._state(link) if self._sweep.places[link].state is None else resting[link].up
            for link in self._neighbours
        }
        after_ns = self._clock.monotonic_ns()
        links = [self._link(link, states[link], moving, resting[link]) for link in self._neighbours]
        if (together := self._together(moving, resting[ALL_LINKS])) is not None:
            links.append(together)
        transmitted, received = (None if place is None else moving[place] for place in self._sweep.pcie)
        return GpuReading(before_ns, after_ns, tuple(links), self._fabric, transmitted, received)

    def _find_fields(self) -> None:
        """Ask for everything there may be.

        Raises:
            NvmlError: as for `read`; what was learnt before stays.
        """
        self._trouble = None
        neighbours = self._find_links()
        scopes = list(neighbours)
        # A choice once made is kept, so that an answer missed once does not change what is counted.
        counters = {scope: kind for scope, kind in self._counters.items() if scope in neighbours}
        for kind in BYTE_COUNTERS:
            self._choose(kind, [link for link in scopes if link not in counters], counters)
        for kind in BYTE_COUNTERS:
            if scopes and not counters:
                self._choose(kind, [ALL_LINKS], counters)
        if self._trouble is not None and scopes and not counters:
            raise self._trouble
        errors = self._find_error_fields(scopes)
        others = self._supported([(SPEED_FIELD, link) for link in scopes])
        others += self._supported([(_STATE_FIELD, link) for link in scopes])
        pcie = self._supported([_PCIE_TRANSMIT, _PCIE_RECEIVE], only_wide=True)
        self._fabric = self._optional(self._session.fabric, self._gpu)
        self._sweep = _Sweep(counters, errors, others, pcie, scopes)
        self._neighbours, self._counters = neighbours, counters

    def _find_links(self) -> dict[int, _Neighbour]:
        neighbours = {}
        for link in range(MOST_LINKS):
            try:
                self._session.link_state(self._gpu, link)
            except NvmlError as error:
                if error.lost:
                    raise
                if error.absent:
                    continue  # a card may lack some links in the middle
                self._trouble = error
            neighbours[link] = self._neighbour(link)
        return neighbours

    def _choose(self, kind: ByteCounters, scopes: Sequence[int], counters: dict[int, ByteCounters]) -> None:
        """Count bytes in this way where a scope supports both of its counters."""
        supported = set(self._supported([(field, scope) for scope in scopes for field in kind.fields]))
        for scope in scopes:
            if supported.issuperset((field, scope) for field in kind.fields):
                counters[scope] = kind

    def _find_error_fields(self, scopes: Sequence[int]) -> dict[int, list[tuple[str, _Wanted]]]:
        errors: dict[int, list[tuple[str, _Wanted]]] = {}
        for names in (ERROR_FIELDS, NEWER_ERROR_FIELDS):
            for field, link in self._supported([(field, link) for field in names for link in scopes]):
                errors.setdefault(link, []).append((names[field], (field, link)))
        if scopes and not errors:
            found = self._supported([(field, 0) for field in GPU_ERROR_FIELDS])
            if found:
                errors[ALL_LINKS] = [(GPU_ERROR_FIELDS[pair[0]], pair) for pair in found]
        return errors

    def _supported(self, pairs: Sequence[_Wanted], *, only_wide: bool = False) -> list[_Wanted]:
        """Those of the pairs that have a value now; a driver too old for a field may refuse the whole call."""
        if not pairs:
            return []
        try:
            answers = self._ask(Questions(pairs))
        except NvmlError as error:
            if error.lost:
                raise
            if not error.absent:
                self._trouble = error
            return []
        told = (answers.codes == SUCCESS) & (answers.wide | (not only_wide))
        return [pairs[place] for place in told.nonzero()[0].tolist()]

    def _ask(self, questions: Questions) -> FieldValues:
        """Ask once.

        Raises:
            NvmlError: the call failed, or no value could be had and at least one for another reason than absence.
        """
        answers = self._session.field_values(self._gpu, questions)
        if answers.codes.any():
            for code in set(answers.codes.tolist()) - {SUCCESS}:
                error = NvmlError("nvmlDeviceGetFieldValues", code, self._session.error_text(code))
                if error.lost or not (error.absent or SUCCESS in answers.codes):
                    raise error
        return answers

    def _state(self, link: int) -> bool | None:
        state = self._optional(self._session.link_state, self._gpu, link)
        return None if state is None else state != 0

    def _neighbour(self, link: int) -> _Neighbour:
        remote = self._optional(self._session.remote_pci_address, self._gpu, link)
        kind = self._optional(self._session.remote_device_type, self._gpu, link)
        return _Neighbour(remote, _REMOTE_TYPES.get(kind) if kind is not None else None)

    def _optional(self, ask: Callable[..., _Answer], *arguments: object) -> _Answer | None:
        """What NVML answers; None where it does not, and the counters may be readable all the same."""
        try:
            return ask(*arguments)
        except NvmlError as error:
            if error.lost:
                raise
            return None

    def _link(self, link: int, up: bool | None, moving: Sequence[int | None], resting: _Resting) -> LinkReading:
        neighbour = self._neighbours[link]
        counted, transmit_bytes, receive_bytes = _bytes(self._sweep.places[link], moving)
        return LinkReading(
            link=link,
            up=up,
            counted=counted,
            transmit_bytes=transmit_bytes,
            receive_bytes=receive_bytes,
            errors=resting.errors,
            speed_bytes_per_second=resting.speed_bytes_per_second,
            remote=neighbour.remote,
            remote_type=neighbour.remote_type,
        )

    def _together(self, moving: Sequence[int | None], resting: _Resting) -> LinkReading | None:
        counted, transmit_bytes, receive_bytes = _bytes(self._sweep.places[ALL_LINKS], moving)
        if counted is None and not resting.errors:
            return None
        return LinkReading(None, None, counted, transmit_bytes, receive_bytes, resting.errors, None, None, None)


def _bytes(places: _Places, values: Sequence[int | None]) -> tuple[str | None, int | None, int | None]:
    """Which bytes, transmitted, received: both or none, so that a link is never shown half."""
    kind = places.kind
    if kind is None:
        return None, None, None
    transmit, receive = values[places.transmit], values[places.receive]
    if transmit is None or receive is None:
        return None, None, None
    return kind.counted, transmit * kind.unit_bytes, receive * kind.unit_bytes


def refresh_seconds(session: NvmlSession, gpu: Handle, field: tuple[int, int], clock: Clock) -> float | None:
    """How often NVML renews a (field, scope): median time between two changes, watched for a quarter of a second.

    Sampling faster than NVML's counters change shows the same value twice, then a jump.  As fine as the looks are
    apart, about 2 ms.  None: it changed too rarely to tell, as on an idle link.

    Raises:
        NvmlError: the field cannot be read any more.
    """
    started_ns = clock.monotonic_ns()
    question = Questions([field])
    changes_ns: list[int] = []
    last: int | None = None
    while (now_ns := clock.monotonic_ns()) - started_ns < _LOOK_NS:
        (value,) = session.field_values(gpu, question).told()
        if value is None:
            return None
        if last is not None and value != last:
            changes_ns.append(now_ns)
        last = value
        clock.sleep(_PAUSE_SECONDS)
    if len(changes_ns) < _FEWEST_CHANGES:
        return None
    return median(after - before for before, after in pairwise(changes_ns)) / 1e9
