"""The RDMA ports of this host: finds them, samples their counters and classifies them.

Every counter of mlx5 is a firmware command, so everything is read once a second, and the bytes alone as often as
asked for.  Where the kernel answers RDMA netlink, all hw_counters of a port come in one request.  Which ports there are
is read aside (agent/node/rails/rdma_machine.py).  A host without RDMA is an ordinary host: nothing is said, and devices
that come later are found.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.remarks import Remark
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.rails.counter_rules import TABLES_ONLY, OwnSeverities, Severity, rule_of
from railscope.agent.node.rails.rdma_machine import PATIENCE_SECONDS, RdmaMachine, RdmaMachineReader
from railscope.agent.node.sampling.sampler import Sampler
from railscope.agent.node.sampling.state import DeviceTotals, SamplerState, join_troubles
from railscope.probes.clock import Clock
from railscope.probes.netdev.inventory import UNKNOWN
from railscope.probes.rdma.counters import RdmaCounters
from railscope.probes.rdma.inventory import RdmaPort, class_folder
from railscope.probes.rdma.netlink import RdmaNetlink
from railscope.probes.rdma.port import choose_byte_counters
from railscope.probes.rdma.widths import GAUGES

_log = logging.getLogger("railscope.rdma")

DEFAULT_PERIOD_SECONDS: Final = 1.0
COUNTERS_KEY: Final = "rdma"
BYTES_KEY: Final = "rdma bytes"
_NETNS: Final = 0
"""RDMA devices are looked up by source, never by network namespace."""


@dataclass(frozen=True, slots=True)
class PortFacts:
    """One RDMA port and what it carried."""

    port: RdmaPort
    transmit_bytes: int | None
    """As the device counts them, never falling; None: it does not count bytes, or could not be read yet."""
    receive_bytes: int | None
    transmit_rate: Histogram | None
    receive_rate: Histogram | None
    counters: tuple[tuple[str, Severity, int], ...]
    """(counter, severity, count) of everything besides bytes, as the device counts and going on when that begins
    again: never falls."""
    pinned: tuple[str, ...]
    """Those of `counters` that stand at the most they can show: more may have happened since, and nothing says how
    much."""
    gauges: tuple[tuple[str, int], ...] = ()
    """(name, value of now) of what rises and falls."""


def port_facts(
    port: RdmaPort,
    counters: DeviceTotals | None,
    byte_counters: DeviceTotals | None = None,
    own_severities: OwnSeverities = TABLES_ONLY,
) -> PortFacts:
    """Bring together what is known of one RDMA port.

    `counters` are all its counters; `byte_counters`, read more often, take precedence for bytes.  None: not read.
    """
    severity = own_severities.of
    read = [totals for totals in (byte_counters, counters) if totals]
    sent = next((totals for totals in read if totals.transmit_counted), None)
    received = next((totals for totals in read if totals.receive_counted), None)
    counted = counters.counters if counters else ()
    return PortFacts(
        port=port,
        transmit_bytes=sent.transmit_bytes if sent else None,
        receive_bytes=received.receive_bytes if received else None,
        transmit_rate=sent.transmit_rate if sent else None,
        receive_rate=received.receive_rate if received else None,
        counters=tuple(
            [(name, severity(name, rule_of(name).severity), count) for name, count in counted if name not in GAUGES]
        ),
        pinned=counters.pinned if counters else (),
        gauges=tuple([(name, value) for name, value in counted if name in GAUGES]),
    )


class RdmaWatch:
    """Not thread-safe: the daemon's lock guards it.  The sampler is given, and reads in a thread of its own."""

    def __init__(
        self,
        clock: Clock,
        sampler: Sampler,
        *,
        sysfs: Path,
        period_seconds: float = DEFAULT_PERIOD_SECONDS,
        bytes_period_seconds: float | None = None,
        excluded: Sequence[str] = (),
        netlink: bool = True,
        own_severities: OwnSeverities = TABLES_ONLY,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`bytes_period_seconds` reads the bytes alone as well, at this period; None: they come with the others.

        `excluded` are patterns of devices and counters that are not read; `netlink` is to be False for a recorded tree.
        `patience_seconds`: see `RdmaMachineReader`.
        """
        self._clock = clock
        self._sampler = sampler
        self._sysfs = sysfs
        self._period_seconds = period_seconds
        self._bytes_period_seconds = bytes_period_seconds
        self._excluded = excluded
        self._use_netlink = netlink
        self._own_severities = own_severities
        self._watching = False
        self._reader = RdmaMachineReader(clock, sysfs, patience_seconds)
        self._half_counted: set[str] = set()
        """Ports of which that was said."""
        self._remark = Remark(_log, "RDMA counters", "all ports are readable again")
        self._hangs = Remark(_log, "RDMA devices", "they answer again")

    def update(self) -> None:
        """Learn which ports there are, begin to read when the first device comes, say what is in trouble."""
        if self._reader.update():
            if self._watching:
                self._tell_half_counted(self._sampler.state())
            elif self.ports:
                self._begin()
        self._hangs.say(
            "a device does not answer: which ports there are and whether they are up stays as it was read last"
            if self._reader.hangs_for_ns()
            else ""
        )
        if self._watching:
            state = self._sampler.state()
            results = [state.result(key) for key in (COUNTERS_KEY, BYTES_KEY)]
            troubles = [trouble for result in results if result is not None for trouble in result.troubles]
            self._remark.say(join_troubles(troubles))

    def _tell_half_counted(self, state: SamplerState) -> None:
        """Say once of a port that it counts the bytes of one direction only: nothing else is wrong with it."""
        for name in [port.name for port in self.ports if port.name not in self._half_counted]:
            read = [totals for key in (BYTES_KEY, COUNTERS_KEY) if (totals := state.device_of_source(key, name))]
            sent, received = any(one.transmit_counted for one in read), any(one.receive_counted for one in read)
            if sent != received:
                self._half_counted.add(name)
                way = "receives" if sent else "sends"
                _log.info("%s: the device does not count the bytes that it %s: they are not shown", name, way)

    @property
    def ports(self) -> tuple[RdmaPort, ...]:
        """Every port, as it was last read."""
        return self._reader.machine.ports

    @property
    def machine(self) -> RdmaMachine:
        """Those ports with their places; the same object while nothing changes."""
        return self._reader.machine

    def facts(self) -> tuple[PortFacts, ...]:
        """Every port and what it carried; whether it is up is unknown while a device does not answer."""
        state = self._sampler.state()
        ports = self.ports
        if self._reader.hangs_for_ns():
            ports = tuple(replace(port, state=UNKNOWN, physical_state=UNKNOWN) for port in ports)
        return tuple(
            port_facts(
                port,
                state.device_of_source(COUNTERS_KEY, port.name),
                state.device_of_source(BYTES_KEY, port.name),
                self._own_severities,
            )
            for port in ports
        )

    def collectors(self) -> tuple[CollectorResult, ...]:
        """How reading goes; a single port that fails is a failure, as is one that does not answer for its state.

        Empty on a host without RDMA.
        """
        read = [self._sampler.state().result(key) for key in (COUNTERS_KEY, BYTES_KEY)]
        results = [result.collector_result(every_device=True) for result in read if result is not None]
        hanging_ns = self._reader.hangs_for_ns()
        if hanging_ns:
            results[:1] = [CollectorResult(COUNTERS_KEY, False, hanging_ns / 1e9)]
        return tuple(results)

    def close(self) -> None:
        """Stop reading; the sampler continues."""
        self._sampler.remove(COUNTERS_KEY)
        self._sampler.remove(BYTES_KEY)
        self._watching = False

    def _begin(self) -> None:
        netlink = self._netlink()
        try:
            counters = RdmaCounters(self._sysfs, self._clock, netlink=netlink, excluded=self._excluded)
        except OSError as error:
            if netlink is not None:
                netlink.close()
            _log.warning("RDMA counters are not read: %s: %s", class_folder(self._sysfs), error.strerror)
            return
        self._watching = True
        self._sampler.add(COUNTERS_KEY, _NETNS, counters, self._period_seconds)
        if self._bytes_period_seconds is None:
            return
        try:
            only = RdmaCounters(self._sysfs, self._clock, wanted=choose_byte_counters, excluded=self._excluded)
        except OSError as error:
            _log.warning("RDMA byte counters are read only every %g s: %s", self._period_seconds, error.strerror)
            return
        self._sampler.add(BYTES_KEY, _NETNS, only, self._bytes_period_seconds)

    def _netlink(self) -> RdmaNetlink | None:
        if not self._use_netlink:
            return None
        try:
            return RdmaNetlink()
        except OSError as error:
            _log.info(
                "RDMA netlink does not work on this host (%s): hw_counters are read from sysfs, file by file",
                error.strerror,
            )
            return None
