"""`railscope top` on a pseudo-terminal, of GPUs as the agent follows them.

The driver's library is simulated (tests/nvml/stub.c), and so is the rest of the node; the program, the server and what
reads NVML are real.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.node.nvlink.watch import NvlinkWatch
from railscope.exporters.web.http import MetricsServer, ServerSettings
from railscope.probes.clock import SystemClock
from tests.nvml.stub import Stub, link_lines
from tests.unit.nodes import healthy
from tests.unit.pseudo_terminal import PseudoTerminal

RAILSCOPE = str(Path(sys.executable).with_name("railscope"))
PATIENCE_SECONDS = 60
CRC_ERRORS = 163


@pytest.fixture
def url(stub: Stub, tmp_path: Path) -> Iterator[str]:
    """An agent's server of a node with two GPUs of two links each."""
    stub.say("gpus 2", *link_lines(0, [0, 1]), *link_lines(1, [0, 1]))
    watch = NvlinkWatch(SystemClock(), sysfs=tmp_path, library=stub.library, period_seconds=0.01)

    def snapshot() -> Snapshot:
        return replace(healthy(), realtime_ns=time.time_ns(), gpus=watch.facts())

    watch.start()
    try:
        last = time.monotonic() + PATIENCE_SECONDS
        while len(watch.facts().nvlinks) < 4:
            assert time.monotonic() < last, "waited in vain for the links"
            time.sleep(0.005)
        with MetricsServer(
            ServerSettings(listen_address="127.0.0.1:0"),
            snapshot=snapshot,
            healthy=lambda: (True, "ok"),
            ready=lambda: (True, "ready"),
        ) as server:
            yield f"http://127.0.0.1:{server.port}"
    finally:
        watch.close()


def row(lines: list[str], start: str) -> str:
    return next((line for line in lines if line.startswith(start)), "")


def test_links_rates_and_errors_are_on_a_screen_of_80_columns(url: str, stub: Stub) -> None:
    with PseudoTerminal([RAILSCOPE, "top", "--url", url, "--interval", "0.2"]) as terminal:
        terminal.shows("GPU  NVLINKS", "0        2/2", "1        2/2")
        assert "red" not in terminal.colour("0        2/2")
        stub.count(0, CRC_ERRORS, 1, 7)
        terminal.until(lambda lines: "7 crc_link1)" in row(lines, "0        2/2"), PATIENCE_SECONDS)
        terminal.press(b"\t\tz")
        terminal.shows("Tab GPUs", "sort: GPU")
        terminal.press(b"s")
        terminal.shows("sort: NVLINKS")
        stub.say("link 1 0 0 2 90")
        terminal.until(lambda lines: row(lines, "1        1/2") != "", PATIENCE_SECONDS)
        # Sorted by how many are down.
        terminal.until(
            lambda lines: [line[0] for line in lines if line[4:].lstrip().startswith(("1/2", "2/2"))] == ["1", "0"],
            PATIENCE_SECONDS,
        )
        terminal.press(b"/1/2\r")
        terminal.until(lambda lines: not row(lines, "0        2/2") and bool(row(lines, "1        1/2")))
        terminal.press(b"q")
        assert terminal.ended() == 0


def test_errors_that_grow_are_red(url: str, stub: Stub) -> None:
    with PseudoTerminal([RAILSCOPE, "top", "--url", url, "--interval", "1"]) as terminal:
        terminal.shows("0        2/2")
        errors = 0

        def red(lines: list[str]) -> bool:
            nonlocal errors
            # They grow all the time: between any two readings there are new ones.
            errors += 1
            stub.count(0, CRC_ERRORS, 1, errors)
            return "+" in row(lines, "0        2/2") and "red" in terminal.colour("0        2/2")

        terminal.until(red, PATIENCE_SECONDS)
        assert "crc_link1" in row(terminal.lines(), "0        2/2")
        assert "red" not in terminal.colour("1        2/2")


def test_plain_lines_hold_what_the_gpu_counted(url: str, stub: Stub) -> None:
    stub.count(0, 138, 0, 1 << 20)
    ran = subprocess.run(
        [RAILSCOPE, "top", "--plain", "--url", url, "--interval", "0.2", "--count", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = [line.partition(" kind=gpu ")[2] for line in ran.stdout.splitlines() if " kind=gpu " in line]
    assert lines[1] == (
        'gpu=1 name="Simulated GPU" nvlinks=2 nvlinks_up=2 nvlink_speed_bytes_per_second=53124000000 '
        "nvlink_transmit_bytes_per_second=0 nvlink_receive_bytes_per_second=0"
    )
