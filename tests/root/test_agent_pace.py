"""How often the agent's loop wakes: seldom beside a library that nobody uses, at once when somebody begins to."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from railscope.agent.config.options import Config
from railscope.agent.node.daemon.daemon import Daemon
from railscope.probes.libraries.mmap_events import MmapEvents, MmapEventsError
from tests.root.probe_targets import Target

pytestmark = pytest.mark.root

_PAUSES = 8


@dataclass(slots=True)
class SkippingClock:
    """The machine's own, ahead by what nobody waited for."""

    ahead_ns: int = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def realtime_ns(self) -> int:
        return time.time_ns() + self.ahead_ns

    def sleep(self, seconds: float) -> None:
        self.ahead_ns += round(seconds * 1e9)


class SkippingSelector(selectors.EpollSelector):
    """Waits for nothing: where nothing has happened, time moves on instead."""

    def __init__(self, clock: SkippingClock) -> None:
        super().__init__()
        self._clock = clock
        self.pauses: list[float] = []
        self.after: Callable[[], None] = lambda: None
        """Called after every `_PAUSES` of them."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self._clock.sleep(timeout)
            self.pauses.append(timeout)
            if len(self.pauses) % _PAUSES == 0:
                self.after()
        return ready


def test_the_loop_is_slow_until_somebody_has_a_communicator(testbed: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> MmapEvents:
        raise MmapEventsError("what others of this machine map would wake the loop")

    monkeypatch.setattr(MmapEvents, "open", refuse)
    clock = SkippingClock()
    selector = SkippingSelector(clock)
    monkeypatch.setattr(selectors, "DefaultSelector", lambda: selector)
    config = Config(pids=(testbed.caller.pid,), collectors=frozenset({"collective"}), recordings_directory=None)
    daemon = Daemon(config, clock, "0", serve=False)

    def begin() -> None:
        if len(selector.pauses) == _PAUSES:
            testbed.caller.new_communicator()
        else:
            daemon.stop()

    selector.after = begin
    try:
        daemon.start()
        daemon.run()
    finally:
        daemon.close()
    unused, used = selector.pauses[1:_PAUSES], selector.pauses[_PAUSES:]
    assert sum(unused) > len(unused) * 1.0, "beside an idle library it wakes every other second"
    assert max(used) <= 1.0, "beside a communicator rings are emptied, and stalls looked for, more often"
