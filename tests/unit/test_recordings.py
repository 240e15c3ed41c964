"""When recordings are made: together where stalls come together, and not too often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.clocks import ClockReading
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.node.recorder.store import RecordingStore, WriteResult
from railscope.agent.node.recorder.triggers import Recordings, make_recorded_stall, settling_ns
from railscope.agent.node.stalls.detector import Detector, StallLimits
from railscope.agent.recording.recording import RecordedStall, Recording
from tests.unit.recordings import SECOND_NS, recording, stall
from tests.unit.stall_facts import CALM, RANK, with_rail1


@dataclass
class StoppedClock:
    now_ns: int = 1_000 * SECOND_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class Store(RecordingStore):
    """Remembers, and is busy when told to."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), 0)
        self.slow = False

    @property
    def busy(self) -> bool:
        return self.slow

    def write(self, recording: Recording, done: Callable[[str, WriteResult], None]) -> None:
        done(recording.reason, WriteResult.WRITTEN)


@dataclass
class Bench:
    clock: StoppedClock = field(default_factory=StoppedClock)
    store: Store = field(default_factory=Store)
    made: list[tuple[str, list[str]]] = field(default_factory=list)
    """Reason, and the communicators of its stalls."""
    woken: int = 0

    def __post_init__(self) -> None:
        self.recordings = Recordings(self.clock, self.store, self._freeze, self._wake)

    def _freeze(self, reason: str, stalls: tuple[RecordedStall, ...]) -> Recording:
        self.made.append((reason, [one.comm for one in stalls]))
        return recording(reason)

    def _wake(self) -> None:
        self.woken += 1

    def after(self, seconds: float) -> list[tuple[str, list[str]]]:
        """What was made by a turn that comes so much later."""
        self.clock.sleep(seconds)
        self.recordings.write_due()
        made, self.made = self.made, []
        return made


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_stall_is_described_by_its_time_of_day_its_length_and_whom_it_is_blamed_on(bench: Bench) -> None:
    diagnosis = Diagnosis(Cause.RAIL_DOWN, ("rail 1 lost its carrier",), culprit=True, rail="1", device="mlx5_1")
    found = Stall(
        instance=7,
        comm="00c0ffee",
        rank="3",
        nranks="4",
        pid=4711,
        op="AllReduce",
        payload_bytes=None,
        since_ns=5 * SECOND_NS,
        flagged_ns=7 * SECOND_NS,
        realtime_offset_ns=1_000_000 * SECOND_NS,
        flight_strength="strong",
        diagnosis=diagnosis,
    )
    described = make_recorded_stall(found, ClockReading(9 * SECOND_NS, 1_000_009 * SECOND_NS, 1))
    assert described.since_realtime_ns == 1_000_005 * SECOND_NS
    assert described.seconds == 4.0
    assert (described.cause, described.rail, described.device, described.blamed_rank) == (
        "rail_down",
        "1",
        "mlx5_1",
        "",
    )
    assert described.evidence == ("rail 1 lost its carrier",)
    assert bench.recordings.request_for_stall(found)
    assert bench.after(0) == [("stall", ["00c0ffee"])]
    behind = make_recorded_stall(
        replace(found, diagnosis=replace(diagnosis, cause=Cause.RANK_BEHIND, blamed_rank=0)), ClockReading(1, 1, 1)
    )
    assert (behind.cause, behind.blamed_rank, behind.seconds) == ("rank_behind", "0", 0.0)


def test_a_job_that_was_killed_while_it_hung_is_recorded_with_what_was_seen_before() -> None:
    stalls = Detector(StallLimits(), lambda: 0)
    down = with_rail1(up=False)
    stalls.evaluate(2 * SECOND_NS, [RANK], lambda _: down)
    assert stalls.process_gone(3 * SECOND_NS, RANK, "process 4711 has ended: killed by signal 9") is None
    (told,) = stalls.current
    assert (told.diagnosis.cause, told.op) == (Cause.PROCESS_GONE, "AllReduce")
    recorded = make_recorded_stall(told, ClockReading(4 * SECOND_NS, 4 * SECOND_NS, 1))
    assert (recorded.cause, recorded.device, recorded.blamed_rank, recorded.op) == (
        "rail_down",
        "rail1",
        "",
        "AllReduce",
    )
    assert recorded.evidence == (
        "rail 1 (rail1) has no carrier or is switched off",
        "process 4711 has ended: killed by signal 9",
    )


