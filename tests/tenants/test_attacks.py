"""One user attacks the agent while another user's job runs: the job is counted to the last call, its rails are shown.

The agent stays small and answers; it ends at once when it is told to.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.dataset.reader import open_dataset
from railscope.agent.node.collectives.stragglers import MOST_GROUPS
from railscope.agent.node.stalls.told_calls import MOST_OF_A_USER
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import LIBRARY, Job, JobOptions
from tests.fabric.agent_process import RAILSCOPE, AgentProcess
from tests.fabric.test_datasets import recorded
from tests.fabric.test_recordings import said
from tests.tenants.attacks import (
    UID,
    as_user,
    compiled,
    copies_of,
    costly_debug_information,
    endless_symbols,
    own,
    watching,
)

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.slow]

Attack = Callable[[Path], AbstractContextManager[object]]
MOST_SCRAPE_S, MOST_HEALTH_S, MOST_END_S = 1.0, 0.2, 5.0
MOST_BYTES = 200 << 20
SLACK = 2.0
"""Times the bounds above: the machine that tests run on does other things at the same time."""


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(hosts=2, rails=2) as made:
        yield made


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that the attacker can reach: pytest closes its own to others whenever another pytest begins."""
    with tempfile.TemporaryDirectory(prefix="railscope-attacks-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@contextmanager
def a_write_lease(folder: Path) -> Iterator[None]:
    mapper = compiled("mapper.c", folder / "mapper")
    files = [folder / f"leased{at}" for at in range(4)]
    for file in files:
        file.write_bytes(bytes(8192))
    with as_user(mapper, "--lease", *own(*files)):
        yield


@contextmanager
def twelve_million_symbols(folder: Path) -> Iterator[None]:
    mapper = compiled("mapper.c", folder / "mapper")
    library = endless_symbols(folder / "endless.so", 12_000_000)
    try:
        with as_user(mapper, library):
            yield
    finally:
        library.unlink()


@contextmanager
def more_libraries_than_there_are_places(folder: Path) -> Iterator[None]:
    mapper = compiled("mapper.c", folder / "mapper")
    copies = copies_of(compiled("forged.c", folder / "forged.so", "-shared", "-fPIC"), folder, 300)
    with as_user(mapper, *copies):
        yield


@contextmanager
def libraries_that_are_dear_to_read(folder: Path) -> Iterator[None]:
    mapper = compiled("mapper.c", folder / "mapper")
    with as_user(mapper, *costly_debug_information(folder, 30)):
        yield


def forged_communicators(number: int, threads: int = 0, local_ranks: int = 0) -> Attack:
    """So many, and threads that each stay inside a call on one of them.

    `local_ranks`: of the two ranks of each, so many on this host; 0: it is not seen how they were made.
    """

    @contextmanager
    def attack(folder: Path) -> Iterator[None]:
        library = compiled("forged.c", folder / "libforged.so", "-shared", "-fPIC", "-Wl,--build-id")
        program = compiled(
            "forged.c",
            folder / "forged",
            *("-DPROGRAM", "-pthread", f"-L{folder}", "-l:libforged.so", f"-Wl,-rpath,{folder}"),
        )
        assert library.exists()
        with as_user(program, str(number), "bad0000000000000", str(threads), *([str(local_ranks)] * bool(local_ranks))):
            yield

    return attack


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(a_write_lease, id="holds a write lease on what it maps"),
        pytest.param(twelve_million_symbols, id="maps a library with twelve million symbols"),
        pytest.param(more_libraries_than_there_are_places, id="maps more libraries than there are places"),
        pytest.param(libraries_that_are_dear_to_read, id="maps libraries that are dear to read"),
        pytest.param(forged_communicators(3000), id="makes three thousand communicators"),
        pytest.param(forged_communicators(20_000), id="makes more communicators than there are places"),
    ],
)
def test_a_job_is_observed_whatever_another_user_does(fabric: Fabric, open_folder: Path, attack: Attack) -> None:
    with ExitStack() as stack:
        agent = stack.enter_context(AgentProcess("--level", "counts", log=open_folder / "agent.log"))
        watched = stack.enter_context(watching(agent))
        stack.enter_context(attack(open_folder))
        time.sleep(3)
        job = stack.enter_context(Job(fabric.hosts, JobOptions(seconds=4, pattern="ddp", hold=True)))
        agent.until(
            lambda: any(value for _, value in agent.samples("railscope_probe_attached", library=str(LIBRARY))), 10
        )
        job.release()
        reports = job.wait(60)
        counted = Counter[tuple[str, str]]()

        def all_counted() -> bool:
            counted.clear()
            for labels, value in agent.samples("railscope_comm_enqueued_total"):
                if labels["comm"] in ours:
                    counted[labels["comm"], labels["rank"]] = int(value)
            return counted == did

        ours = {one.hash for report in reports for one in report.communicators if one.operations}
        did = Counter(
            {
                (one.hash, str(one.rank)): sum(count.calls for count in one.operations)
                for report in reports
                for one in report.communicators
                if one.operations
            }
        )
        assert agent.comes_true(all_counted, 15), f"{counted} of {did}"
        rails = {labels["device"] for labels, _ in agent.samples("railscope_rail_info")}
        assert {device for device in rails if device.startswith("rail")}
        began = time.monotonic()
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(60) == 0
        ended_s = time.monotonic() - began
    assert ended_s < MOST_END_S * SLACK
    assert watched.longest_health_s < MOST_HEALTH_S * SLACK
    assert watched.longest_scrape_s < MOST_SCRAPE_S * SLACK
    assert watched.most_bytes < MOST_BYTES


