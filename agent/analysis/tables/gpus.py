"""Which GPUs took part, and which of them is which rank of which communicator.

A GPU is a process's end of its communicators: a process drives one GPU, unless its communicators say several.  Where
imported data names no process, a rank of the job is a GPU.  A process with two ranks of one communicator drives several
GPUs, even if it is unknown which: each of its ranks is one.

A communicator whose name is not known is shared with no other: each of its ends is a communicator of its own.  An end
that only holds operations of communicators that nobody named (`communicators.attributed`) is none.

GPUs are numbered 0 … n−1: by their rank in the job where the launcher said it of all, else by their rank in the largest
communicator that has all of them, else server by server in the order of GPU index and process.  Of one job
alone each GPU keeps that number (`select_job`), and analyses name it by its place among the job's GPUs.

Servers are the nodes that recorded.  Where one node holds several network namespaces that NCCL itself takes for
different nodes (containers, or a test bed), each of them is a server.

A GPU's rail is NCCL's number of the network device that carries its connections to other servers, where they are
recorded and all use the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from railscope.agent.analysis.facts.report import GpuFacts
from railscope.agent.dataset.reader import Dataset

Instance = tuple[int, int]
"""(recording, instance): one rank's end of one communicator."""
_Owner = tuple[str, str, int | None, str, int | None, int | None]
"""(node, network namespace, process, GPU index, rank in the job, rank): what makes one GPU.

The last one counts only where the others are those of several GPUs, and is None elsewhere."""
_Known = TypeVar("_Known")
_UNNAMED: Final = "unknown:"
"""How the name begins that a communicator without one is given; NCCL's have no colon."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator, of all recordings together."""

    comm: str
    nranks: int | None
    members: Mapping[int, int]
    """GPU by rank, of the ranks that were recorded."""
    group_name: str
    """What the framework calls it; empty: not known."""

    @property
    def complete(self) -> bool:
        """Whether every rank was recorded."""
        return self.nranks is not None and len(self.members) == self.nranks


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a dataset and the communicators among them."""

    gpus: tuple[GpuFacts, ...]
    """By number; its place here is what names a GPU in the columns below, and in analyses."""
    communicators: tuple[Communicator, ...]
    """The largest first."""
    gpu_of: Mapping[Instance, int]
    """Of every end, also those that stand for operations of unknown communicators."""
    communicator_of: Mapping[Instance, Communicator]
    """Of the ends that are of a communicator."""
    rank_of: Mapping[Instance, int]
    """Of the ends whose rank is known."""
    others: tuple[GpuFacts, ...] = ()
    """GPUs of other jobs, which were left out; empty: all that were recorded are here."""
    nodes_of_several: frozenset[str] = frozenset()
    """Nodes whose network namespaces are servers."""

    def select_job(self, numbers: Collection[int]) -> Gpus:
        """These GPUs alone, which no communicator connects with others; their numbers stay."""
        places = {number: place for place, number in enumerate(sorted(numbers))}
        gpu_of = {end: places[number] for end, number in self.gpu_of.items() if number in places}
        own = {one.comm for end, one in self.communicator_of.items() if end in gpu_of}
        communicators = {
            one.comm: replace(one, members={rank: places[gpu] for rank, gpu in one.members.items() if gpu in places})
            for one in self.communicators
            if one.comm in own
        }
        return Gpus(
            gpus=tuple(gpu for gpu in self.gpus if gpu.number in places),
            communicators=tuple(communicators.values()),
            gpu_of=gpu_of,
            communicator_of={
                end: communicators[one.comm] for end, one in self.communicator_of.items() if end in gpu_of
            },
            rank_of={end: rank for end, rank in self.rank_of.items() if end in gpu_of},
            others=tuple(gpu for gpu in self.gpus if gpu.number not in places),
            nodes_of_several=self.nodes_of_several,
        )

    def connected_groups(self) -> tuple[frozenset[int], ...]:
        """GPUs, by their places, by what communicators connect: no communicator has GPUs of two of these groups.

        GPUs of communicators whose name is not known are taken for connected, as it is unknown.
        """
        links: defaultdict[str, set[int]] = defaultdict(set)
        for end, number in self.gpu_of.items():
            communicator = self.communicator_of.get(end)
            unnamed = communicator is None or is_unnamed(communicator.comm)
            links[_UNNAMED if communicator is None or unnamed else communicator.comm].add(number)
        groups: list[set[int]] = [{place} for place in range(len(self.gpus))]
        group_of = {number: place for place, group in enumerate(groups) for number in group}
        for linked in links.values():
            largest, *others = sorted({group_of[number] for number in linked}, key=lambda place: -len(groups[place]))
            for other in others:
                group_of.update(dict.fromkeys(groups[other], largest))
                groups[largest] |= groups[other]
                groups[other] = set()
        return tuple(sorted((frozenset(group) for group in groups if group), key=min))

    def twice_held_ranks(self) -> tuple[tuple[str, int], ...]:
        """(communicator, rank) that two or more GPUs have: communicators of two jobs that have one name."""
        holders: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        for end, rank in self.rank_of.items():
            holders[self.communicator_of[end].comm, rank].add(self.gpu_of[end])
        return tuple(sorted(held for held, numbers in holders.items() if len(numbers) > 1))


def is_unnamed(comm: str) -> bool:
    """Whether this is what a communicator is called here whose name is not known."""
    return comm.startswith(_UNNAMED)


@dataclass(frozen=True, slots=True)
class _End:
    instance: Instance
    node: str
    comm: str
    rank: int | None
    nranks: int | None
    node_rank: int | None
    pid: int | None
    netns: str
    gpu: str
    world_rank: int | None
    group_name: str
    attributed: bool
    """Whether it is of a communicator: imported operations may be of none that is known."""
    several: bool = False
    """Whether its process drives several GPUs that only ranks tell apart."""

    @property
    def process(self) -> tuple[str, str, int | None]:
        return self.node, self.netns, self.pid

    @property
    def owner(self) -> _Owner:
        rank = self.rank if self.several else None
        return self.node, self.netns, self.pid, self.gpu, self.world_rank, rank


def find_gpus(dataset: Dataset) -> Gpus:
    """Identify the GPUs and ranks of a dataset."""
    ends = [
        _End(
            instance=(row["recording"], row["instance"]),
            node=row["node"],
            comm=row["comm"] or f"{_UNNAMED}{row['recording']}:{row['instance']}",
            rank=row["rank"],
            # Ranks that cannot be located are not even identified by their number.
            nranks=row["nranks"] if row["comm"] else None,
            node_rank=row["node_rank"],
            pid=row["pid"],
            netns=row["netns"] or "",
            gpu=row["gpu"] or "",
            world_rank=row["world_rank"],
            group_name=row["group_name"] or "",
            attributed=row["attributed"] is not False,
        )
        for row in dataset.rows(dataset["communicators"]).to_pylist()
    ]
    ends = _split_by_owner(_complete(ends))
    several = _nodes_of_several_servers(ends)
    owners = sorted({end.owner for end in ends}, key=_order)
    numbers = _numbers(owners, ends)
    rails = _rails(dataset, ends)
    gpus = [
        GpuFacts(
            number=numbers[owner],
            server=name_server(owner[0], owner[1], several),
            pid=owner[2],
            gpu=owner[3],
            world_rank=owner[4],
            rail=rails.get(owner, ""),
        )
        for owner in owners
    ]
    by_comm = defaultdict(list)
    for end in ends:
        if end.attributed:
            by_comm[end.comm].append(end)
    communicators = {comm: _communicator(comm, members, numbers) for comm, members in by_comm.items()}
    return Gpus(
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.number)),
        communicators=tuple(
            sorted(communicators.values(), key=lambda one: (-(one.nranks or 0), sorted(one.members.values()), one.comm))
        ),
        gpu_of={end.instance: numbers[end.owner] for end in ends},
        communicator_of={end.instance: communicators[end.comm] for end in ends if end.attributed},
        rank_of={end.instance: end.rank for end in ends if end.rank is not None},
        nodes_of_several=frozenset(several),
    )


def name_server(node: str, netns: str, nodes_of_several: Collection[str]) -> str:
    """The server of a process: its node, with its network namespace where that is one of the node's several servers."""
    return f"{node}/{netns}" if node in nodes_of_several and netns else node


