"""Selects the rows of a counter reading that are rails, as records of dtype RAIL_SAMPLE.

Called by the samplers' threads, which must not wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from railscope.agent.recording.recording import RAIL_SAMPLE
from railscope.probes.loading.maps import Records
from railscope.probes.netdev.counters import CounterBlock, CounterReading


@dataclass(slots=True)
class SampledRails:
    """The rails of one list of devices, as of the last inventory."""

    names: tuple[str, ...]
    fields: tuple[str, ...]
    generation: int
    devices: npt.NDArray[np.uint64]
    """Their numbers."""
    places: npt.NDArray[np.intp]
    """Where bytes sent and received of each stand among all values of a reading: devices by 2."""
    last: CounterReading | None = None
    """What was read last: a device may turn out to be a rail after it has been read for the first time."""

    def samples(self, read: CounterReading | CounterBlock) -> Records:
        """The rails' samples in a reading: readings by devices, or devices, of dtype RAIL_SAMPLE."""
        # A sample is four words; field by field it would take three times as long.
        if isinstance(read, CounterBlock):
            words = np.empty((len(read.times_ns), len(self.devices), 4), np.uint64)
            words[:, :, 0] = (np.array(read.times_ns, np.uint64).sum(axis=1) // 2)[:, np.newaxis]
            words[:, :, 1:3] = read.values.reshape(len(read.times_ns), -1)[:, self.places]
            words[:, :, 3] = self.devices
        else:
            words = np.empty((1, len(self.devices), 4), np.uint64)
            words[0, :, 0] = (read.before_ns + read.after_ns) // 2
            words[0, :, 1:3] = read.values.take(self.places)
            words[0, :, 3] = self.devices
        if read.shape is not None:
            words = words.compress(read.shape.known.take(self.places).all(axis=1), axis=1)
        return words.view(RAIL_SAMPLE)[:, :, 0]

    def keep_last_reading(self, read: CounterReading | CounterBlock) -> None:
        """Remember the last reading by itself: a block would keep all that it is a part of."""
        if isinstance(read, CounterBlock):
            last = read.reading(len(read.times_ns) - 1)
            self.last = replace(last, values=last.values.copy())
        else:
            self.last = read
