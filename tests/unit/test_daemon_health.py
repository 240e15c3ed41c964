"""Health and readiness of a daemon whose observer is busy: they wait for no lock."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager

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
