"""What a job of the real NCCL loses to the agent, level by level, and to bpftrace on the same functions.

One job runs all the time and calls AllReduce back to back; observers come and go.  How far the job is, is read from its
own counter through /proc/PID/mem, which costs the job nothing.  Each rate beside an observer is divided by the mean of
the bare rates right before and right after it: on two cores a bare job's rate drifts by a factor of two, and only
neighbours in time can be compared.  Rates are taken from one call's end to another's, never across a start or an end
of an observer, and nobody scrapes meanwhile.  The job is stopped while an observer attaches or detaches: its threads
wait by yielding, which on two cores makes the kernel's grace periods, and so every detaching, take seconds.  Each rank
keeps to its share of the cores, as launchers bind them: left to wander, a bare job's rate varies twice as much.

Observers are measured once they have come to rest: an agent that has just come reads what there is, on cores that are
all busy, one that chooses its level first tries more, and takes it back within seconds, and all is done more often
until it has been as it is for a while (agent/pace.py).  A job of weeks pays for none of that.

An agent takes what its programs take, at each call, and what its process takes, from cores that the job keeps busy to
the last.  Each can come and go at once (quick_turns.py), the whole agent only within most of a minute, or two where its
process has its turns in between; the bare rate wanders by percents meanwhile.  So the two are measured by themselves
too, in many pairs; their product is what the job keeps beside both, if neither makes the other dearer (what it takes to
read the rings is in both).  At its default an agent has the programs of the level at which the governor rested.  Beside
the programs stand what they cost without events; a program that does nothing: what no accounting can do better than;
and nobody: how far from 1 such a row can be without a cause.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from agent.governor import name_of
from agent.pace import CALM_NS, FOLLOWED_NS, STEADY_NS
from probes.elf import Elf
from probes.nccl.internal_functions import Level
from probes.nccl.library import ProbePoints, probe_points
from testbed.hosts import Fabric
from tests.bench.bpftrace import Bpftrace
from tests.bench.cpu_time import DISTURBED, Others, process_time
from tests.bench.many_communicators import pause, resume
from tests.bench.probe_cost import empty_probe, empty_run_time
from tests.bench.programs_alone import ProgramsAlone
from tests.bench.quick_turns import Programs, kept_beside_process, kept_beside_programs
from tests.bench.results import Bound, Line, Omission, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.run_times import counted
from tests.bench.target import BenchError, Built
from tests.fabric.agent_process import AgentProcess
from tests.nccl.build import Double, build
from tests.nccl.job import Job, JobError

_PEERS: Final = "of themselves others say: NCCL's profiler costs 4-13 %, the nearest eBPF rival 0.4-1.7 %"
_SCRIPT: Final = Path(__file__).with_name("nccl_cost.bt")

_AUTO, _BPFTRACE = "default", "bpftrace on what rails probes"
_LEVELS: Final = {f"level {name_of(level)}": level for level in Level}
_COUNTS, _RAILS = "level counts", "level rails"
_EMPTY: Final = "an empty uprobe at each call"
_SILENT: Final = "the programs of level counts without events"
_NOBODY: Final = "nobody"

_ENDLESS: Final = 2_000_000_000
"""Iterations: the job is killed when the bench is through."""
_WINDOW_SECONDS: Final = CALM_NS / 1e9
"""What an agent at rest does now and then is in every window once.  The bare rate wanders at every scale of time, so
that many short windows tell more than few long ones."""
_ASK_SECONDS: Final = FOLLOWED_NS / 1e9
"""Asked more often, an agent does not come to rest."""
_RESUMED_SECONDS: Final = 2.0
"""A job that went on is up to 4 % slower for a second; taken then, a bare rate would flatter who is compared to it."""
_BPFTRACE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.0003
_STALLED_SECONDS: Final = 20.0
_REST_SECONDS: Final = (STEADY_NS + CALM_NS) / 1e9
"""Between an agent's coming and its measurement, or since the governor last changed its mind."""
_MOST_REST_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A size of calls, who observes, and what is bound; each is a part of the bench."""

    part: str
    size_bytes: int
    observers: tuple[str, ...]
    """In the order of their turns; who stands here twice has two pairs a round."""
    limits: dict[str, Limit]
    alone: tuple[Level, ...]
    """Where the governor comes to rest: the levels whose programs are measured by themselves."""
    turns: int
    """How often, in a round, programs and nobody come and go."""


CASES: Final = (
    Case(
        "nccl-1KiB",
        1 << 10,
        (*_LEVELS, _COUNTS, _AUTO, _BPFTRACE),
        {_COUNTS: Limit(Bound.AT_LEAST, 0.98), _AUTO: Limit(Bound.AT_LEAST, 0.97)},
        (Level.COUNTS,),
        12,
    ),
    Case(
        "nccl-16MiB",
        16 << 20,
        (_AUTO, _AUTO),
        {_AUTO: Limit(Bound.AT_LEAST, 0.99)},
        (Level.COMPLETION, Level.RAILS),
        20,
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
    """Calls per second, once a turn."""
    others: list[float] = field(default_factory=list)
    """Percent of the machine's time that others than the job took meanwhile."""
    kept: dict[str, list[float]] = field(default_factory=dict)
    """By observer: rate beside it over the bare rate around it."""
    agent: dict[str, list[float]] = field(default_factory=dict)
    """By observer that is an agent: what its process took meanwhile, % of a core."""
    by_itself: dict[str, list[float]] = field(default_factory=dict)
    """By agent with an aim: rate beside its process over the rate around it with the process stopped."""
    alone: dict[str, list[float]] = field(default_factory=dict)
    """By programs: rate beside them over the bare rate around it."""
    rested: Counter[str] = field(default_factory=Counter)
    """At which level the governor came to rest, and how often."""


