"""What a configuration that is read again changes in a running agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.config.keys import ConfigError
from railscope.agent.config.options import OPTIONS, RELOADABLE, Config
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.node.daemon.reload import Change, Reloader, take_over
from railscope.agent.node.overhead.governor import Governor
from railscope.agent.node.stalls.checkpoints import Checkpoints, LastCall
from railscope.agent.node.stalls.evidence import LEAST_WRITTEN_BYTES
from railscope.probes.clock import SystemClock
from railscope.probes.loading.calibration import Calibration, Source
from railscope.probes.nccl.functions.internals import Level

OTHER = Config(
    scan_interval_ns=1_000_000_000,
    level="counts",
    budget_ratio=0.5,
    series_limit=700,
    series_profile="lean",
    series_detail=("counters",),
    stall_after_ns=7_000_000_000,
    stall_factor=3.0,
    stall_floor_ns=1_000_000_000,
    recordings_max_bytes=1 << 22,
    log_level="error",
    log_format="json",
    correlation_window_ns=1_000_000_000,
    telemetry_path="/m",
    collectors=frozenset(),
)


def test_only_what_can_change_while_the_agent_runs_is_taken_over() -> None:
    reloaded = take_over(Config(), OTHER)
    fields = {option.field for option in OPTIONS if option.key in RELOADABLE}
    assert {change.key for change in reloaded.taken} == RELOADABLE
    assert reloaded.config == replace(Config(), **{field: getattr(OTHER, field) for field in fields})
    assert Change("stalls.after", "30s", "7s") in reloaded.taken
    restart = {change.key for change in reloaded.restart}
    assert restart == {
        *("rails.window", "web.telemetry_path"),
        *(f"collectors.{name}" for name in Config().collectors),
    }


def test_who_reads_the_same_again_changes_nothing() -> None:
    reloaded = take_over(OTHER, replace(OTHER))
    assert (reloaded.config, reloaded.taken, reloaded.restart) == (OTHER, (), ())


def run_with(read: Callable[[], Config], tmp_path: Path) -> tuple[Daemon, list[Config]]:
    """An agent without collectors that was asked to reload, has done one turn, and ended."""
    logs: list[Config] = []
    config = Config(collectors=frozenset(), recordings_directory=tmp_path)
    daemon = Daemon(config, SystemClock(), "0", serve=False, reloader=Reloader(read, logs.append))
    try:
        daemon.request_reload()
        daemon._schedule.begin(SystemClock().monotonic_ns())
        daemon._turn()
    finally:
        daemon.close()
    return daemon, logs


def test_a_reload_reaches_every_part_that_has_the_setting(tmp_path: Path) -> None:
    daemon, logs = run_with(lambda: OTHER, tmp_path)
    assert daemon._schedule._scan_interval_ns == 1_000_000_000
    assert (daemon._budget.limit, daemon._selection.counters, daemon._selection.nvlinks) == (700, True, False)
    assert daemon.recordings._store is not None
    assert daemon.recordings._store.most_bytes == 1 << 22
    assert [(config.log_level, config.log_format) for config in logs] == [("error", "json")]


def test_a_configuration_with_errors_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read() -> Config:
        raise ConfigError("a.yml: line 1: no", "a.yml: line 2: no")

    daemon, logs = run_with(read, tmp_path)
    assert daemon._budget.limit == Config().series_limit
    assert logs == []
    assert [record.message for record in caplog.records if record.name == "railscope.config"] == [
        "a.yml: line 1: no",
        "a.yml: line 2: no",
        "the configuration has 2 error(s) and was not reloaded: the settings before it stay",
    ]


def test_a_governor_takes_another_budget_and_a_fixed_level_and_gives_it_back() -> None:
    governor = Governor(Calibration(500.0, Source.MEASURED))
    begun = governor.level
    governor.reconfigure(0.5, Level.COUNTS)
    assert (governor.level, governor.reason) == (Level.COUNTS, "counts: set by hand")
    governor.reconfigure(0.5, None)
    assert (governor.level, governor.reason) == (begun, "")
    with pytest.raises(ValueError, match="makes no sense"):
        governor.reconfigure(0, None)


def test_checkpoints_take_other_times() -> None:
    written = [0]
    checkpoints = Checkpoints(lambda _pid, **_: written[0], 10, 1000)
    checkpoints.set_times(100, 1000)
    checkpoints.update(50, {7: LastCall(0, 1)})
    written[0] = LEAST_WRITTEN_BYTES
    checkpoints.update(150, {7: LastCall(0, 1)})
    assert checkpoints.writing_since_ns(150) == {}
