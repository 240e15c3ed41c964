"""Which network devices are rails, and which number each rail has.

The configuration decides where it says something: names or patterns, with a number where one is given (`eth2=0`).
Else rails are, namespace by namespace:

1. NCCL's own choice: devices named `ib…`, else all but `docker…`, `lo…` and `virbr…` (ncclFindInterfaces in NCCL's
   src/misc/socket.cc);
2. besides, what the jobs that run there ask for in NCCL_SOCKET_IFNAME, read as NCCL reads it, as long as they run.

No job's setting takes a rail from another.  Where every job that runs in a namespace named its devices, the other rails
are shown and no bytes of collectives are expected on them.  Jobs of one namespace that named different devices are
not told apart there: what they should have sent is shared out over all that they named.

Of what NCCL would take, parts of bonds and bridges are left out, as they have no address of their own; and, where
nobody named them, what is switched off and what containers and hypervisors make beside hardware.

Rails are numbered by position in natural order (eth2 before eth10), those that only jobs asked for after the others.
A device that was a rail by NCCL's own choice stays one, also when
it is switched off: a rail that is down is the one people look for.  One that vanished keeps its number for a while,
so that the others keep theirs.

On a host with RDMA rails NCCL sends through them, and a network device is what its RDMA port is: of a rail it has the
rail's number, of a storage or management port it is no rail, and neither is one without a port, be it named in
NCCL_SOCKET_IFNAME, by which jobs only find each other then.  Only in a namespace of a job that uses sockets, as its
settings say or its bytes show, is everything else chosen as above; such devices take numbers that no RDMA rail has.  So
do the devices of a namespace where no job runs, of the numbers that rails of jobs have elsewhere: sums over a rail's
number then never mix two networks.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from types import MappingProxyType
from typing import Final

from railscope.agent.config.rail_patterns import RailPattern
from railscope.agent.facts.rail_decision import RailDecision
from railscope.probes.netdev.inventory import NetworkDevice

LINGER_PERIODS: Final = 3
"""A namespace and a job's settings outlive the last process by this many sample periods: its last bytes are seen."""
_DEFAULT_FIRST: Final = "ib"
_DEFAULT_EXCLUDED: Final = "^docker,lo,virbr"
_DEFAULT_LAST: Final = ("docker", "lo", "virbr")
_NOT_HARDWARE: Final = frozenset(
    {"bridge", "veth", "tun", "dummy", "ifb", "vxlan", "geneve", "gre", "wireguard", "representor", "openvswitch"}
)
"""Kinds that carry no traffic of their own off the host, or carry that of containers and virtual machines."""


@dataclass(frozen=True, slots=True)
class RdmaRail:
    """A port of an RDMA device that is a rail, as far as it matters to network devices."""

    rail: str
    pci: str
    """Empty where there is none."""
    netdevs: tuple[str, ...]
    """Its network devices, in the agent's own network namespace."""


@dataclass(frozen=True, slots=True)
class RdmaNoRail:
    """A port of an RDMA device that is no rail, as far as it matters to network devices."""

    reason: str
    pci: str
    netdevs: tuple[str, ...]
    """As of `RdmaRail`."""


@dataclass(frozen=True, slots=True)
class RdmaPorts:
    """The RDMA side of this host."""

    names: tuple[str, ...] = ()
    """Devices and ports by the names that patterns may use, rails or not."""
    rails: tuple[RdmaRail, ...] = ()
    others: tuple[RdmaNoRail, ...] = ()

    @property
    def numbers(self) -> frozenset[str]:
        return frozenset(entry.rail for entry in self.rails)

    def rail_of(self, device: NetworkDevice, *, home: bool) -> RdmaRail | None:
        """The port that a network device belongs to, if that is a rail; None as well where it may be one of several.

        `home`: the device is in the agent's own namespace, where its name says so; elsewhere the PCI function does.
        """
        found = [entry for entry in self.rails if home and device.name in entry.netdevs]
        found = found or [entry for entry in self.rails if device.pci and device.pci == entry.pci]
        return found[0] if len({entry.rail for entry in found}) == 1 else None

    def why_no_rail(self, device: NetworkDevice, *, home: bool) -> str:
        """Why a network device is no rail where NCCL sends through RDMA; empty: it belongs to a port that is one."""
        if self.belongs(device, home=home):
            return ""
        for entry in self.others:
            if (home and device.name in entry.netdevs) or (device.pci and device.pci == entry.pci):
                return f"its RDMA port is no rail: {entry.reason}"
        return "of no RDMA port, and NCCL sends through those"

    def belongs(self, device: NetworkDevice, *, home: bool) -> bool:
        """Whether a network device is one of a port that is a rail."""
        return any(
            (home and device.name in entry.netdevs) or (device.pci and device.pci == entry.pci) for entry in self.rails
        )


NO_RDMA: Final = RdmaPorts()


