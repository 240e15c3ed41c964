"""Reads the state of every rank: its calls, its oldest operation in flight, its usual duration.

Where completion is seen, an operation is in flight when it was handed to NCCL's proxy and is not complete.  Where only
calls are seen, the communicator's sequence must stand, and something else must say that an operation is in flight
(agent/node/stalls/inferred_flight.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import InFlight, OwnHistory
from railscope.agent.node.collectives.call_counts import Table
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.collectives.operation_times import OperationTimes
from railscope.agent.node.collectives.stragglers import NOT_BY_ALL
from railscope.agent.node.stalls.baseline import Baselines
from railscope.agent.node.stalls.checkpoints import LastCall
from railscope.agent.node.stalls.evidence import RankFacts
from railscope.agent.node.stalls.inferred_flight import Described, InferredFlights, Place
from railscope.agent.node.stalls.sources import InFlightTables, Inspection, Known
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op, op_name
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.records.internals import UNKNOWN_BYTES, UNKNOWN_SIZE

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


class _Row(NamedTuple):
    """One rank's end of a communicator as the tables had it at the last look."""

    communicator: Communicator
    process: ObservedProcess
    enqueued: int
    last_call_ns: int
    operation: _Operation | None
    """The oldest that is not complete."""
    address: int
    """Of the communicator, in the process."""
    library: int

    @property
    def since_ns(self) -> int:
        """When what it is at began, as far as the tables tell."""
        return self.last_call_ns if self.operation is None else self.operation.posted_ns


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
        self._rows: dict[int, _Row] = {}
        """As of then, by instance: living ranks."""
        self._facts: dict[int, RankFacts] = {}
        """Of those that were requested."""
        self._near: frozenset[int] | None = None
        """Processes that the last look is at; None: it is at all."""
        self._last_op: dict[int, int] = {}
        self._late: set[str] = set()
        """Hashes of communicators of which not every rank here was seen from its first call on."""
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
            self._apart.update(np.unique(instances[apart]).tolist())
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
        """Ranks of this host that may not be well: all but those whose last call or oldest operation is young.

        Args:
            now_ns: the moment.
            stalled: instances whose last moments are not usual; they are among those returned while they live.
            broken: names of communicators that lost a rank whose process ended on this host.
            events: when the kernel told that something happened to processes, by pid: ranks of their communicators are
                among those returned, however young what they are at is.
            only: of these processes' communicators alone, until `widen`; None: of all.  What is usual is not learnt
                then, and ranks of processes that share none with these are left as they were.
            left_out: these processes' communicators, which are left as they were until `widen`; nor is anything learnt.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        keys, values = self._communicators.read()
        self._near = None
        if only is not None or left_out:
            chosen = self.companions(left_out if only is None else only)
            near = np.isin(keys["tgid"], list(chosen), invert=only is None)
            keys, values = keys[near], values[near]
            self._near = chosen if only is not None else frozenset(self._pids.union(keys["tgid"].tolist()) - chosen)
        instances, tgids = values["instance"].tolist(), keys["tgid"].tolist()
        oldest = self._oldest()
        self._connections = None
        self._unusual.update(stalled)
        period_ns = _HISTORY_NS if self.quiet_until_ns is None else _QUIET_HISTORY_NS
        remember = self.learnt = self._near is None and now_ns - self._history_ns >= period_ns
        if remember:
            self._history_ns = now_ns
            unusual, self._unusual = self._unusual, set()
            self._record_histories(now_ns, unusual, dict(zip(instances, tgids, strict=True)))
        rows = {}
        if self._near is not None:
            rows = {one: row for one, row in self._rows.items() if row.communicator.tgid not in self._near}
        suspects = []
        unwell = set()
        met = self._communicators_of(events if only is None else only, instances, tgids)
        quiet_until_ns = now_ns + self.suspicion_ns
        communicator_of, processes = self._known.communicator, {pid: self._known.process(pid) for pid in set(tgids)}
        known: list[bool] = []
        # By column: a look at one field of one row of an array takes as long as the rest of the loop.
        last_call_ns = np.where(values["last_ns"], values["last_ns"], values["first_ns"])
        columns = (values["sequence"], last_call_ns, keys["comm"], values["library"])
        for instance, pid, enqueued, last_ns, address, library in zip(
            instances, tgids, *(column.tolist() for column in columns), strict=True
        ):
            communicator, process = communicator_of(instance), processes[pid]
            if (
                communicator is None
                or communicator.ended_ns is not None
                or process is None
                or process.ended_ns
                or communicator.nranks == 1
            ):
                known.append(False)
                continue
            known.append(True)
            operation = oldest.get(instance)
            row = rows[instance] = _Row(communicator, process, enqueued, last_ns, operation, address, library)
            touched = bool(met) and (communicator.name in met or instance in met)
            if (touched and self._may_be_at_work(now_ns, row)) or not self._is_well(now_ns, row):
                unwell.add(instance)
            if only is not None and not touched:
                continue
            if instance in unwell or instance in self._slow or instance in stalled:
                suspects.append(instance)
            elif (suspect_ns := row.since_ns + self.suspicion_ns) > now_ns:
                quiet_until_ns = min(quiet_until_ns, suspect_ns)
        counted: Collection[int] = ()
        if remember:
            # Calls that no probe meets are read too seldom to tell how far apart they are; after this they begin anew.
            unprobed = {one for one in set(values["library"].tolist()) if self._known.calls_unprobed(one)}
            counted = {one for one, row in rows.items() if row.library not in unprobed} if unprobed else rows.keys()
            usable = np.array(known, bool) & ~np.isin(values["library"], list(unprobed))
            self._baselines.record_calls(now_ns, values["instance"][usable], values["sequence"][usable], unusual)
            self._remember_threads(now_ns, rows.values())
        if self._rows.keys() - rows.keys():
            # The kernel keeps what they did for half a second more.
            self.record_times()
        self.read_ns, self._rows, self._facts = now_ns, rows, {}
        if self._near is None:
            self._late = {row.communicator.name for row in rows.values() if not row.communicator.whole}
        found = [self._fact(instance) for instance in suspects]
        if remember:
            self._baselines.forget(counted)
            followed = self._followed is not None
            slowest = {
                one: self._baselines.slowest(now_ns, one, stalled=one in unusual, followed=followed)
                for one in rows.keys() & (self._baselines.maybe_slower() | unusual)
            }
            self._slow = {one: history for one, history in slowest.items() if history is not None}
        if events:
            found = [replace(rank, event_ns=events.get(rank.pid)) for rank in found]
            self._facts.update((rank.instance, rank) for rank in found)
        without = [rank for rank in found if rank.in_flight is None and rank.instance in unwell]
        if without:
            described = Described(
                self._place, self.last_op, lambda one: self._baselines.call_history_of(now_ns, one), broken
            )
            self._facts.update(
                (rank.instance, rank)
                for rank in self._inferred_flights.add(
                    now_ns, without, self.all_ranks, described, () if only is None else unwell
                )
            )
        found = [self._facts[rank.instance] for rank in found]
        restless = self._slow or any(rank.in_flight is not None for rank in found)
        if restless or only is None:
            self.quiet_until_ns = None if restless else quiet_until_ns
        return found

    def _remember_threads(self, now_ns: int, rows: Iterable[_Row]) -> None:
        """Of processes that make calls just now, and of which calls are all that is seen."""
        asked: set[int] = set()
        for row in rows:
            pid = row.communicator.tgid
            if pid in asked or now_ns - row.last_call_ns >= _RECENT_CALL_NS:
                continue
            if self._known.completed(row.communicator.instance) is None:
                self._inspector.remember_threads(row.process)
                asked.add(pid)

    def _communicators_of(
        self, pids: Collection[int], instances: Sequence[int], tgids: Sequence[int]
    ) -> frozenset[int | str]:
        """Names of the communicators of these processes; of those without a name, the instances."""
        if not pids:
            return frozenset()
        found: set[int | str] = set()
        for instance, tgid in zip(instances, tgids, strict=True):
            communicator = self._known.communicator(instance) if tgid in pids else None
            if communicator is not None:
                found.add(instance if communicator.name == UNKNOWN else communicator.name)
        return frozenset(found)

    @property
    def _pids(self) -> set[int]:
        """Processes with a rank, as of the last look."""
        return {row.communicator.tgid for row in self._rows.values()}

    def pids_by_comm(self) -> Mapping[str, Collection[int]]:
        """Processes with a rank of each communicator, by its name, as of the last look, whatever that was at."""
        found: defaultdict[str, set[int]] = defaultdict(set)
        for row in self._rows.values():
            found[row.communicator.name].add(row.communicator.tgid)
        return found

    def widen(self) -> None:
        """From now on ranks of all processes count again, those that the last look left out as of the one before."""
        self._near = None

    def companions(self, pids: Collection[int]) -> frozenset[int]:
        """Processes that have a rank in a communicator of these, as of the last look, and these themselves."""
        names = {row.communicator.name for row in self._rows.values() if row.communicator.tgid in pids} - {UNKNOWN}
        found = {row.communicator.tgid for row in self._rows.values() if row.communicator.name in names}
        return frozenset(found.union(pids))

    @property
    def living(self) -> Collection[int]:
        """Instances of all ranks at the last look."""
        return self._rows.keys()

    def all_ranks(self) -> list[RankFacts]:
        """All ranks as of the last look: put together only for who asks, as most are well most of the time."""
        if self._near is None:
            return [self._fact(instance) for instance in self._rows]
        return [self._fact(one) for one, row in self._rows.items() if row.communicator.tgid in self._near]

    def ranks_of_processes(self, pids: Collection[int]) -> dict[int, list[RankFacts]]:
        """Those of each of these processes."""
        found: dict[int, list[RankFacts]] = {pid: [] for pid in pids}
        for instance, row in self._rows.items():
            if row.communicator.tgid in found:
                found[row.communicator.tgid].append(self._fact(instance))
        return found

    def last_calls(self) -> dict[int, LastCall]:
        """The last call of each process on any of its communicators, by pid."""
        found: dict[int, LastCall] = {}
        for row in self._rows.values():
            pid = row.communicator.tgid
            time_ns, calls = found.get(pid, (0, 0))
            found[pid] = LastCall(max(row.last_call_ns, time_ns), calls + row.enqueued)
        return found

    def _may_be_at_work(self, now_ns: int, row: _Row) -> bool:
        """Whether a rank may be in an operation, or on its way from one to the next."""
        return row.operation is not None or (row.enqueued > 0 and now_ns - row.last_call_ns <= IDLE_NS)

    def _is_well(self, now_ns: int, row: _Row) -> bool:
        """Whether nothing can be wrong with a rank yet, as far as the tables tell."""
        if row.operation is not None:
            return now_ns - row.operation.posted_ns < self.suspicion_ns
        standing_ns = now_ns - row.last_call_ns
        if row.enqueued and self.suspicion_ns <= standing_ns <= IDLE_NS:
            return False
        self._inferred_flights.forget(row.communicator.instance)
        return True

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
            self._inferred_flights.forget(instance)
            self._last_op.pop(instance, None)
            self._apart.discard(instance)
            self._unusual.discard(instance)
            self._rows.pop(instance, None)
            self._facts.pop(instance, None)

    def _place(self, instance: int) -> Place:
        row = self._rows[instance]
        return Place(row.process, row.address, row.library)

    def _fact(self, instance: int) -> RankFacts:
        known = self._facts.get(instance)
        if known is None:
            known = self._facts[instance] = self._rank(self._rows[instance])
        return known

    def _rank(self, row: _Row) -> RankFacts:
        communicator = row.communicator
        instance = communicator.instance
        op, slow = self._slow.get(instance, (None, None))
        # Ranks are numbered alike by their own calls if all were seen from the first one on, else by NCCL's numbers.
        position: int | None = row.enqueued
        if communicator.name in self._late:
            position = self._known.position(instance, row.enqueued)
        return RankFacts(
            instance=instance,
            comm=communicator.name,
            rank=communicator.rank,
            nranks=communicator.nranks,
            pid=communicator.tgid,
            enqueued=row.enqueued,
            completed=self._known.completed(instance),
            last_call_ns=row.last_call_ns,
            in_flight=None if row.operation is None else self._flight(communicator.tgid, row.operation),
            slow=slow,
            slow_op=self.last_op(instance) if op is None else op_name(op),
            comparable=position is not None and instance not in self._apart,
            unseen_calls=0 if position is None else position - row.enqueued,
        )

    def _record_histories(self, now_ns: int, unusual: set[int], pids: dict[int, int]) -> None:
        tables = self._followed
        if tables is None:
            return
        keys, values = tables.histories()
        self._baselines.record(now_ns, keys, values, unusual)
        self.times.record(keys, values, self._known.communicator)
        operations: defaultdict[int, int] = defaultdict(int)
        for instance, count in zip(keys["instance"].tolist(), values["operations"].tolist(), strict=True):
            operations[pids.get(instance, 0)] += count
        for sent in tables.sent():
            last_ns = max(sent.last_ns, self._last_send.get(sent.tgid, (0, 0))[0])
            self._last_send[sent.tgid] = last_ns, now_ns
            if operations[sent.tgid] != self._operations.get(sent.tgid, 0):
                self._advanced_ns[sent.tgid] = now_ns
        self._operations = dict(operations)

    def _counted(self, pid: int) -> bool:
        """Whether messages of a process are counted: not any more where operations went on without one."""
        return self._last_send.get(pid, (0, 0))[0] + _UNCOUNTED_NS >= self._advanced_ns.get(pid, 0)

    def _oldest(self) -> dict[int, _Operation]:
        """The first operation of each communicator that is not complete, by instance."""
        tables = self._followed
        if tables is None:
            return {}
        _, operations = tables.operations()
        operations = operations[np.lexsort((operations["launch"], operations["instance"]))]
        instances, at = np.unique(operations["instance"], return_index=True)
        columns = (operations[name][at].tolist() for name in _Operation._fields)
        return dict(zip(instances.tolist(), map(_Operation._make, zip(*columns, strict=True)), strict=True))

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
