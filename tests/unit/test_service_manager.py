"""What an agent tells systemd, and what it does on signals: a real process that observes nothing, and a real socket."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.agent.node.daemon.service_manager import ServiceManager
from railscope.probes.clock import SystemClock
from tests.unit.stall_world import SimulatedClock

NOTHING = [f"--no-collector.{name}" for name in ("collective", "netdev", "ethtool", "qdisc", "tcp", "rdma", "nvlink")]
MAIN = "import sys; from railscope.agent.cli.main import main; sys.exit(main())"
SLEEPS = """
import sys, threading, time
from railscope.agent.cli.main import main
from railscope.agent.node.daemon import daemon
def hang(*_, **__):
    print("hangs", file=sys.stderr, flush=True)
    WAY
HOOK
sys.exit(main())
"""
HASTY = "from railscope.agent.node.daemon.signals import AgentSignals; AgentSignals.__init__.__defaults__ = (0.5,)"
"""One of the tests waits for the real deadline."""
MOST_SECONDS = 30
MOST_END_SECONDS = 10
"""Four after the signal, and what a busy machine takes to run the signal's handler and to end a process."""


class Told:
    """A service manager's socket, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(MOST_SECONDS)

    def next(self, *, but: str = "WATCHDOG=1") -> dict[str, str]:
        """The next message that is not `but`."""
        while (message := self._socket.recv(4096).decode()) == but:
            pass
        return dict(line.split("=", 1) for line in message.splitlines())

    def is_silent(self, seconds: float) -> bool:
        """Whether nothing is told for so long."""
        self.forget()
        time.sleep(seconds)
        self._socket.setblocking(False)
        try:
            self._socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(MOST_SECONDS)
        return False

    def forget(self) -> None:
        self._socket.setblocking(False)
        try:
            while self._socket.recv(4096):
                pass
        except BlockingIOError:
            self._socket.settimeout(MOST_SECONDS)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    told = Told(tmp_path)
    yield told
    told.close()


@contextmanager
def agent(
    told: Told, *words: str, program: str = MAIN, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """An agent that is ready, with its log in a pipe."""
    line = [sys.executable, "-c", program, "agent", "--web.listen-address", "127.0.0.1:0", *NOTHING, *words]
    named = {**os.environ, "NOTIFY_SOCKET": str(told.path), **(environment or {})}
    with subprocess.Popen([*line, "--recordings.directory="], env=named, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert told.next() == {"READY": "1", "STATUS": "attached"}
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> list[str]:
    """The log, once the agent has ended in good order."""
    _, log = process.communicate(timeout=MOST_SECONDS)
    assert process.returncode == 0, log
    return log.splitlines()


def test_the_watchdog_is_fed_at_half_its_time_by_the_loop_and_not_while_it_stands(told: Told) -> None:
    with agent(told, environment={"WATCHDOG_USEC": "1000000"}) as process:
        began = time.monotonic()
        for _ in range(6):
            assert told.next(but="") == {"WATCHDOG": "1"}
        # Nothing else wakes this loop more often than every other second.
        assert time.monotonic() - began < 6 * 1.5
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert told.is_silent(1.2)
        process.send_signal(signal.SIGCONT)
        assert told.next(but="") == {"WATCHDOG": "1"}
        process.terminate()
        assert told.next() == {"STOPPING": "1"}
        ended(process)


def test_a_loop_that_hangs_is_not_fed_though_other_threads_live(told: Told) -> None:
    program = hanging("time.sleep(600)", "daemon.Observer.update = hang")
    with agent(told, program=program, environment={"WATCHDOG_USEC": "400000"}) as process:
        assert process.stderr is not None
        while "hangs" not in process.stderr.readline():
            pass
        assert told.is_silent(1)


@pytest.mark.parametrize(
    ("environment", "fed"),
    [
        ({"WATCHDOG_USEC": "2000000"}, True),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "7"}, True),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "8"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_only_a_watchdog_of_this_process_is_fed(told: Told, environment: dict[str, str], fed: bool) -> None:
    clock = SimulatedClock()
    manager = ServiceManager(clock, {"NOTIFY_SOCKET": str(told.path), **environment}, 7)
    manager.feed(clock.now_ns)
    assert (manager.feed_due_ns == clock.now_ns + 1_000_000_000) is fed
    if fed:
        assert told.next(but="") == {"WATCHDOG": "1"}
        manager.feed(clock.now_ns + 999_999_999)
        manager.ready("fed once")
        assert told.next(but="") == {"READY": "1", "STATUS": "fed once"}


def test_without_a_service_manager_nothing_is_told_and_one_that_is_gone_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ServiceManager(SystemClock(), {}, 7).ready("")
    assert caplog.records == []
    gone = ServiceManager(SystemClock(), {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "2"}, 7)
    for _ in range(3):
        gone.feed(time.monotonic_ns())
    assert len(caplog.records) == 1


def test_sighup_reloads_what_can_change_and_names_what_takes_a_restart(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "railscope.yml"
    file.write_text("stalls: {after: 10s}\n")
    with agent(told, "--config.file", str(file), "--limit.series", "500") as process:
        file.write_text("stalls: {after: 20s}\nrails: {window: 10s}\nlimits: {series: 700}\nlogging: {level: debug}\n")
        before_us = time.monotonic_ns() // 1000
        process.send_signal(signal.SIGHUP)
        reloading = told.next()
        assert reloading["RELOADING"] == "1"
        assert int(reloading["MONOTONIC_USEC"]) >= before_us
        assert told.next() == {"READY": "1", "STATUS": "configuration reloaded"}
        file.write_text("stalls: {afetr: 20s}\nrails: {window: 0}\n")
        process.send_signal(signal.SIGHUP)
        assert "RELOADING" in told.next()
        assert told.next() == {"READY": "1", "STATUS": "the configuration has 2 error(s) and was not reloaded"}
        process.terminate()
        log = ended(process)
    assert said(log, "configuration reloaded: stalls.after 10s -> 20s, logging.level info -> debug")
    assert said(log, "these take a restart of the agent: rails.window 30s -> 10s")
    assert said(log, "line 1: stalls.afetr is no key of this file; did you mean after?", "level=error")
    assert said(log, "line 2: rails.window: '0' is not a duration", "level=error")
    assert said(log, "the settings before it stay")


def said(log: Sequence[str], *texts: str) -> bool:
    return any(all(text in line for text in texts) for line in log)


def test_no_signal_ends_an_agent_that_has_just_begun(told: Told) -> None:
    program = MAIN.replace("import sys;", "import os, signal, sys;")
    # At the first import that follows the handlers.
    program = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "railscope.agent.node.daemon.daemon":
            for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGHUP):
                os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
{program}
"""
    with agent(told, program=program) as process:
        assert "RELOADING" in told.next()
        assert told.next() == {"READY": "1", "STATUS": "configuration reloaded"}
        process.terminate()
        ended(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_rain_end_it_in_good_order(told: Told, number: signal.Signals) -> None:
    with agent(told) as process:
        while process.poll() is None:
            for one in (number, signal.SIGHUP, signal.SIGUSR2):
                process.send_signal(one)
            time.sleep(0.001)
        assert said(ended(process), "stopping")


def hanging(way: str, hook: str) -> str:
    """A program that runs an agent which hangs in this way, where the hook puts it."""
    return SLEEPS.replace("WAY", way).replace("HOOK", hook)


@pytest.mark.parametrize(
    ("way", "hook"),
    [
        pytest.param("time.sleep(600)", "daemon.Observer.update = hang", id="the loop sleeps"),
        pytest.param(
            "lock = threading.Lock(); lock.acquire(); lock.acquire()",
            f"{HASTY}\ndaemon.Observer.close = hang",
            id="the end waits for a lock",
        ),
        pytest.param(
            "time.sleep(600)",
            f"{HASTY}\nclose = daemon.Observer.close\n"
            "daemon.Observer.close = lambda self: (threading.Thread(target=hang).start(), close(self))",
            id="a thread never ends",
        ),
    ],
)
def test_sigterm_ends_an_agent_that_hangs_within_seconds_and_tells_where(told: Told, way: str, hook: str) -> None:
    with agent(told, program=hanging(way, hook)) as process:
        assert process.stderr is not None
        if "update" in hook:
            while "hangs" not in process.stderr.readline():
                pass
        began = time.monotonic()
        process.terminate()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=MOST_SECONDS)
        assert time.monotonic() - began < MOST_END_SECONDS
    assert process.returncode == 1
    assert " in hang" in log


