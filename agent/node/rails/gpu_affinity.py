"""Maps ports to rails, and GPUs to the ports that they send through.

Where a rail's number comes from, the first that says something:

1. the configuration: names or patterns, with a number where one is given (`mlx5_3=1`, `mlx5_0:2=1` for one port);
2. the rail in the NCCL_IB_HCA of the jobs that run; 3. `rail=` in their NCCL topology file, both only as long as no
   tenant's job says otherwise (agent/node/rails/rdma_rails.py);
4. the nearest GPU, with the places that the topology file gives, or else the PCI tree: what shares a PCI switch (PIX,
   PXB, the deepest switch first), or where no card does that, the NUMA node (PHB); 5. the order of names.

Which ports are near, and which of them are no rails, is agent/node/rails/nearest_ports.py.  Virtual and scalable
functions belong to the rail of the port that they are parts of.  Where all jobs that run chose the same ports, GPUs are
paired among these.

Where every port has GPUs of its own, the rail's number is that of its GPU (or of its pair of GPUs, …), so that the
others keep theirs when a card is missing; else it is the position.  Jobs add rails while they run, they take none from
the machine, and do not renumber.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.rails.nearest_ports import Choice, find_nearest, label_of, name_order
from railscope.agent.node.rails.selection import RdmaNoRail, RdmaPorts, RdmaRail, natural_order
from railscope.agent.node.rails.siblings import NO_STATE, LinkState, compare_links
from railscope.probes.rdma.inventory import RdmaPort
from railscope.probes.topology.ib_hca import HcaList
from railscope.probes.topology.machine import Gpu, Nic, described_places, find_described_place
from railscope.probes.topology.nccl_xml import DATA_DIRECT, XmlNet, XmlTopology
from railscope.probes.topology.paths import PathType, Place
from railscope.probes.topology.pci import same_card


@dataclass(frozen=True, slots=True)
class MappedNic:
    """What one port is, and why."""

    nic: Nic
    rail: str | None
    """The rail's number; None: not a rail."""
    plane: int | None
    """The fabric's plane, where NCCL_IB_HCA or the topology file names one."""
    gpus: tuple[int, ...]
    """NVML's numbers of the GPUs that it is nearest to; empty: not known, or none."""
    path: PathType | None
    """To the nearest of them; None without GPUs."""
    reason: str
    requested: bool = False
    """Only jobs make it a rail: it is none once they have ended."""
    carries: bool = True
    """Whether a job that runs may use it; False: all of them chose other ports."""
    link: LinkState = NO_STATE
    """Its link beside those of its siblings, where it is a rail."""

    @property
    def problem(self) -> str:
        """What is wrong with its link; empty: nothing, or it is no rail."""
        return self.link.problem

    @property
    def gpu_label(self) -> str:
        """The `gpu` label of metrics: `3`, or `0,1` where GPUs share the port, or `unknown`."""
        return ",".join(map(str, self.gpus)) or UNKNOWN


