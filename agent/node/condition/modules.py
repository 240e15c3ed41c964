"""Modules and error correction of rails' ports, read seldom: each answer takes the port's firmware, or a slow bus.

A port whose driver does not tell, or that has no module, is left alone for longer and longer.  Of each module the
least light of its lanes is kept, and what passed the module's own limits; the limits are the vendor's, and better than
any of ours.  Flags are latched in the module until somebody reads them, so that a short excess between two readings is
seen; a program that reads the same module (`ethtool -m`) may take one away.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from railscope.agent.facts.hardware import ModuleFacts
from railscope.agent.facts.snapshot import CollectorResult
from railscope.probes.clock import Clock
from railscope.probes.netdev.ethtool_netlink import EthtoolNetlink, FecStatistics
from railscope.probes.netdev.module_memory import ModuleReading, read_module
from railscope.probes.netdev.netlink import MalformedNetlink

COLLECTOR: Final = "module"
_FIRST_PAUSE_NS: Final = 300_000_000_000
_LONGEST_PAUSE_NS: Final = 6 * 3_600_000_000_000
_SHARE: Final = 50
"""A port is read at most once in this many times the duration of its reading."""
_ABSENT: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EIO, errno.ENODEV, errno.ENXIO})
"""Answers of a port without a module, without the right to read it, or that is going away: no failures."""


class PortQuestions(Protocol):
    """Answers for one network device each; `EthtoolNetlink` has them from the kernel."""

    def fec_statistics(self, device: str) -> FecStatistics: ...

    def module_page(self, device: str, page: int, offset: int, length: int, bank: int = 0) -> bytes: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Port:
    facts: ModuleFacts
    due_ns: int = 0
    fruitless: int = 0


class Modules:
    """Not thread-safe: one thread reads; `facts` is replaced as a whole."""

    def __init__(self, clock: Clock, period_ns: int, questions: Callable[[], PortQuestions] = EthtoolNetlink) -> None:
        """`questions` opens what answers, in the network namespace of the thread that reads."""
        self._clock = clock
        self._period_ns = period_ns
        self._questions = questions
        self._open: PortQuestions | None = None
        self._ports: dict[tuple[str, str], _Port] = {}
        self.facts: tuple[ModuleFacts, ...] = ()
        self.result: CollectorResult | None = None
        """None: no port tells anything."""

    def update(self, ports: Iterable[tuple[str, str]]) -> None:
        """Read those that are due, of these (rail, network device)."""
        before_ns = self._clock.monotonic_ns()
        self._ports = {key: self._ports.get(key) or _Port(ModuleFacts(*key)) for key in dict.fromkeys(ports)}
        error = ""
        try:
            if self._open is None and self._ports:
                self._open = self._questions()
        except (OSError, MalformedNetlink):
            return  # a kernel without ethtool over netlink
        for port in self._ports.values():
            if self._open is not None and port.due_ns <= self._clock.monotonic_ns():
                error = self._read(self._open, port) or error
        self.facts = tuple(port.facts for port in self._ports.values() if port.facts.told)
        took_seconds = (self._clock.monotonic_ns() - before_ns) / 1e9
        self.result = CollectorResult(COLLECTOR, not error, took_seconds) if self.facts or error else None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _read(self, questions: PortQuestions, port: _Port) -> str:
        """Read one port; returns what failed though it should not have."""
        began_ns = self._clock.monotonic_ns()
        device = port.facts.device
        trouble = ""
        fec: FecStatistics | None = None
        module: ModuleReading | None = None
        try:
            fec = questions.fec_statistics(device)
        except (OSError, MalformedNetlink) as error:
            trouble = _trouble(error)
        try:
            module = read_module(lambda page, offset, length: questions.module_page(device, page, offset, length))
        except (OSError, MalformedNetlink) as error:
            trouble = trouble or _trouble(error)
        port.facts = _with(port.facts, module, fec)
        now_ns = self._clock.monotonic_ns()
        if port.facts.told:
            port.fruitless = 0
            port.due_ns = now_ns + max(self._period_ns, _SHARE * (now_ns - began_ns))
        else:
            port.due_ns = now_ns + min(_FIRST_PAUSE_NS << min(port.fruitless, 8), _LONGEST_PAUSE_NS)
            port.fruitless += 1
        return trouble


def _trouble(error: OSError | MalformedNetlink) -> str:
    if isinstance(error, OSError):
        return "" if error.errno in _ABSENT else error.strerror or str(error)
    return str(error)


def _with(facts: ModuleFacts, module: ModuleReading | None, fec: FecStatistics | None) -> ModuleFacts:
    return replace(
        facts,
        form=module.form if module else "",
        temperature_celsius=module.temperature_celsius if module else None,
        receive_watts=min(module.receive_watts, default=None) if module else None,
        transmit_watts=min(module.transmit_watts, default=None) if module else None,
        alarms=module.alarms if module else (),
        corrected_blocks=fec.corrected_blocks if fec else None,
        uncorrectable_blocks=fec.uncorrectable_blocks if fec else None,
        fec_histogram=fec.histogram if fec else (),
    )
