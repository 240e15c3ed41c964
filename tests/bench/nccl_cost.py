"""What a job of the real NCCL loses to the agent, level by level, and to bpftrace on the same functions.

One job runs all the time and calls AllReduce back to back; observers come and go.  Each rate beside an observer is
divided by the mean of the bare rates right before and right after it: on two cores a bare job's rate drifts by a factor
of two, and only neighbours in time can be compared.  Rates are never taken across a start or an end of an observer, and
nobody scrapes meanwhile.  The job is stopped while an observer attaches or detaches: its threads wait by yielding,
which on two cores makes the kernel's grace periods, and so every detaching, take seconds.

Observers are measured once they have come to rest: an agent that has just come reads what there is, on cores that are
all busy, one that chooses its level first tries more, and takes it back within seconds, and all is done more often
until it has been as it is for a while (agent/node/daemon/schedule.py).  A job of weeks pays for none of that.

For levels watch and counts and for the default, which have an aim, that does not decide: the bare rate wanders by
percents while a whole agent comes, rests and goes.  So the agent observes one of two jobs alike, which take turns of
seconds (quick_turns.py).  Beside it stand nobody, in the same turns: how far from 1 such a figure can be without a
cause; what the programs of the level take by themselves, without the process, with and without events; and a program
that does nothing: what no accounting can do better than.  At its default an agent has the programs of the level at
which the governor rested.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from railscope.agent.node.daemon.schedule import CALM_NS, FOLLOWED_NS, STEADY_NS
from railscope.agent.node.overhead.governor import level_name
from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double, build
from tests.bench.bpftrace import Bpftrace
from tests.bench.counted_job import counted_job
from tests.bench.cpu_time import DISTURBED, Others, process_time
from tests.bench.many_communicators import pause, resume
from tests.bench.probe_cost import empty_probe, empty_run_time
from tests.bench.programs_alone import ProgramsAlone
from tests.bench.quick_turns import (
    Programs,
    RatedJob,
    kept_beside_agent,
    kept_beside_programs,
    whichever_is_observed,
)
from tests.bench.results import Bound, Line, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.run_times import counted
from tests.bench.target import BenchError, Built
from tests.fabric.agent_process import AgentProcess

_PEERS: Final = "of themselves others say: NCCL's profiler costs 4-13 %, the nearest eBPF rival 0.4-1.7 %"
_SCRIPT: Final = Path(__file__).with_name("nccl_cost.bt")

_AUTO, _BPFTRACE = "default", "bpftrace on what rails probes"
_LEVELS: Final = {f"level {level_name(level)}": level for level in Level}
_WATCH, _COUNTS, _RAILS = "level watch", "level counts", "level rails"
_EMPTY: Final = "an empty uprobe at each call"
_SILENT: Final = "the programs of level counts without events"
_NOBODY: Final = "noise floor"
_ALONE_NOBODY: Final = "noise floor, beside one job"
_NO_CAUSE: Final = "how far from 1 such a figure can be without a cause"

_WINDOW_SECONDS: Final = CALM_NS / 1e9
"""What an agent at rest does now and then is in every window once.  The bare rate wanders at every scale of time, so
that many short windows tell more than few long ones."""
_ASK_SECONDS: Final = FOLLOWED_NS / 1e9
"""Asked more often, an agent does not come to rest."""
_RESUMED_SECONDS: Final = 2.0
"""A job that went on is up to 4 % slower for a second; taken then, a bare rate would flatter who is compared to it."""
_BPFTRACE_SECONDS: Final = 0.5
_REST_SECONDS: Final = (STEADY_NS + CALM_NS) / 1e9
"""Between an agent's coming and its measurement, or since the governor last changed its mind."""
_MOST_REST_SECONDS: Final = 60.0
_NO_SUSPICION: Final = "60s"
"""An agent that was stopped for a turn finds that nothing has moved for so long, suspects a rank, and for ten seconds
does all that it does at rest four times as often."""


