"""Computes the recent utilisation of links, by direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Final

_SAMPLES_PER_WINDOW: Final = 30


@dataclass(frozen=True, slots=True)
class _Sample:
    time_ns: int
    transmit_bytes: int
    receive_bytes: int


class Utilization:
    """Running totals of links over a sliding window.  Not safe for use by several threads at once."""

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._links: dict[Hashable, deque[_Sample]] = {}

    def record(self, link: Hashable, time_ns: int, transmit_bytes: int, receive_bytes: int) -> None:
        """What a link had carried when it was read, monotonic time; totals that fell begin a new window."""
        samples = self._links.setdefault(link, deque())
        sample = _Sample(time_ns, transmit_bytes, receive_bytes)
        if samples:
            last = samples[-1]
            if time_ns <= last.time_ns:
                return
            if transmit_bytes < last.transmit_bytes or receive_bytes < last.receive_bytes:
                samples.clear()
        # The newest sample takes the place of the one before while that lies close to its own.
        if len(samples) >= 2 and time_ns - samples[-2].time_ns < self._window_ns // _SAMPLES_PER_WINDOW:
            samples.pop()
        samples.append(sample)
        while len(samples) > 2 and samples[1].time_ns <= time_ns - self._window_ns:
            samples.popleft()

    def ratios_of(self, link: Hashable, speed_bytes_per_second: int | None) -> tuple[float | None, float | None]:
        """(transmit, receive), 1 for all that one direction can carry; None: the speed or the bytes are not known.

        Above 1 where more passed than the link's own speed allows: devices without a real speed name one all the same.
        """
        samples = self._links.get(link)
        if samples is None or len(samples) < 2 or not speed_bytes_per_second:
            return None, None
        first, last = samples[0], samples[-1]
        possible_bytes = speed_bytes_per_second * (last.time_ns - first.time_ns) / 1e9
        return (
            (last.transmit_bytes - first.transmit_bytes) / possible_bytes,
            (last.receive_bytes - first.receive_bytes) / possible_bytes,
        )

    def forget_others(self, links: Collection[Hashable]) -> None:
        """Forget all other links."""
        self._links = {link: samples for link, samples in self._links.items() if link in links}
