"""Which probes a level attaches and lets go of, and what is known of progress; the kernel's side is simulated."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from agent.completion import Completion
from agent.cuda import CudaCompletion
from agent.levels import Levels
from agent.snapshot import Snapshot
from probes.bpf_syscall import KernelRefusal
from probes.elf import Elf
from probes.links import Links
from probes.maps import Records
from probes.nccl.abi import Op
from probes.nccl.cuda_events import CudaProgress
from probes.nccl.error_records import ERROR_EVENT, ErrorLayout
from probes.nccl.internal_functions import InternalPoints, Level
from probes.nccl.internal_records import BUCKETS, DISTRIBUTION, InternalStat
from probes.nccl.internals import EmptyRun, Launch, Progress, Sent
from probes.nccl.layout import Layouts
from probes.nccl.library import ProbePoint
from probes.processes import ProcessIdentity
from tests.unit.test_cuda_completion import SimulatedPrograms as SimulatedCuda

BUILD_ID = "855c15bcfbac035d484e5b6c3348bffa19387e0e"  # 2.32.3
EVERYTHING = ("proxy_post", "proxy_stop", "plan_replay", "socket_send", "ib_send", "plan_launch")


@dataclass(slots=True)
class SimulatedLibrary:
    number: int = 3
    path: str = "/opt/libnccl.so.2"
    descriptor: int = -1
    build_id: str | None = BUILD_ID
    nccl_version: str = "2.32.3"
    mappers: frozenset[ProcessIdentity] = frozenset()


@dataclass(slots=True)
class SimulatedPrograms:
    log: list[str] = field(default_factory=list)
    described: dict[int, bool] = field(default_factory=dict)
    watched: dict[int, tuple[str, ErrorLayout | None]] = field(default_factory=dict)
    attached: dict[Level, Links] = field(default_factory=dict)
    refuses: Level | None = None
    states: dict[int, Progress] = field(default_factory=dict)
    discarded: dict[int, EmptyRun] = field(default_factory=dict)
    unreadable: bool = False

    def describe(self, library: int, layout: Records | None) -> None:
        self.described[library] = layout is not None

    def attach(self, path: str, points: InternalPoints, level: Level) -> Links:
        assert path.startswith("/proc/self/fd/")
        assert points.at(level)
        if level is self.refuses:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        self.log.append(f"+{level.name}")
        links = Links()
        links._descriptors.append(os.dup(0))  # stands for a link of the kernel's
        self.attached[level] = links
        return links

    def still_attached(self) -> list[str]:
        return [level.name for level, links in self.attached.items() if len(links)]

    def watch_errors(self, path: str, elf: Elf, library: int, layout: ErrorLayout | None) -> Links:
        assert elf.symbols(["no such function"]) == {}
        self.watched[library] = (path, layout)
        return Links()

    def error_events(self) -> Records:
        return np.zeros(0, ERROR_EVENT)

    def forget_library(self, library: int) -> None:
        self.log.append(f"forget {library}")

    def progress(self) -> dict[int, Progress]:
        if self.unreadable:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        return self.states

    def empty_runs(self) -> dict[int, EmptyRun]:
        return self.discarded

    def durations(self) -> dict[Op, Records]:
        one = np.zeros(1, DISTRIBUTION)
        one["count"], one["sum"] = 2, 3_000_000_000
        one["buckets"][0, 5] = 2
        return {Op.AllReduce: one[0]}

    def bandwidths(self) -> dict[Op, Records]:
        return {}

    def launches(self) -> list[Launch]:
        return [Launch(4, 1, 2, 8, 5), Launch(4, 0xFE, 0xFF, 1, 1), Launch(4, 0xFF, 0xFF, 1, 2)]

    def sent(self) -> list[Sent]:
        return []

    def stats(self) -> dict[InternalStat, int]:
        return dict.fromkeys(InternalStat, 1)

    def forget_process(self, tgid: int) -> None:
        self.log.append(f"forget process {tgid}")

    def forget_sent(self, tgid: int) -> None:
        self.log.append(f"forget sent {tgid}")

    def forget_communicators(self, instances: set[int]) -> None:
        self.log.append(f"forget communicators {sorted(instances)}")

    def close(self) -> None:
        self.log.append("closed")


@pytest.fixture(autouse=True)
def all_functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every library has these functions."""
    functions = list(EVERYTHING)
    monkeypatch.setattr(
        "agent.levels.internal_points",
        lambda _, number: InternalPoints({name: ProbePoint(name, 64, number << 32) for name in functions}),
    )
    return functions


@pytest.fixture
def library() -> Iterator[SimulatedLibrary]:
    descriptor = os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
    yield SimulatedLibrary(descriptor=descriptor)
    os.close(descriptor)


def levels_of(programs: SimulatedPrograms, wanted: Level) -> Levels:
    return Levels(programs, Layouts.load().structures, wanted)


