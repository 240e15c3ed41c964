"""What is told of processes and their peers: names, sums, and no more of one user than of another.

Simulated: the kernel's tables.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from railscope.agent.dataset.recording_writer import RecordingWriter
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import RailLedger
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.recorder.feed import RecorderFeed, StreamPiece
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.node.transfers.files import OpenTransferLibrary
from railscope.agent.node.transfers.pairs import MOST_PAIRS, MOST_PEERS
from railscope.agent.node.transfers.watch import MOST_ENDED, MOST_FILES, TransferWatch
from railscope.probes.clock import SystemClock
from railscope.probes.libraries.files import FileStamp, LibraryKey
from railscope.probes.processes.processes import Mapping, ProcessIdentity
from railscope.probes.transfers.functions import OPERATIONS
from railscope.probes.transfers.programs import TransferTables
from railscope.probes.transfers.records import REQUEST, REQUEST_KEY, THREAD, TRANSFER_KEY, TRANSFER_TOTAL
from tests.unit.dataset_pieces import NO_LOSSES, ROW, read

MIB = 1 << 20


def number_of(library: str, op: str) -> int:
    return next(at for at, one in enumerate(OPERATIONS) if (one.library.value, one.op) == (library, op))


WRITE, PUT, SEND = number_of("nixl", "Write"), number_of("ucx", "Put"), number_of("mpi", "Send")


class Programs:
    """The loaded programs, with rows of (pid, function, peer, bytes, uid) of one operation each."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.ended: list[int] = []
        self.nameless = range(0)
        self.requests: list[tuple[int, int, int, int]] = []
        """(pid, function, peer, since when), of those under way."""

    def read(self) -> TransferTables:
        keys, totals = self._tables([row for row in self.rows if row[0] not in self.ended])
        requests, values = np.zeros(len(self.requests), REQUEST_KEY), np.zeros(len(self.requests), REQUEST)
        for at, (pid, function, peer, start_ns) in enumerate(self.requests):
            requests["request"][at], requests["tgid"][at] = 0x1000 + at, pid
            values["function"][at], values["peer"][at], values["start_ns"][at] = function, peer, start_ns
        return TransferTables(keys, totals, requests, values, np.zeros(0, np.uint32), np.zeros(0, THREAD))

    def overflow(self) -> Any:
        return np.zeros(0, TRANSFER_TOTAL)

    def peer_name(self, pid: int, peer: int) -> str:
        return "" if pid in self.ended or peer in self.nameless else f"decode-{peer}"

    def take_ended(self, _pids: object) -> Any:
        gone = [row for row in self.rows if row[0] in self.ended]
        self.rows = [row for row in self.rows if row[0] not in self.ended]
        names = {(pid, peer): f"decode-{peer}" for pid, _, peer, _, _ in gone}
        return *self._tables(gone), np.zeros(0, np.uint32), names

    def _tables(self, rows: list[tuple[int, int, int, int, int]]) -> tuple[Any, Any]:
        keys, totals = np.zeros(len(rows), TRANSFER_KEY), np.zeros(len(rows), TRANSFER_TOTAL)
        for at, (pid, function, peer, moved, uid) in enumerate(rows):
            keys[at] = (peer, pid, function)
            totals["bytes"][at], totals["uid"][at] = moved, uid
            totals["operations"][at], totals["completed"][at], totals["sum_ns"][at] = 1, 1, 1000
            totals["buckets"][at, 0] = 1
        return keys, totals

    def close(self) -> None:
        pass


@pytest.fixture
def programs() -> Programs:
    return Programs()


@pytest.fixture
def watch(programs: Programs) -> Iterator[TransferWatch]:
    made = TransferWatch(lambda: cast(Any, programs), Path("/proc"), cast(Any, None), SystemClock())
    made._programs = cast(Any, programs)
    yield made
    made.close()


def pairs(watch: TransferWatch) -> list[tuple[int, str, str, int, int | None]]:
    return [(one.pid, one.op, one.peer, one.operations, one.payload_bytes) for one in watch.facts().by_peer]


