"""Two clusters in one store, whose hosts have the same names: rules, dashboards' variables and `diagnose --cluster`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from railscope.dashboards import recorded, rules_files
from tests.stack.fleet import SimulatedFleet, served
from tests.stack.prometheus import prometheus, store_at, until

pytestmark = pytest.mark.stack

HOSTS = 2


@dataclass
class Clusters:
    url: str
    east: SimulatedFleet
    west: SimulatedFleet

    def diagnose(self, *arguments: str) -> tuple[int, str]:
        """Exit status, and what is printed in one line."""
        command = [sys.executable, "-m", "railscope.agent.cli.main", "diagnose", "--prometheus", self.url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    # Agents that started at the same moment would be one that two servers scrape.
    east, west = SimulatedFleet("east", HOSTS), SimulatedFleet("west", HOSTS, began=time.time() - 60)
    with served([east, west]) as scrapes:
        for fleet in (east, west):
            for host in range(HOSTS):
                own = f"instance: '{fleet.name}{host}:9779'"
                assert own in scrapes
                scrapes = scrapes.replace(own, f"cluster: {fleet.name}, instance: 'node{host}:9779'")
        rules = [rules_files.SHIPPED / name for name in (rules_files.RECORDING, rules_files.ALERTS)]
        with prometheus(tmp_path_factory.mktemp("prometheus"), scrapes, rules) as url:
            store = store_at(url)
            until(lambda: len(store.query("railscope_build_info")) == 2 * HOSTS, "a scrape of every host")
            east.stall(rank0="rank_behind", rank1="process_stopped;blamed_rank=1")
            until(lambda: len(store.query("railscope_comm_stalled == 1")) == HOSTS, "a stall")
            yield Clusters(url, east, west)


def test_the_one_that_is_meant_is_judged(clusters: Clusters) -> None:
    status, said = clusters.diagnose("--cluster", "east")
    assert status == 1, said
    assert "rank 1 (pid 4001, node1) is stopped" in said
    status, said = clusters.diagnose("--cluster", "west")
    assert status == 0, said
    assert said.startswith("No stall: no host calls the only communicator stalled.")


def test_without_a_choice_it_is_said_that_hosts_may_be_mixed(clusters: Clusters) -> None:
    _, said = clusters.diagnose()
    assert "agents that only cluster tells apart" in said
    assert "name one with --cluster" in said


def test_a_cluster_that_is_not_there_is_one_line(clusters: Clusters) -> None:
    status, said = clusters.diagnose("--cluster", "north")
    assert (status, said) == (
        2,
        "railscope diagnose: --cluster: the store has seen no host with the label cluster=north within the last hour, "
        "but east, west",
    )


def test_rules_keep_them_apart(clusters: Clusters) -> None:
    store = store_at(clusters.url)
    found = f'{recorded.STALL_EVIDENCE_ROOT}{{comm="{clusters.east.comm}"}}'
    until(lambda: [one.labels["cluster"] for one in store.query(found)] == ["east"], "the stall, of its cluster")
    silent = 'ALERTS{alertname="RailscopeAgentSilent"}'
    clusters.west.silent = {1}
    until(lambda: bool(store.query(silent)), "the silent host")
    assert {(one.labels["cluster"], one.labels["instance"]) for one in store.query(silent)} == {("west", "node1:9779")}