def test_that_a_rank_waits_is_no_reason_to_forget_that_its_process_has_ended() -> None:
    stalls = Detector(StallLimits(), lambda: 0)
    stalls.evaluate(40 * SECOND_NS, [RANK], lambda _: CALM)
    assert stalls.process_gone(41 * SECOND_NS, RANK, "process 4711 has ended: killed by signal 9") is None
    recorded = make_recorded_stall(stalls.current[0], ClockReading(42 * SECOND_NS, 42 * SECOND_NS, 1))
    assert recorded.cause == "process_gone"


def test_a_stall_is_recorded_at_the_next_turn(bench: Bench) -> None:
    assert bench.after(0) == []
    assert bench.recordings.request(stall("a"))
    assert bench.woken == 1
    assert bench.after(0) == [("stall", ["a"])]
    assert bench.after(100) == []


def test_stalls_that_begin_together_share_a_recording(bench: Bench) -> None:
    for comm in ("a", "b", "c"):
        assert bench.recordings.request(stall(comm))
    assert bench.after(0) == [("stall", ["a", "b", "c"])]


def test_stalls_that_follow_share_the_next_one_ten_seconds_later(bench: Bench) -> None:
    bench.recordings.request(stall("a"))
    assert bench.after(0) == [("stall", ["a"])]
    bench.recordings.request(stall("b"))
    assert bench.after(1) == []
    bench.recordings.request(stall("c"))
    assert bench.after(8.9) == []
    assert bench.after(0.1) == [("stall", ["b", "c"])]


def test_a_communicator_gets_one_recording_a_minute(bench: Bench) -> None:
    assert bench.recordings.request(stall("a"))
    assert bench.after(0) == [("stall", ["a"])]
    for _ in range(5):
        assert bench.after(11) == []
        assert not bench.recordings.request(stall("a"))
    bench.clock.sleep(5)
    assert bench.recordings.request(stall("a"))
    assert bench.after(0) == [("stall", ["a"])]


