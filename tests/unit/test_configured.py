"""What the configuration names and this host does not have is said, once for each change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from railscope.agent.config.keys import ConfigError
from railscope.agent.config.options import Config
from railscope.agent.config.rail_patterns import parse_rail_pattern
from railscope.agent.config.unmatched import patterns_without_device, pids_without_nccl, require_processes
from railscope.agent.facts.remarks import Remark
from railscope.agent.node.daemon.observer import Observer
from railscope.probes.clock import SystemClock

PROCFS = Path("/proc")
NO_PROCESS = 2**22 - 1


def test_a_pid_that_no_process_has_is_told_from_one_that_maps_no_nccl() -> None:
    own = os.getpid()
    assert pids_without_nccl(PROCFS, [own, NO_PROCESS], {own}) == f"no process has the pid {NO_PROCESS}"
    assert pids_without_nccl(PROCFS, [own], set()) == f"no NCCL is mapped by pid {own}"
    both = pids_without_nccl(PROCFS, [own, NO_PROCESS], set())
    assert both == f"no process has the pid {NO_PROCESS}; no NCCL is mapped by pid {own}"
    assert pids_without_nccl(PROCFS, [own], {own}) == ""
    assert pids_without_nccl(PROCFS, [], set()) == ""


def test_processes_that_are_named_must_run() -> None:
    require_processes(PROCFS, [os.getpid()])
    require_processes(PROCFS, [])
    with pytest.raises(ConfigError, match=rf"^--pid: no process has the pid {NO_PROCESS}: name processes that run"):
        require_processes(PROCFS, [os.getpid(), NO_PROCESS])


def test_a_pattern_that_matches_no_device_is_named() -> None:
    patterns = [parse_rail_pattern("eth*"), parse_rail_pattern("ib0=1"), parse_rail_pattern("rail?")]
    assert patterns_without_device(patterns, ["eth0", "lo"]) == "no device is called ib0, rail?"
    assert patterns_without_device(patterns, ["eth0", "ib0", "rail1"]) == ""
    assert patterns_without_device((), []) == ""


def test_a_remark_is_made_when_it_changes_and_taken_back_when_it_is_mended(caplog: pytest.LogCaptureFixture) -> None:
    remark = Remark(logging.getLogger("railscope.test"), "--pid", "every process named is observed")
    with caplog.at_level(logging.INFO):
        for line in ("", "a", "a", "b", "", ""):
            remark.say(line)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "--pid: a"),
        ("WARNING", "--pid: b"),
        ("INFO", "--pid: every process named is observed"),
    ]


def test_the_agent_warns_once_of_a_rail_pattern_without_device(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(rails=(parse_rail_pattern("nothing-is-called-so*"),), collectors=frozenset({"netdev"}))
    observer = Observer(config, None, SystemClock(), "0")
    try:
        with caplog.at_level(logging.WARNING):
            observer.start()
            observer.update()
            observer.snapshot()
    finally:
        observer.close()
    assert [line for line in caplog.messages if "--rail.devices" in line] == [
        "--rail.devices: no device is called nothing-is-called-so*"
    ]
