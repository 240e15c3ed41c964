"""Chooses the level of observation within a budget of the observed threads' time.

Every hit of a probe takes time of the thread that runs into it.  Calls are counted; what is observed beyond that,
level by level (probes/nccl/functions/internals.py), stays attached as long as it costs less than the budget.

What is compared: the cost of all hits since the last tick (agent/node/overhead/cost.py), over the wall time of the
threads that took them.  A process of a job has two kinds of those: threads that call NCCL, and the proxy's, which
serves the network.  One of each is taken per process, and the kind that suffers more decides, so that idle callers lend
nothing to a busy proxy.  On a host whose cores are busy a hit counts for more than its own time.

One level serves all libraries: the kernel counts hits by program, not by library, and a node's job seldom maps two.
A library that lacks a level's functions does with less (`allowed_level`).

How it moves, one level at a time but for the worst:

- It starts at *rails* where jobs come later than the agent: what a level costs is known only from being there, so
  every job shows its completion and rails from the first second, and one that cannot afford them loses them within one
  to three ticks.
- Where an agent comes later than a job it starts at *counts*, as what a level costs this job is not known, and the
  start of the agent costs it enough.  After a second of its calls each next level is added as soon as its price is
  expected to be within the budget: by the calls, at what a call usually costs there.  Where nothing calls NCCL as the
  agent comes, it begins as above.
- Down when the average of three to five ticks, or of five seconds, is over the budget, or at once when one tick is over
  four times it; then past every level that would be so too.
- Exact counts are the last that is given up, for *watch*: where NCCL numbers the collectives itself, and counting alone
  is over four times the budget for as long as it takes to go down.  They come back when they are expected to cost less
  than 70 % of that, by the calls that NCCL numbers meanwhile.
- Up when over ten ticks, or ten seconds, the level's predicted cost is below 70 % of the budget.  It is predicted
  from the cost per call that was last measured there; a level that was not measured for ten minutes is tried.
- A level that was taken back is left alone for 30 s; each time that it has to be taken back again that doubles, up to
  an hour, until it has once held for half an hour.
- Where no process has been observed for ten seconds everything starts anew.

No clock and no probes in here: ticks come in, a level comes out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.node.overhead.cost import Interval, cost_ns
from railscope.probes.loading.calibration import Calibration
from railscope.probes.nccl.functions.internals import FUNCTIONS, InternalPoints, Level

DEFAULT_BUDGET_RATIO: Final = 0.01
LEVELS: Final[Mapping[str, Level | None]] = {"auto": None, **{level.name.lower(): level for level in Level}}
"""What a person may ask for; None: the governor decides."""

START: Final = Level.RAILS
COMFORT: Final = 0.7
"""A level is added while its predicted cost is below this share of the budget."""
EMERGENCY: Final = 4.0
"""One tick over this many times the budget is enough to step down, but from counts."""
COUNTS_WORTH: Final = 4.0
"""Counts are exact and what all else stands on: they are worth so many times the budget."""
FEWEST_TICKS_DOWN: Final = 3
MOST_TICKS_DOWN: Final = 5
"""How many ticks are averaged before stepping down; where ticks are long, no more than cover `DOWN_NS`."""
FEWEST_TICKS_UP: Final = 3
TICKS_UP: Final = 10
"""How many are averaged before stepping up, at most: where ticks are long, fewer."""

_SECOND_NS: Final = 1_000_000_000
FIRST_WAIT_NS: Final = 30 * _SECOND_NS
LONGEST_WAIT_NS: Final = 3600 * _SECOND_NS
HELD_NS: Final = 1800 * _SECOND_NS
DOWN_NS: Final = 5 * _SECOND_NS
UP_NS: Final = 10 * _SECOND_NS
REMEMBERED_NS: Final = 600 * _SECOND_NS
FORGET_AFTER_NS: Final = 10 * _SECOND_NS
ARRIVAL_NS: Final = _SECOND_NS
"""So long an agent that has just come watches calls alone before it judges what they tell."""
USUAL_PRICE: Final[Mapping[Level, float]] = {Level.COMPLETION: 10.0, Level.RAILS: 25.0}
"""What the hits of a level and those below it take of the busier thread for each hit that counts a call, before it was
measured: an operation is posted once, stopped once a channel, and each message of a channel is a hit.  A guess for two
ranks with several channels: where it is too high the level is merely tried later, as after any other ten seconds."""

_PROXY: Final = frozenset({"proxy_stop", "socket_send", "ib_send"})
"""Programs that run in the proxy's thread; all others run in a thread that calls NCCL, or CUDA for it."""
_LEVEL: Final = {"cuda": Level.ALL, **{function.program: function.level for function in FUNCTIONS}}


