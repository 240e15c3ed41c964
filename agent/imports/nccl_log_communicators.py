"""Resolves the addresses in NCCL's log to communicators, across all ranks of the job.

Within a process the address of a communicator names it until it is destroyed; another one may get the same address
then.  Across processes `commId` of its Init line names it, and for the child of a split its parent, the number of the
split and the colour.  Without such lines (NCCL before 2.17, or a log of COLL alone) communicators of equal size are
taken for one only where there is no other way to put them together: as many processes as the communicator has ranks,
or one with as many ranks, where calls name theirs (RCCL), each with the same number of communicators of that size, and
no rank twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.imports.facts import ImportedConnection, ImportedEnd, Problems
from railscope.agent.imports.target import ImportTarget

_MOST_ENDS: Final = 1 << 18
_COMM_ID: Final = re.compile(r"(?:0x)?[0-9a-fA-F]{1,16}")
_MOST_CONNECTIONS: Final = 1 << 20
"""Of a host."""
_OVER: Final = frozenset({"Destroy COMPLETE", "Abort COMPLETE"})


@dataclass(frozen=True, slots=True)
class Process:
    """The writer: a process and its current GPU."""

    host: str
    pid: int
    """Negative: not said, and another number for each process."""
    device: str
    """Number of the CUDA device in the process; empty: not said."""


class LoggedEnd:
    """One rank's end of one communicator, as far as the log describes it."""

    def __init__(self, instance: int, process: Process, address: str, nranks: int) -> None:
        self.instance = instance
        self.process = process
        self.address = address
        self.nranks = nranks
        self.rank: int | None = None
        self.comm_id = ""
        self.parent: LoggedEnd | None = None
        self.split = ""
        """Which split of the parent, and its colour."""
        self.splits = 0
        """How many children it has so far."""
        self.device = process.device
        self.physical_device = ""
        """The GPU's index on the node."""
        self.initialised = False
        """Its Init line was complete: every call is in the log."""
        self._calls = 0

    def take_sequence_number(self) -> int | None:
        """Number of this collective; None where calls before it may be missing."""
        if not self.initialised:
            return None
        self._calls += 1
        return self._calls


