"""Which requests of MPI a program waits for, and since when.

A request that is not complete is no stall while its program computes: it learns that a send is complete when it asks.
So one is held against the limit from when its program waits for it, or asks for it again and again.  A call may wait
for several: where a receive is among them, which of them holds it up is not known, and none is told of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from railscope.probes.transfers.functions import MPI_WAIT, OPERATIONS
from railscope.probes.transfers.programs import TransferTables

ASKS_NS: Final = 5_000_000_000
"""A program that has not asked for so long does something else."""
_MOST_OF_A_USER: Final = 8192
"""Requests of calls that wait that are looked at, of those calls first that began first: half of the kernel's table, so
all where each is waited for once.  Calls may be given the same ones."""
_A_READ: Final = 32
"""A call whose requests are read from the kernel costs as much as so many."""
_WAIT: Final = OPERATIONS.index(MPI_WAIT)
_AWAITED: Final = frozenset(number for number, one in enumerate(OPERATIONS) if one.awaited)

Requests = Mapping[tuple[int, int], tuple[int, int]]
"""By process and request: its function, and the next one that the same call waits for."""


def waited_for(
    tables: TransferTables, read: Callable[[int, int, int], tuple[int, ...]], now_ns: int
) -> dict[tuple[int, int], int]:
    """By process and request, since when it is waited for, ns of CLOCK_MONOTONIC.

    `read` reads the requests that a thread's call was given: its number, how many, and the bytes of each.

    Raises:
        KernelRefusal: they cannot be read.
    """
    begun = tables.requests["start_ns"] != 0
    numbers = (tables.request_keys[name][begun].tolist() for name in ("tgid", "request"))
    columns = (tables.requests[name][begun].tolist() for name in ("function", "next"))
    requests = dict(zip(zip(*numbers, strict=True), zip(*columns, strict=True), strict=True))
    asks = begun & (tables.requests["asked_ns"] != 0)
    found = {
        (int(key["tgid"]), int(key["request"])): int(one["asked_ns"])
        for key, one in zip(tables.request_keys[asks], tables.requests[asks], strict=True)
        if now_ns - int(one["asked_last_ns"]) <= ASKS_NS
    }
    of_user: Counter[int] = Counter()
    waits = np.flatnonzero((tables.threads["start_ns"] != 0) & (tables.threads["function"] == _WAIT))
    for at in waits[np.argsort(tables.threads["start_ns"][waits], kind="stable")].tolist():
        thread, tid = tables.threads[at], int(tables.tids[at])
        user, left = int(thread["uid"]), _MOST_OF_A_USER - of_user[int(thread["uid"])]
        if left <= 0:
            continue
        tgid, since_ns = int(thread["tgid"]), int(thread["start_ns"])
        several = read(tid, int(thread["waited"]), int(thread["request_bytes"])) if thread["waited"] else ()
        keys = [(tgid, one) for one in several] or _chain(requests, tgid, int(thread["request"]), left)
        of_user[user] += len(keys) + (_A_READ if several else 1)
        if len(keys) > left:
            continue
        keys = [key for key in keys if key in requests]
        if all(requests[key][0] in _AWAITED for key in keys):
            for key in keys:
                found[key] = min(since_ns, found.get(key, since_ns))
    return found


def _chain(requests: Requests, tgid: int, first: int, most: int) -> list[tuple[int, int]]:
    """What begins with a request: each names the next; of more than so many one more."""
    found: dict[tuple[int, int], None] = {}
    while (tgid, first) in requests and (tgid, first) not in found and len(found) <= most:
        found[tgid, first] = None
        first = requests[tgid, first][1]
    return list(found)