def map_rails(
    nics: Iterable[Nic],
    gpus: Iterable[Gpu],
    *,
    patterns: Sequence[RailPattern] = (),
    hca_lists: Sequence[HcaList] = (),
    numbered_by: Sequence[HcaList] | None = None,
    topology: XmlTopology | None = None,
    known: Collection[tuple[str, int | None]] = (),
) -> tuple[MappedNic, ...]:
    """Which GPU each RDMA port serves, and whether the port is a rail: rails by number first, then the others by name.

    `hca_lists` are the NCCL_IB_HCA of the jobs that run, an empty one for a job without; `numbered_by` those of them
    whose numbers of rails and planes hold (None: all).  `topology` is the topology file that holds for all of them;
    `known` the (device, port) that were rails before without a job: they stay rails when they get slow or lose their
    link.
    """
    described = described_places(topology) if topology else {}
    by_place = _by_description(sorted(nics, key=name_order), described, topology)
    ports = list(by_place)
    gpus = [
        replace(gpu, place=find_described_place(gpu.place, described) or gpu.place)
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
    ]
    keep = {nic for nic in ports if (nic.device, nic.port) in known}
    given: dict[Nic, tuple[str, str]] = {}
    if patterns:
        matches = _matches(ports, patterns, given)
        owners = _owners(matches)
        machine = _configured(ports, gpus, matches, set(owners.values()))
        choices = dict(machine)
        numbers = _numbers(_of(machine, owners), gpus)
    else:
        owners = _owners(ports)
        whole = set(owners.values())
        machine = find_nearest([nic for nic in ports if nic in whole], gpus, keep)
        numbers = _numbers(machine, gpus)
        choices = _with_admitted(whole, gpus, hca_lists, machine)
        if (hca_lists if numbered_by is None else numbered_by) == hca_lists:
            choices = _paired_as_chosen(whole, gpus, hca_lists, choices)
        for nic in ports:
            net = _described(nic, topology)
            admitted = not hca_lists or any(hca_list.allows(nic.device, nic.port) for hca_list in hca_lists)
            if net is not None and net.rail is not None and admitted and nic in whole:
                choices[nic] = replace(choices[nic], is_rail=True)
    links = compare_links([nic for nic, owner in owners.items() if owner is nic and choices[nic].is_rail])
    used = {nic for nic in ports if any(hca_list.allows(nic.device, nic.port) for hca_list in hca_lists)}
    planes = _given_by_nccl(ports, hca_lists if numbered_by is None else numbered_by, topology, given)
    rails = _final_numbers([nic for nic in choices if choices[nic].is_rail], given, numbers)
    mapped = []
    for nic in ports:
        owner = owners.get(nic, nic)
        choice = choices[owner]
        source = given[nic][1] if nic in given and choice.is_rail else ""
        by_file = " (NCCL topology file)" if by_place[owner] and choice.path is not None else ""
        if owner.data_direct and choice.path is not None:
            by_file = f" (data direct function {owner.data_direct}){by_file}"
        part = "" if owner is nic else f"a part of {label_of(owner)}"
        mapped.append(
            MappedNic(
                nic,
                given[nic][0] if nic in given and choice.is_rail else rails.get(owner),
                planes.get(nic),
                choice.gpus,
                choice.path,
                "; ".join(filter(None, (source, part, f"{choice.reason}{by_file}"))),
                requested=not patterns and choice.is_rail and not machine[owner].is_rail,
                carries=bool(patterns) or not hca_lists or nic in used,
                link=links.get(nic, NO_STATE),
            )
        )
    return tuple(
        sorted(mapped, key=lambda entry: (entry.rail is None, natural_order(entry.rail or ""), name_order(entry.nic)))
    )


def rdma_ports(ports: Iterable[RdmaPort], mapped: Iterable[MappedNic]) -> RdmaPorts:
    """What the rails of network devices need to know of RDMA ports: which belong together."""
    entries = {(entry.nic.device, entry.nic.port): entry for entry in mapped}
    known = tuple(ports)
    devices = sorted({port.device for port in known})
    rails, others = [], []
    for port in known:
        entry = entries.get((port.device, port.port))
        if entry is not None and entry.rail is not None:
            rails.append(RdmaRail(entry.rail, port.pci, port.netdevs))
        elif entry is not None:
            others.append(RdmaNoRail(entry.reason, port.pci, port.netdevs))
    return RdmaPorts((*devices, *(f"{port.device}:{port.port}" for port in known)), tuple(rails), tuple(others))


def _owners(nics: Iterable[Nic]) -> dict[Nic, Nic]:
    """Each port with the one that it is a virtual or scalable part of, or with itself.

    A port whose physical function is elsewhere, or has no RDMA device, is known by its parts alone: by the first.
    """
    together: defaultdict[tuple[str, int | None], list[Nic]] = defaultdict(list)
    owners = {nic: nic for nic in nics}
    for nic in owners:
        if address := nic.function or nic.place.address:
            together[address, nic.port].append(nic)
    for members in together.values():
        owner = next((nic for nic in members if not nic.function), members[0])
        owners.update({nic: owner for nic in members if nic.function})
    return owners


