"""The kernel's own mapping events: a library shows up while it is being loaded, and losses are told."""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from railscope.probes.libraries.mmap_events import MmapEvent, MmapEvents, MmapEventsError
from railscope.probes.processes.processes import PROCFS, executable_mappings, open_mapped_file

pytestmark = pytest.mark.root


def events_of(stream: MmapEvents, inode: int) -> list[MmapEvent]:
    """Wait for the events of one file, for ten seconds at most."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        poll.poll(1000)
        if found := [event for event in stream.read() if event.inode == inode]:
            return found
    return []


def map_executable(path: Path, times: int = 1) -> None:
    with path.open("rb") as file:
        for _ in range(times):
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()


def wakes(stream: MmapEvents, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(milliseconds))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "library of a test.so"
    path.write_bytes(b"the library")
    return path


def test_what_was_gathered_before_reading_wakes_nobody_again_and_what_comes_after_does(library: Path) -> None:
    inode = library.stat().st_ino
    with MmapEvents.open() as stream:

        def silent_after_reading() -> bool:
            map_executable(library)
            assert wakes(stream, 10_000)
            map_executable(library, times=5)  # nobody waits now
            assert len([event for event in stream.read() if event.inode == inode]) == 6
            return not wakes(stream, 0)

        # Other processes of the host map something, too, now and then just in between.
        assert any(silent_after_reading() for _ in range(20))
        map_executable(library)
        assert events_of(stream, inode)


def test_a_mapping_by_another_process_wakes_the_reader_and_leads_to_the_file(library: Path) -> None:
    script = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "kept = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)\n"
        "sys.stdin.read()\n"
    )
    status = library.stat()
    with MmapEvents.open() as stream:
        before_ns = time.monotonic_ns()
        with subprocess.Popen([sys.executable, "-c", script, str(library)], stdin=subprocess.PIPE) as process:
            (event,) = events_of(stream, status.st_ino)
            assert (event.pid, event.tid) == (process.pid, process.pid)
            assert event.device == (os.major(status.st_dev), os.minor(status.st_dev))
            assert event.path == str(library)
            assert before_ns < event.time_ns < time.monotonic_ns()
            mapping = next(m for m in executable_mappings(PROCFS, process.pid) if m.inode == event.inode)
            assert mapping.start == event.address
            fd = open_mapped_file(PROCFS, process.pid, mapping)
            assert os.pread(fd, 100, 0) == b"the library"
            os.close(fd)
        assert stream.lost == 0


def test_mappings_that_are_not_executable_are_not_told(library: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker.so"
    marker.write_bytes(b"marker")
    with MmapEvents.open() as stream:
        with library.open("rb") as file:
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
        map_executable(marker)
        seen = {event.inode for event in stream.read()}
    assert marker.stat().st_ino in seen
    assert library.stat().st_ino not in seen


def test_nothing_is_missed_while_the_ring_wraps_many_times(library: Path) -> None:
    inode = library.stat().st_ino
    with MmapEvents.open(pages=1) as stream:
        counted = 0
        for _ in range(100):
            map_executable(library, times=7)
            counted += sum(event.inode == inode for event in stream.read())
        assert (counted, stream.lost) == (700, 0)


def test_what_did_not_fit_is_counted(library: Path) -> None:
    inode = library.stat().st_ino
    with MmapEvents.open(pages=1) as stream:
        # One CPU at a time, so that it is one ring that overflows and later tells of it.
        os.sched_setaffinity(0, allowed := {min(before := os.sched_getaffinity(0))})
        try:
            map_executable(library, times=400)
            events = stream.read()
            map_executable(library)
            events += stream.read()
        finally:
            os.sched_setaffinity(0, before)
        seen = sum(event.inode == inode for event in events)
        assert allowed
        assert 0 < seen < 401
        assert stream.lost >= 401 - seen


def test_without_privileges_one_line_says_what_is_missing() -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 1:
        pytest.skip("kernel.perf_event_paranoid lets everyone watch")
    script = (
        "import os\n"
        "from railscope.probes.libraries.mmap_events import MmapEvents, MmapEventsError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: MmapEvents.open()\n"
        "except MmapEventsError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    assert "needs CAP_PERFMON" in output
    assert output.count("\n") == 1


def test_closing_leaves_no_descriptor_behind() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    MmapEvents.open().close()
    with pytest.raises(MmapEventsError):
        MmapEvents.open(pages=1 << 24)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
