"""Processes are read while they live, die and hide; a mapped file is found by what it is, not by what it is called."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.probes.processes import processes
from railscope.probes.processes.processes import (
    PROCFS,
    AddressSpaces,
    MappedFileError,
    Mapping,
    ProcessIdentity,
    Survey,
    cgroup,
    environ,
    executable_mappings,
    identity_of,
    is_alive,
    mapping_paths,
    open_mapped_file,
    open_pidfd,
    parse_maps,
    pid_namespace,
    process_ids,
    program_mark,
)

MAPS = b"""\
00400000-00401000 r--p 00000000 fe:00 11                                 /opt/train
00401000-00402000 r-xp 00001000 fe:00 11                                 /opt/train
7f0000000000-7f0000001000 r-xp 00000000 00:00 0
7f0000001000-7f0000002000 r-xp 00000000 00:1f 4294967296                 /opt/my libs/lib\\012x.so
7f0000002000-7f0000003000 rwxp 00000000 00:01 77                         /memfd:jit (deleted)
7f0000003000-7f0000004000 r-xs 00000000 103:02 12                        /usr/lib/libnccl.so.2 (deleted)
7f0000004000-7f0000005000 r-xp 00000000 fe:00 11                         /opt/train
7f0000005000-7f0000006000 rw-p 00000000 fe:00 13                         /usr/lib/data.so
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
"""


class SimulatedProcfs:
    """A folder that looks like /proc as far as the readers look."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        pid: int,
        *,
        comm: str = "python",
        start: int = 100,
        size: int = 4096,
        flags: int = 0x400000,
        state: str = "S",
        threads: int = 1,
        stack: int = 0x7FFD00000000,
        ticks: tuple[int, int] = (0, 0),
        maps: bytes = MAPS,
    ) -> None:
        """`ticks`: in user mode and in the kernel."""
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        user, system = map(str, ticks)
        fields = [
            state,
            "1",
            "1",
            "1",
            "0",
            "-1",
            str(flags),
            *["0"] * 4,
            user,
            system,
            *["0"] * 4,
            str(threads),
            "0",
            str(start),
            str(size),
        ]
        fields += [*["0"] * 4, str(stack)]
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)} 0 0\n")
        (folder / "maps").write_bytes(maps)


@pytest.fixture
def procfs(tmp_path: Path) -> SimulatedProcfs:
    return SimulatedProcfs(tmp_path)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A real process that waits until its input closes."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"RANK": "3", "EMPTY": "", "WITH": "a=b"},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_only_executable_mappings_of_files_count_and_each_file_once() -> None:
    found = list(parse_maps(MAPS).values())
    assert [(m.path, m.deleted, m.device, m.inode) for m in found] == [
        ("/opt/train", False, (0xFE, 0), 11),
        ("/opt/my libs/lib\nx.so", False, (0, 0x1F), 1 << 32),
        ("/memfd:jit", True, (0, 1), 77),
        ("/usr/lib/libnccl.so.2", True, (0x103, 2), 12),
    ]
    assert (found[0].start, found[0].end) == (0x401000, 0x402000)


@given(st.binary(max_size=400), st.integers(0, len(MAPS)))
def test_damaged_maps_never_raise(noise: bytes, cut: int) -> None:
    parse_maps(noise)
    assert len(parse_maps(MAPS[:cut] + b"\n" + noise)) <= 9 + noise.count(b"\n")


def test_a_name_with_brackets_and_spaces_does_not_hide_the_start_time(procfs: SimulatedProcfs) -> None:
    procfs.add(7, comm="a) R 1 (b c", start=4242)
    assert identity_of(procfs.root, 7) == ProcessIdentity(7, 4242)


def test_a_pid_used_again_is_another_process(procfs: SimulatedProcfs) -> None:
    procfs.add(7, start=100)
    first = identity_of(procfs.root, 7)
    assert first is not None
    assert is_alive(procfs.root, first)
    procfs.add(7, start=101)
    assert not is_alive(procfs.root, first)


