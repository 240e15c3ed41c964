"""The agent as a process of its own, with its metrics read over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.faults.web import samples_of
from tests.waiting import pause
from tests.whole_host import observing_all

RAILSCOPE = Path(sys.executable).with_name("railscope")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def metrics_of(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Every sample: name, labels, value."""
    return [
        (sample.name, dict(sample.labels), float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


class AgentProcess:
    """`railscope agent`, ready to be asked; ended on exit."""

    def __init__(
        self,
        *arguments: str,
        prefix: tuple[str, ...] = (),
        command: tuple[str, ...] = (str(RAILSCOPE),),
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        ready_seconds: float = 60.0,
    ) -> None:
        """Start it.

        Args:
            arguments: of `railscope agent`.
            prefix: what runs it, such as `ip netns exec HOST`.
            command: the program; this checkout's, unless another is named.
            environment: its own, unless it is this process's.
            log: the file that takes its log; None: it is kept, and shown where the agent ends too early.
            ready_seconds: how long it may take until it is ready.
        """
        self._port = free_port()
        address = f"127.0.0.1:{self._port}"
        # The last of an option counts: a test may ask for recordings.
        line = [*prefix, *command, "agent", "--recordings.directory", "", "--web.listen-address", address, *arguments]
        self._log = log
        self._ready_seconds = ready_seconds
        with contextlib.ExitStack() as stack:
            whole_host = stack.enter_context(contextlib.ExitStack())
            if "--pid" not in arguments:
                whole_host.enter_context(observing_all())
            errors = subprocess.PIPE if log is None else stack.enter_context(log.open("wb"))
            self.process = subprocess.Popen(line, stderr=errors, text=True, env=environment)
            self._whole_host = whole_host.pop_all()

    def __enter__(self) -> Self:
        try:
            self.until(self._ready, self._ready_seconds)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        finally:
            if self.process.poll() is None:
                os.kill(self.process.pid, signal.SIGKILL)
                self.process.wait()
            if self.process.stderr is not None:
                self.process.stderr.close()
            self._whole_host.close()

    def _ready(self) -> bool:
        assert self.process.poll() is None, self._said()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _said(self) -> str:
        if self._log is not None:
            return self._log.read_text(errors="replace")
        return str(self.process.stderr.read()) if self.process.stderr else ""

    @property
    def port(self) -> int:
        """Where it listens, on this host."""
        return self._port

    def text(self) -> str:
        return self.page("/metrics")

    def page(self, path: str, accept: str = "*/*") -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
        return body.decode()

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Samples of one name that carry these labels."""
        return [
            (dict(sample.labels), sample.value)
            for sample in samples_of(self.text(), [name])
            if labels.items() <= sample.labels.items()
        ]

    def stalls(self) -> list[dict[str, Any]]:
        """What /stalls says goes on."""
        return self._stalls("stalls")

    def ended_stalls(self) -> list[dict[str, Any]]:
        """What /stalls says is over."""
        return self._stalls("ended")

    def _stalls(self, which: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.page("/stalls"))[which]
        return found

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until something holds; fails when it does not within `seconds`."""
        assert self.comes_true(condition, seconds), "it did not come true in time"

    def comes_true(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, for `seconds` at most; whether it does."""
        began = time.monotonic()
        while not (holds := condition()) and time.monotonic() < began + seconds:
            pause(began)
        return holds
