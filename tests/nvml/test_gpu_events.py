"""What NVML tells of GPUs by itself. The driver's library is simulated (tests/nvml/stub.c)."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from railscope.agent.node.condition.watch import ConditionWatch
from railscope.agent.node.nvlink import watch as nvlink
from railscope.agent.node.nvlink.watch import NvlinkWatch
from railscope.probes.clock import SystemClock
from railscope.probes.kernel_log import KernelLog
from railscope.probes.nvlink.gpu_events import GpuEvent, GpuEvents
from railscope.probes.nvlink.nvml import NvmlError, NvmlSession
from tests.nvml.stub import GPU_IS_LOST, Stub
from tests.nvml.test_watch import wait_until

XID, DOUBLE_BIT, CLOCK, UNAVAILABLE = 0x8, 0x2, 0x10, 0x4000
ALL = 0xFFFF
EVENT_SETS = 8
"""That the stand-in has at once."""


@pytest.fixture
def session(stub: Stub) -> Iterator[NvmlSession]:
    """Three GPUs, the last of which tells of nothing."""
    stub.say("gpus 3", f"events 0 {ALL}", f"events 1 {XID | DOUBLE_BIT}", "events 2 0")
    with closing(NvmlSession.open(stub.library)) as opened:
        yield opened


def words(events: Iterable[GpuEvent]) -> list[tuple[str, str, str]]:
    return [(one.kind, one.code, one.pci) for one in events]


def test_events_are_told_once_with_their_gpu_and_in_their_order(session: NvmlSession, stub: Stub) -> None:
    stub.say(f"event 0 {XID} 31")
    with closing(GpuEvents(session, range(3), SystemClock())) as events:
        assert events.gpus == (0, 1)
        assert events.read() == (), "what was before is not told"
        stub.say(f"event 1 {XID} 79", f"event 0 {DOUBLE_BIT} 0", f"event 0 {UNAVAILABLE} 7", f"event 2 {XID} 48")
        assert words(events.read()) == [
            ("xid", "79", "0000:1c:00.0"),
            ("gpu", "double_bit_ecc", "0000:1b:00.0"),
            ("gpu", "unavailable", "0000:1b:00.0"),
        ]
        assert events.read() == ()


def test_changes_of_clocks_are_not_asked_for(session: NvmlSession, stub: Stub) -> None:
    with closing(GpuEvents(session, range(3), SystemClock())) as events:
        stub.say(f"event 0 {CLOCK} 0")
        assert events.read() == ()


def test_a_flood_is_read_in_parts(session: NvmlSession, stub: Stub) -> None:
    with closing(GpuEvents(session, range(3), SystemClock())) as events:
        stub.say(*[f"event 0 {XID} 31"] * 600)
        assert [len(events.read()) for _ in range(4)] == [256, 256, 88, 0]


def test_a_lost_gpu_is_an_error_and_the_others_tell_again(session: NvmlSession, stub: Stub) -> None:
    with closing(GpuEvents(session, range(3), SystemClock())) as events:
        stub.say(f"fail 0 {GPU_IS_LOST}")
        with pytest.raises(NvmlError) as error:
            events.read()
        assert error.value.gpu_lost
    with closing(GpuEvents(session, range(3), SystemClock())) as events:
        assert events.gpus == (1,)
        stub.say(f"event 1 {XID} 48")
        assert words(events.read()) == [("xid", "48", "0000:1c:00.0")]


def test_what_came_before_a_gpu_was_lost_is_told_with_its_place(
    session: NvmlSession, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = NvmlSession.next_event

    def lost_meanwhile(session: NvmlSession, held: object) -> tuple[object, int, int] | None:
        told = wait(session, held)
        stub.say(f"fail 0 {GPU_IS_LOST}")
        return told

    with closing(GpuEvents(session, range(3), SystemClock())) as events:
        stub.say(f"event 0 {XID} 79")
        monkeypatch.setattr(NvmlSession, "next_event", lost_meanwhile)
        assert words(events.read()) == [("xid", "79", "0000:1b:00.0")]
        with pytest.raises(NvmlError):
            events.read()


@pytest.fixture
def watch(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvlinkWatch]:
    monkeypatch.setattr(nvlink, "_EVENT_PERIOD_NS", 10_000_000)
    stub.say("gpus 2", f"events 0 {ALL}", f"events 1 {ALL}")
    with closing(NvlinkWatch(SystemClock(), sysfs=tmp_path, library=stub.library, period_seconds=0.01)) as watch:
        watch.start()
        wait_until(lambda: watch.hears == (0, 1), "events are registered for")
        yield watch


def test_what_a_watch_heard_is_taken_once_and_goes_on_after_a_gpu_was_lost(watch: NvlinkWatch, stub: Stub) -> None:
    heard: list[GpuEvent] = []

    def told(*wanted: tuple[str, str, str]) -> bool:
        heard.extend(watch.take_events())
        return words(heard) == list(wanted)

    first, second = ("xid", "31", "0000:1b:00.0"), ("xid", "48", "0000:1c:00.0")
    stub.say(f"event 0 {XID} 31")
    wait_until(lambda: told(first), "it is told")
    stub.say(f"fail 0 {GPU_IS_LOST}")
    wait_until(lambda: watch.hears == (1,), "the other one is registered for again")
    stub.say(f"event 1 {XID} 48")
    wait_until(lambda: told(first, second), "the other one tells")


def test_event_sets_are_given_back_with_their_session(watch: NvlinkWatch, stub: Stub, tmp_path: Path) -> None:
    def hear() -> None:
        with closing(NvlinkWatch(SystemClock(), sysfs=tmp_path, library=stub.library, period_seconds=0.01)) as another:
            another.start()
            wait_until(lambda: another.hears == (0, 1), "events are registered for")

    for _ in range(EVENT_SETS):
        hear()
    assert watch.hears == (0, 1), "its own stays"


def xids(condition: ConditionWatch) -> list[tuple[str, int]]:
    return [(one.code, one.count) for one in condition.facts().events]


def test_an_xid_is_counted_by_the_kernels_log_where_that_is_read_and_else_by_nvml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    told = (
        GpuEvent("xid", "79", "0000:1b:00.0", clock.monotonic_ns()),
        GpuEvent("gpu", "double_bit_ecc", "0000:1b:00.0", clock.monotonic_ns()),
    )
    log = tmp_path / "kmsg"
    line = "3,1,900000000,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."
    log.write_text(line)  # a file gives all of it at once, as the device gives one record
    both = ConditionWatch(clock, sysfs=tmp_path, pcie=False, log_device=log)
    both.update()
    both.add_gpu_events(told)
    assert xids(both) == [("79", 1), ("double_bit_ecc", 1)]
    with monkeypatch.context() as broken:
        broken.setattr(KernelLog, "read", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        both.update()
    both.add_gpu_events([GpuEvent("xid", "48", "0000:1b:00.0", clock.monotonic_ns())])
    assert xids(both) == [("79", 1), ("double_bit_ecc", 1), ("48", 1)], "where the log fails later, each is told once"
    both.update()
    assert xids(both) == [("79", 1), ("double_bit_ecc", 1)], "opened again, it has the same lines"
    for unread in (None, tmp_path / "nothing"):
        alone = ConditionWatch(clock, sysfs=tmp_path, pcie=False, log_device=unread)
        alone.update()
        alone.add_gpu_events(told)
        alone.add_gpu_events(told[:1])
        assert xids(alone) == [("79", 2), ("double_bit_ecc", 1)]
    (xid, ecc) = both.facts().events
    assert (xid.severity, ecc.severity, ecc.kind) == ("page", "warn", "gpu")
    both.close()
