"""The usual duration of operations by communicator, kind and size, from which "too long" follows.

The kernel sums up durations (probes/bpf/history.h); differences between readings are means over about a second.  The
last few of these are recent, and what they push out becomes part of what is usual, unless the communicator was stalled
at the time.  Seconds that were much slower wait: if a stall comes of them they were none of what is usual, else they
become part of it when it is faster again, or when it has been slow for so long that this is usual now.  What is usual
fades: half of its weight is gone after some minutes of work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.stall import OwnHistory
from railscope.agent.node.collectives.kind_slots import KindSlots, Slots
from railscope.probes.loading.maps import Records

SLOWER_THAN_USUAL: Final = 1.75
"""Where only calls are seen, the pauses between them are part of it: a rail at a tenth of its speed may show as little
as twice."""
STILL_SLOWER: Final = 1.4
"""What was slower than usual is so until it falls below this."""
_RECENT_WINDOWS: Final = 3
RECENT_NS: Final = 15_000_000_000
"""What is older says nothing of the last few seconds."""
_FADING: Final = 0.995
"""Of the weight of what is usual, for each second with operations: half of it is gone after 138."""
_LEAST_OPERATIONS: Final = 20
_LEAST_MEAN_NS: Final = 200_000.0
"""Faster operations vary by more than twice for reasons that no operator cares for."""
_MOST_HELD_BACK: Final = 20
"""Slow windows in a row, each a second with operations: more than it takes to find out why."""
_CALLS: Final = (-1, -1)
"""In the place of op and size bucket."""
_WINDOW: Final = np.dtype([("end_ns", "<i8"), ("operations", "<i8"), ("duration_ns", "<i8"), ("stalled", "?")])
_KNOWN: Final = np.dtype(
    [
        ("operations", "<i8"),
        ("duration_ns", "<i8"),
        ("seen", "<i8"),
        ("weight", "<f8"),
        ("usual_ns", "<f8"),
        ("longest_ns", "<f8"),
        ("slow_ns", "<f8"),
        ("windows", "<i8"),
        ("held_back", "?"),
        ("recent", _WINDOW, (_RECENT_WINDOWS,)),
    ]
)
"""What is known of one kind of operation, or of the calls, of one communicator:

