"""A disaggregated inference on a fabric's hosts: prefill processes write KV caches to decode processes with NIXL.

Hosts take turns: the first one has a prefill process, the second one a decode process, and so on.  Every prefill
process writes to every decode process.  Like a job's ranks they die with the thread that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.testbed.hosts import Host, TestbedError
from railscope.testbed.processes import Started
from railscope.testbed.transfers.library import find_nixl

_PROGRAM: Final = Path(__file__).with_name("kv_cache.py")
_POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class KvWrites:
    """What one prefill process wrote to one decode process, as it says itself."""

    prefill: str
    pid: int
    decode: str
    operations: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class InferenceReport:
    """What the processes of an inference say that they did."""

    writes: tuple[KvWrites, ...]
    verified: bool
    """Every decode process holds what was written to it."""


class Inference(Started):
    """Started on entry of the `with` block; whatever still runs is killed on exit."""

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        requests: int = 0,
        pause_s: float = 0.02,
        environment: Mapping[str, str] | None = None,
        wheels: Path | None = None,
    ) -> None:
        """Describe it; nothing runs before the `with` block is entered.

        Args:
            hosts: at least two.
            requests: caches that each prefill process writes to each decode process; 0: until `stop`.
            pause_s: after each of them.
            environment: what the processes have in their environment beside what NIXL needs.
            wheels: the folder to import NIXL from; None: where a checkout has it.

        Raises:
            TestbedError: there are too few hosts, or NIXL is not here; the message says what to do.
        """
        if len(hosts) < 2:
            raise TestbedError("a disaggregated inference needs two hosts: one for prefill, one for decode")
        super().__init__("inference")
        self._wheels = find_nixl() if wheels is None else find_nixl(wheels)
        self._places: dict[str, Host] = {
            f"{'decode' if host.index % 2 else 'prefill'}-{host.index // 2}": host for host in hosts
        }
        self._decodes = [name for name in self._places if name.startswith("decode")]
        self._requests = requests
        self._pause_s = pause_s
        self._environment = environment or {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def processes(self) -> Mapping[str, int]:
        """Process ids by name: `prefill-0`, `decode-0`, …"""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self.processes.values())

    @property
    def decodes(self) -> Sequence[str]:
        """Names of the decode processes."""
        return self._decodes

    def host_of(self, name: str) -> Host:
        return self._places[name]

    def await_ready(self, timeout_s: float) -> None:
        """Wait until every prefill process knows every decode process.

        Raises:
            TestbedError: one of them failed, or the time is over.
        """
        self._await([f"{name}.ready" for name in self._prefills], timeout_s)

    def release(self) -> None:
        """Let the prefill processes write."""
        (self._folder / "go").touch()

    def stop(self, timeout_s: float) -> None:
        """Let them finish what they are at, and wait until they have written all; they stay until `end`.

        Raises:
            TestbedError: one of them failed, or the time is over.
        """
        (self._folder / "stop").touch()
        self.await_written(timeout_s)

    def await_written(self, timeout_s: float) -> None:
        """Wait until the prefill processes have written all.

        Raises:
            TestbedError: one of them failed, or the time is over.
        """
        self._await([f"{name}.report" for name in self._prefills], timeout_s)

    def end(self, timeout_s: float) -> InferenceReport:
        """Let them go, and read what they say.

        Raises:
            TestbedError: one of them failed, or the time is over.
        """
        (self._folder / "end").touch()
        self._await([f"{name}.report" for name in self._places], timeout_s)
        deadline = time.monotonic() + timeout_s
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TestbedError(f"{name} (pid {process.pid}) did not end within {timeout_s:g} s") from None
        reports = {name: json.loads((self._folder / f"{name}.report").read_bytes()) for name in self._places}
        writes = tuple(
            KvWrites(name, self._processes[name].pid, decode, operations, operations * reports[name]["bytes_each"])
            for name in self._prefills
            for decode, operations in reports[name]["written"].items()
        )
        written_to = {write.decode for write in writes if write.operations}
        return InferenceReport(writes, all(reports[name]["right"] for name in written_to))

    @property
    def _every(self) -> Collection[subprocess.Popen[bytes]]:
        return self._processes.values()

    def _start_all(self) -> None:
        for name, host in self._places.items():
            self._start(name, host)

    @property
    def _prefills(self) -> list[str]:
        return [name for name in self._places if name not in self._decodes]

    def _start(self, name: str, host: Host) -> None:
        role = name.partition("-")[0]
        arguments = [role, name, str(self._folder), str(self._requests), str(self._pause_s)]
        command = [sys.executable, str(_PROGRAM), *arguments, *(self._decodes if role == "prefill" else ())]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._wheels),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": ",".join(host.rails),
            **self._environment,
        }
        with (self._folder / f"{name}.said").open("wb") as said:
            self._processes[name] = subprocess.Popen(
                host.command(*command), env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def _await(self, files: Sequence[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not all((self._folder / file).exists() for file in files):
            for name, process in self._processes.items():
                if process.poll() not in (None, 0):
                    raise TestbedError(f"{name} ended with status {process.returncode}: {self._last_words(name)}")
            if time.monotonic() > deadline:
                raise TestbedError(f"the inference's processes were not through within {timeout_s:g} s")
            time.sleep(_POLL_SECONDS)

    def _last_words(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = (self._folder / f"{name}.said").read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""
