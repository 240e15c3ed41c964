"""Several Prometheus servers over one fleet: spread by partition, as the manual says, and by host, as it warns of.

The relabelling is the manual's own.  Agents are simulated.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import yaml

from railscope.agent.cluster.fleet.prometheus import PrometheusStore
from railscope.dashboards import recorded, rules_files
from tests.stack.fleet import SimulatedFleet, served
from tests.stack.prometheus import prometheus, store_at, until
from tests.stack.stack import DEPLOY

pytestmark = pytest.mark.stack

RULES: Final = [rules_files.SHIPPED / name for name in (rules_files.RECORDING, rules_files.ALERTS)]
SHARDS: Final = {"train": "0", "p0": "3"}
"""By partition: the last eight bytes of its MD5, modulo four, as Prometheus has it."""
HOSTS: Final = 3
HISTORY_SCRAPES: Final = 12
BY_HOST: Final = "by host"


@dataclass
class Shards:
    """Two jobs, each in a partition of its own, and who scrapes them."""

    train: SimulatedFleet
    p0: SimulatedFleet
    urls: dict[str, str]

    def store(self, which: str) -> PrometheusStore:
        return store_at(self.urls[which])

    def instances(self, which: str) -> set[str]:
        return {one.labels["instance"] for one in self.store(which).query("railscope_build_info")}

    def diagnose(self, which: str) -> tuple[int, str]:
        """Exit status, and what is printed in one line."""
        command = [sys.executable, "-m", "railscope.agent.cli.main", "diagnose", "--prometheus", self.urls[which]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, " ".join((done.stdout + done.stderr).split())


def manual_relabelling() -> str:
    """What the manual tells to copy."""
    blocks = re.findall(r"```yaml\n(.*?)```", (DEPLOY / "prometheus/README.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "hashmod" in block]
    return str(found)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    train, p0 = SimulatedFleet("train", HOSTS), SimulatedFleet("p0", HOSTS)
    with served([train, p0]) as scrapes, ExitStack() as stack:
        for fleet in (train, p0):
            scrapes = scrapes.replace(
                f"{{instance: '{fleet.name}", f"{{partition: {fleet.name}, instance: '{fleet.name}"
            )
        urls = {}

        def start(name: str, folder: Path, scrapes: str) -> None:
            urls[name] = stack.enter_context(prometheus(folder, scrapes, RULES))

        for partition, shard in SHARDS.items():
            relabelling = yaml.safe_load(manual_relabelling().replace("'2'", f"'{shard}'"))
            configuration = yaml.safe_load(scrapes)
            configuration["scrape_configs"][0] |= relabelling
            start(partition, tmp_path_factory.mktemp(partition), yaml.safe_dump(configuration))
        keep = {"source_labels": ["instance"], "regex": "(train|p0)0:9779", "action": "keep"}
        configuration = yaml.safe_load(scrapes)
        configuration["scrape_configs"][0]["relabel_configs"] = [keep]
        start(BY_HOST, tmp_path_factory.mktemp("host"), yaml.safe_dump(configuration))
        found = Shards(train, p0, urls)
        until(lambda: all(len(found.instances(one)) == HOSTS for one in SHARDS), "a scrape of every host")
        seen = "min(count_over_time(railscope_build_info[1m]))"
        until(lambda: found.store("train").query(seen)[0].value >= HISTORY_SCRAPES, "enough to learn what is usual")
        train.behind = 2
        train.stall(rank0="rank_behind", rank1="rank_behind")
        until(lambda: bool(found.store(BY_HOST).query("railscope_comm_stalled == 1")), "a stall")
        yield found


def test_each_job_is_whole_at_one_of_them(shards: Shards) -> None:
    for partition in SHARDS:
        assert shards.instances(partition) == {f"{partition}{host}:9779" for host in range(HOSTS)}


def test_who_sees_all_ranks_names_the_one_that_is_behind_and_the_others_say_nothing(shards: Shards) -> None:
    behind = recorded.OPERATIONS_BEHIND_ROOT.name
    until(lambda: [one.labels["rank"] for one in shards.store("train").query(behind)] == ["2"], "who is behind")
    until(lambda: "rank 2 (pid 4002, train2)" in shards.diagnose("train")[1], "the verdict on who is behind")
    assert shards.diagnose("train")[0] == 1
    assert shards.store("train").query(recorded.STALL_NOT_JUDGED.name) == ()
    assert shards.diagnose("p0")[0] == 0


def test_who_sees_only_ranks_that_wait_says_that_it_cannot_know(shards: Shards) -> None:
    store = shards.store(BY_HOST)
    until(lambda: bool(store.query(recorded.STALL_NOT_JUDGED.name)), "a stall that cannot be judged")
    assert store.query(recorded.STALL_EVIDENCE_ROOT.name) == ()
    assert {one.labels["alertname"] for one in store.query("ALERTS")} == {"RailscopeStallNotJudged"}
    status, said = shards.diagnose(BY_HOST)
    assert status == 1, said
    assert "Cannot be known" in said, said
