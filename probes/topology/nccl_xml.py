"""NCCL's description of a machine: the XML of NCCL_TOPO_FILE and NCCL_TOPO_DUMP_FILE.

Clouds ship such files for virtual machines, whose PCI tree says nothing; operators write `rail=` and `plane=` into
them.  The form is what src/graph/xml.cc and topo.cc of NCCL 2.4 to 2.30 and of RCCL read: `system` holds `cpu` (one a
NUMA node), that holds `pci`, which nest; a function holds `gpu` (several, where it is partitioned), or `nic` with `net`
in it.  All but `busid` may be absent: hand-written files often name the functions only, and NCCL learns the rest from
the machine.  What it dumps where NVLink joins machines holds several: `host_hash` of a `cpu` tells them apart.

Such a file comes from a job, so nothing in it is trusted: document types, and with them entities, are refused before
they are read, and size, depth and number of elements have limits.  What NCCL passes over is passed over here.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NoReturn
from xml.parsers import expat

from railscope.probes.netdev.ethtool import BYTES_PER_MEGABIT
from railscope.probes.processes.open_below import open_below
from railscope.probes.topology.paths import Place
from railscope.probes.topology.pci import (
    MODEL_ATTRIBUTES,
    is_display,
    is_network,
    link_words,
    model_of,
    normal_address,
)

MOST_BYTES: Final = 4 << 20
MOST_ELEMENTS: Final = 4096
"""NCCL reads 256 of a file (NCCL_TOPO_XML_MAX_NODES, src/include/topo.h), and builds that are changed for larger
machines 2,048."""
DEEPEST: Final = 32
"""A PCI tree has eight bridges above each other where it has many."""
MOST_NODES: Final = 576
"""GPUs, network cards or ports: NCCL_TOPO_MAX_NODES."""
_MOST_ATTRIBUTES: Final = 64
_LONGEST_VALUE: Final = 1024
"""NCCL refuses values of 255 characters."""
_MOST_RAILS: Final = 1 << 15
"""NCCL keeps rail and plane as int16_t, and takes what is negative for undefined."""
_MOST_PORTS: Final = 255
"""Of one device; the kernel numbers them from 1."""
_VERSIONS: Final = (1, 2)
"""NCCL's and RCCL's NCCL_TOPO_XML_VERSION: RCCL says more of GPUs, and nothing else of ports."""
DATA_DIRECT: Final = "_dma"
"""After the name of an RDMA device: NCCL's net for its data direct function (ncclIbInitDevices in
src/transport/net_ib/init.cc)."""
_JOINED: Final = "+"
"""Between the names of devices that NCCL merged into a virtual one."""

_WITHOUT_BEING_TOLD: Final = (
    "/run/nvidia-topologyd/virtualTopology.xml",
    "/var/run/nvidia-topologyd/virtualTopology.xml",
)
"""What NCCL reads without NCCL_TOPO_FILE (the second); /var/run is mostly a link to /run, and a link that is absolute
leads out of a container's root."""

_LONGEST_HOST: Final = 20
"""`0x` and 16 digits; a longer one tells nothing apart."""
_INTEGER: Final = re.compile(r"\s*([+-]?)(?:0[xX]([0-9a-fA-F]{1,16})|([0-9]{1,19}))", re.ASCII)

_INSIDE: Final = {
    "system": frozenset({""}),
    "cpu": frozenset({"system"}),
    "pci": frozenset({"cpu", "pci"}),
    "gpu": frozenset({"pci"}),
    "nic": frozenset({"cpu", "pci"}),
    "net": frozenset({"nic"}),
}
"""Where NCCL looks for an element; elsewhere it is ignored, with all that it holds."""


class TopologyError(ValueError):
    """The file is not a topology that can be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class XmlFunction:
    """One `pci` element."""

    place: Place
    class_code: int | None
    gpus: tuple[int | None, ...]
    """NVML's numbers, one for each `gpu` element in it; None where the file does not say."""
    is_gpu: bool
    is_network: bool
    model: str = ""
    """See `PciDevice.model`."""
    link: str = ""
    """What the PCI link runs at, `32.0 GT/s x16`; empty: not known."""


