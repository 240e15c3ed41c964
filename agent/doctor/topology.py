"""Which GPU sends through which port on which rail, as a picture: of this host, or of a machine in an NCCL file."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.doctor.findings import Finding, RailReport, one_line, privilege_remedy
from railscope.agent.facts.counted import format_count
from railscope.agent.node.inspection.tenants import Tenant, real_uid, tenant_of
from railscope.agent.node.rails.gpu_affinity import MappedNic, map_rails, rdma_ports
from railscope.agent.node.rails.job_settings import (
    Believed,
    JobSettings,
    TopologyFile,
    TopologyFiles,
    believe,
    sockets_only,
)
from railscope.agent.node.rails.selection import NO_RDMA, RdmaPorts
from railscope.agent.node.targets.processes import LONGEST_SETTING
from railscope.probes.clock import SystemClock
from railscope.probes.processes.processes import environ
from railscope.probes.rdma.counters import RdmaCounters
from railscope.probes.rdma.inventory import read_ports
from railscope.probes.rdma.port import RECEIVE, TRANSMIT, choose_byte_counters
from railscope.probes.topology.data_direct import DataDirect
from railscope.probes.topology.machine import (
    Gpu,
    Nic,
    gpus_of_topology,
    nics_of_topology,
    read_machine,
    read_place,
)
from railscope.probes.topology.nccl_xml import read_topology, read_topology_of_process

WIDTH: Final = 100
_LONGEST_NAME: Final = 28
_LONGEST_RAIL: Final = 12

_JUNCTIONS: Final = {
    (False, True, True, True): "┬",
    (True, True, True, True): "┼",
    (True, True, True, False): "┤",
    (True, True, False, True): "├",
    (True, False, True, True): "┴",
    (True, False, True, False): "┘",
    (True, False, False, True): "└",
    (False, False, True, True): "─",
}
"""By which sides a line leaves: up, down, left, right."""


@dataclass(frozen=True, slots=True)
class PortReport:
    """One port of one network device, and whether it is a rail."""

    rail: str | None
    """The rail's number; None: not a rail."""
    plane: int | None
    device: str
    port: int | None
    pci: str
    gpus: tuple[int, ...]
    """NVML's numbers of the GPUs that send through it."""
    path: str | None
    """NCCL's word for the way to the nearest of them."""
    speed_bytes_per_second: int | None
    reason: str
    lanes: int | None = None
    """Of its link, in use; None: not known."""
    problem: str = ""
    """What is wrong with a rail's link; empty: nothing."""


@dataclass(frozen=True, slots=True)
class TopologyReport:
    gpus: tuple[int, ...]
    """Every GPU of the machine."""
    rails: tuple[PortReport, ...]
    """Every port, those that are no rails last."""
    host: str = ""
    """`host_hash` of a file that describes several machines."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with rails, one a rail."""
        return tuple(
            Finding("rail", "problem", f"{port.rail} is {_name(port)}: {port.problem}", _remedy(port.device))
            for port in self.rails
            if port.problem
        )


def _remedy(device: str) -> str:
    return f"check its module, cable and switch port: mlxlink -d {device} -m, ibstat {device}, ethtool of its netdev"


def topologies_of_file(file: Path, patterns: Sequence[RailPattern]) -> tuple[TopologyReport, ...]:
    """The machines that an NCCL topology file describes, at least one.

    Raises:
        OSError: the file cannot be read.
        TopologyError: it is no topology.
    """
    reports = []
    for machine in read_topology(file).machines:
        gpus = gpus_of_topology(machine)
        mapped = map_rails(nics_of_topology(machine), gpus, patterns=patterns, topology=machine)
        reports.append(make_report(gpus, mapped, machine.host))
    return tuple(reports)


def rdma_of_host(config: Config, processes: Iterable[int]) -> RdmaPorts:
    """This host's RDMA ports as the doctor sees them, and which of them are rails.

    Raises:
        OSError: sysfs cannot be listed.
    """
    ports = read_ports(config.sysfs)
    if not ports:
        return NO_RDMA
    believed = _nccl_settings(config, processes, [])  # what is refused is a finding about the topology
    gpus, nics = read_machine(config.sysfs, ports, DataDirect(config.sysfs))
    mapped = _mapped(config, nics, gpus, believed)
    return rdma_ports(ports, mapped)


