"""What jobs say of this machine's RDMA ports and topology, and how much of it is believed.

No job's settings describe the machine; its own map comes from the kernel.  NCCL_IB_HCA of a job adds ports to it while
the job runs.  What a topology file says of places and rails, and what NCCL_IB_HCA says of a rail's number, is believed
only while every tenant whose processes run here says the same, and of a file also only where the GPUs and ports that it
names are this machine's.  Whoever runs alone may so refine the map for himself; as soon as another tenant's process
says nothing, or something else, the kernel's map is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.topology.ib_hca import HcaList, parse_hca_list
from railscope.probes.topology.machine import Gpu, Nic
from railscope.probes.topology.nccl_xml import XmlTopology
from railscope.probes.topology.pci import same_card

_MOST_LISTS: Final = 16
"""Different values of NCCL_IB_HCA that add ports, of one tenant."""
_MOST_FILES: Final = 8
_MOST_FILES_OF_TENANT: Final = 2
"""Topology files of different content: a second one of a tenant tells all that a third could, that they disagree."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What one process says in its environment."""

    hca_list: str
    """NCCL_IB_HCA; empty: it may use every port."""
    sockets_only: bool
    """NCCL_IB_DISABLE or NCCL_NET=Socket: it uses none."""
    tenant: Tenant = UNKNOWN_TENANT
    topology: TopologyFile | None = None
    """Of the file that NCCL reads in it; None: it has none that can be used."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TopologyFile:
    """What a topology file says; of two that are alike there is one, so that comparing them reads neither."""

    content: XmlTopology
    tenant: Tenant
    """Whose process had it first."""


class TopologyFiles:
    """The topology files of the processes that run, each content once.

    They have a bound, as each takes up to 9 MB.  A process for which there is no room has no file that could be
    believed meanwhile: files of several contents contradict each other.
    """

    def __init__(self) -> None:
        self._files: WeakValueDictionary[XmlTopology, TopologyFile] = WeakValueDictionary()

    def file_with(self, content: XmlTopology, tenant: Tenant) -> TopologyFile | None:
        """The file with this content, which is freed with its last reference; None: there is no room for it."""
        found = self._files.get(content)
        if found is None:
            tenants = [file.tenant for file in self._files.values()]
            if len(tenants) >= _MOST_FILES or tenants.count(tenant) >= _MOST_FILES_OF_TENANT:
                return None
            found = self._files[content] = TopologyFile(content, tenant)
        return found


@dataclass(frozen=True, slots=True)
class Believed:
    """What the settings of all processes together say."""

    hca_lists: tuple[HcaList, ...] = ()
    """Of every job that uses RDMA, an empty list for one without the setting."""
    numbered_by: tuple[HcaList, ...] = ()
    """Those whose numbers of rails and planes hold."""
    topologies: frozenset[TopologyFile] = frozenset()
    """Those that every tenant has; one describes the machine, several contradict each other."""

    def topology(self, nics: Sequence[Nic], gpus: Sequence[Gpu]) -> XmlTopology | None:
        """The file that holds for a machine with these ports and GPUs; None: none does."""
        if len(self.topologies) != 1:
            return None
        (file,) = self.topologies
        here = {gpu.place.address for gpu in gpus}
        ports = {nic.device: nic.place.address for nic in nics}
        for machine in file.content.machines:
            agrees = all(function.place.address in here for function in machine.functions if function.is_gpu) and all(
                not ports.get(net.name) or same_card(ports[net.name], net.place.address) for net in machine.nets
            )
            if agrees:
                return machine
        return None


def sockets_only(ib_disable: str, net: str) -> bool:
    """Whether a job's NCCL_IB_DISABLE and NCCL_NET keep a process off RDMA."""
    return ib_disable not in ("", "0") or net.lower() == "socket"


def believe(said: Collection[JobSettings]) -> Believed:
    """Bring together what processes of jobs say of the devices that NCCL may use."""
    of_tenants: defaultdict[Tenant, dict[str, None]] = defaultdict(dict)
    for one in said:
        if not one.sockets_only and len(of_tenants[one.tenant]) < _MOST_LISTS:
            of_tenants[one.tenant][one.hca_list] = None
    lists = {value for values in of_tenants.values() for value in values}
    numbers = _of_every_tenant((one.tenant, one.hca_list) for one in said if not one.sockets_only)
    files = _of_every_tenant((one.tenant, one.topology) for one in said)
    return Believed(
        tuple(map(parse_hca_list, sorted(lists))),
        tuple(map(parse_hca_list, sorted(numbers))),
        frozenset(file for file in files if file is not None),
    )


_Setting = TypeVar("_Setting")


def _of_every_tenant(said: Iterable[tuple[Tenant, _Setting]]) -> frozenset[_Setting]:
    """What each of the tenants says; empty where there are none."""
    by_tenant: defaultdict[Tenant, set[_Setting]] = defaultdict(set)
    for tenant, setting in said:
        by_tenant[tenant].add(setting)
    return frozenset(set.intersection(*by_tenant.values())) if by_tenant else frozenset()
