"""Recordings as Perfetto traces; they are simulated, and the traces are read back with Perfetto's own protos."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.facts.clocks import ClockReading
from railscope.agent.node.recorder.store import save
from railscope.agent.recording.file import RecordingError
from railscope.agent.recording.recording import RecordedCommunicator, Recording
from railscope.agent.trace.command import run_export
from railscope.agent.trace.from_recording import RecordingFile, make_timelines
from railscope.agent.trace.options import add_export_arguments
from railscope.agent.trace.perfetto import write_trace
from railscope.agent.trace.same_operations import join_operations
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.calls import LifecycleKind
from tests.unit.identities import named
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, recording, records
from tests.unit.traces import ReadTrace, read_trace

MILLISECOND_NS = 1_000_000
COMM = "00c0ffee00c0ffee"


def rank(number: int, *, host: str, from_start: bool = True, first: int = 1, late_ns: int = 0) -> Recording:
    """A host with one rank of two; five operations of 4 ms, 10 ms apart, each handed over 2 ms after its call."""
    one = recording("record", calls=0)
    communicator: RecordedCommunicator = named(one.communicators[0], rank=str(number), nranks="2", pid=100 + number)
    at_ns = BEGAN_NS + SECOND_NS + late_ns + np.arange(5, dtype=np.uint64) * 10 * MILLISECOND_NS
    said: dict[str, Any] = {
        "instance": 7,
        "tgid": communicator.identity.pid,
        "op": int(Op.AllReduce),
        "payload_bytes": 4096,
    }
    said |= {"sequence": first + np.arange(5)}
    arrays = {kind: array[:0] for kind, array in one.arrays.items()} | {
        "calls": records("calls", 5, **said, time_ns=at_ns, data_type=7, peer=-1, tid=communicator.identity.pid),
        "completions": records(
            "completions",
            5,
            **said,
            posted_ns=at_ns + 2 * MILLISECOND_NS,
            time_ns=at_ns + 6 * MILLISECOND_NS,
            algorithm=1,
            protocol=2,
            channels=2,
            data_type=7,
        ),
        "lifecycle": records("lifecycle", 1, instance=7),
    }
    arrays["lifecycle"]["kind"] = LifecycleKind.INIT if from_start else LifecycleKind.SEEN
    return replace(
        one, host=host, boot_id=host, communicators=(communicator,), arrays=arrays, complete_from_ns={}, marks=()
    )


@dataclass(frozen=True, slots=True)
class Written:
    calls: int
    operations: int
    unfinished: int
    rail_samples: int
    joined: int
    not_joined: tuple[str, ...]


def written(*recordings: Recording) -> tuple[ReadTrace, Written]:
    file = io.BytesIO()
    hosts = make_timelines([RecordingFile(Path(f"{at}.npz"), one) for at, one in enumerate(recordings)])
    same = join_operations(hosts)
    said = write_trace(hosts, same, file)
    return read_trace(file.getvalue()), Written(
        said.calls, said.operations, said.unfinished, said.rail_samples, same.joined, same.not_joined
    )


def of_day(monotonic_ns: int) -> int:
    """By the last reading of the clocks of these recordings."""
    return monotonic_ns + REALTIME_NS


def parsed(out: Path, *sources: Path, options: Sequence[str] = ()) -> argparse.Namespace:
    """The command line that exports these."""
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)
    return parser.parse_args([*map(str, sources), "--perfetto", str(out), *options])


def export(out: Path, *sources: Path, options: Sequence[str] = ()) -> str:
    said = io.StringIO()
    run_export(parsed(out, *sources, options=options), said, write_trace)
    return said.getvalue()


def test_calls_and_network_legs_stand_at_their_times_below_their_communicator() -> None:
    trace, summary = written(rank(0, host="a"))
    calls = trace.below(f"comm {COMM} · rank 0 of 2", "calls")
    assert [call.begin_ns for call in calls] == [
        of_day(BEGAN_NS + SECOND_NS + at * 10 * MILLISECOND_NS) for at in range(5)
    ]
    assert {call.name for call in calls} == {"AllReduce"}
    assert [call.said["sequence"] for call in calls] == [1, 2, 3, 4, 5]
    assert calls[0].said == {"data_type": "float32", "payload_bytes": 4096, "tid": 100, "sequence": 1}
    legs = trace.below("network")
    assert [leg.begin_ns - call.begin_ns for leg, call in zip(legs, calls, strict=True)] == [2 * MILLISECOND_NS] * 5
    assert [(leg.end_ns or 0) - leg.begin_ns for leg in legs] == [4 * MILLISECOND_NS] * 5
    assert legs[0].said | {"algorithm": "Ring", "protocol": "Simple", "channels": 2} == legs[0].said
    assert (summary.calls, summary.operations, summary.unfinished) == (5, 5, 0)
    process = next(where for where in trace.tracks.values() if len(where) == 2 and where[1].startswith("pid"))
    assert process[1] == "pid 100 · GPU 0 · job pretrain"


def test_what_was_under_way_at_the_end_does_not_end_in_the_trace() -> None:
    one = rank(0, host="a")
    under_way = records(
        *("open_operations", 1), instance=7, op=int(Op.AllReduce), sequence=6, payload_bytes=(1 << 64) - 1
    )
    under_way["posted_ns"] = BEGAN_NS + 59 * SECOND_NS
    trace, summary = written(replace(one, arrays={**one.arrays, "open_operations": under_way}))
    (left,) = [leg for leg in trace.below("network") if leg.end_ns is None]
    assert left.name == "AllReduce (unfinished)"
    assert left.begin_ns == of_day(BEGAN_NS + 59 * SECOND_NS)
    assert "payload_bytes" not in left.said
    assert (summary.operations, summary.unfinished) == (5, 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 12), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_operations_that_overlap_are_all_there_and_never_lie_in_each_other(spans: list[tuple[int, int, bool]]) -> None:
    one = rank(0, host="a")
    done = records("completions", len(spans), instance=7, op=int(Op.AllReduce))
    done["posted_ns"] = [BEGAN_NS + begin for begin, _, _ in spans]
    done["time_ns"] = [BEGAN_NS + begin + length for begin, length, _ in spans]
    unfinished = [begin for begin, _, ended in spans if not ended]
    left = records("open_operations", len(unfinished), instance=7, op=int(Op.AllReduce))
    left["posted_ns"] = [BEGAN_NS + begin for begin in unfinished]
    trace, _ = written(replace(one, arrays={**one.arrays, "completions": done, "open_operations": left}))
    legs = trace.below("network")
    assert sorted((leg.begin_ns, leg.end_ns) for leg in legs if leg.end_ns is not None) == sorted(
        (of_day(BEGAN_NS + begin), of_day(BEGAN_NS + begin + length)) for begin, length, _ in spans
    )
    assert sum(leg.end_ns is None for leg in legs) == len(unfinished)


def test_rails_have_a_rate_each_way_and_the_states_of_their_link() -> None:
    one = rank(0, host="a")
    sent = records("rail_samples", 4, transmit_bytes=[0, 1000, 3000, 10], receive_bytes=[5, 5, 5, 5])
    links = records("link_events", 3, up=[1, 1, -1], carrier=[1, 0, -1], present=[1, 1, 0])
    links["time_ns"] = [BEGAN_NS - SECOND_NS, BEGAN_NS + SECOND_NS, BEGAN_NS + 2 * SECOND_NS]
    links["speed_bytes_per_second"] = [50_000_000_000, 0, 0]
    trace, summary = written(replace(one, arrays={**one.arrays, "rail_samples": sent, "link_events": links}))
    (where,) = [where for where in trace.counters if where[-1] == "transmit"]
    assert where[-3:] == ("rails", "rail 0 · eth2", "transmit")
    assert trace.units[where] == "B/s"
    # 1000 bytes in the first millisecond, 2000 in the next; then the device began anew.
    assert trace.counters[where] == [
        (of_day(BEGAN_NS), 1e6),
        (of_day(BEGAN_NS + MILLISECOND_NS), 2e6),
        (of_day(BEGAN_NS + 2 * MILLISECOND_NS), 0.0),
        (of_day(BEGAN_NS + 3 * MILLISECOND_NS), 0.0),
    ]
    assert trace.counters[(*where[:-1], "receive")] == [(of_day(BEGAN_NS), 0.0), (of_day(BEGAN_NS + 3_000_000), 0.0)]
    assert [(link.name, link.begin_ns, link.end_ns) for link in trace.below("link")] == [
        ("up, 400 Gb/s", of_day(BEGAN_NS), of_day(BEGAN_NS + SECOND_NS)),
        ("no carrier", of_day(BEGAN_NS + SECOND_NS), of_day(BEGAN_NS + 2 * SECOND_NS)),
        ("gone", of_day(BEGAN_NS + 2 * SECOND_NS), of_day(BEGAN_NS + 60 * SECOND_NS)),
    ]
    assert summary.rail_samples == 4


def test_stalls_marks_and_what_is_missing_are_in_the_trace() -> None:
    trace, _ = written(recording())
    (stall,) = [one for one in trace.slices if one.category == "stall"]
    assert stall.name == "stall: rail_down"
    assert stall.where[-2] == f"comm {COMM} · rank 3 of 4"
    assert (stall.end_ns or 0) - stall.begin_ns == 2_500_000_000
    assert stall.said["evidence 1"] == "mlx5_1 lost its carrier 2.6 s ago"
    assert [mark.name for mark in trace.below("marks")] == ["a stall began"]
    (whole,) = trace.below("recording")
    assert whole.name == "recorded, not all of it: see the arguments"
    assert whole.said["missing 1"] == "3 calls were lost: the kernel had no room for them"
    assert whole.said["missing 2"] == "the first 12.0 s of calls were overwritten"
    assert whole.said["simulated"] is True
    assert next(iter(trace.tracks.values())) == ("gpu-01 (clock ±3 ms, SIMULATED hardware)",)


def test_arrows_lead_from_the_first_rank_to_the_last_of_each_operation() -> None:
    trace, summary = written(rank(0, host="a"), rank(1, host="b", late_ns=MILLISECOND_NS))
    assert summary.joined == 5
    assert summary.not_joined == ()
    arrows = trace.arrows()
    assert len(arrows) == 5
    for first, last in arrows.values():
        assert first.said["sequence"] == last.said["sequence"]
        assert first.where[-2:] == (f"comm {COMM} · rank 0 of 2", "network")
        assert last.where[-2:] == (f"comm {COMM} · rank 1 of 2", "network")
        assert last.begin_ns - first.begin_ns == MILLISECOND_NS


def test_where_nothing_completed_calls_are_joined() -> None:
    ranks = [rank(number, host=f"host {number}") for number in (0, 1)]
    quiet = [replace(one, arrays={**one.arrays, "completions": one.completions[:0]}) for one in ranks]
    trace, summary = written(*quiet)
    assert summary.joined == 5
    assert {one.where[-1] for both in trace.arrows().values() for one in both} == {"calls"}


def test_another_kind_under_the_same_number_is_not_joined() -> None:
    one, other = rank(0, host="a"), rank(1, host="b")
    done = other.completions.copy()
    done["op"][2] = int(Op.AllGather)
    _, summary = written(one, replace(other, arrays={**other.arrays, "completions": done}))
    assert summary.joined == 4


def test_sends_and_receives_are_not_joined() -> None:
    ranks = []
    for number in (0, 1):
        one = rank(number, host=f"host {number}")
        done, calls = one.completions.copy(), one.calls.copy()
        done["op"], calls["op"] = Op.SendRecv, Op.Send if number else Op.Recv
        ranks.append(replace(one, arrays={**one.arrays, "completions": done, "calls": calls}))
    assert written(*ranks)[1].joined == 0


def test_numbers_that_do_not_compare_are_aligned_by_what_was_under_way_together() -> None:
    # The second host was watched from its third operation on, and numbers it 1.
    late = rank(1, host="b", from_start=False, first=-1)
    done, calls = late.completions[2:], late.calls[2:]
    late = replace(late, arrays={**late.arrays, "completions": done, "calls": calls})
    _, summary = written(rank(0, host="a"), late)
    assert (summary.joined, summary.not_joined) == (0, (COMM,)), "clocks that may be 6 ms apart tell nothing"
    trace, summary = written(*(replace(one, clocks=exact(one)) for one in (rank(0, host="a"), late)))
    assert (summary.joined, summary.not_joined) == (3, ())
    assert sorted((a.said["sequence"], b.said["sequence"]) for a, b in trace.arrows().values()) == [
        (3, 1),
        (4, 2),
        (5, 3),
    ]


def test_sizes_tell_where_clocks_do_not() -> None:
    ranks = []
    for number, from_start in ((0, True), (1, False)):
        one = rank(number, host=f"host {number}", from_start=from_start)
        done = one.completions.copy()
        done["payload_bytes"] = [4096, 8192, 4096, 512, 64]
        ranks.append(replace(one, arrays={**one.arrays, "completions": done}))
    late = ranks[1]
    done = late.completions[2:].copy()
    done["sequence"] -= 2
    late = replace(late, arrays={**late.arrays, "completions": done, "calls": late.calls[2:]})
    trace, summary = written(ranks[0], late)
    assert (summary.joined, summary.not_joined) == (3, ())
    assert all(a.said["payload_bytes"] == b.said["payload_bytes"] for a, b in trace.arrows().values())
    # Of what is not known it cannot be said that it is another one.
    done["payload_bytes"][0] = (1 << 64) - 1
    unknown = replace(late, arrays={**late.arrays, "completions": done})
    assert written(ranks[0], unknown)[1].joined == 3


def of_communicators(trace: ReadTrace) -> list[str]:
    """What their tracks say."""
    return [text for where, text in trace.descriptions.items() if where[-1].startswith(f"comm {COMM}")]


def test_a_communicator_without_arrows_says_why_in_the_trace() -> None:
    one, late = rank(0, host="a"), rank(1, host="b", from_start=False)
    trace, summary = written(one, late)
    assert summary.not_joined == (COMM,)
    why = "some were first seen at a call, not at their making, so that earlier calls may be missing and their numbers"
    assert [why in text for text in of_communicators(trace)] == [True, True]
    recorded = [one for one in trace.slices if one.category == "recording"]
    assert [one.said["no arrows"].startswith(f"{COMM}: not all ranks are joined") for one in recorded] == [True, True]
    trace, _ = written(one, rank(1, host="b"))
    assert of_communicators(trace) == ["", ""]
    assert not any("no arrows" in one.said for one in trace.slices)


def test_nobody_is_said_to_have_come_late_where_the_recording_does_not_tell(tmp_path: Path) -> None:
    # The communicator was made before the recording's window, so its events are not in it.
    ranks = [rank(number, host=f"host {number}") for number in (0, 1)]
    silent = [replace(one, arrays={**one.arrays, "lifecycle": one.lifecycle[:0]}) for one in ranks]
    trace, summary = written(ranks[0], silent[1])
    assert summary.not_joined == (COMM,)
    why = "the recording does not tell whether all were watched from the first call on"
    assert [why in text for text in of_communicators(trace)] == [True, True]
    for number, one in enumerate(silent):
        save(one, tmp_path / f"{number}.npz")
    said = export(tmp_path / "out", tmp_path / "0.npz", tmp_path / "1.npz")
    assert f"{COMM} are joined: the recording does not tell whether they were watched from the first call on" in said
    assert "first seen at a call" not in said
    save(rank(1, host="host 1", from_start=False), tmp_path / "1.npz")
    said = export(tmp_path / "out", tmp_path / "0.npz", tmp_path / "1.npz")
    assert f"{COMM} are joined: some were first seen at a call, not at their making" in said
    assert "does not tell" not in said


def test_a_rank_of_which_only_the_making_was_missed_is_not_said_to_have_called_before(tmp_path: Path) -> None:
    # All calls of both are there: the probes came to one of them between its making and its first call.
    ranks = [rank(0, host="a"), rank(1, host="b", from_start=False)]
    assert [one.calls["sequence"].tolist() for one in ranks] == [[1, 2, 3, 4, 5]] * 2
    trace, summary = written(*ranks)
    assert summary.not_joined == (COMM,)
    for number, one in enumerate(ranks):
        save(one, tmp_path / f"{number}.npz")
    said = export(tmp_path / "out", tmp_path / "0.npz", tmp_path / "1.npz")
    for text in (said, *of_communicators(trace)):
        assert "some were first seen at a call, not at their making, so that earlier calls may be missing" in text
        assert "not watched" not in text
        assert "not all were watched" not in text


def test_operations_that_are_always_under_way_together_are_not_aligned() -> None:
    ranks = []
    for number in (0, 1):
        one = rank(number, host=f"host {number}", from_start=False)
        done = one.completions.copy()
        done["posted_ns"], done["time_ns"] = BEGAN_NS, BEGAN_NS + SECOND_NS
        ranks.append(replace(one, arrays={**one.arrays, "completions": done}, clocks=exact(one)))
    assert written(*ranks)[1].not_joined == (COMM,)


def exact(one: Recording) -> tuple[ClockReading, ...]:
    """A clock that is right within a millisecond."""
    reading = one.clocks[0]
    return (replace(reading, maximum_error_ns=MILLISECOND_NS, uncertainty_ns=100),)


def test_recordings_of_one_boot_share_their_clock_whatever_the_time_of_day_was_thought_to_be() -> None:
    one = rank(0, host="a")
    stepped = replace(rank(1, host="b"), boot_id="a")
    stepped = replace(
        stepped,
        clocks=tuple(
            replace(clock, monotonic_ns=clock.monotonic_ns - 5, realtime_ns=clock.realtime_ns + 3 * SECOND_NS)
            for clock in stepped.clocks
        ),
    )
    trace, _ = written(one, stepped)
    begins = {leg.begin_ns for leg in trace.below("network")}
    assert len(begins) == 5
    hosts = make_timelines([RecordingFile(Path("a"), one), RecordingFile(Path("b"), stepped)])
    assert hosts[0].clock == hosts[1].clock
    # What the two thought the time of day to be differs by more than three seconds.
    assert all((host.error_ns or 0) > 3 * SECOND_NS for host in hosts)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_joining_never_depends_on_the_order_of_the_recordings(first: int, second: int, shift: int) -> None:
    one = replace(rank(0, host="a", first=first), boot_id="x")
    two = replace(rank(1, host="b", first=second, late_ns=shift * MILLISECOND_NS), boot_id="x")
    forth = join_operations(make_timelines([RecordingFile(Path("a"), one), RecordingFile(Path("b"), two)]))
    back = join_operations(make_timelines([RecordingFile(Path("b"), two), RecordingFile(Path("a"), one)]))
    assert forth.joined == back.joined == max(0, 5 - abs(first - second))
    assert [(found != 0).tolist() for found in forth.operations] == [
        (found != 0).tolist() for found in reversed(back.operations)
    ]


def test_export_writes_a_trace_and_says_what_is_in_it(tmp_path: Path) -> None:
    for at, name in enumerate("ab"):
        save(replace(rank(at, host=name), clocks=exact(rank(at, host=name))), tmp_path / f"{name}.npz")
    out = tmp_path / "job.pftrace"
    said = export(out, tmp_path / "a.npz", tmp_path / "b.npz").splitlines()
    assert said[0] == f"wrote {out}"
    assert said[1].startswith("60.0 s of a, b (SIMULATED hardware): 10 calls, 10 completed operations and 0 unfinished")
    assert said[2] == "times of different hosts compare within 2 ms"
    assert said[3] == "arrows join what ranks did for 5 operations"
    assert len(read_trace(out).below("network")) == 10
    assert not list(tmp_path.glob(".*"))
    as_json = json.loads(export(out, tmp_path / "a.npz", tmp_path / "b.npz", options=["--json"]))
    assert as_json["joined"] == 5
    assert [host["clock_error_ns"] for host in as_json["hosts"]] == [1_000_100, 1_000_100]


def test_a_hosts_name_cannot_give_orders_to_the_terminal(tmp_path: Path) -> None:
    save(rank(0, host="a\x1b[2Jb"), tmp_path / "a.npz")
    said = export(tmp_path / "out", tmp_path / "a.npz")
    assert "60.0 s of a\N{REPLACEMENT CHARACTER}[2Jb" in said
    assert "\x1b" not in said


def test_a_clock_that_nobody_corrects_is_said_to_be_so(tmp_path: Path) -> None:
    loose = rank(0, host="a")
    loose = replace(loose, clocks=tuple(replace(clock, synchronised=False) for clock in loose.clocks))
    save(loose, tmp_path / "a.npz")
    save(rank(1, host="b"), tmp_path / "b.npz")
    said = export(tmp_path / "out", tmp_path / "a.npz", tmp_path / "b.npz")
    assert "the clock error is unknown on a: times of different hosts may not compare\n" in said
    assert next(iter(read_trace(tmp_path / "out").tracks.values()))[0].startswith("a (clock error unknown")


def test_a_window_and_a_communicator_can_be_chosen(tmp_path: Path) -> None:
    one = recording()
    other = named(replace(one.communicators[0], instance=8), comm="00beef0000beef00")
    calls = np.concatenate((one.calls, records("calls", 10, instance=8, tgid=4711, op=int(Op.AllGather))))
    one = replace(one, communicators=(*one.communicators, other), arrays={**one.arrays, "calls": calls})
    save(one, tmp_path / "one.npz")
    out = tmp_path / "out"

    def calls_of(*options: str) -> list[tuple[str, int]]:
        export(out, tmp_path / "one.npz", options=options)
        found = [call for call in read_trace(out).instants if call.where[-1] == "calls"]
        return [(call.name, call.begin_ns - of_day(BEGAN_NS)) for call in found]

    assert len(calls_of()) == 110
    assert len(calls_of("--comm", "00be")) == len(calls_of("--comm", "0x00BE")) == 10
    assert calls_of("--seconds", "0.002", "--comm", "00c0") == [("AllReduce", at * MILLISECOND_NS) for at in range(3)]
    assert calls_of("--from", "0.0985", "--seconds", "1") == [("AllReduce", 99 * MILLISECOND_NS)]
    assert calls_of("--from", "-30") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--comm", "dead"], f"--comm dead: no such communicator was recorded: there are {COMM}"),
        (["--from", "61"], "--from 61: nothing was recorded then: the recordings hold 60.0 s in all"),
    ],
)
def test_asking_for_what_is_not_there_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    save(recording(), tmp_path / "one.npz")
    with pytest.raises(RecordingError) as error:
        export(tmp_path / "out", tmp_path / "one.npz", options=options)
    assert str(error.value) == message
    assert not (tmp_path / "out").exists()


def test_a_trace_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    save(recording(), tmp_path / "one.npz")
    with pytest.raises(RecordingError, match=r"the trace cannot be written: No such file or directory"):
        export(tmp_path / "gone" / "out", tmp_path / "one.npz")
    with pytest.raises(RecordingError, match=r"this is a folder: name a file"):
        export(tmp_path, tmp_path / "one.npz")
    (tmp_path / "text").write_text("no recording")
    (tmp_path / "out").write_text("before")
    with pytest.raises(RecordingError, match=r"text: this is not a railscope recording"):
        export(tmp_path / "out", tmp_path / "text")
    assert (tmp_path / "out").read_text() == "before"


def test_without_the_perfetto_package_export_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(recording(), tmp_path / "one.npz")
    monkeypatch.delitem(sys.modules, "railscope.agent.trace.perfetto_packets", raising=False)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    with pytest.raises(RecordingError, match=r"need the perfetto package: run '.* install .*perfetto.*'"):
        export(tmp_path / "out", tmp_path / "one.npz")


def test_sizes_that_are_all_different_and_many_events_are_written_whole() -> None:
    one = rank(0, host="a")
    calls = records("calls", 30_000, instance=7, tgid=100, op=int(Op.AllToAll), payload_bytes=np.arange(30_000))
    trace, _ = written(replace(one, arrays={**one.arrays, "calls": calls}))
    assert [call.said["payload_bytes"] for call in trace.instants if call.where[-1] == "calls"] == list(range(30_000))
