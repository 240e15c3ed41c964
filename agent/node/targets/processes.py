"""Processes that are observed, as the rooms of the node know them, and what they say of themselves.

A process's environment and command line are its own memory, and the topology file that it names is its own choice: all
are read by an inspection process.  Of the environment only the variables named here come to the daemon, each cut in
length, and of the command line the name of the program.  The file is looked for below the root directory of the process
that names it, through no link of /proc, and read where it is a regular file that this user may read: it is his own, or
anybody's.

Sources: openat2(2) (RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS), proc_pid_environ(5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from railscope.agent.node.inspection.questions import Found, Memory
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant, real_uid
from railscope.agent.node.targets.jobs import JobFacts, job_facts, place_of_cgroup
from railscope.agent.node.targets.pods import FOLDER, find_pod_names
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.owner import program_of
from railscope.probes.processes.processes import ProcessIdentity, cgroup, environ, identity_of
from railscope.probes.topology.nccl_xml import XmlFunction, XmlNet, XmlTopology, read_topology_of_process
from railscope.probes.topology.paths import Place

SETTINGS: Final = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_TOPO_FILE")
"""Variables that say which rails a job uses."""
LONGEST_SETTING: Final = 1024


@dataclass(frozen=True, slots=True)
class Description:
    """What a process says of itself."""

    job: JobFacts = field(default_factory=JobFacts)
    settings: tuple[tuple[str, str], ...] = ()
    """Those of `SETTINGS` that it has."""
    topology: XmlTopology | None = None
    """Of the file that NCCL reads in it; None: there is none, nobody asked, or it cannot be used."""
    topology_trouble: str = ""
    """Why it cannot be used; empty: nothing is wrong."""
    program: str = ""
    """What it runs, as `python3 train.py`; empty where that cannot be read."""

    def setting(self, name: str) -> str:
        """A variable's value; empty where it has none."""
        return next((value for known, value in self.settings if known == name), "")


NOT_DESCRIBED: Final = Description()
NOT_MAPPED: Final = ""
"""The version of NCCL in a process that maps none."""


@dataclass(frozen=True, slots=True)
class Describe:
    """What does this process say of itself?"""

    procfs: str
    identity: ProcessIdentity
    node_name: str
    """This host's: pods in the host's network have it in HOSTNAME, where others have the pod's."""
    topology: bool
    """Whether its topology file is wanted too."""
    pod_logs: str = str(FOLDER)
    """The kubelet's folder of logs, whose names tell the pod's."""
    builds: ClassVar[Collection[type]] = (Description, JobFacts, XmlTopology, XmlFunction, XmlNet, Place)
    seconds: ClassVar[float] = 5.0

    @property
    def pid(self) -> int:
        return self.identity.pid

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[Description]:
        """See `Question.find`."""
        del memory, descriptors
        procfs, pid = Path(self.procfs), self.identity.pid
        environment = environ(procfs, pid)
        group = cgroup(procfs, pid) or ""
        place = place_of_cgroup(group)
        names = find_pod_names(Path(self.pod_logs), place.pod_uid, place.container_id) if place.pod_uid else None
        job = job_facts(environment, group, self.node_name, names)
        settings, program = _settings(environment), program_of(procfs, pid)
        topology, trouble = None, ""
        if self.topology:
            try:
                given = environment.get("NCCL_TOPO_FILE", "")
                topology = read_topology_of_process(procfs, pid, given, real_uid(procfs, pid))
            except (OSError, ValueError) as error:
                trouble = str(error)[:LONGEST_SETTING]
        if identity_of(procfs, pid) != self.identity:
            return Found(NOT_DESCRIBED)
        return Found(Description(job, settings, topology, trouble, program))


def _settings(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, environment[name][:LONGEST_SETTING]) for name in SETTINGS if environment.get(name))


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """A process that maps NCCL, or another library that transfers."""

    identity: ProcessIdentity
    namespace: NetworkNamespace | None
    """Its network namespace; None: it could not be read."""
    job: JobFacts
    socket_interfaces: str
    """The job's NCCL_SOCKET_IFNAME; empty where it has none."""
    nccl_version: str
    program: int | None = None
    """Which program it runs, by `railscope.probes.processes.processes.program_mark`."""
    ended_ns: int | None = None
    tenant: Tenant = UNKNOWN_TENANT
    """Whose it is."""
    confined: bool = False
    """It may see a part of this host's GPUs only, and number them in its own way."""


ProcessOf = Callable[[int], ObservedProcess | None]
"""By pid."""
