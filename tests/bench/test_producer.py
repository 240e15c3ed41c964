"""The bench's producer writes what the probes would, counts what it could not write, and keeps its pace."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.programs.calls import CallRings
from railscope.probes.nccl.records import calls as records
from railscope.probes.rings.ring_buffer import Ring
from tests.bench.produce import Producer
from tests.bench.ring_reader import Produced, ProducerProcess, producing
from tests.bench.ring_readers import ArrayReader, BccReader, CallbackReader
from tests.bench.target import build

pytestmark = pytest.mark.root


PAGE = 4096
ONE_RING = CallRings(1, PAGE)


def test_slots_that_do_not_fit_are_counted_as_lost(tmp_path: Path) -> None:
    with producing(build(tmp_path), ONE_RING) as produced:
        producer = Producer(produced.write_slots_fd)
        assert producer.write(1000) == 1000 - PAGE // 64
        first = produced.slots.read()
        assert producer.write(10) == 0
        second = produced.slots.read()
    assert first["sequence"].tolist() == list(range(1, PAGE // 64 + 1))
    assert second["sequence"].tolist() == list(range(1001, 1011))
    assert sorted(set(second["payload_bytes"].tolist())) == [1024 << shift for shift in range(8)]


def test_records_that_do_not_fit_are_counted_as_lost(tmp_path: Path) -> None:
    with (
        producing(build(tmp_path), ONE_RING) as produced,
        contextlib.closing(Ring(produced.kernel_ring_fd, PAGE, records.CALL_EVENT)) as ring,
    ):
        assert Producer(produced.write_records_fd).write(1000) == 1000 - (PAGE - 1) // 64
        assert ring.read()["sequence"].tolist() == list(range(1, (PAGE - 1) // 64 + 1))


def test_a_pace_is_kept_and_every_event_is_read_or_lost(tmp_path: Path) -> None:
    with (
        producing(build(tmp_path), CallRings.for_this_host(1 << 20)) as into,
        ProducerProcess(into.write_slots_fd) as producer,
    ):
        reader = ArrayReader(into.slots)
        reader.start()
        produced = producer.produce(20_000, 200_000)
        reading = reader.finish()
    assert produced == Produced(20_000 - reading.events, produced.duration_ns)
    assert produced.duration_ns >= 20_000 / 200_000 * 1e9
    assert int(reader.calls.sum()) == reading.events


def test_the_readers_in_other_words_understand_the_same_events(tmp_path: Path) -> None:
    with (
        producing(build(tmp_path), CallRings(1, 1 << 20)) as into,
        ProducerProcess(into.write_records_fd) as producer,
    ):
        for kind in (CallbackReader, BccReader):
            with contextlib.closing(kind(into.kernel_ring_fd)) as reader:
                reader.start()
                assert producer.produce(2_000, 100_000).lost == 0
                assert reader.finish().events == 2_000
                if isinstance(reader, CallbackReader):
                    assert [op for op, calls in enumerate(reader.calls) if calls] == [Op.AllReduce]
