"""Sockets inside network namespaces, made from outside.

A socket belongs for ever to the network namespace in which it was made, and setns(2) moves a single thread.  So one
process can hold sockets on every host of a fabric without starting anything there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

NAMESPACES_DIRECTORY: Final = Path("/run/netns")
_OWN_NAMESPACE: Final = Path("/proc/thread-self/ns/net")
_CLONE_NEWNET: Final = 0x40000000  # Linux include/uapi/linux/sched.h


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Have the calling thread, and no other, in a network namespace for as long as the block lasts.

    Raises:
        OSError: there is no such namespace, or the caller may not enter it (needs root).
    """
    with _OWN_NAMESPACE.open() as own, (NAMESPACES_DIRECTORY / namespace).open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def tcp_socket(namespace: str) -> socket.socket:
    """A TCP socket over IPv4 that lives in the namespace, neither bound nor connected.

    Raises:
        OSError: there is no such namespace, or the caller may not enter it (needs root).
    """
    with entered(namespace):
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the network namespace: {os.strerror(number)}")