@dataclass(frozen=True, slots=True)
class XmlNet:
    """One `net` element: a port of a network device."""

    name: str
    port: int | None
    """Of the RDMA device.  NCCL writes that plus how many ports before it are on the same card (ncclIbGetRealPort in
    src/transport/net_ib/init.cc)."""
    place: Place
    speed_bytes_per_second: int | None
    rail: int | None
    plane: int | None


@dataclass(frozen=True, slots=True)
class XmlTopology:
    """One machine; with `others` all that a file describes."""

    functions: tuple[XmlFunction, ...]
    """In the order of the file; an address that occurs twice counts where it came first."""
    nets: tuple[XmlNet, ...]
    """In the order of the file; devices that NCCL merged stand for themselves."""
    host: str = ""
    """`host_hash` of its CPUs; empty where the file does not tell machines apart."""
    others: tuple[XmlTopology, ...] = ()

    @property
    def machines(self) -> tuple[XmlTopology, ...]:
        """Every machine that the file describes, in its order; the others know of no others."""
        return replace(self, others=()), *self.others


def read_topology(path: Path) -> XmlTopology:
    """Read a topology file of NCCL, which must be a regular one: another's path may lead to a pipe that never ends.

    Raises:
        OSError: it cannot be read.
        TopologyError: it is no topology.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TopologyError("is not a regular file")
        return parse_topology(file.read(MOST_BYTES + 1))


def read_topology_of_process(procfs: Path, pid: int, given: str, uid: int | None) -> XmlTopology | None:
    """The topology file that NCCL reads in a process, which may live in a container: `given` is its NCCL_TOPO_FILE.

    None where that is empty and there is none in the usual place either.  `uid` is the process's real user ID: a file
    that is neither his nor readable by everybody is not read; None: only what everybody may read.

    Raises:
        OSError: it cannot be read, or leads out of the process's root directory.
        TopologyError: it is no topology.
    """
    folder = procfs / str(pid)
    if given:
        return _topology_below(folder / ("root" if given.startswith("/") else "cwd"), given, uid)
    for name in _WITHOUT_BEING_TOLD:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return _topology_below(folder / "root", name, uid)
    return None


def _topology_below(folder: Path, path: str, uid: int | None) -> XmlTopology:
    """A file below a folder, whatever links are on the way.

    Raises:
        OSError, TopologyError: it cannot be used.
    """
    root = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        place = open_below(root, path, os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(root)
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise TopologyError("is not a regular file")
        if not (status.st_mode & stat.S_IROTH or (status.st_uid == uid and status.st_mode & stat.S_IRUSR)):
            raise TopologyError("is not the process's own, and not readable by everybody")
        with open(f"/proc/self/fd/{place}", "rb", opener=_without_waiting) as file:
            return parse_topology(file.read(MOST_BYTES + 1))
    finally:
        os.close(place)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def parse_topology(data: bytes) -> XmlTopology:
    """Understand the XML of NCCL's topology: the first machine in it, which knows the others.

    Raises:
        TopologyError: it is not well-formed, has no `system` element of a known version, or goes beyond a limit.
    """
    if len(data) > MOST_BYTES:
        raise TopologyError(f"is larger than {MOST_BYTES >> 20} MiB, the most that is read of a topology")
    reader = _Reader()
    # The encoding is given: a document must not choose one.
    parser = expat.ParserCreate("UTF-8")
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse_document_type
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise TopologyError(f"is not well-formed XML: {error}") from None
    if not reader.systems:
        raise TopologyError("holds no <system> element: it is not a topology of NCCL's")
    hosts = dict.fromkeys([host for host, _address in reader.functions] + [host for host, _net in reader.nets]) or {
        "": None
    }
    topologies = [
        XmlTopology(
            tuple(function for (of, _address), function in reader.functions.items() if of == host),
            _apart([net for of, net in reader.nets if of == host]),
            host,
        )
        for host in hosts
    ]
    functions = [function for topology in topologies for function in topology.functions]
    for kind, count in (
        ("GPUs", sum(max(len(function.gpus), 1) for function in functions if function.is_gpu)),
        ("network cards", sum(function.is_network for function in functions)),
        ("network ports", sum(len(topology.nets) for topology in topologies)),
    ):
        if count > MOST_NODES:
            raise TopologyError(f"has {count} {kind}, and NCCL takes {MOST_NODES}")
    first, *others = topologies
    return replace(first, others=tuple(others))


def _refuse_document_type(*_declaration: object) -> NoReturn:
    raise TopologyError("declares a document type, which no topology of NCCL's does: it is not read")


@dataclass(slots=True)
class _Open:
    """An element that has begun and not ended; its place is the parent's until it is a function itself."""

    name: str
    switches: tuple[str, ...] = ()
    """Of what it holds."""
    numa_node: int | None = None
    address: str = ""
    host: str = ""


