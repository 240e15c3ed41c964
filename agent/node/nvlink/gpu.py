"""One GPU: its identity, and what its NVLinks have carried.

A total begins with what the GPU itself counts when it is first read, and never falls: a counter that fell, or a GPU
that was lost and came back, starts a new baseline, and what went by in between is not made up.  Everything here is
called from the one thread that reads this GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from railscope.agent.facts.hardware import ALL_LINKS, GpuFacts, NvlinkFacts
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.sampling.utilization import Utilization
from railscope.probes.clock import Clock
from railscope.probes.nvlink.gpu_health import FEC_CORRECTIONS, GpuHealth, GpuHealthReader
from railscope.probes.nvlink.links import GpuLinks, GpuReading, LinkReading, refresh_seconds
from railscope.probes.nvlink.nvml import NvmlError, NvmlSession

_log = logging.getLogger("railscope.nvlink")

WINDOW_NS: Final = 30_000_000_000
"""Utilization is that of so long a time, unless another one is asked for."""
_REFRESH_AGAIN_NS: Final = 60_000_000_000
"""An idle link does not show how often its counters change: looked again while it carries something."""

_HEALTH_NS: Final = 30_000_000_000
"""How often a GPU's condition is read, which takes some hundred values: nothing in it needs haste."""
_CORRECTIONS: Final = tuple(map(str, range(FEC_CORRECTIONS)))

_GPUS_APART: Final = 6
"""Readings in such a time: in so many turns GPUs do what is seldom, so that not all of them do it in one."""

_Key = tuple[str, ...]
"""Link and counter."""
_Errors = tuple[tuple[str, int], ...]
"""(kind, count)"""


class GpuTotals:
    """Counters turned into totals that never fall, one by one."""

    def __init__(self) -> None:
        self.resets = 0
        """Counters that fell."""
        self._last: dict[_Key, tuple[str, int]] = {}
        """What was counted, and its value."""
        self._totals: dict[_Key, int] = {}
        self._errors: dict[str, tuple[_Errors, _Errors]] = {}
        """By link: the errors of its last reading, and their totals."""

    def add(self, key: _Key, value: int | None, counted: str = "") -> int | None:
        """Add a reading, None if there is none; returns the total, None if it was never read.

        Another `counted` under the same key is another counter: a new baseline for the same total.
        """
        known = self._totals.get(key)
        if value is None:
            return known
        seen = (counted, value)
        if self._last.get(key) == seen:
            return known
        before, last = self._last.get(key, seen)
        step = value - last if before == counted else 0
        self.resets += step < 0
        self._last[key] = seen
        self._totals[key] = total = value if known is None else known + max(0, step)
        return total

    def add_errors(self, link: str, errors: _Errors) -> _Errors:
        """Add all errors (kind, count) of a link; returns their totals.  They rarely change."""
        last = self._errors.get(link)
        if last is not None and last[0] == errors:
            return last[1]
        totals = tuple((kind, self.add((link, "error", kind), count) or 0) for kind, count in errors)
        self._errors[link] = (errors, totals)
        return totals

    def restart(self) -> None:
        """The next reading of each counter is a baseline."""
        self._last.clear()
        self._errors.clear()


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    uuid: str
    pci: str
    name: str
    numa: str


NOBODY: Final = GpuIdentity(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)


@dataclass(frozen=True, slots=True)
class GpuHistory:
    """What one GPU's links have carried: in all, and of what they could carry within the window."""

    totals: GpuTotals
    utilization: Utilization
    """By link."""


class GpuHistories:
    """Histories by UUID: they outlive a session with NVML and a GPU's number."""

    def __init__(self, window_ns: int = WINDOW_NS) -> None:
        """`window_ns`: utilization is that of so long a time."""
        self._window_ns = window_ns
        self._histories: dict[str, GpuHistory] = {}

    def get(self, uuid: str) -> GpuHistory:
        history = self._histories.get(uuid)
        if history is None:
            history = self._histories[uuid] = self.create()
        return history

    def create(self) -> GpuHistory:
        """That of a GPU that is not known yet."""
        return GpuHistory(GpuTotals(), Utilization(self._window_ns))


