"""Watches the condition of the node's hardware in two threads: what may take long never waits for what does not.

The kernel's log is read each second, PCIe links and their errors every half a minute, one after the other, modules and
error correction every minute in a thread of their own.  What is found is published as immutable facts that anyone may
take.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.facts.hardware import NodeCondition, PcieFacts
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.condition.gpu_events import GpuEventCounts
from railscope.agent.node.condition.kernel_events import KernelEvents
from railscope.agent.node.condition.modules import Modules
from railscope.probes.clock import Clock
from railscope.probes.nvlink.gpu_events import GpuEvent
from railscope.probes.topology.pci_condition import PciCondition, read_condition

_log = logging.getLogger("railscope.condition")

PCIE_COLLECTOR: Final = "pcie"
_TICK_SECONDS: Final = 1.0
_PCIE_NS: Final = 30_000_000_000
_MODULES_NS: Final = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Hardware:
    """What is to be watched."""

    functions: tuple[tuple[str, str], ...] = ()
    """(name, PCI address) of rails' devices and GPUs: `mlx5_0`, `gpu0`."""
    ports: tuple[tuple[str, str], ...] = ()
    """(rail, network device) in the agent's own network namespace."""


class ConditionWatch:
    """The daemon's thread tells what to watch, and takes what was found; threads of this do all reading."""

    def __init__(
        self,
        clock: Clock,
        *,
        sysfs: Path,
        pcie: bool = True,
        log_device: Path | None = Path("/dev/kmsg"),
        modules: Modules | None = None,
    ) -> None:
        """`log_device` None: the kernel's log is not read; `modules` None: modules are not."""
        self._clock = clock
        self._sysfs = sysfs
        self._pcie = pcie
        self._events = KernelEvents(clock, log_device) if log_device is not None else None
        self._modules = modules
        self._gpu_events = GpuEventCounts(clock)
        self._wanted = Hardware()
        self._pcie_due_ns: dict[str, int] = {}
        """By name, when each link is to be read again; what was never read is due."""
        self._pcie_found: dict[str, PcieFacts] = {}
        self._pcie_facts: tuple[PcieFacts, ...] = ()
        self._pcie_result: CollectorResult | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def set_hardware(self, wanted: Hardware) -> None:
        """Watch this from now on."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._pcie_due_ns = {}

    def start(self) -> None:
        works: list[tuple[str, Callable[[], None]]] = []
        if self._pcie or self._events is not None:
            works.append(("condition", self.update))
        if self._modules is not None:
            works.append(("modules", self.update_modules))
        for name, work in works:
            thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Ask for the end; a thread that waits for a port's firmware is left behind."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_TICK_SECONDS)
        if self._events is not None and not any(thread.is_alive() for thread in self._threads):
            self._events.close()

    def add_gpu_events(self, events: Collection[GpuEvent]) -> None:
        """Count what NVML told; for the thread that calls `set_hardware`."""
        if events:
            self._gpu_events.add(events)

    def facts(self) -> NodeCondition:
        """Everything, as it was last read."""
        log = self._events
        of_log = log.facts if log is not None else ()
        # Where the log could be read once, what it said stands: nothing is told twice.
        said = {(one.kind, one.code, one.pci) for one in of_log}
        told = self._gpu_events.facts(xids=log is None or log.result is None)
        return NodeCondition(
            self._pcie_facts,
            self._modules.facts if self._modules is not None else (),
            (*of_log, *(one for one in told if (one.kind, one.code, one.pci) not in said)),
        )

    def collectors(self) -> tuple[CollectorResult, ...]:
        """How reading goes; none of what this host has not."""
        results = (
            self._pcie_result,
            self._modules.result if self._modules is not None else None,
            self._events.result if self._events is not None else None,
        )
        return tuple(result for result in results if result is not None)

    def unread_sources(self) -> tuple[str, ...]:
        """What there is to read and was not read yet."""
        return (PCIE_COLLECTOR,) if self._pcie and self._wanted.functions and not self._pcie_due_ns else ()

    def update(self) -> None:
        """Read the kernel's log, and the PCIe links that are due."""
        if self._events is not None:
            self._events.update()
        if self._pcie:
            self._update_pcie(self._wanted.functions, self._pcie_due_ns)

    def _update_pcie(self, functions: Sequence[tuple[str, str]], due_ns: dict[str, int]) -> None:
        """Read what is due; what is read for the first time all at once is read in turn from then on."""
        now_ns = self._clock.monotonic_ns()
        due = [(place, *one) for place, one in enumerate(functions, 1) if due_ns.get(one[0], now_ns) <= now_ns]
        if not due:
            return
        for place, name, pci in due:
            condition = read_condition(self._sysfs, pci)
            if condition is None:
                self._pcie_found.pop(name, None)
            else:
                self._pcie_found[name] = _facts(name, condition)
            due_ns[name] = now_ns + (_PCIE_NS if name in due_ns else _PCIE_NS * place // len(functions))
        self._pcie_facts = tuple(self._pcie_found[name] for name, _ in functions if name in self._pcie_found)
        took_seconds = (self._clock.monotonic_ns() - now_ns) / 1e9
        self._pcie_result = CollectorResult(PCIE_COLLECTOR, True, took_seconds) if self._pcie_facts else None

    def update_modules(self) -> None:
        """Read modules that are due."""
        if self._modules is not None:
            self._modules.update(self._wanted.ports)

    def _run(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            work()
            self._stop.wait(_TICK_SECONDS)


def make_modules(clock: Clock) -> Modules:
    """Those of this host's own network namespace."""
    return Modules(clock, _MODULES_NS)


def _facts(name: str, condition: PciCondition) -> PcieFacts:
    upstream = tuple((condition.upstream, *error) for error in condition.upstream_errors)
    own = tuple((condition.address, *error) for error in condition.errors)
    return PcieFacts(
        device=name,
        pci=condition.address,
        lanes=condition.lanes,
        lanes_possible=condition.lanes_possible,
        speed_gigatransfers=condition.speed_gigatransfers,
        speed_possible_gigatransfers=condition.speed_possible_gigatransfers,
        errors=(*own, *upstream),
    )
