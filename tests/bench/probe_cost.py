"""What one probed call costs: railscope's accounting between the empty uprobe below it and bpftrace beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import BPF_TRACE_UPROBE_MULTI
from railscope.probes.loading.links import AttachKind, Links
from railscope.probes.nccl.functions.probe_points import ProbePoints
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import Stat
from tests.bench.bpftrace import Bpftrace
from tests.bench.results import Bound, Line, Omission, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.run_times import NEVER, RunTime, run_times
from tests.bench.target import BenchError, Built, Target

PART: Final = "probe"
_CALLS: Final = 5_000  # their events fit into the ring, and the next variant's turn comes before the machine changes
_UNPROBED_CALLS: Final = 200_000
_EMPTY_PROGRAM: Final = "empty"
"""Its name in probes/bpf/empty.bpf.c."""
_BPFTRACE: Final = "uprobe:{library}:ncclAllReduce {{ @c = count(); @s = sum(arg2); @h = hist(arg2); }}"

_UNPROBED, _EMPTY, _FULL, _INFO, _PAIR, _OFF, _PEER = (
    "unprobed",
    "empty uprobe",
    "full accounting, session",
    "full, through ncclEnqueueCheck",
    "full accounting, pair",
    "full accounting, no host time",
    "bpftrace count+sum+hist",
)
_VARIANTS: Final = (_UNPROBED, _EMPTY, _FULL, _INFO, _PAIR, _OFF, _PEER)
_ACCOUNTING: Final = {
    _FULL: EnqueueTime.SESSION,
    _INFO: EnqueueTime.SESSION,
    _PAIR: EnqueueTime.PAIR,
    _OFF: EnqueueTime.OFF,
}


@contextmanager
def empty_probe(built: Built, library: Path, points: ProbePoints) -> Iterator[None]:
    """Attach the program that does nothing to what a library's calls go through."""
    loaded = libbpf.load(built.empty_object, attach_types={_EMPTY_PROGRAM: BPF_TRACE_UPROBE_MULTI}, map_entries={})
    links = Links()
    try:
        links.attach(AttachKind.MULTI, loaded.program_fds[_EMPTY_PROGRAM], str(library), points.calls)
        yield
    finally:
        links.close()
        loaded.close()


def empty_run_time() -> RunTime:
    """What the kernel counted of this process's programs that do nothing (`run_times.counted`).

    Raises:
        KernelRefusal: the kernel does not tell.
    """
    return run_times(os.getpid()).get(_EMPTY_PROGRAM, NEVER)


@contextmanager
def accounting(target: Target, enqueue_time: EnqueueTime | None) -> Iterator[NcclPrograms]:
    """Attach railscope's programs as the agent does; `enqueue_time` None: the best this kernel has."""
    settings = ProgramSettings(attach=AttachKind.MULTI, enqueue_time=enqueue_time, sample_every=16)
    programs = NcclPrograms.load(settings)
    try:
        links = programs.attach(str(target.library), target.points(), 0, None)
        try:
            yield programs
        finally:
            links.close()
    finally:
        programs.close()


def measure(built: Built, rounds: int) -> list[Line]:
    """Alternate between all variants, `rounds` times."""
    lines: list[Line] = []
    with ExitStack() as stack:
        targets = {
            name: stack.enter_context(Target(built, f"probe{i}", through_info=name == _INFO))
            for i, name in enumerate(_VARIANTS)
        }
        programs: dict[str, NcclPrograms] = {}
        stack.enter_context(empty_probe(built, targets[_EMPTY].library, targets[_EMPTY].points()))
        for name, enqueue_time in _ACCOUNTING.items():
            try:
                programs[name] = stack.enter_context(accounting(targets[name], enqueue_time))
            except libbpf.LoadError as error:
                lines.append(Omission(PART, name, str(error)))
                del targets[name]
        try:
            stack.enter_context(Bpftrace(_BPFTRACE.format(library=targets[_PEER].library)))
            targets[_PEER].call(1000)
        except BenchError as error:
            lines.append(Omission(PART, _PEER, str(error)))
            del targets[_PEER]
        samples = _interleaved(targets, programs, rounds)
        lost = sum(each.stats()[Stat.RING_FULL] for each in programs.values())
    lines += [figure(PART, name, "ns/call", values) for name, values in samples.items()]
    if _FULL in samples:
        over_empty = ratios(samples[_FULL], samples[_EMPTY])
        lines.append(figure(PART, "full / empty", "×", over_empty, target=Limit(Bound.AT_MOST, 1.4)))
        over_empty = ratios(samples[_INFO], samples[_EMPTY])
        limit = Limit(Bound.AT_MOST, 1.4)
        lines.append(figure(PART, "full through ncclEnqueueCheck / empty", "×", over_empty, target=limit))
        if _PEER in samples:
            over_peer = ratios(samples[_FULL], samples[_PEER])
            lines.append(figure(PART, "full / bpftrace", "×", over_peer, target=Limit(Bound.AT_MOST, 0.75)))
    if _PEER in samples:
        floor = ratios(samples[_EMPTY], samples[_PEER])
        lines.append(figure(PART, "empty / bpftrace", "×", floor, note="no accounting can do better"))
    lines.append(figure(PART, "events lost meanwhile", "events", [lost], target=Limit(Bound.EXACTLY, 0)))
    return lines


def _interleaved(targets: dict[str, Target], programs: dict[str, NcclPrograms], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in targets}
    for turn in range(-1, rounds):
        # Every second round runs backwards, so that each variant follows and precedes every neighbour as often.
        for name in list(targets)[:: 1 if turn % 2 else -1]:
            nanoseconds = targets[name].call(_UNPROBED_CALLS if name == _UNPROBED else _CALLS)
            if name in programs:
                programs[name].call_events.read()
                programs[name].lifecycle_events.read()
            if turn >= 0:  # the first turn warms up
                samples[name].append(nanoseconds)
    return samples
