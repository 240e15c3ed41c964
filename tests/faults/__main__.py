"""`python -m tests.faults`: the fault matrix, and random faults and controls, as tables and JSON.

Needs root, two cores that are not busy otherwise, and the packages of `make packages-test`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.matrix import MATRIX
from tests.faults.observation import Observation, summary, table, write_json
from tests.faults.randomised import random_scenarios
from tests.faults.runner import run
from tests.faults.scenarios import AGENT, Scenario


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="scenarios whose name contains one of these")
    parser.add_argument("--library", choices=("workload", "nccl"), help="scenarios of one library")
    parser.add_argument("--hosts", type=int, choices=(2, 4), help="scenarios with so many hosts")
    parser.add_argument("--random", type=int, metavar="N", default=20, help="random faults, and as many controls")
    parser.add_argument("--no-controls", action="store_true", help="random faults without as many controls")
    parser.add_argument("--seed", type=int, metavar="N", default=1, help="of what is random (default: 1)")
    parser.add_argument("--skip-matrix", action="store_true", help="only random ones")
    parser.add_argument("--list", action="store_true", help="name the scenarios and leave")
    parser.add_argument("--json", metavar="PATH", type=Path, default=Path("fault-matrix.json"))
    options = parser.parse_args()
    fixed = [] if options.skip_matrix else [one for one in MATRIX if _wanted(one, options)]
    drawn = [
        one
        for one in random_scenarios(options.random, options.seed)
        if _wanted(one.scenario, options) and not (options.no_controls and one.scenario.control)
    ]
    if options.list:
        print("\n".join(f"{one.library.value:9} {one.hosts} {one.name}" for one in fixed))
        return 0
    if os.geteuid() != 0:
        print("the fault matrix makes network namespaces and loads BPF programs: run it as root", file=sys.stderr)
        return 1
    seen: list[Observation] = []
    by_chance: list[Observation] = []
    matrix = [(scenario, 0.0) for scenario in fixed]
    for work, done in ((matrix, seen), ([(one.scenario, one.moment_seconds) for one in drawn], by_chance)):
        for observed in _run_all(work):
            done.append(observed)
            # After each one: a run that is ended early has not run for nothing.
            write_json(options.json, seen, by_chance, seed=options.seed)
    if seen:
        print(f"\n{table(seen)}\n\nmatrix: {summary(seen)}")
    if by_chance:
        print(f"\n{table(by_chance)}\n\nrandom, seed {options.seed}: {summary(by_chance)}")
    return 0 if all(one.right for one in (*seen, *by_chance)) else 1


def _wanted(scenario: Scenario, options: argparse.Namespace) -> bool:
    return (
        (options.only is None or any(text in scenario.name for text in options.only))
        and (options.library is None or scenario.library.value == options.library)
        and (options.hosts is None or scenario.hosts == options.hosts)
    )


def _run_all(work: Iterable[tuple[Scenario, float]]) -> Iterable[Observation]:
    """Run scenarios, those with the same number of hosts on one cluster after another."""
    by_hosts: dict[int, list[tuple[Scenario, float]]] = {}
    for scenario, moment_seconds in work:
        by_hosts.setdefault(scenario.hosts, []).append((scenario, moment_seconds))
    for hosts, scenarios in sorted(by_hosts.items()):
        yield from _run_on(hosts, scenarios)


def _run_on(hosts: int, scenarios: Sequence[tuple[Scenario, float]]) -> Iterable[Observation]:
    with Cluster(hosts, agent=AGENT, prometheus=True) as cluster:
        for scenario, moment_seconds in scenarios:
            if scenario.hide_host:  # the store must never have heard of it
                with Cluster(hosts, agent=AGENT) as blind:
                    observed = run(blind, scenario, moment_seconds=moment_seconds)
            else:
                observed = run(cluster, scenario, moment_seconds=moment_seconds)
            for agent in cluster.agents:
                agent.mend()
            print(table([observed]).splitlines()[1], flush=True)
            yield observed


if __name__ == "__main__":
    sys.exit(main())
