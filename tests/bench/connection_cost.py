"""What reading all TCP connections of a process costs, as the agent does once a second where rails are Ethernet.

The connections are real, on the loopback of this host, both ends in this process.  The floor is the kernel's answer
alone, asked for by the same question and not looked at.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from railscope.probes.clock import SystemClock
from railscope.probes.netdev.netlink import NetlinkSocket
from railscope.probes.netdev.tcp_counters import TcpCounters
from railscope.probes.netdev.tcp_info import NETLINK_SOCK_DIAG, TCP_SOCKETS, make_request
from tests.bench.results import Line, figure, ratios
from tests.bench.target import BenchError, Built

PART: Final = "connections"
_DEVICE: Final = "lo"
_ADDRESS: Final = "127.0.0.1"
_ENDS: Final = (20, 200, 2_000)
_SPARE_FILES: Final = 100


def measure(_built: Built, rounds: int) -> list[Line]:
    """Read each number of connections `rounds` times, and the kernel's answer alone in turn.

    Raises:
        BenchError: the connections cannot be made, or not all were read.
    """
    lines: list[Line] = []
    for ends in _ENDS:
        with _connections(ends), ExitStack() as stack:
            counters = stack.enter_context(closing(TcpCounters(SystemClock(), Path("/proc"))))
            asking = stack.enter_context(closing(NetlinkSocket(protocol=NETLINK_SOCK_DIAG)))
            asked = make_request([socket.inet_aton(_ADDRESS)])
            counters.watch((_DEVICE,), (os.getpid(),))
            counters.read()  # what the first read does once
            read, answer = [], []
            for _ in range(rounds):
                answer.append(_milliseconds(partial(asking.dump, TCP_SOCKETS, asked)))
                read.append(_milliseconds(counters.read))
            _expect(counters, ends)
        lines.append(figure(PART, f"{ends:,} connections read", "ms", read, note="processor time"))
        lines.append(figure(PART, f"{ends:,} connections read / the kernel's answer alone", "×", ratios(read, answer)))
    return lines


def _milliseconds(action: Callable[[], object]) -> float:
    """Processor time of this thread."""
    began_ns = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - began_ns) / 1e6


def _expect(counters: TcpCounters, ends: int) -> None:
    found: Sequence[int] = [one.connections for one in counters.last]
    if found != [ends]:
        raise BenchError(f"{ends} connections are there, and {found} were read")


@contextmanager
def _connections(ends: int) -> Iterator[None]:
    """So many ends of connections in this process.

    Raises:
        BenchError: they cannot be made.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, ends + _SPARE_FILES), hard))
            opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            listener = opened.enter_context(socket.create_server((_ADDRESS, 0)))
            for _ in range(ends // 2):
                opened.enter_context(socket.create_connection(listener.getsockname()))
                opened.enter_context(listener.accept()[0])
        except (OSError, ValueError) as error:
            raise BenchError(f"{ends} ends of connections cannot be made: {error}") from error
        yield
