"""The terminal of the live view: alternate screen, keys, signals, restoration.

Whatever ends the view (a key, SIGTERM, SIGHUP, an error), the terminal is as it was before.  Signals are noted and
answered between frames, so that no frame is cut in two.

Special keys arrive as an escape sequence, over ssh sometimes in pieces; the Escape key alone is the first byte of one.
So an unfinished sequence waits for its rest, and is what it is when none comes soon.

Source: xterm's control sequences, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html.
"""

from __future__ import annotations

import codecs
import os
import re
import selectors
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final, Self, TextIO

from rich.console import Console, ConsoleDimensions
from rich.control import Control
from rich.text import Text

_SEQUENCE: Final = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|O[ -~])")
_UNFINISHED: Final = re.compile("\x1b(?:\\[[0-?]*[ -/]*|O)?\\Z")
_NAMES: Final = {
    **{f"\x1b{kind}{letter}": name for kind in "[O" for letter, name in (("A", "up"), ("B", "down"))},
    **{f"\x1b{kind}{letter}": name for kind in "[O" for letter, name in (("C", "right"), ("D", "left"))},
    **{f"\x1b{kind}{letter}": name for kind in "[O" for letter, name in (("H", "home"), ("F", "end"))},
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[Z": "backtab",
    "\x1b[1~": "home",
    "\x1b[7~": "home",
    "\x1b[4~": "end",
    "\x1b[8~": "end",
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
}


class Keys:
    """Decodes what is typed."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""

    @property
    def unfinished(self) -> bool:
        """Something waits for its rest, or for `flush`."""
        return bool(self._waiting)

    def feed(self, data: bytes) -> list[str]:
        """The keys that are complete: a character, or a name as `up`, `enter`, `escape`."""
        text = self._waiting + self._decoder.decode(data)
        self._waiting = ""
        keys = []
        at = 0
        while at < len(text):
            if match := _SEQUENCE.match(text, at):
                if match[0] in _NAMES:
                    keys.append(_NAMES[match[0]])
                at = match.end()
            elif text[at] == "\x1b":
                if _UNFINISHED.match(text, at):
                    self._waiting = text[at:]
                    break
                keys.append("escape")
                at += 1
            else:
                keys.append(_NAMES.get(text[at], text[at]))
                at += 1
        return keys

    def flush(self) -> list[str]:
        """The keys in what waited in vain."""
        waiting, self._waiting = self._waiting, ""
        return ["escape", *waiting[1:]] if waiting else []


_ESCAPE_SECONDS: Final = 0.1
"""How long the rest of an escape sequence may take; over a slow line its bytes come apart."""
_READ_BYTES: Final = 1024
_USUAL_SIZE: Final = (80, 24)
"""Of a terminal that does not know its own."""
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_NOTED: Final = (*_ENDING, signal.SIGWINCH, signal.SIGTSTP)


class Terminal:
    """Standard input and output as a screen of lines, while the `with` block lasts."""

    def __init__(self, output: TextIO) -> None:
        self._input = sys.stdin.fileno()
        self._output = output
        self._console = Console(file=output, highlight=False)
        self._keys = Keys()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._handlers: dict[int, Any] = {}
        self._attributes: list[Any] | None = None
        self._suspended = False
        self.ended_by: int | None = None
        """The signal that asks for the end; None: none has."""

    def __enter__(self) -> Self:
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._input, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for number in _NOTED:
            self._handlers[number] = signal.signal(number, self._note)
        self._configure()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now; not those that the environment named when the program began."""
        try:
            columns, lines = os.get_terminal_size(self._output.fileno())
        except OSError:
            columns = lines = 0
        self._console.size = ConsoleDimensions(columns or _USUAL_SIZE[0], lines or _USUAL_SIZE[1])
        return self._console.size

    @property
    def ascii_only(self) -> bool:
        """The terminal cannot show bars made of blocks."""
        return self._console.options.ascii_only

    def wake(self) -> None:
        """End the wait for keys; from any thread or signal handler."""
        # A full pipe wakes too; of a closed one no thread waits.
        with suppress(OSError):
            os.write(self._wake_write, b"\0")

    def keys(self, timeout_seconds: float) -> list[str]:
        """Wait for keys, or for `wake` or a signal, no longer than the timeout."""
        if self._keys.unfinished:
            timeout_seconds = min(timeout_seconds, _ESCAPE_SECONDS)
        ready = {key.fd for key, _ in self._selector.select(max(0.0, timeout_seconds))}
        if self._suspended:
            self._suspend()
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, _READ_BYTES)
        if self._input not in ready:
            return self._keys.flush()
        try:
            data = os.read(self._input, _READ_BYTES)
        except OSError:
            # The terminal has gone.
            data = b""
        if not data:
            self.ended_by = self.ended_by or signal.SIGHUP
        return self._keys.feed(data)

    def show(self, lines: Sequence[Text]) -> None:
        """Draw as many lines as the screen has."""
        width, _ = self.size
        # What was there before is written over with blanks.
        for line in lines:
            line.truncate(width, pad=True)
        with self._console as console:
            console.control(Control.home())
            console.print(Text("\n").join(lines), end="", soft_wrap=True)

    def _configure(self) -> None:
        self._attributes = termios.tcgetattr(self._input)
        tty.setcbreak(self._input)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _restore(self) -> None:
        # A terminal that has gone takes nothing back.
        with suppress(OSError):
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)
            self._output.flush()
        with suppress(termios.error):
            if self._attributes is not None:
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._attributes)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number in _ENDING:
            self.ended_by = number
        self._suspended = self._suspended or number == signal.SIGTSTP
        self.wake()

    def _suspend(self) -> None:
        """Ctrl-Z: give the terminal to the shell, and take it again when the shell lets us go on."""
        self._suspended = False
        self._restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._configure()
