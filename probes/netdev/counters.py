"""What every network device of a namespace has counted, read in one go: the form that all sources share.

Three sources of the same counters (`struct rtnl_link_stats64` in the kernel's if_link.h):

* `rtnetlink_counters` asks for one RTM_GETSTATS dump: all devices in one question, whatever their number.
* `procfs_counters` keeps `/proc/PID/net/dev` open: needs no right to enter the namespace.
* `sysfs_counters` keeps a descriptor for every file of `class/net/*/statistics`: also for recorded trees.

A source reports values as the kernel shows them; that they may fall, and what then, is the reader's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from railscope.probes.native.beats import Answer, Question

Values = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """One device that could not be read while others could."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class CounterShape:
    """What is in a reading whose devices differ in what they count, and where each counter ends.

    All are rows by columns, as the reading's values.
    """

    known: Flags
    """Whether the device counts this, and it could be read; the value is 0 where not, and means nothing."""
    maxima: Values
    """The largest value that the counter can show: 2^bits - 1."""
    saturating: Flags
    """Whether it stops there; otherwise it begins again at 0."""
    gauges: Flags | None = None
    """Whether it rises and falls, a value of now; None: nothing does."""


@dataclass(frozen=True, slots=True)
class CounterReading:
    """All counters of one source at one moment."""

    before_ns: int
    """Monotonic time when the read began."""
    after_ns: int
    """Monotonic time when it was complete; the values are from between the two."""
    names: tuple[str, ...]
    """Devices, one a row; the same object as in the last reading while nothing changed."""
    generations: tuple[int, ...]
    """One a row: another number under the same name is another device, whose counters start afresh."""
    fields: tuple[str, ...]
    """Counters, one a column; `rx_bytes` and `tx_bytes` are always among them.

    A source never changes them, but one that gives a `shape` may append others.
    """
    values: Values
    """Rows by columns."""
    failed: tuple[DeviceFailure, ...] = ()
    shape: CounterShape | None = None
    """None: every device counts everything, with 64 bits."""


class CounterSource(Protocol):
    """Something whose devices count bytes."""

    def read(self) -> CounterReading:
        """Read everything now.  A device that fails is left out and named in `failed`.

        Raises:
            OSError, ValueError: nothing at all can be read.
        """
        ...

    def refresh(self) -> None:
        """Drop cached names: devices came, went or were renamed."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CounterBlock:
    """Readings of the same devices, one after the other."""

    times_ns: tuple[tuple[int, int], ...]
    """(before, after) of each reading, as in `CounterReading`."""
    names: tuple[str, ...]
    generations: tuple[int, ...]
    fields: tuple[str, ...]
    values: Values
    """Readings by rows by columns."""
    shape: CounterShape | None = None
    """Of every one of them, as in `CounterReading`."""

    def reading(self, number: int) -> CounterReading:
        """One of the readings."""
        before_ns, after_ns = self.times_ns[number]
        values = self.values[number]
        return CounterReading(before_ns, after_ns, self.names, self.generations, self.fields, values, shape=self.shape)


@runtime_checkable
class DeferringSource(CounterSource, Protocol):
    """A source that asks cheaply and understands many answers at once, for those who sample at a short period.

    `read` is `read_raw` and `parse_raw` in one; no two of these may run at the same time.
    """

    def question(self) -> Question | None:
        """What another thread may ask instead of `read_raw`; the same object as long as it holds.

        An answer's bytes are then what `read_raw` has as its only datagram.  Whatever else the source is called for may
        make the question void: it must not be asked meanwhile.  None: there is none just now.
        """
        ...

    def read_raw(self) -> Answer | None:
        """Ask now, understand later; None: this time it has to be `read`.

        Raises:
            OSError, ValueError: nothing at all can be read.
        """
        ...

    def parse_raw(self, answers: Sequence[Answer]) -> list[CounterBlock]:
        """What was answered, in the order of the answers.

        Raises:
            OSError, ValueError: an answer makes no sense, or new devices cannot be named.
        """
        ...


def is_counter(text: bytes) -> bool:
    """Whether a text is a network device's counter as the kernel prints one."""
    return text.isdigit() and len(text) <= 20 and int(text) < 2**64
