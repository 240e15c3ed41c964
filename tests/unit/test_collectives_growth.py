"""What a tick and a scrape cost as a host's communicators and processes grow: never more than in proportion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.unit.growth import MOST_EXPONENT, exponent, lines_run
from tests.unit.test_collectives import SECOND_NS, Node

FEW, MANY = 32, 512


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each process that begins to use NCCL has a line in the log."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def crowded(processes: int, communicators: int) -> Node:
    """Processes that each have made so many communicators, and a call on each."""
    node = Node()
    for tgid in range(1, processes + 1):
        node.begin(tgid)
        for number in range(communicators):
            node.kernel.communicator(tgid, tgid * 10_000 + number)
            node.kernel.call(tgid, tgid * 10_000 + number)
    return node


def first_tick(node: Node) -> None:
    node.settle(SECOND_NS)
    node.collectives.pop_unknown_pids()
    node.collectives.forget(0, 2000)
    node.collectives.expected(node.collectives.read())


def scrape(node: Node) -> None:
    node.facts()
    node.collectives.events_lost()


def ends_of_each(node: Node) -> None:
    """What the watch for stalls asks of each communicator that it sees stand still."""
    for facts in node.facts().communicators:
        node.collectives.ended_ranks(facts.identity.comm)


def all_end(node: Node) -> None:
    for tgid in list(node.processes):
        node.end(tgid, 2 * SECOND_NS)
    node.settle(3 * SECOND_NS)
    node.facts()
    node.collectives.forget(4 * SECOND_NS, 0)


def work(shape: Callable[[int], Node], act: Callable[[Node], None], size: int, *, prepare: bool) -> int:
    node = shape(size)
    if prepare:
        first_tick(node)
    return lines_run(lambda: act(node))


def of_one_process(size: int) -> Node:
    return crowded(1, size)


def of_as_many_processes(size: int) -> Node:
    return crowded(size, 1)


@pytest.mark.parametrize("shape", [of_one_process, of_as_many_processes])
def test_the_first_tick_grows_as_the_communicators(shape: Callable[[int], Node]) -> None:
    assert exponent(partial(work, shape, first_tick, prepare=False), FEW, MANY) <= MOST_EXPONENT


@pytest.mark.parametrize("shape", [of_one_process, of_as_many_processes])
@pytest.mark.parametrize("act", [first_tick, scrape, ends_of_each, all_end])
def test_what_comes_later_grows_as_the_communicators(shape: Callable[[int], Node], act: Callable[[Node], None]) -> None:
    assert exponent(partial(work, shape, act, prepare=True), FEW, MANY) <= MOST_EXPONENT
