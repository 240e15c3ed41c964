"""What it takes to hear who is at the other end of each cable (LLDP), and to read the queue pairs of RDMA devices.

Frames come from the switch's ends of a namespace host's rails.  Queue pairs are simulated: messages as the kernel
writes them, so that what kernel and devices take to answer is not in it.  Times are the reading thread's own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from railscope.agent.node.fabric.neighbours import Neighbours
from railscope.agent.node.fabric.queue_pairs import Kernel, QueuePairs
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.lldp import ETHERTYPE, NEAREST_BRIDGE
from railscope.probes.processes.namespaces import run_inside
from railscope.probes.rdma.queue_pairs import QueuePairReading, parse_queue_pairs
from railscope.testbed.hosts import Fabric
from tests.bench.results import Line, figure
from tests.bench.sampler_cost import namespace_of
from tests.bench.target import BenchError, Built
from tests.unit.test_lldp import frame
from tests.unit.test_rdma_queue_pairs import CONNECTED, queue_pairs

PART: Final = "fabric"
_RAILS: Final = 8
_PAIRS, _PROCESSES = 4096, 64
_IN_A_MESSAGE: Final = 64
_SOURCE: Final = bytes.fromhex("020000000001")


def measure(_built: Built, rounds: int) -> list[Line]:
    """Hear all cables and read all queue pairs, `rounds` times.

    Raises:
        BenchError: a frame does not arrive.
    """
    return [*_cables(rounds), *_queue_pairs(rounds)]


def _cables(rounds: int) -> list[Line]:
    heard, silent = [], []
    with ExitStack() as stack:
        fabric = stack.enter_context(Fabric(hosts=1, rails=_RAILS))
        host = fabric.hosts[0]
        ports = [(str(rail), device) for rail, device in enumerate(host.rails)]
        neighbours = Neighbours(SystemClock())
        stack.callback(neighbours.close)

        def senders() -> list[socket.socket]:
            found = []
            for rail in range(_RAILS):
                one = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
                one.bind((fabric.port(0, rail), 0))
                found.append(one)
            return found

        cables = run_inside(namespace_of(fabric.switch), senders)
        message = NEAREST_BRIDGE + _SOURCE + ETHERTYPE.to_bytes(2, "big") + frame()

        def listen() -> float:
            return run_inside(namespace_of(host.namespace), lambda: _microseconds(lambda: neighbours.update(ports)))

        listen()
        for _ in range(rounds):
            for cable in cables:
                cable.send(message)
            heard.append(listen())
            silent.append(listen())
        if len(neighbours.facts) != _RAILS:
            raise BenchError(f"{len(neighbours.facts)} of {_RAILS} switches were heard")
    return [
        figure(PART, f"hearing {_RAILS} cables, with a frame each", "µs", heard, note="of an LLDP frame in 30 s"),
        figure(PART, f"hearing {_RAILS} cables, silent", "µs", silent),
    ]


def _queue_pairs(rounds: int) -> list[Line]:
    pairs = [replace(CONNECTED, number=number, thread=1 + number % _PROCESSES) for number in range(1, _PAIRS + 1)]
    messages = [
        message
        for at in range(0, _PAIRS, _IN_A_MESSAGE)
        for message in queue_pairs(*pairs[at : at + _IN_A_MESSAGE])[:1]
    ]
    end = queue_pairs()[-1:]

    def read() -> QueuePairReading:
        return QueuePairReading(tuple(parse_queue_pairs([*messages, *end], "mlx5_0", {})), ())

    watch = QueuePairs(SystemClock(), Kernel(read, lambda thread: thread))
    taken = [_microseconds(watch.read) / 1000 for _ in range(rounds)]
    if len(watch.read().queue_pairs) != _PAIRS:
        raise BenchError("not all queue pairs were read")
    return [
        figure(PART, f"{_PAIRS:,} queue pairs of {_PROCESSES} processes, simulated", "ms", taken, note="once in 30 s")
    ]


def _microseconds(what: Callable[[], object]) -> float:
    before = time.thread_time_ns()
    what()
    return (time.thread_time_ns() - before) / 1000
