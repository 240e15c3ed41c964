"""What a look for stalls costs as a host's communicators and processes grow: never more than in proportion.

One user's process may have thousands of communicators.  Each shape here is one that took time in proportion to their
square or cube: equal calls with one of two processes stopped, one that has not made the last call, bytes that lie
unread, operations in flight, a process that has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.stalls.evidence import ProcessFacts
from railscope.agent.node.stalls.watchdog import EVALUATION_NS
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.abi import Op
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.growth import MOST_EXPONENT, exponent, lines_run
from tests.unit.stall_world import START_NS, Rank, World

STOPPED = ProcessFacts("stopped", 0, 0.0, 0.0, 0, None)
FIRST_PID = 4711
LOOKS = 10


class Crowd(World):
    """Processes that all have the same communicators; what it is asked it answers at once, however many there are."""

    def __init__(self, communicators: int, processes: int, *, seen: bool = False) -> None:
        super().__init__(seen=seen, ranks=0, nranks=max(processes, 2))
        self.ranks = [
            Rank(self, 1 + comm * processes + number, number, FIRST_PID + number, comm_hash=0x1000 + comm)
            for comm in range(communicators)
            for number in range(processes)
        ]
        self._by_instance = {rank.instance: rank for rank in self.ranks}
        self._first = {rank.pid: rank for rank in reversed(self.ranks)}
        self._made = {
            rank.instance: Communicator(rank.instance, rank.pid, START_NS, rank.comm_hash, rank.rank, self.nranks)
            for rank in self.ranks
        }
        self.clock.now_ns += 1_000_000_000
        for number, rank in enumerate(self.ranks):
            rank.sequence, rank.last_ns = 2, self.clock.now_ns + 1000 * number

    def of_process(self, number: int) -> list[Rank]:
        return [rank for rank in self.ranks if rank.pid == FIRST_PID + number]

    def step(self, looks: int = 1) -> None:
        for _ in range(looks):
            self.clock.now_ns += EVALUATION_NS
            self.watch.evaluate()

    def _communicator(self, instance: int) -> Communicator | None:
        return self._made.get(instance)

    def _process(self, pid: int) -> ObservedProcess | None:
        if self._first[pid].gone:
            return None
        return ObservedProcess(ProcessIdentity(pid, 1), None, JobFacts(), "", "2.27.3")

    def _completed(self, instance: int) -> int | None:
        rank = self._by_instance[instance]
        return rank.sequence - (rank.posted is not None) if self.seen else None

    def _of(self, process: ObservedProcess) -> Rank:
        return self._first[process.identity.pid]

    def written_bytes(self, process: ObservedProcess, *, closely: bool) -> int | None:
        del closely
        return self._of(process).written_bytes


def idle(size: int) -> Crowd:
    crowd = Crowd(size, 1)
    crowd.step(8)
    return crowd


def one_of_two_stopped(size: int, *, seen: bool = False) -> Crowd:
    crowd = Crowd(size, 2, seen=seen)
    crowd.step(8)
    crowd.of_process(1)[0].process = STOPPED
    return crowd


def stopped_where_completion_is_seen(size: int) -> Crowd:
    return one_of_two_stopped(size, seen=True)


def stopped_and_a_call_behind(size: int) -> Crowd:
    crowd = Crowd(size, 2)
    for rank in crowd.of_process(1):
        rank.sequence = 1
    crowd.step(8)
    crowd.of_process(1)[0].process = STOPPED
    return crowd


def in_flight(size: int) -> Crowd:
    crowd = Crowd(size, 2, seen=True)
    for rank in crowd.ranks:
        rank.posted = rank.last_ns, Op.AllReduce, 4096
    crowd.step(8)
    return crowd


def unread(size: int) -> Crowd:
    crowd = Crowd(size, 2)
    for rank in crowd.ranks:
        rank.rails = (replace(rank.rails[0], unread_bytes=100),)
    crowd.step(8)
    return crowd


def one_of_two_ended(size: int) -> Crowd:
    crowd = Crowd(size, 2)
    crowd.step(8)
    crowd.watch.processes_gone({FIRST_PID + 1: 9})
    for rank in crowd.of_process(1):
        rank.gone = True
    return crowd


def processes_of_one_communicator(size: int) -> Crowd:
    crowd = Crowd(1, size)
    crowd.ranks[1].sequence = 1
    crowd.step(8)
    crowd.ranks[1].process = STOPPED
    return crowd


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of stalls begin, each with a line in the log."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def work_of_a_look(shape: Callable[[int], Crowd], size: int) -> int:
    """That of the dearest one."""
    crowd = shape(size)
    return max(lines_run(crowd.step) for _ in range(LOOKS))


@pytest.mark.parametrize(
    "shape",
    [
        idle,
        one_of_two_stopped,
        stopped_where_completion_is_seen,
        stopped_and_a_call_behind,
        in_flight,
        unread,
        one_of_two_ended,
    ],
)
def test_a_look_grows_as_the_communicators(shape: Callable[[int], Crowd]) -> None:
    assert exponent(partial(work_of_a_look, shape), 24, 192) <= MOST_EXPONENT


def test_a_look_grows_as_the_processes() -> None:
    assert exponent(partial(work_of_a_look, processes_of_one_communicator), 24, 192) <= MOST_EXPONENT


@pytest.mark.parametrize(("few", "many"), [(16, 128), (16, 512)])
def test_the_end_of_all_processes_grows_as_there_are_of_them(few: int, many: int) -> None:
    """For each of them the state of all was read: 512 ranks of 8 communicators each took 4 s to end.

    Ranks of a crowd are looked at in turns; of those whose turn is not now a fact is made, once for each.
    """

    def work(processes: int) -> int:
        crowd = Crowd(2, processes, seen=True)
        crowd.step(8)
        return lines_run(lambda: crowd.watch.processes_gone({FIRST_PID + one: 9 for one in range(processes)}))

    assert exponent(work, few, many) <= MOST_EXPONENT


def test_a_look_at_as_many_communicators_as_the_kernel_keeps_takes_less_than_a_second() -> None:
    crowd, least = idle(16_384), float("inf")
    for _ in range(LOOKS):
        began = time.process_time()
        crowd.step()
        least = min(least, time.process_time() - began)
    assert least < 1.0
