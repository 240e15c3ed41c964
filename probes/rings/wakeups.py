"""Wakes the reader if a ring fills suddenly.

A ring that is read by polling always has something in it, and so is always readable.  What matters is that a program
has woken its reader (probes/bpf/call_slots.h, probes/bpf/completion.h): an edge, of which an epoll instance of its own
tells once.  That instance is readable from then on until it is cleared, as any other descriptor that a loop waits on.
"""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import Protocol


class WakingRing(Protocol):
    """A ring whose reader can be woken by the programs that write into it."""

    @property
    def fd(self) -> int: ...


class RingWakeups:
    """Readable after a program has woken the reader of one of these rings, and once in the beginning."""

    def __init__(self, rings: Iterable[WakingRing]) -> None:
        """The rings stay the caller's, and may be closed first.

        Raises:
            OSError: the kernel gives no descriptor.
        """
        self._epoll = select.epoll()
        try:
            for ring in rings:
                self._epoll.register(ring.fd, select.EPOLLIN | select.EPOLLET)
        except BaseException:
            self._epoll.close()
            raise

    def fileno(self) -> int:
        return self._epoll.fileno()

    def clear(self) -> bool:
        """Drop pending wakeups; returns whether there were any."""
        return bool(self._epoll.poll(0))

    def close(self) -> None:
        self._epoll.close()
