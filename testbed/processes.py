"""Processes that run for as long as a `with` block does, and the folder in which they find each other."""

from __future__ import annotations

import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from railscope.testbed.hosts import TestbedError


class Started(ABC):
    """Started on entry of the `with` block; whatever still runs is killed on exit."""

    def __init__(self, name: str) -> None:
        """`name`: what they are together."""
        self._name = name
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @abstractmethod
    def _start_all(self) -> None:
        """Start them, each as part of `_every`."""

    @property
    @abstractmethod
    def _every(self) -> Iterable[subprocess.Popen[bytes]]:
        """Those that were started."""

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix=f"railscope-{self._name}-", ignore_cleanup_errors=True)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs and remove the folder; harmless when called again."""
        self._kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def _folder(self) -> Path:
        """Theirs alone."""
        if self._temporary is None:
            raise TestbedError(f"the {self._name} has not been started: enter its `with` block first")
        return Path(self._temporary.name)

    def _kill(self) -> None:
        for process in self._every:
            if process.poll() is None:
                process.kill()
        for process in self._every:
            process.wait()
