"""This host's ranks by column, as the kernel's tables have them: who they are, and how far each came.

A host may have thousands of ranks, of which hardly any needs a closer look.  What is asked of all of them is asked of
columns of numbers, and an object is made only of a rank that is looked at.  Who the ranks are is found out once, until
a communicator or a process comes, goes or turns out to be another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.stalls.evidence import RankFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.loading.maps import Records

Rows = npt.NDArray[np.intp]
"""Numbers of ranks of a roster."""
Mask = npt.NDArray[np.bool_]
"""One for each rank of a roster."""
Column = npt.NDArray[np.int64]
"""Likewise."""
_NO_ROWS: Final = np.zeros(0, np.intp)


class Registered(Protocol):
    """What is asked about communicators and processes."""

    def communicator(self, instance: int) -> Communicator | None: ...
    def communicator_changes(self) -> int: ...
    def process(self, pid: int) -> ObservedProcess | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """Living ranks of communicators of several, by row."""

    places: Rows
    """Where each is in the kernel's table."""
    instances: Column
    communicators: tuple[Communicator, ...]
    addresses: tuple[int, ...]
    """Of the communicators, in their processes."""
    libraries: Column
    pids: Column
    groups: Rows
    """Ranks of one communicator have the same number; one whose communicator has no name has its own."""
    group_count: int
    nranks: Column
    """Of the communicators; 0: not known."""
    is_named: Mask
    """Whether a communicator has a name."""
    shared_by_processes: Mask
    """Whether another process of this host has a rank of the communicator."""
    row_of: Mapping[int, int]
    """By instance."""
    of_pid: Mapping[int, Rows]
    of_comm: Mapping[str, Rows]
    """By the communicator's name, of those that have one."""
    late: frozenset[str]
    """Names of communicators of which not every rank here was seen from its first call on."""

    def rows_of(self, instances: Iterable[int]) -> list[int]:
        """Rows of those of these instances that are here."""
        return [row for one in instances if (row := self.row_of.get(one)) is not None]

    def mask_of(self, instances: Iterable[int]) -> Mask:
        """The same as a mask."""
        mask = np.zeros(len(self.pids), bool)
        mask[self.rows_of(instances)] = True
        return mask

    def of_processes(self, pids: Collection[int]) -> Mask:
        """Ranks of these processes."""
        mask = np.zeros(len(self.pids), bool)
        for pid in pids:
            mask[self.of_pid.get(pid, _NO_ROWS)] = True
        return mask

    def sharing(self, pids: Collection[int]) -> Mask:
        """Ranks of the communicators of these processes."""
        if not pids:
            return np.zeros(len(self.pids), bool)
        shared = np.zeros(self.group_count, bool)
        shared[self.groups[self.of_processes(pids)]] = True
        return shared[self.groups]

    def companions(self, pids: Collection[int]) -> frozenset[int]:
        """Processes that have a rank in a communicator of these, and these themselves."""
        return frozenset(self.pids[self.sharing(pids)].tolist()).union(pids)


class Rosters:
    """Finds who the ranks are.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._found_for: tuple[object, ...] = ()
        self._pids: tuple[int, ...] = ()
        """Of the table's rows, each once."""
        self._table = b""
        self._roster = _roster(np.zeros(0, np.intp), [], [], [], [], [])

    @property
    def last(self) -> Roster:
        """As of the last reading."""
        return self._roster

    def find(self, keys: Records, values: Records) -> Roster:
        """The roster of a reading of the kernel's table (COMMUNICATOR_KEY, COMMUNICATOR).

        The same object as the last time, if nothing has changed.
        """
        table = b"".join((keys.tobytes(), values["instance"].tobytes(), values["library"].tobytes()))
        if table != self._table:
            self._table, self._pids = table, tuple(set(keys["tgid"].tolist()))
        found = ((pid, self._registered.process(pid)) for pid in self._pids)
        living = frozenset(pid for pid, process in found if process is not None and process.ended_ns is None)
        found_for = table, self._registered.communicator_changes(), living
        if found_for != self._found_for:
            self._found_for, self._roster = found_for, self._read(keys, values, living)
        return self._roster

    def _read(self, keys: Records, values: Records, living: Collection[int]) -> Roster:
        places, communicators = [], []
        for place, (instance, pid) in enumerate(zip(values["instance"].tolist(), keys["tgid"].tolist(), strict=True)):
            known = self._registered.communicator(instance) if pid in living else None
            if known is not None and known.ended_ns is None and known.nranks != 1:
                places.append(place)
                communicators.append(known)
        at = np.array(places, np.intp)
        columns: tuple[npt.NDArray[Any], ...] = (values["instance"], keys["tgid"], keys["comm"], values["library"])
        return _roster(at, communicators, *(column[at].tolist() for column in columns))


