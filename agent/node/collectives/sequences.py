"""Reads each rank's sequence number as NCCL counts it, even if the agent started late.

An agent that came late counts calls from then on.  NCCL counts collectives since the communicator was made, in a number
that lies in the process's memory (probes/nccl/memory/sequence_numbers.py): the distance between the two is learnt, and
the position is the agent's own count and that distance.  It compares with that of any other rank, also of one that was
seen from its first call on, because what NCCL does not count (point to point, captured graphs, collectives without an
element) is taken out on all sides: each such call shortens the distance.

So a distance is believed once it was found at two different calls, and never of a communicator that stands still in
the middle of a call, or behind one that changed it.  What cannot be known is not said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Protocol

import numpy as np

from railscope.agent.node.collectives.call_counts import Table
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.targets.memory import LaunchedCount, ProcessMemory
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.memory.sequence_numbers import Launched, SequenceLayout
from railscope.probes.shares import Rounds

_log = logging.getLogger("railscope.sequences")

_MOST_AT_ONCE: Final = 512
"""Communicators looked at in one round; with more of them it takes several to come round."""
_ATTEMPTS: Final = 4
"""A busy communicator is seldom met between two calls; the next round tries again."""
_PACE: Final = 8
"""Of the communicators that move and whose distance is believed, one in so many is looked at in a round."""
_STANDS_NS: Final = 500_000_000
"""Without a call for so long a communicator stands, as one that has made none since the last round."""
_MOST_MISSED: Final = 1 << 40
"""The number is read from the memory of a process that may write into it what it likes."""
_ENOUGH: Final = 2
"""Different calls at which a distance must be found: within the first microsecond of a call it is one too short."""


class CommunicatorRows(Table, Protocol):
    """The table of communicators (probes/nccl/programs/tables.py); each row can also be asked for by itself."""

    def calls_of(self, key: bytes, instance: int) -> int | None: ...


@dataclass(slots=True)
class Reckoning:
    """How far NCCL's count of one communicator is from the agent's."""

    calls: int = -1
    """The agent's count when it was last looked at; -1: never."""
    settled: bool = False
    """It was between two calls then."""
    distance: int | None = None
    """NCCL's count less the agent's."""
    _agreeing: int = 0
    """Different calls in a row at which this distance was found."""
    _found_at: int = -1
    farthest: int = 0
    """The greatest distance until it was trusted: so many collectives at least were entered unseen."""

    @property
    def is_trusted(self) -> bool:
        return self._agreeing >= _ENOUGH

    def add_sample(self, calls: int, launched: int) -> None:
        """Both counts of one moment between two calls."""
        if not self.is_trusted:
            self.farthest = max(self.farthest, min(launched - calls, _MOST_MISSED))
        if launched - calls != self.distance:
            self.distance, self._agreeing = launched - calls, 1
        elif calls != self._found_at:
            self._agreeing += 1
        self.calls = self._found_at = calls
        self.settled = True

    def skip_sample(self, calls: int) -> None:
        """Take no look at NCCL's count of a communicator: a call was under way, or it cannot be read."""
        self.calls, self.settled = calls, False

    def position(self, enqueued: int) -> int | None:
        """Collectives that the rank entered since the communicator was made, when it had made so many calls.

        None: that cannot be known.  While it moves the distance of the last look serves.
        """
        if self.distance is None or not self.is_trusted or (enqueued <= self.calls and not self.settled):
            return None
        return self.distance + max(enqueued, self.calls)


@dataclass(frozen=True, slots=True)
class _End:
    """One rank's end of a communicator that is due to be read."""

    tgid: int
    address: int
    instance: int
    calls: int
    share: int
    """Whose it is (probes/bpf/answerable.h)."""
    key: bytes
    comm_hash: int
    layout: SequenceLayout
    reckoning: Reckoning = field(compare=False)


