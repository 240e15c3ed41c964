"""One file on disk is known again through every mount, and two files are never taken for one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.probes.libraries.files import FileStamp, LibraryKey, file_stamp, library_key, same_library

STAMP = FileStamp(device=1, inode=55, size_bytes=10, modified_ns=7, changed_ns=8)
LOWER = LibraryKey(STAMP, build_id="ab", overlay=False, first_extent=(4096, 1))


def through_overlay(**changes: int) -> LibraryKey:
    return replace(LOWER, stamp=replace(STAMP, device=9, **changes), overlay=True)


def test_a_library_is_known_again_through_an_overlay_but_two_files_stay_two() -> None:
    assert same_library(LOWER, LOWER)
    assert same_library(LOWER, through_overlay())
    assert same_library(through_overlay(), LOWER)
    assert same_library(LOWER, through_overlay(inode=55 | 1 << 62)), "the layer's number stands in the upper bits"
    assert not same_library(LOWER, replace(LOWER, stamp=replace(STAMP, device=2))), "equal numbers on two file systems"
    for other in (
        through_overlay(inode=56),
        through_overlay(size_bytes=11),
        through_overlay(modified_ns=8),
        replace(through_overlay(), build_id="cd"),
    ):
        assert not same_library(LOWER, other)


def test_a_copied_up_file_is_another_one_unless_its_data_are_the_originals() -> None:
    changed = through_overlay(changed_ns=9)
    assert same_library(LOWER, changed), "only its rights were copied up"
    for elsewhere in ((8192, 1), (0, 6), None):
        assert not same_library(LOWER, replace(changed, first_extent=elsewhere))
        assert not same_library(replace(changed, first_extent=elsewhere), LOWER)
    nowhere = replace(LOWER, first_extent=None)
    assert same_library(nowhere, replace(changed, first_extent=None)), "nothing tells"


@contextmanager
def overlay(folder: Path, options: str = "") -> Iterator[tuple[Path, Path]]:
    """A lower folder with a library in it, and how an overlay shows it."""
    for name in ("lower", "upper", "work", "merged"):
        (folder / name).mkdir()
    lower, merged = folder / "lower", folder / "merged"
    (lower / "library.so").write_bytes(b"the library" * 1000)
    layers = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work{options}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, merged], check=True)
    try:
        yield lower / "library.so", merged / "library.so"
    finally:
        subprocess.run(["umount", merged], check=True)


def key_of(path: Path) -> LibraryKey:
    with path.open("rb") as file:
        return library_key(file.fileno(), "ab")


@pytest.mark.root
def test_a_real_overlay_shows_the_lower_file_as_the_same_library(tmp_path: Path) -> None:
    with overlay(tmp_path) as (original, shown):
        keys = key_of(original), key_of(shown)
        assert [key.overlay for key in keys] == [False, True]
        assert keys[0].stamp.device != keys[1].stamp.device
        assert same_library(*keys)


@pytest.mark.root
@pytest.mark.parametrize(("options", "same"), [(",metacopy=off", False), (",metacopy=on", True)])
def test_a_real_overlay_tells_a_copied_up_file_from_one_whose_rights_were_copied_up(
    tmp_path: Path, options: str, same: bool
) -> None:
    with overlay(tmp_path, options) as (original, shown):
        shown.chmod(0o700)
        assert same_library(key_of(original), key_of(shown)) == same


def test_a_stamp_tells_a_file_that_was_written_over_even_where_its_times_are_set_back(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"one")
    before = file_stamp(str(path))
    assert file_stamp(str(path)) == before
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(before.modified_ns, before.modified_ns))
    assert file_stamp(str(path)) != before