@dataclass(slots=True)
class _Reader:
    functions: dict[tuple[str, str], XmlFunction] = field(default_factory=dict)
    """By host and address."""
    nets: list[tuple[str, XmlNet]] = field(default_factory=list)
    """Each with its host."""
    siblings: Counter[tuple[str, tuple[str, ...], str]] = field(default_factory=Counter)
    """How many `pci` elements of an address there were inside the same ones."""
    systems: int = 0
    elements: int = 0
    path: list[_Open] = field(default_factory=list)

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        if self.elements > MOST_ELEMENTS:
            raise TopologyError(f"has more than {MOST_ELEMENTS} elements")
        if len(self.path) >= DEEPEST:
            raise TopologyError(f"is nested deeper than {DEEPEST} elements")
        if len(attributes) > _MOST_ATTRIBUTES or any(len(value) > _LONGEST_VALUE for value in attributes.values()):
            raise TopologyError(f"has an element with too many or too long attributes: <{name[:20]}>")
        parent = self.path[-1] if self.path else _Open("")
        inside = _Open("ignored")
        if parent.name in _INSIDE.get(name, ()):
            inside = _Open(name, parent.switches, parent.numa_node, parent.address, parent.host)
            self._add_element(inside, parent, attributes)
        self.path.append(inside)

    def end(self, _name: str) -> None:
        self.path.pop()

    def _add_element(self, element: _Open, parent: _Open, attributes: dict[str, str]) -> None:
        if element.name == "system":
            if _integer(attributes, "version") not in _VERSIONS:
                version = attributes.get("version", "")[:20]
                raise TopologyError(f"is of version {version!r}, and only 1 (NCCL) and 2 (RCCL) are known")
            self.systems += 1
        elif element.name == "cpu":
            numa_node = _integer(attributes, "numaid")
            element.numa_node = numa_node if numa_node is not None and numa_node >= 0 else None
            host = attributes.get("host_hash", "")
            element.host = host if host.isprintable() and len(host) <= _LONGEST_HOST else ""
        elif element.name == "pci":
            self._function(element, parent, attributes)
        elif element.name == "gpu":
            self._mark(parent, (_natural(attributes, "dev"),))
        elif element.name == "nic":
            self._mark(parent, ())
        else:
            self._net(element, attributes)

    def _function(self, element: _Open, parent: _Open, attributes: dict[str, str]) -> None:
        address = normal_address(attributes.get("busid", ""))
        if not address:
            busid = attributes.get("busid", "")[:40]
            raise TopologyError(f"has a <pci> element whose busid is not a PCI address: {busid!r}")
        element.address = address
        # What it holds lies below it, whether or not its class calls it a bridge: hand-written files leave that out.
        # Some of these give several ports of a switch one address, and to NCCL each element is a switch of its own.
        same = self.siblings[parent.host, parent.switches, address]
        self.siblings[parent.host, parent.switches, address] += 1
        element.switches = (*parent.switches, f"{address} ({same + 1})" if same else address)
        class_code = _class_code(attributes)
        place = Place(address, parent.switches, parent.numa_node)
        function = XmlFunction(
            place,
            class_code,
            (),
            is_display(class_code),
            is_network(class_code),
            model_of(*(attributes.get(name, "") for name in MODEL_ATTRIBUTES)),
            link_words(attributes.get("link_speed", ""), attributes.get("link_width", "")),
        )
        self.functions.setdefault((parent.host, address), function)

    def _mark(self, parent: _Open, gpus: tuple[int | None, ...]) -> None:
        """A function is a GPU, or else a network card, because of the element in it."""
        known = self.functions.get((parent.host, parent.address))
        if known is not None:
            self.functions[parent.host, parent.address] = replace(
                known,
                gpus=known.gpus + gpus,
                is_gpu=known.is_gpu or bool(gpus),
                is_network=known.is_network or not gpus,
            )

    def _net(self, element: _Open, attributes: dict[str, str]) -> None:
        if _integer(attributes, "net") == 0:
            return  # a device for put operations or of a plugin, and none that messages go through
        # Where it stands, be its address another function's as well: some dumps give one twice.
        place = Place(element.address, element.switches[:-1], element.numa_node)
        speed, port = _integer(attributes, "speed") or 0, _integer(attributes, "port")
        name = attributes.get("name", "")
        if name.isprintable() and name:
            net = XmlNet(
                name=name,
                port=port if port is not None and 0 < port <= _MOST_PORTS else None,
                place=place,
                speed_bytes_per_second=speed * BYTES_PER_MEGABIT if 0 < speed < 1 << 40 else None,
                rail=_natural(attributes, "rail"),
                plane=_natural(attributes, "plane"),
            )
            self.nets.append((element.host, net))


