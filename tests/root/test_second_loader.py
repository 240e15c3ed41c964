"""The second loader: programs that bcc compiled count what libbpf's do, and leave as little behind."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from railscope.probes.loading import bcc_loader, libbpf
from railscope.probes.loading.bpf_syscall import KernelRefusal, bpf
from railscope.probes.loading.libbpf import OBJECTS, LoadError
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.abi import DataType
from railscope.probes.nccl.programs import calls as programs_module
from railscope.probes.nccl.programs.calls import EnqueueTime, Loader, NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import Stat
from tests.fabric.agent_process import RAILSCOPE
from tests.root.probe_targets import FLOAT32, Target, all_reduce, attached, loaded
from tests.waiting import eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        bcc_loader.installed_version() is None, reason="bcc is not installed: apt install python3-bpfcc"
    ),
]

COUNT_OTHERS = (Stat.CALLS, Stat.RETURNS, Stat.LIFECYCLE, Stat.FILTERED)
PROG_GET_FD_BY_ID, MAP_GET_FD_BY_ID = 13, 14  # enum bpf_cmd, include/uapi/linux/bpf.h


@pytest.mark.parametrize(
    ("attach", "enqueue_time"), [(AttachKind.MULTI, EnqueueTime.PAIR), (AttachKind.PERF, EnqueueTime.OFF)]
)
def test_both_loaders_count_the_same_of_the_same_calls(
    testbed: Target, attach: AttachKind, enqueue_time: EnqueueTime
) -> None:
    settings = {"attach": attach, "enqueue_time": enqueue_time, "sample_every": 2}
    with (
        loaded(testbed, loader=Loader.LIBBPF, **settings) as one,
        loaded(testbed, loader=Loader.BCC, **settings) as other,
        attached(one, testbed),
        attached(other, testbed),
    ):
        make_calls(testbed)
        seen, again = what_was_seen(one), what_was_seen(other)
        assert one.stats() == other.stats()
        assert one.stats()[Stat.CALLS] > 4000
    assert seen == again
    assert len(seen.counts) > 30
    assert len(seen.communicators) >= 2  # the third may have the first one's address
    assert sum(seen.lifecycle.values()) >= 5
    assert (sum(seen.timed) > 100) == (enqueue_time is EnqueueTime.PAIR)


@pytest.mark.nccl
def test_both_loaders_read_the_same_of_the_real_library(nccl: Target) -> None:
    with (
        loaded(nccl, loader=Loader.LIBBPF, enqueue_time=EnqueueTime.OFF) as one,
        loaded(nccl, loader=Loader.BCC) as other,
        attached(one, nccl),
        attached(other, nccl),
    ):
        nccl.caller.sweep("ncclAllReduce", 2, 70, 0, 0, 0, FLOAT32, 0, 0, 7)
        nccl.caller.call("ncclBcast", 9, 0, 30, int(DataType.Bfloat16), 2, 0, 0)
        assert other.enqueue_time is EnqueueTime.OFF
        seen, again = what_was_seen(one), what_was_seen(other)
    assert seen == again
    assert len(seen.counts) > 5


def make_calls(to: Target) -> None:
    """Operations, data types, sizes, threads, and communicators that come and go."""
    caller = to.caller
    buffer = caller.memory(1 << 16)
    first, second = caller.new_communicator(), caller.new_communicator()
    for data_type in DataType:
        caller.sweep("ncclAllReduce", 2, 40, buffer, buffer, 0, int(data_type), 0, first, 7)
    caller.call("ncclBroadcast", 3, buffer, buffer, 10, FLOAT32, 0, second, 7)
    caller.call("ncclAllGather", 4, buffer, buffer, 10, FLOAT32, second, 7)
    caller.call_from_threads("ncclAllReduce", 4, 1000, 0, 0, 100, FLOAT32, 0, 0, 7)  # refused, but counted
    all_reduce(to, 5)
    for comm in (first, second):
        caller.call("ncclCommDestroy", 1, comm)
    all_reduce(to, 2, caller.new_communicator())


@dataclass(frozen=True, slots=True)
class Seen:
    """All that the programs say, but for times and for the numbers of CPUs.

    Communicators are numbered as they come: the programs number them at random.
    """

    counts: Counter[tuple[int, ...]]
    """Calls and bytes by operation, data type, size bucket, peer and communicator."""
    communicators: dict[int, tuple[object, ...]]
    lifecycle: Counter[tuple[bytes, ...]]
    calls: Counter[tuple[int, ...]]
    timed: list[int]
    troubles: dict[Stat, int]


def what_was_seen(programs: NcclPrograms) -> Seen:
    lives = programs.lifecycle_events.read()
    numbers = {0: 0}
    for instance in lives["instance"].tolist():
        numbers.setdefault(instance, len(numbers))
    keys, values = programs.aggregates.read()
    counts: Counter[tuple[int, ...]] = Counter()
    for key, value in zip(keys, values, strict=True):
        named = tuple(int(key[name]) for name in ("op", "data_type", "size_bucket", "peer"))
        named = *named, numbers[int(key["instance"])]
        counts[named] += int(value["calls"].sum())
        counts[*named, -1] += int(value["payload_bytes"].sum())
    comms, entries = programs.communicators.read()
    return Seen(
        counts=counts,
        communicators={
            int(key["comm"]): (
                *(int(entry[name]) for name in ("sequence", "library", "confirmed")),
                numbers[int(entry["instance"])],
                int(entry["destroyed_ns"]) > 0,
                entry["identity"].tobytes(),
            )
            for key, entry in zip(comms, entries, strict=True)
        },
        lifecycle=Counter(
            (
                *(event[name].tobytes() for name in event.dtype.names if name not in ("time_ns", "instance")),
                numbers[int(event["instance"])].to_bytes(4, "little"),
            )
            for event in lives
        ),
        calls=Counter(
            (
                *(int(event[name]) for name in event.dtype.names if name not in ("time_ns", "instance")),
                numbers[int(event["instance"])],
            )
            for event in programs.call_events.read()
        ),
        timed=programs.enqueue_times()["calls"].tolist(),
        # Others may call the real library meanwhile: what counts them, too, is left out.
        troubles={stat: count for stat, count in programs.stats().items() if stat not in COUNT_OTHERS},
    )


def test_bcc_serves_where_no_object_fits(
    tmp_path: Path, testbed: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for file in [*OBJECTS.glob("*.c"), *OBJECTS.glob("*.h")]:
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(libbpf, "OBJECTS", tmp_path)
    monkeypatch.setattr(programs_module, "OBJECTS", tmp_path)
    with pytest.raises(LoadError, match="make build"):
        NcclPrograms.load(ProgramSettings(loader=Loader.LIBBPF))
    with caplog.at_level(logging.INFO), loaded(testbed) as programs, attached(programs, testbed):
        all_reduce(testbed, 3)
        assert int(programs.aggregates.read()[1]["calls"].sum()) == 3
    assert "the programs were loaded by bcc" in caplog.messages


def test_bcc_is_left_alone_where_an_object_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        NcclPrograms.load(ProgramSettings()).close()
    assert "the programs were loaded by libbpf" in caplog.messages


def test_where_neither_serves_the_first_loaders_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libbpf, "OBJECTS", tmp_path)
    monkeypatch.setattr(programs_module, "OBJECTS", tmp_path)
    with pytest.raises(LoadError, match="make build"):
        NcclPrograms.load(ProgramSettings())


def test_where_this_user_may_load_nothing_bcc_is_not_tried() -> None:
    ran = subprocess.run(
        [
            "setpriv",
            "--bounding-set=-all",
            "--inh-caps=-all",
            str(RAILSCOPE),
            "agent",
            "--once",
            "--log.level",
            "debug",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert "libbpf loads no programs" in ran.stderr
    assert "CAP_BPF" in ran.stderr.splitlines()[-1]
    assert "bcc" not in ran.stderr


def test_closing_gives_back_every_descriptor_program_and_map() -> None:
    before = open_descriptors()
    programs = NcclPrograms.load(ProgramSettings(loader=Loader.BCC))
    held = objects_of(os.getpid())
    programs.close()
    assert open_descriptors() == before
    assert len(held) > 10
    eventually(lambda: not any(map(exists, held)))


def test_an_agent_that_is_killed_leaves_no_program_map_or_pin_behind() -> None:
    with agent_process("--no-collector.netdev", "--once", "--once.settle", "10m") as agent:
        assert agent.stderr is not None
        assert any("the programs were loaded by bcc" in line for line in agent.stderr)
        held = objects_of(agent.pid)
        assert {command for command, _ in held} == {PROG_GET_FD_BY_ID, MAP_GET_FD_BY_ID}
        assert all(map(exists, held))
        # Those that read what tenants control: they hold none of these, and end with the agent.
        readers = children(agent.pid)
        assert all(b"inspection.worker" in Path(f"/proc/{one}/cmdline").read_bytes() for one in readers)
        agent.kill()
    # What is pinned stays: that all are gone says that none was.
    eventually(lambda: not any(map(exists, held)))
    eventually(lambda: not any(map(runs, readers)))


def test_an_agent_that_is_killed_while_bcc_compiles_leaves_no_helper_behind() -> None:
    with agent_process("--once") as agent:
        eventually(lambda: bool(helpers(agent.pid)))
        found = helpers(agent.pid)
        agent.kill()
    eventually(lambda: not any(map(runs, found)))


def test_a_host_without_bcc_says_so_in_one_line() -> None:
    package = bcc_package()
    ran = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', package),
            *(str(RAILSCOPE), "agent", "--once", "--loader", "bcc"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "bcc is not installed" in line
    assert "python3-bpfcc" in line


def test_session_probes_with_bcc_are_refused_in_one_line() -> None:
    ran = subprocess.run(
        [RAILSCOPE, "agent", "--once", "--loader", "bcc", "--probe.enqueue-time", "session"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert "'pair' or 'off'" in line


@contextmanager
def agent_process(*options: str) -> Iterator[subprocess.Popen[str]]:
    """An agent with bcc as its loader; killed at the end, if not before."""
    command = [str(RAILSCOPE), "agent", "--loader", "bcc", "--recordings.directory", "", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as agent:
        try:
            yield agent
        finally:
            agent.kill()


def bcc_package() -> str:
    return subprocess.run(
        [bcc_loader.SYSTEM_PYTHON, "-I", "-c", "import bcc; print(bcc.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def helpers(pid: int) -> list[int]:
    """Children that already run bcc's helper."""
    return [child for child in children(pid) if b"bcc_helper.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def runs(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def objects_of(pid: int) -> set[tuple[int, int]]:
    """BPF programs and maps that a process holds, each as the command that finds it and its number."""
    commands = {"prog_id:": PROG_GET_FD_BY_ID, "map_id:": MAP_GET_FD_BY_ID}
    found = set()
    for file in list(Path(f"/proc/{pid}/fdinfo").iterdir()):
        with suppress(FileNotFoundError):  # of a folder that was listed
            lines = (line.split() for line in file.read_text().splitlines())
            found |= {(commands[line[0]], int(line[1])) for line in lines if line and line[0] in commands}
    return found


def exists(thing: tuple[int, int]) -> bool:
    command, number = thing
    try:
        os.close(bpf(command, struct.pack("<III", number, 0, 0), "find a BPF object"))
    except KernelRefusal as refusal:
        if refusal.errno != errno.ENOENT:
            raise
        return False
    return True


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