@dataclass(frozen=True, slots=True)
class Measured:
    """One tick, a second long or a few."""

    interval: Interval
    processes: int
    """Observed processes that have a communicator."""
    available: Level
    """The highest level that some library has probes for (`available_level`)."""
    busy_factor: float = 1.0
    """How much more than its own time a hit costs now (agent/node/overhead/cost.py)."""
    lowest: Level = Level.COUNTS
    """*watch* where calls can do without a probe."""
    unprobed_calls: int = 0
    """Calls in the interval that met no probe, as far as NCCL numbers them."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Share of the observed threads' time that hits took by themselves, by kind of thread."""

    callers: float = 0.0
    proxies: float = 0.0

    def __add__(self, other: _Load) -> _Load:
        return _Load(self.callers + other.callers, self.proxies + other.proxies)

    def __mul__(self, factor: float) -> _Load:
        return _Load(self.callers * factor, self.proxies * factor)

    @property
    def worse(self) -> float:
        return max(self.callers, self.proxies)


_NO_LOAD: Final = _Load()


@dataclass(frozen=True, slots=True)
class _Tick:
    """What one tick, or several together, measured."""

    elapsed_ns: int
    loads: Mapping[Level, _Load]
    """What the programs that each level adds took."""
    call_rate: float
    """Calls per second and process; 0: graph replays, say, make none."""
    busy_factor: float

    @property
    def load(self) -> float:
        return self.load_at(Level.ALL)

    def load_at(self, highest: Level) -> float:
        """What the programs of the levels up to this one took, as a share of the observed threads' time."""
        return sum((load for level, load in self.loads.items() if level <= highest), _NO_LOAD).worse * self.busy_factor


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What a level was last seen to add."""

    load: _Load
    call_rate: float
    time_ns: int


@dataclass(slots=True)
class _Retry:
    """When a level that was taken back may be tried again."""

    wait_ns: int
    not_before_ns: int
    load: float
    """What all probes took when it was taken back, the host's busyness included."""
    call_rate: float
    taken_back_ns: int


def _checked_budget(ratio: float) -> float:
    if not 0 < ratio <= 1:
        raise ValueError(f"a budget of {ratio:.3%} makes no sense: choose above 0 and at most 100 %")
    return ratio


