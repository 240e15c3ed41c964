"""The facts of each communicator in a snapshot: its identity and its enqueued operations, ended ones included.

A communicator that has ended does nothing more: its counts were taken out of the kernel's table, and its facts are
made once, with the labels that its process had.  Calls that no communicator can be told for (its events were lost, or
NCCL was given none) are one nameless entry for each process.

A node may have thousands of communicators, of which most are as they were a few seconds before: who each is, and which
rows of the kernel's table are its own, is found out again only when some of it has changed, and the facts of one that
has made no call since are the same object.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import Labels, RankIdentity
from railscope.agent.facts.snapshot import CommunicatorFacts, OpTotal
from railscope.agent.facts.stall import LastCollectives
from railscope.agent.node.collectives.call_counts import CallCount, CallCounts, CallKind, sum_groups
from railscope.agent.node.collectives.communicators import Communicator, Communicators, format_label
from railscope.agent.node.completion.completion import CommunicatorProgress
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.abi import op_name
from railscope.probes.processes.processes import ProcessIdentity
from railscope.probes.shares import in_turns

_Ops = defaultdict[int, list[int]]
"""Calls and payload bytes by op."""


def _ops() -> _Ops:
    return defaultdict(lambda: [0, 0])


def _add(ops: _Ops, count: CallCount) -> None:
    total = ops[count.kind.op]
    total[0] += count.calls
    total[1] += count.payload_bytes


@dataclass(slots=True)
class _Ended:
    communicator: Communicator
    process: ObservedProcess | None
    netns: str
    ended_ns: int
    ops: _Ops = field(default_factory=_ops)
    last: LastCollectives[str] | None = None
    """Its last collectives; None: unknown."""
    told: bool = False
    """Those are shown, for ranks on other hosts."""
    facts: CommunicatorFacts | None = None
    """None: to be made."""

    @property
    def tenant(self) -> Tenant:
        return self.process.tenant if self.process is not None else UNKNOWN_TENANT


class CommunicatorHistory:
    """Communicators that have ended, until they are forgotten.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._ended: dict[int | ProcessIdentity, _Ended] = {}
        """By instance; what a process did namelessly by its identity."""
        self._told: defaultdict[str, set[LastCollectives[str]]] = defaultdict(set)
        """By communicator: what is told of the last collectives of those."""
        self._ends: tuple[_End, ...] = ()
        """Those that have not been put away, as of the rows and the communicators of the last facts."""
        self._grouped = _Grouped(np.zeros(0, np.intp), [], [0])
        self._counted: CallCounts | None = None
        """What the rows said then; None: they were others."""
        self._of_kinds: tuple[CallKind, ...] | None = None
        self._of_changes = 0
        self._nameless: dict[int, ObservedProcess | None] = {}
        """By pid, processes that have rows of no communicator that is known."""
        self._owners: dict[int, _Owner] = {}
        """By pid, of their processes."""

    def add_communicator(
        self,
        communicator: Communicator,
        process: ObservedProcess | None,
        netns: str,
        last: LastCollectives[str] | None = None,
    ) -> None:
        """Add a communicator whose counts leave the kernel's table from now on.

        `last`: its last collectives, where they are known.  They are shown where ranks may be on other hosts, and no
        other one of this host that has ended shows the same.

        Raises:
            ValueError: it lives.
        """
        if communicator.ended_ns is None:
            raise ValueError(f"communicator {communicator.instance} has not ended")
        elsewhere = communicator.local_ranks is None or communicator.local_ranks != communicator.nranks
        told = last is not None and elsewhere and last not in self._told[communicator.name]
        if told and last is not None:
            self._told[communicator.name].add(last)
        self._ended[communicator.instance] = _Ended(
            communicator, process, netns, communicator.ended_ns, last=last, told=told
        )

    def last_of(self, instance: int) -> LastCollectives[str] | None:
        """The last collectives of a communicator that has ended; None: they are unknown."""
        ended = self._ended.get(instance)
        return ended.last if ended is not None else None

    def add_count(self, count: CallCount) -> None:
        """Keep a row of a settled communicator that was taken out of the kernel's table."""
        ended = self._ended.get(count.kind.instance)
        if ended is not None:
            _add(ended.ops, count)
            ended.facts = None

    def add_unnamed(self, count: CallCount, process: ObservedProcess, netns: str, ended_ns: int) -> None:
        """Keep a row of a process that has ended, for which no communicator can be told."""
        ended = self._ended.get(process.identity)
        if ended is None:
            nameless = _nameless(count.kind.tgid, ended_ns)
            ended = self._ended[process.identity] = _Ended(nameless, process, netns, ended_ns)
        _add(ended.ops, count)
        ended.facts = None

    def forget(self, before_ns: int, most_ended: int) -> list[int]:
        """Drop what ended before a moment, and the oldest of more than `most_ended`; returns instances dropped.

        Tenants take turns to keep one, so that of more than that those are dropped whose tenant has most of them.
        """
        old = [key for key, ended in self._ended.items() if ended.ended_ns < before_ns]
        if len(self._ended) - len(old) > most_ended:
            rest = sorted(self._ended.keys() - set(old), key=lambda key: self._ended[key].ended_ns, reverse=True)
            old += in_turns(rest, lambda key: self._ended[key].tenant)[most_ended:]
        for key in old:
            ended = self._ended.pop(key)
            if ended.told and ended.last is not None:
                self._told[ended.communicator.name].discard(ended.last)
            if not self._told.get(ended.communicator.name, True):
                del self._told[ended.communicator.name]
        return [key for key in old if isinstance(key, int)]

    def facts(
        self,
        communicators: Communicators,
        counts: CallCounts,
        process_of: Callable[[int], ObservedProcess | None],
        netns_of: Callable[[ObservedProcess | None], str],
        progress_of: Callable[[int], CommunicatorProgress | None],
        position_of: Callable[[int, int], int | None],
        signature_of: Callable[[int], int | None],
        now_ns: int,
    ) -> tuple[CommunicatorFacts, ...]:
        """Of every communicator, oldest first; `counts` are the rows of the kernel's table.

        `position_of` knows by instance, and by the calls that it made, where a living one stands; `signature_of`
        knows by instance what a living one's collectives were.
        """
        ends = self._living(communicators, counts.kinds, process_of)
        processes = {tgid: process_of(tgid) for tgid in {end.communicator.tgid for end in ends}}
        owners = {tgid: _owner(process, netns_of(process)) for tgid, process in processes.items()}
        before, self._owners = self._owners, {}
        for tgid, owner in owners.items():
            known = before.get(tgid)
            self._owners[tgid] = known if known is not None and known == owner else owner
        self._count(counts)
        uncounted_of = communicators.uncounted
        found = [(one.communicator.first_ns, _of_ended(one, progress_of, uncounted_of)) for one in self._ended.values()]
        for end in ends:
            communicator = end.communicator
            instance, alive = communicator.instance, communicator.ended_ns is None
            facts = end.facts(
                self._owners[communicator.tgid],
                progress_of(instance),
                position_of(instance, end.enqueued) if alive else None,
                signature_of(instance) if alive else None,
                uncounted_of(instance),
                now_ns,
            )
            found.append((communicator.first_ns, facts))
        found.sort(key=lambda entry: entry[0])
        return tuple(facts for _, facts in found)

    def _living(
        self,
        communicators: Communicators,
        kinds: tuple[CallKind, ...],
        process_of: Callable[[int], ObservedProcess | None],
    ) -> tuple[_End, ...]:
        """The ends that have not been put away, with their rows."""
        if (
            self._of_kinds is kinds
            and self._of_changes == communicators.changes
            and all(process_of(tgid) is process for tgid, process in self._nameless.items())
        ):
            return self._ends
        by_instance = {communicator.instance: communicator for communicator in communicators}
        rows: defaultdict[int, list[int]] = defaultdict(list)
        self._nameless = {}
        for row, kind in enumerate(kinds):
            instance = kind.instance
            if instance not in by_instance and instance not in self._ended:
                # One entry a process, under a number that no communicator has.
                instance = -kind.tgid
                if instance not in by_instance:
                    process = self._nameless[kind.tgid] = process_of(kind.tgid)
                    by_instance[instance] = _nameless(kind.tgid, process.ended_ns if process else None)
            rows[instance].append(row)
        before = {end.communicator.instance: end for end in self._ends}
        ends, groups, names, firsts = [], np.full(len(kinds), -1, np.intp), list[str](), [0]
        for instance, communicator in by_instance.items():
            end = before.get(instance)
            ends.append(end if end is not None and end.communicator == communicator else _End(communicator))
            by_op: defaultdict[int, list[int]] = defaultdict(list)
            for row in rows[instance]:
                by_op[kinds[row].op].append(row)
            for op in sorted(by_op):
                groups[by_op[op]] = len(names)
                names.append(op_name(op))
            firsts.append(len(names))
        groups[groups < 0] = len(names)
        self._ends, self._grouped, self._counted = tuple(ends), _Grouped(groups, names, firsts), None
        self._of_kinds, self._of_changes = kinds, communicators.changes
        return self._ends

    def _count(self, counts: CallCounts) -> None:
        """Take over what the rows of each end say, where that has changed."""
        before, self._counted = self._counted, counts
        grouped = self._grouped
        number = len(grouped.names) + 1
        moved = np.full(number, before is None)
        if before is not None:
            moved[grouped.groups[(counts.calls != before.calls) | (counts.payload_bytes != before.payload_bytes)]] = (
                True
            )
            if not moved.any():
                return
        calls, payload_bytes = (
            sum_groups(grouped.groups, number, numbers) for numbers in (counts.calls, counts.payload_bytes)
        )
        changed = moved.tolist()
        for end, (first, behind) in zip(self._ends, pairwise(grouped.firsts), strict=True):
            if before is None or True in changed[first:behind]:
                made = calls[first:behind]
                end.count(
                    tuple(map(OpTotal, grouped.names[first:behind], made, payload_bytes[first:behind])), sum(made)
                )


