"""Unpacking the kit on a bare machine, and the lane's limits; no GPU and no kit is needed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.gpu.table import Verdict, read_results
from tests.gpu.unpack import MANIFEST, UnpackError, source_digest, unpack
from tests.nccl.library import REPOSITORY


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    source = tmp_path / "checkout/agent/module.py"
    source.parent.mkdir(parents=True)
    source.write_text("print()\n")
    source.with_name("__init__.py").touch()
    return tmp_path / "checkout"


def deb(folder: Path, name: str, members: dict[str, bytes | str]) -> None:
    """A Debian package of these files; a text is what a symbolic link points to."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for path, content in members.items():
            info = tarfile.TarInfo(path)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    packed = b"!<arch>\n"
    for member, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data.getvalue())):
        packed += f"{member:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        packed += b"\n" * (len(content) % 2)
    (folder / name).write_bytes(packed)


@pytest.fixture
def kit(tmp_path: Path, checkout: Path) -> Path:
    kit = tmp_path / "kit"
    for name in ("wheels", "debs", "stamps"):
        (kit / name).mkdir(parents=True)
    with zipfile.ZipFile(kit / "wheels/one-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "ONE = 1\n")
    deb(
        kit / "debs",
        "iproute2_1_amd64.deb",
        {
            "./bin/ip": b"the tool",
            "./sbin/tc": b"another",
            "./sbin/ip": "/bin/ip",
            "./usr/share/ip": b"not this",
            "./usr/lib/libx.so.1": "libx.so.1.2",
            "./usr/lib/libx.so.1.2": b"a library",
        },
    )
    (kit / "stamps/offsets.json").write_text("{}")
    files = {str(path.relative_to(kit)): path for path in kit.rglob("*") if path.is_file()}
    manifest = {
        "revision": "abc",
        "sources": source_digest(checkout),
        "files": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
    }
    (kit / MANIFEST).write_text(json.dumps(manifest))
    return kit


def test_the_kit_lies_where_python_the_loader_and_the_shell_find_it(kit: Path, checkout: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    assert unpack(kit, to, checkout) == "abc"
    assert (to / "site/one/__init__.py").read_text() == "ONE = 1\n"
    assert (to / "lib/libx.so.1").read_bytes() == b"a library"
    assert (to / "lib/ip").read_bytes() == b"the tool"
    assert (to / "bin/tc").read_text().endswith(f'--library-path {to}/lib {to}/lib/tc "$@"\n')
    assert all(os.access(to / "bin" / tool, os.X_OK) for tool in ("ip", "tc"))
    assert (to / "stamps/offsets.json").exists()


def test_a_kit_that_is_missing_damaged_or_older_than_the_sources_is_refused(
    kit: Path, checkout: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnpackError, match=r"nowhere is missing: run 'make gpu-kit'"):
        unpack(tmp_path / "nowhere", tmp_path / "1", checkout)
    (checkout / "agent/module.py").write_text("print(2)\n")
    with pytest.raises(UnpackError, match="made of other sources"):
        unpack(kit, tmp_path / "2", checkout)
    (kit / "stamps/offsets.json").write_text("[]")
    with pytest.raises(UnpackError, match=r"offsets\.json is missing or damaged"):
        unpack(kit, tmp_path / "3", checkout)


SLEEPER = """
import subprocess
def run(lane):
    lane.rows.figure("before", 1.0)
    subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("import time; time.sleep(300)", "did not end within 2 s"),
        ("raise ValueError('no such GPU')", "status 1: ValueError: no such GPU"),
        ("import os; os.abort()", "status -6: "),
    ],
    ids=["hangs", "fails", "dies"],
)
def test_a_check_that_hangs_fails_or_dies_keeps_its_rows_and_leaves_no_process(
    tmp_path: Path, then: str, said: str
) -> None:
    checks = tmp_path / "stand_in_checks"
    checks.mkdir()
    mark = f"300.{os.getpid()}{secrets.randbelow(10**6):06}"
    (checks / "machine.py").write_text(SLEEPER.format(mark=mark, then=then))
    (checks / "nvml.py").write_text('def run(lane):\n    lane.rows.compared("after it", 1, 1)\n')
    command = [sys.executable, "-P", "-m", "tests.gpu.lane", "--only", "machine", "nvml", "--backend", "simulated"]
    command += ["--out", str(tmp_path / "out"), "--package", checks.name, "--seconds", "2", "--kit", str(tmp_path)]
    path = f"{tmp_path}:{REPOSITORY}"
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    results = read_results(tmp_path / "out/results.json")
    by_check = {check: [row for row in results.rows if row.check == check] for check in ("machine", "nvml")}
    before, failed, took = by_check["machine"]
    assert (before.what, before.value) == ("before", 1.0)
    assert (failed.verdict, took.what) == (Verdict.FAILED, "took, s")
    assert failed.seen.startswith(said)
    assert by_check["nvml"][0].verdict is Verdict.OK, "the next check runs all the same"
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith("1 ok, 3 seen, 1 failed")
    assert not any(mark in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
