"""A ring that fills suddenly wakes its reader, and one that is read in time never does."""

from __future__ import annotations

import contextlib
import select
import threading
import time

import pytest

from railscope.agent.config.options import Config
from railscope.agent.node.daemon import ring_drain, schedule
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.node.daemon.observer import Observer
from railscope.probes.clock import SystemClock
from railscope.probes.nccl.programs.calls import Loader
from railscope.probes.rings.wakeups import RingWakeups
from tests.root.probe_targets import Target, all_reduce, all_reduce_only, attached, loaded, on_processor
from tests.waiting import eventually

RING_BYTES = 64 << 10
RECORD_BYTES = 64
HALF = RING_BYTES // RECORD_BYTES // 2
BETWEEN_WAKEUPS = HALF // 16
"""From half of a ring on, records after which the programs wake the reader again (WAKEUPS_BITS in call_slots.h)."""

pytestmark = pytest.mark.root


def woken(wakeups: RingWakeups, seconds: float = 0.0) -> bool:
    return bool(select.select([wakeups], [], [], seconds)[0])


@pytest.mark.parametrize("loader", Loader)
def test_a_ring_wakes_its_reader_when_half_of_it_waits(testbed: Target, loader: Loader) -> None:
    comm = testbed.caller.new_communicator()
    with (
        loaded(testbed, ring_bytes=RING_BYTES, loader=loader) as programs,
        attached(programs, testbed, all_reduce_only(testbed.points)),
        contextlib.closing(RingWakeups([programs.call_events])) as wakeups,
        on_processor(0, testbed),
    ):
        for _ in range(2):
            all_reduce(testbed, HALF - BETWEEN_WAKEUPS, comm)
            assert not woken(wakeups, 0.2)
            all_reduce(testbed, 2 * BETWEEN_WAKEUPS, comm)
            assert woken(wakeups, 5)
            assert wakeups.clear()
            assert not woken(wakeups), "what has been heard is not told again"
            assert not wakeups.clear()
            all_reduce(testbed, BETWEEN_WAKEUPS, comm)
            assert woken(wakeups, 5), "as long as nobody comes, the programs go on calling"
            assert len(programs.call_events.read()) == HALF + 2 * BETWEEN_WAKEUPS
            wakeups.clear()


def test_the_agent_reads_a_burst_long_before_its_time(testbed: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    never_ns = 3600 * 10**9
    monkeypatch.setattr(ring_drain, "pause_ns", lambda *_, **__: never_ns)
    # They are read before each look for stalls, too, and a tick has one with it.
    monkeypatch.setattr(Observer, "evaluate_stalls", lambda _: never_ns)
    monkeypatch.setattr(schedule, "BRISK_NS", never_ns)
    config = Config(
        pids=(testbed.caller.pid,),
        collectors=frozenset({"collective"}),
        recordings_directory=None,
        ring_bytes=RING_BYTES,
    )
    comm = testbed.caller.new_communicator()
    daemon = Daemon(config, SystemClock(), "0", serve=False)
    try:
        daemon.start()
        thread = threading.Thread(target=daemon.run)
        thread.start()
        try:
            assert daemon._programs is not None
            rings = daemon._programs.call_events

            def left_alone() -> bool:
                plan = daemon._schedule.plan(daemon._rings.drained_ns)
                return rings.records_read == 1 and plan.drain_ns > time.monotonic_ns() + never_ns // 2

            with on_processor(0, testbed):
                all_reduce(testbed, 1, comm)
                eventually(left_alone)
                all_reduce(testbed, HALF - 2 * BETWEEN_WAKEUPS, comm)
                time.sleep(0.5)
                assert rings.records_read == 1, "without a burst the rings have their own time"
                all_reduce(testbed, 4 * BETWEEN_WAKEUPS, comm)
                eventually(lambda: rings.records_read > HALF)
        finally:
            daemon.stop()
            thread.join()
    finally:
        daemon.close()