def _of(choices: Mapping[Nic, Choice], owners: Mapping[Nic, Nic]) -> dict[Nic, Choice]:
    """Those of ports that are no part of another."""
    return {nic: choice for nic, choice in choices.items() if owners.get(nic, nic) is nic}


def _by_description(
    nics: Iterable[Nic], described: Mapping[str, Place], topology: XmlTopology | None
) -> dict[Nic, bool]:
    """The ports where the topology file puts them, and whether it does."""
    found = {}
    for nic in nics:
        place = find_described_place(nic.place, described)
        net = _described(nic, topology)
        # Data goes through the function that NCCL's net is at, be the device's own elsewhere (data direct); else NCCL
        # has one function for all of a card's.
        if net is not None and (net.name.endswith(DATA_DIRECT) or same_card(net.place.address, nic.place.address)):
            place = replace(net.place, address=nic.place.address)
        found[nic if place is None else replace(nic, place=place)] = place is not None
    return found


def _matches(
    nics: Sequence[Nic], patterns: Sequence[RailPattern], given: dict[Nic, tuple[str, str]]
) -> dict[Nic, RailPattern]:
    """The ports that the configuration names; numbers that it gives go into `given`."""
    matches: dict[Nic, RailPattern] = {}
    for nic in nics:
        for pattern in patterns:
            if any(fnmatch.fnmatchcase(name, pattern.glob) for name in (nic.device, f"{nic.device}:{nic.port}")):
                matches[nic] = pattern
                if pattern.rail:
                    given[nic] = (pattern.rail, f"configured: {pattern.glob}={pattern.rail}")
                break
    return matches


def _configured(
    nics: Sequence[Nic], gpus: Sequence[Gpu], matches: Mapping[Nic, RailPattern], whole: Collection[Nic]
) -> dict[Nic, Choice]:
    """What the configuration names is a rail, near or not."""
    named = [nic for nic in matches if nic in whole]
    near = find_nearest(named, gpus, named)
    choices = {}
    for nic in nics:
        if nic not in near:
            choices[nic] = Choice(False, "matches no configured rail")
            continue
        pattern = matches[nic]
        reason = near[nic].reason if pattern.rail else f"configured: {pattern.glob}; {near[nic].reason}"
        choices[nic] = replace(near[nic], is_rail=True, reason=reason)
    return choices


def _paired_as_chosen(
    nics: Collection[Nic], gpus: Sequence[Gpu], hca_lists: Sequence[HcaList], choices: Mapping[Nic, Choice]
) -> dict[Nic, Choice]:
    """GPUs among the ports that all jobs chose, while they chose the same; the others keep what they have."""
    found = dict(choices)
    if len(hca_lists) != 1:
        return found
    admitted = [nic for nic in nics if hca_lists[0].allows(nic.device, nic.port)]
    admitted.sort(key=name_order)
    for nic, choice in find_nearest(admitted, gpus, [nic for nic in admitted if choices[nic].is_rail]).items():
        if found[nic].is_rail and choice.gpus and choice.gpus != found[nic].gpus:
            reason = f"{choice.reason}, among the ports of NCCL_IB_HCA"
            found[nic] = replace(found[nic], gpus=choice.gpus, path=choice.path, reason=reason)
    return found


def _with_admitted(
    nics: Collection[Nic], gpus: Sequence[Gpu], hca_lists: Sequence[HcaList], machine: Mapping[Nic, Choice]
) -> dict[Nic, Choice]:
    """The machine's own rails, and what is one to a job besides."""
    choices = dict(machine)
    for hca_list in hca_lists:
        admitted = sorted((nic for nic in nics if hca_list.allows(nic.device, nic.port)), key=name_order)
        keep = [nic for nic in admitted if machine[nic].is_rail]
        for nic, choice in find_nearest(admitted, gpus, keep).items():
            entry = None if hca_list.exclude else hca_list.find(nic.device, nic.port)
            if entry is not None and entry.rail is not None:
                choice = replace(choice, is_rail=True)
            # To a job's GPUs a port may be the nearest that is left: the machine's own pairs are shown.
            if choice.is_rail and not choices[nic].is_rail:
                choices[nic] = replace(choice, reason=f"NCCL_IB_HCA={hca_list.text}; {choice.reason}")
    return choices


