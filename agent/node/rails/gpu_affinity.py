"""Maps ports to rails, and GPUs to the ports that they send through.

Where a rail's number comes from, the first that says something:

1. the configuration: names or patterns, with a number where one is given (`mlx5_3=1`, `mlx5_0:2=1` for one port);
2. the rail in the NCCL_IB_HCA of the jobs that run; 3. `rail=` in their NCCL topology file, both only as long as no
   tenant's job says otherwise (agent/node/rails/rdma_rails.py);
4. the nearest GPU, with the places that the topology file gives, or else the PCI tree: what shares a PCI switch (PIX,
   PXB, the deepest switch first), or where no card does that, the NUMA node (PHB); 5. the order of names.

As NCCL, a GPU takes the nearest of the ports that its job may use; a port that is nearest to no GPU is left out, for
it carries storage or management.  So is one that is much slower than the others, which NCCL minds before distance
(ncclTopoGetLocal in src/graph/topo.cc).  Where several GPUs and ports are equally near they are paired in order: whom
NCCL pairs there depends on its version, and the counters show it.

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
from typing import Final

from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.rails.selection import RdmaPorts, RdmaRail, natural_order
from railscope.probes.rdma.inventory import RdmaPort
from railscope.probes.topology.ib_hca import HcaList
from railscope.probes.topology.machine import Gpu, Nic, described_places, find_described_place
from railscope.probes.topology.nccl_xml import XmlNet, XmlTopology
from railscope.probes.topology.paths import PathType, Place, path_type, shared_switches
from railscope.probes.topology.pci import pci_order

_MUCH_SLOWER: Final = 2
"""A port is left out if another, as near to the same GPU, is more than this many times as fast."""
_NO_RAIL: Final = 10
"""And anywhere, if the fastest is: a badly trained link loses at most a factor of eight."""


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

    @property
    def gpu_label(self) -> str:
        """The `gpu` label of metrics: `3`, or `0,1` where GPUs share the port, or `unknown`."""
        return ",".join(map(str, self.gpus)) or UNKNOWN


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the machine reports of a port."""

    is_rail: bool
    reason: str
    gpus: tuple[int, ...] = ()
    path: PathType | None = None


_Nearness = tuple[PathType, int]
"""Path, then how many switches are shared, negated: the smaller the nearer."""


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
    by_place = _by_description(sorted(nics, key=_name_order), described)
    ports = list(by_place)
    gpus = [
        replace(gpu, place=find_described_place(gpu.place, described) or gpu.place)
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
    ]
    keep = {nic for nic in ports if (nic.device, nic.port) in known}
    machine = _nearest(ports, gpus, keep)
    given: dict[Nic, tuple[str, str]] = {}
    if patterns:
        choices = _configured(ports, gpus, patterns, given)
        numbers = _numbers(choices, gpus)
    else:
        numbers = _numbers(machine, gpus)
        choices = _with_admitted(ports, gpus, hca_lists, machine)
        for nic in ports:
            net = _described(nic, topology)
            admitted = not hca_lists or any(hca_list.allows(nic.device, nic.port) for hca_list in hca_lists)
            if net is not None and net.rail is not None and admitted:
                choices[nic] = replace(choices[nic], is_rail=True)
    used = {nic for nic in ports if any(hca_list.allows(nic.device, nic.port) for hca_list in hca_lists)}
    planes = _given_by_nccl(ports, hca_lists if numbered_by is None else numbered_by, topology, given)
    rails = _final_numbers([nic for nic in ports if choices[nic].is_rail], given, numbers)
    mapped = []
    for nic in ports:
        choice = choices[nic]
        source = given[nic][1] if nic in given and choice.is_rail else ""
        by_file = " (NCCL topology file)" if by_place[nic] and choice.path is not None else ""
        reason = f"{source}; {choice.reason}{by_file}" if source else f"{choice.reason}{by_file}"
        mapped.append(
            MappedNic(
                nic,
                rails.get(nic),
                planes.get(nic),
                choice.gpus,
                choice.path,
                reason,
                requested=not patterns and choice.is_rail and not machine[nic].is_rail,
                carries=bool(patterns) or not hca_lists or nic in used,
            )
        )
    return tuple(
        sorted(mapped, key=lambda entry: (entry.rail is None, natural_order(entry.rail or ""), _name_order(entry.nic)))
    )


def rdma_ports(ports: Iterable[RdmaPort], mapped: Iterable[MappedNic]) -> RdmaPorts:
    """What the rails of network devices need to know of RDMA ports: which belong together."""
    numbers = {(entry.nic.device, entry.nic.port): entry.rail for entry in mapped}
    known = tuple(ports)
    devices = sorted({port.device for port in known})
    rails = []
    for port in known:
        rail = numbers.get((port.device, port.port))
        if rail is not None:
            rails.append(RdmaRail(rail, port.pci, port.netdevs))
    return RdmaPorts((*devices, *(f"{port.device}:{port.port}" for port in known)), tuple(rails))


