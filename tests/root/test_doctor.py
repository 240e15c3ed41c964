"""The doctor on a real kernel: what it finds is compared with what is there."""

from __future__ import annotations

import errno
import io
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.config.options import Config
from railscope.agent.doctor.command import run_doctor
from railscope.agent.doctor.probes import MODES, trial_settings, try_mode
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.libbpf import LoadError
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import LIBRARY, Job, JobOptions
from railscope.testbed.nccl.library import NCCL_VERSION, LibraryMissing, nccl_library
from tests.nccl.library import copy_with_another_build_id

pytestmark = pytest.mark.root

NOBODY = 65534


def diagnose(config: Config | None = None) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    status = run_doctor(config or Config(), as_json=True, out=out)
    return status, json.loads(out.getvalue())


def findings_of(found: dict[str, Any], check: str) -> list[dict[str, str]]:
    return [finding for finding in found["findings"] if finding["check"] == check]


@contextmanager
def process_with(library: Path) -> Iterator[int]:
    """A process that has a library mapped, and does nothing with it."""
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.stdin.close()


def test_counting_works_here_and_is_exact() -> None:
    _, found = diagnose()
    for check in (
        "bpf(2)",
        "ring buffer",
        "attach cookies",
        "libbpf",
        "BPF objects",
        "probes",
        "mapping events",
        "stop signals",
    ):
        (finding,) = findings_of(found, check)
        assert finding["status"] == "ok", finding


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.check.replace(" ", "-"))
def test_a_mode_that_loads_counts_every_call(mode: Any) -> None:
    try:
        trial = try_mode(trial_settings(mode.attach, mode.enqueue_time))
    except (LoadError, KernelRefusal) as error:
        pytest.skip(f"this kernel has no {mode.check}: {error}")
    assert (trial.attach, trial.enqueue_time) == (mode.attach, mode.enqueue_time)
    assert trial.exact, trial


def test_what_is_forced_is_what_is_tried() -> None:
    _, found = diagnose(Config(probe_attach="perf"))
    (finding,) = findings_of(found, "probes")
    assert "the agent uses perf event links" in finding["what"]


def open_files() -> list[str]:
    return sorted(file.name for file in Path("/proc/self/fd").iterdir())


def test_trials_leave_nothing_open() -> None:
    settings = trial_settings(AttachKind.MULTI, EnqueueTime.OFF)
    try_mode(settings)
    before = open_files()
    try_mode(settings)
    assert open_files() == before


def test_the_real_library_is_found_with_version_layout_and_processes() -> None:
    try:
        library = nccl_library()
    except LibraryMissing as missing:
        pytest.skip(str(missing))
    with process_with(library), process_with(library):
        _, found = diagnose()
    reports = [report for report in found["libraries"] if report["path"] == str(library)]
    (report,) = reports
    assert report["nccl_version"] == NCCL_VERSION
    assert report["layout_source"] == "build-id"
    assert report["through"] == "ncclEnqueueCheck"
    assert report["processes"] >= 2
    assert report["refused_functions"] == []
    assert report["attach"] == "accepted"
    (finding,) = [f for f in findings_of(found, "NCCL library") if str(library) in f["what"]]
    assert finding["status"] == "ok"


def test_a_library_s_path_says_nothing_to_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\n\u202egnp.b"
    folder.mkdir()
    library = folder / "libnccl.so.2"
    shutil.copy(LIBRARY, library)
    with process_with(library):
        text = io.StringIO()
        run_doctor(Config(), as_json=False, out=text)
        _, found = diagnose()
    assert "gnp.b" in text.getvalue()
    assert all(line.isprintable() for line in text.getvalue().split("\n"))
    (report,) = [one for one in found["libraries"] if "gnp.b" in one["path"]]
    assert report["path"].isprintable()


def test_processes_with_nccl_are_told_with_user_and_program_and_arguments_only_where_asked_for() -> None:
    try:
        library = nccl_library()
    except LibraryMissing as missing:
        pytest.skip(str(missing))
    with process_with(library) as pid:
        _, found = diagnose()
        out = io.StringIO()
        run_doctor(Config(), as_json=True, out=out, command_lines=True)
    (process,) = [one for one in found["processes"] if one["pid"] == pid]
    assert (process["user"], process["command_line"]) == (pwd.getpwuid(os.geteuid()).pw_name, None)
    assert process["program"] == f"{Path(sys.executable).name} -c"
    assert process["cpu_ratio"] < 1
    assert any(finding["what"].startswith(f"process {pid} of ") for finding in findings_of(found, "process"))
    (asked,) = [one for one in json.loads(out.getvalue())["processes"] if one["pid"] == pid]
    assert asked["command_line"].endswith(f" {library}")


