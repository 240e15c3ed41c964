"""Selects the series that are exposed, and sums those that are not; `--series.detail` adds more.

A node with eight GPUs counts some five thousand things; most of them are 0 for as long as all is well, or tell again
what others tell.  What is left out follows rules that hold for every node, so that a query finds the same everywhere:

* `counters`: a rail's counters of which any increase matters (`page`) are always there, because an alert on an
  increase needs the 0 before it.  Of the others those are shown that have counted something, and of the `context` ones
  only those that tell of congestion, and not of traffic.  Beside them stands a sum for each severity, which is there
  from the start and moves with every counter, shown or not.  Lanes are shown of links that are degraded.
* `nvlinks`: bytes and state are shown of each link; speed and utilization of each GPU; errors of each GPU, and of a
  link once it had some.
* `devices`: a port of an RDMA device is a network device too.  Short-interval rates and TCP of that one are shown once
  a job has used it for TCP, or where TCP is not observed.
* `buckets`: see exporters/series/buckets.py.

What begins to be shown stays.  Sums are of increases since railscope first saw a counter, so that one that is read
later than its neighbours, or not for a while, neither lifts nor lowers them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.snapshot import RailFacts, RailTcp
from railscope.exporters.series.family import LabelValues

DETAILS: Final = ("counters", "nvlinks", "devices", "buckets")
ALL: Final = "all"
SUMMED: Final = ("page", "warn")
"""Severities that have a sum: what is `context` has no common unit."""

_ALWAYS: Final = "page"
_CONTEXT: Final = "context"
_CONGESTION: Final = re.compile(
    r"cnp|ecn|rx_ce_|mark|pause|pfc|xo(?:n|ff)|xmit_wait|out_of_buffer|slow_restart", re.IGNORECASE
)
_MOST_OWNERS: Final = 10_000
"""Beyond any node's rails and GPUs; devices of containers come and go for as long as the agent runs."""
_NO_RATES: Final = Histogram((), (), None)


class Selection:
    """What is shown, and what all counters rose by.  One lives as long as the agent; for one thread at a time."""

    def __init__(self, detail: Collection[str] = ()) -> None:
        self.set_detail(detail)
        self._sums: dict[LabelValues, _Sum] = {}
        """By owner, the one that was asked for last at the end."""
        self._with_rates: dict[LabelValues, None] = {}
        """Network devices whose rates were shown, the one that was met last at the end."""

    def set_detail(self, detail: Collection[str]) -> None:
        """Select what is shown beyond the usual, from the next exposition on; from any thread.

        Raises:
            ValueError: there is no such detail.
        """
        wanted = frozenset(DETAILS if ALL in detail else detail)
        if not wanted <= set(DETAILS):
            raise ValueError(f"no such detail: {', '.join(sorted(wanted - set(DETAILS)))}")
        self.counters = "counters" in wanted
        self.nvlinks = "nvlinks" in wanted
        self.devices = "devices" in wanted
        self.buckets = "buckets" in wanted

    def select_counters(self, rail: RailFacts) -> Iterable[tuple[str, str, int]]:
        """(counter, severity, value) of those counters that are shown."""
        if self.counters:
            return rail.counters
        return [
            (counter, severity, value)
            for counter, severity, value in rail.counters
            if severity == _ALWAYS or (value and (severity != _CONTEXT or _CONGESTION.search(counter)))
        ]

    def select_rails(self, rails: tuple[RailFacts, ...]) -> tuple[RailFacts, ...]:
        """The rails, without rates and connections of network devices that only RDMA uses."""
        if self.devices:
            return rails
        of_rdma = {one.rail for one in rails if one.port}
        return tuple(
            replace(one, transmit_rate=_NO_RATES, receive_rate=_NO_RATES, tcp=None)
            if not one.port and not self._shows_rates(one, one.rail in of_rdma)
            else one
            for one in rails
        )

    def _shows_rates(self, device: RailFacts, of_rdma: bool) -> bool:
        """Whether rates and connections of a network device are shown, which stays so."""
        key = (device.rail, device.device, device.netns)
        unused = device.tcp_awaited if device.tcp is None else _never_used(device.tcp)
        if of_rdma and unused and key not in self._with_rates:
            return False
        self._with_rates.pop(key, None)
        self._with_rates[key] = None
        if len(self._with_rates) > _MOST_OWNERS:
            del self._with_rates[next(iter(self._with_rates))]
        return True

    def total_increase(self, whose: LabelValues, counters: Iterable[tuple[str, int]]) -> int:
        """What counters of one owner rose by together, since each was first seen; never falls.

        `counters` are all of the owner's at one moment.  Those of one name are shown as their sum, so that is compared.
        """
        found = self._sums[whose] = self._sums.pop(whose) if whose in self._sums else _Sum()
        together: defaultdict[str, list[int]] = defaultdict(list)
        for counter, value in counters:
            together[counter].append(value)
        for counter, values in together.items():
            many, value = len(values), sum(values)
            known, before = found.last.get(counter, (many, value))
            if many != known:
                # One more or one less of that name: nothing has happened that could be counted.
                before = value
            found.last[counter] = (many, max(before, value))
            found.risen += max(0, value - before)
        if len(self._sums) > _MOST_OWNERS:
            del self._sums[next(iter(self._sums))]
        return found.risen


@dataclass(slots=True)
class _Sum:
    """What counters of one owner rose by."""

    risen: int = 0
    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name, how many counters have it, and the most that they have shown together."""


def _never_used(tcp: RailTcp) -> bool:
    return not (tcp.connections or tcp.sent_bytes or tcp.received_bytes)
