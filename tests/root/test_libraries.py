"""A verdict on a file holds while the file stays as it is, and what could not be looked at is looked at again."""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from railscope.agent.node.inspection.inspection import InProcess, Inspection
from railscope.agent.node.inspection.questions import Found, NotYet, Question
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.targets import libraries as discovery
from railscope.agent.node.targets.libraries import Libraries
from railscope.agent.node.targets.sightings import OpenLibrary, Reexamine
from railscope.probes.clock import Clock, SystemClock
from railscope.probes.libraries.communication import MARKERS, CommunicationLibrary
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links
from railscope.probes.nccl.functions.entry_points import ENQUEUE_CHECK
from railscope.probes.nccl.functions.probe_points import ProbePoints
from railscope.probes.nccl.layouts.layout import CommLayout
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of, is_alive
from tests.root.caller import Caller
from tests.root.nccl_variants import LateCaller, library
from tests.unit.elf_writer import WantedElf, WantedSymbol, write_elf
from tests.unit.test_processes import mapped_executable, spare_descriptors
from tests.waiting import eventually

pytestmark = pytest.mark.root

A = TypeVar("A")


class RecordingAttacher:
    """Attaches nothing; remembers what it was asked for, and may refuse."""

    def __init__(self) -> None:
        self.asked: list[ProbePoints] = []
        self.refuses = False

    def attach(self, path: str, points: ProbePoints, library: int, layout: CommLayout | None, *, pid: int = 0) -> Links:
        del path, library, layout, pid
        # A library's calls have links of their own.
        if points.calls or points.calls_entry_only or self.refuses:
            self.asked.append(points)
        if self.refuses:
            raise KernelRefusal(errno.EPERM, "the kernel does not allow probes")
        return Links()


