"""Asks inspection processes about what tenants control, and never waits long for one of them.

Each tenant has a process of its own (worker.py) and so a queue of its own: whoever makes reading slow makes it slow for
himself.  An answer mostly comes in a millisecond, and the daemon waits for it; a tenant that has used up the patience
of his, or of all tenants together, is answered later: `NotYet`, and `collect` names his processes when there is more to
know.  A process that takes longer than its question allows is killed, and both rest before they are tried again, longer
each time.  So does a tenant that takes more of a processor than his share.

A process that waits for a tenant's own file system cannot always be killed at once; the daemon does not wait for it,
and stops to make more of them for a tenant who holds several.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from railscope.agent.node.inspection.answers import AnswerError, decode, fits, promised
from railscope.agent.node.inspection.questions import Found, Memory, NotYet, Question, Refused
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.inspection.wire import Incoming, WireError, send
from railscope.agent.node.inspection.worker import FOUND, MAKE, READY, REFUSED
from railscope.probes.shares import FairMemory

_log = logging.getLogger("railscope.inspection")

MOST_PROCESSES: Final = 16
"""Tenants that are looked at side by side; further ones wait for one that is idle."""
MOST_QUEUED: Final = 256
"""Questions of one tenant that wait; further ones are to be asked again."""
MOST_LATE: Final = 1024
"""Answers that came late, and that were not asked for again yet."""
MOST_LATE_BYTES: Final = 1 << 20
"""Of one tenant's late answers together, as they were sent; his newest is kept whatever its size."""
MOST_STUCK: Final = 3
"""Processes of one tenant that were killed and have not ended."""
_IDLE_NS: Final = 60_000_000_000
_LATE_NS: Final = 30_000_000_000
_STRIKES_NS: Final = 300_000_000_000
"""Who took too long is forgiven after so long."""
_FIRST_REST_NS: Final = 1_000_000_000
_LONGEST_REST_NS: Final = 300_000_000_000
_MAKERS_REST_NS: Final = 1_000_000_000
_END_SECONDS: Final = 0.05

A = TypeVar("A")


