"""The bench's producer writes what the probes would, counts what it could not write, and keeps its pace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from probes import libbpf
from probes.nccl import records
from probes.nccl.abi import Op
from probes.ring import Ring
from tests.bench.produce import Producer
from tests.bench.ring_reader import Produced, ProducerProcess
from tests.bench.ring_readers import ArrayReader, BccReader, CallbackReader
from tests.bench.target import build

pytestmark = pytest.mark.root


@contextmanager
def loaded(directory: Path, ring_bytes: int) -> Iterator[tuple[int, Ring]]:
    """The program's descriptor and its ring."""
    program = libbpf.load(
        build(directory).producer_object, attach_types={"produce": 0}, map_entries={"call_events": ring_bytes}
    )
    try:
        ring = Ring(program.map_fds["call_events"], ring_bytes, records.CALL_EVENT)
        try:
            yield program.program_fds["produce"], ring
        finally:
            ring.close()
    finally:
        program.close()


def test_what_does_not_fit_is_counted_as_lost(tmp_path: Path) -> None:
    with loaded(tmp_path, 4096) as (program_fd, ring):
        producer = Producer(program_fd)
        assert producer.write(1000) == 1000 - 4095 // 64
        first = ring.read()
        assert producer.write(10) == 0
        second = ring.read()
    assert first["sequence"].tolist() == list(range(1, 4095 // 64 + 1))
    assert second["sequence"].tolist() == list(range(1001, 1011))
    assert sorted(set(second["payload_bytes"].tolist())) == [1024 << shift for shift in range(8)]


def test_a_pace_is_kept_and_every_event_is_read_or_lost(tmp_path: Path) -> None:
    with loaded(tmp_path, 1 << 20) as (program_fd, ring), ProducerProcess(program_fd) as producer:
        reader = ArrayReader(ring)
        reader.start()
        produced = producer.produce(20_000, 200_000)
        reading = reader.finish()
    assert produced == Produced(20_000 - reading.events, produced.duration_ns)
    assert produced.duration_ns >= 20_000 / 200_000 * 1e9
    assert int(reader.calls.sum()) == reading.events


def test_the_readers_in_other_words_understand_the_same_events(tmp_path: Path) -> None:
    with loaded(tmp_path, 1 << 20) as (program_fd, ring), ProducerProcess(program_fd) as producer:
        for kind in (CallbackReader, BccReader):
            with contextlib.closing(kind(ring.fd)) as reader:
                reader.start()
                assert producer.produce(2_000, 100_000).lost == 0
                assert reader.finish().events == 2_000
                if isinstance(reader, CallbackReader):
                    assert [op for op, calls in enumerate(reader.calls) if calls] == [Op.AllReduce]