@dataclass(frozen=True, slots=True)
class _Condition:
    """What a GPU said of its own condition, its counts as totals that never fall; by link where it is that of links."""

    pcie_errors: _Errors
    bit_error_ratios: Mapping[str, tuple[tuple[str, float], ...]]
    fec_blocks: Mapping[str, _Errors]

    @classmethod
    def of(cls, health: GpuHealth, totals: GpuTotals) -> _Condition:
        names = {number: str(number) for number, *_ in (*health.bit_error_ratios, *health.fec_blocks)}
        ratios: dict[str, list[tuple[str, float]]] = {name: [] for name in names.values()}
        for number, kind, ratio in health.bit_error_ratios:
            ratios[names[number]].append((kind, ratio))
        blocks: dict[str, list[tuple[str, int]]] = {name: [] for name in names.values()}
        for number, corrected, count in health.fec_blocks:
            link, mended = names[number], _CORRECTIONS[corrected]
            blocks[link].append((mended, totals.add((link, "fec", mended), count) or 0))
        errors = tuple((kind, totals.add(("", "pcie error", kind), count) or 0) for kind, count in health.pcie_errors)
        return cls(
            errors,
            {link: tuple(found) for link, found in ratios.items()},
            {link: tuple(found) for link, found in blocks.items()},
        )