@pytest.mark.nccl
def test_a_version_that_does_not_tell_of_completion_and_a_build_that_is_not_listed_are_said_to_be(
    tmp_path: Path,
) -> None:
    old, stranger = nccl_library("2.21.5"), tmp_path / "libnccl.so.2"
    copy_with_another_build_id(nccl_library(), stranger)
    with process_with(old), process_with(stranger):
        _, found = diagnose()
    reports = {report["path"]: report for report in found["libraries"]}
    assert (reports[str(old)]["layout_source"], reports[str(stranger)]["layout_source"]) == ("build-id", "accessors")
    assert (reports[str(old)]["highest_level"], reports[str(stranger)]["highest_level"]) == ("all", "counts")
    of_old, of_stranger = (
        next(finding for finding in findings_of(found, "NCCL library") if finding["what"].startswith(f"{path}: "))
        for path in (old, stranger)
    )
    assert ", level counts to all, " in of_old["what"]
    assert ", level counts, " in of_stranger["what"]
    assert "completion is not observed: it lacks the functions" in of_old["what"]
    assert (of_old["status"], of_old["remedy"]) == ("note", "")
    assert "are known for listed builds only, and this build is not listed" in of_stranger["what"]
    assert "railscope.probes.nccl.layouts.dwarf" in of_stranger["remedy"]


def test_attaching_is_not_tried_where_it_would_touch_the_job() -> None:
    with process_with(LIBRARY):
        _, found = diagnose(Config(probe_attach="perf"))
    (report,) = [report for report in found["libraries"] if report["path"] == str(LIBRARY)]
    assert report["attach"] == "not tried"
    (finding,) = [f for f in findings_of(found, "NCCL library") if str(LIBRARY) in f["what"]]
    assert finding["status"] == "note"


def test_a_library_on_which_the_kernel_takes_no_probe_is_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise KernelRefusal(errno.EPERM, "simulated refusal")

    monkeypatch.setattr(NcclPrograms, "attach", refused)
    with process_with(LIBRARY):
        status, found = diagnose()
    (report,) = [report for report in found["libraries"] if report["path"] == str(LIBRARY)]
    assert (report["attach"], "simulated refusal" in report["attach_refusal"]) == ("refused", True)
    (finding,) = [f for f in findings_of(found, "NCCL library") if str(LIBRARY) in f["what"]]
    assert finding["status"] == "problem"
    assert "simulated refusal" in finding["what"]
    assert status == 1


def test_named_processes_without_nccl_are_the_problem() -> None:
    _, found = diagnose(Config(pids=(os.getpid(),)))
    (finding,) = [finding for finding in findings_of(found, "processes") if "--pid: " in finding["what"]]
    assert finding["status"] == "problem"
    assert str(os.getpid()) in finding["what"]


@pytest.mark.fabric
def test_a_rail_that_a_job_uses_and_that_is_switched_off_is_the_problem() -> None:
    options = JobOptions(iterations=1, hold=True, environment={"NCCL_SOCKET_IFNAME": "rail"})
    with Fabric(hosts=2, rails=2) as fabric, Job(fabric.hosts, options) as job:
        inodes = [Path(f"/run/netns/{host.namespace}").stat().st_ino for host in fabric.hosts]
        fabric.set_link(1, 1, up=False)
        status, found = diagnose()
        job.stop()
    rails = {(rail["netns"], rail["device"]): rail for rail in found["rails"] if rail["rail"] is not None}
    assert rails[inodes[0], "rail0"]["rail"] == "0"
    assert rails[inodes[0], "rail1"]["up"] is True
    assert rails[inodes[1], "rail1"]["up"] is False
    assert rails[inodes[1], "rail1"]["reason"] == "NCCL_SOCKET_IFNAME=rail"
    place = f"rail1 in namespace {fabric.hosts[1].namespace}"
    (finding,) = [f for f in findings_of(found, "rail") if place in f["what"]]
    assert finding["status"] == "problem"
    assert finding["remedy"].endswith("ip link set rail1 up")
    assert status == 1


def test_without_rights_the_doctor_says_what_is_missing_and_ends_with_1() -> None:
    here = Path(__file__).resolve()
    if closed := [folder for folder in here.parents if not folder.stat().st_mode & stat.S_IXOTH]:
        pytest.skip(f"{closed[0]} is closed to other users: run the tests from a checkout that others may enter")
    script = (
        "import io, os, sys\n"
        "from railscope.agent.config.options import Config\n"
        "from railscope.agent.doctor.command import run_doctor\n"
        # Once as root, so that everything is imported: the interpreter may lie where only root can read.
        "run_doctor(Config(), as_json=True, out=io.StringIO())\n"
        f"os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)\n"
        "sys.exit(run_doctor(Config(), as_json=True, out=sys.stdout))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, text=True)
    assert "Traceback" not in result.stderr
    assert result.returncode == 1
    found = json.loads(result.stdout)
    statuses = {finding["check"]: finding["status"] for finding in found["findings"]}
    for check in ("CAP_BPF", "CAP_PERFMON", "probes", "processes"):
        assert statuses[check] == "problem"
    for finding in found["findings"]:
        if finding["status"] == "problem":
            assert "sudo railscope doctor" in finding["remedy"] or finding["check"] == "rail"
