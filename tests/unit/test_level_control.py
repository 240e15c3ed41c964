"""Levels follow the governor's decisions; hits, costs and the kernel's side are simulated."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.overhead.control import LevelControl
from railscope.agent.node.overhead.governor import START
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.calibration import ASSUMED
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.internals import InternalPoints, Level
from railscope.probes.nccl.records.calls import Stat
from railscope.probes.nccl.records.internals import InternalStat
from tests.unit.level_programs import BUILD_ID, EVERYTHING, SimulatedLibrary, SimulatedPrograms

SECOND_NS = 1_000_000_000


@dataclass(slots=True)
class SimulatedClock:
    now_ns: int = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@dataclass(slots=True)
class CountedCalls:
    hits: dict[Stat, int] = field(default_factory=lambda: dict.fromkeys(Stat, 0))
    refuses: bool = False

    def stats(self) -> Mapping[Stat, int]:
        if self.refuses:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        return dict(self.hits)


@dataclass(slots=True)
class CountingPrograms(SimulatedPrograms):
    hits: dict[InternalStat, int] = field(default_factory=lambda: dict.fromkeys(InternalStat, 0))
    stats_read: int = 0

    def stats(self) -> dict[InternalStat, int]:
        self.stats_read += 1
        return dict(self.hits)


@dataclass(slots=True)
class CountingDriver:
    """Probes on CUDA's driver that are hit as often as a test says, while they are attached."""

    total: int = 0
    attached: bool = True

    def hits(self) -> int:
        return self.total

    def set_attached(self, attached: bool) -> list[str]:
        self.attached = attached
        return []


@dataclass(slots=True)
class CountingTransfers(CountingDriver):
    """Probes on transfers, alike, and who maps a library that has some."""

    mappers: Collection[object] = ()


def control_of(
    calls: CountedCalls,
    completion: Completion | None,
    clock: SimulatedClock,
    level: str,
    budget_ratio: float = 0.01,
    procfs: Path = Path("/nonexistent"),
    driver: CountingDriver | None = None,
    transfers: CountingTransfers | None = None,
) -> LevelControl:
    return LevelControl(
        *(calls, completion, ASSUMED, clock),
        budget_ratio=budget_ratio,
        level=level,
        procfs=procfs,
        driver=driver,
        transfers=transfers,
    )


def test_the_level_begins_where_the_governor_begins_or_where_it_is_fixed() -> None:
    for text, expected in (("auto", START), ("all", Level.ALL), ("completion", Level.COMPLETION)):
        completion = Completion(SimulatedPrograms(), Level.COUNTS, inspection=InProcess())
        control_of(CountedCalls(), completion, SimulatedClock(), text)
        assert completion.levels.target_level is expected


def test_an_agent_that_comes_late_starts_with_counts_unless_a_person_names_a_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, first, second in (("auto", Level.COUNTS, Level.COMPLETION), ("all", Level.ALL, Level.ALL)):
        calls, clock = CountedCalls(), SimulatedClock()
        completion = Completion(CountingPrograms(), Level.COUNTS, inspection=InProcess())
        control = LevelControl(
            *(calls, completion, ASSUMED, clock),
            budget_ratio=0.01,
            level=text,
            procfs=Path("/nonexistent"),
            late=True,
        )
        with real_library(monkeypatch) as library:
            assert completion.set_libraries([library]) == []
            assert completion.levels.target_level is first
            calls.hits[Stat.CALLS] += 1
            assert control.judge_arrival() == []
            assert completion.levels.target_level is first
            calls.hits[Stat.CALLS] += 100
            clock.now_ns += SECOND_NS
            assert control.update(1) == []
            assert completion.levels.target_level is second
            completion.close()


