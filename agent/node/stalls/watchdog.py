"""Evaluates operations four times a second if one may stall, and tracks stalls from begin to end.

Where all is well a look a second does: it knows the age of all that is in flight, and so when the next may be needed.

The facts come from agent/node/stalls/rank_reader.py and agent/node/stalls/inspector.py, the judgement from
agent/node/stalls/detector.py.  What is told of calls and operations on the way is summed up beside it: who arrives last
(agent/node/collectives/stragglers.py), and how long operations took (agent/node/collectives/operation_times.py).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from railscope.agent.facts.clocks import read_clocks
from railscope.agent.facts.hardware import NvlinkFacts
from railscope.agent.facts.label_numbers import UNKNOWN, parse_number
from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.snapshot import CollectorResult, NodeStalls, NodeTimes
from railscope.agent.facts.stall import Diagnosis, Disagreement, InFlight, ProcessStack, Stall
from railscope.agent.node.collectives.call_counts import Table
from railscope.agent.node.collectives.slow_ranks import RankWait, SlowRanks
from railscope.agent.node.collectives.stragglers import Stragglers
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.stalls.checkpoints import Checkpoints
from railscope.agent.node.stalls.deaths import Death, Deaths
from railscope.agent.node.stalls.dependencies import Dependencies, Ranks
from railscope.agent.node.stalls.detector import Changes, Detector, StallLimits
from railscope.agent.node.stalls.early_looks import EarlyLooks
from railscope.agent.node.stalls.evidence import Evidence, GonePeer, ProcessFacts, RankFacts
from railscope.agent.node.stalls.inside_calls import HostCalls, InsideCalls
from railscope.agent.node.stalls.inspector import Inspector, RailsOf
from railscope.agent.node.stalls.rank_columns import RanksBy
from railscope.agent.node.stalls.rank_reader import IDLE_NS, RankReader
from railscope.agent.node.stalls.root_cause import held_process
from railscope.agent.node.stalls.sources import InFlightTables, Inspection, Known
from railscope.agent.node.stalls.stacks import MOST_STACKS, Stacks
from railscope.agent.node.stalls.stall_log import StallLog
from railscope.agent.node.stalls.stall_totals import StallTotals
from railscope.agent.node.stalls.stuck_transfers import StuckTransfers, Transfers
from railscope.agent.node.stalls.told_calls import CallNumbers
from railscope.agent.node.stalls.unseen_work import DriverCallTables, UnseenWork
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.clock import Clock
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.processes.exit_status import exit_code, exited_badly
from railscope.probes.processes.processes import ProcessIdentity
from railscope.probes.shares import in_turns

_log = logging.getLogger("railscope.stalls")

EVALUATION_NS: Final = 250_000_000
"""Between two looks at what may stall."""
REST_NS: Final = 1_000_000_000
"""At most, where nothing is suspected: what is usual is learnt once a second."""
LOOK_SHARE: Final = 50
"""Looks take so much of a core at most, one part in as many: where thousands of ranks of one tenant stand still, each
look takes as long as hundreds of others."""
LONGEST_LOOK_PAUSE_NS: Final = 3_000_000_000
"""What else of that tenant may stall does not wait longer for its look because of them."""
LONGEST_BRIDGED_NS: Final = 4 * LONGEST_LOOK_PAUSE_NS
"""After a longer pause, as where the agent was stopped, what was read before it says nothing about the last moments."""
_CROWD: Final = 256
"""Where more ranks of one tenant may not be well, they are looked at in turns of their own: no other tenant waits."""
_MOST_NAMED: Final = 4

__all__ = ("EVALUATION_NS", "REST_NS", "InFlightTables", "Known", "Watchdog")


class Watchdog:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        communicators: Table,
        tables: InFlightTables | None,
        known: Known,
        clock: Clock,
        limits: StallLimits,
        *,
        procfs: Path,
        memory: ProcessMemory,
        rails_of: RailsOf,
        inspector: Inspection | None = None,
        began: Callable[[Stall], object] = lambda _stall: None,
        host_calls: HostCalls | None = None,
        driver_calls: DriverCallTables | None = None,
        nvlinks: Callable[[], Iterable[NvlinkFacts]] = tuple,
        stacks: Stacks | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        """`tables` None: only calls are seen.  `inspector` None: of this host's procfs.  `began` is told of each stall
        that begins.  `host_calls` None: calls that make and end communicators are not followed.  `driver_calls` None:
        nor are those of CUDA's driver.  `nvlinks`: those of this host, as they were last read.  `stacks` None: where
        blamed ranks stand in their code is not read.  `transfers` None: those of other libraries are not followed."""
        self._known = known
        self._clock = clock
        self._inspector = inspector or Inspector(clock, procfs, rails_of)
        self._reader = RankReader(communicators, tables, known, self._inspector, memory, limits.suspicion_ns())
        self._detector = Detector(limits, self._realtime_offset_ns, known.ended, known.owner)
        numbers = CallNumbers()
        self._inside: InsideCalls | None = None
        if host_calls is not None:
            self._inside = InsideCalls(
                host_calls,
                known,
                procfs,
                self._realtime_offset_ns,
                self._reader.last_op,
                self._held,
                numbers=numbers,
            )
        self._unseen: UnseenWork | None = None
        if driver_calls is not None:
            self._unseen = UnseenWork(
                driver_calls,
                known,
                procfs,
                self._realtime_offset_ns,
                lambda: self._every().by_process,
                self._stalled_processes,
                self._held,
                excused=self._excused,
                numbers=numbers,
                nvlinks=nvlinks,
            )
        self._transfers: StuckTransfers | None = None
        if transfers is not None:
            self._transfers = StuckTransfers(
                transfers, known, procfs, self._realtime_offset_ns, self._held, numbers=numbers
            )
        self._stacks = stacks
        self._stragglers = Stragglers(self._tenant_of)
        self._slow_ranks = SlowRanks(self._realtime_offset_ns)
        self._deaths = Deaths()
        self.early: Final = EarlyLooks(known.process)
        """What the kernel told of processes, and when `look_early` is due because of it."""
        self._checkpoints = Checkpoints(self._written_bytes, limits.suspicion_ns(), limits.after_ns, self._tenant)
        self._come_to_rest = False
        """Whether the last look at all found a rank suspect, or without a call for a second and more, that was not
        before."""
        self._crowds: frozenset[int] = frozenset()
        """Processes of tenants of which very many ranks may not be well, as of the last look at all."""
        self._crowds_due_ns = 0
        """When they are looked at again."""
        self._looked_ns = 0
        """When the last look at all was."""
        self._evaluated_ns = 0
        """When the last look was."""
        self.crowds_ns = 0
        """How much of the last look's CPU time went to them."""
        self._ranks: Ranks | None = None
        """Ranks as of the last evaluation; None: not requested."""
        self._dependencies: Dependencies | None = None
        """Of those."""
        self._processes: dict[int, ProcessFacts] = {}
        """By pid, those that this look has asked about: suspects of one communicator share their peers."""
        self._processes_by_comm: dict[str, dict[int, ProcessFacts]] = {}
        """The same by communicator."""
        self._disagreements: dict[str, tuple[tuple[tuple[int, int], ...], Disagreement | None]] = {}
        """By communicator: by which calls of its ranks here, and what was found of those, in this look."""
        self._disagreements_before = self._disagreements
        """The same of the look before."""
        self._totals = StallTotals(self._tenant_of)
        self._began = began
        self._stall_log = StallLog(clock, self._tenant_of)

    def set_limits(self, limits: StallLimits) -> None:
        """Judge by these limits from the next look on."""
        self._detector.limits = limits
        self._reader.suspicion_ns = limits.suspicion_ns()
        self._checkpoints.set_times(limits.suspicion_ns(), limits.after_ns)

    @property
    def current(self) -> tuple[Stall, ...]:
        inside = self._inside.current if self._inside is not None else ()
        unseen = self._unseen.current if self._unseen is not None else ()
        transfers = self._transfers.current if self._transfers is not None else ()
        return (*self._detector.current, *inside, *unseen, *transfers)

    def calls_missed(self, instances: Iterable[int]) -> None:
        """Calls of these communicators met no probe: they are not numbered as those of other ranks any more."""
        self._stragglers.leave_out(instances)

    def record_calls(self, events: Records) -> list[int]:
        """Record calls: dtype CALL_EVENT, in the order of the calls; returns the instances that were called."""
        called = self._reader.record_calls(events)
        self._stragglers.record(events, called, self._known.communicator)
        return called

    @property
    def suspicious(self) -> bool:
        """Whether a rank is suspected of something, or has just come to rest, as of the last look."""
        unwell = self._reader.quiet_until_ns is None or bool(self._crowds)
        return unwell or bool(self.current or self._deaths) or self._come_to_rest

    @property
    def busy(self) -> bool:
        """Whether there is something to look at although no communicator lives: stalls, or what they left behind."""
        inside = self._inside is not None and self._inside.under_way
        inside = inside or (self._unseen is not None and self._unseen.under_way)
        inside = inside or (self._transfers is not None and self._transfers.under_way)
        reading = self._stacks is not None and self._stacks.busy
        return inside or reading or bool(self.current or self._deaths) or self._inspector.open or self._stall_log.owes

    def find_calls(self) -> None:
        """Look for calls that do not return; also where nothing else is to be looked at."""
        now_ns = self._clock.monotonic_ns()
        self._processes.clear()
        if self._inside is not None:
            inside = self._inside
            self._tell_of_calls(now_ns, lambda: inside.update(now_ns, self._detector.limits.after_ns), inside)
        if self._unseen is not None:
            unseen = self._unseen
            self._tell_of_calls(now_ns, lambda: unseen.update(now_ns, self._detector.limits), unseen)
        if self._transfers is not None:
            stuck = self._transfers
            self._tell_of_calls(now_ns, lambda: stuck.update(now_ns, self._detector.limits), stuck)

    def _tell_of_calls(
        self, now_ns: int, update: Callable[[], Changes], found: InsideCalls | UnseenWork | StuckTransfers
    ) -> None:
        try:
            changes = update()
        except KernelRefusal as refusal:
            _log.error("calls under way cannot be read: %s", refusal.strerror)
            return
        self._log_changes(changes.begun, changes.ended)
        self._totals.forget(found.pop_forgotten(now_ns))

    def evaluate(self) -> int:
        """Judge every living communicator that may not be well; returns when to look again, in ns from now.

        What is not foreseen, a communicator that comes or goes, needs an evaluation after `EVALUATION_NS`.
        """
        self._inspector.close_unused()
        self.find_calls()
        now_ns, began_ns = self._clock.monotonic_ns(), time.thread_time_ns()
        self.crowds_ns = 0
        left_out = self._crowds if now_ns < self._crowds_due_ns else frozenset[int]()
        # What was found out before a long pause counts: each look would begin anew, and never come to a judgement.
        pause_ns = now_ns - (self._evaluated_ns if left_out else self._looked_ns)
        self._inspector.bridge(pause_ns if REST_NS < pause_ns <= LONGEST_BRIDGED_NS else 0)
        self._evaluated_ns = now_ns
        events = self.early.recent(now_ns)
        try:
            ranks = self._reader.read(now_ns, self._stalled, self._detector.broken, events=events, left_out=left_out)
        except KernelRefusal as refusal:
            _log.error("stalls cannot be checked: %s", refusal.strerror)
            return EVALUATION_NS
        self._begin_look()
        self._settle_deaths(now_ns)
        self._come_to_rest = self._reader.update_resting()
        if self._reader.learnt:
            self._checkpoints.update(now_ns, self._reader.last_calls())
        self._judge(now_ns, ranks)
        self._find_slow_ranks(now_ns)
        self._stall_log.sum_up()
        if left_out:
            self._reader.widen()
            self._ranks = self._dependencies = None
        else:
            if self._stacks is not None:
                self._stacks.follow(self._blamed().values())
            self._find_crowds(now_ns, time.thread_time_ns() - began_ns)
        self._totals.count(self.current, now_ns)
        quiet_until_ns = self._reader.quiet_until_ns
        if quiet_until_ns is None or self._deaths:
            return EVALUATION_NS
        # No later than it could be with an evaluation every `EVALUATION_NS`.
        return min(quiet_until_ns - now_ns + EVALUATION_NS, REST_NS)

    def _find_crowds(self, now_ns: int, spent_ns: int) -> None:
        """Find tenants with very many ranks that may not be well, after a look at all in so much CPU time."""
        self._looked_ns = now_ns
        suspects = self._reader.suspects_by_pid()
        unwell: Counter[Tenant] = Counter()
        for pid, count in suspects.items():
            unwell[self._tenant_of(pid)] += count
        crowded = {tenant for tenant, count in unwell.items() if count > _CROWD}
        self._crowds = frozenset(pid for pid in suspects if crowded and self._tenant_of(pid) in crowded)
        self.crowds_ns = spent_ns * sum(unwell[tenant] for tenant in crowded) // max(1, unwell.total())
        self._crowds_due_ns = now_ns + min(LOOK_SHARE * self.crowds_ns, LONGEST_LOOK_PAUSE_NS)

    def _begin_look(self) -> None:
        """Forget what was true of processes and communicators at the last look."""
        self._processes.clear()
        self._processes_by_comm.clear()
        self._disagreements_before, self._disagreements = self._disagreements, {}
        self._ranks = self._dependencies = None

    def _judge(self, now_ns: int, ranks: Iterable[RankFacts]) -> None:
        changes = self._detector.evaluate(
            now_ns, ranks, self._evidence, others=(*self._reader.living, *self._deaths.instances)
        )
        self._log_changes(changes.begun, changes.ended)

    def look_early(self) -> None:
        """Judge the communicators of processes to which something happened a moment ago, and no others."""
        now_ns = self._clock.monotonic_ns()
        pids = self.early.pop_due(now_ns)
        if not pids:
            return
        for pid in self._reader.companions(pids):
            process = self._known.process(pid)
            if process is not None and process.ended_ns is None:
                self._inspector.outdate(process)
        events = self.early.recent(now_ns)
        try:
            ranks = self._reader.read(now_ns, self._stalled, self._detector.broken, events=events, only=pids)
        except KernelRefusal as refusal:
            _log.error("stalls cannot be checked: %s", refusal.strerror)
            return
        self._begin_look()
        self._judge(now_ns, ranks)
        self._reader.widen()
        self._ranks = self._dependencies = None

    def processes_gone(self, ended: Mapping[int, int | None], *, replaced: bool = False) -> None:
        """Processes have ended; by pid, their status as wait(2) tells it, None: not known.

        Their communicators stall for their other ranks if a process was killed or failed, or if it had operations in
        flight.

        Args:
            ended: by pid, their status.
            replaced: they live, and execute other programs: what they were to their peers went with their memory.
        """
        now_ns = self._clock.monotonic_ns()
        self._read_again(now_ns)
        if self._inside is not None:
            try:
                self._inside.processes_gone(ended.keys())
            except KernelRefusal as refusal:
                _log.error("calls under way cannot be read: %s", refusal.strerror)
        for pid in ended:
            self._inspector.forget(pid)
            self.early.forget(pid)
            self._checkpoints.forget(pid)
            self._reader.forget_process(pid)
        self.record_times()
        ranks = self._reader.ranks_of_processes(ended.keys())
        for pid, status in ended.items():
            code = exit_code(status)
            badly, how = exited_badly(code), _words(code)
            if replaced:
                badly, how = True, "it executes another program (execve)"
            self._process_gone(pid, badly, how, ranks[pid], now_ns)

    def _process_gone(self, pid: int, badly: bool | None, how: str, ranks: Sequence[RankFacts], now_ns: int) -> None:
        never_called = not any(one.enqueued for one in ranks)
        left = []
        for rank in ranks:
            communicator = self._known.communicator(rank.instance)
            destroyed = communicator is not None and communicator.ended_ns is not None
            # Most jobs have a communicator of all ranks that they split and never call.
            called = rank.enqueued > 0 or never_called
            in_use = rank.in_flight is not None or (called and now_ns - rank.last_call_ns < IDLE_NS)
            if badly is False or destroyed or rank.nranks == 1 or not in_use or (badly is None and not rank.in_flight):
                continue
            if rank.in_flight is None:
                # Which of several communicators it was in, if in any, is unknown by now.
                op = self._reader.last_op(rank.instance) if len(ranks) == 1 else UNKNOWN
                rank = replace(rank, in_flight=InFlight(op, None, now_ns, "strong", "it was in use"))
            left.append(rank)
        if left:
            death = Death(pid, now_ns, how, frozenset(rank.comm for rank in ranks) - {UNKNOWN}, tuple(left))
            if not self._deaths.add(death, accompanied=self._is_accompanied(ranks)):
                self._record_death(death)

    def _is_accompanied(self, ranks: Iterable[RankFacts]) -> bool:
        """Whether another process of this host shares a communicator with one that has these ends."""
        by_comm = self._every().by_comm
        return any(peer.pid != rank.pid for rank in ranks for peer in by_comm.get(rank.comm, ()))

    def _is_ending(self, pid: int) -> bool:
        process = self._known.process(pid)
        return process is None or self._inspector.is_ending(process)

    def _record_death(self, death: Death) -> None:
        """Others count on a process that has died."""
        for rank in death.ranks:
            stall = self._detector.process_gone(
                self._clock.monotonic_ns(), rank, f"process {death.pid} has ended: {death.how}"
            )
            if stall is not None:
                self._log_changes((stall,), ())

    def _settle_deaths(self, now_ns: int) -> None:
        if not self._deaths:
            return
        pids = self._reader.pids_by_comm()
        settled = self._deaths.settle(now_ns, lambda comm: pids.get(comm, ()), self._is_ending)
        for death in settled.alone:
            self._record_death(death)
        if settled.together:
            _log.info(
                "%d processes of this host that share communicators have ended together: %s",
                len(settled.together),
                "; ".join(f"{death.pid}: {death.how}" for death in settled.together[:_MOST_NAMED]),
            )

    def _read_again(self, now_ns: int) -> None:
        """Read the state of ranks without evaluating them: an ended process's status tells more."""
        if now_ns - self._reader.read_ns <= EVALUATION_NS:
            return
        try:
            self._reader.read(now_ns, self._stalled, self._detector.broken)
        except KernelRefusal as refusal:
            _log.error("the ranks' operations in flight cannot be read: %s", refusal.strerror)
        self._ranks = self._dependencies = None

    @property
    def _stalled(self) -> set[int]:
        """Instances of communicators whose operations are stalled."""
        return {stall.instance for stall in self._detector.current}

    def _stalled_processes(self) -> set[int]:
        """Processes that stall in an operation, or inside a call of NCCL."""
        inside = self._inside.current if self._inside is not None else ()
        return {stall.pid for stall in (*self._detector.current, *inside)}

    def record_times(self) -> None:
        """Record operation times now: the kernel is about to drop some of them."""
        try:
            self._reader.record_times()
        except KernelRefusal as refusal:
            _log.error("durations of operations cannot be read: %s", refusal.strerror)

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        gone = tuple(instances)
        now_ns = self._clock.monotonic_ns()
        self._log_changes((), self._detector.forget(now_ns, gone))
        self._totals.forget(gone)
        self._reader.forget(gone)
        self._stragglers.forget(gone)

    def _find_slow_ranks(self, now_ns: int) -> None:
        if self._slow_ranks.is_due(now_ns):
            self._slow_ranks.update(now_ns, self._reader.times.by_rank(), self._stragglers.arrivals())

    def facts(self) -> NodeStalls:
        """Current stalls with the lengths of all that were, how many began on this node, and who writes to storage."""
        now_ns = self._clock.monotonic_ns()
        self._totals.count(self.current, now_ns)
        self._find_slow_ranks(now_ns)
        return NodeStalls(
            lengths=self._totals.lengths(self.current),
            totals=self._totals.begun,
            ended=self._totals.ended,
            writing=self._writing(),
            slow=self._slow_ranks.found,
            last=tuple(
                ((stall.comm, stall.rank), last)
                for stall in self.current
                if stall.comm != UNKNOWN and (last := self._known.last_collectives(stall.instance)) is not None
            ),
            stacks=self._stacks_of_blamed(self._stacks) if self._stacks is not None else {},
            driver_calls=self._unseen.processes(self._clock.monotonic_ns()) if self._unseen is not None else (),
        )

    def _stacks_of_blamed(self, stacks: Stacks) -> dict[tuple[str, int], ProcessStack]:
        found = {key: stacks.stack_of(identity) for key, identity in self._blamed().items()}
        return {key: stack for key, stack in found.items() if stack is not None}

    def _blamed(self) -> dict[tuple[str, int], ProcessIdentity]:
        """Processes of this host's ranks to which its stalls are put down, by communicator and rank; a few of many."""
        wanted = {
            (stall.comm, stall.diagnosis.blamed_rank): stall.pid
            for stall in self.current
            if stall.comm != UNKNOWN and stall.diagnosis.blamed_rank is not None
        }
        blamed: dict[tuple[str, int], ProcessIdentity] = {}
        for (comm, blamed_rank), _ in in_turns(wanted.items(), lambda one: self._tenant_of(one[1])):
            for rank in self._every().by_comm.get(comm, ()):
                process = self._known.process(rank.pid) if rank.rank == blamed_rank else None
                if process is not None and process.ended_ns is None:
                    blamed[comm, blamed_rank] = process.identity
            if len(blamed) >= MOST_STACKS:
                break
        return blamed

    def collectors(self) -> tuple[CollectorResult, ...]:
        """How the last readings went of what it asks for aside."""
        result = self._transfers.result if self._transfers is not None else None
        return (result,) if result is not None else ()

    def uncompared(self) -> Mapping[int | None, int]:
        """Communicators so far of which it is not known who arrives last, as their tenant has too many, by uid."""
        return self._stragglers.refused

    def times(self) -> NodeTimes:
        """How long operations took, and who arrives last."""
        times = self._reader.times
        return NodeTimes(times.by_rank(), times.by_size(), self._stragglers.arrivals())

    @property
    def waits(self) -> Mapping[tuple[str, str], RankWait]:
        """What ranks of this host waited of late for the slowest one, by communicator and rank."""
        return self._slow_ranks.waits

    @property
    def stalled_since_ns(self) -> Mapping[int, int]:
        """By pid of a process of this host that is in an operation which stalls: when the first was handed over."""
        since_ns: dict[int, int] = {}
        for stall in self._detector.current:
            since_ns[stall.pid] = min(stall.since_ns, since_ns.get(stall.pid, stall.since_ns))
        return since_ns

    @property
    def writing_since_ns(self) -> Mapping[int, int]:
        """By pid of a process that writes to storage and makes no call meanwhile: its last one."""
        return self._checkpoints.writing_since_ns(self._clock.monotonic_ns())

    def close(self) -> None:
        self._inspector.close()
        if self._transfers is not None:
            self._transfers.close()
        if self._stacks is not None:
            self._stacks.close()

    def _writing(self) -> tuple[RankKey, ...]:
        """Ranks for which others may wait because their processes write.

        Not those that are in an operation themselves: they write beside it, and wait as others do.
        """
        writing = self._checkpoints.writing_since_ns(self._clock.monotonic_ns())
        return tuple(
            (rank.comm, rank.name)
            for ranks in self._reader.ranks_of_processes(writing).values()
            for rank in ranks
            if rank.comm != UNKNOWN and (rank.in_flight is None or rank.in_flight.strength == "weak")
        )

    def _log_changes(self, begun: Iterable[Stall], ended: Iterable[Stall]) -> None:
        for stall in begun:
            self._totals.begin(stall)
            self._stall_log.begun(stall)
            self._began(stall)
        for stall in ended:
            self._totals.end(stall, stall.ended_ns or self._clock.monotonic_ns())
            self._stall_log.ended(stall)

    def _tenant_of(self, pid: int) -> Tenant:
        process = self._known.process(pid)
        return process.tenant if process is not None else UNKNOWN_TENANT

    def _evidence(self, rank: RankFacts) -> Evidence:
        process = self._known.process(rank.pid)
        if process is None:
            return Evidence(ProcessFacts("gone", 0, 0.0, 0.0, 0, None), (), ())
        ranks = self._every()
        devices, waits_for = self._reader.devices_and_peers(rank)
        peers = tuple(peer for peer in ranks.by_comm.get(rank.comm, ()) if peer.instance != rank.instance)
        rails, hidden = self._inspector.rails(process, devices), self._inspector.why_hidden(process)
        sends = self._reader.sent_recently(self._clock.monotonic_ns(), rank.pid)
        if self._dependencies is None:
            self._dependencies = Dependencies(ranks)
        return Evidence(
            process=self._process(process),
            rails=rails,
            peers=peers,
            peer_processes=self._processes_of(rank.comm),
            waits_for=waits_for,
            hidden=hidden,
            gone=self._gone_of(rank.comm),
            others=len(self._reader.rows_of_process(rank.pid)) - 1,
            elsewhere=self._dependencies.waiting_elsewhere(peers),
            sends=sends,
            disagreement=self._disagreement(rank, peers),
        )

    def _processes_of(self, comm: str) -> Mapping[int, ProcessFacts]:
        """What the processes do that have a rank of a communicator here, by pid: once for all of its ranks."""
        if comm not in self._processes_by_comm:
            pids = set(self._reader.columns.roster.pids[self._reader.rows_of_comm(comm)].tolist())
            self._processes_by_comm[comm] = {pid: facts for pid in pids if (facts := self._facts_of(pid)) is not None}
        return self._processes_by_comm[comm]

    def _disagreement(self, rank: RankFacts, peers: tuple[RankFacts, ...]) -> Disagreement | None:
        """Read once for all ranks of a communicator, and not again while none of them makes a call."""
        if rank.comm in self._disagreements:  # in this look
            return self._disagreements[rank.comm][1]
        calls = tuple(sorted((one.instance, one.enqueued) for one in (rank, *peers)))
        known = self._disagreements_before.get(rank.comm)
        if known is None or known[0] != calls:
            known = calls, self._known.disagreement(rank.comm)
        self._disagreements[rank.comm] = known
        return known[1]

    def _gone_of(self, comm: str) -> GonePeer | None:
        first = self._detector.stall_of_first_gone(comm)
        return GonePeer(parse_number(first.rank), first.pid) if first is not None else None

    def _lost_a_peer(self, pid: int) -> bool:
        owner = self._known.process(pid)
        return owner is not None and any(rail.peer_closed for rail in self._inspector.rails(owner, frozenset()))

    def _realtime_offset_ns(self) -> int:
        clocks = read_clocks(self._clock)
        return clocks.realtime_ns - clocks.monotonic_ns

    def _facts_of(self, pid: int) -> ProcessFacts | None:
        """Of a process that lives."""
        owner = self._known.process(pid)
        return None if owner is None else self._process(owner)

    def _excused(self, pid: int) -> bool:
        """Whether a process is seen to do work that comes to an end."""
        facts = self._facts_of(pid)
        return facts is not None and facts.excused

    def _held(self, pid: int, rank: int | None) -> Diagnosis | None:
        """That a process is stopped, traced or frozen."""
        facts = self._facts_of(pid)
        return None if facts is None else held_process(pid, rank, facts)

    def _every(self) -> Ranks:
        """All ranks as of the last look."""
        if self._ranks is None:
            reader, roster = self._reader, self._reader.columns.roster
            perhaps_in = reader.in_flight()
            for comm in self._detector.broken:
                perhaps_in[reader.rows_of_comm(comm)] = True

            def perhaps_of(pid: int) -> list[RankFacts]:
                rows = reader.rows_of_process(pid)
                return reader.facts_of(rows[perhaps_in[rows]])

            self._ranks = Ranks(
                RanksBy(roster.of_comm.keys(), reader.rows_of_comm, reader.fact),
                RanksBy(roster.of_pid.keys(), reader.rows_of_process, reader.fact),
                self._facts_of,
                self._gone_of,
                self._lost_a_peer,
                perhaps_of,
            )
        return self._ranks

    def _written_bytes(self, pid: int, *, closely: bool) -> int | None:
        process = self._known.process(pid)
        return self._inspector.written_bytes(process, closely=closely) if process is not None else None

    def _tenant(self, pid: int) -> Tenant | None:
        process = self._known.process(pid)
        return process.tenant if process is not None else None

    def _process(self, process: ObservedProcess) -> ProcessFacts:
        pid = process.identity.pid
        if pid not in self._processes:
            facts = self._inspector.process(process)
            usual = self._checkpoints.pauses_as_usual(self._clock.monotonic_ns(), pid)
            self._processes[pid] = replace(facts, usual_pause=usual)
        return self._processes[pid]


def _words(code: int | None) -> str:
    if code is None:
        return "the exit status was not seen"
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