def test_stalls_of_one_user_get_six_recordings_in_half_an_hour_and_take_none_of_another_users(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [(bench.recordings.request(stall(f"{turn}"), uid=5000), bench.after(20)) for turn in range(9)]
    assert [wanted for wanted, _ in asked] == [True] * 6 + [False] * 3
    assert [len(made) for _, made in asked] == [1] * 6 + [0] * 3
    assert bench.recordings.request(stall("another's"), uid=1000)
    assert bench.recordings.request(stall("joins it"), uid=5000)
    assert bench.after(20) == [("stall", ["another's", "joins it"])]
    assert bench.recordings.refused_by_user() == {5000: 3}
    assert bench.recordings.counts()["stall", "left_out"] == 3
    (said,) = [one for one in caplog.messages if "uid" in one]
    assert said.startswith("no recording of the stall of communicator 6: uid 5000 has had 6 within half an hour")
    bench.clock.sleep(1800)
    assert bench.recordings.request(stall("later"), uid=5000)


def test_a_signal_is_answered_at_once_every_time(bench: Bench) -> None:
    for _ in range(3):
        bench.recordings.request_from_signal()
        bench.recordings.request_from_signal()
        assert bench.after(0) == [("signal", [])]
        assert bench.after(1) == []


@pytest.mark.parametrize("asked", ["signal", "stall"])
def test_a_recording_waits_until_ports_were_read_once_more(bench: Bench, asked: str) -> None:
    period_ns = SECOND_NS // 10
    clock, store = bench.clock, bench.store
    bench.recordings = Recordings(clock, store, bench._freeze, bench._wake, settling_ns(period_ns))
    for _ in range(2):
        if asked == "signal":
            bench.recordings.request_from_signal()
        else:
            bench.recordings.request(stall(f"{clock.monotonic_ns()}"))
        asked_ns = clock.monotonic_ns()
        assert bench.recordings.due_ns is None
        assert bench.after(0) == []
        due_ns = bench.recordings.due_ns
        assert due_ns is not None
        assert period_ns < due_ns - asked_ns < 2 * period_ns
        assert bench.after((due_ns - clock.monotonic_ns()) / 1e9 - 0.001) == []
        assert [reason for reason, _ in bench.after(0.001)] == [asked]
        assert bench.recordings.due_ns is None
        assert bench.after(20) == []


def test_ports_that_are_read_seldom_are_not_waited_for() -> None:
    assert settling_ns(10 * SECOND_NS) == SECOND_NS


def test_at_the_end_no_recording_waits(bench: Bench) -> None:
    bench.recordings = Recordings(bench.clock, bench.store, bench._freeze, bench._wake, SECOND_NS)
    bench.recordings.request(stall("a"))
    assert bench.after(0) == []
    bench.recordings.close()
    assert bench.made == [("stall", ["a"])]


def test_signals_within_a_second_of_a_recording_share_the_next_one(bench: Bench) -> None:
    made = []
    for _ in range(100):
        bench.recordings.request_from_signal()
        made += bench.after(0.025)
    # At the turns after 0.025 s, 1.025 s and 2.025 s; what came since waits, and is not forgotten.
    assert made == [("signal", [])] * 3
    assert bench.after(0.5) == []
    assert bench.after(0.1) == [("signal", [])]
    assert bench.after(10) == []
    assert bench.recordings.counts()["signal", "written"] == 4


def test_a_stall_is_recorded_whatever_signals_come(bench: Bench) -> None:
    bench.recordings.request_from_signal()
    assert bench.after(0) == [("signal", [])]
    bench.recordings.request_from_signal()
    bench.recordings.request(stall("a"))
    assert bench.after(0.5) == [("stall", ["a"])]
    assert bench.after(0.5) == [("signal", [])]


def test_nothing_is_made_while_the_disk_is_busy_and_nothing_is_forgotten(bench: Bench) -> None:
    bench.store.slow = True
    bench.recordings.request_from_signal()
    bench.recordings.request(stall("a"))
    assert bench.after(1) == []
    bench.store.slow = False
    assert bench.after(0) == [("stall", ["a"])]
    assert bench.after(0) == [("signal", [])]


def test_what_was_asked_for_is_made_before_the_end(bench: Bench) -> None:
    bench.recordings.request(stall("a"))
    bench.after(0)
    bench.recordings.request(stall("b"))
    bench.recordings.close()
    assert bench.made == [("stall", ["b"])]


def test_what_was_asked_for_is_given_up_when_the_disk_does_not_answer_at_the_end(bench: Bench) -> None:
    bench.recordings.request(stall("a"))
    bench.recordings.request_from_signal()
    bench.store.slow = True
    bench.recordings.close()
    assert bench.made == []


def test_every_reason_and_result_is_counted_from_the_start(bench: Bench) -> None:
    assert set(bench.recordings.counts().values()) == {0}
    assert set(bench.recordings.counts()) == {
        *((reason, result) for reason in ("stall", "signal") for result in ("written", "failed")),
        ("stall", "left_out"),
    }
    bench.recordings.request_from_signal()
    bench.after(0)
    assert bench.recordings.counts()["signal", "written"] == 1


def test_a_folder_that_cannot_be_used_is_told_before_the_first_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    bench = Bench()
    for store in (RecordingStore(tmp_path / "file", 1 << 20), None):
        recordings = Recordings(bench.clock, store, bench._freeze, bench._wake)
        recordings.prepare()
        recordings.close()
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert str(tmp_path / "file") in caplog.text


def test_without_a_folder_requests_are_refused_and_a_signal_says_so(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    recordings = Recordings(bench.clock, None, bench._freeze, bench._wake)
    assert not recordings.request(stall())
    recordings.request_from_signal()
    recordings.write_due()
    recordings.write_due()
    recordings.close()
    assert bench.made == []
    assert [one.getMessage() for one in caplog.records] == [
        "no recording is made: recordings.directory or recordings.memory switches the flight recorder off"
    ]
