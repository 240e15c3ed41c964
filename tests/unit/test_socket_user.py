"""Which user is at the other end of a connection over the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from railscope.probes.netdev.socket_user import find_peer_user

_CONNECT = """
import os, socket, sys
"".encode("idna")  # while Python's own files may be read
os.setuid(int(sys.argv[3]))
client = socket.create_connection((sys.argv[1], int(sys.argv[2])))
sys.stdin.read()
"""
_NOBODY = 65534


@contextmanager
def listening(host: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as listener:
        listener.settimeout(10)
        yield listener


@pytest.mark.parametrize(("listen", "connect"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_the_user_of_a_client_on_this_host_is_found_also_through_a_socket_of_both_families(
    listen: str, connect: str
) -> None:
    other = _NOBODY if os.geteuid() == 0 else os.geteuid()
    with listening(listen) as listener, ExitStack() as ending:
        port = listener.getsockname()[1]
        ending.enter_context(socket.create_connection((connect, port)))
        ours = ending.enter_context(closing(listener.accept()[0]))
        assert find_peer_user(ours.fileno()) == os.geteuid()
        client = subprocess.Popen(
            [sys.executable, "-S", "-c", _CONNECT, connect, str(port), str(other)], stdin=subprocess.PIPE
        )
        ending.enter_context(client)
        theirs = ending.enter_context(closing(listener.accept()[0]))
        assert find_peer_user(theirs.fileno()) == other


def test_of_a_socket_without_another_end_nothing_is_known() -> None:
    with listening("127.0.0.1") as listener:
        assert find_peer_user(listener.fileno()) is None
    one, other = socket.socketpair()
    with one, other:
        assert find_peer_user(one.fileno()) is None