def _roster(
    places: Rows,
    communicators: list[Communicator],
    instances: list[int],
    pids: list[int],
    addresses: list[int],
    libraries: list[int],
) -> Roster:
    of_pid: defaultdict[int, list[int]] = defaultdict(list)
    of_comm: defaultdict[str, list[int]] = defaultdict(list)
    numbers: dict[str | int, int] = {}
    groups = []
    for row, (communicator, pid) in enumerate(zip(communicators, pids, strict=True)):
        of_pid[pid].append(row)
        name = communicator.name
        if name != UNKNOWN:
            of_comm[name].append(row)
        groups.append(numbers.setdefault(row if name == UNKNOWN else name, len(numbers)))
    shared = {name for name, rows in of_comm.items() if any(pids[row] != pids[rows[0]] for row in rows)}
    return Roster(
        places=places,
        instances=np.array(instances, np.int64),
        communicators=tuple(communicators),
        addresses=tuple(addresses),
        libraries=np.array(libraries, np.int64),
        pids=np.array(pids, np.int64),
        groups=np.array(groups, np.intp),
        group_count=len(numbers),
        nranks=np.array([one.nranks or 0 for one in communicators], np.int64),
        is_named=np.array([one.name != UNKNOWN for one in communicators], bool),
        shared_by_processes=np.array([one.name in shared for one in communicators], bool),
        row_of={instance: row for row, instance in enumerate(instances)},
        of_pid={pid: np.array(rows, np.intp) for pid, rows in of_pid.items()},
        of_comm={name: np.array(rows, np.intp) for name, rows in of_comm.items()},
        late=frozenset(one.name for one in communicators if not one.whole),
    )


@dataclass(frozen=True, slots=True, eq=False)
class RankColumns:
    """How far the ranks of a roster came, as of one reading."""

    roster: Roster
    enqueued: Column
    last_call_ns: Column
    posted_ns: Column
    """When the oldest operation was handed over that is not complete; 0: none is seen."""

    @property
    def in_operation(self) -> Mask:
        """Ranks in which an operation is seen."""
        mask: Mask = self.posted_ns != 0
        return mask


class RanksNow(Protocol):
    """All ranks as of one look (agent/node/stalls/rank_reader.py)."""

    @property
    def columns(self) -> RankColumns: ...

    def comparison(self) -> Comparison: ...
    def fact(self, row: int) -> RankFacts: ...
    def rows_of_process(self, pid: int) -> Rows: ...
    def rows_of_comm(self, comm: str) -> Rows: ...


class _RanksOf(Sequence[RankFacts]):
    """Some ranks, each put together when it is asked for."""

    def __init__(self, rows: Rows, fact: Callable[[int], RankFacts]) -> None:
        self._rows = rows.tolist()
        self._fact = fact

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> RankFacts: ...
    @overload
    def __getitem__(self, at: slice) -> list[RankFacts]: ...
    def __getitem__(self, at: int | slice) -> RankFacts | list[RankFacts]:
        rows = self._rows[at]
        return self._fact(rows) if isinstance(rows, int) else [self._fact(row) for row in rows]


Key = TypeVar("Key", int, str)


class RanksBy(Mapping[Key, Sequence[RankFacts]]):
    """All ranks by process or by communicator, each put together when it is asked for."""

    def __init__(self, keys: Collection[Key], rows_of: Callable[[Key], Rows], fact: Callable[[int], RankFacts]) -> None:
        self._keys: Collection[Key] = keys
        self._rows_of: Callable[[Key], Rows] = rows_of
        self._fact = fact

    def __getitem__(self, key: Key) -> Sequence[RankFacts]:
        rows = self._rows_of(key)
        if not len(rows):
            raise KeyError(key)
        return _RanksOf(rows, self._fact)

    def __iter__(self) -> Iterator[Key]:
        return (key for key in self._keys if len(self._rows_of(key)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Where ranks stand among those of their communicators."""

    comparable: Mask
    """Whether that is known: see `RankFacts`."""
    entered: Column
    """Calls since the communicator was made, of those that are comparable."""
    least: Column
    most: Column
    """The fewest and the most of these among the ranks of its communicator, by rank; 0 where none is comparable."""

    @property
    def lead(self) -> Column:
        """Calls that another rank of this host has made more, by rank."""
        return np.where(self.comparable, self.most - self.entered, 0)


def compare(roster: Roster, entered: Column, comparable: Mask) -> Comparison:
    """Compare the ranks of each communicator."""
    least = np.full(roster.group_count, np.iinfo(np.int64).max)
    most = np.zeros(roster.group_count, np.int64)
    np.minimum.at(least, roster.groups[comparable], entered[comparable])
    np.maximum.at(most, roster.groups[comparable], entered[comparable])
    least = np.where(least <= most, least, 0)
    return Comparison(comparable, entered, least[roster.groups], most[roster.groups])