def test_a_call_that_does_not_return_is_told_of_though_another_user_has_thousands(
    fabric: Fabric, open_folder: Path
) -> None:
    with ExitStack() as stack:
        agent = stack.enter_context(
            AgentProcess("--level", "counts", "--stall.after", "3s", log=open_folder / "agent.log")
        )
        watched = stack.enter_context(watching(agent))
        stack.enter_context(forged_communicators(100, threads=3000)(open_folder))

        def inside(user: str) -> list[dict[str, Any]]:
            return [one for one in agent.stalls() if one["cause"] == "inside_call" and one["process"]["user"] == user]

        def told() -> bool:
            return any(limit == "host_calls" for limit, _ in limits(agent))

        agent.until(lambda: bool(inside(str(UID))) and told(), 60)
        job = Job(fabric.hosts, JobOptions(seconds=4, pattern="ddp", hold=True, late_ms=3_600_000))
        stack.enter_context(job)
        agent.until(
            lambda: any(value for _, value in agent.samples("railscope_probe_attached", library=str(LIBRARY))), 10
        )
        job.release()

        def of_job() -> list[tuple[str, int]]:
            # Jobs of other tests run beside this one.
            return [(one["op"], one["rank"]) for one in inside("root") if one["pid"] in job.pids]

        agent.until(lambda: bool(of_job()), 30)
        assert of_job() == [("ncclCommInitRank", 0)]
        theirs = inside(str(UID))
        assert 0 < len(theirs) <= MOST_OF_A_USER
        assert {uid for _, uid in limits(agent)} == {str(UID)}
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(60) == 0
    assert watched.longest_health_s < MOST_HEALTH_S * SLACK
    assert watched.longest_scrape_s < MOST_SCRAPE_S * SLACK
    assert watched.most_bytes < MOST_BYTES


def test_who_arrives_last_in_a_job_is_told_though_another_user_makes_thousands_of_communicators(
    fabric: Fabric, open_folder: Path
) -> None:
    with ExitStack() as stack:
        agent = stack.enter_context(AgentProcess("--level", "counts", log=open_folder / "agent.log"))
        watched = stack.enter_context(watching(agent))
        stack.enter_context(forged_communicators(3000, local_ranks=2)(open_folder))
        agent.until(lambda: limits(agent).get(("arrivals", str(UID)), 0) >= 3000 - MOST_GROUPS, 30)
        job = stack.enter_context(
            Job(fabric.hosts[:1], JobOptions(seconds=5, pattern="ddp", hold=True, ranks_per_host=2))
        )
        agent.until(
            lambda: any(value for _, value in agent.samples("railscope_probe_attached", library=str(LIBRARY))), 10
        )
        job.release()
        ours = {one.hash for report in job.wait(60) for one in report.communicators if one.operations}

        def compared() -> set[str]:
            return {labels["comm"] for labels, _ in agent.samples("railscope_comm_last_arrivals_total")} & ours

        assert agent.comes_true(lambda: compared() == ours, 15), ours
        assert {uid for limit, uid in limits(agent) if limit == "arrivals"} == {str(UID)}
    assert watched.longest_health_s < MOST_HEALTH_S * SLACK
    assert watched.longest_scrape_s < MOST_SCRAPE_S * SLACK
    assert watched.most_bytes < MOST_BYTES


def test_a_recording_holds_every_call_of_a_job_though_another_user_makes_thousands_of_communicators(
    fabric: Fabric, open_folder: Path
) -> None:
    folder = open_folder / "dataset"
    command = [str(RAILSCOPE), "record", "-o", str(folder), "--level", "counts", "--seconds", "600"]
    with ExitStack() as stack:
        stack.enter_context(forged_communicators(16_384)(open_folder))
        job = stack.enter_context(Job(fabric.hosts, JobOptions(seconds=4, pattern="ddp", hold=True)))
        record = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        stack.callback(record.kill)
        assert record.stderr is not None
        awaited = ["recording into the folder ", f"attached to {LIBRARY}"]
        while awaited and (line := record.stderr.readline()):
            awaited = [words for words in awaited if words not in line]
        assert not awaited
        job.release()
        reports = job.wait(60)
        began = time.monotonic()
        record.send_signal(signal.SIGINT)
        _, log = record.communicate(timeout=60)
        ended_s = time.monotonic() - began
    assert record.returncode == 0, log
    with open_dataset([folder]) as dataset:
        held, ours = recorded(dataset), said(reports)
    assert {kind: held.get(kind) for kind in ours} == ours, log
    assert ended_s < MOST_END_S * SLACK


def limits(agent: AgentProcess) -> dict[tuple[str, str], float]:
    """What users lost at limits of their own."""
    found = agent.samples("railscope_limit_reached_total")
    return {(labels["limit"], labels["uid"]): value for labels, value in found}
