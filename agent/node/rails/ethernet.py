"""The Ethernet side of every rail: what its driver counts, what waits in its queue, how its TCP connections fare.

Three sources in every network namespace that observed processes live in: ethtool's statistics, queueing disciplines,
and TCP connections: how those of the observed processes fare, and what everybody's carried.  Each is read once a
second, or every two where the agent takes its time (agent/node/daemon/schedule.py); in a namespace without such
processes, every five.  It is opened inside the namespace when it is first read, and opened anew after trouble; one that
fails shows in its own result and nowhere else.

A namespace is opened with its first process and closed with its last, since an open socket keeps it alive; what its
rails showed stays readable for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.remarks import Remark
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.attribution.evidence import port_and_connections
from railscope.agent.node.attribution.parties import MappedBy, Parties, not_looked_at
from railscope.agent.node.rails.counter_rules import TABLES_ONLY, OwnSeverities
from railscope.agent.node.rails.ethernet_facts import (
    RailEthernet,
    ethernet_counters,
    ethernet_gauges,
    rail_queue,
    rail_tcp,
)
from railscope.agent.node.rails.ethernet_rules import StatisticRules
from railscope.agent.node.sampling.sampler import Sampler
from railscope.agent.node.sampling.state import SamplerState, SourceResult, join_troubles
from railscope.probes.clock import Clock
from railscope.probes.netdev.connection_accounts import ConnectionAccounts
from railscope.probes.netdev.counters import CounterReading, CounterSource
from railscope.probes.netdev.ethtool_stats import EthtoolStatistics
from railscope.probes.netdev.qdisc import QueueCounters
from railscope.probes.netdev.tcp_counters import TcpCounters
from railscope.probes.processes.namespaces import (
    NamespaceError,
    NamespaceGone,
    NetworkNamespace,
    run_inside,
)
from railscope.probes.processes.socket_owners import HostSockets, shows_every_process

_log = logging.getLogger("railscope.ethernet")

PERIOD_SECONDS: Final = 1.0
"""mlx5 asks its firmware dozens of times for one answer: never more often."""
_CALM_PERIODS: Final = 2
"""Between two readings, where nobody waits for them."""
_IDLE_PERIODS: Final = 5
"""And where no observed process lives."""
_READ_PATIENCE_SECONDS: Final = 0.05
"""Whoever looks closely waits for a reading that is not older than usual; a driver may ask its firmware for longer."""
_BY_SOURCE: Final = -1
"""Devices here are looked up by source; no network namespace has this number."""
_NO_PROCESSES: Final = MappingProxyType[int, NetworkNamespace]({})
_NOBODY_LEFT: Final = "the last process in the network namespace has ended"
"""No trouble: that is noticed a moment later, and nothing is read there any more."""

Source = TypeVar("Source", bound=CounterSource)


class _Inside(Generic[Source]):
    """A `CounterSource` that is opened inside a namespace when it is read, and opened anew after it failed."""

    def __init__(
        self,
        ways: Callable[[], Iterable[NetworkNamespace]],
        make: Callable[[], Source],
        prepare: Callable[[Source], None],
        devices: Callable[[], tuple[str, ...]],
    ) -> None:
        """`ways` are the same namespace, through each of its processes: one that has ended leads nowhere.

        `devices` are those to read, which `prepare` tells a source before it is read.
        """
        self._ways = ways
        self._make = make
        self._prepare = prepare
        self._devices = devices
        self.opened: Source | None = None
        self.asked_for: tuple[str, ...] | None = None
        """The devices of the last read, which may be under way; None: there was none yet."""
        self.reads = 0
        """Those that were begun."""
        self.period_seconds = 0.0
        """At which the sampler reads it at present."""

    def read(self) -> CounterReading:
        """See `CounterSource.read`."""
        self.reads += 1
        self.asked_for = self._devices()
        source = self.opened
        if source is None:
            source = self.opened = self._open()
        self._prepare(source)
        try:
            return source.read()
        except OSError:
            self.close()
            raise

    def _open(self) -> Source:
        trouble = _NOBODY_LEFT
        for way in self._ways():
            try:
                return run_inside(way, self._make)
            except NamespaceGone:
                continue
            except NamespaceError as error:
                trouble = str(error)
        raise OSError(trouble)

    def refresh(self) -> None:
        """See `CounterSource.refresh`."""
        if self.opened is not None:
            self.opened.refresh()

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()
            self.opened = None


@dataclass(slots=True)
class _Watched:
    """One network namespace; the sampler's thread reads `devices` and `processes`, which are replaced as a whole."""

    namespace: NetworkNamespace
    permanent: bool
    devices: tuple[str, ...] = ()
    processes: dict[int, NetworkNamespace] = field(default_factory=dict)
    """The namespace, as it is reached through each process."""
    statistics: _Inside[EthtoolStatistics] | None = None
    queues: _Inside[QueueCounters] | None = None
    connections: _Inside[TcpCounters] | None = None
    rails: tuple[tuple[str, str], ...] = ()
    """(rail, device)."""
    sources: dict[str, _Inside[Any]] = field(default_factory=dict)
    """All of them, by what they are called."""
    remarks: dict[str, Remark] = field(default_factory=dict)
    accounts: ConnectionAccounts = field(default_factory=ConnectionAccounts)
    """Of `connections`, opened anew or not."""

    def key(self, source: str) -> str:
        """What one source of this namespace is called."""
        return source if self.namespace.own else f"{source} net:[{self.namespace.inode}]"

    def namespaces(self) -> Iterable[NetworkNamespace]:
        return (self.namespace,) if self.permanent else tuple(self.processes.values())


