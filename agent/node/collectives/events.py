"""What happened to communicators: made, split, ended, revoked, and the errors that NCCL reported.

An asynchronous error stays in its communicator and is met many times: at the calls that end the
communicator, and by our reading of it before.  It counts once, when the communicator's result changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.targets.memory import ProcessMemory, StoredResult
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.nccl.records.errors import NO_ERRORS, ErrorLayout, ErrorSource, Result
from railscope.probes.shares import Rounds

_log = logging.getLogger("railscope.errors")

_EVENTS: Final = {
    LifecycleKind.INIT: "init",
    LifecycleKind.INIT_ALL: "init",
    LifecycleKind.SPLIT: "split",
    LifecycleKind.SHRINK: "shrink",
    LifecycleKind.GROW: "grow",
    LifecycleKind.FINALIZE: "finalize",
    LifecycleKind.DESTROY: "destroy",
    LifecycleKind.ABORT: "abort",
    LifecycleKind.REVOKE: "revoke",
    LifecycleKind.SUSPEND: "suspend",
    LifecycleKind.RESUME: "resume",
    LifecycleKind.DEVICE_COMM: "device_comm",
}
_SOURCES: Final = {ErrorSource.INIT_ALL: "init"}
_ERRORS: Final = tuple(result for result in Result if result not in NO_ERRORS)
_RESULTS: Final = 32
"""Results below this have a name each, those that NCCL does not have yet too: it numbers them from 0 on."""
_OTHER: Final = "result_other"
_MOST_AT_ONCE: Final = 512
"""Communicators whose stored error is read in one reading, at about 10 µs each; more of them take several readings."""


def error_name(result: int) -> str:
    """NCCL's name of an error as a label: `remote_error`; a number that this table does not know: `result_<n>`."""
    try:
        return Result(result).name.lower()
    except ValueError:
        return f"result_{result}"


@dataclass(frozen=True, slots=True)
class CommError:
    """An error that a communicator had."""

    error: str
    time_ns: int
    """When it was met, on the clock of the probes."""
    source: str
    """`async`: it was stored in the communicator.  Else the call that returned it: `init`, `destroy`, …"""


class CommEvents:
    """Counts that never fall, and each communicator's last error.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._events = dict.fromkeys(_EVENTS.values(), 0)
        self._errors = {error_name(result): 0 for result in _ERRORS}
        self._last: dict[int, CommError] = {}
        self._stored: dict[int, int] = {}
        """The asynchronous result of each communicator that has one, by instance."""

    def record_lifecycle(self, events: Records) -> None:
        """Record lifecycle events (dtype LIFECYCLE_EVENT).

        A call that failed made or ended nothing: it counts as an error, not as an event.
        """
        for event in events:
            kind = LifecycleKind(int(event["kind"]))
            result = int(event["result"])
            if kind not in _EVENTS:
                continue
            if result in NO_ERRORS:
                self._events[_EVENTS[kind]] += 1
            elif kind is not LifecycleKind.DEVICE_COMM:  # which the programs tell of where it returned well alone
                self._count(int(event["instance"]), result, int(event["time_ns"]), ErrorSource(int(kind)))

    def record_errors(self, events: Records) -> None:
        """Record errors that the probes saw (dtype ERROR_EVENT)."""
        for event in events:
            instance, result, time_ns = int(event["instance"]), int(event["result"]), int(event["time_ns"])
            source = ErrorSource(int(event["source"]))
            if source is ErrorSource.ASYNC and instance:
                self.record_stored_error(instance, result, time_ns)
            elif result not in NO_ERRORS:
                self._count(instance, result, time_ns, source)

    def record_stored_error(self, instance: int, result: int, time_ns: int) -> None:
        """Record the asynchronous result that was read from a communicator (`stored_result`).

        Success ends no error here: the reading does not see every place in which NCCL looks.
        """
        if result not in NO_ERRORS and self._stored.get(instance) != result:
            self._stored[instance] = result
            self._count(instance, result, time_ns, ErrorSource.ASYNC)

    def events(self) -> Mapping[str, int]:
        """Calls that made, changed or ended communicators, by what they did; every name is there from the start."""
        return dict(self._events)

    def errors(self) -> Mapping[str, int]:
        """Errors by name; every name that NCCL has is there from the start."""
        return dict(self._errors)

    def last_error(self, instance: int) -> CommError | None:
        """The last error of a communicator."""
        return self._last.get(instance)

    def forget(self, instances: Iterable[int]) -> None:
        """Drop communicators that no snapshot shows any more; their counts stay."""
        for instance in instances:
            self._last.pop(instance, None)
            self._stored.pop(instance, None)

    def _count(self, instance: int, result: int, time_ns: int, source: ErrorSource) -> None:
        name = error_name(result)
        if name not in self._errors and not 0 <= result < _RESULTS:
            name = _OTHER  # a job that returns numbers at will makes no series at will, and takes no other job's
        self._errors[name] = self._errors.get(name, 0) + 1
        if instance:
            self._last[instance] = CommError(name, time_ns, _SOURCES.get(source, source.name.lower()))


class StoredErrors:
    """Errors that communicators store and no caller queries: read periodically from outside, without a probe.

    A job that does not poll ncclCommGetAsyncError, or that is killed while it hangs, never tells of its error; the
    communicator's struct holds it all the same.  Not thread-safe: the daemon's lock guards it.
    """

    def __init__(self, memory: ProcessMemory, layout_of: Callable[[int], ErrorLayout | None]) -> None:
        """`layout_of` knows the layout of a library by its number."""
        self._memory = memory
        self._layout_of = layout_of
        self._rounds = Rounds[int](_MOST_AT_ONCE)
        """By whose share a communicator is in (probes/bpf/answerable.h)."""

    def read(self, rows: tuple[Records, Records]) -> Iterator[tuple[int, int]]:
        """Instances of living communicators that have an error, with its result.

        `rows` is the table of communicators (keys, values) as it was read a moment ago.
        """
        keys, values = rows
        lives = np.flatnonzero((values["confirmed"] != 0) & (values["destroyed_ns"] == 0))
        order = lives[np.lexsort((keys["comm"][lives], keys["tgid"][lives]))]
        order = order[self._rounds.choose(values["uid"][order].tolist())]
        columns = (keys["tgid"], keys["comm"], values["instance"], values["library"])
        living = zip(*(column[order].tolist() for column in columns), strict=True)
        for tgid, communicators in groupby(living, lambda one: one[0]):
            wanted = [
                (instance, StoredResult(comm, layout))
                for _, comm, instance, library in communicators
                if (layout := self._layout_of(library)) is not None
            ]
            try:
                results = self._memory.read(tgid, [reading for _, reading in wanted], moment=0) if wanted else ()
            except NotYet:
                continue
            except Refused as refused:
                _log.debug("process %d: its communicators' errors cannot be read: %s", tgid, refused)
                continue
            for (instance, _), result in zip(wanted, results, strict=True):
                if result is not None and result not in NO_ERRORS:
                    yield instance, result
