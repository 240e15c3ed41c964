"""What is known of progress and of what was handed over, at each level; the kernel's side is simulated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.completion.cuda import CudaCompletion
from railscope.agent.node.inspection.inspection import InProcess
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.cuda import CudaProgress
from railscope.probes.nccl.programs.internals import EmptyRun, Progress, Sent
from railscope.probes.nccl.records.internals import BUCKETS, DISTRIBUTION, InternalStat
from tests.unit.level_programs import SimulatedPrograms
from tests.unit.test_cuda_completion import SimulatedPrograms as SimulatedCuda
from tests.unit.test_rail_bytes import RAIL0, SOCKET, Node


def progress(
    completed: int,
    oldest_ns: int | None = None,
    posted: int = 1,
    *,
    sequence: int | None = None,
    elsewhere: bool = False,
) -> Progress:
    return Progress(
        instance=7,
        completed_sequence=completed,
        posted_sequence=completed if sequence is None else sequence,
        oldest_posted_ns=oldest_ns,
        oldest_op=None,
        posted=posted,
        completed=posted,
        captured=0,
        replayed=0,
        elsewhere=elsewhere,
    )


@pytest.mark.parametrize(
    ("run", "completed", "followed"),
    [
        (EmptyRun(6, 9), 9, 9),  # right behind what is complete: there is nothing to wait for
        (EmptyRun(3, 9), 9, 9),
        (EmptyRun(7, 9), 5, 5),  # call 6 is still to come: it waits for its group, or has no network part
        (EmptyRun(2, 5), 5, 5),
    ],
)
def test_calls_that_nccl_discards_are_complete_once_those_before_them_are(
    run: EmptyRun, completed: int, followed: int
) -> None:
    programs = SimulatedPrograms(states={7: progress(5)}, discarded={7: run})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    known = completion.progress_of(7)
    assert known is not None
    assert (known.completed, known.followed) == (completed, followed)


def test_discarded_calls_stay_complete_when_later_ones_are_known_instead() -> None:
    programs = SimulatedPrograms(states={7: progress(5)}, discarded={7: EmptyRun(6, 9)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    programs.discarded = {7: EmptyRun(12, 12)}
    completion.read()
    known = completion.progress_of(7)
    assert known is not None
    assert (known.completed, known.followed) == (9, 9)


def test_a_discarded_call_behind_one_in_flight_is_not_complete() -> None:
    programs = SimulatedPrograms(states={7: progress(4, oldest_ns=9, sequence=5)}, discarded={7: EmptyRun(6, 9)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    known = completion.progress_of(7)
    assert known is not None
    assert (known.completed, known.followed, known.oldest_posted_ns) == (4, 9, 9)
    completion.forget([7])
    assert completion.progress_of(7) is None


def test_a_communicator_that_sends_through_anothers_proxy_is_not_known_to_be_complete() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    assert completion.progress_of(7) is not None
    programs.states = {7: progress(6, elsewhere=True)}
    completion.read()
    assert completion.progress_of(7) is None


def test_what_cuda_proved_is_followed_by_what_nccl_discarded(tmp_path: Path) -> None:
    programs = SimulatedPrograms(discarded={7: EmptyRun(13, 15)})
    completion = Completion(
        programs, Level.ALL, ProvedTwelve(SimulatedCuda(), tmp_path, inspection=InProcess()), inspection=InProcess()
    )
    completion.read()
    known = completion.progress_of(7)
    assert known is not None
    assert (known.completed, known.age_known) == (15, False)


def test_what_is_complete_never_falls() -> None:
    programs = SimulatedPrograms()
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    seen = []
    for state in (progress(5), progress(3, oldest_ns=9), progress(8)):
        programs.states = {7: state}
        completion.read()
        known = completion.progress_of(7)
        assert known is not None
        seen.append((known.completed, known.oldest_posted_ns))
    assert seen == [(5, None), (5, 9), (8, None)]


def test_nothing_is_known_of_a_communicator_that_handed_nothing_to_the_network() -> None:
    programs = SimulatedPrograms(states={7: progress(0, posted=0)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    assert completion.progress_of(7) is None


def test_below_completion_nothing_is_known_of_progress() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    completion.set_level(Level.COUNTS)
    completion.read()
    assert completion.progress_of(7) is None


def test_what_is_complete_does_not_fall_when_nobody_looked_for_a_while() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    completion.set_level(Level.COUNTS)
    programs.states = {7: progress(0, oldest_ns=9)}  # attached again, and the first operation is under way
    completion.set_level(Level.COMPLETION)
    completion.read()
    known = completion.progress_of(7)
    assert known is not None
    assert (known.completed, known.oldest_posted_ns) == (5, 9)


def test_a_communicator_that_has_ended_stays_known_at_every_level() -> None:
    programs = SimulatedPrograms(states={7: progress(5), 8: progress(6)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    completion.end_communicators({7})
    completion.set_level(Level.COUNTS)
    known = completion.progress_of(7)
    assert known is not None
    assert known.completed == 5
    assert completion.progress_of(8) is None


class ProvedTwelve(CudaCompletion):
    """CUDA proved that twelve calls of every communicator are complete."""

    def progress_of(self, instance: int) -> CudaProgress | None:
        return CudaProgress(instance, 12, 99)


def test_what_cuda_proved_stands_still_nowhere_once_cuda_is_not_watched(tmp_path: Path) -> None:
    completion = Completion(
        SimulatedPrograms(),
        Level.ALL,
        ProvedTwelve(SimulatedCuda(), tmp_path, inspection=InProcess()),
        inspection=InProcess(),
    )
    known = completion.progress_of(7)
    assert known is not None
    assert known.completed == 12
    completion.end_communicators({8})
    completion.set_level(Level.RAILS)
    assert completion.progress_of(7) is None
    known = completion.progress_of(8)
    assert known is not None
    assert known.completed == 12


def test_what_an_ended_process_completed_stays_known_until_it_is_forgotten() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.end_processes({4711})
    programs.states = {}
    completion.read()
    assert programs.log == ["forget processes [4711]"]
    assert completion.progress_of(7) is not None
    completion.forget([7])
    assert completion.progress_of(7) is None


def test_tables_that_cannot_be_read_show_and_keep_what_was_known() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION, inspection=InProcess())
    completion.read()
    programs.unreadable = True
    completion.read()
    assert not completion.complete
    assert completion.progress_of(7) is not None
    programs.unreadable = False
    completion.read()
    assert completion.complete


def test_durations_are_seconds_and_launches_have_nccls_names() -> None:
    completion = Completion(SimulatedPrograms(), Level.COMPLETION, inspection=InProcess())
    shown = completion.facts((), 0)
    (durations,) = shown.durations
    assert durations.op == "AllReduce"
    assert durations.histogram.sum == 3.0
    assert durations.histogram.bounds[5] == pytest.approx(32_768e-9)
    assert durations.histogram.counts[5] == 2
    assert len(durations.histogram.counts) == BUCKETS
    assert [(one.algorithm, one.protocol, one.channels, one.launches) for one in shown.launches] == [
        ("Ring", "Simple", 8, 5),
        ("unknown", "unknown", 1, 3),  # both numbers without a name are one series
    ]
    assert completion.events_lost()["completion_tables_full"] == 1


def test_durations_that_cuda_tells_are_seconds_too(tmp_path: Path) -> None:
    class Measured(SimulatedCuda):
        def durations(self) -> dict[Op, Records]:
            return SimulatedPrograms().durations()

    completion = Completion(
        SimulatedPrograms(),
        Level.ALL,
        CudaCompletion(Measured(), tmp_path, inspection=InProcess()),
        inspection=InProcess(),
    )
    (shown,) = completion.facts((), 0).cuda_durations
    assert (shown.op, shown.histogram.sum) == ("AllReduce", 3.0)
    assert shown.histogram.bounds[5] == pytest.approx(32_768e-9)
    assert shown.histogram.counts[5] == 2


def test_what_was_lost_is_told_by_its_reason() -> None:
    class Losing(SimulatedPrograms):
        def stats(self) -> dict[InternalStat, int]:
            return {stat: 100 + stat for stat in InternalStat}

    lost = Completion(Losing(), Level.COMPLETION, inspection=InProcess()).events_lost()
    assert dict(lost) == {
        "completion_ring_full": 100 + InternalStat.RING_FULL,
        "completion_tables_full": 100 + InternalStat.FULL,
        "internals_unreadable": 100 + InternalStat.UNREADABLE,
    }


def test_bandwidths_are_bytes_per_second_in_powers_of_two_from_64_kib() -> None:
    """Bucket i of the kernel's ends with 2^(16+i) (FIRST_BANDWIDTH in internals.h)."""

    class Fast(SimulatedPrograms):
        def bandwidths(self) -> dict[Op, Records]:
            one = np.zeros(1, DISTRIBUTION)
            one["count"], one["sum"] = 3, 3 << 20
            one["buckets"][0, 4] = 3
            return {Op.AllReduce: one[0]}

    (shown,) = Completion(Fast(), Level.COMPLETION, inspection=InProcess()).facts((), 0).bandwidths
    assert shown.histogram.sum == 3 << 20
    assert (shown.histogram.bounds[0], shown.histogram.bounds[4]) == (1 << 16, 1 << 20)
    assert shown.histogram.counts[4] == 3


