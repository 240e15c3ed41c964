"""`railscope diagnose` on a real Prometheus that scrapes simulated agents every second."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.stack.fleet import SimulatedFleet, served
from tests.stack.prometheus import prometheus, store_at, until

pytestmark = pytest.mark.stack

HISTORY_SECONDS = 12
"""Scrapes of a healthy fleet before anything happens: enough to learn what is usual."""


@dataclass
class Cluster:
    """Jobs on hosts of their own; each will get a fault, but for `fine`, `save` and `pack`."""

    url: str
    jobs: dict[str, SimulatedFleet]
    before: float
    """A moment at which everything was healthy."""

    def diagnose(self, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "railscope.agent.cli.main", "diagnose", "--prometheus", self.url, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    def finding(self, job: str) -> dict[str, Any]:
        """The root cause that is found for a job's communicator."""
        _, text = self.diagnose("--json", "--comm", self.jobs[job].comm)
        findings = json.loads(text)["findings"]
        return findings[0] if findings else {}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    names = {"stop": 2, "gone": 4, "down": 2, "slow": 2, "skip": 4, "lost": 4, "late": 2, "fine": 2}
    names |= {"save": 2, "pack": 2, "soon": 3}
    jobs = {name: SimulatedFleet(name, hosts) for name, hosts in names.items()}
    with served(list(jobs.values())) as scrapes:
        with prometheus(tmp_path_factory.mktemp("prometheus"), scrapes) as url:
            store = store_at(url)
            until(lambda: len(store.query("railscope_build_info")) == sum(names.values()), "a scrape of every host")
            scrapes_seen = "min(count_over_time(railscope_build_info[1m]))"
            before = store.query("max(count_over_time(railscope_build_info[1m]))")[0].value
            jobs["late"].restart_agent(1)
            until(lambda: store.query(scrapes_seen)[0].value >= before + HISTORY_SECONDS, "some history")
            yield Cluster(url, jobs, store.query("time()")[0].value)


def test_a_healthy_cluster_is_fine(cluster: Cluster) -> None:
    status, text = cluster.diagnose()
    assert status == 0
    assert text.startswith("No stall: no host calls any of 11 communicators stalled.\n")


def test_who_is_behind_is_named_before_any_host_calls_it_a_stall(
    cluster: Cluster, record_testsuite_property: Any
) -> None:
    job = cluster.jobs["soon"]
    job.behind = 2
    job.stall()
    began = time.monotonic()
    said = ""

    def named() -> bool:
        nonlocal said
        status, text = cluster.diagnose()
        said = " ".join(text.split())
        assert status == 0
        return said.startswith(
            f"No stall yet: communicator {job.comm} waits for rank 2 (pid 4002, soon2), which is 1 operation behind; "
            "the oldest wait is "
        )

    until(named, "the rank that is behind to be named, last said", instead=lambda: said)
    # Two scrapes of a second, the question itself, and what a busy machine takes.
    record_testsuite_property("diagnose_early_seconds", time.monotonic() - began)
    print(f"{time.monotonic() - began:.1f} s")
    job.recover()
    until(lambda: cluster.diagnose()[1].startswith("No stall: no host calls any of 11"), "it goes on")


