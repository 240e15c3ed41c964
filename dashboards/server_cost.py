"""Estimates memory and CPU time that a fleet takes of a Prometheus, and of a VictoriaMetrics with vmalert.

Measured with the shipped rules on simulated fleets of typical nodes that both scrape every 15 s
(`python -m tests.fleet.stores`: Prometheus 2.42 and VictoriaMetrics 1.79, of which each had 152 and 134 MB at 8 nodes,
396 and 236 at 32, 1,403 and 641 at 128, after five minutes).  Memory grows with series, the time of scrapes with
samples, that of rules with ranks, each with the exponent that was measured: for Prometheus by the processor time of an
evaluation (`python -m tests.fleet --only costs`: 0.20, 0.67 and 2.83 s at 8, 32 and 128 nodes).  A server
that has served for hours, or that people query, takes more: plan twice as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_RULES_SECONDS: Final = 15.0
"""Between two evaluations of the shipped rules."""
_SECONDS_OF_A_DAY: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Growth:
    """A figure that was measured of one amount, and how it grows with it."""

    value: float
    at: float
    """The amount."""
    exponent: float

    def of(self, amount: float) -> float:
        """The figure of another amount."""
        return self.value * math.pow(amount / self.at, self.exponent)


@dataclass(frozen=True, slots=True)
class Server:
    """What a server was measured to take."""

    name: str
    base_bytes: float
    bytes_per_series: float
    remembered_seconds: float
    """For how long a series that has ended stays in memory, at most."""
    scrapes: Growth
    """Cores, of samples a second."""
    rules: Growth
    """Cores, of ranks, where rules are evaluated every 15 s."""


@dataclass(frozen=True, slots=True)
class ServerCost:
    """What a fleet takes of a server."""

    server: str
    resident_bytes: float
    scrape_cores: float
    rule_cores: float
    rule_seconds: float
    """CPU time of one evaluation of all rules."""

    @property
    def cores(self) -> float:
        return self.scrape_cores + self.rule_cores


_SAMPLES: Final = 24_400.0
"""A second, of 128 nodes."""
_RANKS: Final = 8_192.0
"""Of 128 nodes."""
SERVERS: Final = (
    # Its head holds the last two to three hours.
    Server("Prometheus", 66e6, 3_313.0, 10_800.0, Growth(0.057, _SAMPLES, 1.0), Growth(0.189, _RANKS, 0.96)),
    # It forgets a series an hour after its last sample.
    Server("VictoriaMetrics", 99e6, 1_343.0, 3_600.0, Growth(0.079, _SAMPLES, 1.0), Growth(0.453, _RANKS, 0.95)),
)
"""Scrapes grew with exponents of 0.8 to 1.1, within what two cores that others use can tell from 1."""


def estimate_server_cost(
    server: Server, *, series: float, samples_per_second: float, ranks: float, new_series_per_day: float
) -> ServerCost:
    """What a fleet takes of a server.

    Args:
        server: which, as it was measured.
        series: at any moment.
        samples_per_second: that are scraped.
        ranks: ends of communicators, which rules compare.
        new_series_per_day: that come in place of others, as where jobs start anew.
    """
    ended = new_series_per_day * server.remembered_seconds / _SECONDS_OF_A_DAY
    rule_cores = server.rules.of(ranks) if ranks else 0.0
    return ServerCost(
        server.name,
        server.base_bytes + server.bytes_per_series * (series + ended),
        server.scrapes.of(samples_per_second),
        rule_cores,
        rule_cores * _RULES_SECONDS,
    )
