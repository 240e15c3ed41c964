"""Decides when a recording is made: on a stall or a signal, with a rate limit.

Anyone may ask at any time; the daemon's loop answers, since only it may read the kernel's tables.  Stalls that begin
together share one recording, and a communicator that stalls again and again gets one a minute; signals within a second
of a recording on signal share the next one.  More recordings would only fill the disk.  For the stalls of one user
six are made within half an hour: the oldest recordings are removed for new ones, and they may be another user's.

Ports are read once in a period, by threads that a device may hold up: a recording waits until they have been read once
more since it was asked for, or should have been, and for no thread.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from railscope.agent.facts.clocks import ClockReading, read_clocks
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import Stall
from railscope.agent.node.recorder.store import RecordingStore, WriteResult
from railscope.agent.recording.recording import SIGNAL, STALL, RecordedStall, Recording
from railscope.probes.clock import Clock

_log = logging.getLogger("railscope.recordings")

_SAME_COMMUNICATOR_NS: Final = 60_000_000_000
_ANY_STALL_NS: Final = 10_000_000_000
_ANY_SIGNAL_NS: Final = 1_000_000_000

_OF_A_USER: Final = 6
_OF_A_USER_NS: Final = 1_800_000_000_000
_MOST_USERS: Final = 1024
"""Whose recordings are remembered; beyond them they are one."""

_LONGEST_SETTLING_NS: Final = 1_000_000_000
"""Of ports that are read more seldom what was read last is enough: a user waits for the recording."""

LEFT_OUT: Final = "left_out"
"""The result of a stall without a recording, because its user had had as many as one may."""

Freeze = Callable[[str, tuple[RecordedStall, ...]], Recording]
"""Makes the recording of a reason and its stalls."""


def settling_ns(sample_interval_ns: int) -> int:
    """How long until a flight recording that was asked for has what ports counted: a period, and a late answer's."""
    return min(sample_interval_ns + sample_interval_ns // 4, _LONGEST_SETTLING_NS)


def make_recorded_stall(stall: Stall, now: ClockReading) -> RecordedStall:
    """A stall as recordings describe it, at the moment of a reading of the clocks.

    Where its processes have ended it is put down to what the host saw before, if that was well founded: who reads the
    recording wants to know why the job hung, and not that it was killed.
    """
    diagnosis = stall.earlier or stall.diagnosis
    sentences = dict.fromkeys((*diagnosis.evidence, *stall.diagnosis.evidence))
    return RecordedStall(
        comm=stall.comm,
        rank=stall.rank,
        nranks=stall.nranks,
        pid=stall.pid,
        op=stall.op,
        peer=stall.peer,
        cause=diagnosis.cause.value,
        strength=replace(stall, diagnosis=diagnosis).strength,
        since_realtime_ns=stall.since_realtime_ns,
        seconds=stall.length_ns(now.monotonic_ns) / 1e9,
        blamed_rank="" if diagnosis.blamed_rank is None else str(diagnosis.blamed_rank),
        blamed_pid=diagnosis.blamed_pid or 0,
        rail=diagnosis.rail,
        device=diagnosis.device,
        evidence=tuple(sentences),
    )


class Recordings:
    """`request`, `signal` and `counts` may be called from any thread, the rest from the daemon's loop."""

    def __init__(
        self,
        clock: Clock,
        store: RecordingStore | None,
        freeze: Freeze,
        wake: Callable[[], None],
        settle_ns: int = 0,
    ) -> None:
        """`store` None: nothing is written, every request is refused.  `wake` makes the loop call `turn` soon.

        `settle_ns`: how long a recording waits after the turn that finds it asked for.
        """
        self._settle_ns = settle_ns
        self.due_ns: int | None = None
        """When `turn` is to be called for the recording that waits (monotonic); None: whenever there is a turn."""
        self._clock = clock
        self._store = store
        self._freeze = freeze
        self._wake = wake
        self._lock = threading.Lock()
        self._stalls: list[RecordedStall] = []
        """Those that wait for their recording."""
        self._signalled = False
        self._accepted_ns: dict[str, int] = {}
        """When a stall of each communicator was last accepted."""
        self._of_users: dict[int | None, list[int]] = {}
        """When recordings were made for stalls of each user, while they count."""
        self._refused: defaultdict[int | None, int] = defaultdict(int)
        self._told_ns: dict[int | None, int] = {}
        """When the log was told last that a user gets no more."""
        self._stall_ns: int | None = None
        """When stalls were last recorded."""
        self._signal_ns: int | None = None
        """When a recording was last made on a signal."""
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)

    def prepare(self) -> None:
        """Have a folder that cannot be used told before the first recording needs it; for the daemon's loop."""
        if self._store is not None:
            self._store.prepare()

    def set_most_bytes(self, most_bytes: int) -> None:
        """Limit all recordings on disk to this from the next one on."""
        if self._store is not None:
            self._store.most_bytes = most_bytes

    def request(self, stall: RecordedStall, uid: int | None = None) -> bool:
        """Ask for a recording of a stall of a user, None: not known.

        False: there will be none, as its communicator had one within a minute, or the user has had as many as one may.
        """
        if self._store is None:
            return False
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            recent = {comm: at for comm, at in self._accepted_ns.items() if now_ns - at < _SAME_COMMUNICATOR_NS}
            self._accepted_ns = recent
            # What stalls while a recording of its communicator waits to be made is part of it.
            waits = any(one.comm == stall.comm for one in self._stalls)
            if stall.comm in recent and not waits:
                return False
            # What waits for a recording already, another joins.
            if not self._stalls and not self._may_have_one(uid, now_ns):
                self._leave_out(stall, uid, now_ns)
                return False
            recent[stall.comm] = now_ns
            self._stalls.append(stall)
        self._wake()
        return True

    def request_for_stall(self, stall: Stall) -> bool:
        """As `request`, for a stall of the watchdog; it takes no lock but its own."""
        uid = stall.owner.uid if stall.owner is not None else None
        return self.request(make_recorded_stall(stall, read_clocks(self._clock)), uid)

    def refused_by_user(self) -> Mapping[int | None, int]:
        """Stalls without a recording because their user had had as many as one may, by uid, None: not known."""
        with self._lock:
            return dict(self._refused)

    def _leave_out(self, stall: RecordedStall, uid: int | None, now_ns: int) -> None:
        user = uid if uid in self._refused or len(self._refused) < _MOST_USERS else None
        self._refused[user] += 1
        self._counts[STALL, LEFT_OUT] += 1
        told_ns = self._told_ns.get(user)
        if told_ns is None or now_ns - told_ns >= _OF_A_USER_NS:
            self._told_ns[user] = now_ns
            _log.warning(
                "no recording of the stall of communicator %s: uid %s has had %d within half an hour, and gets none "
                "for further stalls until then",
                *(stall.comm, UNKNOWN if user is None else user, _OF_A_USER),
            )

    def _may_have_one(self, uid: int | None, now_ns: int) -> bool:
        """Whether one more recording may be made for a user; if so, it counts from now on."""
        begin_ns = now_ns - _OF_A_USER_NS
        made = {user: [at for at in times if at > begin_ns] for user, times in self._of_users.items()}
        self._of_users = {user: times for user, times in made.items() if times}
        user = uid if uid in self._of_users or len(self._of_users) < _MOST_USERS else None
        times = self._of_users.setdefault(user, [])
        if len(times) >= _OF_A_USER:
            return False
        times.append(now_ns)
        return True

    def request_from_signal(self) -> None:
        """Ask for a recording from a signal handler, which must not wait for a lock."""
        self._signalled = True
        self._wake()

    def write_due(self) -> None:
        """Make the recording that is due, if one is; returns at once, the disk is another thread's business."""
        if self._store is None:
            if self._signalled:
                self._signalled = False
                _log.warning(
                    "no recording is made: recordings.directory or recordings.memory switches the flight recorder off"
                )
            return
        if self._store.busy:
            return
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            of_stalls = bool(self._stalls) and (self._stall_ns is None or now_ns - self._stall_ns >= _ANY_STALL_NS)
            on_signal = self._signalled and (self._signal_ns is None or now_ns - self._signal_ns >= _ANY_SIGNAL_NS)
            if not of_stalls and not on_signal:
                return
            if self.due_ns is None:
                self.due_ns = now_ns + self._settle_ns
            if now_ns < self.due_ns:
                return
            self.due_ns = None
            stalls: tuple[RecordedStall, ...] = ()
            if of_stalls:
                stalls, self._stalls, self._stall_ns = tuple(self._stalls), [], now_ns
            else:
                self._signalled, self._signal_ns = False, now_ns
        self._store.write(self._freeze(STALL if stalls else SIGNAL, stalls), self._written)

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Recordings by reason and result (`written`, `failed`, of stalls `left_out`); all are there from the start."""
        with self._lock:
            pairs = [(reason, result.value) for reason in (STALL, SIGNAL) for result in WriteResult]
            return {pair: self._counts[pair] for pair in (*pairs, (STALL, LEFT_OUT))}

    def close(self) -> None:
        """Make what was asked for and not made yet, and wait until it is on disk, unless the disk does not answer."""
        if self._store is None:
            return
        self._store.close()
        if self._store.busy:
            return
        with self._lock:
            stalls, self._stalls = tuple(self._stalls), []
            asked = bool(stalls) or self._signalled
        if asked:
            self._store.write(self._freeze(STALL if stalls else SIGNAL, stalls), self._written)
            self._store.close()

    def _written(self, reason: str, result: WriteResult) -> None:
        with self._lock:
            self._counts[reason, result.value] += 1