def test_named_peers_stand_by_themselves_and_endpoints_without_a_name_are_one_sum(
    programs: Programs, watch: TransferWatch
) -> None:
    programs.rows = [(7, WRITE, 1, MIB, 0), (7, WRITE, 2, 3 * MIB, 0), *((7, PUT, 4096 + at, 5, 0) for at in range(9))]
    assert pairs(watch) == [
        (7, "Write", "decode-2", 1, 3 * MIB),
        (7, "Write", "decode-1", 1, MIB),
        (7, "Put", "", 9, 45),
    ]
    (put,) = [one for one in watch.facts().by_peer if one.op == "Put"]
    assert put.durations is not None
    assert (put.completed, put.durations.counts[0]) == (9, 9)
    assert put.seconds == pytest.approx(9e-6)


def test_what_is_under_way_is_told_of_each_peer(programs: Programs, watch: TransferWatch) -> None:
    programs.requests = [
        (7, WRITE, 1, 20),
        (7, WRITE, 2, 10),
        (7, WRITE, 1, 30),
        (7, PUT, 4096, 40),
        (7, PUT, 4097, 50),
    ]
    told = [(one.op, one.peer, one.count) for one in watch.facts().under_way]
    assert told == [("Write", "decode-2", 1), ("Write", "decode-1", 2), ("Put", "", 2)]


def test_peers_that_have_no_name_are_not_remembered(programs: Programs, watch: TransferWatch) -> None:
    """A process may pass other numbers for ever."""
    programs.nameless = range(100, 200)
    programs.requests = [(7, WRITE, peer, 20) for peer in range(99, 200)]
    told = {(one.peer, one.count) for one in watch.facts().under_way}
    assert told == {("decode-99", 1), ("", 100)}
    assert watch._names == {(7, 99): "decode-99"}


def test_one_rank_whose_number_comes_with_garbage_above_it_is_one_peer(
    programs: Programs, watch: TransferWatch
) -> None:
    programs.rows = [(7, SEND, 3, 10, 0), (7, SEND, 3 | 5 << 32, 20, 0)]
    assert pairs(watch) == [(7, "Send", "rank 3", 2, 30)]


def test_peers_beyond_the_busiest_of_a_process_are_summed_up(programs: Programs, watch: TransferWatch) -> None:
    programs.rows = [(7, WRITE, at, 100 + at, 0) for at in range(MOST_PEERS + 10)]
    found = pairs(watch)
    assert len(found) == MOST_PEERS + 1
    assert {one[2] for one in found} == {"", *(f"decode-{at}" for at in range(10, MOST_PEERS + 10))}
    assert sum(one[3] for one in found) == MOST_PEERS + 10


def test_a_user_with_thousands_of_processes_hides_no_pair_of_another(programs: Programs, watch: TransferWatch) -> None:
    greedy = [(pid, PUT, 4096, 10 * MIB, 1000) for pid in range(10_000, 10_000 + 3 * MOST_PAIRS)]
    programs.rows = [*greedy, (7, WRITE, 1, 8, 1001)]
    found = pairs(watch)
    assert len(found) == MOST_PAIRS + 1
    assert found[-1] == (7, "Write", "decode-1", 1, 8)


def test_pairs_of_a_process_that_ends_are_kept_with_their_names(programs: Programs, watch: TransferWatch) -> None:
    programs.rows = [(7, WRITE, 1, MIB, 0), (8, WRITE, 1, MIB, 0)]
    programs.ended = [7]
    watch._take_ended({7})
    facts = watch.facts()
    assert [(one.pid, one.peer) for one in facts.by_peer] == [(8, "decode-1")]
    ended = {at: [(one.pid, one.peer, one.payload_bytes) for one in several] for at, several in facts.ended.items()}
    assert ended == {0: [(7, "decode-1", MIB)]}
    assert facts.ended_count == 1
    assert sum(one.operations for one in facts.totals) == 2


def test_pairs_say_in_which_network_namespace_their_process_is_also_after_its_end(
    programs: Programs, watch: TransferWatch
) -> None:
    file = Mapping(0, 1, (0, 1), 5, "/opt/libnixl.so", deleted=False)
    watch.sighted(ProcessIdentity(7, 1), Tenant(1000), [file], "host1")
    programs.rows = [(7, WRITE, 1, MIB, 0), (8, WRITE, 1, MIB, 0)]
    assert {one.pid: one.netns for one in watch.facts().by_peer} == {7: "host1", 8: ""}
    programs.ended = [7]
    watch.process_gone(ProcessIdentity(7, 1))
    assert [one.netns for several in watch.facts().ended.values() for one in several] == ["host1"]
    assert not watch._netns


