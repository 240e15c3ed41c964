"""Opening below a root: openat2 where there is one, and the same by hand where systemd forbids it."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from railscope.probes.processes import open_below as module
from railscope.probes.processes.open_below import open_below, walk_below

DESCRIPTORS = Path("/proc/self/fd")
LINKS = {
    "absolute": "/a/file",
    "up": "../../../../a/file",
    "loop": "loop",
    "folder": "a/b",
    "a/back": "..",
    "a/b/down": "../../a/b/file",
    "slash": "a/b/",
    "to_file_slash": "a/file/",
    "dangling": "/nowhere",
    "chain": "absolute",
    "out": "/../../../etc/hostname",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("root")
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/file").write_text("a")
    (folder / "a/b/file").write_text("b")
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    (folder.parent / "secret").write_text("outside")
    descriptor = os.open(folder, os.O_PATH)
    yield descriptor
    os.close(descriptor)


def result(function: object, root: int, path: str, flags: int) -> object:
    """The file that was opened, or the error."""
    assert callable(function)
    try:
        descriptor: int = function(root, path, flags)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    try:
        state = os.fstat(descriptor)
        return state.st_dev, state.st_ino
    finally:
        os.close(descriptor)


NAMES = st.sampled_from(["a", "b", "file", "..", ".", "", "nowhere", *(link.rpartition("/")[2] for link in LINKS)])


@given(names=st.lists(NAMES, min_size=1, max_size=7), flags=st.sampled_from([os.O_PATH, os.O_RDONLY]))
@example(names=["", ""], flags=os.O_RDONLY)
@example(names=["to_file_slash"], flags=os.O_PATH)
@example(names=["a", "file", "."], flags=os.O_PATH)
@example(names=["a", "file", ".."], flags=os.O_PATH)
@example(names=["dangling", ".."], flags=os.O_PATH)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_walk_opens_what_openat2_opens(root: int, names: list[str], flags: int) -> None:
    before = len(list(DESCRIPTORS.iterdir()))
    path = "/".join(names)
    assert result(walk_below, root, path, flags) == result(open_below, root, path, flags)
    assert len(list(DESCRIPTORS.iterdir())) == before


def test_where_openat2_is_forbidden_the_walk_takes_its_place(root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden:
        @staticmethod
        def syscall(*_: object) -> int:
            ctypes.set_errno(errno.ENOSYS)
            return -1

        fstatfs = staticmethod(module._libc.fstatfs)

    expected = result(open_below, root, "chain", os.O_PATH)
    monkeypatch.setattr(module, "_libc", Forbidden)
    assert result(open_below, root, "chain", os.O_PATH) == expected
    assert result(open_below, root, "../secret", os.O_PATH) == "ENOENT"


@pytest.mark.parametrize("path", ["self/root/etc", "self/exe", "self/cwd", "self/fd/0"])
def test_a_link_of_proc_leads_nowhere(path: str) -> None:
    proc = os.open("/proc", os.O_PATH)
    try:
        for function in (open_below, walk_below):
            assert result(function, proc, path.replace("self", str(os.getpid())), os.O_PATH) == "ELOOP"
    finally:
        os.close(proc)


def test_a_path_that_is_too_long_is_an_error(root: int) -> None:
    assert result(walk_below, root, "a/../" * 1000, os.O_PATH) == "ENAMETOOLONG"
    assert result(open_below, root, "a/../" * 1000, os.O_PATH) == "ENAMETOOLONG"


def test_a_folder_is_opened_and_nothing_above_the_root(root: int) -> None:
    for path in ("/", "..", "a/back", "../..", "out/.."):
        assert result(walk_below, root, path, os.O_PATH) == result(open_below, root, path, os.O_PATH)