def _of_ended(
    ended: _Ended,
    progress_of: Callable[[int], CommunicatorProgress | None],
    uncounted_of: Callable[[int], int],
) -> CommunicatorFacts:
    if ended.facts is None:
        communicator = ended.communicator
        ended.facts = _facts(
            communicator,
            _identity(communicator, _owner(ended.process, ended.netns)),
            ended.process.tenant.label if ended.process else UNKNOWN,
            _totals(ended.ops),
            progress_of(communicator.instance),
            None,
            last=ended.last if ended.told else None,
            uncounted=uncounted_of(communicator.instance),
        )
    return ended.facts


def _nameless(tgid: int, ended_ns: int | None) -> Communicator:
    return Communicator(-tgid, tgid, 0, ended_ns=ended_ns)


@dataclass(frozen=True, slots=True)
class _Owner:
    """What all ends of a process have in common."""

    nccl_version: str
    netns: str
    job: Labels
    tenant: str


def _owner(process: ObservedProcess | None, netns: str) -> _Owner:
    if process is None:
        return _Owner(UNKNOWN, netns, (), UNKNOWN)
    return _Owner(process.nccl_version, netns, process.job.labels(), process.tenant.label)


@dataclass(frozen=True, slots=True, eq=False)
class _Grouped:
    """The rows of the kernel's table by end and op."""

    groups: npt.NDArray[np.intp]
    """Of each row, the number of its group: those of one end follow one another, in the order of their ops.

    Calls that came after their end was put away are the last group: they are added when their rows are.
    """
    names: list[str]
    """Of each group, the op."""
    firsts: list[int]
    """Of each end, its first group; at the end, how many groups there are."""


