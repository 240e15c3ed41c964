"""The doctor's findings about simulated hosts, its two forms of output, and its exit status."""

from __future__ import annotations

import errno
import io
import json
import re
from pathlib import Path
from typing import Final

import pytest

from railscope.agent.config.options import Config
from railscope.agent.config.rail_patterns import parse_rail_pattern
from railscope.agent.doctor import command as doctor
from railscope.agent.doctor import probes
from railscope.agent.doctor.command import Examination, as_json_text, as_text, run_doctor
from railscope.agent.doctor.findings import Finding, LibraryReport, RailReport, Status, privilege_remedy, run_guarded
from railscope.agent.doctor.host import (
    CAPABILITIES,
    check_devices,
    check_kernel,
    check_pid_namespace,
    check_privileges,
    check_settings,
    check_state,
)
from railscope.agent.doctor.probes import Trial, check_probes, configured_settings
from railscope.agent.doctor.rails import check_rails
from railscope.probes.clock import SystemClock
from railscope.probes.libraries.mmap_events import MmapEventsError
from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.libbpf import OBJECTS, LoadError
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.programs.calls import EnqueueTime, ProgramSettings
from railscope.probes.processes.namespaces import NamespaceDenied
from railscope.probes.processes.processes import MappedFileError

REPOSITORY: Final = Path(__file__).resolve().parents[2]
BPF, PERFMON, SYS_ADMIN, SYS_PTRACE, DAC_READ_SEARCH, DAC_OVERRIDE = 39, 38, 21, 19, 2, 1

LIBRARY = LibraryReport(
    *("/usr/lib/libnccl.so.2", "2.27.7", "build-id", "ncclEnqueueCheck", 10, (), 8, "accepted", "", "rails", True, ""),
    failover="not in this version, but from 2.29.7 on",
)
RAIL = RailReport(4026531840, True, "eth2", "0", "configured: eth2", "physical", True, True, 25_000_000_000)


def procfs_with(tmp_path: Path, *capabilities: int) -> Path:
    (tmp_path / "self").mkdir()
    mask = sum(1 << bit for bit in capabilities)
    (tmp_path / "self/status").write_text(f"Name:\tpython3\nCapPrm:\t0\nCapEff:\t{mask:016x}\nCapBnd:\t0\n")
    return tmp_path


def statuses(findings: list[Finding]) -> dict[str, Status]:
    return {finding.check: finding.status for finding in findings}


def examination(*findings: Finding) -> Examination:
    return Examination("0.1.0", "6.12.0", findings, (LIBRARY,), (RAIL,))


@pytest.mark.parametrize("release", ["5.14.0-503.11.1.el9_5.x86_64", "5.15.0-91-generic", "6.1.0-18-amd64", "strange"])
def test_no_version_of_a_kernel_is_a_problem_as_distributions_backport(release: str) -> None:
    assert statuses(check_kernel(release, "x86_64"))["kernel"] == "ok"


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EINVAL, "boot Linux 5.15 or newer"), (errno.EPERM, privilege_remedy())]
)
def test_a_refused_helper_is_a_problem_of_the_kernel_and_a_refused_right_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, remedy: str
) -> None:
    """Simulated: the kernel refuses every program."""

    def refuse(_command: int, _attributes: bytes, what: str) -> int:
        raise KernelRefusal(number, what)

    monkeypatch.setattr(probes, "bpf", refuse)
    found = {one.check: one for one in probes.check_probes(Config(), tmp_path)}
    assert found["attach cookies"].status == "problem"
    assert remedy in found["attach cookies"].remedy


def test_a_processor_without_programs_is_a_problem_that_names_those_with() -> None:
    (finding,) = [finding for finding in check_kernel("6.12.0", "riscv64") if finding.check == "processor"]
    assert finding.status == "problem"
    assert "x86_64 or aarch64" in finding.remedy


def test_every_missing_capability_says_what_is_lost_and_how_to_get_it(tmp_path: Path) -> None:
    findings = check_privileges(procfs_with(tmp_path))
    assert statuses(findings) == {
        "CAP_BPF": "problem",
        "CAP_PERFMON": "problem",
        "CAP_SYS_ADMIN": "note",
        "CAP_SYS_PTRACE": "problem",
        "CAP_DAC_READ_SEARCH": "problem",
    }
    for finding in findings:
        assert f"AmbientCapabilities={finding.check}" in finding.remedy
        assert finding.remedy.endswith(f"in a pod: capabilities: {{add: [{finding.check.removeprefix('CAP_')}]}}")
        assert "without it: " in finding.what


