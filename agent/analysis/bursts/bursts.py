"""The burst calendar: when each rail and each job sends, and which jobs collide on a shared link.

Training communicates in bursts at regular distances (paper B: on-off regularity), so that the next ones can be told:

- of a rail, from readings of its byte counters, the busier direction (`rail_bursts`): bytes of the port;
- of a job, from its calls (`iterations`): payload of the GPU that makes most calls.  A job is what hangs together by
  communicators; it has its launcher's name where there is one.

What has no regular rhythm has no calendar: the reason stands in its place, and how much of the time it sends, in bursts
of how many bytes, as far as that shows without a period.

The forecast for two jobs takes their rhythms as they are: how much of the time both send at their present distance, how
much if they had nothing to do with one another (the product of their duty cycles), and how long to hold the second
one back so that they meet least.  Periods in a small whole ratio (1:1 … 4:4, within 2 %) keep such a distance for a
while; all others drift through one another, and no shift helps.  There is no forecast for a job of which only calls
were recorded: when something was enqueued says nothing of how long it is sent.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.bursts.rail_bursts import LEAST_REGULARITY, NEAR, Aperiodic, Rhythm, find_rhythm
from railscope.agent.analysis.facts.quantities import format_numbers
from railscope.agent.analysis.tables.gpu_rows import OPERATIONS, read_series, rows_by_gpu
from railscope.agent.analysis.tables.gpus import Gpus, find_gpus
from railscope.agent.analysis.timing.iterations import communication_intervals, find_iterations, operation_intervals
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count
from railscope.agent.rhythm.intervals import BURST_GAP, Intervals
from railscope.agent.rhythm.series import Integers

OF_OPERATIONS: Final = "times of operations"
OF_CALLS: Final = "moments of calls"
_OF_READINGS: Final = "readings of the port's byte counter"
_DIRECTIONS: Final = ("transmit", "receive")
_NOT_READ: Final = -1
_NO_TIMES: Final = "the imported data has no times, only an order: import data with timestamps"
_PHASES: Final = 240
"""Steps of a period that the forecast looks at."""
_SMALL_RATIOS: Final = sorted(
    ((first, second) for first in range(1, 5) for second in range(1, 5) if gcd(first, second) == 1), key=sum
)
_ALIKE: Final = 0.02
_NOTHING: Final = 1e-6
_SLIPPED: Final = 0.05
"""A distance holds until it has slipped by this part of the common period."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """When something sends."""

    subject: str
    """Which rail or job, in words."""
    period_seconds: float
    duty_cycle: float | None
    """Part of the time in a burst; None: no operation of the job has times, and calls have no duration."""
    bursts_per_period: float
    burst_bytes: int
    """Median of bursts: port bytes of a rail, payload of one GPU of a job."""
    period_bytes: int
    regularity: float
    """Part of bursts (of a job: iterations) after which the next is due within 15 % of a period: 0 to 1."""
    last_begin: float
    """Seconds since 1970: when the last complete period began; the next ones follow a period apart."""
    basis: str


@dataclass(frozen=True, slots=True)
class Declined:
    """Something without a calendar."""

    subject: str
    reason: str
    duty_cycle: float | None = None
    """Part of the time in which it sends; None: not known."""
    bursts: int | None = None
    """In the recording; None: not known."""
    burst_bytes: int | None = None
    """As of `Calendar`."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """How two jobs meet."""

    first: str
    second: str
    servers: tuple[str, ...]
    """Both run on these, and share their rails; empty: only links beyond the servers can be shared."""
    coincidence: float | None
    """Part of the time in which both send at their present distance; None: they drift."""
    unrelated: float
    """The same of jobs at no fixed distance."""
    shift_seconds: float | None
    """So much later the second one meets the first one least; None: no shift helps, as they drift."""
    coincidence_shifted: float | None
    holds_seconds: float | None
    """After this time the distance has slipped by a twentieth of the period; None: the periods are equal, or drift."""


@dataclass(frozen=True, slots=True)
class BurstCalendar:
    """All of it."""

    rails: tuple[Calendar, ...]
    jobs: tuple[Calendar, ...]
    forecasts: tuple[Forecast, ...]
    declined: tuple[Declined, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _JobRhythm:
    calendar: Calendar
    servers: frozenset[str]
    profile: NDArray[np.float64] | None
    """By phase of the period: part of the periods that send then; None: how long it sends is unknown."""
    last_begin_ns: int


def find_bursts(dataset: Dataset) -> BurstCalendar:
    """The burst calendar of a dataset."""
    rails: list[Calendar] = []
    declined: list[Declined] = []
    untimed = _untimed(dataset)
    for calendar in _rails(dataset, untimed):
        if isinstance(calendar, Declined):
            declined.append(calendar)
        else:
            rails.append(calendar)
    rhythms = []
    for name, gpus in jobs_of(dataset, find_gpus(dataset)):
        made_up = any(recording in untimed for recording, _ in gpus.gpu_of)
        rhythm = Declined(name, _NO_TIMES) if made_up else _job(dataset, gpus, name)
        if isinstance(rhythm, Declined):
            declined.append(rhythm)
        else:
            rhythms.append(rhythm)
    return BurstCalendar(
        rails=tuple(rails),
        jobs=tuple(rhythm.calendar for rhythm in rhythms),
        forecasts=tuple(
            _forecast(first, second, first.profile, second.profile)
            for first, second in combinations(rhythms, 2)
            if first.profile is not None and second.profile is not None
        ),
        declined=tuple(declined),
    )


def jobs_of(dataset: Dataset, gpus: Gpus) -> list[tuple[str, Gpus]]:
    """The jobs of a dataset by name: what hangs together by communicators."""
    root = {gpu.number: gpu.number for gpu in gpus.gpus}

    def find(number: int) -> int:
        while root[number] != number:
            number = root[number]
        return number

    members: defaultdict[str, set[int]] = defaultdict(set)
    for end, communicator in gpus.communicator_of.items():
        members[communicator.comm].add(gpus.gpu_of[end])
    for together in members.values():
        least = min(find(number) for number in together)
        for number in together:
            root[find(number)] = least
    names: defaultdict[int, set[str]] = defaultdict(set)
    ends = dataset["communicators"].select("recording", "instance", "job").distinct()
    for row in dataset.rows(ends).to_pylist():
        if row["job"]:
            names[find(gpus.gpu_of[row["recording"], row["instance"]])].add(row["job"])
    found = []
    for least in sorted({find(number) for number in root}):
        own = frozenset(number for number in root if find(number) == least)
        found.append((" and ".join(sorted(names[least])) or "job", own))
    repeated = {name for name, _ in found if name == "job" or [other for other, _ in found].count(name) > 1}
    return [(f"{name} ({_gpu_range(own)})" if name in repeated else name, gpus.select_job(own)) for name, own in found]


def _gpu_range(own: frozenset[int]) -> str:
    low, high = min(own), max(own)
    if low == high:
        return f"GPU {low}"
    return f"GPUs {low}–{high}" if high - low + 1 == len(own) else f"GPUs {format_numbers(sorted(own))}"


def _untimed(dataset: Dataset) -> frozenset[int]:
    """Recordings whose moments are made up, and only tell the order."""
    recordings = dataset.rows(dataset["recordings"].select("recording", "times_known")).to_pylist()
    return frozenset(row["recording"] for row in recordings if row["times_known"] is False)


def _rails(dataset: Dataset, untimed: frozenset[int]) -> list[Calendar | Declined]:
    found: list[Calendar | Declined] = []
    samples = dataset["rail_samples"]
    rails = dataset.rows(dataset["rails"]).to_pylist()
    for row in sorted(rails, key=lambda row: (row["node"], row["netns"] or "", row["device"], row["recording"])):
        place = f"{row['node']}/{row['netns']}" if row["netns"] else row["node"]
        subject = f"{place} {row['device']}" + (f" (rail {row['rail']})" if row["rail"] else "")
        if row["recording"] in untimed:
            found.append(Declined(subject, _NO_TIMES))
            continue
        own = samples.filter((samples.recording == row["recording"]) & (samples.rail_id == row["rail_id"]))
        own = own.filter(own.time_ns.notnull())
        counters = {name: own[name].fill_null(_NOT_READ) for name in ("transmit_bytes", "receive_bytes")}
        read = dataset.rows(own.select("time_ns", **counters))
        series = {name: _series(read["time_ns"].to_numpy(), read[f"{name}_bytes"].to_numpy()) for name in _DIRECTIONS}
        direction = max(series, key=lambda name: int(np.maximum(np.diff(series[name][1]), 0).sum()))
        rhythm = find_rhythm(*series[direction])
        if isinstance(rhythm, str):
            found.append(Declined(subject, rhythm))
            continue
        if isinstance(rhythm, Aperiodic):
            own_bursts = (rhythm.duty_cycle, rhythm.bursts, rhythm.burst_bytes)
            found.append(Declined(f"{subject} {direction}", rhythm.reason, *own_bursts))
            continue
        found.append(
            Calendar(
                subject=f"{subject} {direction}",
                period_seconds=rhythm.period_ns / 1e9,
                duty_cycle=rhythm.duty_cycle,
                bursts_per_period=rhythm.bursts_per_period,
                burst_bytes=rhythm.burst_bytes,
                period_bytes=rhythm.period_bytes,
                regularity=rhythm.regularity,
                last_begin=rhythm.last_begin_ns / 1e9,
                basis=_OF_READINGS + _between_gaps(rhythm),
            )
        )
    return found


def _series(time_ns: Integers, total_bytes: Integers) -> tuple[Integers, Integers]:
    """Readings in order of time, without those that failed."""
    known = total_bytes != _NOT_READ
    time_ns, total_bytes = time_ns[known], total_bytes[known]
    order = np.lexsort((total_bytes, time_ns))
    return time_ns[order], total_bytes[order]


def _between_gaps(rhythm: Rhythm) -> str:
    if not rhythm.gaps:
        return ""
    return (
        f", which have {format_count(rhythm.gaps, 'gap')}: of the longest piece without any, "
        f"{rhythm.span_ns / 1e9:.3g} s"
    )


def _job(dataset: Dataset, gpus: Gpus, name: str) -> _JobRhythm | Declined:
    regularity, iterations, unknown = find_iterations(dataset, gpus)
    if regularity is None:
        return Declined(name, unknown[0].reason, _time_sending(dataset, gpus))
    lengths = np.array([one.period_seconds for one in iterations])
    regular = float((np.abs(lengths - regularity.period_seconds) <= NEAR * regularity.period_seconds).mean())
    if regular < LEAST_REGULARITY:
        reason = f"its {len(iterations)} iterations make the same calls, but at irregular intervals"
        return Declined(name, reason, regularity.duty_cycle)
    series = read_series(dataset, gpus, regularity.gpu, regularity.cut_by)
    period_ns = regularity.period_seconds * 1e9
    sending = communication_intervals(dataset, gpus, regularity.gpu, period_ns)
    begins_ns = np.array([round(one.start * 1e9) for one in iterations], np.int64)
    from_ns, to_ns = (np.array([getattr(one, edge) for one in iterations]) for edge in ("from_ns", "to_ns"))
    place = np.searchsorted(from_ns, series.time_ns, side="right") - 1
    window = (place >= 0) & (series.time_ns < to_ns[place])
    time_ns, payload = series.time_ns[window], series.payload_bytes[window]
    bursts = np.concatenate(([0], np.flatnonzero(np.diff(time_ns) >= period_ns / BURST_GAP) + 1))
    calendar = Calendar(
        subject=name,
        period_seconds=regularity.period_seconds,
        duty_cycle=regularity.duty_cycle,
        bursts_per_period=len(bursts) / len(iterations),
        burst_bytes=round(float(np.median(np.add.reduceat(payload, bursts)))),
        period_bytes=round(int(payload.sum()) / len(iterations)),
        regularity=regular,
        last_begin=iterations[-1].start,
        basis=OF_CALLS if sending is None else OF_OPERATIONS,
    )
    ends_ns = begins_ns + np.rint(lengths * 1e9).astype(np.int64)
    return _JobRhythm(
        calendar,
        frozenset(gpu.server for gpu in gpus.gpus),
        None if sending is None else _profile(sending, begins_ns, ends_ns),
        int(begins_ns[-1]),
    )


def _time_sending(dataset: Dataset, gpus: Gpus) -> float | None:
    """Part of the time in which operations of a job were under way, from the first to the end of the last, of the GPU
    that has most; None: none has times."""
    rows = rows_by_gpu(dataset, OPERATIONS, gpus)
    if not rows:
        return None
    busy = operation_intervals(dataset, gpus, min(rows, key=lambda number: (-rows[number], number)))
    return busy.length_ns / int(busy.end_ns[-1] - busy.begin_ns[0]) if len(busy.begin_ns) else None


def _profile(sending: Intervals, begins_ns: Integers, ends_ns: Integers) -> NDArray[np.float64]:
    """By phase of an iteration: part of it that is covered, on average over iterations."""
    phases = np.arange(_PHASES + 1) / _PHASES
    edges = begins_ns[:, None] + np.rint((ends_ns - begins_ns)[:, None] * phases).astype(np.int64)
    covered = sending.length_before(edges.ravel()).reshape(edges.shape)
    result: NDArray[np.float64] = np.diff(covered, axis=1).sum(axis=0) / np.diff(edges, axis=1).sum(axis=0)
    return result


def _forecast(
    first: _JobRhythm, second: _JobRhythm, sent: NDArray[np.float64], other_sent: NDArray[np.float64]
) -> Forecast:
    own_ns, other_ns = first.calendar.period_seconds * 1e9, second.calendar.period_seconds * 1e9
    unrelated = float(sent.mean() * other_sent.mean())
    drifting = Forecast(
        first=first.calendar.subject,
        second=second.calendar.subject,
        servers=tuple(sorted(first.servers & second.servers)),
        coincidence=None,
        unrelated=unrelated,
        shift_seconds=None,
        coincidence_shifted=None,
        holds_seconds=None,
    )
    ratio = next(
        ((own, other) for own, other in _SMALL_RATIOS if abs(own * own_ns - other * other_ns) <= _ALIKE * own * own_ns),
        None,
    )
    if ratio is None:
        return drifting
    common_ns = ratio[0] * own_ns
    steps = _PHASES * ratio[0] * ratio[1]
    one = np.tile(np.repeat(sent, ratio[1]), ratio[0])
    two = np.tile(np.repeat(other_sent, ratio[0]), ratio[1])
    # By shift of the second one: the mean over phases of one(phase) · two(phase − shift).
    met = np.fft.irfft(np.fft.rfft(one) * np.fft.rfft(two).conj(), steps) / steps
    met = np.where(met < _NOTHING, 0.0, np.minimum(met, 1.0))
    distance = (second.last_begin_ns - first.last_begin_ns) % common_ns / common_ns
    present = round(distance * steps) % steps
    best = _middle_of_least(met)
    slip_ns = abs(own_ns * ratio[0] - other_ns * ratio[1])
    return replace(
        drifting,
        coincidence=float(met[present]),
        shift_seconds=(best - present) % steps / steps * common_ns / 1e9,
        coincidence_shifted=float(met[best]),
        holds_seconds=_SLIPPED * common_ns / slip_ns * common_ns / 1e9 if slip_ns else None,
    )


def _middle_of_least(met: NDArray[np.float64]) -> int:
    """The shift in the middle of the longest run, around the circle, of those at which least is met."""
    steps = len(met)
    least = met <= met.min() + _NOTHING
    if least.all():
        return 0
    # Begin to count behind a shift that is not among them.
    origin = int(np.flatnonzero(~least)[0])
    turned = np.roll(least, -origin)
    edges = np.diff(np.concatenate(([0], turned.astype(np.int8), [0])))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    longest = int(np.argmax(ends - begins))
    return int((begins[longest] + ends[longest] - 1) // 2 + origin) % steps