def _name_order(nic: Nic) -> tuple[object, ...]:
    # Where no name is known the PCI address stands for it: its numbers are hexadecimal.
    return pci_order(nic.device), natural_order(nic.device), nic.port or 0


def _by_description(nics: Iterable[Nic], described: Mapping[str, Place]) -> dict[Nic, bool]:
    """The ports where the topology file puts them, and whether it does."""
    found = {}
    for nic in nics:
        place = find_described_place(nic.place, described)
        found[nic if place is None else replace(nic, place=place)] = place is not None
    return found


def _nearest(nics: Sequence[Nic], gpus: Sequence[Gpu], keep: Collection[Nic]) -> dict[Nic, _Choice]:
    """What each of these ports is to these GPUs, which come by number; `keep` are rails at any speed."""
    choices: dict[Nic, _Choice] = {}
    fastest = max((_speed(nic) for nic in nics), default=0)
    usable = []
    for nic in nics:
        if nic not in keep and 0 < _speed(nic) * _NO_RAIL < fastest:
            choices[nic] = _Choice(False, f"{_gigabits(nic)} where others run at {fastest * 8 / 1e9:g} Gb/s")
        else:
            usable.append(nic)
    near = {(gpu, nic): _nearness(gpu.place, nic.place) for gpu in gpus for nic in usable}
    closest = min((path for path, _shared in near.values()), default=PathType.SYS)
    if closest is PathType.SYS:
        reason = "no GPU is near any port: numbered by name" if gpus else "no GPU here: numbered by name"
        return choices | {nic: _Choice(True, reason) for nic in usable}
    farthest = PathType.PXB if closest <= PathType.PXB else PathType.PHB

    groups: defaultdict[tuple[Nic, ...], list[Gpu]] = defaultdict(list)
    distances: dict[tuple[Nic, ...], _Nearness] = {}
    for gpu in gpus:
        best = min(near[gpu, nic] for nic in usable)
        if best[0] <= farthest:
            equal = [nic for nic in usable if near[gpu, nic] == best]
            group = tuple(nic for nic in equal if _stays(nic, equal, keep, choices))
            groups[group].append(gpu)
            distances[group] = min(best, distances.get(group, best))
    for nic, chosen, together in _paired(groups, distances):
        path = min(near[gpu, nic][0] for gpu in chosen)
        choices[nic] = _Choice(True, _why(nic, chosen, path, together), tuple(gpu.index for gpu in chosen), path)
    for nic in usable:
        if nic not in choices:
            choices[nic] = _Choice(nic in keep, _why_not(nic, gpus, near, usable, farthest))
        elif nic in keep:
            choices[nic] = replace(choices[nic], is_rail=True)
    return choices


def _speed(nic: Nic) -> int:
    """0 if unknown: a port without a link reports some slow rate."""
    return 0 if nic.up is False else nic.speed_bytes_per_second or 0


def _gigabits(nic: Nic) -> str:
    return f"{_speed(nic) * 8 / 1e9:g} Gb/s"


def _nearness(one: Place, other: Place) -> _Nearness:
    return path_type(one, other), -len(shared_switches(one, other))


def _stays(nic: Nic, equal: Sequence[Nic], keep: Collection[Nic], choices: dict[Nic, _Choice]) -> bool:
    """Whether a port counts among those equally near to a GPU; why not is written into `choices`."""
    if nic in keep:
        return True
    rival = max(equal, key=_speed)
    if 0 < _speed(nic) * _MUCH_SLOWER <= _speed(rival):
        reason = f"{_gigabits(nic)}, and {_label(rival)}, as near to the same GPU, runs at {_gigabits(rival)}"
    else:
        # The second port of a card is often left without a cable, on every card of a cluster.
        card = nic.place.address.rpartition(".")[0]
        siblings = [other for other in equal if other.up and card and other.place.address.startswith(f"{card}.")]
        if nic.up is not False or not siblings:
            return True
        reason = f"not connected, and {_label(siblings[0])}, a port of the same card, is"
    choices[nic] = _Choice(False, reason)
    return False


