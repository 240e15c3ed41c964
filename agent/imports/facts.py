"""What every importer produces: calls, operations, kernels, ends of communicators, and counts of what it skipped.

Rows that there may be millions of are named tuples, since a batch of them is turned into columns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

SHOWN_PROBLEMS: Final = 20
MOST_RANKS: Final = 1_000_000
"""Of a communicator: more cannot be, and analyses take memory for each of them."""
FORMATS: Final = (
    "nccl-log",
    "kineto",
    "chakra",
    "torch-flight-recorder",
    "nccl-inspector",
    "nccl-profiler",
    "nccl-ras",
    "deepspeed",
    "nsys",
    "rocpd",
    "rocprofv3",
    "railscope",
)
"""By the names that users give them."""


class ImportFailure(Exception):
    """Nothing can be imported; one line that names the file and says what to do."""


class ImportedCall(NamedTuple):
    """One call of NCCL's API: a row of `calls`, with the names of its columns.  None: not told."""

    time_ns: int
    instance: int
    op: str
    payload_bytes: int | None
    """With NCCL's meaning of count: what one rank sends in an AllGather, what it receives in a ReduceScatter, and
    what goes to one peer in an AllToAll."""
    data_type: str | None = None
    tid: int | None = None
    stream: int | None = None
    peer: int | None = None
    sequence: int | None = None
    gpu_begin_ns: int | None = None


class ImportedOperation(NamedTuple):
    """One operation with its times: a row of `operations`.  None: not told."""

    instance: int
    begin_ns: int
    end_ns: int
    op: str | None
    source: str
    payload_bytes: int | None = None
    data_type: str | None = None
    algorithm: str | None = None
    protocol: str | None = None
    channels: int | None = None
    peer: int | None = None
    sequence: int | None = None
    stream: int | None = None


class ImportedKernel(NamedTuple):
    """One kernel or copy that is no communication: a row of `compute`."""

    pid: int | None
    stream: int | None
    begin_ns: int
    end_ns: int
    name: str
    gpu: str | None = None
    copies: bool | None = None
    suspected: bool | None = None


class ImportedConnection(NamedTuple):
    """A connection of a communicator's end over the network: a row of `connections`."""

    instance: int
    peer: int
    channel: int
    send: bool
    network: str
    net_device: int


@dataclass(frozen=True, slots=True)
class ImportedEnd:
    """One rank's end of one communicator: a row of `communicators`; what is not known is None.

    It holds no RankIdentity: its fields are the columns, with `group_name`, which no agent sees, and numbers for text.
    """

    instance: int
    comm: str | None
    """None: not known."""
    rank: int | None
    nranks: int | None
    pid: int | None = None
    gpu: str | None = None
    world_rank: int | None = None
    group_name: str | None = None
    nccl_version: str | None = None
    attributed: bool | None = None
    """False: no communicator, but the operations of a process whose communicators are not known."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a file that made no sense, and was left out."""

    file: str
    line: int
    """Number of the line, or of the event or message where the file has no lines; 0: the whole file."""
    reason: str
    entry: int = 0
    """Number of the entry, where several may stand on one line; 0: they do not."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: entry {self.entry}: {self.reason}" if self.entry else f"{place}: {self.reason}"


class Problems:
    """Counts what was left out and keeps the first few; notes are kept once each."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[Problem] = []
        self.notes: list[str] = []

    def count_skipped(self, file: str, line: int, reason: str, entry: int = 0) -> None:
        """Count one line, event or message that is left out; `entry` is its number where lines do not tell it apart."""
        self.count += 1
        if len(self.first) < SHOWN_PROBLEMS:
            self.first.append(Problem(file, line, printable(reason), entry))

    def add(self, others: Problems) -> None:
        """Add what was found later."""
        self.count += others.count
        self.first += others.first[: SHOWN_PROBLEMS - len(self.first)]
        for note in others.notes:
            self.add_note(note)

    def add_note(self, text: str) -> None:
        """Something that who reads the result should know."""
        if text not in self.notes:
            self.notes.append(text)


def printable(text: str, most: int = 160) -> str:
    """Text of an imported file, which others wrote, fit for a terminal: without control characters, and not endless."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(letter if letter.isprintable() else " " for letter in cut)
