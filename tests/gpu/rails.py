"""Where the two ranks run: namespace hosts with veth rails, or one host's loopback where the kernel has neither.

NCCL refuses two ranks on one GPU of one host.  Each rank has a NCCL_HOSTID of its own, so that NCCL takes them for two
hosts, and their traffic goes over its socket transport.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from railscope.testbed.hosts import Fabric, Host, TestbedError

RAILS: Final = 2


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """Two hosts, one for each rank."""

    hosts: tuple[Host, Host]
    port: int
    """A TCP port that is free on the first host."""
    made_of: str
    """"veth" or "loopback: " and why."""

    @property
    def veth(self) -> bool:
        return self.made_of == "veth"


class _Loopback(Host):
    """This machine itself."""

    def command(self, *arguments: str) -> list[str]:
        return list(arguments)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts until the end of the block; the rails are veth pairs if the kernel makes them."""
    with ExitStack() as stack:
        try:
            fabric = stack.enter_context(Fabric(hosts=2, rails=RAILS))
        except (TestbedError, OSError) as error:
            pair = (_Loopback(0, "", ("lo",), ("127.0.0.1",)), _Loopback(1, "", ("lo",), ("127.0.0.1",)))
            yield TwoHosts(pair, _free_port(), f"loopback: {error}")
        else:
            yield TwoHosts((fabric.hosts[0], fabric.hosts[1]), 29_500, "veth")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
