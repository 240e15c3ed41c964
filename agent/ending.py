"""Which signals end the agent and a recording in good order: probes come off, and what was seen is kept.

SIGHUP is among them: the terminal of whoever started it has gone.  Under nohup(1) it is ignored, and stays so.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP as long as the block runs; in the main thread only."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
