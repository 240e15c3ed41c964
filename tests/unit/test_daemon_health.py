"""Health and readiness of a daemon whose observer is busy: they wait for no lock."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from railscope.agent.config.options import Config
from railscope.agent.config.values import ListenAddress
from railscope.agent.node.daemon.daemon import Daemon
from railscope.probes.clock import SystemClock


class HaltingClock(SystemClock):
    """Halts whoever reads the time of day once armed: a snapshot does, while it holds the observer's lock."""

    def __init__(self) -> None:
        self.armed = False
        self.halted, self.go_on = threading.Event(), threading.Event()

    def realtime_ns(self) -> int:
        if self.armed:
            self.halted.set()
            assert self.go_on.wait(20)
        return SystemClock.realtime_ns()


@contextmanager
def running(clock: SystemClock) -> Iterator[Daemon]:
    config = Config(collectors=frozenset(), recordings_memory_bytes=0, listen=ListenAddress("127.0.0.1", 0))
    daemon = Daemon(config, clock, "0")
    with closing(daemon):
        daemon.start()
        loop = threading.Thread(target=daemon.run)
        loop.start()
        try:
            yield daemon
        finally:
            daemon.stop()
            loop.join()


def test_health_and_readiness_answer_while_the_observer_is_held() -> None:
    clock = HaltingClock()
    with running(clock) as daemon:
        port = int(daemon.url.rpartition(":")[2])
        with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as scrape:
            clock.armed = True
            scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            try:
                assert clock.halted.wait(20)
                for path in ("healthz", "readyz"):
                    with urllib.request.urlopen(f"{daemon.url}/{path}", timeout=10) as answer:
                        assert answer.status == 200
            finally:
                clock.armed = False
                clock.go_on.set()
            assert scrape.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("probed", "found", "status", "said"),
    [
        (0, 0, 200, "ready"),
        (2, 2, 200, "ready"),
        (1, 2, 200, "ready; 1 of 2 NCCL libraries are not probed: see the log"),
        (0, 2, 503, "no NCCL library that runs could be probed; see the log"),
    ],
)
def test_a_library_that_cannot_be_probed_makes_a_node_unready_only_where_it_is_all(
    monkeypatch: pytest.MonkeyPatch, probed: int, found: int, status: int, said: str
) -> None:
    with running(SystemClock()) as daemon:
        monkeypatch.setattr(daemon.observer, "attached", lambda: (probed, found))
        end = time.monotonic() + 20
        while (answer := ready(daemon)) != (status, said):
            assert time.monotonic() < end, answer
            time.sleep(0.05)


def ready(daemon: Daemon) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{daemon.url}/readyz", timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()
