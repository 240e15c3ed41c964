"""Which switch, and which of its ports, is at the other end of each rail: heard from the switches themselves (LLDP).

Where several devices speak on one cable at once, none is taken for the switch: a card that is a machine of its own
(BlueField), or somebody's virtual machine, may be one of them.  What was heard holds as long as its sender says.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from railscope.agent.facts.hardware import NeighbourFacts
from railscope.agent.facts.remarks import Remark
from railscope.agent.facts.snapshot import CollectorResult
from railscope.probes.clock import Clock
from railscope.probes.netdev.lldp import LldpSocket, Neighbour

_log = logging.getLogger("railscope.fabric")

COLLECTOR: Final = "lldp"
_AGAIN_NS: Final = 60_000_000_000
"""How long an interface on which nothing can be heard is left alone."""
_MOST_SENDERS: Final = 8
"""Of one cable: more are several all the same."""
_PASSING: Final = frozenset({errno.ENETDOWN, errno.ENODEV, errno.ENXIO})
"""The interface is down or went away."""
_NO_RIGHT: Final = frozenset({errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT})
"""Who has no right to listen hears nothing, and nothing has failed; the last is systemd's RestrictAddressFamilies."""


class Ear(Protocol):
    """Hears one interface."""

    def read(self) -> list[Neighbour]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Cable:
    rail: str
    device: str
    ear: Ear | None = None
    due_ns: int = 0
    """When to try again, while nothing is open."""
    heard: dict[str, tuple[Neighbour, int]] = field(default_factory=dict)
    """By chassis: what it said last, and until when it holds."""


class Neighbours:
    """Not thread-safe: one thread reads; `facts` is replaced as a whole."""

    def __init__(self, clock: Clock, listen: Callable[[str], Ear] = LldpSocket) -> None:
        """`listen` opens an interface, in the network namespace of the thread that reads."""
        self._clock = clock
        self._listen = listen
        self._cables: dict[str, _Cable] = {}
        self._remark = Remark(_log, COLLECTOR, "is heard again")
        self.facts: tuple[NeighbourFacts, ...] = ()
        self.result: CollectorResult | None = None
        """None: no interface can be heard, or there is none."""

    def update(self, ports: Iterable[tuple[str, str]]) -> None:
        """Hear what came in on these (rail, network device)."""
        before_ns = self._clock.monotonic_ns()
        self._follow(ports)
        error = ""
        for cable in self._cables.values():
            error = self._hear(cable, before_ns) or error
        self._remark.say(error)
        self.facts = tuple(found for cable in self._cables.values() if (found := _facts(cable)) is not None)
        took_seconds = (self._clock.monotonic_ns() - before_ns) / 1e9
        opened = any(cable.ear is not None for cable in self._cables.values())
        self.result = CollectorResult(COLLECTOR, not error, took_seconds) if opened or error else None

    def close(self) -> None:
        self._follow(())

    def _follow(self, ports: Iterable[tuple[str, str]]) -> None:
        wanted = {device: rail for rail, device in ports}
        for device in self._cables.keys() - wanted.keys():
            cable = self._cables.pop(device)
            if cable.ear is not None:
                cable.ear.close()
        for device, rail in wanted.items():
            self._cables.setdefault(device, _Cable(rail, device)).rail = rail

    def _hear(self, cable: _Cable, now_ns: int) -> str:
        """Take in what one interface heard; returns what failed though it should not have."""
        error = ""
        try:
            if cable.ear is None and now_ns >= cable.due_ns:
                cable.ear = self._listen(cable.device)
            for said in cable.ear.read() if cable.ear is not None else ():
                if said.chassis in cable.heard or len(cable.heard) < _MOST_SENDERS:
                    cable.heard[said.chassis] = said, now_ns + said.lifetime_seconds * 1_000_000_000
        except OSError as refusal:
            if refusal.errno not in _PASSING | _NO_RIGHT:
                error = f"{cable.device}: {refusal.strerror or refusal}"
            self._give_up(cable, now_ns)
        cable.heard = {chassis: heard for chassis, heard in cable.heard.items() if heard[1] > now_ns}
        return error

    def _give_up(self, cable: _Cable, now_ns: int) -> None:
        if cable.ear is not None:
            cable.ear.close()
            cable.ear = None
        cable.due_ns = now_ns + _AGAIN_NS


def _facts(cable: _Cable) -> NeighbourFacts | None:
    if len(cable.heard) != 1:
        return None
    ((said, _),) = cable.heard.values()
    return NeighbourFacts(cable.rail, cable.device, said.switch, said.port)
