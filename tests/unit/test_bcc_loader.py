"""The second loader without bcc: what a helper that fails in one way or another is told as."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from railscope.probes.loading import bcc_loader
from railscope.probes.loading.bcc_helper import NO_BCC
from railscope.probes.loading.libbpf import LoadError

SOURCE = """
char _license[] SEC("license") = "GPL";
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} totals SEC(".maps");
SEC("uprobe")
int on_entry(void *ctx)
{
	return 0;
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "some.bpf.c"
    path.write_text(SOURCE)
    return path


def refusal(source: Path, python: Path, program: str = "on_entry") -> str:
    with pytest.raises(LoadError) as caught:
        bcc_loader.load(
            source, attach_types={program: 0}, map_entries={}, constants=b"", architecture="x86", python=python
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def interpreter(folder: Path, script: str) -> Path:
    """Stands in for the system's Python; it is given `-I HELPER SOCKET`."""
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_host_without_bcc_is_told_what_to_install(source: Path, tmp_path: Path) -> None:
    for python in (tmp_path / "nowhere", interpreter(tmp_path, f"exit {NO_BCC}")):
        assert "install python3-bpfcc (Debian, Ubuntu)" in refusal(source, python)
        assert bcc_loader.installed_version(python) is None


def test_a_package_of_that_name_that_is_not_the_compiler_counts_as_none(source: Path, tmp_path: Path) -> None:
    (tmp_path / "bcc.py").write_text("__version__ = '9.9'\n")
    python = interpreter(tmp_path, f'shift; PYTHONPATH={tmp_path} exec {sys.executable} "$@"')
    assert "install python3-bpfcc" in refusal(source, python)
    assert bcc_loader.installed_version(python) is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("warning: odd\n/virtual/main.c:7:2: error: no such thing\nException: Failed to compile", "no such thing"),
        ("LLVM ERROR: line 306: Invalid usage", "Invalid usage"),
        ("Traceback (most recent call last):\nOSError: libbcc.so.0: cannot open", "libbcc.so.0: cannot open"),
        ("could not open bpf map: stats, error: Operation not permitted", "CAP_BPF"),
        ("Exception: Need super-user privileges to run", "CAP_BPF"),
        ("could not open bpf map: stats, error: Function not implemented", "CONFIG_BPF_SYSCALL"),
        ("", "status 1"),
    ],
)
def test_the_reason_is_the_line_that_says_most(source: Path, tmp_path: Path, said: str, told: str) -> None:
    (tmp_path / "said").write_text(said)
    line = refusal(source, interpreter(tmp_path, f"cat > /dev/null; cat {tmp_path}/said >&2; exit 1"))
    assert told in line


def test_a_helper_that_hands_over_nothing_is_noticed_and_leaves_no_descriptor(source: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "exit 0")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert "were lost" in refusal(source, python)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


ANSWERING = """
import json, os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1:] * 2)
maps, handed_over = int(sys.argv[2]), int(sys.argv[3])
names = {"programs": ["on_entry"], "maps": [f"map{n}" for n in range(maps)]}
descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(handed_over)]
with socket.socket(fileno=int(sys.argv[1])) as channel:
    socket.send_fds(channel, [json.dumps(names).encode()], descriptors)
"""


def answering(folder: Path, maps: int, handed_over: int) -> Path:
    """A helper that names one program and so many maps, and hands over so many descriptors."""
    (folder / "helper.py").write_text(ANSWERING)
    return interpreter(folder, f'cat > /dev/null; exec {sys.executable} {folder}/helper.py "$3" {maps} {handed_over}')


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_a_helper_hands_over_is_taken_by_name(source: Path, tmp_path: Path) -> None:
    before = open_descriptors()
    loaded = bcc_loader.load(
        source,
        attach_types={"on_entry": 0},
        map_entries={},
        constants=b"",
        architecture="x86",
        python=answering(tmp_path, maps=2, handed_over=3),
    )
    assert (set(loaded.program_fds), set(loaded.map_fds)) == ({"on_entry"}, {"map0", "map1"})
    loaded.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("handed_over", [1, 2, 4])
def test_descriptors_that_do_not_fit_what_is_named_are_closed_again(
    source: Path, tmp_path: Path, handed_over: int
) -> None:
    before = open_descriptors()
    assert "were lost" in refusal(source, answering(tmp_path, maps=2, handed_over=handed_over))
    assert open_descriptors() == before


def test_descriptors_that_there_was_no_room_for_are_told_with_the_limit_to_raise(source: Path, tmp_path: Path) -> None:
    before, (soft, hard) = open_descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    python = answering(tmp_path, maps=200, handed_over=201)
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    room_for_60 = next(limit for limit in range(hard) if limit - sum(one < limit for one in taken) == 60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (room_for_60, hard))
    try:
        assert "is the limit on open files (ulimit -n) too low?" in refusal(source, python)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() == before


def test_a_helper_that_hangs_is_ended(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcc_loader, "_TIMEOUT_SECONDS", 0.2)
    assert "did not load some.bpf.c within 0.2 s" in refusal(source, interpreter(tmp_path, "exec sleep 60"))


def test_a_source_that_is_missing_or_strange_is_named(source: Path, tmp_path: Path) -> None:
    assert "nowhere.bpf.c" in refusal(tmp_path / "nowhere.bpf.c", Path("/bin/false"))
    assert "on_return" in refusal(source, Path("/bin/false"), program="on_return")
    source.write_text(SOURCE.replace("BPF_MAP_TYPE_ARRAY", "BPF_MAP_TYPE_XSKMAP"))
    assert "totals (BPF_MAP_TYPE_XSKMAP)" in refusal(source, Path("/bin/false"))
