"""What a rank needs of whatever runs its collectives: PyTorch on a GPU, or the C library on the CUDA double."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

TYPE_BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "u8": 1}
"""Data types that are used, with the bytes of an element."""
OPERATIONS: Final = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AllToAll", "SendRecv")
"""NCCL's names; SendRecv is a Send to the other rank and a Recv from it, in one group."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as its API counts."""

    operation: str
    """Of `OPERATIONS`."""
    count: int
    """Elements: all of them for AllReduce, Broadcast and Reduce, those of one rank for the others."""
    data_type: str
    """Of `TYPE_BYTES`."""

    @property
    def payload_bytes(self) -> int:
        """Count times the size of the data type, as NCCL is given it."""
        return self.count * TYPE_BYTES[self.data_type]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank knows of itself."""

    nccl_version: str
    """Such as "2.28.9"."""
    communicator: int
    """Address of its `struct ncclComm`; 0: it cannot tell."""


class Backend(Protocol):
    """Collectives of one rank of two, on one stream."""

    def join(self, folder: str, address: str, port: int) -> None:
        """Make the communicator, together with the other rank."""

    def identity(self) -> Identity:
        """What this rank knows of itself."""

    def enqueue(self, calls: Sequence[Call]) -> None:
        """Enqueue the calls in order: several as one group, if it can group them."""

    def synchronize(self) -> None:
        """Wait for all that is enqueued."""

    def timed(self, call: Call) -> float:
        """Run one call; how long it took between two events around it on its stream, ms."""

    def capture(self, calls: Sequence[Call]) -> None:
        """Capture the calls in a graph."""

    def replay(self) -> None:
        """Enqueue the captured graph."""

    def occupy(self, seconds: float) -> None:
        """Let the GPU run something else on the collectives' stream for so long."""

    def abort(self) -> None:
        """Abort the communicator while an operation is under way that the other rank never joins."""

    def pinned(self, content: bytes) -> int:
        """The address of memory of the host that CUDA allocated, with this content; it is kept."""

    def ask(self, times: int) -> dict[str, int]:
        """Ask CUDA so often what is complete; how often each function was called, by the name of the driver's."""

    def build(self, kind: str) -> int:
        """Build a model to train: `ddp`, `fsdp` or `tp`; bytes of its parameters.

        Raises:
            NotImplementedError: this backend trains none.
        """

    def train(self, steps: int) -> list[float]:
        """Seconds of each step, each to its end on the GPU."""