@dataclass(frozen=True, slots=True)
class Case:
    """A size of calls, who observes, and what is bound; each is a part of the bench."""

    part: str
    size_bytes: int
    observers: tuple[str, ...]
    """Who comes and goes beside one job, in the order of their turns."""
    limits: dict[str, Limit]
    """The agents that observe one of two jobs, and what they must leave it."""
    alone: tuple[Level, ...]
    """Where the governor comes to rest: the levels whose programs are measured by themselves."""
    turns: int
    """How often, in a round, each job that an agent observes has its turn, and programs come and go."""


CASES: Final = (
    Case(
        "nccl-1KiB",
        1 << 10,
        (*(name for name in _LEVELS if name not in (_WATCH, _COUNTS)), _BPFTRACE),
        {_COUNTS: Limit(Bound.AT_LEAST, 0.98), _AUTO: Limit(Bound.AT_LEAST, 0.97)},
        (Level.COUNTS,),
        6,
    ),
    Case(
        "nccl-watch",
        1 << 10,
        (),
        {_WATCH: Limit(Bound.AT_LEAST, 0.999)},
        (),
        6,
    ),
    Case(
        "nccl-16MiB",
        16 << 20,
        (),
        {_AUTO: Limit(Bound.AT_LEAST, 0.99)},
        (Level.COMPLETION, Level.RAILS),
        10,
    ),
)


@dataclass(frozen=True, slots=True)
class _Probed:
    """What is probed, and with what."""

    built: Built
    double: Double
    points: ProbePoints


@dataclass(slots=True)
class Samples:
    """What one case gave."""

    bare: list[float] = field(default_factory=list)
    """Calls per second, whenever nobody observes the job that goes on."""
    others: list[float] = field(default_factory=list)
    """Percent of the machine's time that others than the jobs took meanwhile."""
    kept: dict[str, list[float]] = field(default_factory=dict)
    """By observer: rate beside it over the bare rate around it."""
    agent: dict[str, list[float]] = field(default_factory=dict)
    """By observer with an aim: what its process took meanwhile, % of a core."""
    alone: dict[str, list[float]] = field(default_factory=dict)
    """By programs: rate beside them over the bare rate around it."""
    rested: Counter[str] = field(default_factory=Counter)
    """At which level the governor came to rest, and how often; and where it was after the turns."""


def measure(case: Case, built: Built, rounds: int) -> list[Line]:
    """Let every observer have its turn beside a job, `rounds` times; every second round backwards.

    Raises:
        BenchError: the job or an observer does not do what it should.
        LibraryMissing, BuildError: the NCCL library or its stand-in for CUDA is not there.
    """
    double = build()
    with double.nccl.open("rb") as file, Elf.open(file.fileno()) as elf:
        points = probe_points(elf, 0)
    with Fabric(hosts=2, rails=2) as fabric:
        return _lines(case, _measure(case, fabric, _Probed(built, double, points), rounds))


def _measure(case: Case, fabric: Fabric, probed: _Probed, rounds: int) -> Samples:
    samples = Samples(kept={name: [] for name in (*case.limits, _NOBODY, *case.observers)})
    with ExitStack() as stack:
        twins: list[RatedJob] = []
        for _ in range(2):
            twins.append(stack.enter_context(counted_job(fabric, probed.double, case.size_bytes)))
            pause(twins[-1].pids)
        job = twins[0]
        resume(job.pids)
        alone = _loaded(case.alone, probed, job.pids, stack)
        for turn in range(rounds):
            direction = 1 if turn % 2 == 0 else -1
            for name in (*case.limits, _NOBODY)[::direction]:
                ways = [
                    _beside(name, observed, other, case.turns, probed.double, samples)
                    for observed, other in (twins, twins[::-1])[::direction]
                ]
                samples.kept[name] += whichever_is_observed(*ways)
            pause(twins[1].pids)
            resume(job.pids)
            _come_and_go(case.observers[::direction], job, probed.double, samples)
            for name, kept_alone in kept_beside_programs(alone, job.pids, job.rate, turns=case.turns).items():
                samples.alone.setdefault(name, []).extend(kept_alone)
    return samples


