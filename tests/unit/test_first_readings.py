"""What `agent --once` waits for before it prints. Sources and clocks simulated, but for the command itself."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from railscope.agent.node.daemon.warm_up import PATIENCE_SECONDS, await_first_readings
from tests.trees.rdma import mlx5_roce_8rails
from tests.unit.netdev_messages import SteppedClock

SETTLE_NS = 1_000_000_000


class SlowHost:
    """Sources that answer at a time of their own, counted from when ports and links were learnt of."""

    def __init__(self, clock: SteppedClock, **seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.refreshed_ns: int | None = None

    def refresh_devices(self) -> None:
        self.refreshed_ns = self.clock.now_ns

    def unread_sources(self) -> tuple[str, ...]:
        assert self.refreshed_ns is not None, "nothing can be read of links that nobody knows"
        passed = (self.clock.now_ns - self.refreshed_ns) / 1e9
        return tuple(name for name, seconds in self.seconds.items() if passed < seconds)


def waited_seconds(caplog: pytest.LogCaptureFixture, **seconds: float) -> float:
    clock = SteppedClock()
    began_ns = clock.now_ns
    with caplog.at_level(logging.WARNING):
        await_first_readings(SlowHost(clock, **seconds), clock, SETTLE_NS)
    return (clock.now_ns - began_ns) / 1e9


def test_when_everything_was_read_meanwhile_nothing_more_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    assert waited_seconds(caplog, rdma=0.01, netdev=0.9) == 1
    assert not caplog.messages


def test_a_source_that_takes_longer_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    assert 3 <= waited_seconds(caplog, rdma=3, netdev=0.01) <= 3.1
    assert not caplog.messages


def test_what_never_answers_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    most = 1 + PATIENCE_SECONDS
    assert most <= waited_seconds(caplog, rdma=60, netdev=0.01, tcp=70) <= most + 0.1
    assert caplog.messages == ["not read within 5 s: rdma, tcp"]


def test_the_command_prints_what_counters_show_however_little_it_settles(tmp_path: Path) -> None:
    sysfs = mlx5_roce_8rails(tmp_path).sysfs
    command = [
        sys.executable,
        "-m",
        "railscope.agent.cli.main",
        "agent",
        "--once",
        "--once.settle",
        "0s",
        "--path.sysfs",
        str(sysfs),
    ]
    done = subprocess.run(
        [*command, "--no-collector.collective"], capture_output=True, text=True, check=True, timeout=60
    )
    bytes_of_rails = [line for line in done.stdout.splitlines() if line.startswith("railscope_rail_transmit_bytes_")]
    assert len(bytes_of_rails) >= 8
    for collector in ("rdma", "rdma bytes"):
        assert f'railscope_collector_success{{collector="{collector}"}} 1' in done.stdout.splitlines()