def test_a_zombie_is_dead_unless_other_threads_outlived_the_first(procfs: SimulatedProcfs) -> None:
    procfs.add(7, state="Z")
    procfs.add(8, state="Z", threads=4)
    assert not is_alive(procfs.root, ProcessIdentity(7, 100))
    assert is_alive(procfs.root, ProcessIdentity(8, 100))


def test_a_process_that_is_gone_reads_as_absent_everywhere(procfs: SimulatedProcfs) -> None:
    for root, pid in ((procfs.root, 7), (PROCFS, 2**22 + 1)):
        assert identity_of(root, pid) is None
        assert not is_alive(root, ProcessIdentity(pid, 100))
        assert executable_mappings(root, pid) == []
        assert environ(root, pid) == {}
        assert cgroup(root, pid) is None
        assert pid_namespace(root, pid) is None
    assert open_pidfd(PROCFS, ProcessIdentity(2**22 + 1, 100)) is None


def test_a_garbled_stat_reads_as_absent(procfs: SimulatedProcfs) -> None:
    (procfs.root / "9").mkdir()
    for text in ("", "9 (x", "9 (x) S 1 2", "9 (x) S " + "x " * 30):
        (procfs.root / "9/stat").write_text(text)
        assert identity_of(procfs.root, 9) is None


def test_real_facts_of_a_real_process(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(PROCFS, child.pid)
    assert identity is not None
    assert child.pid in process_ids()
    assert environ(PROCFS, child.pid) == {"RANK": "3", "EMPTY": "", "WITH": "a=b"}
    assert pid_namespace(PROCFS, child.pid) == Path("/proc/self/ns/pid").stat().st_ino
    assert str(Path(sys.executable).resolve()) in {m.path for m in executable_mappings(PROCFS, child.pid)}

    pidfd = open_pidfd(PROCFS, identity)
    assert pidfd is not None
    os.close(pidfd)
    assert open_pidfd(PROCFS, replace(identity, start_time_ticks=1)) is None
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(PROCFS, identity), "a zombie is no running process"
    assert executable_mappings(PROCFS, child.pid) == []


def test_a_process_that_executes_another_program_keeps_its_identity_and_changes_its_mark() -> None:
    program = "import os; print(); input(); os.execv('/bin/sh', ['sh', '-c', 'echo; read line'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        identity = identity_of(PROCFS, child.pid)
        assert identity is not None
        mark = program_mark(PROCFS, identity)
        assert mark == program_mark(PROCFS, identity) is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert identity_of(PROCFS, child.pid) == identity
        assert program_mark(PROCFS, identity) not in (None, mark)
        child.kill()
    assert program_mark(PROCFS, identity) is None


def test_a_program_that_may_not_be_traced_or_is_another_process_s_has_no_mark(procfs: SimulatedProcfs) -> None:
    procfs.add(7, start=4242, stack=0x7FFC1000)
    assert program_mark(procfs.root, ProcessIdentity(7, 4242)) == 0x7FFC1000
    assert program_mark(procfs.root, ProcessIdentity(7, 4241)) is None
    procfs.add(7, start=4242, stack=0)
    assert program_mark(procfs.root, ProcessIdentity(7, 4242)) is None


def test_the_environment_is_read_up_to_its_budget(procfs: SimulatedProcfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_ENVIRON_BYTES", 20)
    procfs.add(7)
    (procfs.root / "7/environ").write_bytes(b"RANK=1\0no equals\0LONG=" + b"x" * 100)
    assert environ(procfs.root, 7) == {"RANK": "1"}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/kubepods.slice/pod1/abc\n", "/kubepods.slice/pod1/abc"),
        ("12:cpu,cpuacct:/\n4:memory:/kubepods/pod1:x/abc\n0::/\n", "/kubepods/pod1:x/abc"),
        ("0::/\n", "/"),
        ("nonsense\n", None),
    ],
)
def test_the_control_group_that_says_most_is_taken(procfs: SimulatedProcfs, text: str, path: str | None) -> None:
    procfs.add(7)
    (procfs.root / "7/cgroup").write_text(text)
    assert cgroup(procfs.root, 7) == path


