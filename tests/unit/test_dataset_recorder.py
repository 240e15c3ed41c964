"""What a recorder is given and gives on, piece by piece, and what it says at the end and at the beginning."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.config.options import Config
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.dataset.recording_writer import RecordingRow, RecordingWriter
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import RailLedger
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.facts.transfers import NodeTransfers, PeerTransfers
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.node.recorder.feed import RecorderFeed, StreamPiece
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.node.recorder.ring import RecordRing
from railscope.agent.record.dataset_recorder import (
    DatasetRecorder,
    describe_losses,
    describe_silence,
    make_dataset_folder,
    recorders_config,
)
from railscope.agent.record.stream import StreamTotals
from railscope.agent.recording.recording import KINDS
from railscope.probes.clock import SystemClock
from tests.unit.dataset_pieces import ROW
from tests.unit.recordings import SECOND_NS, records
from tests.unit.stall_world import SimulatedClock


@given(
    st.integers(1, 20),
    st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 30)), st.just(("take", 0))), max_size=20),
)
def test_a_ring_gives_everything_once_and_counts_what_was_overwritten(
    capacity: int, steps: list[tuple[str, int]]
) -> None:
    ring = RecordRing(KINDS["losses"], capacity)
    added = taken = 0
    for step, count in [*steps, ("take", 0)]:
        if step == "add":
            ring.add(records("losses", count, calls=added + np.arange(count)))
            added += count
            continue
        fresh, overwritten = ring.read_after(taken)
        assert fresh["calls"].tolist() == list(range(max(taken, added - capacity), added))
        assert taken + overwritten + len(fresh) == added == ring.added
        taken = added


def test_what_was_not_added_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="0 records have been added, not 1"):
        RecordRing(KINDS["losses"], 4).read_after(1)


def test_the_recorder_gives_each_event_once_with_its_losses_and_the_clocks_of_its_time() -> None:
    clock = SimulatedClock()
    recorder = FlightRecorder(clock, host="gpu-01", memory_bytes=56 * 1000)
    snapshot = Snapshot(realtime_ns=0, version="", kernel="")
    seen: list[int] = []
    lost = overwritten = 0
    ended_ns = 0
    for round_number in range(20):
        for _ in range(3):
            recorder.add_calls(records("calls", 100, sequence=len(seen) + overwritten + np.arange(100)))
            clock.sleep(1.0)
            recorder.update()
            if round_number % 5 == 4:
                break
        recorder.record_losses(calls=10 * (round_number + 1), completions=0, lifecycle=0)
        recorder.add_mark(f"mark {round_number}")
        taken = recorder.read_new("record", snapshot)
        one = taken.recording
        seen += one.calls["sequence"].tolist()
        overwritten += taken.overwritten["calls"]
        lost += one.lost_events()["calls"]
        assert [mark.text for mark in one.marks] == [f"mark {round_number}"]
        assert one.began_ns == ended_ns or round_number == 0
        ended_ns = one.ended_ns
        assert one.clocks[0].monotonic_ns <= one.began_ns
        assert one.clocks[-1].monotonic_ns <= one.ended_ns
    assert lost == 200
    assert overwritten == 0
    assert len(seen) == 300 * 16 + 100 * 4


@dataclass
class Taker:
    """A stream that keeps what it is given."""

    ready: bool = True
    pieces: list[StreamPiece] = field(default_factory=list)

    def enqueue(self, piece: StreamPiece) -> None:
        self.pieces.append(piece)


class Idle:
    """A host on which nothing but the recorder's own events happens."""

    def rail_decisions(self) -> tuple[RailDecision, ...]:
        return ()

    def rail_ledgers(self) -> dict[tuple[int, str], RailLedger]:
        return {}

    def snapshot(self) -> Snapshot:
        return Snapshot(realtime_ns=0, version="1.2.3", kernel="")


def test_pieces_are_given_every_few_seconds_sooner_where_memory_is_short_and_later_where_the_disk_is_slow() -> None:
    clock = SimulatedClock()
    recorder = FlightRecorder(clock, host="gpu-01", memory_bytes=56 * 1000)
    feed, taker = RecorderFeed(recorder, Idle(), None, None), Taker()
    feed.start_stream(taker, 5 * SECOND_NS)

    def after(seconds: int, calls: int = 0) -> list[int]:
        """Lengths of the pieces that were given meanwhile."""
        taker.pieces.clear()
        for _ in range(seconds):
            clock.sleep(1.0)
            recorder.add_calls(records("calls", calls))
            feed.update()
        return [len(piece.piece.recording.calls) for piece in taker.pieces]

    assert after(4, calls=10) == []
    assert after(1, calls=10) == [50]
    assert after(10, calls=1) == [5, 5]
    # The ring holds 620 calls.
    assert after(2, calls=310) == [310, 310]
    taker.ready = False
    assert after(7, calls=100) == []
    taker.ready = True
    assert after(1) == [620]
    assert taker.pieces[0].piece.overwritten["calls"] == 80
    feed.write_to(taker)
    assert len(taker.pieces[-1].piece.recording.calls) == 0


@pytest.mark.parametrize(
    ("row", "communicators", "pids", "said"),
    [
        (ROW, 0, (), ["no process used NCCL during the recording"]),
        (ROW, 0, (4711,), ["process 4711 did not use NCCL meanwhile: are these the pids of the job's ranks?"]),
        (
            ROW,
            0,
            (4711, 4712),
            ["none of the processes 4711, 4712 used NCCL meanwhile: are these the pids of the job's ranks?"],
        ),
        (ROW, 2, (), ["nobody called NCCL meanwhile, though 2 ranks of communicators were there"]),
        (replace(ROW, calls_lost=1), 0, (), []),
        (replace(ROW, calls_removed=1), 0, (), []),
    ],
)
def test_a_recording_without_a_call_says_so(
    row: RecordingRow, communicators: int, pids: tuple[int, ...], said: list[str]
) -> None:
    assert list(describe_silence(row, 0, communicators, pids)) == said
    assert list(describe_silence(row, 1, communicators, pids)) == []