def check_topology(
    config: Config, processes: Iterable[int], rails: Sequence[RailReport]
) -> tuple[list[Finding], TopologyReport | None]:
    """Findings about this host's GPUs and ports, and the report; None where there is nothing to show.

    `processes` are those that have NCCL mapped.  Where there are no RDMA devices, `rails` are shown, with the numbers
    that they have.

    Raises:
        OSError: sysfs cannot be listed.
    """
    gpus, nics = read_machine(config.sysfs, read_ports(config.sysfs), DataDirect(config.sysfs))
    findings: list[Finding] = []
    if nics:
        mapped = _mapped(config, nics, gpus, _nccl_settings(config, processes, findings))
    elif gpus:
        mapped = _network_devices(config, gpus, rails)
    else:
        return findings, None
    found = make_report(gpus, mapped)
    count = len({port.rail for port in found.rails if port.rail is not None})
    findings += [*found.findings, *_uncounted(config)]
    if nics and not count:
        findings.append(Finding("topology", "note", "no RDMA port is a rail", "name them: --rail.devices NAME"))
    elif count:
        findings.append(
            Finding("topology", "ok", f"{format_count(count, 'rail')} for {format_count(len(gpus), 'GPU')}")
        )
    return findings, found


def _uncounted(config: Config) -> Iterable[Finding]:
    """A note on each port that counts the bytes of one direction only."""
    try:
        source = RdmaCounters(
            config.sysfs, SystemClock(), wanted=choose_byte_counters, excluded=config.excluded_counters
        )
    except FileNotFoundError:
        return
    with closing(source):
        try:
            reading = source.read()
        except OSError:
            return  # of nothing that is read; the agent says why
    columns = [reading.fields.index(name) for name in (TRANSMIT, RECEIVE)]
    for row, name in enumerate(reading.names):
        sent, received = (reading.shape is None or bool(reading.shape.known[row, column]) for column in columns)
        if sent != received:
            way = "receives" if sent else "sends"
            yield Finding(
                "rail", "note", f"{name}: the device does not count the bytes that it {way}: they are not shown"
            )


def _mapped(config: Config, nics: Sequence[Nic], gpus: Sequence[Gpu], believed: Believed) -> tuple[MappedNic, ...]:
    return map_rails(
        nics,
        gpus,
        patterns=config.rails,
        hca_lists=believed.hca_lists,
        numbered_by=believed.numbered_by,
        topology=believed.topology(nics, gpus),
    )


def _network_devices(config: Config, gpus: Sequence[Gpu], rails: Sequence[RailReport]) -> tuple[MappedNic, ...]:
    """The rails of the own namespace, which have their numbers already."""
    own = {rail.device: rail for rail in rails if rail.own_netns and rail.rail is not None}
    nics = [
        Nic(
            rail.device,
            None,
            read_place(config.sysfs, config.sysfs / "class" / "net" / rail.device / "device"),
            rail.speed_bytes_per_second,
            rail.carrier,
        )
        for rail in own.values()
    ]
    mapped = map_rails(nics, gpus, patterns=[RailPattern(rail.device, rail.rail or "") for rail in own.values()])
    return tuple(
        # Their numbers come from where the rails are decided; the configuration need not have named them.
        replace(entry, reason=f"{own[entry.nic.device].reason}; {entry.reason.partition('; ')[2]}")
        for entry in mapped
    )


def _nccl_settings(config: Config, processes: Iterable[int], findings: list[Finding]) -> Believed:
    """What running jobs were told, as far as the agent believes it."""
    said: list[JobSettings] = []
    topology_files = TopologyFiles()
    files: dict[tuple[str, Tenant], TopologyFile | None] = {}
    for pid in sorted(processes):
        environment, tenant = environ(config.procfs, pid), tenant_of(config.procfs, pid)
        name = environment.get("NCCL_TOPO_FILE", "")
        # The ranks of a job have the same settings: one is enough.
        if (name, tenant) not in files:
            try:
                content = read_topology_of_process(config.procfs, pid, name, real_uid(config.procfs, pid))
                files[name, tenant] = topology_files.file_with(content, tenant) if content is not None else None
            except (OSError, ValueError) as error:
                files[name, tenant] = None
                what = f"topology file {name} of process {pid} is not used: {one_line(error)}"
                remedy = privilege_remedy() if isinstance(error, PermissionError) else ""
                findings.append(Finding("topology", "note", what, remedy))
        said.append(
            JobSettings(
                environment.get("NCCL_IB_HCA", "")[:LONGEST_SETTING],
                sockets_only(environment.get("NCCL_IB_DISABLE", ""), environment.get("NCCL_NET", "")),
                tenant,
                files[name, tenant],
            )
        )
    return believe(said)