class _End:
    """One rank's end of a communicator that lives, or ended just now, and its facts as they were shown last."""

    __slots__ = ("_facts", "_identity", "_known", "_ops", "_owner", "communicator", "enqueued")

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.enqueued = 0
        self._ops: tuple[OpTotal, ...] = ()
        self._owner: _Owner | None = None
        self._identity: RankIdentity | None = None
        self._known: tuple[CommunicatorProgress | None, int | None, int | None, int] = (None, None, None, 0)
        self._facts: CommunicatorFacts | None = None

    def count(self, ops: tuple[OpTotal, ...], enqueued: int) -> None:
        """Take over what its rows say now."""
        self._ops, self.enqueued, self._facts = ops, enqueued, None

    def facts(
        self,
        owner: _Owner,
        progress: CommunicatorProgress | None,
        position: int | None,
        signature: int | None,
        uncounted: int,
        now_ns: int,
    ) -> CommunicatorFacts:
        """What it has done; the same object while nothing of it changes."""
        if self._identity is None or owner is not self._owner:
            self._owner, self._facts = owner, None
            self._identity = _identity(self.communicator, owner)
        known = progress, position, signature, uncounted
        in_flight = progress is not None and progress.oldest_posted_ns is not None
        if self._facts is None or in_flight or known != self._known:
            self._known = known
            self._facts = _facts(
                self.communicator,
                self._identity,
                owner.tenant,
                self._ops,
                progress,
                now_ns,
                position,
                signature,
                uncounted=uncounted,
            )
        return self._facts