class Communicators:
    """Every end of every communicator in the logs of a job."""

    def __init__(self, target: ImportTarget, problems: Problems) -> None:
        self._target = target
        self._problems = problems
        self.version = 0
        """Another one as soon as an address may name another communicator."""
        self._ends: list[LoggedEnd] = []
        self._current: dict[tuple[str, int, str], LoggedEnd] = {}
        """By host, process and address."""
        self._owners: defaultdict[str, set[Process]] = defaultdict(set)
        """By address: processes that have such a communicator."""
        self._starting: dict[tuple[str, int, int], LoggedEnd] = {}
        """By host, process and thread: the communicator that is being initialised."""
        self._connections: dict[str, set[ImportedConnection]] = defaultdict(set)
        """By host."""
        self._versions: dict[tuple[str, int], str] = {}
        """NCCL's version by host and process."""

    def record_version(self, process: Process, version: str) -> None:
        """Record the NCCL version that the log of a process names."""
        self._versions[process.host, process.pid] = version

    def find_end(self, process: Process, address: str, nranks: int, rank: int | None) -> LoggedEnd | None:
        """The end that a call names; None: there are too many of them."""
        end = self._current.get((process.host, process.pid, address))
        if end is None or end.nranks != nranks:
            end = self._begin(process, address, nranks)
        if end is not None and end.rank is None:
            end.rank = rank
        return end

    def find_owner(self, address: str) -> Process | None:
        """The process that has a communicator at this address, if only one has."""
        owners = self._owners.get(address, set())
        return next(iter(owners)) if len({(one.host, one.pid) for one in owners}) == 1 else None

    def record_connection(self, process: Process, tid: int, rank: int, connection: ImportedConnection) -> None:
        """A rank of one of the process's communicators has a connection; `connection.instance` is filled in here.

        The line does not name the communicator: it is the one that its thread initialises, or else the only one in
        which the process has this rank; where there are several, it is unknown.
        """
        end = self._starting.get((process.host, process.pid, tid))
        if end is None:
            own = [one for key, one in self._current.items() if key[:2] == (process.host, process.pid)]
            fitting = [one for one in own if one.rank == rank and one.nranks > connection.peer]
            end = fitting[0] if len(fitting) == 1 else None
        if end is None or end.rank != rank or end.nranks <= connection.peer:
            return
        links = self._connections[process.host]
        if len(links) < _MOST_CONNECTIONS:
            links.add(connection._replace(instance=end.instance))

    def record_event(
        self, process: Process, tid: int, what: str, address: str, rank: int, nranks: int, pairs: Mapping[str, str]
    ) -> None:
        """Record a lifecycle line of a communicator; `pairs` holds its other values, such as commId."""
        self.version += 1
        key = process.host, process.pid, address
        if what in _OVER:
            self._current.pop(key, None)
            return
        end = self._current.get(key)
        # A line of INIT that is neither the start nor the completion of what is known begins another one.
        if end is None or end.initialised or end.nranks != nranks or end.rank not in (None, rank):
            end = self._begin(process, address, nranks)
        if end is None:
            return
        end.rank = rank
        end.device = pairs.get("cudaDev", end.device)
        end.physical_device = pairs.get("nvmlDev", end.physical_device)
        comm_id = parse_comm_id(pairs.get("commId", "0"))
        if comm_id:
            end.comm_id = f"{comm_id:016x}"
        if "parent" in pairs and end.parent is None:
            parent = self._current.get((process.host, process.pid, pairs["parent"]))
            if parent is not None and parent is not end:
                end.parent = parent
                number = pairs.get("childCount", pairs.get("splitCount", str(parent.splits)))
                end.split = f"{number}.{pairs.get('color', '')}"
                parent.splits += 1
        end.initialised = what == "Init COMPLETE"
        if end.initialised:
            self._starting.pop((process.host, process.pid, tid), None)
        else:
            self._starting[process.host, process.pid, tid] = end

    def finish(self) -> None:
        """Name the communicators, and put their ends into the dataset."""
        names = _names(self._ends, self._problems)
        physical = {
            (end.process.host, end.process.pid, end.device): end.physical_device
            for end in self._ends
            if end.physical_device
        }
        by_host: defaultdict[str, list[ImportedEnd]] = defaultdict(list)
        shared = _shared_devices(self._ends, names)
        for end in self._ends:
            place = end.process.host, end.process.pid, end.device
            by_host[end.process.host].append(
                ImportedEnd(
                    instance=end.instance,
                    comm=names[end.instance, end.process.host],
                    rank=end.rank,
                    nranks=end.nranks,
                    pid=end.process.pid if end.process.pid >= 0 else None,
                    gpu=None if end.instance in shared[end.process.host] else physical.get(place, end.device) or None,
                    nccl_version=self._versions.get((end.process.host, end.process.pid)),
                )
            )
        for host, ends in sorted(by_host.items()):
            self._target.add_ends(host, ends)
            self._target.add_connections(host, sorted(self._connections.get(host, ())))

    def _begin(self, process: Process, address: str, nranks: int) -> LoggedEnd | None:
        if len(self._ends) >= _MOST_ENDS:
            return None
        end = LoggedEnd(self._target.new_instance(process.host), process, address, nranks)
        self._ends.append(end)
        self._current[process.host, process.pid, address] = end
        self.version += 1
        self._owners[address].add(process)
        return end


def parse_comm_id(text: str) -> int | None:
    """What follows `commId` in a line; None: NCCL prints nothing of that kind."""
    return int(text, 16) if _COMM_ID.fullmatch(text) else None


