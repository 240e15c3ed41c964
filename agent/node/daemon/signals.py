"""Handles the signals that end the agent or a recording: probes are detached, and recorded data is kept.

SIGHUP is among them: the terminal of whoever started it has gone.  Under nohup(1) it is ignored, and stays so.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP as long as the block runs, however often; in the main thread only."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    install_stop_handlers(stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_stop_handlers(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP from now on; in the main thread only."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: stop())