@pytest.mark.parametrize("wanted", Level)
def test_a_new_library_is_attached_up_to_the_wanted_level(library: SimulatedLibrary, wanted: Level) -> None:
    programs = SimulatedPrograms()
    levels = levels_of(programs, wanted)
    assert levels.follow([library]) == []
    assert programs.log == [f"+{level.name}" for level in Level if Level.COUNTS < level <= wanted]
    assert programs.described == {3: True}
    assert [(one.level, one.highest) for one in levels.shown()] == [(wanted, Level.ALL)]


def test_a_library_of_an_unknown_build_stays_at_counts(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms()
    library.build_id = "ff" * 20
    levels = levels_of(programs, Level.ALL)
    assert levels.follow([library]) == []
    assert programs.log == []
    assert programs.described == {3: False}
    assert [(one.level, one.highest) for one in levels.shown()] == [(Level.COUNTS, Level.COUNTS)]


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        (EVERYTHING, "known of listed builds only"),
        (("socket_send",), "none of the functions that tell"),
        ((), "no names of functions"),
    ],
)
def test_why_completion_is_not_seen_does_not_deny_the_layout_of_communicators(
    library: SimulatedLibrary,
    all_functions: list[str],
    functions: tuple[str, ...],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    all_functions[:] = functions
    library.build_id = "ff" * 20
    with caplog.at_level("INFO"):
        levels_of(SimulatedPrograms(), Level.ALL).follow([library])
    (line,) = caplog.messages
    assert line.startswith("/opt/libnccl.so.2: calls are counted, completion is not seen: ")
    assert why in line
    assert "layout" not in line


def test_a_library_that_cannot_tell_of_completion_is_not_asked_for_it(
    library: SimulatedLibrary, all_functions: list[str]
) -> None:
    all_functions.remove("proxy_stop")
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.RAILS)
    levels.follow([library])
    assert levels.programs_of(3) == ("socket_send", "ib_send")


def test_levels_go_down_and_up_one_by_one_and_forget_what_gets_old(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.ALL)
    levels.follow([library])
    levels.before_forgetting = lambda: programs.log.append(f"take what is left of {programs.still_attached()}")
    programs.log.clear()
    assert levels.want(Level.COMPLETION) == []
    levels.settle(wait=True)
    assert programs.still_attached() == ["COMPLETION"]
    assert programs.log == []
    levels.want(Level.COUNTS)
    levels.settle(wait=True)
    assert programs.still_attached() == []
    assert programs.log == ["take what is left of []", "forget 3"]
    levels.want(Level.RAILS)
    levels.settle(wait=True)
    assert programs.log[2:] == ["+COMPLETION", "+RAILS"]
    levels.close()
    assert programs.still_attached() == []


def test_a_level_is_not_raised_again_before_its_probes_came_off(
    library: SimulatedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr("agent.levels.close_together", lambda _: release.wait(10))
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.COMPLETION)
    levels.follow([library])
    levels.want(Level.COUNTS)
    levels.want(Level.COMPLETION)
    assert programs.log == ["+COMPLETION"]
    release.set()
    levels.settle(wait=True)
    assert programs.log == ["+COMPLETION", "forget 3", "+COMPLETION"]


def test_a_library_that_went_is_let_go_of_and_its_number_may_serve_another(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.COMPLETION)
    levels.follow([library])
    other = SimulatedLibrary(path="/srv/libnccl.so.2", descriptor=library.descriptor, build_id="00" * 20)
    levels.follow([other])
    levels.settle(wait=True)
    assert programs.log == ["+COMPLETION", "forget 3"]
    assert programs.still_attached() == []
    assert programs.described == {3: False}
    assert [one.library for one in levels.shown()] == ["/srv/libnccl.so.2"]


def test_the_first_library_after_none_is_observed_at_once_at_the_wanted_level(library: SimulatedLibrary) -> None:
    levels = levels_of(SimulatedPrograms(), Level.RAILS)
    seen = [levels.highest]
    library.build_id = "ff" * 20
    for present in ([library], []):
        levels.follow(present)
        seen.append(levels.highest)
    assert seen == [Level.ALL, Level.COUNTS, Level.ALL]