class Sequences:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        communicators: CommunicatorRows,
        memory: ProcessMemory,
        layout_of: Callable[[int], SequenceLayout | None],
        uncounted_of: Callable[[int], int] = lambda _instance: 0,
    ) -> None:
        """`layout_of` knows the layout of a library by its number.

        `uncounted_of` knows, by instance, calls that met no probe since the agent saw it: those are told elsewhere.
        """
        self._communicators = communicators
        self._memory = memory
        self._layout_of = layout_of
        self._uncounted_of = uncounted_of
        self._known: dict[int, Reckoning] = {}
        self._calls: dict[int, int] = {}
        """By instance, as of the last round."""
        self._round = 0
        self._rounds = Rounds[int](_MOST_AT_ONCE)
        self._said = False
        self._checked: set[int] = set()
        """Instances whose count was compared with NCCL's."""
        self._missed: dict[int, int] = {}
        """Of those, collectives that were entered before the agent saw the communicator, where there were any."""

    def missed(self, instance: int) -> int | None:
        """Collectives at least that were entered before the agent saw a communicator; None: never compared."""
        return self._missed.get(instance, 0) if instance in self._checked else None

    def forget(self, instances: Iterable[int]) -> None:
        """Drop communicators that no snapshot shows any more."""
        for instance in instances:
            self._checked.discard(instance)
            self._missed.pop(instance, None)

    def position(self, instance: int, enqueued: int) -> int | None:
        """Collectives that a rank entered since its communicator was made; None: cannot be known."""
        known = self._known.get(instance)
        return None if known is None else known.position(enqueued)

    def read_changed(self, rows: tuple[Records, Records], now_ns: int) -> None:
        """Read the communicators whose position may have changed; call it periodically.

        `rows` is the table of communicators (keys, values) as it was read a moment ago; `now_ns`: monotonic.

        Raises:
            KernelRefusal: the table of communicators cannot be read.
        """
        due = self._due(*rows, now_ns)
        due = [due[at] for at in self._rounds.choose([end.share for end in due])]
        for tgid, ends in groupby(due, lambda end: end.tgid):
            self._read_process(tgid, list(ends))

    def _due(self, keys: Records, values: Records, now_ns: int) -> list[_End]:
        """Living communicators of several ranks that are due to be read, by process."""
        identities = values["identity"]
        living = (values["confirmed"] != 0) & (values["destroyed_ns"] == 0) & (identities["nranks"] > 1)
        layouts = {one: self._layout_of(one) for one in set(values["library"][living].tolist())}
        if None in layouts.values():
            living &= np.isin(values["library"], [one for one, layout in layouts.items() if layout is not None])
        keys, values, identities = keys[living], values[living], identities[living]
        stands = values["last_ns"] + _STANDS_NS <= now_ns
        columns = (
            values["instance"],
            values["sequence"],
            stands,
            values["library"],
            keys["tgid"],
            keys["comm"],
            values["uid"],
        )
        known, calls_of, due = {}, {}, []
        for key, comm_hash, instance, calls, stands_still, library, tgid, address, share in zip(
            keys, identities["comm_hash"].tolist(), *(column.tolist() for column in columns), strict=True
        ):
            layout = layouts[library]
            assert layout is not None  # or it was left out
            reckoning = known[instance] = self._known.get(instance) or Reckoning()
            calls_of[instance] = calls
            if calls and self._is_due(instance, calls, reckoning, stands=stands_still):
                due.append(_End(tgid, address, instance, calls, share, key.tobytes(), comm_hash, layout, reckoning))
        self._known, self._calls = known, calls_of
        self._round += 1
        due.sort(key=lambda end: (end.tgid, end.instance))
        return due

    def _is_due(self, instance: int, calls: int, reckoning: Reckoning, *, stands: bool) -> bool:
        """Whether a read may tell something new: above all if a communicator has just become idle."""
        if calls == reckoning.calls and reckoning.settled:
            return False
        stands = stands or self._calls.get(instance) == calls
        return stands or not reckoning.is_trusted or (self._round + instance) % _PACE == 0

    def _read_process(self, tgid: int, ends: Sequence[_End]) -> None:
        """Read both counts of each communicator at a moment between two calls, if there is one."""
        best: dict[int, tuple[int, int]] = {}
        calls = {end.instance: self._communicators.calls_of(end.key, end.instance) for end in ends}
        left = list(ends)
        for _ in range(_ATTEMPTS):
            try:
                readings = [LaunchedCount(end.address, end.comm_hash, end.layout) for end in left]
                read = self._memory.read(tgid, readings)
            except NotYet:
                break
            except Refused as refused:
                self._say_unreadable(tgid, refused)
                break
            left = [end for end, launched in zip(left, read, strict=True) if self._goes_on(end, launched, calls, best)]
            if not left:
                break
        for end in ends:
            known = calls[end.instance]
            if end.instance in best:
                end.reckoning.add_sample(*best[end.instance])
                self._checked.add(end.instance)
                missed = end.reckoning.farthest - self._uncounted_of(end.instance)
                if missed > self._missed.get(end.instance, 0):
                    self._missed[end.instance] = missed
            else:
                end.reckoning.skip_sample(end.calls if known is None else known)

    def _goes_on(
        self, end: _End, launched: Launched | None, calls: dict[int, int | None], best: dict[int, tuple[int, int]]
    ) -> bool:
        """Learn from one reading; whether another one may tell more."""
        before, now = calls[end.instance], self._communicators.calls_of(end.key, end.instance)
        calls[end.instance] = now
        if launched is None or now is None:
            return False
        if before != now or not launched.settled:
            return True
        # The greatest distance is right: a call is counted here a moment before NCCL knows of it.
        known = best.get(end.instance)
        if known is None or launched.collectives - now > known[1] - known[0]:
            known = best[end.instance] = now, launched.collectives
        return known[1] - known[0] != end.reckoning.distance

    def _say_unreadable(self, tgid: int, refused: Refused) -> None:
        if not self._said and not refused.gone:
            self._said = True
            _log.warning(
                "process %d: its memory cannot be read (%s): ranks that were not observed from their first call on are "
                "not compared by sequence; grant railscope CAP_SYS_PTRACE",
                tgid,
                refused,
            )