class CountingInspection(InProcess):
    """Counts its questions; while `rests`, it answers none of these kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[type] = Counter()
        self.rests: tuple[type, ...] = ()

    def ask(self, tenant: Tenant, question: Question[A], descriptors: Collection[int] = ()) -> Found[A]:
        self.asked[type(question)] += 1
        if isinstance(question, self.rests):
            raise NotYet
        return super().ask(tenant, question, descriptors)


@contextmanager
def discovering(
    *pids: int,
    attacher: RecordingAttacher | None = None,
    clock: Clock | None = None,
    linger_ns: int = 0,
    inspection: Inspection | None = None,
) -> Iterator[Libraries]:
    """Discovery among these processes only."""
    made = Libraries(
        attacher or RecordingAttacher(),
        PROCFS,
        wanted=lambda identity: identity.pid in pids,
        found=lambda *_: None,
        inspection=inspection or InProcess(),
        clock=clock or SystemClock(),
        linger_ns=linger_ns,
    )
    try:
        yield made
    finally:
        made.close()


def paths(found: Libraries) -> list[str]:
    return sorted(library.path for library in found.libraries)


def mappers(found: Libraries) -> dict[str, set[int]]:
    return {library.path: {mapper.pid for mapper in library.mappers} for library in found.libraries}


def test_what_changes_is_told_and_a_look_that_finds_nothing_new_is_no_change(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    attacher = RecordingAttacher()
    with Caller(path) as first, discovering(first.pid, os.getpid(), attacher=attacher) as found:
        changes = [found.changes]

        def changed() -> bool:
            changes.append(found.changes)
            return changes[-1] != changes[-2]

        found.scan_process(os.getpid())
        assert not changed(), "a process without NCCL"
        attacher.refuses = True
        assert found.scan_process(first.pid) != []
        assert changed(), "a mapper"
        attacher.refuses = False
        assert found.scan_process(first.pid) == []
        assert changed(), "probes"
        found.scan_process(first.pid)
        found.scan()
        assert not changed()
        (mapper,) = found.libraries[0].mappers
        found.process_gone(mapper)
        assert changed(), "the last mapper's end"
        found.process_gone(mapper)
        assert not changed()


def test_a_file_that_could_not_be_read_once_is_read_at_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library(tmp_path / "libnccl.so.2")

    def failing_disk(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Caller(path) as job, discovering(job.pid) as found:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", failing_disk)
            found.scan()
        assert paths(found) == []
        assert any(error.startswith(f"{path}: ") and "Input/output error" in error for error in found.errors)
        found.scan()
        assert (paths(found), found.errors) == ([str(path)], ())


def test_too_many_open_files_are_an_error_and_the_next_scan_tries_again(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    with Caller(path) as job, discovering(job.pid) as found:
        with spare_descriptors(1):
            found.scan()
        assert paths(found) == []
        assert any(error.startswith(f"{path}, ") and "raise the limit of open files" in error for error in found.errors)
        found.scan()
        assert (paths(found), found.errors) == ([str(path)], ())


def test_a_library_beyond_the_programs_room_is_named_and_gets_the_next_place_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MOST_LIBRARIES", 1)
    held, left_out = (library(tmp_path / f"libnccl.so.{number}") for number in (1, 2))
    with ExitStack() as stack:
        with Caller(held) as first:
            jobs = [stack.enter_context(Caller(left_out)) for _ in range(2)]
            found = stack.enter_context(discovering(first.pid, *(job.pid for job in jobs)))
            assert found.scan_process(first.pid) == []
            for _ in range(2):
                found.scan()
                (error,) = found.errors
                assert error.startswith(f"{left_out}: not observed: 1 NCCL libraries are already mapped")
                assert paths(found) == [str(held)]
        for _ in range(2):
            found.scan()
        assert found.errors == ()
        assert mappers(found) == {str(left_out): {job.pid for job in jobs}}


def test_a_probed_library_that_is_written_over_gets_probes_where_its_new_code_is(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    other = library(tmp_path / "other", "-DRCCL", "-falign-functions=64").read_bytes()
    attacher = RecordingAttacher()
    with Caller(path) as first, LateCaller() as second:
        with discovering(first.pid, second.pid, attacher=attacher) as found:
            found.scan()
            (old,) = found.libraries
            path.chmod(0o700)
            path.rename(tmp_path / "renamed")
            (tmp_path / "renamed").rename(path)
            found.scan()
            assert found.libraries == (old,), "neither rights nor names matter"
            with path.open("r+b") as file:
                file.truncate(len(other))
                file.write(other)
            second.load(path)
            assert found.scan_process(second.pid) == []
            (new,) = found.libraries
            assert new is not old
            assert new.points.calls != old.points.calls
            assert attacher.asked == [old.points, new.points]
            found.scan()
            assert mappers(found) == {str(path): {first.pid, second.pid}}


def elf(build_id: bytes | None = b"one", *, version: str = "2.90.1", names: bool = True) -> bytes:
    """A library with NCCL; `names` False: stripped."""
    code = bytes.fromhex("55 48 89 e5 41 57 41 56 48 83 ec 28 c3 90 90 90") * 2
    exported = [WantedSymbol("ncclAllReduce"), WantedSymbol("ncclCommInitRank")]
    internal = [WantedSymbol(ENQUEUE_CHECK, offset=16)] if names else []
    constants = f"NCCL version {version}\0".encode()
    return write_elf(WantedElf(exported, internal, code=code, constants=constants, build_id=build_id)).data


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(elf(b"one"), elf(b"two", version="2.91.2"), id="another build with its functions in place"),
        pytest.param(elf(), elf(names=False), id="stripped in place"),
        pytest.param(elf(None), elf(None, version="2.91.2"), id="without build-id"),
    ],
)
def test_what_a_library_was_is_not_said_of_what_was_written_over_it(tmp_path: Path, first: bytes, then: bytes) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(first)
    os.utime(path, (1, 1))  # a clock that stands still between two writes would hide the second one
    with mapped_executable(path), discovering(os.getpid()) as found:
        found.scan()
        (old,) = found.libraries
        path.chmod(0o700)
        found.scan()
        assert found.libraries == (old,)
        with path.open("r+b") as file:
            file.write(then)
            file.truncate()
        found.scan()
        (new,) = found.libraries
    assert new is not old
    told = [(one.nccl_version, one.points.through_enqueue_check) for one in (old, new)]
    assert told[0] != told[1]


def test_probes_leave_a_library_with_the_first_byte_that_is_written_to_it(tmp_path: Path) -> None:
    # Before anyone maps the new content: breakpoints in places of the old one would kill a job.
    path = library(tmp_path / "libnccl.so.2")
    with Caller(path) as job, discovering(job.pid) as found:
        found.scan()
        assert found.change_fd is not None
        readable = [found.change_fd]
        assert select.select(readable, [], [], 0)[0] == []
        with path.open("r+b") as file:
            file.truncate(64)
        assert select.select(readable, [], [], 0)[0] == readable
        found.detach_changed()
        assert found.libraries == ()
        found.detach_changed()
        assert select.select(readable, [], [], 0)[0] == []


@pytest.mark.parametrize("through", ["the scan", "the watch"])
def test_probes_leave_a_library_that_was_written_to_while_its_tenant_rests(tmp_path: Path, through: str) -> None:
    # Whoever mapped it first may rest for minutes, and what he maps may be other users' library too.
    path, inspection = library(tmp_path / "libnccl.so.2"), CountingInspection()
    with Caller(path) as job, discovering(job.pid, inspection=inspection) as found:
        found.scan()
        inspection.rests = (Reexamine, OpenLibrary)
        path.chmod(0o700)
        found.detach_changed()
        found.scan()
        assert paths(found) == [str(path)], "rights are no content"
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        found.scan() if through == "the scan" else found.detach_changed()
        assert found.libraries == ()
        inspection.rests = ()
        found.scan()
        assert paths(found) == [str(path)]


def test_only_what_is_written_to_is_looked_at(tmp_path: Path) -> None:
    files, inspection = [library(tmp_path / f"libnccl.so.{number}") for number in range(2)], CountingInspection()
    with Caller(files[0]) as one, Caller(files[1]) as other:
        with discovering(one.pid, other.pid, inspection=inspection) as found:
            found.scan()
            for path in files:
                path.chmod(0o700)
            with files[0].open("ab") as file:
                file.write(b"x")
            found.detach_changed()
            assert inspection.asked[Reexamine] == 1


def test_what_the_kernel_refuses_is_asked_once_a_scan_however_many_processes_there_are(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    attacher = RecordingAttacher()
    attacher.refuses = True
    with ExitStack() as stack:
        jobs = [stack.enter_context(Caller(path)) for _ in range(3)]
        found = stack.enter_context(discovering(*(job.pid for job in jobs), attacher=attacher))
        for scans in (1, 2):
            found.scan()
            assert len(attacher.asked) == scans
            assert found.errors == (f"{path}: the kernel does not allow probes",)
            assert mappers(found) == {str(path): {job.pid for job in jobs}}
        attacher.refuses = False
        found.scan()
        assert found.errors == ()
        assert mappers(found) == {str(path): {job.pid for job in jobs}}


def test_only_what_has_a_place_in_a_library_is_said_to_be_attached(tmp_path: Path) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(elf())
    attacher = RecordingAttacher()
    attacher.refuses = True
    with mapped_executable(path), discovering(os.getpid(), attacher=attacher) as found:
        for attached in ([], ["calls", "init"]):
            found.scan()
            (one,) = found.libraries
            assert [probe.program for probe in one.probes() if probe.attached] == attached
            attacher.refuses = False


def test_a_process_that_closes_the_library_stops_being_its_mapper_and_the_others_stay(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    with LateCaller() as leaving, Caller(path) as staying, discovering(leaving.pid, staying.pid) as found:
        leaving.load(path)
        found.scan()
        assert mappers(found) == {str(path): {leaving.pid, staying.pid}}
        leaving.unload()
        found.scan()
        assert mappers(found) == {str(path): {staying.pid}}


def test_what_else_a_process_maps_is_known_without_a_probe_and_forgotten_with_it(tmp_path: Path) -> None:
    nccl, ucx = library(tmp_path / "libnccl.so.2"), tmp_path / "libucp-6d3f.so.0.0.0"
    ucx.write_bytes(write_elf(WantedElf(exported=[WantedSymbol(MARKERS[CommunicationLibrary.UCX])])).data)
    with Caller(nccl) as rank, discovering(rank.pid, os.getpid()) as found:
        assert found.communication_of(rank.pid) is None
        with mapped_executable(ucx):
            found.scan()
            assert found.communication_of(os.getpid()) == frozenset({CommunicationLibrary.UCX})
        assert found.communication_of(rank.pid) == frozenset({CommunicationLibrary.NCCL})
        assert paths(found) == [str(nccl)]
        found.scan_process(os.getpid())
        assert found.communication_of(os.getpid()) == frozenset()
        identity = identity_of(PROCFS, rank.pid)
        assert identity is not None
        os.kill(rank.pid, signal.SIGKILL)
        # Its connections end with it; who started it may wait for it late.
        eventually(lambda: not is_alive(PROCFS, identity))
        assert identity_of(PROCFS, rank.pid) == identity
        found.process_gone(identity)
        assert found.communication_of(rank.pid) == frozenset({CommunicationLibrary.NCCL})
        rank.end()
        found.scan()
        assert found.communication_of(rank.pid) == frozenset({CommunicationLibrary.NCCL})


def test_a_library_that_took_the_place_of_an_equally_large_one_is_not_forgotten_by_a_scan_that_remembers(
    tmp_path: Path,
) -> None:
    first, second = (library(tmp_path / f"libnccl.so.{number}") for number in (1, 2))

    with LateCaller() as job, discovering(job.pid) as found:
        job.load(first)
        found.scan()
        assert paths(found) == [str(first)]
        job.unload()
        job.load(second)
        assert found.scan_process(job.pid) == []
        for _ in range(10):
            found.scan()
            assert str(second) in paths(found)
        assert paths(found) == [str(second)]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_nothing_stays_open(tmp_path: Path) -> None:
    path = library(tmp_path / "libnccl.so.2")
    with Caller(path) as job:
        before = open_files()
        with discovering(job.pid) as found:
            found.scan()
            assert found.libraries
        assert open_files() == before


class StandingClock(SystemClock):
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_probes_linger_for_the_next_process_and_come_off_when_none_comes(tmp_path: Path) -> None:
    path, clock, attacher = library(tmp_path / "libnccl.so.2"), StandingClock(), RecordingAttacher()
    with ExitStack() as stack:
        first, second = (stack.enter_context(LateCaller()) for _ in range(2))
        found = stack.enter_context(
            discovering(first.pid, second.pid, attacher=attacher, clock=clock, linger_ns=60 * 10**9)
        )
        first.load(path)
        found.scan()
        first.unload()
        found.scan()
        clock.now_ns += 59 * 10**9
        found.expire()
        assert mappers(found) == {str(path): set()}
        second.load(path)
        assert found.scan_process(second.pid) == []
        assert len(attacher.asked) == 1, "the probes were there before the process"
        second.unload()
        found.scan()
        clock.now_ns += 60 * 10**9
        found.expire()
        assert found.libraries == ()


def test_the_probes_on_calls_come_off_and_go_back_while_the_others_stay(tmp_path: Path) -> None:
    path, attacher = library(tmp_path / "libnccl.so.2"), RecordingAttacher()
    with Caller(path) as job, discovering(job.pid, attacher=attacher) as found:
        found.scan()
        (one,) = found.libraries
        assert [probe.program for probe in one.probes()] == ["calls", "init", "end"]
        assert found.set_watched({one.number}) == []
        assert one.calls is None
        assert one.detaching is not None
        one.detaching.result(60)
        assert found.uncounted == {one.number}
        assert [probe.program for probe in one.probes()] == ["init", "end"], "nothing is missing there"
        found.scan()
        assert found.uncounted == {one.number}
        attacher.refuses = True
        (error,) = found.set_watched(())
        assert "its calls cannot be counted again" in error
        attacher.refuses = False
        assert found.set_watched(()) == []
        assert found.uncounted == frozenset()
        assert one.links is not None


class _SlowLinks(Links):
    """Take a while to come off."""

    def __init__(self, may_end: threading.Event) -> None:
        super().__init__()
        self._may_end = may_end

    def close(self) -> None:
        assert self._may_end.wait(60)


def test_a_library_is_dropped_only_when_the_probes_that_are_coming_off_its_calls_are_off(tmp_path: Path) -> None:
    path, may_end = library(tmp_path / "libnccl.so.2"), threading.Event()
    with Caller(path) as job, discovering(job.pid) as found:
        found.scan()
        (one,) = found.libraries
        one.calls = _SlowLinks(may_end)
        assert found.set_watched({one.number}) == []
        threading.Timer(0.1, may_end.set).start()
        with path.open("r+b") as file:
            os.utime(file.fileno(), ns=(1, 1))
            file.write(b"\0")
        found.detach_changed()
        assert one.number not in {library.number for library in found.libraries}
        assert one.detaching is not None
        assert one.detaching.done()


def test_a_tenant_has_a_share_of_the_places_and_what_lingers_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "TENANTS_SHARE", 2)
    files = [library(tmp_path / f"libnccl.so.{number}") for number in range(4)]
    with ExitStack() as stack:
        jobs = [stack.enter_context(LateCaller()) for _ in files]
        inspection = CountingInspection()
        found = stack.enter_context(
            discovering(*(job.pid for job in jobs), linger_ns=60 * 10**9, inspection=inspection)
        )
        for job, file in zip(jobs[:3], files, strict=False):
            job.load(file)
            found.scan_process(job.pid)
        assert paths(found) == [str(file) for file in files[:2]]
        found.scan()
        (error,) = found.errors
        assert error.startswith(f"{files[2]}: not observed, for uid 0 has 2 NCCL libraries mapped already")
        assert list(found.left_out.values()) == [1], "counted once, however often it is tried"
        assert inspection.asked[OpenLibrary] == 2, "what has no place is not opened"
        jobs[0].unload()
        found.scan()
        assert paths(found) == [str(file) for file in files[1:3]]
        assert found.errors == ()
        jobs[3].load(files[3])
        found.scan()
        assert list(found.left_out.values()) == [2]
        jobs[3].unload()
        found.scan()
        jobs[3].load(files[3])
        found.scan()
        assert list(found.left_out.values()) == [3], "what is mapped no longer is not remembered"


def test_a_tenant_who_maps_library_after_library_leaves_places_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MOST_LIBRARIES", 4)
    files = [library(tmp_path / f"libnccl.so.{number}") for number in range(5)]
    with ExitStack() as stack:
        *greedy, modest = (stack.enter_context(Caller(file)).pid for file in files)
        monkeypatch.setattr(discovery, "tenant_of", lambda _procfs, pid: Tenant(5000 if pid in greedy else 1000))
        found = stack.enter_context(discovering(*greedy, modest))
        for pid in (*greedy, modest):
            found.scan_process(pid)
        assert paths(found) == [str(file) for file in (*files[:2], files[4])]
        assert found.left_out == {Tenant(5000): 2}


def test_a_tenant_whose_processes_end_by_the_thousand_makes_nobody_elses_forgotten() -> None:
    """By the number of its process a connection that ended is known for its library's."""
    ends = range(1 << 22, (1 << 22) + 5000)  # pids that no process can have
    with discovering() as found:
        for pid in ends:
            tenant = Tenant(5000 if pid > ends[0] else 1000)
            found._communication[pid] = ProcessIdentity(pid, 1), frozenset({CommunicationLibrary.UCX}), tenant
            found._remember(pid)
        assert found.communication_of(ends[0]) == frozenset({CommunicationLibrary.UCX})
        assert found.communication_of(ends[1]) is None
        assert found.communication_of(ends[-1]) == frozenset({CommunicationLibrary.UCX})
        assert len(found._remembered) == discovery._MOST_REMEMBERED
