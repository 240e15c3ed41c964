"""`make stack`: what it prints leads somewhere, and nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.testbed.hosts import OWNERS_DIRECTORY
from railscope.testbed.namespaces import NAMESPACES_DIRECTORY
from tests.stack.prometheus import store_at, tool, until

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(autouse=True)
def installed() -> None:
    tool("prometheus")
    tool("prometheus-alertmanager", "prometheus-alertmanager")


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stack", "--interval", "1s", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # it cleans up


def said_until_running(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "running" in line:
            return said
    raise AssertionError(said)


def left_of(process: subprocess.Popen[str]) -> list[str]:
    """Namespaces of fabrics whose owner this was."""
    mine = [path.name for path in OWNERS_DIRECTORY.glob("*") if path.read_text().split()[:1] == [str(process.pid)]]
    return [path.name for name in mine for path in NAMESPACES_DIRECTORY.glob(f"*{name}*")] + mine


def test_it_shows_the_servers_at_loopback_addresses_until_ctrl_c() -> None:
    with started() as process:
        said = said_until_running(process)
        assert left_of(process)
        prometheus, alertmanager = (
            re.findall(rf"^{name} +(http://127\.0\.0\.1:\d+)$", said, re.MULTILINE)[0]
            for name in ("Prometheus", "Alertmanager")
        )
        store = store_at(prometheus)
        until(lambda: len(store.query("rate(railscope_collective_calls_total[5s]) > 0")) >= 2, "calls of both hosts")
        with urllib.request.urlopen(f"{alertmanager}/api/v2/status", timeout=10) as answer:
            assert b"name: on-call" in answer.read()
        assert not store.query('ALERTS{alertstate="firing"}')
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: servers and ranks get it too
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
        assert "everything is taken down" in out
        assert not left_of(process)


def test_a_server_that_ends_ends_everything_with_its_last_words() -> None:
    with started() as process:
        said_until_running(process)
        suffix = next(one for one in left_of(process) if "switch" in one)
        pids = subprocess.run(["ip", "netns", "pids", suffix], capture_output=True, text=True, check=True).stdout
        (alertmanager,) = [pid for pid in pids.split() if "alertmanager" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(alertmanager), signal.SIGKILL)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 2
        assert err.startswith("make stack: alertmanager ended with status -9: ")
        assert not left_of(process)