@pytest.fixture(scope="module")
def seconds_until_named(cluster: Cluster) -> dict[str, float]:
    """All faults at once, and how long each took until the verdict named the right one."""
    jobs = cluster.jobs
    jobs["stop"].behind = 1
    jobs["stop"].stall(rank0="rank_behind", rank1="process_stopped;blamed_rank=1")
    jobs["gone"].stall(**dict.fromkeys(("rank0", "rank1", "rank3"), "rank_behind"), rank2="process_gone;blamed_rank=2")
    jobs["down"].rails_down.add((1, 0))
    jobs["down"].stall(rank0="unknown;strength=weak", rank1="rail_down;rail=0,device=eth0")
    jobs["slow"].slow.add((0, 1))
    jobs["slow"].stall(rank0="rail_slow;rail=1,device=eth1", rank1="rail_slow;rail=1,device=eth1")
    jobs["skip"].behind = 2
    jobs["skip"].stall(**dict.fromkeys(("rank0", "rank1", "rank3"), "rank_behind"))
    jobs["lost"].silent.add(3)
    jobs["lost"].stall(**dict.fromkeys(("rank0", "rank1", "rank2"), "rank_behind"))
    jobs["late"].behind = 0
    jobs["late"].stall(rank1="rank_behind")
    began = time.monotonic()
    expected = {
        "stop": ("process_stopped", [1], ["stop1"], []),
        "gone": ("process_gone", [2], ["gone2"], []),
        "down": ("rail_down", [], ["down1"], ["eth0"]),
        "slow": ("rail_slow", [], ["slow0", "slow1"], ["eth1", "eth1"]),
        "skip": ("rank_behind", [2], ["skip2"], []),
        "lost": ("rank_missing", [3], ["lost3"], []),
    }
    named: dict[str, float] = {}
    said: dict[str, str] = {}

    def all_named() -> bool:
        _, text = cluster.diagnose("--json")
        found = {one["comm"]: one for one in json.loads(text)["findings"]}
        for job, (cause, ranks, hosts, devices) in expected.items():
            one = found.get(jobs[job].comm)
            if one and (one["cause"], one["ranks"], one["hosts"], one["devices"]) == (cause, ranks, hosts, devices):
                named.setdefault(job, time.monotonic() - began)
            said[job] = f"{one['headline']} {one['unknown']}" if one else "nothing"
        return named.keys() == expected.keys()

    def instead() -> str:
        return "; ".join(f"{job}: {said.get(job, 'nothing')}" for job in expected if job not in named)

    until(all_named, "every fault to be named, last said", instead=instead)
    return named


def test_each_fault_is_named_with_its_rank_or_rail(
    seconds_until_named: dict[str, float], record_testsuite_property: Any
) -> None:
    # The aim is five seconds at one scrape a second; machines that are busy with other tests take longer.
    record_testsuite_property("diagnose_seconds", seconds_until_named)
    print({job: f"{seconds:.1f} s" for job, seconds in seconds_until_named.items()})
    assert len(seconds_until_named) == 6


@pytest.mark.usefixtures("seconds_until_named")
def test_the_text_names_the_rank_first_and_says_what_to_do(cluster: Cluster) -> None:
    status, text = cluster.diagnose("--comm", cluster.jobs["stop"].comm)
    assert status == 1
    assert "rank 1 (pid 4001, stop1) is stopped" in " ".join(text.split("\n\n")[0].split())
    assert "stop1: kill -CONT 4001" in text
    # Ten, less or more where a busy machine scrapes early or late.
    assert re.search(r"rank 1 made (9|10|11)\.\d calls/s before the stall", " ".join(text.split()))


@pytest.mark.usefixtures("seconds_until_named")
def test_a_silent_host_is_told_as_what_cannot_be_known(cluster: Cluster) -> None:
    finding = cluster.finding("lost")
    assert any("rank 3 on lost3: its agent has not answered for" in line for line in finding["unknown"])


@pytest.mark.usefixtures("seconds_until_named")
def test_a_rank_whose_agent_was_restarted_is_compared_by_what_was_usual(cluster: Cluster) -> None:
    finding = cluster.finding("late")
    assert (finding["cause"], finding["ranks"], finding["hosts"]) == ("rank_behind", [0], ["late0"])
    assert any("estimated from history" in line for line in finding["evidence"])


@pytest.mark.usefixtures("seconds_until_named")
def test_the_healthy_job_is_not_among_the_findings_and_can_be_asked_for(cluster: Cluster) -> None:
    _, text = cluster.diagnose("--json")
    verdict = json.loads(text)
    assert cluster.jobs["fine"].comm not in {one["comm"] for one in verdict["findings"]}
    assert len(verdict["findings"]) == 7
    status, text = cluster.diagnose("--comm", cluster.jobs["fine"].comm)
    assert status == 0
    assert "ranks make" in text


