"""The facts of each communicator in a snapshot: its identity and its enqueued operations, ended ones included.

A communicator that has ended does nothing more: its counts were taken out of the kernel's table, and its facts are
made once, with the labels that its process had.  Calls that no communicator can be told for (its events were lost, or
NCCL was given none) are one nameless entry for each process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import RankIdentity
from railscope.agent.facts.snapshot import CommunicatorFacts, OpTotal
from railscope.agent.facts.stall import LastCollectives
from railscope.agent.node.collectives.call_counts import CallCount
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.agent.node.completion.completion import CommunicatorProgress
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.abi import op_name
from railscope.probes.processes.processes import ProcessIdentity

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


class CommunicatorHistory:
    """Communicators that have ended, until they are forgotten.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._ended: dict[int | ProcessIdentity, _Ended] = {}
        """By instance; what a process did namelessly by its identity."""
        self._told: defaultdict[str, set[LastCollectives[str]]] = defaultdict(set)
        """By communicator: what is told of the last collectives of those."""

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
        """Drop what ended before a moment, and the oldest of more than `most_ended`; returns instances dropped."""
        old = [key for key, ended in self._ended.items() if ended.ended_ns < before_ns]
        too_many = len(self._ended) - len(old) - most_ended
        if too_many > 0:
            rest = self._ended.keys() - set(old)
            old += sorted(rest, key=lambda key: self._ended[key].ended_ns)[:too_many]
        for key in old:
            ended = self._ended.pop(key)
            if ended.told and ended.last is not None:
                self._told[ended.communicator.name].discard(ended.last)
            if not self._told.get(ended.communicator.name, True):
                del self._told[ended.communicator.name]
        return [key for key in old if isinstance(key, int)]

    def facts(
        self,
        living: Iterable[Communicator],
        counts: Iterable[CallCount],
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
        by_instance = {communicator.instance: communicator for communicator in living}
        done: defaultdict[int, _Ops] = defaultdict(_ops)
        for count in counts:
            instance = count.kind.instance
            if instance not in by_instance and instance not in self._ended:
                # One entry a process, under a number that no communicator has.
                instance = -count.kind.tgid
                if instance not in by_instance:
                    process = process_of(count.kind.tgid)
                    by_instance[instance] = _nameless(count.kind.tgid, process.ended_ns if process else None)
            _add(done[instance], count)
        found = [(ended.communicator.first_ns, _of_ended(ended, progress_of)) for ended in self._ended.values()]
        for communicator in by_instance.values():
            process = process_of(communicator.tgid)
            ops = done.get(communicator.instance, _ops())
            position = None
            if communicator.ended_ns is None:
                position = position_of(communicator.instance, _calls(ops))
            progress = progress_of(communicator.instance)
            facts = _facts(communicator, process, netns_of(process), ops, progress, now_ns, position)
            if communicator.ended_ns is None:
                facts = replace(facts, signature=signature_of(communicator.instance))
            found.append((communicator.first_ns, facts))
        found.sort(key=lambda entry: entry[0])
        return tuple(facts for _, facts in found)


def _of_ended(ended: _Ended, progress_of: Callable[[int], CommunicatorProgress | None]) -> CommunicatorFacts:
    if ended.facts is None:
        progress = progress_of(ended.communicator.instance)
        facts = _facts(ended.communicator, ended.process, ended.netns, ended.ops, progress, None, None)
        ended.facts = replace(facts, last=ended.last if ended.told else None)
    return ended.facts


def _nameless(tgid: int, ended_ns: int | None) -> Communicator:
    return Communicator(-tgid, tgid, 0, ended_ns=ended_ns)


def _calls(ops: _Ops) -> int:
    return sum(calls for calls, _ in ops.values())


def _facts(
    communicator: Communicator,
    process: ObservedProcess | None,
    netns: str,
    ops: _Ops,
    progress: CommunicatorProgress | None,
    now_ns: int | None,
    position: int | None,
) -> CommunicatorFacts:
    """`now_ns` None: it has ended, and nothing of it is in flight."""
    enqueued = _calls(ops)
    inflight_ns = 0
    if progress is not None and progress.oldest_posted_ns is not None and now_ns is not None:
        inflight_ns = max(0, now_ns - progress.oldest_posted_ns)
    return CommunicatorFacts(
        identity=RankIdentity(
            comm=communicator.name,
            rank=format_label(communicator.rank),
            nranks=format_label(communicator.nranks),
            gpu=communicator.gpu,
            node_rank=format_label(communicator.node),
            local_ranks=format_label(communicator.local_ranks),
            nccl_version=process.nccl_version if process else UNKNOWN,
            pid=communicator.tgid,
            netns=netns,
            job=process.job.labels() if process else (),
            identity_source=communicator.source,
        ),
        enqueued=enqueued,
        ops=tuple(OpTotal(op_name(op), calls, size) for op, (calls, size) in sorted(ops.items())),
        alive=communicator.ended_ns is None,
        completed=min(progress.completed, enqueued) if progress is not None else None,
        inflight_seconds=inflight_ns / 1e9 if progress is not None and progress.age_known else None,
        captured=progress.captured if progress is not None else 0,
        replayed=progress.replayed if progress is not None else 0,
        instance=max(communicator.instance, 0),
        whole=communicator.whole,
        position=position,
        tenant=process.tenant.label if process else UNKNOWN,
    )