def test_capabilities_that_are_there_are_ok(tmp_path: Path) -> None:
    procfs = procfs_with(tmp_path, BPF, PERFMON, SYS_ADMIN, SYS_PTRACE, DAC_READ_SEARCH)
    assert set(statuses(check_privileges(procfs)).values()) == {"ok"}


def test_sys_admin_stands_in_for_bpf_and_perfmon_only(tmp_path: Path) -> None:
    found = statuses(check_privileges(procfs_with(tmp_path, SYS_ADMIN)))
    assert (found["CAP_BPF"], found["CAP_PERFMON"]) == ("ok", "ok")
    assert (found["CAP_SYS_PTRACE"], found["CAP_DAC_READ_SEARCH"]) == ("problem", "problem")


def test_dac_override_stands_in_for_dac_read_search(tmp_path: Path) -> None:
    assert statuses(check_privileges(procfs_with(tmp_path, DAC_OVERRIDE)))["CAP_DAC_READ_SEARCH"] == "ok"


def test_capability_numbers_are_the_kernels() -> None:
    assert {capability.name: capability.bit for capability in CAPABILITIES} == {
        "CAP_BPF": BPF,
        "CAP_PERFMON": PERFMON,
        "CAP_SYS_ADMIN": SYS_ADMIN,
        "CAP_SYS_PTRACE": SYS_PTRACE,
        "CAP_DAC_READ_SEARCH": DAC_READ_SEARCH,
    }


def test_settings_are_told_as_notes_with_their_values(tmp_path: Path) -> None:
    procfs, sysfs = tmp_path / "proc", tmp_path / "sys"
    (procfs / "sys/kernel").mkdir(parents=True)
    (procfs / "sys/kernel/perf_event_paranoid").write_text("3\n")
    (sysfs / "kernel/security").mkdir(parents=True)
    (sysfs / "kernel/security/lockdown").write_text("none [integrity] confidentiality\n")
    found = {finding.check: finding for finding in check_settings(procfs, sysfs)}
    assert found["perf_event_paranoid"].what.startswith("3: ")
    assert found["unprivileged_bpf_disabled"].what.startswith("unknown: ")
    assert (found["lockdown"].status, found["lockdown"].what[:10]) == ("note", "integrity:")
    assert found["BTF"].status == "note"
    assert all(finding.status != "problem" for finding in found.values())


def test_no_lockdown_and_btf_are_ok(tmp_path: Path) -> None:
    for file, text in (("security/lockdown", "[none] integrity confidentiality\n"), ("btf/vmlinux", "")):
        path = tmp_path / "kernel" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    found = statuses(check_settings(tmp_path, tmp_path))
    assert (found["lockdown"], found["BTF"]) == ("ok", "ok")


def test_a_nested_pid_namespace_is_noted_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()  # Its inode number is not the initial namespace's.
    (finding,) = check_pid_namespace(tmp_path)
    assert finding.status == "note"
    assert "hostPID: true" in finding.remedy


def test_rdma_devices_are_named(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"class/infiniband/mlx5_{number}").mkdir(parents=True)
    found = {finding.check: finding for finding in check_devices(tmp_path, tmp_path)}
    assert "mlx5_0, mlx5_1" in found["RDMA"].what
    assert "and 2 more" in found["RDMA"].what


def test_a_host_without_rdma_and_driver_is_a_host_with_two_notes(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in check_devices(tmp_path, tmp_path)}
    assert {finding.status for finding in found.values()} == {"note"}
    assert found["RDMA"].what.startswith("no devices")
    assert found["NVIDIA driver"].what.startswith("not loaded")


def test_the_nvidia_drivers_version_is_told(tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX  570.86\nGCC version: 12\n")
    found = {finding.check: finding.what for finding in check_devices(tmp_path, tmp_path)}
    assert found["NVIDIA driver"].startswith("NVRM version: NVIDIA UNIX 570.86")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error", "/sys/strange"),
        ValueError("not a number"),
        LoadError("refused"),
        NamespaceDenied("not allowed"),
        MappedFileError("cannot be opened (no permission)"),
        MmapEventsError("refused"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
)
def test_a_check_that_fails_is_a_finding_of_one_line(error: Exception) -> None:
    def look() -> list[Finding]:
        raise error

    (finding,) = run_guarded("strange", look)
    assert (finding.check, finding.status) == ("strange", "problem")
    assert finding.what.startswith("cannot be checked: ")
    assert "\n" not in finding.what
    assert finding.remedy


def test_objects_that_were_not_built_are_a_problem_with_the_command(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in check_probes(Config(), tmp_path)}
    assert found["BPF objects"].status == "problem"
    assert found["BPF objects"].remedy == f"run 'make build' in {REPOSITORY}"


def test_what_fails_for_a_missing_object_is_told_to_build_it_and_not_to_boot_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libbpf, "OBJECTS", tmp_path)
    monkeypatch.setattr("railscope.probes.loading.bcc_loader.installed_version", lambda: None)
    found = check_probes(Config(loader="libbpf"), tmp_path)
    lacking = [finding for finding in found if "is missing" in finding.what]
    assert {finding.check for finding in lacking} >= {"probes", "stop signals"}
    assert not [finding for finding in found if re.search("boot|leave out", finding.remedy)]
    assert {finding.remedy for finding in lacking} <= {"", f"run 'make build' in {REPOSITORY}"}


