"""Reads the state of every rank: its calls, its oldest operation in flight, its usual duration.

Where completion is seen, an operation is in flight when it was handed to NCCL's proxy and is not complete.  Where only
calls are seen, the communicator's sequence must stand, and something else must say that an operation is in flight
(agent/node/stalls/inferred_flight.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import InFlight, OwnHistory
from railscope.agent.node.collectives.call_counts import Table
from railscope.agent.node.collectives.operation_times import OperationTimes
from railscope.agent.node.collectives.stragglers import NOT_BY_ALL
from railscope.agent.node.stalls.baseline import Baselines
from railscope.agent.node.stalls.checkpoints import LastCall
from railscope.agent.node.stalls.evidence import RankFacts
from railscope.agent.node.stalls.inferred_flight import Described, InferredFlights, Place
from railscope.agent.node.stalls.rank_columns import (
    Column,
    Comparison,
    Mask,
    RankColumns,
    Roster,
    Rosters,
    Rows,
    compare,
)
from railscope.agent.node.stalls.sources import InFlightTables, Inspection, Known
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op, op_name
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.records.calls import COMMUNICATOR
from railscope.probes.nccl.records.internals import OPERATION, UNKNOWN_BYTES, UNKNOWN_SIZE

IDLE_NS: Final = 600_000_000_000
"""A communicator without a call for this long is idle, whatever its threads wait for."""
_HISTORY_NS: Final = 800_000_000
"""Once a second: no look that comes a moment early waits for the next."""
_QUIET_HISTORY_NS: Final = 500_000_000
"""The same where nothing is suspected: the next look may be a second away."""
_RECENT_CALL_NS: Final = 1_000_000_000
"""Threads that ran while a call is no older took part in it."""
_UNCOUNTED_NS: Final = 2_000_000_000
"""When operations go on for so long without a message, messages are not counted any more."""
_SENDS_NS: Final = 1_500_000_000
"""Messages are looked at once a second."""
_BEGINS_WITH_A_SEND: Final = frozenset({Op.AllReduce, Op.AllGather, Op.ReduceScatter})
"""In a ring every rank's first step of these sends its own data, and waits for no other rank."""
_NO_EVENTS: Final[Mapping[int, int]] = MappingProxyType({})
_RING: Final = 1


class _Operation(NamedTuple):
    """What is needed of an operation that is not complete (dtype OPERATION)."""

    instance: int
    op: int
    payload_bytes: int
    posted_ns: int
    algorithm: int
    net_devices: int
    before_sequence: int


class _OldestOperations:
    """The first operation of each communicator that is not complete (dtype OPERATION)."""

    def __init__(self, operations: Records) -> None:
        operations = operations[np.lexsort((operations["launch"], operations["instance"]))]
        instances, at = np.unique(operations["instance"], return_index=True)
        self._instances: Column = instances.astype(np.int64)
        self._operations = operations[at]

    def posted_ns(self, instances: Column) -> Column:
        """When that of each of these communicators was handed over; 0: it has none."""
        posted_ns = np.zeros(len(instances), np.int64)
        if len(self._instances):
            at = np.minimum(np.searchsorted(self._instances, instances), len(self._instances) - 1)
            has = self._instances[at] == instances
            posted_ns[has] = self._operations["posted_ns"][at[has]]
        return posted_ns

    def of(self, instance: int) -> _Operation:
        """That of a communicator which has one."""
        operation = self._operations[np.searchsorted(self._instances, instance)]
        return _Operation(*(operation[name].item() for name in _Operation._fields))


_NO_OPERATIONS: Final = _OldestOperations(np.zeros(0, OPERATION))


def _columns_of(roster: Roster, values: Records, operations: _OldestOperations) -> RankColumns:
    """How far the ranks came (dtype COMMUNICATOR)."""
    values = values[roster.places]
    enqueued, last_ns, first_ns = (values[name].astype(np.int64) for name in ("sequence", "last_ns", "first_ns"))
    return RankColumns(
        roster=roster,
        enqueued=enqueued,
        last_call_ns=np.where(last_ns, last_ns, first_ns),
        posted_ns=operations.posted_ns(roster.instances),
    )


