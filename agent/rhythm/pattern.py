"""A pattern of calls: what a job does in each iteration, learnt from a stretch of its calls.

Calls stand for themselves by 64-bit hashes of what they are, so that the pattern of one stretch is found in the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from railscope.agent.rhythm.repetition import Repetition, find_repetition
from railscope.agent.rhythm.series import CallSeries, Integers, dense_codes, mixed

Hashes = NDArray[np.uint64]
Flags = NDArray[np.bool_]

CALL_BYTES: Final = 40
"""Of one call in `Calls`."""


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls of one GPU in order of time; all columns of equal length."""

    time_ns: Integers
    kind: Hashes
    """Of communicator, operation, data type and peer."""
    symbol: Hashes
    """Of kind and payload."""
    communicator: Integers
    payload_bytes: Integers

    def __len__(self) -> int:
        return len(self.time_ns)

    @classmethod
    def nothing(cls) -> Self:
        """No call at all."""
        return cls(np.zeros(0, np.int64), *(np.zeros(0, np.uint64),) * 2, *(np.zeros(0, np.int64),) * 2)

    @classmethod
    def of_columns(
        cls,
        time_ns: Integers,
        communicator: Integers,
        peer: Integers,
        op: Integers,
        data_type: Integers,
        payload_bytes: Integers,
    ) -> Self:
        """Calls by what each is: communicator and peer of 32 bits, operation and data type of 8."""
        place = communicator.astype(np.uint64) << np.uint64(32) | peer.astype(np.uint32).astype(np.uint64)
        what = op.astype(np.uint64) << np.uint64(8) | data_type.astype(np.uint64)
        kind = mixed(mixed(place) ^ what)
        symbol = mixed(kind + payload_bytes.astype(np.uint64))
        return cls(
            time_ns.astype(np.int64), kind, symbol, communicator.astype(np.int64), payload_bytes.astype(np.int64)
        )

    def followed_by(self, more: Calls) -> Calls:
        """These calls and then more."""
        return Calls(
            np.concatenate((self.time_ns, more.time_ns)),
            np.concatenate((self.kind, more.kind)),
            np.concatenate((self.symbol, more.symbol)),
            np.concatenate((self.communicator, more.communicator)),
            np.concatenate((self.payload_bytes, more.payload_bytes)),
        )

    def part(self, low: int, high: int | None = None) -> Calls:
        """Those of some places."""
        part = slice(low, high)
        return Calls(
            self.time_ns[part],
            self.kind[part],
            self.symbol[part],
            self.communicator[part],
            self.payload_bytes[part],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The calls of an iteration, and how its beginning is recognised."""

    names: Hashes
    """Of the calls of a usual iteration, ascending: hashes of their kinds where sizes are not looked at."""
    counts: Integers
    """How often each is in it."""
    sizeless: Hashes
    """Kinds whose sizes are not looked at, ascending."""
    light: Hashes
    """Names of calls that move next to nothing and are no evidence, ascending."""
    light_bytes: int
    """A call of another name is no evidence either if it moves no more than this."""
    light_calls: int
    """Of them, in a usual iteration."""
    anchor: Hashes
    """Names of calls that come in a row on one communicator, once an iteration."""
    anchor_communicator: int
    by_silence: bool
    """Segments begin at the longest silence from one anchor to the next, else at the anchor."""
    offset: int
    """An iteration begins at so many calls of evidence behind the beginning of a usual segment."""
    starting: np.uint64
    """Name of the call at which iterations usually begin."""
    behind_start: np.uint64
    """Sum of the names of a usual segment's calls from there on."""
    burst_ns: int | None
    """Equal calls: an iteration begins where none came for so long; None: at each of them."""
    telling: bool
    """The order of calls proves it at any distance; else they must come regularly as well."""
    after_silence: bool
    """An iteration begins after a silence as there is none within it."""
    communicators: frozenset[int]
    """Those on which an iteration makes calls that are evidence."""
    payload_bytes: int
    """Of a usual iteration."""
    median_ns: int
    """Length of the iterations from which it was learnt."""
    iterations: int
    """How many those were."""

    @property
    def length(self) -> int:
        """Calls of evidence in a usual iteration."""
        return int(self.counts.sum())

    def is_same(self, other: Pattern) -> bool:
        """Whether iterations of both are made of the same calls."""
        return np.array_equal(self.names, other.names) and np.array_equal(self.counts, other.counts)


def find_pattern(calls: Calls) -> Pattern | None:
    """What the iterations of these calls have in common; None: they do not repeat.

    Its time grows as the number of calls does, whatever they are.
    """
    if not len(calls):
        return None
    kind = dense_codes(calls.kind.view(np.int64))
    series = CallSeries(
        calls.time_ns,
        kind,
        dense_codes(calls.symbol.view(np.int64)),
        dense_codes(calls.communicator),
        calls.payload_bytes,
    )
    found = find_repetition(series)
    return None if found is None else _pattern(calls, series, found)


def _pattern(calls: Calls, series: CallSeries, found: Repetition) -> Pattern:
    rule = found.rule
    sizeless = np.unique(calls.kind[rule.sizeless[series.kind]])
    name = np.where(rule.sizeless[series.kind], calls.kind, calls.symbol)
    usual = rule.usual
    lengths_ns = np.diff(calls.time_ns[found.starts])[~found.interrupted]
    if rule.burst_ns is not None:
        evidence = np.cumsum(rule.evidence)  # light calls may lie between
        sizes, often = np.unique(np.diff(evidence[found.starts]), return_counts=True)
        names, counts = name[usual[:1]], np.array([sizes[np.argmax(often)]], np.int64)
    else:
        names, counts = np.unique(name[usual], return_counts=True)
    light = ~rule.evidence
    lights, often_light = np.unique(np.diff(np.cumsum(light)[found.starts]), return_counts=True)
    return Pattern(
        names=names,
        counts=counts.astype(np.int64),
        sizeless=sizeless,
        light=np.setdiff1d(name[light], names),
        light_bytes=int(calls.payload_bytes[light].max(initial=0)),
        light_calls=int(lights[np.argmax(often_light)]),
        anchor=name[rule.anchor],
        anchor_communicator=int(calls.communicator[rule.anchor[0]]),
        by_silence=rule.by_silence,
        offset=rule.offset,
        starting=name[usual[rule.offset]],
        behind_start=name[usual[rule.offset :]].sum(dtype=np.uint64),
        burst_ns=rule.burst_ns,
        telling=rule.telling,
        after_silence=rule.after_silence,
        communicators=frozenset(np.unique(calls.communicator[usual]).tolist()),
        payload_bytes=int(calls.payload_bytes[usual].sum()) * (int(counts[0]) if rule.burst_ns is not None else 1),
        median_ns=int(np.median(lengths_ns)),
        iterations=len(lengths_ns),
    )
