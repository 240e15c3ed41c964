"""What a tick and a scrape cost as a host's communicators and processes grow: never more than in proportion."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from math import log
from types import FrameType
from typing import Any

import pytest

from tests.unit.test_collectives import SECOND_NS, Node

MOST_EXPONENT = 1.1
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


def work(node: Node, act: Callable[[Node], None]) -> int:
    """Lines of Python that are run: unlike time, the same on a machine that is busy otherwise."""
    lines = 0

    def count(_frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any]:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act(node)
    finally:
        sys.settrace(before)
    return lines


def exponent(shape: Callable[[int], Node], act: Callable[[Node], None], *, prepare: bool) -> float:
    spent = []
    for size in (FEW, MANY):
        node = shape(size)
        if prepare:
            first_tick(node)
        spent.append(work(node, act))
    return log(spent[1] / spent[0], MANY / FEW)


def of_one_process(size: int) -> Node:
    return crowded(1, size)


def of_as_many_processes(size: int) -> Node:
    return crowded(size, 1)


@pytest.mark.parametrize("shape", [of_one_process, of_as_many_processes])
def test_the_first_tick_grows_as_the_communicators(shape: Callable[[int], Node]) -> None:
    assert exponent(shape, first_tick, prepare=False) <= MOST_EXPONENT


@pytest.mark.parametrize("shape", [of_one_process, of_as_many_processes])
@pytest.mark.parametrize("act", [first_tick, scrape, ends_of_each, all_end])
def test_what_comes_later_grows_as_the_communicators(shape: Callable[[int], Node], act: Callable[[Node], None]) -> None:
    assert exponent(shape, act, prepare=True) <= MOST_EXPONENT
