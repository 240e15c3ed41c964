"""The flight recorder: keeps the last events of this host in bounded memory.

It is given what the agent reads anyway: calls and completions from the kernel's rings, samples of the rails, lifecycle
events, links that changed.  `freeze` makes a `Recording` of the last moments, complete in itself: with the identities
of everything that events name by number, and with readings of both clocks, so that recordings of several hosts can be
laid side by side with a stated error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from railscope.agent.facts.clocks import ClockReading, read_clocks
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import RailKey, RailLedger
from railscope.agent.facts.snapshot import CommunicatorFacts, RailFacts, Snapshot
from railscope.agent.node.recorder.rail_samples import SampledRails
from railscope.agent.node.recorder.ring import RecordRing
from railscope.agent.recording.recording import (
    KINDS,
    LINK_EVENT,
    UNKNOWN_CARRIER,
    Mark,
    RecordedCommunicator,
    RecordedOwner,
    RecordedRail,
    RecordedStall,
    Recording,
)
from railscope.probes.clock import Clock, boot_id
from railscope.probes.loading.maps import Records
from railscope.probes.netdev.counters import CounterBlock, CounterReading
from railscope.probes.netdev.inventory import NetworkDevice
from railscope.probes.processes.namespaces import NamespaceError, named_namespaces, network_namespace
from railscope.probes.shares import in_turns

_SHARES: Final = {"calls": 0.62, "completions": 0.2, "rail_samples": 0.14, "lifecycle": 0.04}
"""Of the memory; what else there is takes little."""
_LINK_EVENTS: Final = 2048
_LOSSES: Final = 4096
_MOST_MARKS: Final = 256
_MOST_DEVICES: Final = 4096
_MOST_SOURCES: Final = 1024
_SOURCE_UNREAD_NS: Final = 60_000_000_000
_MOST_CLOCK_READINGS: Final = 64
_CLOCK_PERIOD_NS: Final = 10_000_000_000


@dataclass(slots=True)
class _Device:
    number: int
    facts: NetworkDevice | None = None
    """None: an RDMA port."""
    rail: str = ""
    netns: str = ""
    gone_ns: int | None = None
    """When it was found to be no rail any more, or not there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came in between two calls of `FlightRecorder.read_new`."""

    recording: Recording
    overwritten: Mapping[str, int]
    """By kind: events that were not read in time."""


class FlightRecorder:
    """`add_…` may be called from any thread, everything else from the daemon's loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        host: str,
        procfs: Path = Path("/proc"),
        window_ns: int = 60_000_000_000,
        memory_bytes: int = 16 << 20,
    ) -> None:
        """Keep the last `window_ns`, as far as `memory_bytes` reach."""
        self._clock = clock
        self._host = host
        self._boot_id = boot_id(procfs)
        self._own_netns = _own_netns(procfs)
        self._window_ns = window_ns
        self._began_ns = clock.monotonic_ns()
        self._rings = {
            kind: RecordRing(KINDS[kind], max(1, int(memory_bytes * share) // KINDS[kind].itemsize))
            for kind, share in _SHARES.items()
        }
        self._rings["link_events"] = RecordRing(LINK_EVENT, _LINK_EVENTS)
        self._rings["losses"] = RecordRing(KINDS["losses"], _LOSSES)
        self._samples = self._rings["rail_samples"]
        self._marks: deque[Mark] = deque(maxlen=_MOST_MARKS)
        self._clocks: deque[ClockReading] = deque(maxlen=_MOST_CLOCK_READINGS)
        self._clock_period_ns = max(_CLOCK_PERIOD_NS, 2 * window_ns // _MOST_CLOCK_READINGS)
        self._decisions: Sequence[RailDecision] = ()
        self._lock = threading.Lock()
        """Guards what the samplers' threads and the loop share: the numbers of devices."""
        self._devices: dict[tuple[int, str], _Device] = {}
        self._next_number = 0
        self._generation = 0
        """Rises when other devices are rails than before."""
        self._sources: dict[tuple[int, int], SampledRails] = {}
        self._marked = 0
        """Marks so far."""
        self.update()
        self._taken = dict.fromkeys(self._rings, 0)
        """How many records of each kind have been taken, those that were overwritten included."""
        self._taken_marks = 0
        self._taken_ns = self._began_ns
        self._taken_clock = self._clocks[-1]
        self._taken_losses = np.zeros(1, KINDS["losses"])
        """The last ones; the kernel's programs, which count them, begin with 0 as the recorder does."""

    # What happens

    def add_calls(self, calls: Records) -> None:
        """Calls of dtype CALL_EVENT, as the ring gives them."""
        self._rings["calls"].add(calls)

    def add_completions(self, completions: Records) -> None:
        """Completed operations of dtype COMPLETION_EVENT."""
        self._rings["completions"].add(completions)

    def add_lifecycle(self, events: Records) -> None:
        """Communicators that came or went: dtype LIFECYCLE_EVENT."""
        self._rings["lifecycle"].add(events)

    def add_samples(self, netns: int, read: CounterReading | CounterBlock) -> None:
        """What a counter source has just read of the devices of a namespace; only rails are kept.

        For the samplers' threads, which must not wait: a few microseconds, whatever the number of rails.
        """
        source = self._sources.get((netns, id(read.names)))
        if (
            source is None
            or source.names is not read.names
            or source.fields != read.fields
            or source.generation != self._generation
        ):
            source = self._select_rails(netns, read.names, read.fields)
        source.keep_last_reading(read)
        if len(source.devices):
            self._samples.add(source.samples(read).reshape(-1))

    def _select_rails(self, netns: int, names: tuple[str, ...], fields: tuple[str, ...]) -> SampledRails:
        with self._lock:
            devices, rows = [], []
            for row, name in enumerate(names):
                device = self._number(netns, name) if is_rdma_port(name) else self._devices.get((netns, name))
                if device is not None and device.gone_ns is None:
                    devices.append(device.number)
                    rows.append(row)
            columns = np.array([fields.index("tx_bytes"), fields.index("rx_bytes")], np.intp)
            before = self._sources.get((netns, id(names)))
            source = SampledRails(
                names=names,
                fields=fields,
                generation=self._generation,
                devices=np.array(devices, np.uint64),
                places=np.array(rows, np.intp)[:, np.newaxis] * len(fields) + columns,
            )
            self._forget_sources(netns, names)
            self._sources[netns, id(names)] = source
        if before is not None and before.names is names and before.fields == fields and before.last is not None:
            # What a new rail carries from here on would else have no reading to begin at.
            told = source.samples(before.last)[-1]
            self._samples.add(told[~np.isin(told["device"], before.devices)])
        return source

    def _forget_sources(self, netns: int, names: tuple[str, ...]) -> None:
        """Forget lists of devices that are not read any more; those that are come back with their next reading."""
        old_ns = self._clock.monotonic_ns() - _SOURCE_UNREAD_NS
        for key, source in list(self._sources.items()):
            if key[0] == netns and source.names is not names and (source.last is None or source.last.after_ns < old_ns):
                del self._sources[key]
        if len(self._sources) >= _MOST_SOURCES:
            self._sources.clear()

    def _number(self, netns: int, name: str) -> _Device | None:
        """The number of a device, a new one for a new device; None: there are too many."""
        device = self._devices.get((netns, name))
        if device is None and len(self._devices) >= _MOST_DEVICES:
            self._forget_gone()
        if device is None and len(self._devices) < _MOST_DEVICES:
            device = self._devices[netns, name] = _Device(self._next_number)
            if not is_rdma_port(name) and netns not in (0, self._own_netns):
                device.netns = named_namespaces().get(netns, f"net:[{netns}]")
            self._next_number += 1
        return device

    def _forget_gone(self) -> None:
        """Forget half of the devices that are gone, of namespaces with most of them first: any may be renamed for ever.

        Of those what was sampled goes without a name.
        """
        gone = {key: device.gone_ns for key, device in self._devices.items() if device.gone_ns is not None}
        latest_first = sorted(gone, key=lambda key: gone[key], reverse=True)
        for key in in_turns(latest_first, lambda key: key[0])[len(gone) // 2 :]:
            del self._devices[key]

    def record_rails(self, decisions: Sequence[RailDecision]) -> None:
        """Set which network devices are rails, and record links that changed; cheap while none did."""
        if decisions is self._decisions:
            return
        self._decisions = decisions
        now_ns = self._clock.monotonic_ns()
        rails = {(one.device.netns, one.device.name): one for one in decisions if one.rail is not None}
        with self._lock:
            for key, decision in rails.items():
                device = self._number(*key)
                if device is None:
                    continue
                if device.facts is None or device.gone_ns is not None:
                    self._generation += 1
                if device.facts is None or device.gone_ns is not None or _link(device.facts) != _link(decision.device):
                    self._add_link(now_ns, device.number, decision.device)
                device.facts, device.rail, device.gone_ns = decision.device, decision.rail or "", None
            for key, device in self._devices.items():
                if device.facts is not None and device.gone_ns is None and key not in rails:
                    self._generation += 1
                    self._add_link(now_ns, device.number, None)
                    device.gone_ns = now_ns

    def _add_link(self, now_ns: int, number: int, device: NetworkDevice | None) -> None:
        event = np.zeros(1, LINK_EVENT)
        event["time_ns"], event["device"] = now_ns, number
        event["up"] = event["carrier"] = UNKNOWN_CARRIER
        if device is not None:
            up, carrier, changes, speed = _link(device)
            event["present"] = 1
            event["up"] = UNKNOWN_CARRIER if up is None else up
            event["carrier"] = UNKNOWN_CARRIER if carrier is None else carrier
            event["carrier_changes"], event["speed_bytes_per_second"] = changes or 0, speed or 0
        self._rings["link_events"].add(event)

    def record_losses(self, *, calls: int, completions: int, lifecycle: int) -> None:
        """How many events the kernel's rings had no room for, since the programs were loaded."""
        loss = np.array([(self._clock.monotonic_ns(), calls, completions, lifecycle)], KINDS["losses"])
        self._rings["losses"].add(loss)

    def add_mark(self, text: str) -> None:
        """Something happened that is worth a word: a stall began, the level of observation changed."""
        self._marks.append(Mark(self._clock.monotonic_ns(), text))
        self._marked += 1

    def update(self) -> None:
        """Read both clocks if due, and forget rails long gone; once a second is enough."""
        now_ns = self._clock.monotonic_ns()
        if self._clocks and now_ns - self._clocks[-1].monotonic_ns < self._clock_period_ns:
            return
        self._clocks.append(read_clocks(self._clock))
        with self._lock:
            for key, device in list(self._devices.items()):
                if device.gone_ns is not None and now_ns - device.gone_ns > self._window_ns:
                    del self._devices[key]

    # What happened

    def now_ns(self) -> int:
        """Now, on the clock of what is recorded."""
        return self._clock.monotonic_ns()

    def clocks(self) -> ClockReading:
        """Both clocks, now."""
        return read_clocks(self._clock)

    def freeze(
        self,
        reason: str,
        snapshot: Snapshot,
        *,
        stalls: Iterable[RecordedStall] = (),
        open_operations: Records | None = None,
        connections: Records | None = None,
        ledgers: Mapping[RailKey, RailLedger] = MappingProxyType({}),
    ) -> Recording:
        """A copy of the last moments.

        `snapshot` says who is who; `open_operations` (dtype OPERATION) and `connections` (dtype CONNECTION) are the
        kernel's tables as they are now, None where nothing is observed below the calls.  `ledgers` are of rails, by
        network namespace and device; they are of all that happened, and so kept where the last moments are, too.
        """
        self._clocks.append(read_clocks(self._clock))
        ended_ns = self._clock.monotonic_ns()
        began_ns = max(self._began_ns, ended_ns - self._window_ns)
        arrays, complete_from_ns = {}, {}
        for kind, ring in self._rings.items():
            # Of links and losses also what they were when the window began.
            arrays[kind], oldest_ns = ring.read_since(0 if kind in ("link_events", "losses") else began_ns)
            complete_from_ns[kind] = max(began_ns, oldest_ns or 0)
        arrays["link_events"] = _with_last_before(arrays["link_events"], began_ns, "device")
        arrays["losses"] = _with_last_before(arrays["losses"], began_ns, None)
        return self._recording(
            reason,
            snapshot,
            arrays,
            began_ns=began_ns,
            ended_ns=ended_ns,
            clocks=tuple(clock for clock in self._clocks if clock.monotonic_ns >= began_ns - self._clock_period_ns),
            complete_from_ns=complete_from_ns,
            stalls=tuple(stalls),
            marks=tuple(mark for mark in self._marks if mark.time_ns >= began_ns),
            open_operations=open_operations,
            connections=connections,
            ledgers=ledgers if began_ns == self._began_ns else {},
        )

    @property
    def fullness(self) -> float:
        """The unread share of the fullest ring; 1: records will be overwritten, or have been."""
        return min(1.0, max((ring.added - self._taken[kind]) / ring.capacity for kind, ring in self._rings.items()))

    def read_new(
        self,
        reason: str,
        snapshot: Snapshot,
        *,
        open_operations: Records | None = None,
        connections: Records | None = None,
        ledgers: Mapping[RailKey, RailLedger] = MappingProxyType({}),
    ) -> Piece:
        """Everything that came in since the call before, or since the beginning; arguments as those of `freeze`."""
        clock = read_clocks(self._clock)
        self._clocks.append(clock)
        began_ns, ended_ns = self._taken_ns, self._clock.monotonic_ns()
        arrays, overwritten = {}, {}
        for kind, ring in self._rings.items():
            arrays[kind], overwritten[kind] = ring.read_after(self._taken[kind])
            self._taken[kind] += overwritten[kind] + len(arrays[kind])
        # Totals: the last ones before belong to the first ones now.
        arrays["losses"] = np.concatenate((self._taken_losses, arrays["losses"]))
        clocks = (
            self._taken_clock,
            *(one for one in self._clocks if one.monotonic_ns > self._taken_clock.monotonic_ns),
        )
        fresh_marks = min(self._marked - self._taken_marks, len(self._marks))
        marks = tuple(self._marks)[len(self._marks) - fresh_marks :]
        self._taken_ns, self._taken_clock, self._taken_marks = ended_ns, clock, self._marked
        self._taken_losses = arrays["losses"][-1:]
        recording = self._recording(
            reason,
            snapshot,
            arrays,
            began_ns=began_ns,
            ended_ns=ended_ns,
            clocks=clocks,
            complete_from_ns=dict.fromkeys(self._rings, began_ns),
            stalls=(),
            marks=marks,
            open_operations=open_operations,
            connections=connections,
            ledgers=ledgers,
        )
        return Piece(recording, overwritten)

    def _recording(
        self,
        reason: str,
        snapshot: Snapshot,
        arrays: dict[str, Records],
        *,
        began_ns: int,
        ended_ns: int,
        clocks: tuple[ClockReading, ...],
        complete_from_ns: Mapping[str, int],
        stalls: tuple[RecordedStall, ...],
        marks: tuple[Mark, ...],
        open_operations: Records | None,
        connections: Records | None,
        ledgers: Mapping[RailKey, RailLedger],
    ) -> Recording:
        for kind, table in (("open_operations", open_operations), ("connections", connections)):
            arrays[kind] = np.empty(0, KINDS[kind]) if table is None else table
        ended = {facts.instance for facts in snapshot.collectives.communicators if not facts.alive}
        kinds = ("calls", "completions", "lifecycle", "open_operations", "connections") if ended else ()
        seen = {instance for kind in kinds for instance in np.unique(arrays[kind]["instance"]).tolist()}
        return Recording(
            railscope=snapshot.version,
            host=self._host,
            boot_id=self._boot_id,
            kernel=snapshot.kernel,
            simulated=snapshot.simulated,
            reason=reason,
            began_ns=began_ns,
            ended_ns=ended_ns,
            clocks=clocks,
            communicators=tuple(
                _communicator(facts)
                for facts in snapshot.collectives.communicators
                if facts.instance > 0 and (facts.alive or facts.instance in seen)
            ),
            rails=self._recorded_rails(snapshot.rails, ledgers),
            complete_from_ns=complete_from_ns,
            stalls=stalls,
            marks=marks,
            arrays={kind: arrays[kind] for kind in KINDS},
        )

    def _recorded_rails(
        self, rails: Iterable[RailFacts], ledgers: Mapping[RailKey, RailLedger]
    ) -> tuple[RecordedRail, ...]:
        ports = {f"{facts.device}/{facts.port}": facts for facts in rails if facts.port}
        found = []
        with self._lock:
            for (netns, name), device in self._devices.items():
                known, port = device.facts, ports.get(name)
                found.append(
                    RecordedRail(
                        device=device.number,
                        name=name,
                        rail=device.rail or (port.rail if port else ""),
                        netns=device.netns,
                        netns_inode=netns,
                        pci=known.pci if known else port.pci if port else "",
                        driver=known.driver if known else port.driver if port else "",
                        speed_bytes_per_second=known.speed_bytes_per_second
                        if known
                        else port.speed_bytes_per_second
                        if port
                        else None,
                        owners=tuple(_owners(ledgers.get((netns, name)))),
                    )
                )
        return tuple(found)


def _owners(ledger: RailLedger | None) -> Iterator[RecordedOwner]:
    for direction, one in () if ledger is None else (("transmit", ledger.transmit), ("receive", ledger.receive)):
        for (owner, origin), count in one.cells.items():
            yield RecordedOwner(direction, owner.value, origin.value, count, one.error_ratio)


def is_rdma_port(name: str) -> bool:
    """Whether a sampled device is an RDMA port, `mlx5_0/1`: no network device has a slash in its name."""
    return "/" in name


def _link(device: NetworkDevice) -> tuple[bool | None, bool | None, int | None, int | None]:
    return device.up, device.carrier, device.carrier_changes, device.speed_bytes_per_second


def _with_last_before(records: Records, began_ns: int, key: str | None) -> Records:
    """Records from `began_ns` on, behind the last one before it (of each value of `key`)."""
    late = records["time_ns"] >= began_ns
    before = records[~late]
    if key is None:
        return np.concatenate((before[-1:], records[late]))
    # The last of each: the first one from behind.
    _, from_behind = np.unique(before[key][::-1], return_index=True)
    return np.concatenate((before[np.sort(len(before) - 1 - from_behind)], records[late]))


def _communicator(facts: CommunicatorFacts) -> RecordedCommunicator:
    return RecordedCommunicator(
        instance=facts.instance,
        identity=facts.identity,
        enqueued=facts.enqueued,
        completed=facts.completed,
        inflight_seconds=facts.inflight_seconds,
        alive=facts.alive,
    )


def _own_netns(procfs: Path) -> int:
    try:
        return network_namespace(procfs, "self").inode
    except NamespaceError:
        return 0
