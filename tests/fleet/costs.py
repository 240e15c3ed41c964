"""What the shipped rules and `railscope diagnose` cost a Prometheus that holds a fleet's last minutes, and the verdict.

No clock runs meanwhile (tests/fleet/past.py), and what is told is processor time: the machine may be busy otherwise.
The rules are evaluated at two moments, so that each finds what the others record and what was half a minute before;
then each is asked alone.
"""

from __future__ import annotations

import json
import resource
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.faults.cluster import RAILSCOPE
from tests.fleet.past import END, Past, began, past
from tests.fleet.rule_cost import RuleCost, evaluate_rules, measure_rules, read_rules
from tests.fleet.simulation import Culprit, Fault, Fleet

_HELD_SECONDS: Final = 105.0
"""Of which the fault was there for the last 90."""
_EVALUATED_SECONDS: Final = (1.0, 16.0)
_MEASURED_SECONDS: Final = 31.0
"""After the last scrape."""
_DIAGNOSE_SECONDS: Final = 600


@dataclass(frozen=True, slots=True)
class Blame:
    """What one finding of `railscope diagnose` blames."""

    cause: str
    hosts: frozenset[str]
    pids: frozenset[str]
    headline: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `railscope diagnose` said."""

    headline: str
    findings: tuple[Blame, ...]
    status: int
    seconds: float
    """From start to end, on a machine that may have been busy."""
    cpu_seconds: float
    """Of the command and of Prometheus together: on two idle processors it takes no longer."""

    @property
    def at_most_seconds(self) -> float:
        """What it takes at most of a machine that does nothing else."""
        return min(self.seconds, self.cpu_seconds)


@dataclass(frozen=True, slots=True)
class Costs:
    """What one fault costs in a fleet of one size, and what is said of it."""

    nodes: int
    fault: str
    series: int
    """That the nodes show."""
    rules: tuple[RuleCost, ...]
    blamed: tuple[Culprit, ...]
    """What is to be named."""
    diagnosis: Diagnosis

    @property
    def group_cpu_seconds(self) -> Mapping[str, float]:
        """Processor time of one evaluation, by group."""
        groups: dict[str, float] = defaultdict(float)
        for rule in self.rules:
            groups[rule.group] += rule.cpu_seconds
        return groups

    @property
    def dearest_group(self) -> tuple[str, float]:
        """Its name and processor time."""
        groups = self.group_cpu_seconds
        name = max(groups, key=lambda group: groups[group])
        return name, groups[name]

    @property
    def rules_cpu_seconds(self) -> float:
        """Of one evaluation of all rules."""
        return sum(rule.cpu_seconds for rule in self.rules)

    @property
    def right(self) -> bool:
        """Each culprit is found once, and nobody else."""
        wanted = {
            (
                one.cause.value,
                frozenset(f"node{node:04d}" for node in one.nodes),
                frozenset({str(one.pid)} if one.pid else ()),
            )
            for one in self.blamed
        }
        found = [(one.cause, one.hosts, one.pids) for one in self.diagnosis.findings]
        return len(found) == len(wanted) and set(found) == wanted


def measure_costs(nodes: int, fault: Fault, profile: str) -> Costs:
    """What a fault costs in a fleet of so many nodes."""
    with tempfile.TemporaryDirectory(prefix="railscope-fleet-") as folder:
        fleet = Fleet(nodes, began(), profile)
        with past(Path(folder) / "past", fleet, fault, seconds=_HELD_SECONDS) as server:
            series = round(server.query('count({__name__=~"railscope_.+"})', END)[0][1])
            diagnosis = _diagnose(server)
            rules = read_rules()
            for after in _EVALUATED_SECONDS:
                evaluate_rules(server, rules, END + after)
            costs = measure_rules(server, rules, END + _MEASURED_SECONDS)
    return Costs(nodes, fault.value, series, costs, fleet.culprits, diagnosis)


def _diagnose(server: Past) -> Diagnosis:
    command = [str(RAILSCOPE), "diagnose", "--prometheus", server.url, "--time", f"{END:.3f}", "--json"]
    command += ["--timeout", f"{_DIAGNOSE_SECONDS}s"]
    began_at, before = time.monotonic(), server.cpu_seconds()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _DIAGNOSE_SECONDS, check=False)
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts: dict[str, Any] = json.loads(done.stdout or json.dumps({"headline": done.stderr.strip(), "findings": []}))
    return Diagnosis(
        facts["headline"],
        tuple(
            Blame(one["cause"], frozenset(one["hosts"]), frozenset(map(str, one["pids"])), one["headline"])
            for one in facts["findings"]
        ),
        done.returncode,
        time.monotonic() - began_at,
        server.cpu_seconds() - before + own.ru_utime + own.ru_stime - children.ru_utime - children.ru_stime,
    )
