"""The NCCL probes in the kernel: every call is counted once, with its bytes, in every mode and when room runs out."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from railscope.probes.loading.libbpf import LoadError
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.abi import DataType, Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import Stat
from tests.root.probe_targets import (
    FLOAT32,
    GARBAGE,
    MODES,
    Count,
    Target,
    all_reduce,
    all_reduce_only,
    attached,
    communicators,
    counted,
    loaded,
    on_processor,
    target,
)

pytestmark = pytest.mark.root

BFLOAT16: Final = int(DataType.Bfloat16)
INT64: Final = int(DataType.Int64)


@pytest.mark.nccl
@pytest.mark.parametrize(("attach", "enqueue_time"), MODES)
def test_every_call_of_the_real_library_is_counted_once(
    nccl: Target, attach: AttachKind, enqueue_time: EnqueueTime
) -> None:
    with loaded(nccl, attach=attach, enqueue_time=enqueue_time) as programs, attached(programs, nccl):
        all_reduce(nccl, 1000)
        nccl.caller.call("ncclBcast", 1, 0, 30, BFLOAT16, GARBAGE | 2, 0, 0)
        assert counted(programs) == {Op.AllReduce: Count(1000, 400_000), Op.Broadcast: Count(1, 60)}
        events = programs.call_events.read()
        stats = programs.stats()
        keys, _ = programs.aggregates.read()
    assert (programs.attach_kind, programs.enqueue_time) == (attach, enqueue_time)
    assert len(events) == 1001
    assert set(events["tgid"].tolist()) == set(events["tid"].tolist()) == {nccl.caller.pid}
    assert (np.diff(events["time_ns"].astype(np.int64)) > 0).all()
    assert events["payload_bytes"][:1000].tolist() == [400] * 1000
    assert events["stream"][:1000].tolist() == [7] * 1000
    assert set(events["library"].tolist()) == {3}
    assert (int(events["peer"][0]), int(events["peer"][-1])) == (-1, 2)
    assert {(int(key["size_bucket"]), int(key["data_type"])) for key in keys} == {(9, FLOAT32), (6, BFLOAT16)}
    assert stats[Stat.CALLS] == 1001
    assert all(stats[stat] == 0 for stat in (Stat.RING_FULL, Stat.AGGREGATES_FULL, Stat.ARGUMENTS_UNREADABLE))


def test_a_calls_host_time_is_in_the_bucket_that_holds_it(testbed: Target) -> None:
    """Bucket i ends with 2^(7+i) ns."""
    comm = testbed.caller.new_communicator()
    for _ in range(5):
        with (
            loaded(testbed, enqueue_time=EnqueueTime.PAIR, sample_every=1) as programs,
            attached(programs, testbed, all_reduce_only(testbed.points)),
        ):
            assert all_reduce(testbed, 1, comm) == 0
            times = programs.enqueue_times()[Op.AllReduce]
        nanoseconds = int(times["sum_ns"])
        assert times["buckets"].nonzero()[0].tolist() == [max(0, (nanoseconds - 1).bit_length() - 7)]


@pytest.mark.parametrize(("attach", "enqueue_time"), MODES)
@pytest.mark.parametrize("sample_every", [1, 16])
def test_host_time_is_sampled_as_often_as_said(
    testbed: Target, attach: AttachKind, enqueue_time: EnqueueTime, sample_every: int
) -> None:
    comm = testbed.caller.new_communicator()
    with (
        loaded(testbed, attach=attach, enqueue_time=enqueue_time, sample_every=sample_every) as programs,
        attached(programs, testbed, all_reduce_only(testbed.points)),
    ):
        assert all_reduce(testbed, 640, comm) == 0
        times = programs.enqueue_times()
        stats = programs.stats()
        assert counted(programs)[Op.AllReduce].calls == 640
    # What nccl.bpf.c does with the numbers of a communicator's calls
    hashed = np.arange(1, 641, dtype=np.uint64) * 2654435761 % (1 << 32)
    sampled = int((hashed < (1 << 32) // sample_every).sum())
    expected = 0 if enqueue_time is EnqueueTime.OFF else sampled
    assert int(times["calls"][Op.AllReduce]) == int(times["calls"].sum()) == expected
    assert int(times["buckets"].sum()) == expected
    assert (int(times["sum_ns"][Op.AllReduce]) > 0) == (expected > 0)
    if enqueue_time is EnqueueTime.SESSION:
        assert stats[Stat.RETURNS] == sampled  # the other returns are not trapped


def test_session_probes_over_perf_events_are_refused_in_one_line() -> None:
    settings = ProgramSettings(attach=AttachKind.PERF, enqueue_time=EnqueueTime.SESSION)
    with pytest.raises(LoadError, match=r"^perf events carry no session probes: .*, or attach as 'multi'$"):
        NcclPrograms.load(settings)


def test_only_observed_processes_are_counted(testbed: Target, layouts: Layouts) -> None:
    with (
        target(testbed.path, layouts) as stranger,
        loaded(testbed) as programs,
        attached(programs, testbed),
    ):
        comm = stranger.caller.new_communicator()
        all_reduce(testbed, 10)
        all_reduce(stranger, 20, comm)
        assert counted(programs, testbed.caller.pid) == {Op.AllReduce: Count(10, 4000)}
        assert counted(programs, stranger.caller.pid) == {}
        assert communicators(programs) == {}
        stats = programs.stats()
        assert (stats[Stat.CALLS], stats[Stat.RETURNS], stats[Stat.LIFECYCLE]) == (10, 0, 0)
        assert stats[Stat.FILTERED] >= 20
        programs.observe(stranger.caller.pid)
        programs.forget(testbed.caller.pid)
        all_reduce(testbed, 10)
        all_reduce(stranger, 3, comm)
        assert counted(programs, testbed.caller.pid) == {Op.AllReduce: Count(10, 4000)}
        assert counted(programs, stranger.caller.pid) == {Op.AllReduce: Count(3, 1200)}


@pytest.mark.nccl
def test_a_full_ring_loses_events_and_no_counts(nccl: Target) -> None:
    with loaded(nccl, ring_bytes=4096) as programs, attached(programs, nccl), on_processor(0, nccl):
        all_reduce(nccl, 1000)
        first = programs.call_events.read()
        all_reduce(nccl, 20, count=200)
        second = programs.call_events.read()
        lost = programs.stats()[Stat.RING_FULL]
        assert counted(programs) == {Op.AllReduce: Count(1020, 416_000)}
        assert programs.call_events.records_read == len(first) + len(second)
        assert programs.call_events.fullness() == 0
    # Of its last quarter one process may have a third.
    assert len(first) == 48 + 6
    assert second["payload_bytes"].tolist() == [800] * 20
    assert lost == 1000 - len(first)


@pytest.mark.nccl
def test_a_thread_that_changes_processors_is_read_in_order(nccl: Target) -> None:
    comm = nccl.caller.memory(2 << 20)
    taken = []
    with loaded(nccl) as programs, attached(programs, nccl, all_reduce_only(nccl.points)):
        for turn in range(40):
            with on_processor(turn % 2, nccl):
                all_reduce(nccl, 25, comm)
            if turn % 3 == 0:
                taken.append(programs.call_events.read())
        taken.append(programs.call_events.read())
        assert programs.stats()[Stat.RING_FULL] == 0
    assert np.concatenate([events["sequence"] for events in taken]).tolist() == list(range(1, 1001))


@pytest.mark.nccl
def test_writers_that_share_a_ring_lose_nothing(nccl: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # fewer rings than processors
    comm = nccl.caller.memory(2 << 20)
    with loaded(nccl) as programs, attached(programs, nccl, all_reduce_only(nccl.points)):
        nccl.caller.call_from_threads("ncclAllReduce", 8, 2000, 0, 0, 100, FLOAT32, 0, comm, 0)
        events = programs.call_events.read()
        assert programs.stats()[Stat.RING_FULL] == 0
    assert sorted(events["sequence"].tolist()) == list(range(1, 16_001))


@pytest.mark.nccl
def test_without_events_only_counts_are_written(nccl: Target) -> None:
    with loaded(nccl, write_events=False) as programs, attached(programs, nccl):
        all_reduce(nccl, 10)
        assert len(programs.call_events.read()) == 0
        assert counted(programs) == {Op.AllReduce: Count(10, 4000)}
        assert programs.stats()[Stat.RING_FULL] == 0


@pytest.mark.nccl
def test_when_the_aggregates_are_full_the_totals_stay_exact(nccl: Target) -> None:
    with loaded(nccl, aggregate_entries=4) as programs, attached(programs, nccl):
        for exponent in range(20):
            all_reduce(nccl, 10, count=1 << exponent)
        nccl.caller.call("ncclSend", 5, 0, 7, INT64, 1, 0, 0)
        overflow = programs.overflow_totals()
        found = counted(programs)
        stats = programs.stats()
    assert found[Op.AllReduce].calls < 200
    assert found[Op.AllReduce].calls + int(overflow[Op.AllReduce, FLOAT32]["calls"]) == 200
    total_bytes = found[Op.AllReduce].payload_bytes + int(overflow[Op.AllReduce, FLOAT32]["payload_bytes"])
    assert total_bytes == 40 * ((1 << 20) - 1)
    assert overflow[Op.Send, INT64].tolist() == (5, 280)
    assert stats[Stat.AGGREGATES_FULL] == int(overflow["calls"].sum())


@pytest.mark.parametrize(("attach", "enqueue_time"), MODES)
def test_probes_on_one_process_leave_the_others_alone(
    testbed: Target, layouts: Layouts, attach: AttachKind, enqueue_time: EnqueueTime
) -> None:
    points = all_reduce_only(testbed.points)
    with (
        target(testbed.path, layouts) as other,
        loaded(testbed, other, attach=attach, enqueue_time=enqueue_time) as programs,
    ):
        links = programs.attach(str(testbed.path), points, 3, None, pid=testbed.caller.pid)
        try:
            for to in (testbed, other):
                to.caller.call_from_threads("ncclAllReduce", 2, 5, 0, 0, 100, FLOAT32, 0, 0, 0)
            assert counted(programs, testbed.caller.pid) == {Op.AllReduce: Count(10, 4000)}
            assert counted(programs, other.caller.pid) == {}
        finally:
            links.close()


@pytest.mark.nccl
@pytest.mark.parametrize("attach", AttachKind)
def test_threads_that_call_at_once_are_all_counted(nccl: Target, attach: AttachKind) -> None:
    comm = nccl.caller.memory(2 << 20)
    with loaded(nccl, attach=attach) as programs, attached(programs, nccl, all_reduce_only(nccl.points)):
        nccl.caller.call_from_threads("ncclAllReduce", 8, 500, 0, 0, 100, FLOAT32, 0, comm, 0)
        assert counted(programs) == {Op.AllReduce: Count(4000, 1_600_000)}
        (entry,) = communicators(programs).values()
        events = programs.call_events.read()
    assert int(entry["sequence"]) == 4000
    assert sorted(events["sequence"].tolist()) == list(range(1, 4001))
    assert len(set(events["tid"].tolist())) == 8
    assert set(events["tgid"].tolist()) == {nccl.caller.pid}


@pytest.mark.nccl
def test_more_combinations_than_one_look_up_takes_are_all_read(nccl: Target) -> None:
    with loaded(nccl) as programs, attached(programs, nccl):
        nccl.caller.sweep("ncclSend", 3, 10_000, 0, 7, INT64, 0, 0, 0)
        keys, values = programs.aggregates.read()
    assert sorted(keys["peer"].tolist()) == list(range(10_000))
    assert set(values["calls"].sum(axis=1).tolist()) == {1}
    assert set(values["payload_bytes"].sum(axis=1).tolist()) == {56}


@pytest.mark.nccl
def test_a_look_up_that_is_too_small_for_a_bucket_grows(nccl: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.probes.loading.maps._BATCH", 1)
    with loaded(nccl, aggregate_entries=1024) as programs, attached(programs, nccl):
        nccl.caller.sweep("ncclSend", 3, 256, 0, 7, INT64, 0, 0, 0)
        keys, _ = programs.aggregates.read()
    assert sorted(keys["peer"].tolist()) == list(range(256))
