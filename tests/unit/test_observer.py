"""The observer's snapshot stands when the kernel refuses a reading (simulated programs)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from typing import cast

import pytest

from railscope.agent.config.options import Config
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.daemon.nccl_sources import NcclSources
from railscope.agent.node.daemon.observer import Observer
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.overhead.control import LevelControl
from railscope.agent.node.stalls.watchdog import Watchdog
from railscope.probes.clock import SystemClock
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.internals import InternalPoints, Level
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit import level_programs
from tests.unit.collectives_kernel import SimulatedPrograms


def collective_success(snapshot: Snapshot) -> bool:
    (result,) = [result for result in snapshot.health.collectors if result.collector == "collective"]
    return result.success


@pytest.mark.parametrize("what", ["totals", "calls", "communicators"])
def test_a_refused_reading_is_a_failed_collector_and_not_a_broken_scrape(what: str) -> None:
    kernel = SimulatedPrograms()
    kernel.call(2**22 - 1, 0, 3)
    observer = Observer(
        Config(collectors=frozenset({"collective"})),
        NcclSources(cast(NcclPrograms, kernel), inspection=InProcess()),
        SystemClock(),
        "0",
    )
    try:
        before = observer.snapshot()
        assert collective_success(before)
        kernel.refuses_totals = what == "totals"
        kernel.aggregates.refuses = what == "calls"
        kernel.communicators.refuses = what == "communicators"
        refused = observer.snapshot()
        assert not collective_success(refused)
        assert refused.collectives.totals == before.collectives.totals
        assert refused.health.probes.events_lost == before.health.probes.events_lost
        observer.update()
        kernel.refuses_totals = kernel.aggregates.refuses = kernel.communicators.refuses = False
        assert collective_success(observer.snapshot())
        assert observer.snapshot().collectives.totals == before.collectives.totals
    finally:
        observer.close()


def test_a_process_without_nccl_that_maps_something_leads_to_no_look_below_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed: list[list[object]] = []

    def follow(_completion: Completion, libraries: Iterable[object]) -> list[str]:
        followed.append(list(libraries))
        return []

    monkeypatch.setattr(Completion, "set_libraries", follow)
    observer = Observer(
        Config(collectors=frozenset({"collective"}), pids=(os.getppid(),)),
        NcclSources(
            cast(NcclPrograms, SimulatedPrograms()), level_programs.SimulatedPrograms(), inspection=InProcess()
        ),
        SystemClock(),
        "0",
    )
    try:
        observer.scan_processes({os.getppid()})
        assert followed == []
        observer.scan()
        assert followed == [[]]
    finally:
        observer.close()


def test_stalls_are_judged_by_what_is_followed_and_times_are_taken_before_they_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Watchdog] = []
    monkeypatch.setattr(Watchdog, "record_times", lambda stalls: taken.append(stalls))
    monkeypatch.setattr(
        "railscope.agent.node.completion.files.internal_points",
        lambda _, number: InternalPoints(
            {name: ProbePoint(name, 64, number << 32) for name in level_programs.EVERYTHING}
        ),
    )
    below = level_programs.SimulatedPrograms()
    made: list[Completion] = []

    def control(completion: Completion | None) -> LevelControl:
        assert completion is not None
        made.append(completion)
        return cast(LevelControl, None)

    observer = Observer(
        Config(collectors=frozenset({"collective"})),
        NcclSources(
            cast(NcclPrograms, SimulatedPrograms()),
            below,
            level=Level.COMPLETION,
            control=control,
            inspection=InProcess(),
        ),
        SystemClock(),
        "0",
    )
    (completion,) = made
    with open("/proc/self/exe", "rb") as program:
        try:
            stalls = observer.stalls
            assert stalls is not None
            assert stalls._known.level() is Level.COMPLETION
            assert completion.set_libraries([level_programs.SimulatedLibrary(descriptor=program.fileno())]) == []
            completion.set_level(Level.COUNTS)
            completion.levels.finish_detaching(wait=True)
            assert stalls._known.level() is Level.COUNTS
            assert taken == [stalls]
            assert below.log[-1] == "forget 3"
        finally:
            observer.close()


@pytest.mark.parametrize("told", [True, False])
def test_how_a_process_ended_is_asked_of_its_descriptor_before_a_scan_gives_it_up(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[int, int | None]] = []
    monkeypatch.setattr(Watchdog, "processes_gone", lambda _, ended, **_more: ends.extend(ended.items()))
    kernel, new = SimulatedPrograms(), list[ProcessIdentity]()
    kernel.settings = ProgramSettings()  # type: ignore[attr-defined]
    with subprocess.Popen(["sleep", "60"]) as child:
        config = Config(collectors=frozenset({"collective"}), pids=(child.pid,))
        observer = Observer(
            config,
            NcclSources(
                cast(NcclPrograms, kernel), new_process=lambda identity, _: new.append(identity), inspection=InProcess()
            ),
            SystemClock(),
            "0",
        )
        try:
            kernel.communicator(child.pid, 1)
            kernel.event(child.pid, 1, LifecycleKind.INIT)
            observer.read_lifecycle_events()
            assert [one.pid for one in new] == [child.pid]
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            observer.scan()
            assert ends == []
            if told:
                observer.processes_gone({new[0]: signal.SIGKILL})
            observer.scan()
            observer.scan()
        finally:
            child.kill()
            observer.close()
    assert ends == [(child.pid, signal.SIGKILL if told else None)]


class Overdue(InProcess):
    """An inspection that had to give up on some questions."""

    def late(self) -> dict[Tenant, int]:
        return {Tenant(5000, "0f3a"): 2, Tenant(5000, "77aa"): 1, Tenant(0): 0}


def test_who_is_at_a_limit_is_in_the_snapshot_under_the_user() -> None:
    kernel = SimulatedPrograms()
    kernel.shares.lost = {("communicators", 5000): 7, ("communicators", None): 1, ("aggregates", 1000): 2}
    sources = NcclSources(
        cast(NcclPrograms, kernel), inspection=Overdue(), lost_elsewhere={"series": lambda: {5000: 9}}
    )
    observer = Observer(Config(collectors=frozenset({"collective"})), sources, SystemClock(), "0")
    try:
        assert observer.at_limits() == ""
        for _ in range(2):
            observer.update()
            assert observer.snapshot().health.probes.limits_reached == {
                ("communicators", "5000"): 7,
                ("communicators", "unknown"): 1,
                ("aggregates", "1000"): 2,
                ("inspection", "5000"): 3,
                ("series", "5000"): 9,
            }
        assert observer.at_limits() == (
            "aggregates of uid 1000, communicators of uid 5000, communicators of uid unknown, inspection of uid 5000, "
            "series of uid 5000"
        )
    finally:
        observer.close()