class Gpu:
    """Reads one GPU and keeps what it found; raises NvmlError where NVML does not answer."""

    def __init__(self, index: int, session: NvmlSession, clock: Clock, *, sysfs: Path, histories: GpuHistories) -> None:
        self._index = index
        self._session = session
        self._clock = clock
        self._sysfs = sysfs
        self._histories = histories
        self._links: GpuLinks | None = None
        self._handle: object = None
        self._history = histories.create()
        self._refresh_ns: int | None = None
        """When it was last tried to see how often the counters change."""
        self._identity = NOBODY
        self._carried_bytes = 0
        self._health_reader: GpuHealthReader | None = None
        self._health = GpuHealth()
        self._health_period: int | None = None
        """In which it was last read."""
        self._condition = _Condition.of(self._health, self._history.totals)
        self._condition_health = self._health
        """What it was made of."""
        self.retired = False
        """Set when another session reads this GPU: a call that comes back after that no longer counts."""
        self.gpu = GpuFacts(str(index), UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, (), None, None, None)
        self.links: tuple[NvlinkFacts, ...] = ()

    def read(self) -> None:
        """Bring `gpu` and `links` up to date.

        Raises:
            NvmlError: the GPU does not answer; nothing changes but that the links' state is unknown.
        """
        try:
            links = self._links if self._links is not None else self._find_gpu()
            reading = links.read()
            self._read_health(links, reading.after_ns)
            if self.retired:
                return
            self._publish(reading)
            if self._refresh_due(reading):
                self._measure_refresh(links)
        except NvmlError as error:
            if error.lost:
                self._links = None
            self.links = without_states(self.links)
            raise

    def _find_gpu(self) -> GpuLinks:
        """Find the GPU by its number; another one may have it by now."""
        session = self._session
        handle = session.handle(self._index)
        pci = session.pci_address(handle)
        self._identity = GpuIdentity(session.uuid(handle), pci, session.name(handle), _numa_node(self._sysfs, pci))
        self._history = self._histories.get(self._identity.uuid)
        self._history.totals.restart()
        self._handle = handle
        self._links = GpuLinks(session, handle, self._clock, phase=self._phase(0))
        self._health_reader = GpuHealthReader(session, handle)
        self._health_period = None
        return self._links

    def _phase(self, shift: int) -> float:
        """By what share of its period something seldom comes earlier than on the first GPU."""
        return (self._index + shift) % _GPUS_APART / _GPUS_APART

    def _read_health(self, links: GpuLinks, now_ns: int) -> None:
        period = (now_ns + round(self._phase(_GPUS_APART // 2) * _HEALTH_NS)) // _HEALTH_NS
        if self._health_reader is None or self._health_period == period:
            return
        self._health_period = period
        self._health = self._health_reader.read(links.numbers)

    def _publish(self, reading: GpuReading) -> None:
        add = self._history.totals.add
        identity, fabric, health = self._identity, reading.fabric, self._health
        if health is not self._condition_health:
            self._condition, self._condition_health = _Condition.of(health, self._history.totals), health
        self.gpu = replace(
            self.gpu,
            uuid=identity.uuid,
            pci=identity.pci,
            name=identity.name,
            numa=identity.numa,
            fabric=fabric.state if fabric is not None else UNKNOWN,
            fabric_unhealthy=fabric.unhealthy if fabric is not None else (),
            pcie_transmit_bytes=add(("", "pcie transmit"), reading.pcie_transmit_bytes),
            pcie_receive_bytes=add(("", "pcie receive"), reading.pcie_receive_bytes),
            fabric_health_mask=fabric.health_mask if fabric is not None else None,
            fabric_error=fabric.error if fabric is not None and fabric.state == "completed" else None,
            fabric_cluster=fabric.cluster if fabric is not None else "",
            fabric_clique=str(fabric.clique) if fabric is not None and fabric.cluster else "",
            ecc_errors=health.ecc_errors,
            remapped_rows=health.remapped_rows,
            remap_pending=health.remap_pending,
            remap_failed=health.remap_failed,
            pcie_errors=self._condition.pcie_errors,
            slowed_by=health.slowed_by,
            recovery_action=health.recovery_action,
        )
        self.links = tuple([self._facts(link, reading.after_ns) for link in reading.links])

    def _facts(self, link: LinkReading, read_ns: int) -> NvlinkFacts:
        totals, utilization = self._history.totals, self._history.utilization
        label = ALL_LINKS if link.link is None else str(link.link)
        counted = link.counted or next((before.counted for before in self.links if before.link == label), "")
        transmit_bytes = totals.add((label, "transmit"), link.transmit_bytes, counted)
        receive_bytes = totals.add((label, "receive"), link.receive_bytes, counted)
        if transmit_bytes is not None and receive_bytes is not None:
            utilization.record(label, read_ns, transmit_bytes, receive_bytes)
        transmit_utilization, receive_utilization = utilization.ratios_of(label, link.speed_bytes_per_second)
        return NvlinkFacts(
            gpu=self.gpu.gpu,
            link=label,
            up=link.up,
            transmit_bytes=transmit_bytes,
            receive_bytes=receive_bytes,
            counted=counted,
            errors=totals.add_errors(label, link.errors),
            speed_bytes_per_second=link.speed_bytes_per_second,
            remote=link.remote or UNKNOWN,
            remote_type=link.remote_type or UNKNOWN,
            transmit_utilization=transmit_utilization,
            receive_utilization=receive_utilization,
            bit_error_ratios=self._condition.bit_error_ratios.get(label, ()),
            fec_blocks=self._condition.fec_blocks.get(label, ()),
        )

    def _refresh_due(self, reading: GpuReading) -> bool:
        carried_bytes = sum(link.transmit_bytes or 0 for link in reading.links)
        busy = carried_bytes != self._carried_bytes
        self._carried_bytes = carried_bytes
        if self.gpu.refresh_seconds is not None or not busy:
            return False
        return self._refresh_ns is None or reading.after_ns - self._refresh_ns >= _REFRESH_AGAIN_NS

    def _measure_refresh(self, links: GpuLinks) -> None:
        field = links.first_byte_field
        if field is None:
            return
        self._refresh_ns = self._clock.monotonic_ns()
        seconds = refresh_seconds(self._session, self._handle, field, self._clock)
        if seconds is not None:
            self.gpu = replace(self.gpu, refresh_seconds=seconds)
            _log.info("GPU %d: its NVLink counters change every %.0f ms", self._index, seconds * 1e3)


def without_states(links: tuple[NvlinkFacts, ...]) -> tuple[NvlinkFacts, ...]:
    """A GPU that does not answer: what its NVLinks carried stays known, whether they are up does not."""
    return tuple(replace(link, up=None) for link in links)


def _numa_node(sysfs: Path, pci: str) -> str:
    """The host's node next to the GPU; NVML's own number means the GPU's memory on some machines."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return UNKNOWN
    return str(node) if node >= 0 else UNKNOWN