@dataclass(slots=True)
class Sending(SimulatedPrograms):
    """What processes of a node handed over, as long as the kernel keeps it."""

    node: Node = field(default_factory=Node)

    def sent(self) -> list[Sent]:
        return list(self.node.rows.values())

    def forget_sent(self, tgids: Collection[int]) -> None:
        self.node.rows = {key: row for key, row in self.node.rows.items() if key[0] not in tgids}


def sending(level: Level = Level.RAILS) -> tuple[Completion, Node]:
    programs = Sending()
    return Completion(programs, level, rail_bytes=programs.node.rails, inspection=InProcess()), programs.node


def test_what_was_handed_over_without_a_name_is_said_once_for_each_time_it_happens() -> None:
    completion, node = sending()
    node.begin(10, 1, RAIL0)
    node.send(10, SOCKET, 0, 100)
    completion.read_handed_over()
    assert completion.sees_all_handed_over()
    node.send(10, SOCKET, 5, 1)
    completion.read_handed_over()
    assert [completion.sees_all_handed_over() for _ in range(2)] == [False, True]


@pytest.mark.parametrize("level", Level)
def test_what_nobody_looks_at_is_not_nothing(level: Level) -> None:
    completion, _ = sending(level)
    assert completion.handed_over({1}) == ({} if level >= Level.RAILS else None)


def test_what_was_handed_over_stays_counted_when_the_level_falls_and_goes_with_its_rails() -> None:
    completion, node = sending()
    for tgid, namespace in ((10, 1), (11, 2)):
        node.begin(tgid, namespace, RAIL0)
        node.send(tgid, SOCKET, 0, 100 * namespace)
    completion.read_handed_over()
    completion.set_level(Level.COUNTS)
    assert completion.handed_over({1, 2}) == {(1, "rail0"): 100, (2, "rail0"): 200}
    assert completion.handed_over({2}) == {(2, "rail0"): 200}
    assert completion.handed_over({1, 2}) == {(2, "rail0"): 200}


def test_the_last_that_a_process_handed_over_is_counted_before_its_rows_go() -> None:
    completion, node = sending(Level.COUNTS)
    node.begin(10, 1, RAIL0)
    node.send(10, SOCKET, 0, 100)
    completion.end_processes({10})
    assert completion.handed_over({1}) == {(1, "rail0"): 100}
    assert node.rows == {}