def test_what_the_kernel_refuses_is_one_line_and_leaves_the_rest(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms(refuses=Level.RAILS)
    levels = levels_of(programs, Level.ALL)
    (error,) = levels.follow([library])
    assert error.startswith("/opt/libnccl.so.2: ")
    assert error.endswith("simulated refusal")
    assert programs.log == ["+COMPLETION"]
    programs.refuses = None
    assert levels.follow([library]) == []
    assert programs.log == ["+COMPLETION", "+RAILS", "+ALL"]


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
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    known = completion.of(7)
    assert known is not None
    assert (known.completed, known.followed) == (completed, followed)


def test_discarded_calls_stay_complete_when_later_ones_are_known_instead() -> None:
    programs = SimulatedPrograms(states={7: progress(5)}, discarded={7: EmptyRun(6, 9)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    programs.discarded = {7: EmptyRun(12, 12)}
    completion.read()
    known = completion.of(7)
    assert known is not None
    assert (known.completed, known.followed) == (9, 9)


def test_a_discarded_call_behind_one_in_flight_is_not_complete() -> None:
    programs = SimulatedPrograms(states={7: progress(4, oldest_ns=9, sequence=5)}, discarded={7: EmptyRun(6, 9)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    known = completion.of(7)
    assert known is not None
    assert (known.completed, known.followed, known.oldest_posted_ns) == (4, 9, 9)
    completion.forget([7])
    assert completion.of(7) is None


def test_a_communicator_that_sends_through_anothers_proxy_is_not_known_to_be_complete() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    assert completion.of(7) is not None
    programs.states = {7: progress(6, elsewhere=True)}
    completion.read()
    assert completion.of(7) is None


def test_what_cuda_proved_is_followed_by_what_nccl_discarded(tmp_path: Path) -> None:
    programs = SimulatedPrograms(discarded={7: EmptyRun(13, 15)})
    completion = Completion(programs, Level.ALL, ProvedTwelve(SimulatedCuda(), tmp_path))
    completion.read()
    known = completion.of(7)
    assert known is not None
    assert (known.completed, known.age_known) == (15, False)


def test_what_is_complete_never_falls() -> None:
    programs = SimulatedPrograms()
    completion = Completion(programs, Level.COMPLETION)
    seen = []
    for state in (progress(5), progress(3, oldest_ns=9), progress(8)):
        programs.states = {7: state}
        completion.read()
        known = completion.of(7)
        assert known is not None
        seen.append((known.completed, known.oldest_posted_ns))
    assert seen == [(5, None), (5, 9), (8, None)]


def test_nothing_is_known_of_a_communicator_that_handed_nothing_to_the_network() -> None:
    programs = SimulatedPrograms(states={7: progress(0, posted=0)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    assert completion.of(7) is None


def test_below_completion_nothing_is_known_of_progress() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    completion.want(Level.COUNTS)
    completion.read()
    assert completion.of(7) is None


def test_what_is_complete_does_not_fall_when_nobody_looked_for_a_while() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    completion.want(Level.COUNTS)
    programs.states = {7: progress(0, oldest_ns=9)}  # attached again, and the first operation is under way
    completion.want(Level.COMPLETION)
    completion.read()
    known = completion.of(7)
    assert known is not None
    assert (known.completed, known.oldest_posted_ns) == (5, 9)


def test_a_communicator_that_has_ended_stays_known_at_every_level() -> None:
    programs = SimulatedPrograms(states={7: progress(5), 8: progress(6)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    completion.end_communicators({7})
    completion.want(Level.COUNTS)
    known = completion.of(7)
    assert known is not None
    assert known.completed == 5
    assert completion.of(8) is None


class ProvedTwelve(CudaCompletion):
    """CUDA proved that twelve calls of every communicator are complete."""

    def of(self, instance: int) -> CudaProgress | None:
        return CudaProgress(instance, 12, 99)


def test_what_cuda_proved_stands_still_nowhere_once_cuda_is_not_watched(tmp_path: Path) -> None:
    completion = Completion(SimulatedPrograms(), Level.ALL, ProvedTwelve(SimulatedCuda(), tmp_path))
    known = completion.of(7)
    assert known is not None
    assert known.completed == 12
    completion.end_communicators({8})
    completion.want(Level.RAILS)
    assert completion.of(7) is None
    known = completion.of(8)
    assert known is not None
    assert known.completed == 12


def test_stops_are_attached_before_what_they_stop() -> None:
    points = InternalPoints({name: ProbePoint(name, 64, 0) for name in EVERYTHING})
    order = list(points.at(Level.COMPLETION))
    assert order.index("proxy_stop") < order.index("proxy_post")


def test_what_an_ended_process_completed_stays_known_until_it_is_forgotten() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION)
    completion.end_process(4711)
    programs.states = {}
    completion.read()
    assert programs.log == ["forget process 4711"]
    assert completion.of(7) is not None
    completion.forget([7])
    assert completion.of(7) is None


def test_tables_that_cannot_be_read_show_and_keep_what_was_known() -> None:
    programs = SimulatedPrograms(states={7: progress(5)})
    completion = Completion(programs, Level.COMPLETION)
    completion.read()
    programs.unreadable = True
    completion.read()
    assert not completion.complete
    assert completion.of(7) is not None
    programs.unreadable = False
    completion.read()
    assert completion.complete


def test_durations_are_seconds_and_launches_have_nccls_names() -> None:
    shown = Completion(SimulatedPrograms(), Level.COMPLETION).shown(Snapshot(0, "", ""))
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
    assert shown.events_lost["completion_tables_full"] == 1


def test_what_was_lost_is_told_by_its_reason() -> None:
    class Losing(SimulatedPrograms):
        def stats(self) -> dict[InternalStat, int]:
            return {stat: 100 + stat for stat in InternalStat}

    lost = Completion(Losing(), Level.COMPLETION).shown(Snapshot(0, "", "")).events_lost
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

    (shown,) = Completion(Fast(), Level.COMPLETION).shown(Snapshot(0, "", "")).bandwidths
    assert shown.histogram.sum == 3 << 20
    assert (shown.histogram.bounds[0], shown.histogram.bounds[4]) == (1 << 16, 1 << 20)
    assert shown.histogram.counts[4] == 3