class Inspection(Protocol):
    """Answers questions about what tenants control."""

    def ask(self, tenant: Tenant, question: Question[A], descriptors: Collection[int] = ()) -> Found[A]:
        """The answer; its descriptors are the caller's.

        Raises:
            NotYet: it has not come.
            Refused: it cannot be had, and why.
        """

    def fileno(self) -> int:
        """Becomes readable when an answer has come that nobody waits for; -1: never."""

    def collect(self) -> set[int]:
        """Take what has come; pids of which there is more to know now than when they were asked about."""

    def sweep(self) -> set[int]:
        """Now and then: end what takes too long or is idle, and forget what is old.  Returns as `collect` does."""

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come."""

    def late(self) -> Mapping[Tenant, int]:
        """Questions that took longer than they may, by tenant, of those who are remembered."""

    def close(self) -> None:
        """Let go of everything, without waiting for what cannot end."""


class InProcess:
    """Finds answers itself: for who may wait, and for tests of what is asked."""

    def __init__(self) -> None:
        self._memory = Memory()

    def ask(self, tenant: Tenant, question: Question[A], descriptors: Collection[int] = ()) -> Found[A]:
        """See `Inspection.ask`; never `NotYet`."""
        del tenant
        return question.find(self._memory, descriptors)

    def fileno(self) -> int:
        return -1

    def collect(self) -> set[int]:
        return set()

    def sweep(self) -> set[int]:
        return set()

    @property
    def busy(self) -> bool:
        return False

    def late(self) -> Mapping[Tenant, int]:
        return {}

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Bucket:
    """An allowance in ns that fills again with time."""

    most_ns: int
    share: float
    """Of the time that passes, so much is added."""
    left_ns: int = 0
    filled_ns: int = 0

    def take(self, now_ns: int, spent_ns: int = 0) -> int:
        """What is left after so much was spent; below 0 where it was more than there was."""
        if not self.filled_ns:
            self.left_ns = self.most_ns
        elif now_ns > self.filled_ns:
            self.left_ns = min(self.most_ns, self.left_ns + int(self.share * (now_ns - self.filled_ns)))
        self.filled_ns = now_ns
        self.left_ns -= spent_ns
        return self.left_ns


def _tenants_work() -> _Bucket:
    return _Bucket(10_000_000_000, 0.1)


@dataclass(slots=True)
class _Account:
    """What is remembered of a tenant."""

    patience: _Bucket
    """How long the daemon waits for his answers."""
    work: _Bucket = field(default_factory=_tenants_work)
    """How long his inspection process may be at work."""
    strikes: int = 0
    struck_ns: int = 0
    rests_until_ns: int = 0
    stuck: list[int] = field(default_factory=list)
    """Descriptors of processes that were killed and have not ended."""
    late: int = 0
    """Questions that took longer than they may, all told."""
    late_bytes: int = 0
    """Of his answers that are kept."""

    def strike(self, now_ns: int) -> int:
        """He took too long; returns for how long he rests, ns."""
        self.strikes = self.strikes + 1 if now_ns - self.struck_ns < _STRIKES_NS else 1
        self.struck_ns = now_ns
        self.late += 1
        rest_ns = min(_FIRST_REST_NS << min(self.strikes - 1, 20), _LONGEST_REST_NS)
        self.rests_until_ns = now_ns + rest_ns
        return rest_ns


@dataclass(slots=True)
class _Asked:
    question: Question[Any]
    descriptors: tuple[int, ...] = ()
    """Duplicates that wait to be sent."""
    sent_ns: int = 0


@dataclass(slots=True)
class _Lane:
    """The inspection process of one tenant."""

    tenant: Tenant
    channel: socket.socket
    process: int
    """Its pidfd."""
    incoming: Incoming
    under_way: _Asked | None = None
    waiting: dict[Question[Any], _Asked] = field(default_factory=dict)
    """In the order in which they are sent."""
    left_out: set[int] = field(default_factory=set)
    """Pids of questions that found no room among those that wait."""
    used_ns: int = 0

    def has(self, question: Question[Any]) -> bool:
        return question in self.waiting or (self.under_way is not None and self.under_way.question == question)


Key = tuple[Tenant, Question[Any]]


@dataclass(frozen=True, slots=True)
class _Outcome:
    time_ns: int
    size_bytes: int
    found: Found[Any] | None
    refused: Refused | None = None

    def result(self) -> Found[Any]:
        if self.refused is not None:
            raise self.refused
        assert self.found is not None
        return self.found


class _Maker:
    """The process that the inspection processes are forked from (worker.py); starts anew where it has ended."""

    def __init__(self, modules: Sequence[str], start_seconds: float) -> None:
        self._modules = tuple(modules)
        self._start_seconds = start_seconds
        self._ready = self._waited = False
        self._starts = 0
        self._rests_until_ns = 0
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has; waits for a moment, because its processes may end before it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self._process.returncode is not None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "railscope.agent.node.inspection.worker", str(theirs.fileno()), *self._modules],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment,
                # Ctrl-C is for the daemon: this one would end at it with a traceback until it ignores it.
                process_group=0,
            )
        self._control.settimeout(self._start_seconds)
        self._starts += 1

    def make(self) -> tuple[socket.socket, int]:
        """A new inspection process: the channel to it, and its pidfd.

        Raises:
            NotYet: the maker has ended, and is to start again; or it has not started yet.
            OSError: the first one ended before it had started.
        """
        if self._rests_until_ns > time.monotonic_ns():
            raise NotYet
        if self._rests_until_ns:
            self._rests_until_ns = 0
            self._start()
        if not self._ready:
            self._wait()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                if not self._ready and self._control.recv(1) != READY:
                    raise OSError("no inspection process could be started; see the lines above")
                self._ready = True
                socket.send_fds(self._control, [MAKE], [theirs.fileno()])
                _, descriptors, _, _ = socket.recv_fds(self._control, struct.calcsize("<i"), 1)
                if not descriptors:
                    raise OSError("it has ended")
            except OSError as error:
                ours.close()
                if self._starts == 1 and not self._ready:
                    raise
                self._rest(error)
                raise NotYet from None
        return ours, descriptors[0]

    def _wait(self) -> None:
        """For its first word: as long as a start may take, once, while nothing else is to be done; never again."""
        seconds = 0.0 if self._waited else self._start_seconds
        self._waited = True
        if select.select([self._control], [], [], seconds)[0]:
            return
        if seconds:
            _log.warning(
                "the process that makes inspection processes has not started within %.0f s, as on a machine that is "
                "too busy: the agent looks into processes once it has",
                seconds,
            )
        raise NotYet

    def _rest(self, error: OSError) -> None:
        _log.error(
            "the process that makes inspection processes is gone (%s): another one starts in %.0f s",
            error.strerror or error,
            _MAKERS_REST_NS / 1e9,
        )
        self.close()
        self._ready = False
        self._rests_until_ns = time.monotonic_ns() + _MAKERS_REST_NS

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


class InspectionProcesses:
    """For the loop's thread only, like all that asks it."""

    def __init__(
        self,
        modules: Sequence[str] = (),
        *,
        patience_seconds: float = 1.5,
        tenants_patience_seconds: float = 1.0,
        start_seconds: float = 10.0,
    ) -> None:
        """`modules` hold the questions that will be asked: loaded once, and shared by all inspection processes.

        `patience_seconds`: how long answers of all tenants together are waited for at first; a fifth of a second is
        added each second.  `tenants_patience_seconds`: the same for those of one tenant; a fiftieth is added.
        `start_seconds`: how long the first process is waited for, once.
        """
        self._maker = _Maker(modules, start_seconds)
        self._lanes: OrderedDict[Tenant, _Lane] = OrderedDict()
        self._accounts: dict[Tenant, _Account] = {}
        self._patience = _Bucket(int(patience_seconds * 1e9), 0.2)
        self._tenants_patience_ns = int(tenants_patience_seconds * 1e9)
        self._selector = selectors.EpollSelector()
        self._late = FairMemory[Tenant, Key, _Outcome](MOST_LATE)
        self._struck: dict[Key, tuple[int, int]] = {}
        """Questions that took too long: how often, and until when they rest."""
        self._come: set[Key] = set()
        """Questions that may have an answer now, where nobody waited for it."""
        self._again: set[int] = set()
        """Pids that were not asked about for want of room, which there is now."""

    def fileno(self) -> int:
        """See `Inspection.fileno`."""
        return self._selector.fileno()

    def ask(self, tenant: Tenant, question: Question[A], descriptors: Collection[int] = ()) -> Found[A]:
        """See `Inspection.ask`."""
        key = (tenant, question)
        self._come.discard(key)
        came = self._take_kept(key)
        if came is not None:
            return came.result()
        now_ns = time.monotonic_ns()
        account = self._account(tenant)
        if account.rests_until_ns > now_ns or self._struck.get(key, (0, 0))[1] > now_ns:
            raise NotYet
        lane = self._lanes.get(tenant) or self._open(tenant, account, now_ns)
        if not lane.has(question):
            if len(lane.waiting) >= MOST_QUEUED:
                lane.left_out.add(question.pid)
                raise NotYet
            lane.waiting[question] = _Asked(question, tuple(os.dup(one) for one in descriptors))
            self._send_next(lane, now_ns)
        return self._wait(key, account)

    def _account(self, tenant: Tenant) -> _Account:
        if tenant not in self._accounts:
            self._accounts[tenant] = _Account(_Bucket(self._tenants_patience_ns, 0.02))
        return self._accounts[tenant]

    def _wait(self, key: Key, account: _Account) -> Found[Any]:
        while True:
            now_ns = time.monotonic_ns()
            patience_ns = min(account.patience.take(now_ns), self._patience.take(now_ns))
            if patience_ns <= 0:
                raise NotYet
            for ready, _ in self._selector.select(patience_ns / 1e9):
                self._hear(ready.data)
            waited_ns = time.monotonic_ns() - now_ns
            account.patience.take(now_ns, waited_ns)
            self._patience.take(now_ns, waited_ns)
            self._end_overdue()
            came = self._take_kept(key)
            if came is not None:
                self._come.discard(key)
                return came.result()
            lane = self._lanes.get(key[0])
            if lane is None or not lane.has(key[1]):
                raise NotYet

    def collect(self) -> set[int]:
        """See `Inspection.collect`."""
        for ready, _ in self._selector.select(0):
            self._hear(ready.data)
        self._end_overdue()
        come, self._come = self._come, set()
        again, self._again = self._again, set()
        return again.union(question.pid for _, question in come)

    def sweep(self) -> set[int]:
        """See `Inspection.sweep`."""
        now_ns = time.monotonic_ns()
        for lane in list(self._lanes.values()):
            if lane.under_way is None and now_ns - lane.used_ns > _IDLE_NS:
                self._close(lane)
        for key, outcome in list(self._late.items()):
            if now_ns - outcome.time_ns > _LATE_NS:
                self._forget_kept(key)
        self._struck = {key: one for key, one in self._struck.items() if now_ns - one[1] < _STRIKES_NS}
        for tenant, account in list(self._accounts.items()):
            account.stuck = [one for one in account.stuck if not _ended(one)]
            kept = tenant in self._lanes or account.stuck or account.late_bytes
            if not kept and now_ns - account.struck_ns > _STRIKES_NS:
                del self._accounts[tenant]
        return self.collect()

    @property
    def busy(self) -> bool:
        """See `Inspection.busy`."""
        return bool(self._come or self._again) or any(lane.under_way for lane in self._lanes.values())

    def late(self) -> Mapping[Tenant, int]:
        """See `Inspection.late`."""
        return {tenant: account.late for tenant, account in self._accounts.items() if account.late}

    def close(self) -> None:
        """End all inspection processes, without waiting for those that cannot end."""
        for lane in list(self._lanes.values()):
            self._close(lane)
        for key in list(self._late):
            self._forget_kept(key)
        for account in self._accounts.values():
            for process in account.stuck:
                os.close(process)
        self._accounts.clear()
        self._selector.close()
        self._maker.close()

    def _open(self, tenant: Tenant, account: _Account, now_ns: int) -> _Lane:
        if account.work.take(now_ns) <= 0:
            raise NotYet
        account.stuck = [one for one in account.stuck if not _ended(one)]
        if len(account.stuck) >= MOST_STUCK:
            raise NotYet
        if len(self._lanes) >= MOST_PROCESSES:
            idle = next((one for one in self._lanes.values() if one.under_way is None), None)
            if idle is None:
                raise NotYet
            self._close(idle)
        ours, process = self._maker.make()
        ours.setblocking(False)
        lane = self._lanes[tenant] = _Lane(tenant, ours, process, Incoming(ours), used_ns=now_ns)
        self._selector.register(ours, selectors.EVENT_READ, lane)
        return lane

    def _send_next(self, lane: _Lane, now_ns: int) -> None:
        if lane.under_way is not None or not lane.waiting:
            return
        lane.under_way = asked = lane.waiting.pop(next(iter(lane.waiting)))
        asked.sent_ns = lane.used_ns = now_ns
        self._lanes.move_to_end(lane.tenant)
        try:
            send(lane.channel, pickle.dumps(asked.question, pickle.HIGHEST_PROTOCOL), asked.descriptors)
        except OSError as error:
            self._lose(lane, f"cannot be asked: {error.strerror}")
        finally:
            for descriptor in asked.descriptors:
                os.close(descriptor)

    def _hear(self, lane: _Lane) -> None:
        if self._lanes.get(lane.tenant) is not lane:
            return
        try:
            message = lane.incoming.read()
            if message is None:
                return
            asked, lane.under_way = lane.under_way, None
            if asked is None:
                raise WireError("an inspection process answered what was not asked")
            data, descriptors = message
            found = Found(None, descriptors)
            try:
                said = decode(data, asked.question.builds)
                outcome = self._outcome(asked.question, said, len(data), descriptors)
            except (AnswerError, ValueError):
                _close_all(found.descriptors)
                raise WireError("an inspection process sent no answer") from None
        except WireError as error:
            self._lose(lane, str(error))
            return
        now_ns = time.monotonic_ns()
        self._keep((lane.tenant, asked.question), outcome)
        self._come.add((lane.tenant, asked.question))
        account = self._accounts[lane.tenant]
        if account.work.take(now_ns, now_ns - asked.sent_ns) <= 0:
            account.rests_until_ns = now_ns + _FIRST_REST_NS
        self._send_next(lane, now_ns)
        if not lane.waiting:
            self._again |= lane.left_out
            lane.left_out.clear()

    def _outcome(self, question: Question[Any], said: object, size_bytes: int, descriptors: list[int]) -> _Outcome:
        now_ns = time.monotonic_ns()
        match said:
            case (kind, answer) if kind == FOUND and fits(answer, promised(type(question))):
                return _Outcome(now_ns, size_bytes, Found(answer, descriptors))
            case (kind, str(message), bool(gone)) if kind == REFUSED:
                _close_all(descriptors)
                return _Outcome(now_ns, size_bytes, None, Refused(message, gone=gone))
        raise ValueError("no outcome")

    def _keep(self, key: Key, outcome: _Outcome) -> None:
        """Keep an answer until it is asked for; a tenant with too many of them loses his own."""
        account = self._accounts[key[0]]
        if account.late_bytes + outcome.size_bytes > MOST_LATE_BYTES:
            for own in [one for one in self._late if one[0] == key[0]]:
                self._forget_kept(own)
        account.late_bytes += outcome.size_bytes
        for forgotten in self._late.put(key[0], key, outcome):
            self._let_go(*forgotten)

    def _take_kept(self, key: Key) -> _Outcome | None:
        outcome = self._late.pop(key)
        if outcome is not None:
            self._accounts[key[0]].late_bytes -= outcome.size_bytes
        return outcome

    def _forget_kept(self, key: Key) -> None:
        outcome = self._late.pop(key)
        if outcome is not None:
            self._let_go(key, outcome)

    def _let_go(self, key: Key, outcome: _Outcome) -> None:
        self._accounts[key[0]].late_bytes -= outcome.size_bytes
        if outcome.found is not None:
            _close_all(outcome.found.descriptors)

    def _end_overdue(self) -> None:
        now_ns = time.monotonic_ns()
        for lane in list(self._lanes.values()):
            asked = lane.under_way
            if asked is not None and now_ns - asked.sent_ns > asked.question.seconds * 1e9:
                self._fail(lane, f"takes longer than {asked.question.seconds:g} s")

    def _lose(self, lane: _Lane, why: str) -> None:
        """The process of a tenant has hung up, or says what it may not."""
        if not self._maker.ended:
            self._fail(lane, why)
            return
        # All processes end with their maker, and no tenant is to blame.
        asked = (*lane.waiting.values(), *((lane.under_way,) if lane.under_way is not None else ()))
        self._again |= lane.left_out.union(one.question.pid for one in asked)
        self._close(lane)

    def _fail(self, lane: _Lane, why: str) -> None:
        """The process of a tenant does not answer: end it, and let him rest."""
        now_ns = time.monotonic_ns()
        account, asked = self._accounts[lane.tenant], lane.under_way
        rest_ns = account.strike(now_ns)
        if asked is not None:
            key = (lane.tenant, asked.question)
            times = self._struck.get(key, (0, 0))[0] + 1
            self._struck[key] = times, now_ns + min(10 * _FIRST_REST_NS << min(times - 1, 20), _LONGEST_REST_NS)
            lane.under_way = None
            _log.warning(
                "uid %s: what process %d maps or says %s; nothing of this user's is looked at for %.0f s",
                lane.tenant.label,
                asked.question.pid,
                why,
                rest_ns / 1e9,
            )
        # What still waits is asked again by who wants to know it.
        self._come.update((lane.tenant, question) for question in lane.waiting)
        self._again |= lane.left_out
        self._close(lane, stuck=account.stuck)

    def _close(self, lane: _Lane, stuck: list[int] | None = None) -> None:
        del self._lanes[lane.tenant]
        self._selector.unregister(lane.channel)
        for descriptor in (
            *lane.incoming.drop(),
            *(one for asked in lane.waiting.values() for one in asked.descriptors),
        ):
            os.close(descriptor)
        lane.channel.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(lane.process, signal.SIGKILL)
        if stuck is not None:
            stuck.append(lane.process)
        else:
            os.close(lane.process)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _ended(process: int) -> bool:
    """Whether the process of a pidfd has ended; closes it then."""
    watch = select.poll()
    watch.register(process, select.POLLIN)
    if not watch.poll(0):
        return False
    os.close(process)
    return True