@contextlib.contextmanager
def mapped_executable(path: Path) -> Iterator[Mapping]:
    """Map a file executable in this very process."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        inode = path.stat().st_ino
        yield next(m for m in executable_mappings(PROCFS, os.getpid()) if m.inode == inode)


def contents(mapping: Mapping) -> bytes:
    fd = open_mapped_file(PROCFS, os.getpid(), mapping)
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "name", ["library.so", "with space .so", "line\nbreak.so", "looks (deleted)", "back\\012slash"]
)
def test_a_mapped_file_is_opened_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"the library")
    with mapped_executable(path) as mapping:
        assert contents(mapping) == b"the library"


@pytest.mark.root
def test_a_deleted_or_replaced_file_is_opened_as_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"old")
    with mapped_executable(path) as mapping:
        path.unlink()
        assert contents(mapping) == b"old"
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").rename(path)
        assert contents(mapping) == b"old"


def test_a_path_that_now_leads_to_a_pipe_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    os.mkfifo(path)
    status = path.stat()
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    with pytest.raises(MappedFileError, match="no longer mapped") as caught:
        open_mapped_file(PROCFS, os.getpid(), Mapping(0x1000, 0x2000, device, status.st_ino, str(path), False))
    assert caught.value.gone


@contextlib.contextmanager
def spare_descriptors(number: int) -> Iterator[None]:
    """So many more files may be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0) for _ in range(number)]
    for fd in spare:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_of_another_disk_with_the_same_number_is_not_opened(procfs: SimulatedProcfs, tmp_path: Path) -> None:
    procfs.add(7)
    path = tmp_path / "library.so"
    path.write_bytes(b"another one")
    status = path.stat()
    here = (os.major(status.st_dev), os.minor(status.st_dev))
    mapping = Mapping(0x1000, 0x2000, here, status.st_ino, str(path), False)
    os.close(open_mapped_file(procfs.root, 7, mapping))
    with pytest.raises(MappedFileError) as caught:
        open_mapped_file(procfs.root, 7, replace(mapping, device=(here[0] + 1, here[1])))
    assert caught.value.gone


def test_too_many_open_files_are_said_and_do_not_look_like_a_file_that_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"the library")
    with mapped_executable(path) as mapping:
        for spare in (1, 2):
            with spare_descriptors(spare):
                if spare == 2:
                    assert contents(mapping) == b"the library"
                    continue
                with pytest.raises(MappedFileError, match="Too many open files: raise the limit") as caught:
                    open_mapped_file(PROCFS, os.getpid(), mapping)
                assert not caught.value.gone


def test_a_gone_process_is_said_to_be_gone() -> None:
    with pytest.raises(MappedFileError, match="has ended") as caught:
        open_mapped_file(PROCFS, 2**22 + 1, Mapping(0x1000, 0x2000, (9, 9), 1, "/none/li\nb.so", False))
    assert caught.value.gone
    assert "\n" not in str(caught.value)


