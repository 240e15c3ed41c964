"""Handles signals: those that end the agent or a recording in good order, and those that ask the agent for something.

An agent ends on SIGTERM and SIGINT, reloads its configuration on SIGHUP and writes a recording on SIGUSR2.  Whatever
hangs then, a disk, a driver or a part of the agent itself: it is gone within seconds, and the log says where it hung.
A command that records ends on SIGHUP, too: the terminal of whoever started it has gone.  Under nohup(1) that is
ignored, and stays so.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_log = logging.getLogger("railscope.daemon")

_DEADLINE_SECONDS: Final = 4.0
"""From SIGTERM to the end, whatever hangs."""
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_STANDARD_ERROR: Final = 2
"""The descriptor: where a handler of a fault writes, whatever stands for standard error in the interpreter."""
_OF_AGENT: Final = (*_ENDING, signal.SIGHUP, signal.SIGUSR2)


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP as long as the block runs, however often; in the main thread only."""
    before = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGHUP)}
    for number, handler in before.items():
        if number is not signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class AgentSignals:
    """From construction on, and to the very end, no signal that is for the agent ends it halfway.

    What comes before `connect` is passed on then.  In the main thread only.
    """

    def __init__(self, deadline_seconds: float = _DEADLINE_SECONDS) -> None:
        """`deadline_seconds`: after the first signal that asks the agent to end, it has ended within this time."""
        self._deadline_seconds = deadline_seconds
        self._actions: dict[int, Callable[[], None]] = {}
        self._came: set[int] = set()
        """Before `connect`."""
        # The kernel gives a signal to any thread, and the interpreter runs its handler in the main thread, which may
        # hang: another one must learn of it.  The interpreter writes each signal's number here at once.
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._set_deadline, name="signals", daemon=True).start()
        for number in _OF_AGENT:
            signal.signal(number, self._handle)
        # The watchdog of systemd ends an agent that hangs by SIGABRT: the journal then has where it hung.
        faulthandler.enable(_STANDARD_ERROR)

    def connect(self, *, stop: Callable[[], None], reload: Callable[[], None], record: Callable[[], None]) -> None:
        """Pass signals on from now on."""
        self._actions = {
            **dict.fromkeys(_ENDING, stop),
            signal.SIGHUP: reload,
            signal.SIGUSR2: record,
        }
        for number in tuple(self._came):
            self._actions[number]()

    def disconnect(self) -> None:
        """The agent has ended, and what is left of its process takes no notice of signals."""
        # The interpreter gives back to the kernel what it handles when it ends, but not what it ignores.
        for number in _OF_AGENT:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, _frame: object) -> None:
        action = self._actions.get(number)
        if action is None:
            self._came.add(number)
        else:
            action()

    def _set_deadline(self) -> None:
        while came := self._read.recv(64):
            if not set(came).isdisjoint(_ENDING):
                # Needs no interpreter: a part that never lets go of its lock cannot keep it.
                faulthandler.dump_traceback_later(self._deadline_seconds, exit=True, file=_STANDARD_ERROR)
                return