def _totals(ops: _Ops) -> tuple[OpTotal, ...]:
    return tuple(OpTotal(op_name(op), calls, size) for op, (calls, size) in sorted(ops.items()))


def _identity(communicator: Communicator, owner: _Owner) -> RankIdentity:
    return RankIdentity(
        comm=communicator.name,
        rank=format_label(communicator.rank),
        nranks=format_label(communicator.nranks),
        gpu=communicator.gpu,
        node_rank=format_label(communicator.node),
        local_ranks=format_label(communicator.local_ranks),
        nccl_version=owner.nccl_version,
        pid=communicator.tgid,
        netns=owner.netns,
        job=owner.job,
        identity_source=communicator.source,
        gpu_uuid=communicator.on.uuid,
        pci_bus_id=communicator.on.pci_bus_id,
    )


def _facts(
    communicator: Communicator,
    identity: RankIdentity,
    tenant: str,
    ops: tuple[OpTotal, ...],
    progress: CommunicatorProgress | None,
    now_ns: int | None,
    position: int | None = None,
    signature: int | None = None,
    last: LastCollectives[str] | None = None,
    uncounted: int = 0,
) -> CommunicatorFacts:
    """`now_ns` None: it has ended, and nothing of it is in flight.  `uncounted`: calls that met no probe."""
    enqueued = sum(one.calls for one in ops) + uncounted
    inflight_ns = 0
    if progress is not None and progress.oldest_posted_ns is not None and now_ns is not None:
        inflight_ns = max(0, now_ns - progress.oldest_posted_ns)
    return CommunicatorFacts(
        identity=identity,
        enqueued=enqueued,
        ops=ops,
        alive=communicator.ended_ns is None,
        completed=min(progress.completed + uncounted, enqueued) if progress is not None else None,
        inflight_seconds=inflight_ns / 1e9 if progress is not None and progress.age_known else None,
        captured=progress.captured if progress is not None else 0,
        replayed=progress.replayed if progress is not None else 0,
        instance=max(communicator.instance, 0),
        estimated=uncounted,
        whole=communicator.whole,
        position=position,
        tenant=tenant,
        signature=signature,
        last=last,
    )