class Governor:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        calibration: Calibration,
        budget_ratio: float = DEFAULT_BUDGET_RATIO,
        fixed: Level | None = None,
        *,
        late: bool = False,
    ) -> None:
        """`budget_ratio`: share of the observed threads' time; `fixed`: the level, whatever it costs.

        `late`: jobs may run already.

        Raises:
            ValueError: the budget is not above 0 and at most 1.
        """
        self._calibration = calibration
        self._budget = _checked_budget(budget_ratio)
        self._fixed = fixed
        self._available = Level.ALL
        self._lowest = Level.COUNTS
        self._now_ns = 0
        self._without_processes_ns = 0
        self.load_ratio = 0.0
        """Average of the last ticks: share of the observed threads' time that probes took."""
        self.reason = "" if fixed is None else f"{level_name(fixed)}: set by hand"
        """Why the level is what it is, one line for the log; changes whenever the level does."""
        self._level = Level.COUNTS
        self._start_anew()
        self._arriving = late and fixed is None
        if self._arriving:
            self._level = Level.COUNTS

    def reconfigure(self, budget_ratio: float, fixed: Level | None) -> None:
        """Take another budget, or another fixed level; where the level was or becomes fixed all begins anew.

        Raises:
            ValueError: the budget is not above 0 and at most 1.
        """
        self._budget = _checked_budget(budget_ratio)
        if fixed is self._fixed:
            return
        self._fixed = fixed
        self._start_anew()
        self.reason = "" if fixed is None else f"{level_name(fixed)}: set by hand"

    def _start_anew(self) -> None:
        self._level = START if self._fixed is None else self._fixed
        self._arriving = False
        """Whether jobs that ran before the agent came have not been judged yet."""
        self._since_ns = self._now_ns
        self._ticks: deque[_Tick] = deque(maxlen=TICKS_UP)
        """The last ones at this level."""
        self._evidence: dict[Level, _Evidence] = {}
        self._retries: dict[Level, _Retry] = {}

    def judge_arrival(self, *, running: bool) -> None:
        """Begin: with calls alone where a job was found running when the agent came, else at once with all."""
        if self._arriving and running:
            self.reason = f"{level_name(self.level)}: a job ran before the agent, and is watched first"
        elif self._arriving:
            self._start_anew()
            self.reason = f"{level_name(Level.COUNTS)} to {level_name(self.level)}: no job is running yet"

    @property
    def level(self) -> Level:
        """What is to be attached, where it is available."""
        return min(max(self._level, self._lowest), self._available)

    @property
    def is_stable(self) -> bool:
        """Whether the level will do for some seconds: the budget is kept, or there is nothing to give up."""
        nothing_to_give_up = self._fixed is not None or self.level <= self._lowest
        kept = bool(self._ticks) and max(self.load_ratio, self._ticks[-1].load) <= self._limit(self.level)
        return nothing_to_give_up or kept

    def _limit(self, level: Level) -> float:
        """What the probes may take while this level is the highest."""
        return self._budget * (COUNTS_WORTH if level <= Level.COUNTS else 1.0)

    def allowed_level(self, available: Level) -> Level:
        """What is to be attached in a library that has probes up to `available`."""
        return min(self._level, available)

    def decide(self, measured: Measured) -> Level:
        """Take one tick; returns the level from now on."""
        elapsed_ns = measured.interval.elapsed_ns
        self._now_ns += elapsed_ns
        if measured.available is not self._available:
            self._available = measured.available
            self._restart_window()
        self._lowest = measured.lowest
        if measured.processes <= 0:
            self._wait_for_processes(elapsed_ns)
            return self.level
        self._without_processes_ns = 0
        if elapsed_ns <= 0:
            return self.level
        tick = self._measure(measured)
        self._ticks.append(tick)
        recent = _average(self._last_ticks())
        self.load_ratio = recent.load
        if self._fixed is not None:
            return self.level
        for level in Level:
            if level <= self.level:
                self._evidence[level] = _Evidence(recent.loads[level], recent.call_rate, self._now_ns)
        if self.level is Level.WATCH and measured.interval.hits.calls:
            # Calls were counted for a moment: what that cost stands for counting all of them.
            counted = measured.interval.hits.calls * _SECOND_NS / (elapsed_ns * measured.processes)
            self._evidence[Level.COUNTS] = _Evidence(tick.loads[Level.COUNTS], counted, self._now_ns)
        over = recent.load > self._limit(self.level) and len(self._ticks) >= FEWEST_TICKS_DOWN
        if self.level > Level.COUNTS and tick.load > EMERGENCY * self._budget:
            self._step_down(tick, self._refuge(tick))
        elif self.level > self._lowest and over:
            self._step_down(recent, Level(self.level - 1))
        elif self._arriving:
            self._consider_next(_average(self._ticks))
        elif self.level < self._available and self._may_step_up:
            self._consider_step_up(_average(self._ticks))
        return self.level

    @property
    def _may_step_up(self) -> bool:
        """Whether the level was watched for long enough."""
        long_enough = sum(tick.elapsed_ns for tick in self._ticks) >= UP_NS and len(self._ticks) >= FEWEST_TICKS_UP
        return long_enough or len(self._ticks) >= TICKS_UP

    def _last_ticks(self) -> list[_Tick]:
        """Those that tell whether the budget is kept, the last one first."""
        last: list[_Tick] = []
        for tick in reversed(self._ticks):
            if len(last) == MOST_TICKS_DOWN or sum(one.elapsed_ns for one in last) >= DOWN_NS:
                break
            last.append(tick)
        return last

    def _consider_next(self, now: _Tick) -> None:
        """Of jobs that ran before the agent came: add the next level if its usual price is within the budget."""
        if now.elapsed_ns < ARRIVAL_NS:
            return
        if self.level < Level.COUNTS or self.level >= min(START, self._available):
            self._arriving = False
            return
        level = Level(self.level + 1)
        calls = now.loads[Level.COUNTS].worse * USUAL_PRICE[level] * now.busy_factor
        if max(calls, now.load) > COMFORT * self._budget:
            # The usual way from here on: it is tried once the job was watched for longer.
            self._arriving = False
            return
        self._move(level, f"{calls:.2%} of the observed threads' time is usual there, budget {self._budget:.2%}")

    def _wait_for_processes(self, elapsed_ns: int) -> None:
        before_ns, self._without_processes_ns = self._without_processes_ns, self._without_processes_ns + elapsed_ns
        self.load_ratio = 0.0
        if self._arriving and self._without_processes_ns >= ARRIVAL_NS:
            self.judge_arrival(running=False)
            return
        if before_ns < FORGET_AFTER_NS <= self._without_processes_ns:
            before = self.level
            self._start_anew()
            if self.level is not before:
                self.reason = f"{level_name(before)} to {level_name(self.level)}: no observed process is left"

    def _measure(self, measured: Measured) -> _Tick:
        costs = cost_ns(measured.interval.hits, self._calibration)
        thread_ns = measured.interval.elapsed_ns * measured.processes
        loads = dict.fromkeys(Level, _NO_LOAD)
        for program, cost in costs.items():
            share = cost / thread_ns
            loads[_LEVEL.get(program, Level.COUNTS)] += _Load(proxies=share) if program in _PROXY else _Load(share)
        call_rate = (measured.interval.hits.calls + measured.unprobed_calls) * _SECOND_NS / thread_ns
        return _Tick(measured.interval.elapsed_ns, loads, call_rate, max(1.0, measured.busy_factor))

    def _refuge(self, tick: _Tick) -> Level:
        """The highest level below the present one that would have been no emergency."""
        level = Level(self.level - 1)
        while level > Level.COUNTS and tick.load_at(level) > EMERGENCY * self._budget:
            level = Level(level - 1)
        return level

    def _step_down(self, tick: _Tick, to: Level) -> None:
        """Take levels back for what they took, down to one that stays."""
        held = self._now_ns - self._since_ns >= HELD_NS
        for level in Level:
            if not to < level <= self.level:
                continue
            retry = self._retries.get(level)
            wait_ns = FIRST_WAIT_NS if retry is None or held else min(2 * retry.wait_ns, LONGEST_WAIT_NS)
            load, not_before_ns = tick.load_at(level), self._now_ns + wait_ns
            self._retries[level] = _Retry(wait_ns, not_before_ns, load, tick.call_rate, self._now_ns)
        limit = self._limit(self.level)
        allowed = f"budget {limit:.2%}" if to >= Level.COUNTS else f"counts may take {limit:.2%}"
        self._move(to, f"{tick.load:.2%} of the observed threads' time, {allowed}")

    def _consider_step_up(self, now: _Tick) -> None:
        level = Level(self.level + 1)
        retry = self._retries.get(level)
        if retry is not None and self._now_ns < retry.not_before_ns:
            return
        expected = self._expected(level, now.call_rate)
        load = (sum(now.loads.values(), _NO_LOAD) + (expected or _NO_LOAD)).worse * now.busy_factor
        if retry is not None and self._now_ns - retry.taken_back_ns < REMEMBERED_NS:
            # A host that was busy will be busy again: what a hit costs now is not all that it may cost.
            scalable = retry.call_rate > 0 and now.call_rate > 0
            load = max(load, retry.load * (now.call_rate / retry.call_rate if scalable else 1.0))
        if load > COMFORT * self._limit(level):
            return
        what = "expected" if expected is not None else "so far; the cost of the next level is not measured yet"
        self._move(level, f"{load:.2%} of the observed threads' time {what}, budget {self._limit(level):.2%}")

    def _expected(self, level: Level, call_rate: float) -> _Load | None:
        """What a level would add now; None: it was not measured for so long that it has to be tried."""
        evidence = self._evidence.get(level)
        if evidence is None or self._now_ns - evidence.time_ns > REMEMBERED_NS:
            return None
        # Without calls there is nothing to scale by: the job rests, or replays graphs.
        scalable = evidence.call_rate > 0 and call_rate > 0
        return evidence.load * (call_rate / evidence.call_rate) if scalable else evidence.load

    def _move(self, level: Level, why: str) -> None:
        self.reason = f"{level_name(self.level)} to {level_name(level)}: {why}"
        self._level = level
        self._restart_window()

    def _restart_window(self) -> None:
        """From now on another level is measured."""
        self._since_ns = self._now_ns
        self._ticks.clear()


def available_level(points: InternalPoints) -> Level:
    """The highest level of observation that a library has probes for."""
    return max((level for level in Level if points.at(level)), default=Level.COUNTS)


def level_name(level: Level) -> str:
    """The level of observation as a person writes it."""
    return level.name.lower()


def _average(ticks: Collection[_Tick]) -> _Tick:
    """Weighted by their length."""
    total_ns = sum(tick.elapsed_ns for tick in ticks)
    loads = dict.fromkeys(Level, _NO_LOAD)
    call_rate = busy_factor = 0.0
    for tick in ticks:
        weight = tick.elapsed_ns / total_ns
        for level, load in tick.loads.items():
            loads[level] += load * weight
        call_rate += tick.call_rate * weight
        busy_factor += tick.busy_factor * weight
    return _Tick(total_ns, loads, call_rate, busy_factor)
