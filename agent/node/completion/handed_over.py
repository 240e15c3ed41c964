"""What NCCL handed to each rail, in bytes and messages, including what processes handed over that have ended.

The kernel counts by process and by NCCL's own device numbers (probes/bpf/sends.h); a rail is a device in a network
namespace.  Each reading's increase over the one before it is added to the rail that the number means by then, so a
total never falls: bytes whose device could not be named stay counted as unknown, also when the name is learned later.

These are bytes that collectives put on a rail as NCCL sees them: with the flags of its LL protocols (LL doubles the
payload, LL128 adds a fifteenth), without the headers of the network.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.targets.processes import ProcessOf
from railscope.probes.nccl.memory.net_devices import NetDevice
from railscope.probes.nccl.programs.internals import Sent
from railscope.probes.nccl.records.internals import NO_NET_DEVICE, NetworkKind

_log = logging.getLogger("railscope.rail_bytes")

MOST_TRIES: Final = 8
"""How many readings with new bytes of an unnamed device may ask its process; each takes the agent about 1 ms."""

DevicesOf = Callable[[int, int], Collection[NetDevice]]
"""The devices of a process, by its pid and the number of its NCCL library (probes/nccl/memory/net_devices.py).

It raises NetDeviceError where they cannot be read, and answers with none where the library does not tell.
"""


@dataclass(frozen=True, slots=True)
class SentRail:
    """A device that something was handed to."""

    namespace_inode: int | None
    """Network namespace of the sending process; None: it could not be read."""
    network: NetworkKind
    device: str
    """Network interface or RDMA device; `unknown` where NCCL's number has no name."""
    port: int | None
    """Port of an RDMA device."""

    @property
    def is_identified(self) -> bool:
        return self.namespace_inode is not None and self.device != UNKNOWN


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Sums since the probes were attached."""

    bytes: int
    messages: int
    """Calls of the network's send; one that several devices share counts at each of them."""