def names_of_rails_server(node: str, netns: str | None) -> tuple[str, str]:
    """What the server of a rail may be called: its node, whose rails are those of all its network namespaces, or one of
    these."""
    return node, f"{node}/{netns or ''}"


def _complete(ends: list[_End]) -> list[_End]:
    """The ends; of those without GPU index or rank in the job, what all others of their process say."""
    indices: defaultdict[tuple[str, str, int | None], set[str]] = defaultdict(set)
    ranks: defaultdict[tuple[str, str, int | None], set[int]] = defaultdict(set)
    for end in ends:
        if end.pid is not None:
            indices[end.process].update({end.gpu} - {""})
            if end.world_rank is not None:
                ranks[end.process].add(end.world_rank)
    return [
        replace(
            end,
            gpu=end.gpu or _only(indices[end.process]) or "",
            world_rank=_only(ranks[end.process]) if end.world_rank is None else end.world_rank,
        )
        for end in ends
    ]


def _split_by_owner(ends: list[_End]) -> list[_End]:
    """The ends; those of a process that has two ranks of one communicator, and no GPU index, are of several GPUs."""
    ranks: defaultdict[tuple[_Owner, str], set[int]] = defaultdict(set)
    for end in ends:
        if not end.gpu and end.rank is not None:
            ranks[end.owner, end.comm].add(end.rank)
    several = {owner for (owner, _), found in ranks.items() if len(found) > 1}
    return [replace(end, several=end.owner in several) for end in ends]