def _names(ends: list[LoggedEnd], problems: Problems) -> dict[tuple[int, str], str]:
    """The name of each end's communicator, by instance and host."""
    unique = _unique_ids(ends)
    names: dict[tuple[int, str], str] = {}
    nameless = []
    for end in ends:
        name = _name(end, unique)
        if name:
            names[end.instance, end.process.host] = name
        else:
            nameless.append(end)
    for size in sorted({end.nranks for end in nameless}):
        names.update(_matched([end for end in nameless if end.nranks == size], problems))
    return names


def _shared_devices(ends: list[LoggedEnd], names: Mapping[tuple[int, str], str]) -> defaultdict[str, set[int]]:
    """By host, ends that cannot be on the GPU that their lines name, as another rank of their communicator is.

    A line names the GPU that is its thread's current one: of a process with several of them that is any.
    """
    by_place: defaultdict[tuple[str, int, str, str], list[LoggedEnd]] = defaultdict(list)
    for end in ends:
        if not end.physical_device:
            name = names[end.instance, end.process.host]
            by_place[end.process.host, end.process.pid, end.device, name].append(end)
    found: defaultdict[str, set[int]] = defaultdict(set)
    for (host, *_), those in by_place.items():
        if len({end.rank for end in those}) > 1:
            found[host].update(end.instance for end in those)
    return found


def _unique_ids(ends: list[LoggedEnd]) -> set[str]:
    """Identifiers that name one communicator: no rank has two of it, and all agree on its size.

    NCCL 2.18 to 2.22 print the same one for all children of splits.
    """
    seen: defaultdict[str, set[int | None]] = defaultdict(set)
    sizes: defaultdict[str, set[int]] = defaultdict(set)
    doubled = set()
    for end in ends:
        if not end.comm_id:
            continue
        if end.rank in seen[end.comm_id]:
            doubled.add(end.comm_id)
        seen[end.comm_id].add(end.rank)
        sizes[end.comm_id].add(end.nranks)
    return {one for one in seen if one not in doubled and len(sizes[one]) == 1}


def _name(end: LoggedEnd, unique: set[str]) -> str:
    """A name that all ranks come to; empty: there is none."""
    splits: list[str] = []
    one: LoggedEnd | None = end
    while one is not None:
        if one.comm_id in unique:
            return ".".join([one.comm_id, *reversed(splits)])
        splits.append(one.split)
        one = one.parent
    return ""


def _matched(ends: list[LoggedEnd], problems: Problems) -> dict[tuple[int, str], str]:
    """Names for ends of equal size that no line of the log names."""
    size = ends[0].nranks
    by_member: defaultdict[object, list[LoggedEnd]] = defaultdict(list)
    ranked = (
        all(end.rank is not None for end in ends) and len({(end.process.host, end.process.pid) for end in ends}) == 1
    )
    for end in ends:
        # One process may have all GPUs.
        member = end.rank if ranked else (end.process.host, end.process.pid, end.device)
        by_member[member].append(end)
    rounds = list(zip(*by_member.values(), strict=False))
    complete = len(by_member) == size and len({len(one) for one in by_member.values()}) == 1
    if complete and all(_no_rank_twice(one) for one in rounds):
        return {
            (end.instance, end.process.host): f"of-{size}-ranks-{number}"
            for number, one in enumerate(rounds)
            for end in one
        }
    if size > 1:
        problems.add_note(
            "communicators could not be matched across ranks: the logs lack their Init lines "
            "(NCCL_DEBUG_SUBSYS=INIT,COLL writes them, commId from NCCL 2.17), so each rank counts as a communicator "
            "of its own"
        )
    return {
        (end.instance, end.process.host): f"{end.process.host}:{end.process.pid}:{end.address}:{end.instance}"
        for end in ends
    }


def _no_rank_twice(ends: tuple[LoggedEnd, ...]) -> bool:
    ranks = [end.rank for end in ends if end.rank is not None]
    return len(ranks) == len(set(ranks))