def _beside(
    name: str, observed: RatedJob, other: RatedJob, turns: int, double: Double, samples: Samples
) -> list[float]:
    """The rate of a job over that of one like it that nobody observes, with which it takes turns; one a turn.

    `name` is an agent's; of nobody, for comparison, nothing observes either job.
    """
    pause(other.pids)
    with nullcontext() if name == _NOBODY else _observed(name, observed.pids, double, samples.rested) as agent:
        pid = None if agent is None else agent.process.pid

        def rate(seconds: float) -> float:
            if pid is None:
                return observed.rate(seconds)
            began = process_time(pid)
            beside = observed.rate(seconds)
            samples.agent.setdefault(name, []).append(process_time(pid).core_percent(began))
            return beside

        bare = partial(_bare_rate, other, samples)
        kept = kept_beside_agent(pid, RatedJob(observed.pids, rate), RatedJob(other.pids, bare), turns=turns)
        if agent is not None and name == _AUTO:
            pause(observed.pids)
            samples.rested[level_name(_level(agent, double.nccl))] += 1
    return kept


def _bare_rate(job: RatedJob, samples: Samples, seconds: float) -> float:
    """Measure a job that nobody observes, in calls per second, and keep that with what others took meanwhile."""
    others = Others(job.pids)
    rate = job.rate(seconds)
    samples.others.append(others.percent())
    samples.bare.append(rate)
    return rate


def _come_and_go(observers: Sequence[str], job: RatedJob, double: Double, samples: Samples) -> None:
    """Give each its turn beside the job."""
    time.sleep(_RESUMED_SECONDS)
    before = job.rate(_WINDOW_SECONDS)
    for name in observers:
        with _observed(name, job.pids, double, samples.rested):
            beside = job.rate(_WINDOW_SECONDS)
        time.sleep(_RESUMED_SECONDS)
        after = _bare_rate(job, samples, _WINDOW_SECONDS)
        samples.kept[name].append(beside / ((before + after) / 2))
        before = after


def _loaded(levels: Sequence[Level], probed: _Probed, pids: tuple[int, ...], stack: ExitStack) -> dict[str, Programs]:
    """What is measured without an agent, by name; the programs stay loaded until the stack unwinds."""
    library = probed.double.nccl
    programs: dict[str, Programs] = {
        _alone(level_name(level)): stack.enter_context(ProgramsAlone.loaded(library, pids, level)).attached
        for level in levels
    }
    programs[_ALONE_NOBODY] = nullcontext
    if Level.COUNTS in levels:
        silent = stack.enter_context(ProgramsAlone.loaded(library, pids, write_events=False))
        programs[_SILENT] = silent.attached
        programs[_EMPTY] = partial(empty_probe, probed.built, library, probed.points)
        require_hits(programs[_EMPTY], pids)
    return programs


def require_hits(empty: Programs, pids: tuple[int, ...]) -> None:
    """Raises BenchError where the job does not run into the program that does nothing, which then costs nothing."""
    with ExitStack() as stack:
        stack.callback(resume, pids)
        pause(pids)
        stack.enter_context(counted())
        stack.enter_context(empty())
        stack.callback(pause, pids)
        resume(pids)
        time.sleep(_RESUMED_SECONDS)
        if not empty_run_time().runs:
            raise BenchError("no call of the NCCL job runs into the empty uprobe")