@dataclass(slots=True)
class _Process:
    """What is remembered of a process that has sent something."""

    namespace_inode: int | None = None
    devices: dict[tuple[int, NetworkKind, int], NetDevice] = field(default_factory=dict)
    """By library, network and number."""
    tries: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Vain questions, by library."""
    seen: dict[tuple[int, NetworkKind, int], Sent] = field(default_factory=dict)
    """The last reading."""


class RailBytes:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, process_of: ProcessOf, devices_of: DevicesOf) -> None:
        """`process_of` must still know a process when `end_processes` is called for it."""
        self._process_of = process_of
        self._devices_of = devices_of
        self._processes: dict[int, _Process] = {}
        self._sums: defaultdict[SentRail, list[int]] = defaultdict(lambda: [0, 0])
        """Bytes, messages."""

    def add_readings(self, readings: Iterable[Sent]) -> None:
        """Add what a reading of `Internals.sent()` has more than the one before."""
        asked: set[tuple[int, int]] = set()
        for sent in readings:
            process = self._processes.setdefault(sent.tgid, _Process())
            key = (sent.library, sent.network, sent.device)
            before = process.seen.get(key)
            process.seen[key] = sent
            more = (sent.bytes, sent.messages)
            # A row that fell was dropped and made again.
            if before is not None and sent.messages >= before.messages and sent.bytes >= before.bytes:
                more = (sent.bytes - before.bytes, sent.messages - before.messages)
            if not any(more):
                continue
            sums = self._sums[self._rail(process, sent, asked)]
            sums[0] += more[0]
            sums[1] += more[1]

    def read_device_names(self, tgid: int, library: int) -> None:
        """Read the names of a process before it sends: a short job may have ended when its bytes are read.

        To be called once it has a communicator; harmless to repeat.
        """
        process = self._processes.setdefault(tgid, _Process())
        self._locate(process, tgid)
        if not any(known_library == library for known_library, *_ in process.devices):
            self._ask(process, tgid, library)

    def end_processes(self, tgids: Collection[int], readings: Iterable[Sent]) -> None:
        """Add what ended processes sent last, and forget their names; drop their rows from the kernel afterwards.

        `readings` may hold other processes' rows: they are left for `add_readings`.
        """
        self.add_readings([sent for sent in readings if sent.tgid in tgids])
        for tgid in tgids:
            self._processes.pop(tgid, None)

    def names_of(self, tgid: int, numbers: Collection[int]) -> frozenset[str]:
        """Names of a process's devices by NCCL's numbers; empty where one of them is not known.

        Each library and network counts from zero: a number that several devices share names none.
        """
        process = self._processes.get(tgid)
        names: defaultdict[int, set[str]] = defaultdict(set)
        for (_, _, number), device in process.devices.items() if process else ():
            names[number].add(device.name)
        found = [names[number] for number in numbers]
        return frozenset().union(*found) if all(len(one) == 1 for one in found) else frozenset()

    def device_of(self, tgid: int, library: int, network: NetworkKind, number: int) -> NetDevice | None:
        """A process's device by NCCL's number; None: it has no name, or that is not known yet."""
        key = (library, network, number)
        process = self._processes.setdefault(tgid, _Process())
        if key not in process.devices and number != NO_NET_DEVICE:
            self._ask(process, tgid, library)
        return process.devices.get(key)

    def totals(self) -> dict[SentRail, HandedOver]:
        """By device and port, those that could not be named included."""
        return {rail: HandedOver(sent_bytes, messages) for rail, (sent_bytes, messages) in self._sums.items()}

    def by_device(self) -> dict[tuple[int, str], HandedOver]:
        """By network namespace (inode) and device, over all of a device's ports; without unknown ones."""
        sums: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
        for rail, (sent_bytes, messages) in self._sums.items():
            if rail.namespace_inode is not None and rail.is_identified:
                sums[rail.namespace_inode, rail.device][0] += sent_bytes
                sums[rail.namespace_inode, rail.device][1] += messages
        return {key: HandedOver(sent_bytes, messages) for key, (sent_bytes, messages) in sums.items()}

    def unattributed(self) -> HandedOver:
        """What was handed to devices that could not be named or placed."""
        rows = [sums for rail, sums in self._sums.items() if not rail.is_identified]
        return HandedOver(sum(row[0] for row in rows), sum(row[1] for row in rows))

    @property
    def namespaces(self) -> set[int]:
        """Network namespaces (inodes) of all rails that something was handed to."""
        return {rail.namespace_inode for rail in self._sums if rail.namespace_inode is not None}

    def forget_namespaces(self, gone: Collection[int]) -> None:
        """Drop the totals of network namespaces that have gone, with their rails."""
        for rail in [rail for rail in self._sums if rail.namespace_inode in gone]:
            del self._sums[rail]

    def _rail(self, process: _Process, sent: Sent, asked: set[tuple[int, int]]) -> SentRail:
        self._locate(process, sent.tgid)
        key = (sent.library, sent.network, sent.device)
        if key not in process.devices and sent.device != NO_NET_DEVICE and (sent.tgid, sent.library) not in asked:
            asked.add((sent.tgid, sent.library))
            self._ask(process, sent.tgid, sent.library)
        device = process.devices.get(key)
        if device is None:
            return SentRail(process.namespace_inode, sent.network, UNKNOWN, None)
        return SentRail(process.namespace_inode, sent.network, device.name, device.port)

    def _locate(self, process: _Process, tgid: int) -> None:
        if process.namespace_inode is None:
            known = self._process_of(tgid)
            if known is not None and known.namespace is not None:
                process.namespace_inode = known.namespace.inode

    def _ask(self, process: _Process, tgid: int, library: int) -> None:
        """Read the names of a process's devices, unless that was tried in vain too often."""
        if process.tries[library] >= MOST_TRIES:
            return
        process.tries[library] += 1
        try:
            devices = self._devices_of(tgid, library)
        except NotYet:
            process.tries[library] -= 1
            return
        except Refused as refused:
            last = process.tries[library] == MOST_TRIES and not refused.gone
            _log.log(logging.WARNING if last else logging.DEBUG, "rails of collectives: %s", refused)
            return
        for device in devices:
            # The first name stays: NCCL never changes it.
            process.devices.setdefault((library, device.network, device.number), device)
