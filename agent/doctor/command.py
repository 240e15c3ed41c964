"""`railscope doctor`: what works on this host, what does not, and what to do about it.

Every part of the agent's work is tried for real, on things of our own, before anything is claimed: version numbers
and settings only explain a refusal.  What the doctor learns holds for the rights it runs with; a service may have
fewer.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, TextIO

from railscope import probes
from railscope.agent.config.options import Config
from railscope.agent.doctor.findings import Finding, LibraryReport, ProcessReport, RailReport, one_line, run_guarded
from railscope.agent.doctor.host import (
    check_devices,
    check_kernel,
    check_pid_namespace,
    check_privileges,
    check_settings,
    check_state,
)
from railscope.agent.doctor.libraries import (
    PATIENCE_SECONDS,
    QUESTIONS,
    TENANTS_PATIENCE_SECONDS,
    check_libraries,
    find_processes,
)
from railscope.agent.doctor.nvlink import check_nvlink
from railscope.agent.doctor.probes import check_probes
from railscope.agent.doctor.processes import check_processes
from railscope.agent.doctor.rails import check_rails
from railscope.agent.doctor.topology import TopologyReport, check_topology, render_picture, topologies_of_file
from railscope.agent.facts.counted import format_count
from railscope.agent.node.inspection.inspection import InProcess, Inspection, InspectionProcesses
from railscope.probes.clock import Clock, SystemClock
from railscope.probes.printable import LONGEST_SHOWN, printable, printable_document
from railscope.probes.processes.processes import ProcessIdentity

_log = logging.getLogger("railscope.doctor")

FINE: Final = 0
PROBLEM: Final = 1
COULD_NOT_RUN: Final = 2

_WORDS: Final = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything the doctor found."""

    version: str
    kernel: str
    findings: tuple[Finding, ...]
    libraries: tuple[LibraryReport, ...]
    rails: tuple[RailReport, ...]
    topology: TopologyReport | None = None
    """None: there are neither RDMA devices nor GPUs."""
    processes: tuple[ProcessReport, ...] = ()
    """Those that have NCCL mapped."""

    @property
    def ok(self) -> bool:
        return all(finding.status != "problem" for finding in self.findings)


def run_doctor(config: Config, *, as_json: bool, out: TextIO, command_lines: bool = False) -> int:
    """Examine this host and print what was found; returns 0 (fine), 1 (a problem) or 2 (could not run).

    The reason for 2 is one line on standard error.  `command_lines`: processes with NCCL are told with their arguments,
    which may hold passwords.
    """
    try:
        (config.procfs / "self/status").read_bytes()
    except OSError as error:
        print(
            f"railscope doctor: {config.procfs} shows no processes ({error.strerror}): mount procfs there, "
            "or name another folder with --path.procfs",
            file=sys.stderr,
        )
        return COULD_NOT_RUN
    examination = examine(config, SystemClock(), command_lines=command_lines)
    out.write(as_json_text(examination) if as_json else as_text(examination))
    return FINE if examination.ok else PROBLEM


def run_topology(file: Path | None, config: Config, *, as_json: bool, out: TextIO) -> int:
    """Print which rail is which, and what is wrong with rails; returns as `run_doctor` does.

    `file` is an NCCL topology file, whose machines are shown; None: this host is.
    """
    if file is None:
        return _run_topology_of_host(config, as_json=as_json, out=out)
    try:
        machines = topologies_of_file(file, config.rails)
    except (OSError, ValueError) as error:
        why = one_line(error) if isinstance(error, OSError) else f"{file} {one_line(error)}"
        print(f"railscope doctor: --topology: {why}; name a file that NCCL_TOPO_DUMP_FILE wrote", file=sys.stderr)
        return COULD_NOT_RUN
    findings = [finding for found in machines for finding in found.findings]
    whole = all(any(port.rail is not None for port in found.rails) for found in machines)
    if as_json:
        of_hosts = {"hosts": [asdict(found) for found in machines]}
        out.write(json.dumps(printable_document(asdict(machines[0]) if len(machines) == 1 else of_hosts), indent=2))
        out.write("\n")
        return FINE if whole and not findings else PROBLEM
    for found in machines:
        rails = len({port.rail for port in found.rails if port.rail is not None})
        numbers = {"GPU": len(found.gpus), "port": len(found.rails), "rail": rails}
        counted = ", ".join(format_count(count, what) for what, count in numbers.items())
        advice = "" if rails else "; where it names no card, NCCL adds those of the machine it runs on"
        host = f", host {printable(found.host)}" if len(machines) > 1 else ""
        out.write(_finding_lines(found.findings))
        out.write(f"{render_picture(found)}{file}{host}: {counted}{advice}\n")
    return FINE if whole and not findings else PROBLEM


def _run_topology_of_host(config: Config, *, as_json: bool, out: TextIO) -> int:
    """As `run_topology`, of this host: jobs' settings count, so that rails have the numbers that `examine` gives."""
    rails: list[RailReport] = []
    topologies: list[TopologyReport] = []
    jobs: set[int] = set()

    def examine_processes() -> list[Finding]:
        if _jobs_use(config):
            with closing(_inspection()) as inspection:
                jobs.update(one.pid for one in find_processes(config, inspection))
        return []

    def examine_rails() -> list[Finding]:
        found, reports = check_rails(config, jobs, SystemClock())
        rails.extend(reports)
        return found

    def examine_topology() -> list[Finding]:
        found, report = check_topology(config, jobs, rails)
        topologies.extend([report] if report else [])
        return found

    findings = [
        *run_guarded("process", examine_processes),
        *run_guarded("rail", examine_rails),
        *run_guarded("topology", examine_topology),
    ]
    topology = next(iter(topologies), None)
    if as_json:
        document = {"findings": [asdict(one) for one in findings], "topology": asdict(topology) if topology else None}
        out.write(json.dumps(printable_document(document), indent=2) + "\n")
    else:
        out.write(_finding_lines(findings))
        out.write(render_picture(topology) if topology else "")
    return PROBLEM if any(finding.status == "problem" for finding in findings) else FINE


