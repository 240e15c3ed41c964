"""Which ports the GPUs of a machine send through, and why the others are no rails.

As NCCL, a GPU takes the nearest of the ports that its job may use; a port that is nearest to no GPU is left out, for
it carries storage or management.  Where several GPUs and ports are equally near they are paired in order: whom NCCL
pairs there depends on its version, and the counters show it.

Of ports that are equally near some are out of the ordinary: much slower than the fastest of them, which NCCL minds
before distance (ncclTopoGetLocal in src/graph/topo.cc); of Ethernet where the rails run InfiniBand; the second port of
a card, without a cable.  Such a port may be a storage or management port, or a rail that is sick.  What tells is the
rest of the machine: it is a rail if it is the same product as an ordinary rail, and the GPUs that it is near to have
fewer ordinary ports than others have.  What leads to NVSwitches, and a product of which every card is much slower, is
no rail wherever it sits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from railscope.agent.node.rails.selection import natural_order
from railscope.probes.topology.machine import Gpu, Nic
from railscope.probes.topology.paths import PathType, Place, path_type, shared_switches
from railscope.probes.topology.pci import pci_order

_MUCH_SLOWER: Final = 2
"""A port is out of the ordinary if another, as near to the same GPU, is at least this many times as fast."""
_NO_RAIL: Final = 10
"""And a product is, anywhere, if the fastest port is more than this many times as fast as the best of its ports."""
_FABRICS: Final = ("InfiniBand", "Ethernet")
"""Link layers, of which rails have one: NCCL does not bring them together.  The first where both serve as many GPUs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the machine reports of a port."""

    is_rail: bool
    reason: str
    gpus: tuple[int, ...] = ()
    path: PathType | None = None


_Nearness = tuple[PathType, int]
"""Path, then how many switches are shared, negated: the smaller the nearer."""


def name_order(nic: Nic) -> tuple[object, ...]:
    """Sorting key of ports: by name, 2 before 10."""
    # Where no name is known the PCI address stands for it: its numbers are hexadecimal.
    return pci_order(nic.device), natural_order(nic.device), nic.port or 0


def label_of(nic: Nic) -> str:
    """How a port is called in a sentence: `mlx5_0:1`."""
    return nic.device if nic.port is None else f"{nic.device}:{nic.port}"


def find_nearest(nics: Sequence[Nic], gpus: Sequence[Gpu], keep: Collection[Nic]) -> dict[Nic, Choice]:
    """What each of these ports is to these GPUs, which come by number; `keep` are rails whatever their links do."""
    choices: dict[Nic, Choice] = {}
    fastest = max((_speed(nic) for nic in nics), default=0)
    usable = []
    for nic in nics:
        best = max(_speed(other) for other in nics if other is nic or other.hardware.same_as(nic.hardware))
        if nic not in keep and nic.manages_switches:
            choices[nic] = Choice(False, "leads to NVSwitches and to no network: their management")
        elif nic not in keep and 0 < best * _NO_RAIL < fastest:
            choices[nic] = Choice(False, f"{_gigabits(nic)} where others run at {fastest * 8 / 1e9:g} Gb/s")
        else:
            usable.append(nic)
    near = {(gpu, nic): _nearness(gpu.place, nic.place) for gpu in gpus for nic in usable}
    fabric = _fabric(gpus, usable, near)
    for nic in [nic for nic in usable if _foreign(nic, fabric) and nic not in keep]:
        if not any(other.link_layer == fabric and other.hardware.same_as(nic.hardware) for other in usable):
            choices[nic] = Choice(False, f"{_foreign(nic, fabric)}: storage or management")
            usable.remove(nic)
    farthest = _farthest(near[gpu, nic][0] for gpu in gpus for nic in usable)
    if farthest is PathType.SYS:
        reason = "no GPU is near any port: numbered by name" if gpus else "no GPU here: numbered by name"
        return choices | {nic: Choice(True, reason) for nic in usable}

    equal: defaultdict[tuple[Nic, ...], list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        best_way = min(near[gpu, nic] for nic in usable)
        if best_way[0] <= farthest:
            equal[tuple(nic for nic in usable if near[gpu, nic] == best_way)].append(gpu)
    groups: dict[tuple[Nic, ...], list[Gpu]] = {}
    for members, served in _without_the_odd(equal, keep, fabric, choices).items():
        groups.setdefault(members, []).extend(served)
    distances = {members: min(near[gpu, members[0]] for gpu in served) for members, served in groups.items()}
    for nic, chosen, together in _paired(groups, distances):
        path = min(near[gpu, nic][0] for gpu in chosen)
        choices[nic] = Choice(True, _why(nic, chosen, path, together), tuple(gpu.index for gpu in chosen), path)
    for nic in usable:
        if nic not in choices:
            choices[nic] = Choice(nic in keep, _why_not(nic, gpus, near, usable, farthest))
        elif nic in keep:
            choices[nic] = replace(choices[nic], is_rail=True)
    return choices


def _farthest(paths: Iterable[PathType]) -> PathType:
    """How far a GPU's port may be: behind switches where any is, else on its NUMA node; SYS: nothing is near."""
    closest = min(paths, default=PathType.SYS)
    if closest is PathType.SYS:
        return PathType.SYS
    return PathType.PXB if closest <= PathType.PXB else PathType.PHB