def _paired(
    groups: Mapping[tuple[Nic, ...], list[Gpu]], distances: Mapping[tuple[Nic, ...], _Nearness]
) -> list[tuple[Nic, list[Gpu], bool]]:
    """Each port with its GPUs, and whether it was paired in order; the nearest first, so that no port is left over."""
    taken: defaultdict[Nic, list[Gpu]] = defaultdict(list)
    in_order: set[Nic] = set()
    for group, members in sorted(groups.items(), key=lambda item: (distances[item[0]], item[1][0].index)):
        free = [nic for nic in group if nic not in taken] or list(group)
        if len(members) >= len(free):
            for gpu in members:
                taken[min(free, key=lambda nic: len(taken[nic]))].append(gpu)
        else:
            for position, nic in enumerate(free):
                taken[nic].append(members[position * len(members) // len(free)])
        if len(members) > 1 and len(group) > 1:
            in_order.update(free)
    return [
        (nic, sorted(chosen, key=lambda gpu: gpu.index), nic in in_order) for nic, chosen in taken.items() if chosen
    ]


def _why(nic: Nic, gpus: Sequence[Gpu], path: PathType, in_order: bool) -> str:
    nearest = next(gpu for gpu in gpus if path_type(gpu.place, nic.place) is path)
    numbers = _gpu_words([gpu.index for gpu in gpus])
    shared = shared_switches(nearest.place, nic.place)
    if shared:
        reason = f"{path.name} to {numbers}, by PCI switch {shared[-1]}"
    elif nic.place.numa_node is not None:
        reason = f"{path.name} to {numbers}, on NUMA node {nic.place.numa_node}; no port shares a PCI switch with a GPU"
    else:
        reason = f"{path.name} to {numbers}, by host bridge {nic.place.root or nic.place.address}"
    return f"{reason}; several are equally near: paired in order" if in_order else reason


def _why_not(
    nic: Nic,
    gpus: Sequence[Gpu],
    near: Mapping[tuple[Gpu, Nic], _Nearness],
    usable: Sequence[Nic],
    farthest: PathType,
) -> str:
    gpu = min(gpus, key=lambda gpu: near[gpu, nic])
    path = near[gpu, nic][0]
    if path <= farthest:
        other = min(usable, key=lambda other: near[gpu, other])
        return f"{path.name} to GPU {gpu.index}, which has a nearer port, {_label(other)}"
    where = "shares a PCI switch" if farthest is PathType.PXB else "is on a NUMA node"
    return f"no GPU {where} with it, as with other ports ({path.name} to GPU {gpu.index}): storage or management"


def _gpu_words(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"GPU {numbers[0]}"
    return f"GPUs {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _label(nic: Nic) -> str:
    return nic.device if nic.port is None else f"{nic.device}:{nic.port}"


def _configured(
    nics: Sequence[Nic], gpus: Sequence[Gpu], patterns: Sequence[RailPattern], given: dict[Nic, tuple[str, str]]
) -> dict[Nic, _Choice]:
    """What the configuration names is a rail, near or not; numbers that it gives go into `given`."""
    matches: dict[Nic, RailPattern] = {}
    for nic in nics:
        for pattern in patterns:
            if any(fnmatch.fnmatchcase(name, pattern.glob) for name in (nic.device, f"{nic.device}:{nic.port}")):
                matches[nic] = pattern
                break
    near = _nearest(list(matches), gpus, list(matches))
    choices = {}
    for nic in nics:
        pattern_of = matches.get(nic)
        if pattern_of is None:
            choices[nic] = _Choice(False, "matches no configured rail")
            continue
        if pattern_of.rail:
            given[nic] = (pattern_of.rail, f"configured: {pattern_of.glob}={pattern_of.rail}")
            reason = near[nic].reason
        else:
            reason = f"configured: {pattern_of.glob}; {near[nic].reason}"
        choices[nic] = replace(near[nic], is_rail=True, reason=reason)
    return choices


def _with_admitted(
    nics: Sequence[Nic], gpus: Sequence[Gpu], hca_lists: Sequence[HcaList], machine: Mapping[Nic, _Choice]
) -> dict[Nic, _Choice]:
    """The machine's own rails, and what is one to a job besides."""
    choices = dict(machine)
    for hca_list in hca_lists:
        admitted = [nic for nic in nics if hca_list.allows(nic.device, nic.port)]
        keep = [nic for nic in admitted if machine[nic].is_rail]
        for nic, choice in _nearest(admitted, gpus, keep).items():
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
    for net in nets:
        if net.name == nic.device and (nic.port is None or net.port is None or net.port == nic.port):
            return net
    same = [net for net in nets if net.place.address and net.place.address == nic.place.address]
    return same[0] if len(same) == 1 and all(net.name != nic.device for net in nets) else None


def _numbers(choices: Mapping[Nic, _Choice], gpus: Sequence[Gpu]) -> dict[Nic, int]:
    """The number of every port by its GPUs, those that are no rails after the others."""
    rails = [nic for nic, choice in choices.items() if choice.is_rail]
    rails.sort(key=lambda nic: (not choices[nic].gpus, choices[nic].gpus[:1], _name_order(nic)))
    others = sorted((nic for nic in choices if nic not in rails), key=_name_order)
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