def socket_interface_matches(value: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME=`value` lets NCCL use the device: prefixes by comma, `=` exact, `^` all but these."""
    exclude, exact, wanted = _parsed(value)
    matches = not wanted or (name in wanted if exact else name.startswith(wanted))
    return matches != exclude


@lru_cache(maxsize=256)
def _parsed(value: str) -> tuple[bool, bool, tuple[str, ...]]:
    """Whether a value excludes, whether it names devices exactly, and which; a job's may have hundreds."""
    exclude = value.startswith("^")
    rest = value[1:] if exclude else value
    exact = rest.startswith("=")
    rest = rest[1:] if exact else rest
    # What follows a colon is a port; an empty list matches everything.
    wanted = (token.split(":", 1)[0] for token in rest.split(","))
    return exclude, exact, tuple(dict.fromkeys(token for token in wanted if token))


@lru_cache(maxsize=1024)
def natural_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sorting key of device names, in which eth2 comes before eth10."""
    return tuple(
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"([0-9]+)", name) if part
    )


def decide_rails(
    devices: Iterable[NetworkDevice],
    *,
    patterns: Sequence[RailPattern] = (),
    socket_interfaces: Mapping[int, Sequence[str]] | None = None,
    known: Collection[tuple[int, str]] = (),
    rdma: RdmaPorts = NO_RDMA,
    home: Collection[int] = (),
    idle: Collection[int] = (),
    sockets: Collection[int] = (),
    numbers_of_jobs: Collection[str] = (),
    held: Mapping[tuple[int, str], str] = MappingProxyType({}),
) -> tuple[RailDecision, ...]:
    """Decide of every network device whether it is a rail, by namespace and natural order of names.

    `socket_interfaces` holds the NCCL_SOCKET_IFNAME values of the jobs that run in each network namespace (by inode),
    empty for one without; `known` the (namespace, name) of devices that were rails before by NCCL's own choice, also of
    those that vanished lately.  `home` is the agent's own namespace, `idle` are those where no job ever ran; `sockets`
    are those with a job that uses sockets although the host has RDMA rails; `numbers_of_jobs` are left to rails
    elsewhere, besides those given here.  `held` are the numbers of devices that only jobs made rails: each keeps its
    own while no other rail takes it.
    """
    known = frozenset(known)
    given = {pattern.glob: pattern.rail for pattern in patterns if pattern.rail}
    taken = set(numbers_of_jobs)
    namespaces: defaultdict[int, list[NetworkDevice]] = defaultdict(list)
    for device in devices:
        namespaces[device.netns].append(device)
    known_in: defaultdict[int, list[str]] = defaultdict(list)
    for home_of, name in known:
        known_in[home_of].append(name)
    decisions: list[RailDecision] = []
    # Those without jobs come last: they take what is left.
    for netns, members in sorted(namespaces.items(), key=lambda entry: (entry[0] in idle, entry[0])):
        members.sort(key=lambda device: natural_order(device.name))
        if patterns:
            chosen = _configured(members, patterns)
        else:
            chosen = _with_requested(_by_default(members, known), (socket_interfaces or {}).get(netns, ()), members)
            if rdma.rails and netns not in sockets:
                chosen = [_beside_rdma(choice, rdma, home=netns in home) for choice in chosen]
        fixed: dict[str, str] = {}
        ports: set[RdmaRail] = set()
        """Of these: virtual functions share the number of the port that they are parts of, and count apart."""
        for choice in chosen:
            device = choice.device
            port = rdma.rail_of(device, home=netns in home)
            if not choice.is_rail:
                continue
            if device.name in given:
                fixed[device.name] = given[device.name]
            elif port is not None and port not in ports and port.rail not in given.values():
                fixed[device.name] = port.rail
                ports.add(port)
        names = {device.name for device in members}
        vanished = [name for name in known_in[netns] if name not in names]
        others = rdma.numbers | (taken if netns in idle else set())
        numbered = _number(chosen, fixed, others, vanished, {name: held.get((netns, name), "") for name in names})
        if netns not in idle:
            taken.update(decision.rail for decision in numbered if decision.rail is not None)
        decisions += numbered
    return tuple(sorted(decisions, key=lambda decision: decision.device.netns))


@dataclass(frozen=True, slots=True)
class _Choice:
    device: NetworkDevice
    is_rail: bool
    reason: str
    requested: bool = False
    carries: bool = True


def _configured(members: list[NetworkDevice], patterns: Sequence[RailPattern]) -> list[_Choice]:
    choices: list[_Choice] = []
    for device in members:
        match = next((entry.glob for entry in patterns if fnmatch.fnmatchcase(device.name, entry.glob)), None)
        reason = "matches no configured rail" if match is None else f"configured: {match}"
        choices.append(_Choice(device, match is not None, reason))
    return choices


def _beside_rdma(choice: _Choice, rdma: RdmaPorts, *, home: bool) -> _Choice:
    """What a device is where NCCL sends through RDMA."""
    why = rdma.why_no_rail(choice.device, home=home)
    return replace(choice, is_rail=False, reason=why, requested=False) if choice.is_rail and why else choice


def _with_requested(by_default: list[_Choice], settings: Sequence[str], members: list[NetworkDevice]) -> list[_Choice]:
    """NCCL's own choice, and what jobs asked for besides; a job's setting adds rails and takes none away."""
    values = [value for value in settings if len(value) > 1]
    if not values:
        return by_default
    hardware = _has_hardware(members, ())
    chosen_by = {choice.device.name: _request(choice.device, values, hardware=hardware) for choice in by_default}
    # Jobs without a setting use NCCL's own choice.  What a loopback device carries leaves no host.
    used = {choice.device.name for choice in by_default if choice.is_rail and len(values) < len(settings)}
    used |= {choice.device.name for choice in by_default if chosen_by[choice.device.name]}
    used -= {choice.device.name for choice in by_default if choice.device.kind == "loopback"}
    choices = []
    for choice in by_default:
        value = chosen_by[choice.device.name]
        choices.append(
            _Choice(
                choice.device,
                choice.is_rail or bool(value),
                f"NCCL_SOCKET_IFNAME={value}" if value else choice.reason,
                requested=bool(value) and not choice.is_rail,
                carries=not used or choice.device.name in used,
            )
        )
    return choices


def _request(device: NetworkDevice, values: Sequence[str], *, hardware: bool) -> str:
    """The setting that lets a job use a device; empty: none does.

    A job may ask for a device by name, be it switched off or not; what it merely does not exclude must be usable.
    """
    if device.master:
        return ""
    usable = not _obstacle(device, (), hardware=hardware)
    asking = (value for value in values if usable or not value.startswith("^"))
    return next((value for value in asking if socket_interface_matches(value, device.name)), "")


def _by_default(members: list[NetworkDevice], known: Collection[tuple[int, str]]) -> list[_Choice]:
    hardware = _has_hardware(members, known)
    reasons = {device.name: _obstacle(device, known, hardware=hardware) for device in members}
    usable = [device for device in members if not reasons[device.name]]
    for value in (_DEFAULT_FIRST, _DEFAULT_EXCLUDED, *_DEFAULT_LAST):
        names = {device.name for device in usable if socket_interface_matches(value, device.name)}
        if names:
            break
    chosen = f"NCCL's own choice: {_words(value)}"
    return [
        _Choice(
            device, device.name in names, chosen if device.name in names else reasons[device.name] or f"not {chosen}"
        )
        for device in members
    ]


def _words(value: str) -> str:
    return f"all but {value[1:]}" if value.startswith("^") else f"devices named {value}…"


def _has_hardware(members: Iterable[NetworkDevice], known: Collection[tuple[int, str]]) -> bool:
    """Whether one of a namespace's devices is a card that is in use."""
    return any(member.kind == "physical" and not _unused(member, known) for member in members)


def _obstacle(device: NetworkDevice, known: Collection[tuple[int, str]], *, hardware: bool) -> str:
    """Why NCCL would not send through a device, or why that would not be a rail; empty if nothing speaks against.

    `hardware`: there is some beside it.
    """
    if device.master:
        return f"part of {device.master}"
    if device.kind in _NOT_HARDWARE and hardware:
        return f"{device.kind} beside hardware"
    return "switched off" if _unused(device, known) else ""


def _unused(device: NetworkDevice, known: Collection[tuple[int, str]]) -> bool:
    return device.up is False and (device.netns, device.name) not in known


def _number(
    choices: list[_Choice],
    fixed: Mapping[str, str],
    others: Collection[str],
    vanished: Collection[str],
    held: Mapping[str, str],
) -> list[RailDecision]:
    """Fixed numbers by name first; the rest by position, leaving out numbers that are taken here or by `others`.

    What only jobs made a rail comes last, so that no job renumbers another's rails.
    """
    taken = {*fixed.values(), *others}
    free = (number for number in map(str, count()) if number not in taken)
    own = [choice.device.name for choice in choices if choice.is_rail and not choice.requested]
    numbers = {name: fixed.get(name) or next(free) for name in sorted([*own, *vanished], key=natural_order)}
    requested = [choice.device.name for choice in choices if choice.is_rail and choice.requested]
    taken.update(numbers.values())
    for name in requested:
        number = fixed.get(name) or held.get(name, "")
        if number and (name in fixed or number not in taken):
            numbers[name] = number
            taken.add(number)
    for name in requested:
        if name not in numbers:
            numbers[name] = next(free)
    return [
        RailDecision(
            choice.device,
            numbers[choice.device.name] if choice.is_rail else None,
            choice.reason,
            requested=choice.requested,
            carries=choice.carries,
        )
        for choice in choices
    ]