@pytest.mark.usefixtures("seconds_until_named")
def test_the_past_can_be_asked_for(cluster: Cluster) -> None:
    assert cluster.diagnose("--time", str(cluster.before))[0] == 0
    assert cluster.diagnose()[0] == 1


@pytest.mark.usefixtures("seconds_until_named")
def test_a_checkpoint_is_no_stall_while_it_lasts_nor_when_it_has_just_ended(cluster: Cluster) -> None:
    job, store = cluster.jobs["save"], store_at(cluster.url)
    flags = f'count(railscope_comm_stall_info{{comm="{job.comm}"}})'
    job.behind = job.writing = 0
    job.stall(rank1="rank_behind;blamed_rank=0")
    writes = f'railscope_comm_writing{{comm="{job.comm}"}}'
    until(lambda: store.query(flags) != () and store.query(writes) != (), "both hosts to tell of it")
    status, text = cluster.diagnose("--comm", job.comm)
    said = " ".join(text.split())
    assert (status, said.partition(" As of")[0].partition(" - ")[0]) == (
        0,
        f"No stall: communicator {job.comm} waits for rank 0 (pid 4000, save0), which writes to storage: a checkpoint?",
    )
    job.recover()
    until(lambda: store.query(flags) == (), "nobody to call it stalled any more")
    status, text = cluster.diagnose("--comm", job.comm)
    assert (status, "which wrote to storage" in " ".join(text.split())) == (0, True)


@pytest.mark.usefixtures("seconds_until_named")
def test_a_checkpoint_is_no_stall_where_the_host_that_writes_was_scraped_last(cluster: Cluster) -> None:
    job, store = cluster.jobs["pack"], store_at(cluster.url)
    flags = f'count(railscope_comm_stall_info{{comm="{job.comm}"}})'
    job.behind = 0
    job.stall(rank1="rank_behind;blamed_rank=0")
    until(lambda: store.query(flags) != (), "the host that waits to tell of it")
    job.causes, job.writing = {}, 0
    until(lambda: store.query(f'railscope_comm_writing{{comm="{job.comm}"}}') != (), "the other one to tell why")
    job.recover()
    until(lambda: store.query(flags) == (), "nobody to call it stalled any more")
    status, text = cluster.diagnose("--comm", job.comm)
    assert (status, "which wrote to storage" in " ".join(text.split())) == (0, True)


def test_a_store_without_railscope_and_an_unknown_communicator_are_one_line(cluster: Cluster) -> None:
    status, text = cluster.diagnose("--time", "2001-01-01T00:00:00Z")
    assert (status, text.count("\n")) == (2, 1)
    assert "no series of railscope" in text
    status, text = cluster.diagnose("--comm", "abcdef")
    assert (status, text.count("\n")) == (2, 1)
    assert "no communicator abcdef" in text


@pytest.mark.usefixtures("seconds_until_named")
def test_who_asks_when_it_has_just_gone_on_gets_the_verdict_all_the_same(cluster: Cluster) -> None:
    job, store = cluster.jobs["fine"], store_at(cluster.url)
    flags = f'count(railscope_comm_stall_info{{comm="{job.comm}"}})'
    job.slow.add((0, 1))
    job.stall(**dict.fromkeys(("rank0", "rank1"), "rail_slow;rail=1,device=eth1"))
    until(lambda: [one.value for one in store.query(flags)] == [2.0], "both hosts to call it stalled")
    job.recover()
    until(lambda: store.query(flags) == (), "nobody to call it stalled any more")
    status, text = cluster.diagnose("--comm", job.comm)
    assert status == 1
    assert text.startswith("STALLED until ")
    assert "not at this moment: AllReduce on" in " ".join(text.split())
    finding = cluster.finding("fine")
    assert (finding["cause"], finding["hosts"][0], finding["now"]) == ("rail_slow", "fine0", False)
