"""One of two ranks of MPI that make calls which do not block, each kind of wait among them.

Usage: mpi_ends.py complete|hang FOLDER.  Each writes a file `ready` with its rank's number and its pid into the folder,
waits there for `go` and, at last, for `end`.  `complete` writes what each rank did, by operation: how often, and the
payload.  `hang`: both write `met` with their numbers; when there is `send`, rank 0 sends what rank 1, which is stopped
by then, does not take, and waits for it when there is `wait`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found]

from tests.transfers.mooncake_ends import get, put

SIZES = (8, 8, 8, 4096, 100_000, 1 << 20)
LONG = 300
"""Requests of one wait: more than are noted at once."""


class Rank:
    """Makes calls, and counts what it did."""

    def __init__(self) -> None:
        self.world = MPI.COMM_WORLD
        self.rank = self.world.rank
        self.operations: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()

    def did(self, op: str, payload: int) -> None:
        self.operations[op] += 1
        self.payload[op] += payload

    def exchange(self, sizes: tuple[int, ...] = SIZES) -> list[Any]:
        """Requests of what is sent to the other rank, and of what is received from it."""
        other, requests = 1 - self.rank, []
        for tag, size in enumerate(sizes):
            requests.append(self.world.Irecv([np.zeros(size, np.uint8), MPI.BYTE], other, tag))
            self.did("Recv", 0)
        for tag, size in enumerate(sizes):
            requests.append(self.world.Isend([np.ones(size, np.uint8), MPI.BYTE], other, tag))
            self.did("Send", size)
        return requests

    def complete(self) -> None:
        for finish in (wait_all, wait_each, wait_any, wait_some, test_each, test_all, test_any, test_some):
            finish(self.exchange())
        wait_all(self.exchange((16,) * LONG))
        self.persistent()
        self.collectives()
        receive = self.world.Irecv([np.zeros(8, np.uint8), MPI.BYTE], 1 - self.rank, 99)
        request = self.world.Issend([np.zeros(8, np.uint8), MPI.BYTE], 1 - self.rank, 99)
        self.did("Recv", 0)
        self.did("Send", 8)
        request.Free()
        receive.Wait()

    def persistent(self) -> None:
        other, elements = 1 - self.rank, 1000
        receive = self.world.Recv_init([np.zeros(elements), MPI.DOUBLE], other, 7)
        send = self.world.Ssend_init([np.zeros(elements), MPI.DOUBLE], other, 7)
        for turn in range(6):
            if turn % 2:
                receive.Start()
                send.Start()
                send.Wait()
                receive.Wait()
            else:
                MPI.Prequest.Startall([receive, send])
                MPI.Request.Waitall([receive, send])
            self.did("Recv", 0)
            self.did("Send", 8 * elements)
        receive.Free()
        send.Free()

    def collectives(self) -> None:
        world, elements = self.world, 5000
        give, take = np.ones(elements), np.zeros(elements)
        both = np.zeros(2 * elements)
        wait_all([world.Iallreduce(give, take), world.Ibarrier()])
        assert (take == 2).all()
        self.did("AllReduce", 8 * elements)
        self.did("Barrier", 0)
        world.Ibcast(take, 0).Wait()
        self.did("Broadcast", 8 * elements)
        test_each([world.Iallgather(give, both)])
        self.did("AllGather", 8 * elements)
        world.Ireduce(give, take, MPI.SUM, 0).Wait()
        self.did("Reduce", 8 * elements)
        world.Ialltoall(both, np.zeros(2 * elements)).Wait()
        self.did("AllToAllV", 0)

    def hang(self, folder: Path) -> None:
        self.world.Barrier()
        put(folder / f"met{self.rank}", b"")
        get(folder / "send")
        if self.rank == 0:
            request = self.world.Issend([np.zeros(1 << 22, np.uint8), MPI.BYTE], 1, 5)
            get(folder / "wait")
            request.Wait()
        else:
            self.world.Recv([np.zeros(1 << 22, np.uint8), MPI.BYTE], 0, 5)


def wait_all(requests: list[Any]) -> None:
    MPI.Request.Waitall(requests)


def wait_each(requests: list[Any]) -> None:
    for request in requests:
        request.Wait()


def wait_any(requests: list[Any]) -> None:
    while MPI.Request.Waitany(requests) != MPI.UNDEFINED:
        pass


def wait_some(requests: list[Any]) -> None:
    while MPI.Request.Waitsome(requests) is not None:
        pass


def polling(asked: Callable[[], bool]) -> None:
    while not asked():
        time.sleep(0.001)


def test_each(requests: list[Any]) -> None:
    for request in requests:
        polling(request.Test)


def test_all(requests: list[Any]) -> None:
    polling(lambda: bool(MPI.Request.Testall(requests)))


def test_any(requests: list[Any]) -> None:
    polling(lambda: MPI.Request.Testany(requests) == (MPI.UNDEFINED, True))


def test_some(requests: list[Any]) -> None:
    polling(lambda: MPI.Request.Testsome(requests) is None)


def main(what: str, folder: Path) -> None:
    rank = Rank()
    put(folder / f"ready{rank.rank}", str(os.getpid()).encode())
    get(folder / "go")
    if what == "complete":
        rank.complete()
        put(folder / f"did{rank.rank}", json.dumps([rank.operations, rank.payload]).encode())
    else:
        rank.hang(folder)
    get(folder / "end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