class CallCounter:
    """How many calls one rank of a running job has made, read from outside."""

    def __init__(self, pid: int, driver: Path) -> None:
        """The driver program counts calls by operation in `tallies`; AllReduce is its first (driver.c).

        Raises:
            BenchError: the process has gone, or the program is stripped.
        """
        with driver.open("rb") as file:
            table = ELFFile(file).get_section_by_name(".symtab")
            symbols = table.get_symbol_by_name("tallies") if isinstance(table, SymbolTableSection) else None
        if not symbols:
            raise BenchError(f"{driver} has no symbol 'tallies': build it again (python -m tests.nccl.build)")
        self._at = _load_address(pid, driver) + int(symbols[0]["st_value"])
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._memory)

    def rate(self, seconds: float) -> float:
        """Calls per second over about this time, from the end of one call to the end of another.

        Raises:
            BenchError: the job ended, or makes no call in 20 s.
        """
        first, began_ns = self._next()
        time.sleep(seconds)
        last, ended_ns = self._next()
        return (last - first) / (ended_ns - began_ns) * 1e9

    def _next(self) -> tuple[int, int]:
        """Wait for the next call to be counted; how many there were then, and when, ns."""
        before, deadline = self._read(), time.monotonic() + _STALLED_SECONDS
        while (now := self._read()) == before:
            if time.monotonic() > deadline:
                raise BenchError(f"the NCCL job makes no call within {_STALLED_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        return now, time.monotonic_ns()

    def _read(self) -> int:
        number = os.pread(self._memory, 8, self._at)
        if len(number) < 8:
            raise BenchError("the NCCL job ended before its time")
        return int.from_bytes(number, "little")


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
    double = probed.double
    samples = Samples(kept={name: [] for name in case.observers})
    with (
        tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory,
        Job(fabric, Path(directory), double, iterations=_ENDLESS, size_bytes=case.size_bytes) as job,
        ExitStack() as loaded,
    ):
        try:
            pids = job.ready()
        except JobError as error:
            raise BenchError(str(error)) from None
        share_cores(pids)
        job.start()
        with CallCounter(pids[0], double.driver) as counter:
            counter.rate(_WINDOW_SECONDS)  # the first calls warm up
            alone = _loaded(case.alone, probed, pids, loaded)
            before = counter.rate(_WINDOW_SECONDS)
            for turn in range(rounds):
                for name in case.observers[:: 1 if turn % 2 == 0 else -1]:
                    with _observed(name, pids, double, samples.rested) as agent:
                        began = process_time(agent.process.pid) if agent is not None else None
                        beside = counter.rate(_WINDOW_SECONDS)
                        if agent is not None and began is not None:
                            took = process_time(agent.process.pid).core_percent(began)
                            samples.agent.setdefault(name, []).append(took)
                            if name in case.limits:
                                by_itself = samples.by_itself.setdefault(name, [])
                                by_itself += kept_beside_process(agent.process.pid, counter.rate)
                    time.sleep(_RESUMED_SECONDS)
                    others = Others(pids)
                    after = counter.rate(_WINDOW_SECONDS)
                    samples.others.append(others.percent())
                    samples.bare.append(after)
                    samples.kept[name].append(beside / ((before + after) / 2))
                    before = after
                for name, kept in kept_beside_programs(alone, pids, counter.rate, turns=case.turns).items():
                    samples.alone.setdefault(name, []).extend(kept)
                before = counter.rate(_WINDOW_SECONDS)
    return samples


def _loaded(levels: Sequence[Level], probed: _Probed, pids: tuple[int, ...], stack: ExitStack) -> dict[str, Programs]:
    """What is measured without an agent, by name; the programs stay loaded until the stack unwinds."""
    library = probed.double.nccl
    programs: dict[str, Programs] = {
        _alone(name_of(level)): stack.enter_context(ProgramsAlone.loaded(library, pids, level)).attached
        for level in levels
    }
    programs[_NOBODY] = nullcontext
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


def beside_both(programs: Sequence[float], process: Sequence[float]) -> list[float]:
    """What is kept beside programs and process, for each pair of the programs; of the process its median.

    No process makes a job faster: a median above 1 is scatter, and must not make up for what programs cost.
    """
    beside_process = min(1.0, statistics.median(process))
    return [kept * beside_process for kept in programs]


def _lines(case: Case, samples: Samples) -> list[Line]:
    part = case.part
    lines: list[Line] = [
        figure(part, "calls, bare", "calls/s", samples.bare),
        figure(part, "calls, bare, CPU taken by others", "%", samples.others, note=DISTURBED),
    ]
    for name, kept in samples.kept.items():
        note = ""
        if name == _AUTO:
            rests = ", ".join(f"{level} {times}x" for level, times in samples.rested.most_common())
            note = f"the governor came to rest at {rests}"
        elif name == _COUNTS:
            note = _PEERS
        lines.append(figure(part, f"{name} / bare", "×", kept, target=case.limits.get(name), note=note))
    for name, kept in samples.alone.items():
        note = {
            _EMPTY: "no accounting can do better",
            _NOBODY: "how far from 1 these rows can be without a cause",
            **{_alone(name_of(level)): "with a reader of their rings, without the agent" for level in case.alone},
        }.get(name, "")
        lines.append(figure(part, f"{name} / bare", "×", kept, note=note))
    for name in case.limits:
        lines += of_parts(case, samples, name)
    if _BPFTRACE in samples.kept:
        over_peer = ratios(samples.kept[_RAILS], samples.kept[_BPFTRACE])
        lines.append(figure(part, f"{_RAILS} / bpftrace", "×", over_peer))
    return lines


def _alone(level: str) -> str:
    """Who is measured: a level's programs by themselves."""
    return f"the programs of level {level} alone"


def of_parts(case: Case, samples: Samples, name: str) -> Iterator[Line]:
    """What was measured of an agent's process and its programs by themselves, and their product."""
    note = "the job keeps both cores busy, and waits for whichever rank is held up"
    yield figure(case.part, f"{name}: the agent", "% of a core", samples.agent[name], note=note)
    process = samples.by_itself[name]
    note = "its programs attached throughout: what the process alone takes from the job"
    yield figure(case.part, f"{name}, the agent going on / stopped", "×", process, note=note)
    rest = samples.rested.most_common(1)[0][0] if name == _AUTO else name_of(_LEVELS[name])
    programs = _alone(rest)
    if programs not in samples.alone:
        reason = f"the governor came to rest at {rest}, whose programs are not measured by themselves"
        yield Omission(case.part, f"{name}, its parts", reason)
        return
    both = beside_both(samples.alone[programs], process)
    note = f"each pair of {programs}, times the median of the agent going on / stopped, at most 1; both read the rings"
    yield figure(case.part, f"{name}, its parts / bare", "×", both, target=case.limits[name], note=note)


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
            option = "auto" if level is None else name_of(level)
            agent = stack.enter_context(AgentProcess("--level", option, "--pid", *map(str, pids)))
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
    return name_of(level)


def _level(agent: AgentProcess, library: Path) -> Level:
    """What the agent observes of the library; an agent that only counts does not say."""
    levels = agent.samples("railscope_probe_level", library=str(library))
    return Level(int(levels[0][1])) if levels else Level.COUNTS


def share_cores(pids: tuple[int, ...]) -> None:
    """Give each process, with the threads that it has and will have, cores of its own, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    for number, pid in enumerate(pids):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[number :: len(pids)] or cores)


def _load_address(pid: int, program: Path) -> int:
    """Where the program's first byte is mapped.

    Raises:
        BenchError: the process does not map it.
    """
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == str(program) and int(fields[2], 16) == 0:
                return int(fields[0].partition("-")[0], 16)
    except OSError as error:
        raise BenchError(f"the NCCL job's process {pid} has gone: {error.strerror}") from None
    raise BenchError(f"the NCCL job's process {pid} does not run {program}")