def _jobs_use(config: Config) -> bool:
    """Whether the processes of `procfs` run on the machine of `sysfs`: this host's do not on a recorded one."""
    return str(config.sysfs) == "/sys" or str(config.procfs) != "/proc"


def _inspection() -> Inspection:
    """Processes that read what others map; this one, where it may not start any."""
    try:
        return InspectionProcesses(
            QUESTIONS, patience_seconds=PATIENCE_SECONDS, tenants_patience_seconds=TENANTS_PATIENCE_SECONDS
        )
    except OSError as error:
        _log.debug("no inspection process: %s", error)
        return InProcess()


def examine(config: Config, clock: Clock, *, command_lines: bool = False) -> Examination:
    """Make every check of this host; a check that fails is a finding."""
    host = os.uname()
    procfs, sysfs = config.procfs, config.sysfs
    objects = Path(probes.__path__[0]) / "bpf"
    libraries: list[LibraryReport] = []
    rails: list[RailReport] = []
    topologies: list[TopologyReport] = []
    identities: set[ProcessIdentity] = set()
    processes: list[ProcessReport] = []

    def examine_libraries() -> list[Finding]:
        with closing(_inspection()) as inspection:
            found, reports, mappers = check_libraries(config, inspection)
        libraries.extend(reports)
        identities.update(mappers)
        return found

    def examine_processes() -> list[Finding]:
        found, reports = check_processes(config.procfs, identities, clock, command_lines=command_lines)
        processes.extend(reports)
        return found

    def jobs() -> set[int]:
        return {one.pid for one in identities} if _jobs_use(config) else set()

    def examine_rails() -> list[Finding]:
        found, reports = check_rails(config, jobs(), clock)
        rails.extend(reports)
        return found

    def examine_topology() -> list[Finding]:
        found, report = check_topology(config, jobs(), rails)
        topologies.extend([report] if report else [])
        return found

    def examine_nvlink() -> list[Finding]:
        wanted = "nvlink" in config.collectors and str(sysfs) == "/sys"
        return check_nvlink(sysfs, clock) if wanted else []

    findings = [
        *_recorded(config),
        *run_guarded("kernel", lambda: check_kernel(host.release, host.machine)),
        *run_guarded("privileges", lambda: check_privileges(procfs)),
        *check_probes(config, objects),
        *run_guarded("settings", lambda: check_settings(procfs, sysfs)),
        *run_guarded("pid namespace", lambda: check_pid_namespace(procfs)),
        *run_guarded("NCCL library", examine_libraries),
        *run_guarded("process", examine_processes),
        *run_guarded("rail", examine_rails),
        *run_guarded("topology", examine_topology),
        *run_guarded("NVLink", examine_nvlink),
        *run_guarded("state", lambda: check_state(config.state_directory)),
        *run_guarded("devices", lambda: check_devices(procfs, sysfs)),
    ]
    return Examination(
        version=_version(),
        kernel=host.release,
        findings=tuple(findings),
        libraries=tuple(libraries),
        rails=tuple(rails),
        topology=next(iter(topologies), None),
        processes=tuple(processes),
    )


def _recorded(config: Config) -> list[Finding]:
    """State that the files of another host, or made-up ones, are read."""
    folders = [str(given) for given, real in ((config.procfs, "/proc"), (config.sysfs, "/sys")) if str(given) != real]
    if not folders:
        return []
    return [Finding("source", "note", f"read from {' and '.join(folders)}, which need not describe this host")]


def as_text(examination: Examination) -> str:
    """The doctor's findings as aligned lines for people, and a last one that sums up."""
    lines = _finding_lines(examination.findings).splitlines()
    problems = sum(finding.status == "problem" for finding in examination.findings)
    counted = format_count(problems, "problem") if problems else "no problem"
    lines.append("")
    if examination.topology and (drawn := render_picture(examination.topology)):
        lines.append(drawn)
    lines.append(f"railscope {examination.version} on Linux {examination.kernel}, run as {_user()}: {counted} found")
    return "\n".join(lines) + "\n"


def _finding_lines(findings: Sequence[Finding]) -> str:
    """A line for each finding, aligned; empty where there are none."""
    width = max((len(finding.check) for finding in findings), default=0) + 1
    lines = []
    for finding in findings:
        remedy = f"  → {printable(finding.remedy, LONGEST_SHOWN)}" if finding.remedy else ""
        what = printable(finding.what, LONGEST_SHOWN)
        lines.append(f"{_WORDS[finding.status]:<7}  {finding.check + ':':<{width}} {what}{remedy}\n")
    return "".join(lines)


def as_json_text(examination: Examination) -> str:
    """The doctor's findings as one JSON object."""
    return json.dumps(printable_document(asdict(examination)) | {"ok": examination.ok}, indent=2) + "\n"


def _user() -> str:
    """Whose rights the findings hold for."""
    return "root" if os.geteuid() == 0 else f"user {os.geteuid()}"


def _version() -> str:
    try:
        return metadata.version("railscope")
    except metadata.PackageNotFoundError:
        return "unknown"
