"""What completion and rendering cost as a host's communicators grow: never more than in proportion.

One user's process may have as many of them as the tables hold, and each may stall.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from railscope.agent.facts.snapshot import CommunicatorStall, Snapshot
from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.inspection.inspection import InProcess
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.earlier import EarlierTotals, rank_pids
from railscope.exporters.series.families import make_families
from railscope.exporters.series.protobuf import ProtobufRenderer
from railscope.exporters.series.text import Format, Renderer
from railscope.exporters.web.pages import render_communicators, render_stalls
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.internals import EmptyRun, Progress, Sent
from railscope.probes.nccl.records.internals import NetworkKind
from tests.unit.exporters_snapshots import communicator, full_snapshot, large_snapshot, stall, with_communicators
from tests.unit.growth import MOST_EXPONENT, exponent, lines_run
from tests.unit.level_programs import SimulatedPrograms
from tests.unit.test_rail_bytes import RAIL0, Node

SIZES = [(1, 16), (16, 256), (256, 4096)]
NO_LIMIT = 10**6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of stalls begin, each with a line in the log."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


# Completion


@dataclass(slots=True)
class Kernel(SimulatedPrograms):
    """Of processes with a communicator each, all of which sent something; forgets what it is told to forget."""

    node: Node = field(default_factory=Node)

    def sent(self) -> list[Sent]:
        return list(self.node.rows.values())


def completing(size: int) -> Completion:
    kernel = Kernel()
    for instance in range(1, size + 1):
        kernel.states[instance] = Progress(instance, 5, 9, 10**9, 4, 9, 5, 0, 0, elsewhere=False)
        kernel.discarded[instance] = EmptyRun(6, 7)
        kernel.node.begin(instance, 1, RAIL0)
        kernel.node.send(instance, NetworkKind.SOCKET, 0, 1 << 20)
    return Completion(kernel, Level.RAILS, rail_bytes=kernel.node.rails, inspection=InProcess())


def tick(completion: Completion, size: int) -> None:
    completion.read_handed_over()
    completion.sees_all_handed_over()
    completion.handed_over({1})
    completion.read()
    for instance in range(1, size + 1):
        completion.progress_of(instance)


def show(completion: Completion, size: int) -> None:
    numbers = range(1, size + 1)
    completion.facts((replace(communicator(f"{one:016x}"), instance=one) for one in numbers), 0)
    completion.events_lost()


def end(completion: Completion, size: int) -> None:
    everybody = set(range(1, size + 1))
    completion.end_processes(everybody)
    completion.end_communicators(everybody)
    completion.forget(everybody)


@pytest.mark.parametrize(("few", "many"), SIZES)
@pytest.mark.parametrize("act", [tick, show, end])
def test_completion_grows_as_the_communicators(act: Callable[[Completion, int], None], few: int, many: int) -> None:
    def work(size: int) -> int:
        completion = completing(size)
        tick(completion, size)
        return lines_run(partial(act, completion, size))

    assert exponent(work, few, many) <= MOST_EXPONENT


# Rendering


def small(size: int) -> Snapshot:
    """Communicators of two ranks, of a user for eight of them, and nothing else that grows."""
    return with_communicators(
        full_snapshot(),
        *(
            replace(communicator(f"{number // 2:016x}", str(number % 2), 2 + number), instance=number)
            for number in range(size)
        ),
    )


def stalled(size: int) -> Snapshot:
    snapshot = small(size)
    lengths = tuple(
        CommunicatorStall(f"{number:016x}", "0", "rail_down", 2.5, replace(stall(), instance=number))
        for number in range(size)
    )
    return replace(snapshot, stalls=replace(snapshot.stalls, lengths=lengths))


def families(snapshot: Snapshot) -> object:
    return make_families(snapshot, SeriesBudget(NO_LIMIT))


def families_beyond_the_limit(snapshot: Snapshot) -> object:
    """So that half of the communicators go."""
    return make_families(snapshot, SeriesBudget(3 * len(snapshot.collectives.communicators)))


def families_after_an_earlier_agent(snapshot: Snapshot) -> object:
    earlier = EarlierTotals()
    earlier.record_shown(make_families(snapshot, SeriesBudget(NO_LIMIT)), rank_pids(snapshot), {})
    return make_families(snapshot, SeriesBudget(NO_LIMIT), earlier=EarlierTotals(earlier.totals))


def text(snapshot: Snapshot) -> object:
    return Renderer().render(make_families(snapshot, SeriesBudget(NO_LIMIT)), Format.OPENMETRICS)


def protobuf(snapshot: Snapshot) -> object:
    return ProtobufRenderer().render(make_families(snapshot, SeriesBudget(NO_LIMIT)))


@pytest.mark.parametrize(("few", "many"), SIZES)
@pytest.mark.parametrize(
    "act",
    [
        families,
        families_beyond_the_limit,
        families_after_an_earlier_agent,
        text,
        protobuf,
        render_communicators,
        render_stalls,
    ],
)
@pytest.mark.parametrize("shape", [small, stalled])
def test_metrics_and_pages_grow_as_the_communicators(
    shape: Callable[[int], Snapshot], act: Callable[[Snapshot], object], few: int, many: int
) -> None:
    assert exponent(lambda size: lines_run(partial(act, shape(size))), few, many) <= MOST_EXPONENT


@pytest.mark.parametrize(("few", "many"), [(2, 16), (16, 128)])
@pytest.mark.parametrize("act", [families, families_beyond_the_limit, text, protobuf])
def test_metrics_grow_as_the_rails(act: Callable[[Snapshot], object], few: int, many: int) -> None:
    def work(rails: int) -> int:
        return lines_run(partial(act, large_snapshot(communicators=4, rails=rails)))

    assert exponent(work, few, many) <= MOST_EXPONENT
