"""A program on a pseudo-terminal, with the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pyte
import pytest

SHOW_ALTERNATE, HIDE_ALTERNATE = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


class PseudoTerminal:
    """A program with a controlling terminal of its own; killed on exit if it has not ended by itself."""

    def __init__(
        self, command: Sequence[str], columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        setsid = shutil.which("setsid")
        if setsid is None:
            pytest.skip("setsid (util-linux) is missing")
        self._master, self._slave = os.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        """All bytes that the program wrote."""
        self._set_size(columns, lines)
        self.attributes_before = termios.tcgetattr(self._slave)
        # setsid makes the terminal the program's own, so that Ctrl-C and a change of size reach it.
        self.process = subprocess.Popen(
            [setsid, "--ctty", *command],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    @property
    def attributes(self) -> list[Any]:
        """How the terminal treats input and output now."""
        return termios.tcgetattr(self._slave)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def lines(self) -> list[str]:
        """The screen as it is now, after all that has been written."""
        while select.select([self._master], [], [], 0)[0]:
            data = os.read(self._master, 65536)
            self.written += data
            self._stream.feed(data)
        return [line.rstrip() for line in self._screen.display]

    def colour(self, text: str) -> str:
        """The colour of the first character of a text on the screen."""
        for number, line in enumerate(self.lines()):
            if text in line:
                return str(self._screen.buffer[number][line.index(text)].fg)
        raise AssertionError(f"{text!r} is not on the screen")

    def until(self, condition: Callable[[list[str]], bool], seconds: float = 15.0) -> list[str]:
        """The screen once it is as it should be; fails when that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition(lines := self.lines()):
            assert time.monotonic() < deadline, "the screen stayed:\n" + "\n".join(lines)
            time.sleep(0.02)
        return lines

    def shows(self, *texts: str) -> list[str]:
        """Wait until all of the texts are on the screen."""
        return self.until(lambda lines: all(any(text in line for line in lines) for text in texts))

    def ended(self, seconds: float = 15.0) -> int:
        """The exit status, once it has ended; what it wrote at the end has been read."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            self.lines()
            assert time.monotonic() < deadline, "it did not end"
            time.sleep(0.02)
        self.lines()
        return self.process.returncode

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
