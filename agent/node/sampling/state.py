"""The state of a sampler (sampler.py): its sources, their devices, and their troubles in one line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.sampling.totals import RATE_BOUNDS, Counts, Floats
from railscope.probes.netdev.counters import DeviceFailure, Flags, Values

_MOST_SAID: Final = 4


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """What one device has counted: totals as in agent/node/sampling/totals.py."""

    netns: int
    device: str
    transmit_bytes: int
    receive_bytes: int
    counters: tuple[tuple[str, int], ...]
    """(counter, total) of everything else the source counts; never falls."""
    transmit_rate: Histogram
    """Bytes per second over the source's period."""
    receive_rate: Histogram
    present: bool
    """Whether the last reading still had it."""
    transmit_counted: bool = True
    """False: the device does not count what it sends; `transmit_bytes` and its rate say nothing then."""
    receive_counted: bool = True
    """The same of what it receives."""
    pinned: tuple[str, ...] = ()
    """Those of `counters` that stand at the most they can show: more may have happened."""


@dataclass(frozen=True, slots=True)
class SourceResult:
    """How one source is doing."""

    key: str
    success: bool
    """Whether the last read worked; also True while `failed_devices` names some that did not."""
    duration_seconds: float
    """Of the last read."""
    error: str
    """One line; empty on success."""
    failed_devices: tuple[DeviceFailure, ...]
    reads: int
    failures: int
    ticks_missed: int
    """Beats for which the thread came too late."""
    ticks_spared: int
    """Beats left out on purpose: the source failed, or its reads take long."""
    resets: int
    """New baselines of devices."""

    @property
    def troubles(self) -> tuple[str, ...]:
        """What did not work in the last read; empty: everything did, or it was not read yet."""
        if not self.reads:
            return ()
        if not self.success:
            return (self.error,)
        return tuple(f"{failure.device}: {failure.reason}" for failure in self.failed_devices)

    def collector_result(self, *, every_device: bool = False) -> CollectorResult:
        """In the form that exporters show; `every_device`: one that could not be read is a failure of the source."""
        success = self.success and not (every_device and self.failed_devices)
        return CollectorResult(self.key, success, self.duration_seconds, self.ticks_missed)


def join_troubles(troubles: Iterable[str]) -> str:
    """The first few troubles of a counter source, each once, and how many more there are."""
    once = list(dict.fromkeys(troubles))
    more = len(once) - _MOST_SAID
    return "; ".join(once[:_MOST_SAID]) + (f"; and {more} more" if more > 0 else "")


class SamplerState:
    """The sampler at one moment.  What it tells never changes; for one thread."""

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = {frame.result.key: frame for frame in frames}
        self._devices: dict[tuple[str, str], DeviceTotals] = {}
        """Those that were asked for, by source and name."""

    @property
    def results(self) -> tuple[SourceResult, ...]:
        return tuple(frame.result for frame in self._frames.values())

    @property
    def unread_sources(self) -> tuple[str, ...]:
        """Keys of sources that were not read yet, well or badly."""
        return tuple(result.key for result in self.results if not result.reads)

    @property
    def ticks_missed(self) -> int:
        return sum(result.ticks_missed for result in self.results)

    @property
    def resets(self) -> int:
        return sum(result.resets for result in self.results)

    def collector_results(self) -> tuple[CollectorResult, ...]:
        """In the form that exporters show."""
        return tuple(result.collector_result(every_device=True) for result in self.results)

    def device(self, netns: int, name: str) -> DeviceTotals | None:
        """Totals of one device; None if no source has seen it."""
        for frame in self._frames.values():
            if frame.netns == netns and name in frame.rows:
                return self._device(frame, name)
        return None

    def device_of_source(self, key: str, name: str) -> DeviceTotals | None:
        """Totals of one device as one source sees them; None if it has not."""
        frame = self._frames.get(key)
        return self._device(frame, name) if frame is not None and name in frame.rows else None

    def _device(self, frame: Frame, name: str) -> DeviceTotals:
        key = (frame.result.key, name)
        found = self._devices.get(key)
        if found is None:
            found = self._devices[key] = frame.device(name)
        return found

    def result(self, key: str) -> SourceResult | None:
        """How one source is doing; None where there is no such source."""
        frame = self._frames.get(key)
        return frame.result if frame is not None else None

    def devices(self) -> tuple[tuple[int, str], ...]:
        """(namespace, name) of every device, also of those gone a short while ago."""
        return tuple((frame.netns, name) for frame in self._frames.values() for name in frame.rows)


@dataclass(frozen=True, slots=True)
class Frame:
    """One source's part of a state: copies, from which a device is made when it is asked for."""

    netns: int
    result: SourceResult
    rows: dict[str, int]
    present: frozenset[str]
    fields: tuple[str, ...]
    totals: Values
    counts: Counts
    sums: Floats
    counted: Flags | None
    pinned: Flags | None

    def device(self, name: str) -> DeviceTotals:
        row = self.rows[name]
        values = self.totals[row].tolist()
        counted = [True] * len(values) if self.counted is None else self.counted[row].tolist()
        transmit, receive = self.fields.index("tx_bytes"), self.fields.index("rx_bytes")
        transmit_counted, receive_counted = counted[transmit], counted[receive]
        counted[transmit] = counted[receive] = False
        counters = tuple(itertools.compress(zip(self.fields, values, strict=True), counted))
        pinned = () if self.pinned is None else tuple(itertools.compress(self.fields, self.pinned[row].tolist()))
        transmitted, received = self.counts[row].tolist()
        transmit_sum, receive_sum = self.sums[row].tolist()
        return DeviceTotals(
            netns=self.netns,
            device=name,
            transmit_bytes=values[transmit],
            receive_bytes=values[receive],
            counters=counters,
            transmit_rate=Histogram(RATE_BOUNDS, tuple(transmitted), transmit_sum),
            receive_rate=Histogram(RATE_BOUNDS, tuple(received), receive_sum),
            present=name in self.present,
            transmit_counted=transmit_counted,
            receive_counted=receive_counted,
            pinned=pinned,
        )
