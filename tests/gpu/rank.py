"""One of two ranks, told by JSON lines what to do; a reply follows each.

    python3 -P -m tests.gpu.rank RANK DESCRIPTOR torch|gloo|FOLDER-OF-THE-DOUBLE:LIBNCCL

DESCRIPTOR is an inherited socket.  Every method of `Rank` is a command; what it raises is the reply's `error`, and the
rank goes on.  A loop (`loop`) is steered through a file that both ranks and who asked have mapped (tests/gpu/ranks.py),
because nobody reads the socket meanwhile.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.gpu.backend import OPERATIONS, Backend, Call

MIXED_TYPES: Final = ("f32", "f16", "bf16")
GROUP: Final = 8
SYNCHRONIZE_EVERY: Final = 16
LIMIT, PROGRESS, WORDS_BYTES = 0, 8, 64
"""Places in a loop's file: how many calls the ranks may make, and how many each has made; behind those, what CPU time
each took for its calls, ns."""
_RANKS: Final = 2
FOREVER: Final = (1 << 63) - 1
END: Final = (1 << 63) - 2
"""As a limit: the loop ends where it stands."""
_IDLE_SECONDS: Final = 0.0005


def mixed_calls(seed: int, number: int) -> list[list[Call]]:
    """Collectives of all kinds, the same on both ranks for one seed, some of them in groups; `number` of them."""
    chosen = random.Random(seed)
    groups: list[list[Call]] = []
    made = 0
    while made < number:
        size = min(GROUP, number - made) if chosen.random() < 0.5 else 1
        operation = "AllReduce" if size > 1 else chosen.choice(OPERATIONS)
        data_type = chosen.choice(MIXED_TYPES)
        # Few sizes: each has buffers of its own.
        groups.append([Call(operation, 1 << chosen.randrange(14), data_type) for _ in range(size)])
        made += size
    return groups


class Rank:
    """The commands."""

    def __init__(self, rank: int, backend: Backend) -> None:
        self._rank = rank
        self._backend = backend
        self._calls: Counter[str] = Counter()
        self._payload: Counter[str] = Counter()

    def join(self, folder: str, address: str, port: int) -> None:
        self._backend.join(folder, address, port)

    def identity(self) -> dict[str, object]:
        return asdict(self._backend.identity())

    def mixed(self, seed: int, number: int) -> None:
        """Make `number` collectives of all kinds."""
        for index, group in enumerate(mixed_calls(seed, number)):
            self._enqueue(group)
            if index % SYNCHRONIZE_EVERY == 0:
                self._backend.synchronize()
        self._backend.synchronize()

    def tally(self) -> dict[str, list[int]]:
        """By operation: calls and payload, as NCCL's API was called."""
        return {name: [self._calls[name], self._payload[name]] for name in self._calls}

    def timed(self, operation: str, payload_bytes: int, times: int) -> list[float]:
        """How long each of so many calls took by CUDA's events, ms."""
        call = Call(operation, payload_bytes // 4, "f32")
        took = []
        for _ in range(times):
            self._count(call)
            took.append(self._backend.timed(call))
        return took

    def graph(self, payload_bytes: int, replays: int) -> list[str]:
        """Capture an AllReduce and an AllGather, and replay them; the operations that were captured."""
        calls = [Call("AllReduce", payload_bytes // 4, "f32"), Call("AllGather", payload_bytes // 4, "f32")]
        for call in calls:  # what a first call sets up cannot be captured
            self._enqueue([call])
        self._backend.synchronize()
        self._backend.capture(calls)
        for call in calls:
            self._count(call)
        for _ in range(replays):
            self._backend.replay()
        self._backend.synchronize()
        return [call.operation for call in calls]

    def loop(self, file: str, payload_bytes: int) -> int:
        """AllReduce back to back as far as the file allows, until it says END; how many."""
        call = Call("AllReduce", max(1, payload_bytes // 4), "f32")
        with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), WORDS_BYTES) as words:
            steps = memoryview(words).cast("Q")
            mine = PROGRESS // 8 + self._rank
            made = steps[mine]
            while (limit := steps[LIMIT]) != END:
                if made >= limit:
                    time.sleep(_IDLE_SECONDS)
                    continue
                began_ns = time.thread_time_ns()
                self._backend.enqueue([call])
                steps[mine + _RANKS] += time.thread_time_ns() - began_ns
                made += 1
                if made % SYNCHRONIZE_EVERY == 0 or made == limit:
                    self._backend.synchronize()
                steps[mine] = made
            steps.release()
        self._backend.synchronize()
        return int(made)

    def idle_on_host(self, rank: int, seconds: float) -> None:
        """One rank computes on its host and never sleeps; then both go on to an AllReduce."""
        ends = time.monotonic() + (seconds if rank == self._rank else 0)
        while time.monotonic() < ends:
            pass
        self._one()

    def occupy(self, rank: int, seconds: float) -> None:
        """One rank's GPU runs something else on the stream of its collectives."""
        if rank == self._rank:
            self._backend.occupy(seconds)
        self._one()

    def abort(self) -> None:
        self._backend.abort()

    def peek(self, rank: int, address: int, size_bytes: int) -> str:
        """One rank's memory, read by itself, as hexadecimal digits."""
        return ctypes.string_at(address, size_bytes).hex() if rank == self._rank else ""

    def pinned(self, content: str) -> int:
        return self._backend.pinned(bytes.fromhex(content))

    def ask(self, times: int) -> dict[str, int]:
        self._calls["AllReduce"] += times
        self._payload["AllReduce"] += times * 1024
        return self._backend.ask(times)

    def build(self, kind: str) -> int:
        return self._backend.build(kind)

    def train(self, steps: int) -> list[float]:
        return self._backend.train(steps)

    def _one(self) -> None:
        self._enqueue([Call("AllReduce", 4096, "f32")])
        self._backend.synchronize()

    def _enqueue(self, calls: list[Call]) -> None:
        self._backend.enqueue(calls)
        for call in calls:
            self._count(call)

    def _count(self, call: Call) -> None:
        for name in ("Send", "Recv") if call.operation == "SendRecv" else (call.operation,):
            self._calls[name] += 1
            self._payload[name] += call.payload_bytes


def serve(rank: Rank, channel: socket.socket) -> None:
    """Carry out commands until the other end closes."""
    with channel.makefile("rw") as lines:
        for line in lines:
            command = json.loads(line)
            reply: dict[str, object] = {"told": command.pop("told")}
            try:
                reply["value"] = getattr(rank, command.pop("do"))(**command)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
                reply["error"] = f"{type(error).__name__}: {error}"[:2000]
            lines.write(json.dumps(reply) + "\n")
            lines.flush()


def backend_of(rank: int, name: str) -> Backend:
    """Only what is asked for is imported: the double's machines have no PyTorch."""
    if name in ("torch", "gloo"):
        from tests.gpu.backend_torch import TorchBackend

        return TorchBackend(rank, "cuda" if name == "torch" else "cpu")
    from tests.gpu.backend_double import DoubleBackend

    double, _, nccl = name.partition(":")
    return DoubleBackend(rank, Path(double), Path(nccl))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # so that who ends a check that hangs learns where it does
    number = int(sys.argv[1])
    with socket.socket(fileno=int(sys.argv[2])) as end:
        serve(Rank(number, backend_of(number, sys.argv[3])), end)
    # Not by way of destructors: those of a communicator whose peer has gone may wait for it.
    sys.stdout.flush()
    os._exit(0)