def _given_by_nccl(
    nics: Iterable[Nic],
    hca_lists: Sequence[HcaList],
    topology: XmlTopology | None,
    given: dict[Nic, tuple[str, str]],
) -> dict[Nic, int]:
    """Planes; rails that NCCL was told go into `given`, where the configuration says nothing."""
    planes: dict[Nic, int] = {}
    for nic in nics:
        for hca_list in hca_lists:
            entry = None if hca_list.exclude else hca_list.find(nic.device, nic.port)
            if entry is None:
                continue
            if entry.rail is not None:
                given.setdefault(nic, (str(entry.rail), f"NCCL_IB_HCA gives it rail {entry.rail}"))
            if entry.plane is not None:
                planes.setdefault(nic, entry.plane)
        net = _described(nic, topology)
        if net is not None and net.rail is not None:
            given.setdefault(nic, (str(net.rail), f"the NCCL topology file says rail={net.rail}"))
        if net is not None and net.plane is not None:
            planes.setdefault(nic, net.plane)
    return planes


def _described(nic: Nic, topology: XmlTopology | None) -> XmlNet | None:
    """The topology file's entry for a port: by name, or else by PCI function if that has one port there."""
    nets = topology.nets if topology else ()
    names = (nic.device, f"{nic.device}{DATA_DIRECT}")
    named = [net for net in nets if net.name in names]
    # A device has one port as a rule, whatever number the file gives it.
    for net in named if len(named) > 1 else ():
        if nic.port is None or net.port is None or net.port == nic.port:
            return net
    if named:
        return named[0] if len(named) == 1 else None
    same = [net for net in nets if net.place.address and net.place.address == nic.place.address]
    return same[0] if len(same) == 1 else None


def _numbers(choices: Mapping[Nic, Choice], gpus: Sequence[Gpu]) -> dict[Nic, int]:
    """The number of every port by its GPUs, those that are no rails after the others."""
    rails = [nic for nic, choice in choices.items() if choice.is_rail]
    rails.sort(key=lambda nic: (not choices[nic].gpus, choices[nic].gpus[:1], name_order(nic)))
    others = sorted((nic for nic in choices if nic not in rails), key=name_order)
    own = [choices[nic].gpus for nic in rails]
    numbers = {nic: number for number, nic in enumerate(rails)}
    if own and all(own):
        share = max(map(len, own))
        slots = [members[0] // share for members in own]
        disjoint = len({gpu for members in own for gpu in members}) == sum(map(len, own))
        in_range = len(gpus) % share == 0 and max(slots) * share < len(gpus)
        # A card that is missing must not move the others; a single card of a large machine is rail 0 all the same.
        if disjoint and in_range and len(set(slots)) == len(slots) and 2 * len(rails) * share > len(gpus):
            numbers = dict(zip(rails, slots, strict=True))
    first = max(numbers.values(), default=-1) + 1
    return numbers | {nic: number for number, nic in enumerate(others, first)}


def _final_numbers(
    rails: Sequence[Nic], given: Mapping[Nic, tuple[str, str]], numbers: Mapping[Nic, int]
) -> dict[Nic, str]:
    """Given numbers first; the others keep theirs unless it is taken."""
    final = {nic: given[nic][0] for nic in rails if nic in given}
    taken = set(final.values())
    others = sorted((nic for nic in rails if nic not in given), key=lambda nic: numbers[nic])
    late = []
    for nic in others:
        number = str(numbers[nic])
        if number in taken:
            late.append(nic)
        else:
            final[nic] = number
            taken.add(number)
    for nic in late:
        final[nic] = next(number for number in map(str, count()) if number not in taken)
        taken.add(final[nic])
    return final
