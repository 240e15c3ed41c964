"""Reads what one GPU's NVLinks have carried, from NVML's field values, and how often those change.

NVML answers for each value apart: a successful call may hold values that this GPU or driver does not support, and
those are left out rather than shown as 0.  What is supported is learnt by asking for everything, so a sweep asks only
for what has an answer.

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

from railscope.probes.clock import Clock
from railscope.probes.nvlink.nvml import ALL_LINKS, SUCCESS, Fabric, FieldValues, Handle, NvmlError, NvmlSession

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
_PCIE_TRANSMIT: Final = (197, 0)
_PCIE_RECEIVE: Final = (198, 0)
"""Field and scope."""

_REMOTE_TYPES: Final = {0: "gpu", 1: "ibm_npu", 2: "switch"}

_LEARN_NS: Final = 30_000_000_000
"""How often everything is asked for again: links come up, get other neighbours, the fabric completes."""

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
    errors: tuple[tuple[str, int], ...]
    """(kind of error, place)."""
    speed: int | None

    @classmethod
    def make(
        cls, scope: int, kind: ByteCounters | None, errors: Sequence[tuple[str, _Wanted]], places: Mapping[_Wanted, int]
    ) -> _Places:
        """Those of a link, or of all links together."""
        transmit, receive = (places[field, scope] for field in kind.fields) if kind is not None else (0, 0)
        found = tuple((name, places[pair]) for name, pair in errors)
        return cls(kind, transmit, receive, found, places.get((SPEED_FIELD, scope)))


class GpuLinks:
    """Reads one GPU; not thread-safe."""

    def __init__(self, session: NvmlSession, gpu: Handle, clock: Clock) -> None:
        self._session = session
        self._gpu = gpu
        self._clock = clock
        self._learnt_ns: int | None = None
        self._neighbours: dict[int, _Neighbour] = {}
        """By link: those that the GPU has."""
        self._counters: dict[int, ByteCounters] = {}
        """By scope: how its bytes are counted."""
        self._wanted: tuple[_Wanted, ...] = ()
        """What a sweep asks for."""
        self._places: dict[int, _Places] = {}
        """By link, and ALL_LINKS."""
        self._pcie: tuple[int | None, int | None] = (None, None)
        """Places of the bytes transmitted and received over PCIe."""
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
        if self._learnt_ns is None or before_ns - self._learnt_ns >= _LEARN_NS:
            self._find_fields()
            self._learnt_ns = before_ns
        states = {link: self._state(link) for link in self._neighbours}
        values = self._values()
        after_ns = self._clock.monotonic_ns()
        links = [self._link(link, states[link], values) for link in self._neighbours]
        if (together := self._together(values)) is not None:
            links.append(together)
        transmitted, received = (None if place is None else values[place] for place in self._pcie)
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
        wanted = [(field, scope) for scope, kind in counters.items() for field in kind.fields]
        errors = self._find_error_fields(scopes)
        wanted += [pair for pairs in errors.values() for _, pair in pairs]
        wanted += self._supported([(SPEED_FIELD, link) for link in scopes])
        wanted += self._supported([_PCIE_TRANSMIT, _PCIE_RECEIVE], only_wide=True)
        self._fabric = self._optional(self._session.fabric, self._gpu)
        places = {pair: place for place, pair in enumerate(wanted)}
        self._pcie = places.get(_PCIE_TRANSMIT), places.get(_PCIE_RECEIVE)
        self._places = {
            scope: _Places.make(scope, counters.get(scope), errors.get(scope, ()), places)
            for scope in (*neighbours, ALL_LINKS)
        }
        self._neighbours, self._counters, self._wanted = neighbours, counters, tuple(wanted)

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
            answers = self._ask(pairs)
        except NvmlError as error:
            if error.lost:
                raise
            if not error.absent:
                self._trouble = error
            return []
        told = zip(pairs, answers.codes, answers.wide, strict=True)
        return [pair for pair, code, wide in told if code == SUCCESS and (wide or not only_wide)]

    def _values(self) -> Sequence[int | None]:
        """What is wanted, one by one; None: this has no value now."""
        if not self._wanted:
            return ()
        answers = self._ask(self._wanted)
        if not any(answers.codes):
            return answers.values
        told = zip(answers.codes, answers.values, strict=True)
        return [value if code == SUCCESS else None for code, value in told]

    def _ask(self, pairs: Sequence[_Wanted]) -> FieldValues:
        """Ask once.

        Raises:
            NvmlError: the call failed, or no value could be had and at least one for another reason than absence.
        """
        answers = self._session.field_values(self._gpu, pairs)
        for code in set(answers.codes) - {SUCCESS}:
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

    def _link(self, link: int, up: bool | None, values: Sequence[int | None]) -> LinkReading:
        places = self._places[link]
        speed = None if places.speed is None else values[places.speed]
        neighbour = self._neighbours[link]
        counted, transmit_bytes, receive_bytes = _bytes(places, values)
        return LinkReading(
            link=link,
            up=up,
            counted=counted,
            transmit_bytes=transmit_bytes,
            receive_bytes=receive_bytes,
            errors=_error_counts(places, values),
            speed_bytes_per_second=speed * _SPEED_UNIT_BYTES if speed is not None else None,
            remote=neighbour.remote,
            remote_type=neighbour.remote_type,
        )

    def _together(self, values: Sequence[int | None]) -> LinkReading | None:
        places = self._places[ALL_LINKS]
        counted, transmit_bytes, receive_bytes = _bytes(places, values)
        errors = _error_counts(places, values)
        if counted is None and not errors:
            return None
        return LinkReading(None, None, counted, transmit_bytes, receive_bytes, errors, None, None, None)


def _error_counts(places: _Places, values: Sequence[int | None]) -> tuple[tuple[str, int], ...]:
    return tuple([(kind, count) for kind, place in places.errors if (count := values[place]) is not None])


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
    changes_ns: list[int] = []
    last: int | None = None
    while (now_ns := clock.monotonic_ns()) - started_ns < _LOOK_NS:
        answer = session.field_values(gpu, [field])
        if answer.codes != (SUCCESS,):
            return None
        (value,) = answer.values
        if last is not None and value != last:
            changes_ns.append(now_ns)
        last = value
        clock.sleep(_PAUSE_SECONDS)
    if len(changes_ns) < _FEWEST_CHANGES:
        return None
    return median(after - before for before, after in pairwise(changes_ns)) / 1e9