def _apart(nets: list[XmlNet]) -> tuple[XmlNet, ...]:
    """Every device and port once; those that NCCL merged into a virtual one appear where they are not named alone."""
    found: dict[tuple[str, int | None], XmlNet] = {}
    for net in _with_ports_of_devices(nets):
        if _JOINED not in net.name:
            found.setdefault((net.name, net.port), net)
    alone = {net.name for net in found.values()}
    for net in nets:
        members = [name for name in net.name.split(_JOINED) if name] if _JOINED in net.name else []
        for name in members:
            if name not in alone:
                speed = net.speed_bytes_per_second
                share = None if speed is None else speed // len(members)
                member = replace(net, name=name, port=None, speed_bytes_per_second=share)
                found.setdefault((name, None), member)
    return tuple(found.values())


def _with_ports_of_devices(nets: list[XmlNet]) -> list[XmlNet]:
    """The nets with the ports that their RDMA devices have, which NCCL numbers on through a card.

    Old versions wrote the device's own: a device whose ports would then be one, or none, keeps what is written.
    """
    cards: defaultdict[str, list[XmlNet]] = defaultdict(list)
    for net in nets:
        if net.place.address and net.port is not None and _JOINED not in net.name:
            cards[net.place.address].append(net)
    ports: dict[tuple[str, str, int | None], int] = {}
    for address, members in cards.items():
        members.sort(key=lambda net: net.port or 0)
        devices: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for before, net in enumerate(members):
            written = net.port or 0
            devices[net.name][written] = written - before
        for name, of in devices.items():
            if min(of.values()) >= 1 and len(set(of.values())) == len(of):
                ports.update({(address, name, written): port for written, port in of.items()})
    return [replace(net, port=ports.get((net.place.address, net.name, net.port), net.port)) for net in nets]


def _integer(attributes: dict[str, str], name: str) -> int | None:
    """As strtol reads it, which stops where the number ends."""
    match = _INTEGER.match(attributes.get(name, ""))
    if match is None:
        return None
    value = int(match[2], 16) if match[2] else int(match[3])
    return -value if match[1] == "-" else value


def _natural(attributes: dict[str, str], name: str) -> int | None:
    """A number that NCCL has room for; negative is what it writes for undefined."""
    value = _integer(attributes, name)
    return value if value is not None and 0 <= value < _MOST_RAILS else None


def _class_code(attributes: dict[str, str]) -> int | None:
    """24 bits.  NCCL compares the beginning of the text, and itself writes `0x02` for a card of unknown class."""
    text = attributes.get("class", "")
    match = re.match(r"0[xX]([0-9a-fA-F]{1,6})", text, re.ASCII)
    return int(match[1].ljust(6, "0"), 16) if match else None