def _fabric(gpus: Sequence[Gpu], nics: Sequence[Nic], near: Mapping[tuple[Gpu, Nic], _Nearness]) -> str:
    """The link layer of the ports that most GPUs are near to; empty where only one is there, or none is known."""
    served = dict.fromkeys(_FABRICS, 0)
    farthest = _farthest(path for path, _shared in near.values())
    for gpu in gpus:
        best = min((near[gpu, nic] for nic in nics), default=(PathType.SYS, 0))
        layers = {nic.link_layer for nic in nics if near[gpu, nic] == best and best[0] <= farthest}
        for layer in layers & served.keys():
            served[layer] += 1
    return max(_FABRICS, key=served.__getitem__) if all(served.values()) else ""


def _foreign(nic: Nic, fabric: str) -> str:
    """Why a port is of another network than the rails'; empty: it is not, or that is not known."""
    if not fabric or nic.link_layer not in _FABRICS or nic.link_layer == fabric:
        return ""
    return f"{nic.link_layer} where the rails run {fabric}"


def _without_the_odd(
    equal: Mapping[tuple[Nic, ...], list[Gpu]], keep: Collection[Nic], fabric: str, choices: dict[Nic, Choice]
) -> dict[tuple[Nic, ...], list[Gpu]]:
    """Of ports that are equally near to GPUs those that are rails; `choices` gets why the others are none."""
    odd = {
        members: {nic: why for nic in members if nic not in keep and (why := _oddity(nic, members, fabric))}
        for members in equal
    }
    ordinary = {members: [nic for nic in members if nic not in odd[members]] for members in equal}
    known = [nic for found in ordinary.values() for nic in found]
    usual = max((Fraction(len(ordinary[members]), len(gpus)) for members, gpus in equal.items()), default=Fraction())
    groups: defaultdict[tuple[Nic, ...], list[Gpu]] = defaultdict(list)
    for members, gpus in equal.items():
        count = len(ordinary[members])
        siblings = [nic for nic in odd[members] if any(nic.hardware.same_as(other.hardware) for other in known)]
        room = int(usual * len(gpus)) - count
        whole = count + len(siblings)
        # What no other group of GPUs tells: whether they can share the ports, at most one to a GPU where all are alike.
        if _even(whole, len(gpus)) and (not _even(count, len(gpus)) or (len(equal) == 1 and whole <= len(gpus))):
            room = len(siblings)
        sick = siblings[: max(room, 0)]
        for nic, why in odd[members].items():
            if nic not in sick:
                choices[nic] = Choice(False, why)
        rails = tuple(nic for nic in members if nic not in odd[members] or nic in sick)
        if rails:
            groups[rails] += gpus
    return dict(groups)


def _even(ports: int, gpus: int) -> bool:
    """Whether ports can be shared out among GPUs so that all have as much."""
    return ports > 0 and (ports % gpus == 0 or gpus % ports == 0)


def _oddity(nic: Nic, equal: Sequence[Nic], fabric: str) -> str:
    """Why a port may be no rail though no other is nearer to the same GPUs; empty: nothing speaks against it."""
    if foreign := _foreign(nic, fabric):
        return f"{foreign}: storage or management"
    rival = max(equal, key=_speed)
    if 0 < _speed(nic) * _MUCH_SLOWER <= _speed(rival):
        return f"{_gigabits(nic)}, and {label_of(rival)}, as near to the same GPU, runs at {_gigabits(rival)}"
    # The second port of a card is often left without a cable, on every card of a cluster.
    card = nic.place.address.rpartition(".")[0]
    others = [other for other in equal if other.up and card and other.place.address.startswith(f"{card}.")]
    if nic.up is not False or not others:
        return ""
    return f"not connected, and {label_of(others[0])}, a port of the same card, is"


def _speed(nic: Nic) -> int:
    """0 if unknown: a port without a link reports some slow rate."""
    return 0 if nic.up is False else nic.speed_bytes_per_second or 0


def _gigabits(nic: Nic) -> str:
    return f"{_speed(nic) * 8 / 1e9:g} Gb/s"


def _nearness(one: Place, other: Place) -> _Nearness:
    return path_type(one, other), -len(shared_switches(one, other))


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
        return f"{path.name} to GPU {gpu.index}, which has a nearer port, {label_of(other)}"
    where = "shares a PCI switch" if farthest is PathType.PXB else "is on a NUMA node"
    return f"no GPU {where} with it, as with other ports ({path.name} to GPU {gpu.index}): storage or management"


def _gpu_words(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"GPU {numbers[0]}"
    return f"GPUs {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
