"""Calls under way that make, end or connect communicators: what the programs wrote at entry and have not taken out.

A thread has one such call at most, the outermost: what it calls in turn is part of it (probes/bpf/lifecycle.h).
"""

from __future__ import annotations

from collections.abc import Iterable

from railscope.probes.loading.maps import Records
from railscope.probes.nccl.programs.shared import SharedMap


class HostCallTable:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, calls: SharedMap) -> None:
        """`calls`: the map `host_calls`."""
        self._calls = calls

    def read(self) -> tuple[Records, Records]:
        """Thread numbers, and what each is in (dtype HOST_CALL).

        Raises:
            KernelRefusal: the map cannot be read.
        """
        return self._calls.read()

    def drop(self, ended: Iterable[tuple[int, int]]) -> None:
        """Take out what threads left that have ended inside their calls: thread numbers, and `start_ns` of their calls.

        Raises:
            KernelRefusal: the map cannot be changed.
        """
        for tid, start_ns in ended:
            key = tid.to_bytes(4, "little")
            found = self._calls.lookup(key)
            # Another thread may have the number by now.
            if found is not None and found["start_ns"][0] == start_ns:
                self._calls.delete(key)