@pytest.mark.root
def test_without_privileges_the_missing_capability_is_named(child: subprocess.Popen[bytes]) -> None:
    mapping = replace(executable_mappings(PROCFS, child.pid)[0], path="/gone/library.so")
    script = (
        "import os\n"
        "from railscope.probes.processes.processes import *\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"try: open_mapped_file(PROCFS, {child.pid}, {mapping!r})\n"
        "except MappedFileError as error: print(error, error.gone)\n"
        f"print(executable_mappings(PROCFS, {child.pid}), environ(PROCFS, {child.pid}))\n"
        "print(unreadable_processes() > 0)\n"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    first, *rest = output.splitlines()
    assert "grant railscope CAP_SYS_PTRACE and CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE False" in first
    assert rest == ["[] {}", "True"]


def due(surveyed: Survey) -> list[int]:
    return [identity.pid for identity in surveyed.due]


def test_a_survey_passes_over_kernel_threads(procfs: SimulatedProcfs) -> None:
    procfs.add(2, flags=0x208040, maps=b"", size=0)
    procfs.add(7)
    procfs.add(8)
    survey = AddressSpaces(procfs.root).survey()
    assert due(survey) == [7, 8]
    assert {identity.pid for identity in survey.living} == {7, 8}


def test_the_processes_that_have_worked_most_are_looked_at_first(procfs: SimulatedProcfs) -> None:
    """A job's ranks, and then the hundreds that map the same library and rest."""
    for pid, ticks in ((5, (0, 0)), (6, (10, 5)), (7, (3, 900)), (8, (0, 0)), (9, (500, 1))):
        procfs.add(pid, ticks=ticks)
    assert due(AddressSpaces(procfs.root).survey()) == [7, 9, 6, 5, 8]


def test_an_unchanged_process_is_not_due_until_its_turn_or_until_it_is_asked_for(procfs: SimulatedProcfs) -> None:
    procfs.add(7)
    spaces = AddressSpaces(procfs.root)
    identity = spaces.survey().due[0]
    assert due(spaces.survey()) == []
    spaces.again(identity)
    turns = [due(spaces.survey()) for _ in range(processes.FULL_SCAN_EVERY + 1)]
    assert turns == [[7], *[[]] * (processes.FULL_SCAN_EVERY - 1), [7]]


def test_a_grown_a_new_and_a_replaced_process_are_due_at_once(procfs: SimulatedProcfs) -> None:
    procfs.add(7)
    spaces = AddressSpaces(procfs.root)
    spaces.survey()
    procfs.add(7, size=8192)
    assert due(spaces.survey()) == [7]
    procfs.add(7, size=8192, start=200)
    assert due(spaces.survey()) == [7]
    procfs.add(8)
    assert due(spaces.survey()) == [8]
    shutil.rmtree(procfs.root / "7")
    assert {identity.pid for identity in spaces.survey().living} == {8}


@pytest.mark.root
def test_a_file_that_is_mapped_through_an_overlay_is_opened_whatever_path_leads_to_it(tmp_path: Path) -> None:
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    (lower / "library.so").write_bytes(b"the library")
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        with mapped_executable(merged / "library.so") as mapping:
            assert contents(mapping) == b"the library"
            assert contents(replace(mapping, path="/elsewhere")) == b"the library"
    finally:
        subprocess.run(["umount", str(merged)], check=True)


@pytest.mark.root
def test_a_file_of_a_process_with_a_root_and_mounts_of_its_own_is_found_below_that_root(tmp_path: Path) -> None:
    maps_a_file = (
        "import mmap, os, sys, time\n"
        "os.chroot(sys.argv[1])\n"
        "library = os.open('/library.so', os.O_RDONLY)\n"
        "mapped = mmap.mmap(library, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)\n"
        "print('mapped', flush=True)\n"
        "time.sleep(60)\n"
    )
    own_mounts = 'mount -t tmpfs tmpfs "$1" && echo "the library" >"$1/library.so" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", own_mounts, "sh", str(tmp_path), sys.executable, maps_a_file]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
            mappings = executable_mappings(PROCFS, process.pid)
            mapping = next(one for one in mappings if one.path.endswith("/library.so"))
            as_we_see_it, as_it_sees_it, _ = mapping_paths(PROCFS, process.pid, mapping)
            assert not Path(as_we_see_it).exists()
            assert Path(as_it_sees_it).stat().st_ino == mapping.inode
            assert Path(as_it_sees_it).read_bytes() == b"the library\n"
        finally:
            process.kill()