def test_where_no_job_calls_an_agent_attaches_all_that_the_next_one_may_show(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = CountingPrograms()
    completion = Completion(programs, Level.COUNTS, inspection=InProcess())
    control = LevelControl(
        *(CountedCalls(), completion, ASSUMED, SimulatedClock()),
        budget_ratio=0.01,
        level="auto",
        procfs=Path("/nonexistent"),
        late=True,
    )
    with real_library(monkeypatch) as library:
        assert completion.set_libraries([library]) == []
        assert programs.still_attached() == []
        assert control.judge_arrival() == []
        assert programs.still_attached() == ["COMPLETION", "RAILS"]
        completion.close()


def test_what_hits_cost_is_added_up_also_where_only_calls_are_counted() -> None:
    calls, clock = CountedCalls(), SimulatedClock()
    control = control_of(calls, None, clock, "auto")
    seen = []
    for _ in range(3):
        calls.hits[Stat.CALLS] += 1_000_000
        clock.now_ns += SECOND_NS
        assert control.update(1) == []
        seen.append(control.seconds["calls"])
    assert 0 < seen[0] < seen[1] < seen[2]


def test_counters_that_cannot_be_read_are_one_line_and_change_nothing() -> None:
    calls, clock = CountedCalls(refuses=True), SimulatedClock()
    completion = Completion(SimulatedPrograms(), Level.COUNTS, inspection=InProcess())
    control = control_of(calls, completion, clock, "rails")
    (line,) = control.update(1)
    assert line.endswith("simulated refusal")
    assert completion.levels.target_level is Level.RAILS


def test_without_communicators_and_calls_nothing_below_the_calls_is_read_and_nothing_is_missed() -> None:
    calls, clock, below = CountedCalls(), SimulatedClock(), CountingPrograms()
    control = control_of(calls, Completion(below, Level.COUNTS, inspection=InProcess()), clock, "rails")

    def tick(processes: int) -> None:
        clock.now_ns += SECOND_NS
        assert control.update(processes) == []

    tick(0)
    readings = below.stats_read
    tick(0)
    assert below.stats_read == readings
    below.hits[InternalStat.POSTS] += 1000
    tick(0)
    assert control.seconds["proxy_post"] == 0
    # A communicator that has come, or calls of which nobody knows the communicator.
    tick(1)
    cost = control.seconds["proxy_post"]
    assert cost > 0
    below.hits[InternalStat.POSTS] += 1000
    calls.hits[Stat.CALLS] += 1
    tick(0)
    assert control.seconds["proxy_post"] == 2 * cost


def level_after(
    caplog: pytest.LogCaptureFixture,
    calls_a_second: int,
    level: str = "auto",
    budget_ratio: float = 0.01,
    procfs: Path = Path("/nonexistent"),
) -> tuple[Level, list[str]]:
    """Where a job that calls so often ends, and what the log said meanwhile."""
    caplog.set_level("INFO")
    caplog.clear()
    calls, clock, below = CountedCalls(), SimulatedClock(), CountingPrograms()
    completion = Completion(below, Level.COUNTS, inspection=InProcess())
    control = control_of(calls, completion, clock, level, budget_ratio, procfs)
    for _ in range(15):
        clock.now_ns += SECOND_NS
        calls.hits[Stat.CALLS] += calls_a_second
        if completion.levels.target_level >= Level.COMPLETION:
            below.hits[InternalStat.POSTS] += calls_a_second
            below.hits[InternalStat.STOPS] += 8 * calls_a_second
        if completion.levels.target_level >= Level.RAILS:
            below.hits[InternalStat.SENDS] += 16 * calls_a_second
        assert control.update(1) == []
    return completion.levels.target_level, [record.getMessage() for record in caplog.records]


def test_levels_follow_the_budget_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    level, said = level_after(caplog, 3000)
    assert level is Level.COUNTS
    assert [line.split(": ")[1] for line in said] == ["rails to completion", "completion to counts"]
    assert all(line.endswith("budget 1.00%") for line in said)
    assert level_after(caplog, 3000, budget_ratio=1.0)[0] >= Level.RAILS
    assert level_after(caplog, 3000, level="completion") == (Level.COMPLETION, [])


def test_on_a_host_without_a_free_core_a_hit_costs_more(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    for percent, level in ((0, START), (100, Level.COMPLETION)):
        (tmp_path / "pressure/cpu").write_text(f"some avg10={percent}.00 avg60=0.00 avg300=0.00 total=1\n")
        assert min(level_after(caplog, 200, procfs=tmp_path)[0], START) is level


@contextmanager
def real_library(monkeypatch: pytest.MonkeyPatch, build_id: str | None = BUILD_ID) -> Iterator[SimulatedLibrary]:
    """A file that can be opened, with every function that is probed."""
    points = {name: ProbePoint(name, 64, 0) for name in EVERYTHING}
    monkeypatch.setattr("railscope.agent.node.completion.files.internal_points", lambda *_: InternalPoints(points))
    descriptor = os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield SimulatedLibrary(descriptor=descriptor, build_id=build_id)
    finally:
        os.close(descriptor)


def test_the_level_never_goes_above_what_the_libraries_that_are_there_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "railscope.levels")
    clock = SimulatedClock()
    completion = Completion(CountingPrograms(), Level.COUNTS, inspection=InProcess())
    control = control_of(CountedCalls(), completion, clock, "auto")
    with real_library(monkeypatch, build_id="00" * 20) as library:
        completion.set_libraries([library])
        caplog.clear()
        for _ in range(60):
            clock.now_ns += SECOND_NS
            assert control.update(1) == []
    assert completion.levels.target_level is Level.COUNTS
    assert caplog.records == []


def test_what_the_kernel_refused_once_is_tried_again_while_the_level_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, programs = SimulatedClock(), CountingPrograms(refuses=Level.RAILS)
    completion = Completion(programs, Level.COUNTS, inspection=InProcess())
    control = control_of(CountedCalls(), completion, clock, "rails")
    with real_library(monkeypatch) as library:
        assert len(completion.set_libraries([library])) == 1
        for errors in (1, 0):
            clock.now_ns += SECOND_NS
            assert len(control.update(1)) == errors
            programs.refuses = None
        assert programs.still_attached() == ["COMPLETION", "RAILS"]


@pytest.mark.parametrize(("hits", "stays"), [(1_000, True), (100_000, False)])
def test_probes_on_the_driver_stay_while_they_alone_keep_the_budget(hits: int, stays: bool) -> None:
    clock, driver = SimulatedClock(), CountingDriver()
    control = control_of(CountedCalls(), None, clock, "auto", driver=driver)
    for _ in range(10):
        driver.total += hits * driver.attached
        clock.now_ns += SECOND_NS
        assert control.update(1) == []
    assert driver.attached is stays
    assert control.seconds["driver_calls"] > 0


def test_probes_on_the_driver_that_were_detached_are_tried_again() -> None:
    clock, driver = SimulatedClock(), CountingDriver()
    control = control_of(CountedCalls(), None, clock, "auto", driver=driver)
    attached = []
    for tick in range(1_200):
        driver.total += (100_000 if tick < 10 else 10) * driver.attached
        clock.now_ns += SECOND_NS
        control.update(1)
        attached.append(driver.attached)
    assert not any(attached[10:40])
    assert all(attached[-100:])


def test_of_probes_on_transfers_the_log_says_what_the_budget_did_and_nothing_where_no_library_is_mapped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "railscope.levels")
    clock, driver, transfers = SimulatedClock(), CountingDriver(), CountingTransfers()
    control = control_of(CountedCalls(), None, clock, "auto", driver=driver, transfers=transfers)

    def pass_ticks(count: int, hits: int) -> list[str]:
        caplog.clear()
        for _ in range(count):
            transfers.total += hits * transfers.attached
            clock.now_ns += SECOND_NS
            assert control.update(1) == []
        return [record.getMessage() for record in caplog.records]

    assert pass_ticks(30, 0) == []
    transfers.mappers = ("a process",)
    assert pass_ticks(5, 10) == []
    (detached,) = pass_ticks(10, 100_000)
    assert re.match(r"probes on other libraries' transfers are detached: \S", detached)
    transfers.mappers = ()
    assert pass_ticks(30, 0) == []
    assert transfers.attached


def test_levels_give_way_to_probes_on_the_driver_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, driver, below = SimulatedClock(), CountingDriver(), CountingPrograms()
    completion = Completion(below, Level.COUNTS, inspection=InProcess())
    with real_library(monkeypatch) as library:
        completion.set_libraries([library])
        control = control_of(CountedCalls(), completion, clock, "auto", driver=driver)
        for _ in range(10):
            # Six tenths of the budget each.
            driver.total += int(0.006 * SECOND_NS / ASSUMED.hit_ns("driver_calls"))
            if completion.levels.target_level >= Level.COMPLETION:
                below.hits[InternalStat.POSTS] += int(0.006 * SECOND_NS / ASSUMED.hit_ns("proxy_post"))
            clock.now_ns += SECOND_NS
            control.update(1)
        assert driver.attached
        assert completion.levels.target_level is Level.COUNTS
        completion.close()