def _lines(case: Case, samples: Samples) -> list[Line]:
    part = case.part
    lines: list[Line] = [
        figure(part, "calls, bare", "calls/s", samples.bare),
        figure(part, "calls, bare, CPU taken by others", "%", samples.others, note=DISTURBED),
    ]
    for name, kept in samples.kept.items():
        notes = []
        if name in case.limits or name == _NOBODY:
            notes.append("of two jobs alike, in turns")
        if name == _AUTO:
            rests = ", ".join(f"{level} {times}x" for level, times in samples.rested.most_common())
            notes.append(f"the governor came to rest, and was after the turns, at {rests}")
        elif name == _COUNTS:
            notes.append(_PEERS)
        elif name == _NOBODY:
            notes.append(_NO_CAUSE)
        lines.append(figure(part, f"{name} / bare", "×", kept, target=case.limits.get(name), note="; ".join(notes)))
    for name, kept in samples.alone.items():
        note = {
            _EMPTY: "no accounting can do better",
            _ALONE_NOBODY: _NO_CAUSE,
            **{_alone(level_name(level)): "with a reader of their rings, without the agent" for level in case.alone},
        }.get(name, "")
        lines.append(figure(part, f"{name} / bare", "×", kept, note=note))
    note = "the job keeps both cores busy, and waits for whichever rank is held up"
    for name in case.limits:
        lines.append(figure(part, f"{name}: the agent", "% of a core", samples.agent[name], note=note))
    if _BPFTRACE in samples.kept:
        over_peer = ratios(samples.kept[_RAILS], samples.kept[_BPFTRACE])
        lines.append(figure(part, f"{_RAILS} / bpftrace", "×", over_peer))
    return lines


def _alone(level: str) -> str:
    """Who is measured: a level's programs by themselves."""
    return f"the programs of level {level} alone"


@contextmanager
def _observed(name: str, pids: tuple[int, ...], double: Double, rested: Counter[str]) -> Iterator[AgentProcess | None]:
    """Attach an observer to the job, and let it settle; yields the agent, if it is one.

    Raises:
        BenchError: bpftrace is missing, or probes saw nothing.
    """
    with ExitStack() as stack:
        stack.callback(resume, pids)
        pause(pids)
        peer, agent = None, None
        level = _LEVELS.get(name)
        if name == _BPFTRACE:
            peer = Bpftrace(_SCRIPT.read_text(encoding="utf-8").replace("LIBRARY", str(double.nccl)))
            stack.enter_context(peer)
            time.sleep(_BPFTRACE_SECONDS)  # it says that it is there before its last probe is
        else:
            option = "auto" if level is None else level_name(level)
            arguments = ("--level", option, "--stall.floor", _NO_SUSPICION, "--pid", *map(str, pids))
            agent = stack.enter_context(AgentProcess(*arguments))
            _await_level(agent, double.nccl, len(pids), level)
        stack.callback(pause, pids)
        resume(pids)
        if agent is None:
            time.sleep(_RESUMED_SECONDS)
        elif level is None:
            rested[at_rest(agent, double.nccl)] += 1
        else:
            time.sleep(_REST_SECONDS)
        yield agent
    if peer is not None and "@sends: " not in peer.said:
        raise BenchError(f"bpftrace's probes saw nothing: {peer.said[-200:].strip()}")


def _await_level(agent: AgentProcess, library: Path, processes: int, level: Level | None) -> None:
    """Wait until the agent observes the processes, at the level where one is asked for."""
    agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] >= processes)
    if level is not None:
        agent.until(lambda: _level(agent, library) == level)


def at_rest(agent: AgentProcess, library: Path) -> str:
    """Wait until the governor keeps a level; returns which.

    While it takes probes back on cores that are all busy, the agent may leave a scrape unanswered for seconds.
    """
    level: Level | None = None
    since = time.monotonic()
    deadline = since + _MOST_REST_SECONDS
    while (now := time.monotonic()) - since < _REST_SECONDS or level is None:
        if now > deadline:
            return "no level"
        time.sleep(_ASK_SECONDS)
        try:
            found: Level | None = _level(agent, library)
        except TimeoutError:
            found = None
        if found is None or found != level:
            level, since = found, time.monotonic()
    return level_name(level)


def _level(agent: AgentProcess, library: Path) -> Level:
    """What the agent observes of the library; an agent that only counts does not say."""
    levels = agent.samples("railscope_probe_level", library=str(library))
    return Level(int(levels[0][1])) if levels else Level.COUNTS