class RankReader:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        communicators: Table,
        tables: InFlightTables | None,
        known: Known,
        inspector: Inspection,
        memory: ProcessMemory,
        suspicion_ns: int,
    ) -> None:
        """`tables` None: only calls are seen.  Signs are looked for when the calls have stood for `suspicion_ns`."""
        self._communicators = communicators
        self._tables = tables
        self._known = known
        self._inspector = inspector
        self.suspicion_ns = suspicion_ns
        self._baselines = Baselines()
        self.times = OperationTimes()
        self._history_ns = 0
        self._slow: dict[int, tuple[int | None, OwnHistory]] = {}
        """Communicators whose operations (op; None: calls of any) have become slower, as of the last second."""
        self._connections: Records | None = None
        """As of the last evaluation; None: not requested."""
        self._unusual: set[int] = set()
        """Communicators that were stalled since histories were read last."""
        self.learnt = False
        """Whether the last reading was one of those that come about once a second."""
        self.quiet_until_ns: int | None = 0
        """Until when another reading would show nothing new to judge; None: a rank is suspected of something."""
        self.read_ns = 0
        """When the tables were read last."""
        self._inferred: frozenset[int] = frozenset()
        """Instances in which the last look inferred an operation."""
        self._rosters = Rosters(known)
        self._columns = _columns_of(self._rosters.last, np.zeros(0, COMMUNICATOR), _NO_OPERATIONS)
        """As of then: living ranks."""
        self._operations_of: _OldestOperations = _NO_OPERATIONS
        """As of then: the oldest of each communicator that is not complete."""
        self._facts: dict[int, RankFacts] = {}
        """Of those that were requested, by row."""
        self._comparison: Comparison | None = None
        """None: not requested."""
        self._near: Mask | None = None
        """Ranks that the last look is at; None: it is at all."""
        self.suspects: Rows = np.zeros(0, np.intp)
        """Ranks that may not be well, as of the last look; most of them need no judgement."""
        self._resting: Mask = np.zeros(0, bool)
        """Ranks that were among them as of the last `update_resting`."""
        self._slow_no_more: frozenset[int] = frozenset()
        """Communicators that were among `_slow` a second before."""
        self._last_op: dict[int, int] = {}
        self._apart: set[int] = set()
        """Communicators used for what only some ranks call: their ranks' calls are numbered differently."""
        self._inferred_flights = InferredFlights(known, inspector, memory)
        self._last_send: dict[int, tuple[int, int]] = {}
        """By pid: when the last message was handed over, and when that was read."""
        self._advanced_ns: dict[int, int] = {}
        """By pid: when operations were last seen to have completed."""
        self._operations: dict[int, int] = {}
        """By pid: operations that its communicators had completed when messages were last counted."""

    def record_calls(self, events: Records) -> list[int]:
        """Record the last call of each communicator: dtype CALL_EVENT, in the order of the calls.

        Returns the instances that were called.
        """
        if not len(events):
            return []
        # No Python runs per event, and no array is as long as instances lie apart, which tenants decide.  The last of
        # each is found by sorting words of an instance and its event's place.
        instances, last_ops = np.ascontiguousarray(events["instance"]), np.ascontiguousarray(events["op"])
        order = instances.astype(np.uint64) << np.uint64(32)
        order |= np.arange(len(order), dtype=np.uint64)
        order.sort()
        sorted_instances = order >> np.uint64(32)
        last = np.append(np.flatnonzero(sorted_instances[1:] != sorted_instances[:-1]), len(order) - 1)
        called: list[int] = sorted_instances[last].tolist()
        places = (order[last] & np.uint64(0xFFFFFFFF)).astype(np.intp)
        self._last_op.update(zip(called, last_ops[places].tolist(), strict=True))
        apart = NOT_BY_ALL[last_ops]
        if apart.any():
            self._apart.update(instances[apart].tolist())
        return called

    def read(
        self,
        now_ns: int,
        stalled: Collection[int],
        broken: Collection[str] = (),
        *,
        events: Mapping[int, int] = _NO_EVENTS,
        only: Collection[int] | None = None,
        left_out: Collection[int] = (),
    ) -> list[RankFacts]:
        """Ranks of this host to judge: those that may not be well, and in which something is in flight, or slow.

        Of `suspects` the others make no call and show no sign of an operation: nothing can be said of them.

        Args:
            now_ns: the moment.
            stalled: instances whose last moments are not usual; they are among those returned while they live.
            broken: names of communicators that lost a rank whose process ended on this host.
            events: when the kernel told that something happened to processes, by pid: ranks of their communicators are
                among those returned, however young what they are at is.
            only: of these processes' communicators alone, until `widen`; None: of all.  What is usual is not learnt
                then, and ranks of processes that share none with these are not looked at.
            left_out: these processes' communicators, which are not looked at until `widen`; nor is anything learnt.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        keys, values = self._communicators.read()
        before, roster = self._columns.roster, self._rosters.find(keys, values)
        operations = self._oldest()
        columns = _columns_of(roster, values, operations)
        near = None
        if only is not None or left_out:
            chosen = roster.of_processes(roster.companions(left_out if only is None else only))
            near = chosen if only is not None else ~chosen
        self._unusual.update(stalled)
        period_ns = _HISTORY_NS if self.quiet_until_ns is None else _QUIET_HISTORY_NS
        remember = self.learnt = near is None and now_ns - self._history_ns >= period_ns
        if remember:
            self._history_ns = now_ns
            unusual, self._unusual = self._unusual, set()
            self._record_histories(now_ns, unusual, roster)
            self._learn_calls(now_ns, columns, unusual)
        if not roster.row_of.keys() >= before.row_of.keys():
            # The kernel keeps what they did for half a second more.
            self.record_times()
        if roster is not before:
            self._resting = roster.mask_of(before.instances[self._resting].tolist())
        self.read_ns, self._columns, self._operations_of, self._near = now_ns, columns, operations, near
        self._facts, self._comparison, self._connections = {}, None, None
        found, quiet_until_ns = self._find(now_ns, columns, stalled, broken, events=events, only=only)
        if remember:
            followed = self._followed is not None
            slowest = {
                one: self._baselines.slowest(now_ns, one, stalled=one in unusual, followed=followed)
                for one in roster.row_of.keys() & (self._baselines.maybe_slower() | unusual)
            }
            slow = {one: history for one, history in slowest.items() if history is not None}
            self._slow_no_more, self._slow = frozenset(self._slow.keys() - slow.keys()), slow
        restless = bool(self._slow) or any(rank.in_flight is not None for rank in found)
        if restless or only is None:
            self.quiet_until_ns = None if restless else quiet_until_ns
        return found

    def comparison(self) -> Comparison:
        """Where the ranks stand that the last look is at."""
        if self._comparison is None:
            roster, enqueued = self._columns.roster, self._columns.enqueued
            entered, comparable = enqueued.copy(), np.ones(len(enqueued), bool)
            for row in (row for name in roster.late for row in self._rows_named(roster, name).tolist()):
                position = self._position(row)
                comparable[row] = position is not None
                entered[row] = enqueued[row] if position is None else position
            comparable &= ~np.isin(roster.instances, np.fromiter(self._apart, np.int64, len(self._apart)))
            if self._near is not None:
                comparable &= self._near
            self._comparison = compare(roster, entered, comparable)
        return self._comparison

    def _position(self, row: int) -> int | None:
        """How many calls a rank entered, as others of its communicator count; None: unknown."""
        communicator, enqueued = self._columns.roster.communicators[row], int(self._columns.enqueued[row])
        # Ranks are numbered alike by their own calls if all were seen from the first one on, else by NCCL's numbers.
        if communicator.name not in self._columns.roster.late:
            return enqueued
        return self._known.position(communicator.instance, enqueued)

    @staticmethod
    def _rows_named(roster: Roster, name: str) -> Rows:
        if name != UNKNOWN:
            return roster.of_comm[name]
        return np.array([row for row, one in enumerate(roster.communicators) if one.name == UNKNOWN], np.intp)

    def _learn_calls(self, now_ns: int, columns: RankColumns, unusual: Collection[int]) -> None:
        """Learn how far apart calls are, once a second."""
        roster = columns.roster
        # Calls that no probe meets are read too seldom to tell how far apart they are; after this they begin anew.
        unprobed = [one for one in set(roster.libraries.tolist()) if self._known.calls_unprobed(one)]
        instances, calls = roster.instances, columns.enqueued
        counted: Set[int] = roster.row_of.keys()
        if unprobed:
            usable = ~np.isin(roster.libraries, unprobed)
            instances, calls = instances[usable], calls[usable]
            counted = set(instances.tolist())
        self._baselines.record_calls(now_ns, instances, calls, unusual)
        self._baselines.forget(counted)
        self._remember_threads(now_ns, columns)

    def _find(
        self,
        now_ns: int,
        columns: RankColumns,
        stalled: Collection[int],
        broken: Collection[str],
        *,
        events: Mapping[int, int],
        only: Collection[int] | None,
    ) -> tuple[list[RankFacts], int]:
        """See `read`; and until when another reading shows nothing new, if nothing of this one does."""
        roster, in_operation = columns.roster, columns.in_operation
        touched = roster.sharing(events if only is None else only)
        near = np.ones(len(touched), bool) if self._near is None else self._near
        # Whether anything can be wrong with a rank yet, as far as the tables tell.
        since_ns = np.where(in_operation, columns.posted_ns, columns.last_call_ns)
        standing_ns = now_ns - since_ns
        may_be_at_work = in_operation | ((columns.enqueued > 0) & (standing_ns <= IDLE_NS))
        unwell = near & may_be_at_work & (touched | (standing_ns >= self.suspicion_ns))
        looked_at = near if only is None else touched & near
        apart = roster.mask_of([*self._slow, *stalled])
        suspected = looked_at & (unwell | apart)
        self.suspects = np.flatnonzero(suspected)
        young_ns = since_ns[looked_at & ~suspected & (standing_ns < self.suspicion_ns)]
        quiet_until_ns = now_ns + self.suspicion_ns
        if len(young_ns):
            quiet_until_ns = min(quiet_until_ns, int(young_ns.min()) + self.suspicion_ns)

        self._inferred_flights.forget(roster, near & ~unwell & ~in_operation)
        inferred = self._inferred_flights.find(
            now_ns,
            self,
            np.flatnonzero(suspected & unwell & ~in_operation),
            Described(self._place, self.last_op, lambda one: self._baselines.call_history_of(now_ns, one), broken),
            afresh=unwell if only is not None else None,
        )
        judged = suspected & (in_operation | apart | touched | roster.mask_of(self._slow_no_more))
        judged[list(inferred)] = True
        self._inferred = frozenset(int(roster.instances[row]) for row in inferred)
        found = []
        for row in np.flatnonzero(judged).tolist():
            rank, flight = self.fact(row), inferred.get(row)
            event_ns = events.get(rank.pid) if events else None
            if flight is not None or event_ns is not None:
                rank = self._facts[row] = replace(rank, in_flight=flight or rank.in_flight, event_ns=event_ns)
            found.append(rank)
        return found, quiet_until_ns

    def _remember_threads(self, now_ns: int, columns: RankColumns) -> None:
        """Of processes that make calls just now, and of which calls are all that is seen."""
        roster = columns.roster
        recent = np.flatnonzero(now_ns - columns.last_call_ns < _RECENT_CALL_NS)
        asked: set[int] = set()
        for row, pid in zip(recent.tolist(), roster.pids[recent].tolist(), strict=True):
            if pid in asked or self._known.completed(int(roster.instances[row])) is not None:
                continue
            process = self._known.process(pid)
            if process is not None:
                self._inspector.remember_threads(process)
            asked.add(pid)

    def pids_by_comm(self) -> Mapping[str, Collection[int]]:
        """Processes with a rank of each communicator, by its name, as of the last look, whatever that was at."""
        roster = self._columns.roster
        return {name: set(roster.pids[rows].tolist()) for name, rows in roster.of_comm.items()}

    def widen(self) -> None:
        """From now on ranks of all processes count again, those that the last look left out as of the one before."""
        self._near = None

    def companions(self, pids: Collection[int]) -> frozenset[int]:
        """Processes that have a rank in a communicator of these, as of the last look, and these themselves."""
        return self._columns.roster.companions(pids)

    @property
    def living(self) -> Set[int]:
        """Instances of all ranks at the last look."""
        return self._columns.roster.row_of.keys()

    @property
    def columns(self) -> RankColumns:
        """How far all ranks came, as of the last look."""
        return self._columns

    def update_resting(self) -> bool:
        """Remember which ranks may not be well as of the last look; returns whether one of them was well before."""
        suspected = np.zeros(len(self._resting), bool)
        suspected[self.suspects] = True
        come_to_rest = bool((suspected & ~self._resting).any())
        self._resting = suspected if self._near is None else np.where(self._near, suspected, self._resting)
        return come_to_rest

    def suspects_by_pid(self) -> Mapping[int, int]:
        """How many ranks of each process may not be well, as of the last look."""
        pids, counts = np.unique(self._columns.roster.pids[self.suspects], return_counts=True)
        return dict(zip(pids.tolist(), counts.tolist(), strict=True))

    def rows_of_process(self, pid: int) -> Rows:
        """Ranks of a process that the last look is at, by row."""
        return self._at(self._columns.roster.of_pid.get(pid))

    def rows_of_comm(self, comm: str) -> Rows:
        """Ranks of a communicator that the last look is at, by its name; those of one without are not told."""
        return self._at(self._columns.roster.of_comm.get(comm))

    def _at(self, rows: Rows | None) -> Rows:
        if rows is None:
            return np.zeros(0, np.intp)
        return rows if self._near is None else rows[self._near[rows]]

    def facts_of(self, rows: Rows) -> list[RankFacts]:
        """Ranks as of the last look."""
        return [self.fact(row) for row in rows.tolist()]

    def in_flight(self) -> Mask:
        """Ranks in which something is in flight, as far as the last look found."""
        return self._columns.in_operation | self._columns.roster.mask_of(self._inferred)

    def ranks_of_processes(self, pids: Collection[int]) -> dict[int, list[RankFacts]]:
        """Those of each of these processes."""
        of_pid = self._columns.roster.of_pid
        return {pid: self.facts_of(of_pid[pid]) if pid in of_pid else [] for pid in pids}

    def last_calls(self) -> dict[int, LastCall]:
        """The last call of each process on any of its communicators, by pid."""
        columns = self._columns
        return {
            pid: LastCall(int(columns.last_call_ns[rows].max()), int(columns.enqueued[rows].sum()))
            for pid, rows in columns.roster.of_pid.items()
        }

    def record_times(self) -> None:
        """Record operation times now: the kernel is about to drop some of them.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        if self._tables is not None:
            self.times.record(*self._tables.histories(), self._known.communicator)

    def last_op(self, instance: int) -> str:
        """What a communicator was called for last."""
        op = self._last_op.get(instance)
        return UNKNOWN if op is None else op_name(op)

    @property
    def _followed(self) -> InFlightTables | None:
        """The tables, while the programs keep them up to date; None: calls are all that is seen."""
        return self._tables if self._known.level() >= Level.COMPLETION else None

    def devices_and_peers(self, rank: RankFacts) -> tuple[frozenset[str], tuple[int, ...]]:
        """Devices that a communicator uses, and ranks that it waits to receive from."""
        tables = self._followed
        if tables is None:
            return frozenset(), ()
        if self._connections is None:
            _, self._connections = tables.connections()
        connections = self._connections
        connections = connections[connections["instance"] == rank.instance]
        waiting = connections[(connections["send"] == 0) & (connections["posted"] > connections["completed"])]
        numbers = {int(number) for number in connections["net_device"].tolist() if number >= 0}
        return self._known.devices(rank.pid, numbers), tuple(sorted(set(waiting["peer"].tolist())))

    def sent_recently(self, now_ns: int, pid: int) -> bool | None:
        """Whether a process handed anything to a network device within the last moments; None: not observed."""
        if self._known.level() < Level.RAILS or pid not in self._last_send or not self._counted(pid):
            return None
        return now_ns - self._last_send[pid][0] < _SENDS_NS

    def forget_process(self, pid: int) -> None:
        """A process has ended."""
        self._last_send.pop(pid, None)
        self._advanced_ns.pop(pid, None)
        self._operations.pop(pid, None)

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        gone = tuple(instances)
        self.times.forget(gone)
        for instance in gone:
            self._last_op.pop(instance, None)
            self._apart.discard(instance)
            self._unusual.discard(instance)

    def _place(self, row: int) -> Place:
        roster = self._columns.roster
        process = self._known.process(int(roster.pids[row]))
        assert process is not None  # it is of the roster
        return Place(process, roster.addresses[row], int(roster.libraries[row]))

    def fact(self, row: int) -> RankFacts:
        """A rank as of the last look: put together only for who asks, as most are well most of the time."""
        known = self._facts.get(row)
        if known is None:
            known = self._facts[row] = self._rank(row)
        return known

    def _rank(self, row: int) -> RankFacts:
        columns = self._columns
        communicator = columns.roster.communicators[row]
        instance, enqueued = communicator.instance, int(columns.enqueued[row])
        op, slow = self._slow.get(instance, (None, None))
        operation = self._operations_of.of(instance) if columns.posted_ns[row] else None
        position = self._position(row)
        return RankFacts(
            instance=instance,
            comm=communicator.name,
            rank=communicator.rank,
            nranks=communicator.nranks,
            pid=communicator.tgid,
            enqueued=enqueued,
            completed=self._known.completed(instance),
            last_call_ns=int(columns.last_call_ns[row]),
            in_flight=None if operation is None else self._flight(communicator.tgid, operation),
            slow=slow,
            slow_op=self.last_op(instance) if op is None else op_name(op),
            comparable=position is not None and instance not in self._apart,
            unseen_calls=0 if position is None else position - enqueued,
        )

    def _record_histories(self, now_ns: int, unusual: set[int], roster: Roster) -> None:
        tables = self._followed
        if tables is None:
            return
        keys, values = tables.histories()
        self._baselines.record(now_ns, keys, values, unusual)
        self.times.record(keys, values, self._known.communicator)
        operations: defaultdict[int, int] = defaultdict(int)
        for instance, count in zip(keys["instance"].tolist(), values["operations"].tolist(), strict=True):
            row = roster.row_of.get(instance)
            operations[0 if row is None else roster.communicators[row].tgid] += count
        for sent in tables.sent():
            last_ns = max(sent.last_ns, self._last_send.get(sent.tgid, (0, 0))[0])
            self._last_send[sent.tgid] = last_ns, now_ns
            if operations[sent.tgid] != self._operations.get(sent.tgid, 0):
                self._advanced_ns[sent.tgid] = now_ns
        self._operations = dict(operations)

    def _counted(self, pid: int) -> bool:
        """Whether messages of a process are counted: not any more where operations went on without one."""
        return self._last_send.get(pid, (0, 0))[0] + _UNCOUNTED_NS >= self._advanced_ns.get(pid, 0)

    def _oldest(self) -> _OldestOperations:
        """The first operation of each communicator that is not complete."""
        tables = self._followed
        return _NO_OPERATIONS if tables is None else _OldestOperations(tables.operations()[1])

    def _flight(self, pid: int, operation: _Operation) -> InFlight:
        posted_ns, payload = operation.posted_ns, operation.payload_bytes
        last_send_ns, read_ns = self._last_send.get(pid, (posted_ns, 0))
        size = UNKNOWN_SIZE if payload == UNKNOWN_BYTES else max(payload - 1, 0).bit_length()
        return InFlight(
            op=op_name(operation.op),
            payload_bytes=None if payload == UNKNOWN_BYTES else payload,
            since_ns=posted_ns,
            strength="strong",
            sign="handed to the network and not complete",
            history=self._baselines.history_of(self.read_ns, operation.instance, operation.op, size),
            nothing_sent=operation.op in _BEGINS_WITH_A_SEND
            and operation.algorithm == _RING
            and operation.net_devices != 0
            and last_send_ns < posted_ns < read_ns
            and self._counted(pid),
            calls_before=operation.before_sequence,
        )
