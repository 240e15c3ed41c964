"""Reads which RDMA ports this host has and where they are, in a thread aside.

Firmware answers for a port's state and for a card's vital product data: of a device that is ill one file may take
seconds, or for ever, and no one can interrupt it.  So the daemon's loop asks, waits for a moment, and goes on with what
was known.  A reading that does not come back is said to hang, and none begins beside it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.clock import Clock
from railscope.probes.rdma.inventory import RdmaInventory, RdmaPort
from railscope.probes.topology.data_direct import DataDirect
from railscope.probes.topology.machine import Gpu, Nic, read_machine

_PERIOD_NS: Final = 5_000_000_000
_HANGING_NS: Final = 5_000_000_000
"""A reading that takes longer is said to hang; a usual one takes milliseconds."""
START_PATIENCE_SECONDS: Final = 1.0
"""For the first reading, which asks for everything that never changes."""
PATIENCE_SECONDS: Final = 0.1
"""For each later one."""


@dataclass(frozen=True, slots=True)
class RdmaMachine:
    """RDMA ports, and the GPUs and ports of the machine in their places."""

    ports: tuple[RdmaPort, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    trouble: str = ""
    """Why places are not known; empty: they are."""


class RdmaMachineReader:
    """Not thread-safe: the daemon's lock guards it.  Its thread shares nothing with it but what it found."""

    def __init__(self, clock: Clock, sysfs: Path, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """`sysfs`: root of the tree.  `patience_seconds`: how long `update` waits, but for the first time."""
        self._clock = clock
        self._sysfs = sysfs
        self._patience_seconds = patience_seconds
        self._inventory = RdmaInventory(sysfs)
        self._data_direct = DataDirect(sysfs)
        self._read_last = RdmaMachine()
        """The thread's own."""
        self._begun_ns: int | None = None
        """When the last reading began; None: there was none."""
        self._reading: Future[RdmaMachine] | None = None
        """Under way."""
        self.machine = RdmaMachine()
        """As it was last read; the same object while nothing changes."""

    def update(self) -> bool:
        """Begin to read if that is due, and take over what was read; whether a reading came back."""
        now_ns = self._clock.monotonic_ns()
        patience_seconds = 0.0
        if self._reading is None:
            if self._begun_ns is not None and now_ns - self._begun_ns < _PERIOD_NS:
                return False
            patience_seconds = START_PATIENCE_SECONDS if self._begun_ns is None else self._patience_seconds
            self._begun_ns, self._reading = now_ns, Future()
            threading.Thread(target=self._run, args=(self._reading,), name="rdma devices", daemon=True).start()
        if not wait([self._reading], patience_seconds).done:
            return False
        reading, self._reading = self._reading, None
        self.machine = reading.result()
        return True

    def hangs_for_ns(self) -> int:
        """How long the reading under way has been lasting, 0 unless that is too long."""
        lasting_ns = self._clock.monotonic_ns() - self._begun_ns if self._reading and self._begun_ns is not None else 0
        return lasting_ns if lasting_ns > _HANGING_NS else 0

    def _run(self, reading: Future[RdmaMachine]) -> None:
        try:
            reading.set_result(self._read())
        except BaseException as error:  # noqa: BLE001 -- told to whoever asks for the result
            reading.set_exception(error)

    def _read(self) -> RdmaMachine:
        """Ports as they are now; their places are read again where a port changed, or were not known."""
        ports, last = self._inventory.read(), self._read_last
        if ports == last.ports and not last.trouble:
            return last
        try:
            gpus, nics = read_machine(self._sysfs, ports, self._data_direct) if ports else ((), ())
            found = RdmaMachine(ports, gpus, nics)
        except (OSError, ValueError) as error:
            found = RdmaMachine(ports, trouble=str(error))
        if found != last:
            self._read_last = found
        return self._read_last
