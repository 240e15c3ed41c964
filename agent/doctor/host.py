"""Checks the host: kernel, privileges, settings that may forbid probes, RDMA devices and NVIDIA driver.

Only facts that the kernel's files state.  Whether probes really work is tried in agent/doctor/probes.py, whatever
these files say.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.doctor.findings import Finding, capability_remedy, one_line

MACHINES: Final = ("x86_64", "aarch64")

_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_MOST_NAMES: Final = 8


@dataclass(frozen=True, slots=True)
class _Capability:
    name: str
    bit: int
    """Number in include/uapi/linux/capability.h."""
    needed_for: str
    lost: str
    stand_in: tuple[str, int] | None = None
    """Another capability that allows the same, with its number."""
    essential: bool = True


CAP_SYS_PTRACE: Final = 19
_SYS_ADMIN: Final = ("CAP_SYS_ADMIN", 21)
_DAC_OVERRIDE: Final = ("CAP_DAC_OVERRIDE", 1)

CAPABILITIES: Final = (
    _Capability("CAP_BPF", 39, "load BPF programs", "nothing can be observed", _SYS_ADMIN),
    _Capability(
        "CAP_PERFMON",
        38,
        "attach probes and watch mappings",
        "no call is counted, and new libraries are found by scanning only",
        _SYS_ADMIN,
    ),
    _Capability(
        *_SYS_ADMIN,
        "enter network namespaces, and attach on kernels that want it for uprobes",
        "speed, state and events of rails in containers; older kernels attach no probe at all",
        essential=False,
    ),
    _Capability(
        "CAP_SYS_PTRACE",
        CAP_SYS_PTRACE,
        "read the mappings of other users' processes",
        "jobs of other users are not found",
    ),
    _Capability(
        "CAP_DAC_READ_SEARCH",
        2,
        "open libraries in folders of other users and containers",
        "NCCL in private folders is not found",
        _DAC_OVERRIDE,
    ),
)


def check_kernel(release: str, machine: str) -> list[Finding]:
    """Which kernel it is, and whether there are programs for this processor.

    A version decides nothing: distributions take features of newer kernels into older ones, as RHEL 9 into its 5.14.
    """
    findings = [Finding("kernel", "ok", f"Linux {release}; what it can do is tried below")]
    if machine in MACHINES:
        findings.append(Finding("processor", "ok", machine))
    else:
        known = " or ".join(MACHINES)
        findings.append(Finding("processor", "problem", f"no BPF programs for {machine}", f"use a host with {known}"))
    return findings


def effective_capabilities(procfs: Path) -> int:
    """The capabilities this process has, one bit each.

    Raises:
        OSError, ValueError: /proc/self/status cannot be read or understood.
    """
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", (procfs / "self/status").read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{procfs}/self/status has no line CapEff")
    return int(match[1], 16)


def check_privileges(procfs: Path) -> list[Finding]:
    """Effective capabilities of this very process; a service may have others.

    Raises:
        OSError, ValueError: /proc/self/status cannot be read or understood.
    """
    effective = effective_capabilities(procfs)
    findings = []
    for capability in CAPABILITIES:
        if effective >> capability.bit & 1:
            findings.append(Finding(capability.name, "ok", f"to {capability.needed_for}"))
        elif capability.stand_in is not None and effective >> capability.stand_in[1] & 1:
            what = f"{capability.stand_in[0]} stands in, to {capability.needed_for}"
            findings.append(Finding(capability.name, "ok", what))
        else:
            findings.append(
                Finding(
                    capability.name,
                    "problem" if capability.essential else "note",
                    f"missing, to {capability.needed_for}; without it: {capability.lost}",
                    capability_remedy(capability.name),
                )
            )
    return findings


def check_settings(procfs: Path, sysfs: Path) -> list[Finding]:
    """Settings of the kernel that explain a refusal; the trials decide whether there is one."""
    findings = [
        _setting(
            procfs / "sys/kernel/unprivileged_bpf_disabled",
            "with CAP_BPF any value serves",
        ),
        _setting(
            procfs / "sys/kernel/perf_event_paranoid",
            "with CAP_PERFMON any value serves, but perf event uprobes at 3 (Debian, Ubuntu) want CAP_SYS_ADMIN",
        ),
        _lockdown(sysfs / "kernel/security/lockdown"),
        Finding("memlock", "ok", "does not limit BPF from Linux 5.11 on: its memory counts to the control group"),
    ]
    if (sysfs / "kernel/btf/vmlinux").exists():
        findings.append(Finding("BTF", "ok", "present (session probes want it)"))
    else:
        findings.append(Finding("BTF", "note", "absent: only session probes want it, counting does without"))
    return findings


def check_pid_namespace(procfs: Path) -> list[Finding]:
    """Whether all processes of the host can be seen.

    Raises:
        OSError: the namespace cannot be asked for.
    """
    if (procfs / "self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE:
        return [Finding("pid namespace", "ok", "the host's own: all processes are visible")]
    return [
        Finding(
            "pid namespace",
            "note",
            "nested, as in a container: processes outside it are not observed",
            "run the agent on the host, or with docker run --pid=host, or hostPID: true in Kubernetes",
        )
    ]


def check_devices(procfs: Path, sysfs: Path) -> list[Finding]:
    """RDMA devices and the NVIDIA driver: whether they are there."""
    findings = []
    try:
        rdma = sorted(folder.name for folder in (sysfs / "class/infiniband").iterdir())
    except FileNotFoundError:
        rdma = []
    except OSError as error:
        findings.append(Finding("RDMA", "note", f"whether there are devices is unknown: {one_line(error)}"))
    else:
        if rdma:
            names = ", ".join(rdma[:_MOST_NAMES]) + (f" and {len(rdma) - _MOST_NAMES} more" * (len(rdma) > _MOST_NAMES))
            findings.append(Finding("RDMA", "ok", names))
    if not rdma and not findings:
        findings.append(Finding("RDMA", "note", "no devices: only network devices can be rails"))
    try:
        version = (procfs / "driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        findings.append(Finding("NVIDIA driver", "note", "not loaded: NCCL cannot run on GPUs here"))
    else:
        findings.append(Finding("NVIDIA driver", "note", f"{' '.join(version.split())}"))
    return findings


def _setting(file: Path, meaning: str) -> Finding:
    try:
        return Finding(file.name, "note", f"{file.read_text().strip()}: {meaning}")
    except OSError as error:
        return Finding(file.name, "note", f"unknown: {one_line(error)}")


def _lockdown(file: Path) -> Finding:
    try:
        text = file.read_text().strip()
    except OSError:
        return Finding("lockdown", "note", f"unknown: {file} cannot be read (none, or securityfs is not mounted)")
    match = re.search(r"\[(\w+)\]", text)
    if match is None:
        return Finding("lockdown", "note", f"cannot be understood: {text[:60]!r}")
    if match[1] == "none":
        return Finding("lockdown", "ok", "none")
    return Finding("lockdown", "note", f"{match[1]}: the kernel may refuse programs; the trials say whether it does")


def check_state(folder: Path | None) -> list[Finding]:
    """Whether totals go on when the agent is replaced, by its state folder; that of a service may be another user's.

    Raises:
        OSError: the folder cannot be looked at.
    """
    remedy = "name a folder of the agent's user with --state.directory, as /run/railscope; the agent makes it"
    if folder is None:
        return [Finding("state", "note", "totals start at 0 whenever the agent is restarted", remedy)]
    try:
        facts = folder.stat()
    except FileNotFoundError:
        return [Finding("state", "ok", f"{folder} will be made, and totals kept there")]
    if not stat.S_ISDIR(facts.st_mode):
        return [Finding("state", "problem", f"{folder} is not a folder, so that totals are not kept", remedy)]
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"others may write to {folder}, so that totals are not kept there"
        return [Finding("state", "problem", what, f"chmod 700 {folder}")]
    return [Finding("state", "ok", f"totals are kept in {folder}")]
