"""Which requests of MPI a program waits for, and since when.

A request that is not complete is no stall while its program computes: it learns that a send is complete when it asks.
So one is held against the limit from when its program waits for it, or asks for it again and again.  A call may wait
for several: where a receive is among them, which of them holds it up is not known, and none is told of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from railscope.probes.loading.maps import Records
from railscope.probes.transfers.functions import MPI_WAIT, OPERATIONS
from railscope.probes.transfers.programs import TransferTables

ASKS_NS: Final = 5_000_000_000
"""A program that has not asked for so long does something else."""
_MOST_OF_A_USER: Final = 256
"""Threads that wait whose requests are looked at: the first that began."""
_MOST_REQUESTS: Final = 4096
"""Of one call."""
_WAIT: Final = OPERATIONS.index(MPI_WAIT)
_AWAITED: Final = frozenset(number for number, one in enumerate(OPERATIONS) if one.awaited)

Requests = Mapping[tuple[int, int], Records]
"""By process and request."""


def waited_for(
    tables: TransferTables, read: Callable[[int, int, int], tuple[int, ...]], now_ns: int
) -> dict[tuple[int, int], int]:
    """By process and request, since when it is waited for, ns of CLOCK_MONOTONIC.

    `read` reads the requests that a thread's call was given: its number, how many, and the bytes of each.

    Raises:
        KernelRefusal: they cannot be read.
    """
    begun = tables.requests["start_ns"] != 0
    requests = {
        (int(key["tgid"]), int(key["request"])): one
        for key, one in zip(tables.request_keys[begun], tables.requests[begun], strict=True)
    }
    found = {
        key: int(one["asked_ns"])
        for key, one in requests.items()
        if one["asked_ns"] and now_ns - int(one["asked_last_ns"]) <= ASKS_NS
    }
    of_user: Counter[int] = Counter()
    waits = np.flatnonzero((tables.threads["start_ns"] != 0) & (tables.threads["function"] == _WAIT))
    for at in waits[np.argsort(tables.threads["start_ns"][waits], kind="stable")].tolist():
        thread, tid = tables.threads[at], int(tables.tids[at])
        of_user[int(thread["uid"])] += 1
        if of_user[int(thread["uid"])] > _MOST_OF_A_USER:
            continue
        tgid, since_ns = int(thread["tgid"]), int(thread["start_ns"])
        several = read(tid, int(thread["waited"]), int(thread["request_bytes"])) if thread["waited"] else ()
        keys = [(tgid, one) for one in several] or list(_chain(requests, tgid, int(thread["request"])))
        keys = [key for key in keys if key in requests]
        if all(int(requests[key]["function"]) in _AWAITED for key in keys):
            for key in keys:
                found[key] = min(since_ns, found.get(key, since_ns))
    return found


def _chain(requests: Requests, tgid: int, first: int) -> Iterator[tuple[int, int]]:
    """What begins with a request: each names the next."""
    for _ in range(_MOST_REQUESTS):
        one = requests.get((tgid, first))
        if one is None:
            return
        yield tgid, first
        first = int(one["next"])
