"""bpftrace as a peer: a script of it runs beside a target for as long as a `with` block lasts."""

from __future__ import annotations

import shutil
import signal
import subprocess
from types import TracebackType
from typing import Final, Self

from tests.bench.target import BenchError

_BEGIN: Final = ' BEGIN { printf("attached\\n"); }'
_END_SECONDS: Final = 30.0


class Bpftrace:
    """A running script."""

    def __init__(self, script: str) -> None:
        """`script` is in bpftrace's language and has no BEGIN of its own."""
        self._script = script
        self.said = ""
        """What it printed until its end, maps included."""

    def __enter__(self) -> Self:
        """Start it, and wait until it attaches its probes.

        Raises:
            BenchError: bpftrace is missing or does not run here.
        """
        program = shutil.which("bpftrace")
        if program is None:
            raise BenchError("bpftrace is not installed ('make packages-bench')")
        self._process = subprocess.Popen(
            [program, "-B", "none", "-e", self._script + _BEGIN],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line.strip())
            if said[-1] == "attached":
                return self
        self._process.stdout.close()
        self._process.wait()
        raise BenchError(f"bpftrace does not run here: {' '.join(said[-2:])}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self.said, _ = self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