operations, duration_ns: as of the last reading; of calls: when the last one was noticed;
seen: operations that are part of what is usual, all told;
weight, usual_ns: how many those are and the sum of their durations, both faded;
longest_ns: the longest mean of a window, faded;
slow_ns: means from here on are slow compared with what is usual; infinite: not enough is known of that;
recent: the last `windows` windows, the oldest first, and what older ones are `held_back` (`Baselines._held_back`).
"""
_UNKNOWN: Final = np.zeros((), _KNOWN)
_UNKNOWN["slow_ns"] = math.inf


class Baselines:
    """Not thread-safe: the daemon's lock guards it.

    A host may have thousands of communicators with several kinds of operations each, and every second brings a window
    of each: they are worked on together, and one by one only what has become slow.
    """

    def __init__(self) -> None:
        self._slots = KindSlots()
        """Where in `_known` each is."""
        self._known: npt.NDArray[Any] = np.zeros(0, _KNOWN)
        self._held_back: dict[int, list[tuple[int, int]]] = {}
        """By slot: windows older than the recent ones that are not known to be usual, as operations and duration."""
        self._called: tuple[bytes, Slots] = (b"", np.zeros(0, np.intp))
        """Instances whose calls were recorded last, and their slots."""

    def record(self, now_ns: int, keys: Records, values: Records, stalled: Collection[int]) -> None:
        """Record a reading of the kernel's table (HISTORY_KEY, HISTORY), about once a second.

        `stalled`: instances whose last second is not usual.
        """
        slots = self._slots.of_keys(keys)
        self._make_room()
        operations, duration_ns = values["operations"].astype(np.int64), values["duration_ns"].astype(np.int64)
        more = operations - self._known["operations"][slots]
        longer_ns = duration_ns - self._known["duration_ns"][slots]
        grown = np.flatnonzero((more > 0) & (longer_ns >= 0))
        self._add(slots[grown], now_ns, more[grown], longer_ns[grown], _among(keys["instance"][grown], stalled))
        self._known["operations"][slots], self._known["duration_ns"][slots] = operations, duration_ns

    def record_calls(
        self, now_ns: int, instances: npt.NDArray[Any], calls: npt.NDArray[Any], stalled: Collection[int]
    ) -> None:
        """The same where only calls are seen: the time from call to call stands for their duration.

        Args:
            now_ns: the moment.
            instances: communicators, each once.
            calls: how many calls each has made.
            stalled: instances whose last second is not usual.
        """
        raw = instances.tobytes()
        fresh = np.zeros(len(instances), bool)
        if raw != self._called[0]:
            numbers = instances.tolist()
            fresh = np.array([_CALLS not in self._slots.of_instance(one) for one in numbers], bool)
            self._called = raw, np.array([self._slots.place(one, _CALLS) for one in numbers], np.intp)
            self._make_room()
        slots = self._called[1]
        more = calls.astype(np.int64) - self._known["operations"][slots]
        grown = np.flatnonzero((more > 0) & ~fresh)
        since_ns = now_ns - self._known["duration_ns"][slots[grown]]
        self._add(slots[grown], now_ns, more[grown], since_ns, _among(instances[grown], stalled))
        moved = slots[(more != 0) | fresh]
        self._known["operations"][slots] += more
        self._known["duration_ns"][moved] = now_ns

    def _add(
        self,
        slots: Slots,
        end_ns: int,
        operations: npt.NDArray[np.int64],
        duration_ns: npt.NDArray[np.int64],
        stalled: npt.NDArray[np.bool_],
    ) -> None:
        """Add a window to each of these slots."""
        if not len(slots):
            return
        known = self._known[slots]
        full = known["windows"] == _RECENT_WINDOWS
        old = known["recent"][full, 0]
        recent = known["recent"]
        recent[full, :-1] = recent[full, 1:]
        window = np.zeros(len(slots), _WINDOW)
        window["end_ns"], window["operations"] = end_ns, operations
        window["duration_ns"], window["stalled"] = duration_ns, stalled
        recent[np.arange(len(slots)), np.where(full, _RECENT_WINDOWS - 1, known["windows"])] = window
        known["windows"] += ~full
        self._known[slots] = known
        if len(old):
            self._settle(slots[full], old)

    def _settle(self, slots: Slots, old: Records) -> None:
        """Windows (dtype _WINDOW) are recent no more: they become part of what is usual, wait, or are left out."""
        for slot in slots[old["stalled"] & self._known["held_back"][slots]].tolist():
            self._known["held_back"][slot] = False
            del self._held_back[slot]
        slots, old = slots[~old["stalled"]], old[~old["stalled"]]
        known = self._known[slots]
        mean_ns = old["duration_ns"] / old["operations"]
        known["longest_ns"] = np.maximum(_FADING * known["longest_ns"], mean_ns)
        apart = known["held_back"] | (mean_ns >= known["slow_ns"])
        usual = ~apart
        known["seen"] += np.where(usual, old["operations"], 0)
        known["weight"] = np.where(usual, _FADING * known["weight"] + old["operations"], known["weight"])
        known["usual_ns"] = np.where(usual, _FADING * known["usual_ns"] + old["duration_ns"], known["usual_ns"])
        enough = np.flatnonzero(usual & (known["seen"] >= _LEAST_OPERATIONS))
        known["slow_ns"][enough] = _slow_ns(known["usual_ns"][enough] / known["weight"][enough])
        self._known[slots] = known
        for at in np.flatnonzero(apart).tolist():
            self._hold_back(int(slots[at]), int(old["operations"][at]), int(old["duration_ns"][at]))

    def _hold_back(self, slot: int, operations: int, duration_ns: int) -> None:
        """A window of one that is slow, or was when the window before was."""
        known = self._known[slot]
        held = self._held_back.setdefault(slot, [])
        held.append((operations, duration_ns))
        known["held_back"] = True
        if duration_ns / operations >= known["slow_ns"] and len(held) < _MOST_HELD_BACK:
            return
        for operations, duration_ns in held:
            known["seen"] += operations
            known["weight"] = _FADING * known["weight"] + operations
            known["usual_ns"] = _FADING * known["usual_ns"] + duration_ns
        known["held_back"] = False
        del self._held_back[slot]
        if known["seen"] >= _LEAST_OPERATIONS:
            known["slow_ns"] = _slow_ns(known["usual_ns"] / known["weight"])

    def history_of(self, now_ns: int, instance: int, op: int, size: int) -> OwnHistory | None:
        """How long a communicator's operations of a kind and size usually take; None: none has ended yet."""
        slot = self._slots.of_instance(instance).get((op, size))
        return None if slot is None else self._history(now_ns, slot)

    def call_history_of(self, now_ns: int, instance: int) -> OwnHistory | None:
        """The usual time from call to call of a communicator; None: it made too few."""
        return self.history_of(now_ns, instance, *_CALLS)

    def _history(self, now_ns: int, slot: int) -> OwnHistory | None:
        known = self._known[slot]
        seen, weight, usual_ns, longest_ns = (known[one].item() for one in ("seen", "weight", "usual_ns", "longest_ns"))
        recent = known["recent"][: known["windows"]]
        if seen:
            return OwnHistory(seen, usual_ns / weight, longest_ns, _recent_mean_ns(now_ns, seen, recent))
        young = recent[~recent["stalled"]]
        if not len(young):
            return None
        operations = int(young["operations"].sum())
        longest_ns = float((young["duration_ns"] / young["operations"]).max())
        return OwnHistory(operations, int(young["duration_ns"].sum()) / operations, longest_ns, None)

    def maybe_slower(self) -> set[int]:
        """Instances of which the last second of some kind was slow; of all others `slowest` finds none."""
        used = np.flatnonzero(self._known["windows"])
        known = self._known[used]
        last = known["recent"][np.arange(len(known)), known["windows"] - 1]
        slow = set(used[last["duration_ns"] / last["operations"] >= known["slow_ns"]].tolist())
        if not slow:
            return set()
        return {one for one in self._slots if not slow.isdisjoint(self._slots.of_instance(one).values())}

    def slowest(
        self, now_ns: int, instance: int, *, stalled: bool, followed: bool = True
    ) -> tuple[int | None, OwnHistory] | None:
        """The kind (op; None: calls of any) and size that has become slower the most; None: none has.

        `stalled`: it is called slow already, and is until it is nearly as fast as before.  `followed`: operations are
        seen at present, where they ever were.
        """
        all_known = self._slots.of_instance(instance)
        # Where operations are seen, the time between calls is the job's own affair.
        seen = {kind: slot for kind, slot in all_known.items() if (kind != _CALLS) == followed} or all_known
        found = None
        for (op, _), slot in seen.items():
            history = self._history(now_ns, slot)
            if history is None or history.recent_mean_ns is None:
                continue
            usual_ns = max(history.mean_ns, _LEAST_MEAN_NS)
            recent = self._known[slot]["recent"]
            means_ns = recent["duration_ns"] / recent["operations"]
            slow = (
                history.recent_mean_ns >= STILL_SLOWER * usual_ns
                if stalled
                else bool((means_ns >= SLOWER_THAN_USUAL * usual_ns).all())
            )
            if slow and (found is None or history.ratio > found[0]):
                found = history.ratio, None if op < 0 else op, history
        return None if found is None else found[1:]

    def forget(self, living: Set[int]) -> None:
        """Drop what is known of communicators that are not among the living."""
        gone = self._slots.instances - living
        for instance in gone:
            for slot in self._slots.forget(instance):
                self._known[slot] = _UNKNOWN
                self._held_back.pop(slot, None)
        if gone:
            self._called = b"", np.zeros(0, np.intp)

    def _make_room(self) -> None:
        """Have an element for each slot."""
        if self._slots.size > len(self._known):
            more = np.full(max(self._slots.size - len(self._known), len(self._known)), _UNKNOWN)
            self._known = np.concatenate((self._known, more))


def _slow_ns(usual_ns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return SLOWER_THAN_USUAL * np.maximum(usual_ns, _LEAST_MEAN_NS)


def _recent_mean_ns(now_ns: int, seen: int, recent: Records) -> float | None:
    """None: too little happened lately, or too little before."""
    if seen < _LEAST_OPERATIONS or len(recent) < _RECENT_WINDOWS or recent["end_ns"][0] < now_ns - RECENT_NS:
        return None
    return int(recent["duration_ns"].sum()) / int(recent["operations"].sum())


def _among(instances: npt.NDArray[Any], some: Collection[int]) -> npt.NDArray[np.bool_]:
    return np.isin(instances, np.fromiter(some, np.int64, len(some)))