def make_report(gpus: Iterable[Gpu], mapped: Iterable[MappedNic], host: str = "") -> TopologyReport:
    """What the doctor shows people and programs of a map of GPUs to rails."""
    ports = tuple(
        PortReport(
            rail=entry.rail,
            plane=entry.plane,
            device=entry.nic.device,
            port=entry.nic.port,
            pci=entry.nic.place.address,
            gpus=entry.gpus,
            path=None if entry.path is None else entry.path.name,
            speed_bytes_per_second=entry.nic.speed_bytes_per_second,
            reason=entry.reason,
            lanes=entry.nic.lanes,
            problem=entry.problem,
        )
        for entry in mapped
    )
    return TopologyReport(tuple(sorted(gpu.index for gpu in gpus)), ports, host)


def render_picture(topology: TopologyReport) -> str:
    """GPUs at the left, ports and rails at the right, then what is no rail and why; lines of at most 100 columns."""
    rails = [port for port in topology.rails if port.rail is not None]
    groups: dict[tuple[int, ...], list[PortReport]] = {}
    for port in rails:
        groups.setdefault(port.gpus, []).append(port)
    rows = [row for gpus, ports in groups.items() for row in _rows(gpus, ports)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(6)]
    lines = []
    for gpu, junction, path, name, speed, rail in rows:
        cells = f"{gpu:<{widths[0]}} {junction} {path:<{widths[2]}} {name:<{widths[3]}}  {speed:>{widths[4]}}  {rail}"
        lines.append(cells.rstrip())
    served = {gpu for port in rails for gpu in port.gpus}
    alone = [str(gpu) for gpu in topology.gpus if gpu not in served]
    if alone and served:
        lines += _wrapped(f"GPU {', '.join(alone)}: no port of its own, sends through another GPU's or the CPU")
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for port in topology.rails:
        if port.rail is None:
            left_out[port.reason].append(_name(port))
    for reason, names in left_out.items():
        lines += _wrapped(f"no rail: {', '.join(names)}: {_plain(reason)}")
    return "\n".join(lines) + "\n" if lines else ""


def _rows(gpus: Sequence[int], ports: Sequence[PortReport]) -> Iterable[tuple[str, str, str, str, str, str]]:
    """GPUs that share ports, and the ports they share, joined by one upright line."""
    count = max(len(gpus), len(ports), 1)
    for row in range(count):
        left, right = row < len(gpus), row < len(ports)
        gpu = f"GPU {gpus[row]}" if left else ""
        if not gpus:
            junction, gpu = "   ", "no GPU"
        else:
            junction = _JUNCTIONS[row > 0, row < count - 1, left, right]
            junction = f"{'─' if left else ' '}{junction}{'─' if right else ' '}"
        if not right:
            yield gpu, junction, "", "", "", ""
            continue
        port = ports[row]
        speed = "" if port.speed_bytes_per_second is None else f"{port.speed_bytes_per_second * 8 / 1e9:g} Gb/s"
        plane = "" if port.plane is None else f", plane {port.plane}"
        yield gpu, junction, port.path or "", _name(port), speed, f"rail {_cut(port.rail or '', _LONGEST_RAIL)}{plane}"


def _name(port: PortReport) -> str:
    name = _cut(port.device, _LONGEST_NAME)
    return name if port.port is None else f"{name}:{port.port}"


def _cut(text: str, longest: int) -> str:
    """A name that comes from a file, as it may be shown in a line."""
    text = _plain(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _plain(text: str) -> str:
    """Without what moves a cursor or takes two columns."""
    return text.encode("unicode_escape").decode("ascii")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