@dataclass(frozen=True, slots=True)
class _Gone:
    facts: tuple[RailEthernet, ...]
    accounts: ConnectionAccounts
    """For the next process that comes there: totals never fall."""
    until_ns: int


class EthernetWatch:
    """Not thread-safe: the daemon's lock guards it.  The sampler is given, and reads in a thread of its own.

    Statistics of a driver may take long: give a sampler that does not also read bytes at a short period.
    """

    def __init__(
        self,
        clock: Clock,
        sampler: Sampler,
        *,
        procfs: Path,
        lifetime_ns: int,
        period_seconds: float = PERIOD_SECONDS,
        ethtool: bool = True,
        queues: bool = True,
        tcp: bool = True,
        own_severities: OwnSeverities = TABLES_ONLY,
        excluded: Sequence[str] = (),
        mapped_by: MappedBy = not_looked_at,
    ) -> None:
        """`lifetime_ns`: how long facts of a namespace stay after its last process went.  `period_seconds` is that at
        which sources are read unless `tick` is told that there is time.  `mapped_by` tells the sampler's thread which
        communication libraries a process maps.

        Raises:
            ValueError: the period is below a second.
        """
        if period_seconds < PERIOD_SECONDS:
            raise ValueError(f"Ethernet period {period_seconds} s: choose a second or more")
        self._clock = clock
        self._sampler = sampler
        self._procfs = procfs
        self._lifetime_ns = lifetime_ns
        self._period_seconds = period_seconds
        self._ethtool = ethtool
        self._queues = queues
        self._excluded = tuple(pattern for pattern in excluded if "/" not in pattern)
        """Patterns of devices whose drivers are not asked; a driver tells all of its statistics or none."""
        self._tcp = tcp
        self._parties = Parties(mapped_by)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="sockets")
        self._host_sockets = HostSockets(procfs, clock, self._aside, every_process=shows_every_process(procfs))
        self._rules = StatisticRules(own_severities)
        self._watched: dict[int, _Watched] = {}
        self._gone: dict[int, _Gone] = {}

    def watch_own(self, namespace: NetworkNamespace) -> None:
        """Watch the agent's own namespace until `close`."""
        self._open(namespace, permanent=True)

    def add_process(self, pid: int, namespace: NetworkNamespace) -> None:
        """Count the connections of a process from now on."""
        watched = self._watched.get(namespace.inode)
        if watched is None:
            watched = self._open(namespace, permanent=False, processes={pid: namespace})
        watched.processes = {**watched.processes, pid: namespace}
        self._set_periods(watched, self._period_seconds)

    def remove_process(self, pid: int) -> None:
        """The process has ended, or is not observed any more."""
        for netns, watched in list(self._watched.items()):
            if pid in watched.processes:
                left = dict(watched.processes)
                del left[pid]
                watched.processes = left
                if not watched.processes and not watched.permanent:
                    self._close(netns)

    def update(self, decisions: Iterable[RailDecision], *, calm: bool = False) -> tuple[RailEthernet, ...]:
        """Read these rails from now on, say what is in trouble, forget what has been gone for long; returns `facts`.

        `calm`: nobody waits for readings.
        """
        rails: dict[int, list[tuple[str, str]]] = {}
        for decision in decisions:
            if decision.rail is not None:
                rails.setdefault(decision.device.netns, []).append((decision.rail, decision.device.name))
        state = self._sampler.state()
        for netns, watched in self._watched.items():
            watched.rails = tuple(rails.get(netns, ()))
            devices = tuple(device for _rail, device in watched.rails)
            self._set_periods(watched, self._period_of(watched, calm=calm), state)
            if devices != watched.devices:
                watched.devices = devices
                self._sampler.read_soon(watched.sources)
            self._log_trouble(watched, state)
        now_ns = self._clock.monotonic_ns()
        self._gone = {netns: gone for netns, gone in self._gone.items() if gone.until_ns > now_ns}
        return self._facts(state)

    def forget_others(self, namespaces: Collection[int]) -> None:
        """Forget what the rails of network namespaces showed that have gone, but for these."""
        self._gone = {netns: gone for netns, gone in self._gone.items() if netns in namespaces}

    def read_again(self, netns: int) -> None:
        """Read what may be older than usual in a namespace, now, and from now on as often as where nothing is calm.

        Waits for it, unless that takes long.
        """
        if (watched := self._watched.get(netns)) is not None:
            self._set_periods(watched, self._period_seconds, patience_seconds=_READ_PATIENCE_SECONDS)

    def facts(self) -> tuple[RailEthernet, ...]:
        """Every rail, those of namespaces that have gone lately included."""
        return self._facts(self._sampler.state())

    def _facts(self, state: SamplerState) -> tuple[RailEthernet, ...]:
        living = tuple(fact for watched in self._watched.values() for fact in _facts(watched, state, self._rules))
        return living + tuple(fact for gone in self._gone.values() for fact in gone.facts)

    def collectors(self) -> tuple[CollectorResult, ...]:
        """How reading goes, one result a source and namespace; a single device that fails is a failure."""
        state = self._sampler.state()
        results = [state.result(key) for watched in self._watched.values() for key in watched.remarks]
        return tuple(
            result.collector_result(every_device=True) for result in results if result is not None and result.reads
        )

    def unread_sources(self) -> tuple[str, ...]:
        """Sources that were not read yet, well or badly, since the rails of their namespace are known."""
        state = self._sampler.state()
        found = []
        for watched in self._watched.values():
            for key, source in watched.sources.items():
                result = state.result(key)
                if source.asked_for != watched.devices or (result is not None and result.reads < source.reads):
                    found.append(key)
        return tuple(found)

    def close(self) -> None:
        """Stop reading; the sampler continues."""
        for netns in list(self._watched):
            self._close(netns)
        self._gone.clear()
        self._aside.shutdown(wait=False, cancel_futures=True)

    def _asked(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Those whose drivers are asked for their statistics."""
        return tuple(one for one in devices if not any(fnmatchcase(one, pattern) for pattern in self._excluded))

    def _open(
        self, namespace: NetworkNamespace, *, permanent: bool, processes: Mapping[int, NetworkNamespace] = _NO_PROCESSES
    ) -> _Watched:
        """`processes`: those that live there, by pid; the sampler may read through them at once."""
        watched = self._watched[namespace.inode] = _Watched(namespace, permanent, processes=dict(processes))
        if (gone := self._gone.pop(namespace.inode, None)) is not None:
            watched.accounts = gone.accounts
        if self._queues:
            watched.queues = _Inside(
                watched.namespaces,
                lambda: QueueCounters(self._clock),
                lambda source: source.watch(watched.devices),
                lambda: watched.devices,
            )
            self._add(watched, "qdisc", watched.queues)
        if self._tcp:
            watched.connections = _Inside(
                watched.namespaces,
                lambda: TcpCounters(
                    self._clock,
                    self._procfs,
                    watched.accounts,
                    others=self._host_sockets,
                    party_of=self._parties.party_of,
                ),
                lambda source: source.watch(watched.devices, watched.processes),
                lambda: watched.devices,
            )
            self._add(watched, "tcp", watched.connections)
        # Last: a driver that asks its firmware for long does not delay an inspection of the others.
        if self._ethtool:
            watched.statistics = _Inside(
                watched.namespaces,
                lambda: EthtoolStatistics(self._clock, self._rules.use),
                lambda source: source.watch(self._asked(watched.devices)),
                lambda: self._asked(watched.devices),
            )
            self._add(watched, "ethtool", watched.statistics)
        return watched

    def _add(self, watched: _Watched, name: str, source: _Inside[Any]) -> None:
        key = watched.key(name)
        watched.sources[key] = source
        watched.remarks[key] = Remark(_log, key, "is read again")
        source.period_seconds = self._period_seconds
        self._sampler.add(key, _BY_SOURCE, source, self._period_seconds)

    def _period_of(self, watched: _Watched, *, calm: bool) -> float:
        if not watched.processes:
            return _IDLE_PERIODS * self._period_seconds
        return _CALM_PERIODS * self._period_seconds if calm else self._period_seconds

    def _set_periods(
        self, watched: _Watched, period_seconds: float, state: SamplerState | None = None, patience_seconds: float = 0.0
    ) -> None:
        """Read the sources of a namespace at this period from now on, but none that takes long more seldom than usual.

        `state`: as of now; None: none of them is to be read more seldom.

        If that is sooner than so far, a caller waits: they are read now, and the caller waits that long.
        """
        sooner = []
        for key, source in watched.sources.items():
            wanted_seconds = period_seconds
            if watched.processes and state is not None and _takes_long(state.result(key)):
                wanted_seconds = self._period_seconds
            if wanted_seconds < source.period_seconds:
                sooner.append(key)
            if wanted_seconds != source.period_seconds:
                source.period_seconds = wanted_seconds
                self._sampler.set_period(key, wanted_seconds)
        if sooner:
            self._sampler.read_soon(sooner, patience_seconds)

    def _close(self, netns: int) -> None:
        watched = self._watched.pop(netns)
        facts = tuple(_for_good(fact) for fact in _facts(watched, self._sampler.state(), self._rules))
        self._gone[netns] = _Gone(facts, watched.accounts, self._clock.monotonic_ns() + self._lifetime_ns)
        for key in watched.remarks:
            self._sampler.remove(key)

    def _log_trouble(self, watched: _Watched, state: SamplerState) -> None:
        """One line when trouble begins, changes or ends."""
        for key, remark in watched.remarks.items():
            result = state.result(key)
            if result is not None and result.reads:
                remark.say(join_troubles(trouble for trouble in result.troubles if trouble != _NOBODY_LEFT))


def _facts(watched: _Watched, state: SamplerState, rules: StatisticRules) -> Iterable[RailEthernet]:
    statistics = watched.statistics.opened if watched.statistics else None
    queues = watched.queues.opened if watched.queues else None
    connections = watched.connections.opened if watched.connections else None
    shown = {found.device: found for found in statistics.last} if statistics else {}
    waiting = {found.device: found for found in queues.last} if queues else {}
    faring = {found.device: found for found in connections.last} if connections else {}
    for rail, device in watched.rails:
        counted = state.device_of_source(watched.key("ethtool"), device)
        queue = state.device_of_source(watched.key("qdisc"), device)
        carried = state.device_of_source(watched.key("tcp"), device)
        reading = state.result(watched.key("tcp")) if watched.connections else None
        yield RailEthernet(
            netns=watched.namespace.inode,
            rail=rail,
            device=device,
            counters=ethernet_counters(shown[device], counted, rules) if device in shown and counted else (),
            gauges=ethernet_gauges(shown[device]) if device in shown else (),
            queue=rail_queue(waiting[device], queue) if device in waiting and queue else None,
            tcp=rail_tcp(faring[device], carried) if device in faring and carried else None,
            together=port_and_connections(
                carried,
                skew=reading.duration_seconds / PERIOD_SECONDS,
                undecided=connections.undecided.get(device, (0, 0)) if connections is not None else (0, 0),
                reading=reading.reads,
            )
            if carried and reading
            else None,
            awaited=carried is None and reading is not None and _will_come(reading, device),
        )


def _takes_long(reading: SourceResult | None) -> bool:
    """Whether reading a source again takes too long for a caller that waits."""
    return reading is not None and reading.duration_seconds > _READ_PATIENCE_SECONDS / 2


def _will_come(reading: SourceResult, device: str) -> bool:
    """Whether a device that a source has not read yet is to be read by it soon."""
    failed = {failure.device for failure in reading.failed_devices}
    return not reading.reads or (reading.success and device not in failed)


def _for_good(fact: RailEthernet) -> RailEthernet:
    """The last that is known of a rail whose connections are not read any more."""
    together = replace(fact.together, fresh=False) if fact.together is not None else None
    return replace(fact, together=together, awaited=False)