def test_a_folder_that_has_recordings_is_added_to_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "railscope.recordings")
    assert len(make_dataset_folder(tmp_path / "new" / "job")) == 2
    assert caplog.messages == []
    for node in ("gpu/01", "gpu/01", "gpu-02"):
        RecordingWriter(DatasetWriter(tmp_path / "new" / "job", node), ROW)
        make_dataset_folder(tmp_path / "new" / "job")
    assert caplog.messages == [
        f"{tmp_path}/new/job already holds 1 recording of gpu/01: this recording is added",
        f"{tmp_path}/new/job already holds 2 recordings of gpu/01: this recording is added",
        f"{tmp_path}/new/job already holds 3 recordings of gpu-02, gpu/01: this recording is added",
    ]


def test_losses_are_told_by_their_cause() -> None:
    assert list(describe_losses(StreamTotals({}, {}))) == ["nothing was lost"]
    assert list(describe_losses(StreamTotals({"calls": 1234}, {"rail_samples": 2}))) == [
        "lost by the kernel, whose ring was full: 1,234 calls "
        "(raise --limit.ring, or leave the recorder a processor that the job does not take)",
        "overwritten before it was on disk: 2 rail samples (raise --memory to hold more)",
    ]
    assert list(describe_losses(StreamTotals({"completions": 3}, {}))) == [
        "lost by the kernel, whose ring was full: 3 completions "
        "(leave the recorder a processor that the job does not take)"
    ]


def test_a_recorder_takes_what_its_agent_saw_up_to_the_end_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "railscope")
    watches_nothing = Config(collectors=frozenset(), recordings_directory=None)
    recorder = DatasetRecorder(tmp_path / "job", watches_nothing, "1.2.3", SystemClock())
    try:
        recorder.daemon.start()
        recorder.begin()
        recorder.daemon.stop()
        recorder.daemon.run()
        recorder.finish()
    finally:
        recorder.close()
    with open_dataset([tmp_path / "job"]) as dataset:
        (row,) = dataset.rows(dataset["recordings"]).to_pylist()
    assert row["began_ns"] < row["ended_ns"]
    assert (row["railscope"], row["calls_lost"]) == ("1.2.3", 0)
    assert caplog.messages[-1] == "0 calls were recorded, lost: none"


def test_an_agent_that_records_nothing_has_nothing_to_give() -> None:
    daemon = Daemon(Config(collectors=frozenset(), recordings_memory_bytes=0), SystemClock(), "1.2.3", serve=False)
    try:
        with pytest.raises(RuntimeError, match="the flight recorder is switched off"):
            daemon.start_stream(Taker(), SECOND_NS)
        with pytest.raises(RuntimeError, match="the flight recorder is switched off"):
            daemon.flush_stream(Taker())
    finally:
        daemon.close()


def test_a_recorder_looks_at_nothing_that_no_table_holds() -> None:
    usual = recorders_config(Config(), 1 << 20)
    assert usual.collectors == {"collective", "netdev", "rdma", "lldp", "tcp", "qp"}
    assert usual.probe_enqueue_time == "off"
    assert (usual.recordings_memory_bytes, usual.recordings_directory) == (1 << 20, None)
    assert usual.ring_bytes == 16 << 20
    assert recorders_config(Config(ring_bytes=1 << 20), 1).ring_bytes == 1 << 20
    chosen = recorders_config(Config(collectors=frozenset({"netdev", "qdisc"}), probe_enqueue_time="pair"), 1)
    assert chosen.collectors == {"netdev"}
    assert chosen.probe_enqueue_time == "pair"


class Transferring(Idle):
    """A host whose processes transfer, and end."""

    def __init__(self) -> None:
        self.transfers = NodeTransfers()

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), transfers=self.transfers)


def pair(pid: int, life: int, writes: int) -> PeerTransfers:
    return PeerTransfers("nixl", "Write", "transmit", pid, "decode-0", writes, 0, writes, 0, 1.0, None, life)


def test_what_processes_transferred_is_given_once_though_other_ended_ones_are_forgotten_meanwhile() -> None:
    host, taker = Transferring(), Taker()
    feed = RecorderFeed(FlightRecorder(SimulatedClock(), host="gpu-01", memory_bytes=56_000), host, None, None)

    def given(ended: dict[int, PeerTransfers], count: int, *by_peer: PeerTransfers) -> list[tuple[int, int, int]]:
        several = {number: (one,) for number, one in ended.items()}
        host.transfers = NodeTransfers(by_peer=by_peer, ended=several, ended_count=count)
        feed.write_to(taker)
        return [(one.pid, one.life, one.operations) for (one,) in taker.pieces[-1].transfers.values()]

    first, second, third = pair(7, 0, 5), pair(8, 1, 6), pair(7, 2, 9)
    assert given({0: first}, 1, second) == [(7, 0, 5), (8, 1, 6)]
    assert given({0: first, 1: second}, 2, third) == [(8, 1, 6), (7, 2, 9)]
    # The second is forgotten, and the first, another user's, is not.
    assert given({0: first, 2: third, 3: pair(9, 3, 1)}, 4) == [(7, 2, 9), (9, 3, 1)]
    assert given({0: first, 3: pair(9, 3, 1)}, 4) == []
    keys = [key for piece in taker.pieces for key in piece.transfers]
    assert len(set(keys)) == 4