def test_no_name_of_a_process_that_has_ended_is_kept(programs: Programs, watch: TransferWatch) -> None:
    """Also where a user has so many processes that some are not told of."""
    pids = range(10_000, 10_000 + 2 * MOST_PAIRS)
    programs.rows = [(pid, WRITE, 1, MIB, 1000) for pid in pids]
    programs.ended = list(pids)
    watch._take_ended({pids[0]})
    assert len(watch.facts().ended) == MOST_PAIRS
    assert not watch._names


def test_an_operation_of_a_process_is_told_of_whole_or_not_at_all(programs: Programs, watch: TransferWatch) -> None:
    """Else what is told of it would not be all that it did, and nobody could tell."""
    pids = range(100, 120)
    programs.rows = [(pid, WRITE, at, pid, 1000) for pid in pids for at in range(MOST_PEERS + 10)]
    programs.rows += [(7, PUT, 4096, 1, 1000)]
    told: dict[int, int] = {}
    for pid, _, _, operations, _ in pairs(watch):
        told[pid] = told.get(pid, 0) + operations
    whole = MOST_PAIRS // (MOST_PEERS + 1)
    assert told == {7: 1, **dict.fromkeys(pids[-whole:], MOST_PEERS + 10)}
    programs.ended = list(pids)
    watch._take_ended(pids)
    ended = watch.facts().ended
    assert len(ended) == min(whole, MOST_ENDED // (MOST_PEERS + 1))
    assert {sum(one.operations for one in several) for several in ended.values()} == {MOST_PEERS + 10}


class Recorder:
    """Records a host on which only transfers happen."""

    ready = True

    def __init__(self, watch: TransferWatch, folder: Path) -> None:
        clock = SystemClock()
        self._watch = watch
        self._clock = clock
        self._writer = RecordingWriter(DatasetWriter(folder, "gpu-01"), ROW)
        self._folder = folder
        self._feed = RecorderFeed(FlightRecorder(clock, host="gpu-01", memory_bytes=1 << 20), self, None, None)

    def rail_decisions(self) -> tuple[RailDecision, ...]:
        return ()

    def rail_ledgers(self) -> dict[tuple[int, str], RailLedger]:
        return {}

    def snapshot(self) -> Snapshot:
        return Snapshot(realtime_ns=0, version="1.2.3", kernel="", transfers=self._watch.facts())

    def enqueue(self, piece: StreamPiece) -> None:
        self._writer.add(piece.piece.recording, NO_LOSSES, {}, piece.transfers)

    def recorded(self) -> dict[str | None, int]:
        """Payload by peer, of all processes, after another piece."""
        self._feed.write_to(self)
        found: Counter[str | None] = Counter()
        for row in read(self._folder, "transfers"):
            found[row["peer"]] += row["payload_bytes"]
        return dict(found)


def test_a_recording_counts_a_peer_once_that_is_among_the_busiest_for_a_while(
    programs: Programs, watch: TransferWatch, tmp_path: Path
) -> None:
    """By its name while it is, in the sum of the others while it is not; also where its process has ended."""
    recorder = Recorder(watch, tmp_path)
    first, late = range(1, MOST_PEERS + 1), range(MOST_PEERS + 1, MOST_PEERS + 6)
    programs.rows = [(7, WRITE, at, 100 + at, 0) for at in first]
    assert recorder.recorded() == {f"decode-{at}": 100 + at for at in first}
    programs.rows += [(7, WRITE, at, 1000, 0) for at in late]
    busiest = {**{f"decode-{at}": 100 + at for at in first[5:]}, **{f"decode-{at}": 1000 for at in late}}
    assert recorder.recorded() == busiest | {None: sum(100 + at for at in first[:5])}
    # They are the busiest again when the process ends, and another one gets its number.
    programs.rows = [(7, WRITE, at, (5000 if at <= 5 else 100) + at, 0) for at in (*first, *late)]
    everything = sum(row[3] for row in programs.rows)
    programs.ended = [7]
    watch._take_ended({7})
    programs.ended = []
    programs.rows = [(7, WRITE, at, 10, 0) for at in first]
    found = recorder.recorded()
    assert sum(found.values()) == everything + 10 * MOST_PEERS
    assert found["decode-1"] == 5001 + 10


def end(programs: Programs, watch: TransferWatch, *rows: tuple[int, int, int, int, int]) -> None:
    """Processes with these rows end."""
    programs.rows, programs.ended = list(rows), sorted({row[0] for row in rows})
    watch._take_ended(programs.ended)
    programs.ended = []


def test_a_user_whose_processes_end_by_the_thousand_pushes_out_no_pair_of_another(
    programs: Programs, watch: TransferWatch
) -> None:
    end(programs, watch, (7, WRITE, 1, 8, 1001))
    for begin in range(10_000, 14_000, 100):
        end(programs, watch, *((pid, PUT, 4096, MIB, 1000) for pid in range(begin, begin + 100)))
    facts = watch.facts()
    assert len(facts.ended) == MOST_ENDED
    assert [one.peer for one in facts.ended[0]] == ["decode-1"]
    assert list(facts.ended)[1:] == list(range(4001 - MOST_ENDED + 1, 4001)), "of his own the latest"
    assert facts.ended_count == 4001


def test_processes_that_had_the_same_pid_one_after_the_other_are_told_apart(
    programs: Programs, watch: TransferWatch
) -> None:
    programs.rows = [(7, WRITE, 1, MIB, 0)]
    (lives,) = watch.facts().by_peer
    end(programs, watch, (7, WRITE, 1, MIB, 0), (8, WRITE, 1, MIB, 0))
    programs.rows = [(7, WRITE, 1, MIB, 0)]
    (again,) = watch.facts().by_peer
    ended = {one.pid: one.life for (one,) in watch.facts().ended.values()}
    assert ended[7] == lives.life
    assert len({lives.life, again.life, ended[8]}) == 3
    end(programs, watch, (7, WRITE, 1, MIB, 0))
    assert not watch._lives


class Opened:
    """An inspection process that finds another library in each file."""

    def ask(self, _tenant: Tenant, question: OpenTransferLibrary) -> Any:
        points = SimpleNamespace(refused=(), libraries=(), every=())
        key = LibraryKey(FileStamp(1, question.pid, 0, 0, 0), None, overlay=False, first_extent=None)
        file = SimpleNamespace(key=key, points=points, local=False)
        return SimpleNamespace(answer=file, descriptors=(os.open(os.devnull, os.O_RDONLY),))


def test_tenants_who_map_libraries_without_end_leave_places_for_another(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_inspection", Opened())
    monkeypatch.setattr(watch, "_attached", False)
    number = iter(range(1000, 10_000))

    def maps(uid: int, count: int) -> int:
        """How many of a tenant's files are followed."""
        tenant = Tenant(uid)
        for _ in range(count):
            pid = next(number)
            mapping = Mapping(0, 1, (0, 1), pid, f"/{pid}", deleted=False)
            watch.sighted(ProcessIdentity(pid, 1), tenant, [mapping])
            watch.follow()
        return sum(one.tenant == tenant for one in watch._files)

    assert [maps(uid, 100) for uid in range(5000, 5006)] == [64, 64, 64, 32, 16, 8]
    assert maps(1000, 3) == 3
    assert watch.left_out[5000] == 36
    assert watch.left_out[1000] == 0


def test_who_starts_processes_without_end_takes_the_probes_off_his_own_lingering_libraries_alone(
    watch: TransferWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_inspection", Opened())
    monkeypatch.setattr(watch, "_attached", False)
    number = iter(range(1000, 10_000))

    def runs(uid: int, count: int) -> list[str]:
        """Processes that map a library each, and end; returns the files."""
        paths = []
        for _ in range(count):
            pid = next(number)
            paths.append(f"/{pid}")
            identity = ProcessIdentity(pid, 1)
            watch.sighted(identity, Tenant(uid), [Mapping(0, 1, (0, 1), pid, paths[-1], deleted=False)])
            watch.follow()
            watch.process_gone(identity)
            watch.follow()
        return paths

    def followed(uid: int) -> list[str]:
        return [one.path for one in watch._files if one.tenant == Tenant(uid)]

    mine = runs(1000, 3)
    his = runs(5000, 100)
    assert followed(5000) == his[-64:]
    for uid in range(5001, 5004):
        runs(uid, 64)
    assert [len(followed(uid)) for uid in (1000, 5000, 5001, 5002, 5003)] == [3, 63, 63, 63, 64]
    assert followed(1000) == mine
    assert len(watch._files) == MOST_FILES
