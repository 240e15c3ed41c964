"""Who is paged of the faults of one fleet: a real Prometheus scrapes it, a real Alertmanager tells, the clock runs.

Faults happen one after the other.  Where scrapes are late, because the machine has no time for them, nothing is to be
learnt of alerts, and that is told.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fleet.servers import INTERVAL_SECONDS, Page, Stack, around, instance
from tests.fleet.simulation import Culprit, Fault, Fleet

_WARM_SECONDS: Final = 75.0
"""Until rates over a minute are known of all nodes."""
_FAULT_SECONDS: Final = 100.0
"""Scrape, evaluation, the alerts' own wait and Alertmanager's."""
_MENDED_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Paged:
    """What one fault came to in a fleet of one size."""

    nodes: int
    fault: str
    blamed: tuple[Culprit, ...]
    pages: tuple[Page, ...]
    innocents: int
    """Ranks that firing alerts call behind, and that only wait."""
    late_scrapes: int
    """Nodes that did not answer in time though their agents were well."""
    missed_evaluations: int
    """That Prometheus left out, because the one before was not over."""
    cores: float
    """Processors that Prometheus kept busy meanwhile, with scrapes and all."""
    longest_group_seconds: float
    """The longest evaluation of a group, by the clock."""
    resident_bytes: int


def measure_pages(nodes: int, faults: Sequence[Fault], profile: str) -> list[Paged]:
    """Let these faults happen one after the other, each to a fleet that was well for a while."""
    fleet = Fleet(nodes, 0.0, profile)
    with (
        tempfile.TemporaryDirectory(prefix="railscope-fleet-") as folder,
        around(nodes, Path(folder), profile) as servers,
    ):
        time.sleep(_WARM_SECONDS)
        paged = []
        for fault in faults:
            fleet.break_by(fault, time.time())
            paged.append(_watch(servers, fault, fleet))
            servers.break_by(Fault.NONE)
            time.sleep(_MENDED_SECONDS)
        return paged


def _watch(servers: Stack, fault: Fault, fleet: Fleet) -> Paged:
    servers.pagers.pages.clear()
    cpu_seconds, start, longest = servers.cpu_seconds(), time.monotonic(), 0.0
    servers.break_by(fault)
    while time.monotonic() - start < _FAULT_SECONDS:
        longest = max(longest, *servers.groups().values())
        time.sleep(INTERVAL_SECONDS / 3)
    lasted = time.monotonic() - start
    cores = (servers.cpu_seconds() - cpu_seconds) / lasted
    # Not its first seconds: an agent that falls silent has answered until then.
    window = f"{lasted - INTERVAL_SECONDS:.0f}s"
    silent = {labels["instance"] for labels, _ in servers.query(f'min_over_time(up{{job="railscope"}}[{window}]) == 0')}
    missed = servers.query(f"increase(prometheus_rule_group_iterations_missed_total[{window}])")
    return Paged(
        nodes=servers.nodes,
        fault=fault.value,
        blamed=fleet.culprits,
        pages=tuple(servers.pagers.pages),
        innocents=_count_innocents(servers, fleet.culprits),
        late_scrapes=len(silent - set(map(instance, fleet.silent))),
        missed_evaluations=round(sum(value for _, value in missed)),
        cores=cores,
        longest_group_seconds=longest,
        resident_bytes=servers.resident_bytes(),
    )


def _count_innocents(servers: Stack, culprits: Sequence[Culprit]) -> int:
    """How many ranks an alert calls behind that are none of these processes'."""
    guilty = {(instance(node), str(one.pid)) for one in culprits for node in one.nodes}
    firing = (
        'ALERTS{alertname="RailscopeRankBehindCommunicator",alertstate="firing"} '
        "* on (instance, comm, rank) group_left (pid) railscope_comm_info"
    )
    return sum((labels["instance"], labels["pid"]) not in guilty for labels, _ in servers.query(firing))