def test_the_journal_has_where_an_agent_hung_that_the_watchdog_ended(told: Told) -> None:
    with agent(told, program=hanging("time.sleep(600)", "daemon.Observer.update = hang")) as process:
        assert process.stderr is not None
        while "hangs" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGABRT)
        _, log = process.communicate(timeout=MOST_SECONDS)
    assert process.returncode == -signal.SIGABRT
    assert " in hang" in log


def test_how_long_the_agent_stood_is_in_its_metrics(told: Told) -> None:
    with agent(told) as process:
        assert process.stderr is not None
        url = process.stderr.readline().rpartition("listening on ")[2].strip().rstrip('"')
        before = lateness(url)
        process.send_signal(signal.SIGSTOP)
        # Longer than the loop of an agent that observes nothing waits.
        time.sleep(before + 3)
        process.send_signal(signal.SIGCONT)
        assert before + 0.5 < lateness(url) < before + 60
        process.terminate()
        ended(process)


def lateness(url: str) -> float:
    with urllib.request.urlopen(f"{url.removesuffix('/metrics')}/metrics", timeout=MOST_SECONDS) as answer:
        text = answer.read().decode()
    values = {
        name: float(value)
        for name, value in re.findall(r"^railscope_loop_(late_seconds|late_recent_seconds) (\S+)$", text, re.MULTILINE)
    }
    assert values["late_seconds"] == values["late_recent_seconds"]
    return values["late_seconds"]