def _only(found: set[_Known]) -> _Known | None:
    return next(iter(found)) if len(found) == 1 else None


def _rails(dataset: Dataset, ends: Iterable[_End]) -> dict[_Owner, str]:
    """The network device of each GPU that uses one only."""
    connections = dataset["connections"]
    found = dataset.rows(connections.select("recording", "instance", "net_device").distinct()).to_pylist()
    owners = {end.instance: end.owner for end in ends}
    devices: defaultdict[_Owner, set[int]] = defaultdict(set)
    for row in found:
        owner = owners.get((row["recording"], row["instance"]))
        if owner is not None and row["net_device"] is not None:
            devices[owner].add(row["net_device"])
    return {owner: str(min(used)) for owner, used in devices.items() if len(used) == 1}


def _nodes_of_several_servers(ends: Iterable[_End]) -> set[str]:
    """Nodes on which one communicator sees several nodes."""
    seen: defaultdict[tuple[str, str], set[int | None]] = defaultdict(set)
    for end in ends:
        seen[end.node, end.comm].add(end.node_rank)
    return {node for (node, _), node_ranks in seen.items() if len(node_ranks - {None}) > 1}


def _communicator(comm: str, ends: list[_End], numbers: Mapping[_Owner, int]) -> Communicator:
    sizes = {end.nranks for end in ends if end.nranks is not None}
    names = {end.group_name for end in ends if end.group_name}
    return Communicator(
        comm=comm,
        nranks=sizes.pop() if len(sizes) == 1 else None,
        members={
            end.rank: numbers[end.owner] for end in sorted(ends, key=lambda end: end.rank or 0) if end.rank is not None
        },
        group_name=names.pop() if len(names) == 1 else "",
    )


def _numbers(owners: list[_Owner], ends: list[_End]) -> dict[_Owner, int]:
    by_launcher = {end.owner: end.world_rank for end in ends if end.world_rank is not None}
    by_comm: defaultdict[str, dict[_Owner, int]] = defaultdict(dict)
    for end in ends:
        if end.rank is not None:
            by_comm[end.comm][end.owner] = end.rank
    for ranks in (by_launcher, *(by_comm[comm] for comm in sorted(by_comm))):
        if len(ranks) == len(owners) == len(set(ranks.values())):
            # Where not all nodes were recorded, ranks have gaps and numbers have none.
            return {owner: number for number, owner in enumerate(sorted(owners, key=lambda owner: ranks[owner]))}
    return {owner: number for number, owner in enumerate(owners)}


def _order(owner: _Owner) -> tuple[str, str, tuple[int, str], int, int, int]:
    node, netns, pid, gpu, world_rank, rank = owner
    return node, netns, _natural(gpu), pid or 0, -1 if world_rank is None else world_rank, -1 if rank is None else rank


def _natural(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (1 << 30, text)
