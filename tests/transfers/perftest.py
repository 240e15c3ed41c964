"""UCX's own benchmark as a job of two processes on namespace hosts, over TCP: bytes of a library that is not NCCL.

It is in the wheel of UCX, with the real libraries, and needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType
from typing import Final, Self

from railscope.testbed.hosts import Host
from railscope.testbed.transfers.library import PERFTEST, WHEELS

_PORT: Final = 13_337


class Perftest:
    """A server on one host, and a client on another that sends once `start` is called; ended on exit."""

    def __init__(self, server: Host, client: Host, rail: int, *, messages: int, size_bytes: int) -> None:
        """So many messages of this size go from the client to the server, over this rail alone."""
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(WHEELS / "libucx/lib"),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": server.rails[rail],
            "UCX_WARN_UNUSED_ENV_VARS": "n",
        }
        command = f"exec {PERFTEST} -p {_PORT}"
        self._server = subprocess.Popen(
            server.command("sh", "-c", command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        test = f"-t tag_bw -s {size_bytes} -n {messages} -w 0 {server.addresses[rail]}"
        self._client = subprocess.Popen(
            client.command("sh", "-c", f"read line; {command} {test}"),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    @property
    def pids(self) -> tuple[int, int]:
        """Of the server and the client; the client's is that of a shell until `start`."""
        return self._server.pid, self._client.pid

    def start(self) -> None:
        """Let the client send."""
        assert self._client.stdin is not None
        self._client.stdin.write(b"\n")
        self._client.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for both.

        Raises:
            RuntimeError: one of them failed; the message has what it said.
        """
        for process in (self._client, self._server):
            process.wait(seconds)
            if process.returncode:
                said = process.stdout.read().decode() if process.stdout is not None else ""
                raise RuntimeError(f"ucx_perftest ended with status {process.returncode}: {said}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in (self._client, self._server):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
