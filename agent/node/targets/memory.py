"""What a process's memory holds of NCCL's structures, read by its tenant's inspection process.

A page of another process may be one of a file that its user serves himself, and reading it waits until he answers: so
the daemon reads no such memory itself.  Each thing to read is a small object that knows how; all that are wanted of one
process at one moment travel together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.questions import Found, Memory, Refused
from railscope.agent.node.inspection.tenants import Tenant
from railscope.probes.nccl.memory.net_devices import DeviceArrays, NetDevice, NetDeviceError, net_devices
from railscope.probes.nccl.memory.port_states import read_port_states
from railscope.probes.nccl.memory.proxy_work import ProxyWorkLayout, proxy_has_work
from railscope.probes.nccl.memory.sequence_numbers import Launched, SequenceLayout, read_launched
from railscope.probes.nccl.records.errors import ErrorLayout, stored_result
from railscope.probes.nccl.records.failover import FailoverLayout
from railscope.probes.nccl.records.internals import NetworkKind
from railscope.probes.processes.processes import FileKey, ProcessIdentity

A_co = TypeVar("A_co", covariant=True)
A = TypeVar("A")


class Reading(Protocol[A_co]):
    """One thing to read of a process."""

    def read(self, memory: int) -> A_co:
        """`memory` is a descriptor of the process's /proc/PID/mem."""


@dataclass(frozen=True, slots=True)
class StoredResult:
    """The asynchronous result of a communicator; None: there is none at this address."""

    comm: int
    layout: ErrorLayout

    def read(self, memory: int) -> int | None:
        """See `Reading.read`."""
        return stored_result(memory, self.comm, self.layout)


@dataclass(frozen=True, slots=True)
class LaunchedCount:
    """Where a communicator stands as NCCL counts; None: it is not at this address."""

    comm: int
    comm_hash: int
    layout: SequenceLayout

    def read(self, memory: int) -> Launched | None:
        """See `Reading.read`."""
        return read_launched(memory, self.comm, self.comm_hash, self.layout)


@dataclass(frozen=True, slots=True)
class LaunchedNumbers:
    """Collectives by function that communicators launched, as NCCL counts, and whether a captured graph lives.

    Of thousands of communicators at once, so in plain values; None: it is not at this address.
    """

    communicators: tuple[tuple[int, int], ...]
    """Address and hash of each."""
    layout: SequenceLayout

    def read(self, memory: int) -> tuple[tuple[bool, tuple[int, ...]] | None, ...]:
        """See `Reading.read`."""
        found = (read_launched(memory, comm, comm_hash, self.layout) for comm, comm_hash in self.communicators)
        return tuple(None if one is None else (one.captured, one.by_function) for one in found)


@dataclass(frozen=True, slots=True)
class ProxyWork:
    """Whether a communicator's proxy has operations; None: that cannot be read."""

    comm: int
    layout: ProxyWorkLayout

    def read(self, memory: int) -> bool | None:
        """See `Reading.read`."""
        return proxy_has_work(memory, self.comm, self.layout)


@dataclass(frozen=True, slots=True)
class PortStates:
    """States of the ports of a connection that failed over; None: it is closed."""

    comm: int
    resiliency: int
    layout: FailoverLayout

    def read(self, memory: int) -> tuple[int, ...] | None:
        """See `Reading.read`."""
        return read_port_states(memory, self.comm, self.resiliency, self.layout)


@dataclass(frozen=True, slots=True)
class ReadMemory(Generic[A]):
    """What do these readings of a process give?  `moment` tells one time of asking from another."""

    procfs: str
    pid: int
    readings: tuple[Reading[A], ...]
    moment: int
    builds: ClassVar[Collection[type]] = (Launched,)
    seconds: ClassVar[float] = 2.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[tuple[A, ...]]:
        """See `Question.find`."""
        del memory, descriptors
        try:
            opened = os.open(f"{self.procfs}/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            gone = isinstance(error, (FileNotFoundError, ProcessLookupError))
            raise Refused(error.strerror or str(error), gone=gone) from None
        try:
            return Found(tuple(reading.read(opened) for reading in self.readings))
        finally:
            os.close(opened)


@dataclass(frozen=True, slots=True)
class NameDevices:
    """Which network devices does NCCL have in this process?"""

    procfs: str
    identity: ProcessIdentity
    library: FileKey
    arrays: DeviceArrays
    builds: ClassVar[Collection[type]] = (NetDevice, NetworkKind)
    seconds: ClassVar[float] = 2.0

    @property
    def pid(self) -> int:
        return self.identity.pid

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[tuple[NetDevice, ...]]:
        """See `Question.find`."""
        del memory, descriptors
        try:
            return Found(net_devices(Path(self.procfs), self.identity, self.library, self.arrays))
        except NetDeviceError as error:
            raise Refused(str(error), gone=error.gone) from None


class ProcessMemory:
    """Reads the memory of observed processes.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, procfs: Path, inspection: Inspection, tenant_of: Callable[[int], Tenant]) -> None:
        """`tenant_of` knows whose a process is, by its pid."""
        self._procfs = str(procfs)
        self._inspection = inspection
        self.tenant_of = tenant_of
        self._moment = 0

    def read(self, pid: int, readings: Sequence[Reading[A]], *, moment: int | None = None) -> tuple[A, ...]:
        """All of these at one time; an answer that comes late is of use for who asks for the same `moment` again only.

        None: now, and never again.

        Raises:
            NotYet: the answer has not come.
            Refused: the memory cannot be read.
        """
        if moment is None:
            self._moment += 1
            moment = -self._moment
        question = ReadMemory(self._procfs, pid, tuple(readings), moment)
        return self._inspection.ask(self.tenant_of(pid), question).answer

    def devices(self, identity: ProcessIdentity, library: FileKey, arrays: DeviceArrays) -> tuple[NetDevice, ...]:
        """See `net_devices`.

        Raises:
            NotYet: the answer has not come.
            Refused: they cannot be named.
        """
        question = NameDevices(self._procfs, identity, library, arrays)
        return self._inspection.ask(self.tenant_of(identity.pid), question).answer
