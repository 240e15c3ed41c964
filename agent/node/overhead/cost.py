"""Adds up the probes' hits, and computes what they cost the processes that run into them.

The programs count the hits of observed processes in the kernel (others, where there are any, pay for theirs, and that
is not known here); what one hit costs is measured when the agent starts (probes/loading/calibration.py).  The product
is published as `overhead_seconds_total` and governs how much is observed (agent/node/overhead/governor.py).  Hits are
counted by program, not by library or process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, TypeVar

from railscope.probes.clock import Clock
from railscope.probes.loading.calibration import Calibration
from railscope.probes.nccl.programs.internals import Sent
from railscope.probes.nccl.records.calls import Stat
from railscope.probes.nccl.records.internals import InternalStat, NetworkKind

_Slot = TypeVar("_Slot", Stat, InternalStat)

BUSY_FACTOR: Final = 3.0
"""How much more than its own time a hit costs a job on a host whose cores are all busy.

Where 27 to 32 hits a call should have taken a few percent of an AllReduce of 1 MiB between two namespace hosts on two
cores, four noisy pairs of runs lost 7 to 33 %; this is a cautious reading of that, not a measurement."""

_BUSY_RATIO: Final = 0.5
"""From this share of the time in which some task waits for a core, a host counts as busy through and through."""


@dataclass(frozen=True, slots=True)
class Hits:
    """How often each program ran."""

    calls: int = 0
    """Entries of collectives, whichever program serves them."""
    returns: int = 0
    """Their returns: of calls whose host time is sampled, or of all (`EnqueueTime`)."""
    lifecycle: int = 0
    """Init and end of communicators, entries and returns."""
    proxy_post: int = 0
    proxy_stop: int = 0
    plan_replay: int = 0
    plan_launch: int = 0
    socket_send: int = 0
    ib_send: int = 0
    cuda: int = 0
    """Entries and returns of CUDA's functions, and what goes with them in NCCL's."""
    driver_calls: int = 0
    """Entries and returns of calls of CUDA's driver that launch graphs or wait for the GPU."""
    transfers: int = 0
    """Entries and returns of other libraries' functions that transfer, and entries of those that end requests."""


PROGRAMS: Final = tuple(field.name for field in fields(Hits))


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two readings."""

    elapsed_ns: int
    hits: Hits


def cost_ns(hits: Hits, calibration: Calibration) -> dict[str, float]:
    """What hits of probes cost the observed threads, by program, ns."""
    costs = {program: getattr(hits, program) * calibration.hit_ns(program) for program in PROGRAMS}
    # An operation that is posted is stopped once: that tells how many proxy_post() walked over.
    costs["proxy_post"] += hits.proxy_stop * calibration.operation_ns
    return costs


class Overhead:
    """Adds up what hits cost.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, calibration: Calibration, clock: Clock) -> None:
        self._calibration = calibration
        self._clock = clock
        self._last_ns = clock.monotonic_ns()
        self._calls: Mapping[Stat, int] = {}
        self._internals: Mapping[InternalStat, int] = {}
        self._cuda = 0
        self._driver_calls = self._transfers = 0
        self._ib_share = 1.0
        self._cost_ns = dict.fromkeys(PROGRAMS, 0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """By program: what its hits have cost so far, seconds; never falls."""
        return {program: cost / 1e9 for program, cost in self._cost_ns.items()}

    def add_hits(
        self,
        calls: Mapping[Stat, int],
        internals: Mapping[InternalStat, int],
        sent: Iterable[Sent] = (),
        cuda: int = 0,
        driver_calls: int = 0,
        transfers: int = 0,
    ) -> Interval:
        """Take what the programs count about themselves, since load; returns what is new.

        Args:
            calls: `NcclPrograms.stats()`.
            internals: `Internals.stats()`; empty where they are not loaded.
            sent: `Internals.sent()`.  One counter serves both kinds of sending; in what proportion they run is taken
                from here, and where it says nothing they are taken for the dearer kind, InfiniBand's.
            cuda: hits of the programs that watch CUDA, since load (`Completion.hits`).
            driver_calls: hits of the probes on CUDA's driver, since load.
            transfers: hits of the probes on other libraries' transfers, since load.
        """
        now_ns = self._clock.monotonic_ns()
        elapsed_ns, self._last_ns = now_ns - self._last_ns, now_ns
        self._ib_share = _ib_share(sent, self._ib_share)
        sends = _since(self._internals, internals, InternalStat.SENDS)
        ib_sends = round(sends * self._ib_share)
        hits = Hits(
            calls=_since(self._calls, calls, Stat.CALLS),
            returns=_since(self._calls, calls, Stat.RETURNS),
            lifecycle=_since(self._calls, calls, Stat.LIFECYCLE),
            proxy_post=_since(self._internals, internals, InternalStat.POSTS),
            proxy_stop=_since(self._internals, internals, InternalStat.STOPS),
            plan_replay=_since(self._internals, internals, InternalStat.REPLAYS),
            plan_launch=_since(self._internals, internals, InternalStat.PLANS),
            socket_send=sends - ib_sends,
            ib_send=ib_sends,
            cuda=cuda - self._cuda if cuda >= self._cuda else cuda,
            driver_calls=driver_calls - self._driver_calls,
            transfers=transfers - self._transfers,
        )
        self._calls, self._internals, self._cuda = dict(calls), dict(internals), cuda
        self._driver_calls, self._transfers = driver_calls, transfers
        for program, cost in cost_ns(hits, self._calibration).items():
            self._cost_ns[program] += cost
        return Interval(elapsed_ns, hits)


def busy_factor(procfs: Path) -> float:
    """How much more than its own time a hit of a probe costs now: 1 with cores to spare, up to BUSY_FACTOR without.

    Between the two it grows with the share of time in which some task waited for a core (/proc/pressure/cpu, average
    of 10 s).  Kernels without pressure information tell by the tasks that run now against the cores there are.
    """
    ratio = _waiting_ratio(procfs)
    return 1 + (BUSY_FACTOR - 1) * min(1.0, ratio / _BUSY_RATIO)


def _waiting_ratio(procfs: Path) -> float:
    try:
        words = (procfs / "pressure/cpu").read_text().split()
        return float(next(word for word in words if word.startswith("avg10=")).removeprefix("avg10=")) / 100
    except (OSError, ValueError, StopIteration):
        pass  # pressure information is off by default on some distributions
    try:
        running = int((procfs / "loadavg").read_text().split()[3].split("/")[0])
        cores = (procfs / "stat").read_text().count("\ncpu")
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1.0 if cores and running > cores else 0.0


def _ib_share(sent: Iterable[Sent], otherwise: float) -> float:
    messages = {NetworkKind.SOCKET: 0, NetworkKind.IB: 0}
    for row in sent:
        messages[row.network] += row.messages
    total = sum(messages.values())
    return messages[NetworkKind.IB] / total if total else otherwise


def _since(before: Mapping[_Slot, int], now: Mapping[_Slot, int], slot: _Slot) -> int:
    """How far a counter came; one that fell belongs to programs that were loaded anew, and began at 0."""
    count, last = now.get(slot, 0), before.get(slot, 0)
    return count - last if count >= last else count