def test_one_missing_object_is_told_where_another_way_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_sessions(settings: ProgramSettings) -> Trial:
        if settings.enqueue_time is EnqueueTime.SESSION:
            raise libbpf.IncompleteInstallation("nccl_session.x86.bpf.o is missing")
        return Trial(AttachKind.MULTI, EnqueueTime.OFF, 5, 2000, 5, 0)

    monkeypatch.setattr("railscope.agent.doctor.probes.try_mode", lacks_sessions)
    found = {finding.check: finding for finding in check_probes(Config(), OBJECTS)}
    assert found["uprobe session"].remedy == f"run 'make build' in {REPOSITORY}"


@pytest.mark.parametrize(("release", "remedy"), [("6.12.3", "boot Linux 6.13"), ("6.13.0", "report this line")])
def test_a_kernel_that_is_new_enough_is_not_told_to_be_newer(
    release: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(settings: ProgramSettings) -> Trial:
        if settings.enqueue_time is EnqueueTime.SESSION:
            raise LoadError("the kernel refuses it")
        return Trial(AttachKind.MULTI, EnqueueTime.OFF, 5, 2000, 5, 0)

    monkeypatch.setattr("railscope.agent.doctor.probes.try_mode", refused)
    monkeypatch.setattr("platform.release", lambda: release)
    found = {finding.check: finding for finding in check_probes(Config(), OBJECTS)}
    assert remedy in found["uprobe session"].remedy


@pytest.mark.parametrize(
    ("version", "status", "says"),
    [
        ("0.26.0", "ok", "0.26.0, loads the probes here: nccl."),
        (None, "problem", "though libbpf cannot load the probes here: nccl."),
    ],
)
def test_where_no_object_fits_bcc_is_the_answer(
    version: str | None, status: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railscope.probes.loading.bcc_loader.installed_version", lambda: version)
    found = {finding.check: finding for finding in check_probes(Config(), tmp_path)}
    assert found["bcc"].status == status
    assert says in found["bcc"].what
    assert "nccl_session" in found["bcc"].what


def test_where_libbpf_serves_bcc_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.probes.loading.bcc_loader.installed_version", lambda: None)
    found = {finding.check: finding for finding in check_probes(Config(), OBJECTS)}
    assert found["BPF objects"].status == "ok"
    assert (found["bcc"].status, "only needed" in found["bcc"].what) == ("note", True)


def test_the_trial_follows_the_configuration() -> None:
    automatic = configured_settings(Config())
    assert (automatic.attach, automatic.enqueue_time) == (None, None)
    forced = configured_settings(Config(probe_attach="perf", probe_enqueue_time="pair"))
    assert (forced.attach, forced.enqueue_time) == (AttachKind.PERF, EnqueueTime.PAIR)


@pytest.mark.parametrize(
    ("calls", "payload_bytes", "events", "times", "exact"),
    [
        (5, 2000, 5, 5, True),
        (4, 2000, 5, 5, False),
        (5, 1600, 5, 5, False),
        (5, 2000, 4, 5, False),
        (5, 2000, 5, 0, False),
    ],
)
def test_a_trial_that_misses_anything_is_not_exact(
    calls: int, payload_bytes: int, events: int, times: int, exact: bool
) -> None:
    assert Trial(AttachKind.MULTI, EnqueueTime.SESSION, calls, payload_bytes, events, times).exact is exact


def recorded_device(sysfs: Path, name: str, *, operstate: str, flags: str, carrier: str | None) -> None:
    folder = sysfs / "class/net" / name
    (folder / "statistics").mkdir(parents=True)
    device = sysfs / "devices" / name
    device.mkdir(parents=True)
    (folder / "device").symlink_to(device)
    texts = {"type": "1", "flags": flags, "operstate": operstate, "mtu": "9000", "ifindex": "2", "speed": "100000"}
    for file, text in texts.items():
        (folder / file).write_text(text + "\n")
    if carrier is not None:
        (folder / "carrier").write_text(carrier + "\n")


def test_rails_of_a_recorded_host_tell_speed_carrier_and_why(tmp_path: Path) -> None:
    recorded_device(tmp_path, "eth2", operstate="up", flags="0x1003", carrier="1")
    recorded_device(tmp_path, "eth3", operstate="down", flags="0x1003", carrier="0")
    findings, rails = check_rails(Config(sysfs=tmp_path, rails=(parse_rail_pattern("eth*"),)), (), SystemClock())
    by_rail = {finding.what[:1]: finding for finding in findings if finding.check == "rail"}
    assert by_rail["0"].status == "ok"
    assert "eth2 (configured: eth*): connected, 12.5 GB/s" in by_rail["0"].what
    assert (by_rail["1"].status, by_rail["1"].remedy.endswith("ethtool eth3")) == ("problem", True)
    assert [(rail.device, rail.rail, rail.carrier) for rail in rails] == [("eth2", "0", True), ("eth3", "1", False)]


def test_configured_rails_that_match_nothing_are_a_problem(tmp_path: Path) -> None:
    recorded_device(tmp_path, "eth2", operstate="up", flags="0x1003", carrier="1")
    findings, rails = check_rails(Config(sysfs=tmp_path, rails=(parse_rail_pattern("ib*"),)), (), SystemClock())
    (finding,) = [finding for finding in findings if finding.check == "rail"]
    assert finding.status == "problem"
    assert "eth2 (matches no configured rail)" in finding.what
    assert "--rail.devices" in finding.remedy
    assert [rail.rail for rail in rails] == [None]


def test_text_is_aligned_and_carries_the_remedy() -> None:
    text = as_text(
        examination(
            Finding("kernel", "ok", "Linux 6.12.0"),
            Finding("lockdown", "note", "integrity"),
            Finding("libbpf", "problem", "missing", "apt install libbpf1"),
        )
    )
    lines = text.splitlines()
    assert lines[0] == "ok       kernel:   Linux 6.12.0"
    assert lines[1] == "note     lockdown: integrity"
    assert lines[2] == "PROBLEM  libbpf:   missing  → apt install libbpf1"
    assert "1 problem found" in lines[-1]


def test_json_holds_findings_libraries_rails_and_the_verdict() -> None:
    found = json.loads(as_json_text(examination(Finding("kernel", "ok", "Linux 6.12.0"))))
    assert list(found) == ["version", "kernel", "findings", "libraries", "rails", "topology", "processes", "ok"]
    assert found["findings"] == [{"check": "kernel", "status": "ok", "what": "Linux 6.12.0", "remedy": ""}]
    assert found["libraries"][0]["processes"] == 8
    assert found["rails"][0]["speed_bytes_per_second"] == 25_000_000_000
    assert found["ok"] is True


@pytest.mark.parametrize(("status", "exit_status"), [("ok", 0), ("note", 0), ("problem", 1)])
def test_only_a_problem_changes_the_exit_status(
    status: Status, exit_status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: examination(Finding("kernel", status, "", "mend it")))
    out = io.StringIO()
    assert run_doctor(Config(), as_json=True, out=out) == exit_status
    assert json.loads(out.getvalue())["ok"] is (exit_status == 0)


def test_a_folder_that_is_no_procfs_is_could_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    assert run_doctor(Config(procfs=tmp_path), as_json=False, out=out) == 2
    assert out.getvalue() == ""
    assert "--path.procfs" in capsys.readouterr().err


def test_whatever_the_rights_every_problem_has_a_remedy_on_one_line() -> None:
    out = io.StringIO()
    status = run_doctor(Config(), as_json=True, out=out)
    found = json.loads(out.getvalue())
    problems = [finding for finding in found["findings"] if finding["status"] == "problem"]
    assert status == (1 if problems else 0)
    for finding in found["findings"]:
        assert "\n" not in finding["what"] + finding["remedy"]
    for finding in problems:
        assert finding["remedy"], finding


def test_folders_of_another_host_are_said_to_be_such(tmp_path: Path) -> None:
    found = doctor.examine(Config(sysfs=tmp_path), SystemClock())
    assert found.findings[0].check == "source"
    assert str(tmp_path) in found.findings[0].what


def test_a_folder_of_totals_that_the_agent_would_refuse_is_found(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert statuses(check_state(None)) == {"state": "note"}
    assert statuses(check_state(state)) == {"state": "ok"}
    state.mkdir(mode=0o700)
    assert statuses(check_state(state)) == {"state": "ok"}
    state.chmod(0o770)
    (finding,) = check_state(state)
    assert (finding.status, finding.remedy) == ("problem", f"chmod 700 {state}")
    (tmp_path / "file").touch()
    assert statuses(check_state(tmp_path / "file")) == {"state": "problem"}
