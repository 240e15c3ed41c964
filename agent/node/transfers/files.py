"""What a file with a transfer library in it holds, and which requests are complete: asked of inspection processes.

Sources of what lies in processes' memory: ucp_request.h of UCX; transport.h of Mooncake 0.3 (BatchDesc, TransferTask).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from railscope.agent.node.inspection.questions import Found, Memory, Refused
from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.libraries.elf import Elf, ElfError
from railscope.probes.libraries.files import FileStamp, LibraryKey, library_key, on_local_storage, place_of
from railscope.probes.loading.links import ProbePoint
from railscope.probes.processes.memory import read_memory
from railscope.probes.processes.processes import MappedFileError, Mapping, open_mapped_file
from railscope.probes.transfers.functions import TransferPoints, transfer_points

_UCX_COMPLETED: Final = 1
"""UCP_REQUEST_FLAG_COMPLETED (ucp_request.h)."""


@dataclass(frozen=True, slots=True)
class TransferFile:
    """A file with such libraries in it; its place goes with it."""

    path: str
    key: LibraryKey
    local: bool
    """The kernel itself keeps it: asking about it waits for nobody."""
    points: TransferPoints


@dataclass(frozen=True, slots=True)
class OpenTransferLibrary:
    """Which functions of a file that this process maps are probed, and where?  See `place_of`."""

    procfs: str
    pid: int
    mapping: Mapping
    builds: ClassVar[Collection[type]] = (
        TransferFile, LibraryKey, FileStamp, TransferPoints, CommunicationLibrary, ProbePoint,
    )  # fmt: skip
    seconds: ClassVar[float] = 15.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[TransferFile]:
        """See `Question.find`."""
        del memory, descriptors
        try:
            descriptor = open_mapped_file(Path(self.procfs), self.pid, self.mapping)
        except MappedFileError as error:
            raise Refused(str(error), gone=error.gone) from None
        try:
            with Elf.open(descriptor) as elf:
                points = transfer_points(elf)
                key, local = library_key(descriptor, elf.build_id), on_local_storage(descriptor)
            if points is None:
                raise Refused(f"{self.mapping.path}: it is no library that transfers any more", gone=True)
            return Found(TransferFile(self.mapping.path, key, local, points), [place_of(descriptor)])
        except (ElfError, OSError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise Refused(f"{self.mapping.path}: {why}") from None
        finally:
            os.close(descriptor)


@contextmanager
def _memory_of(procfs: str, pid: int) -> Iterator[int]:
    """A descriptor of a process's memory; raises Refused where it cannot be opened."""
    try:
        opened = os.open(f"{procfs}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"process {pid}: its memory cannot be read: {error.strerror}", gone=True) from None
    try:
        yield opened
    finally:
        os.close(opened)


@dataclass(frozen=True, slots=True)
class AreComplete:
    """Which of these requests of UCX are complete, by where each has its status in the process's memory?

    A page of it may be one of a file that its user serves himself: the daemon reads no such memory.
    """

    procfs: str
    pid: int
    addresses: tuple[int, ...]
    moment: int
    """Tells one time of asking from another."""
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 5.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[tuple[bool, ...]]:
        """See `Question.find`; what cannot be read counts as complete."""
        del memory, descriptors
        with _memory_of(self.procfs, self.pid) as opened:
            read = [read_memory(opened, 8, address) for address in self.addresses]
        return Found(tuple(one is None or bool(struct.unpack("<iI", one)[1] & _UCX_COMPLETED) for one in read))


_BATCH: Final = struct.Struct("<5Q")
"""BatchDesc begins with its id, which is its own address, how many tasks it is for, and the vector of its tasks."""
_BATCH_OF_TASK: Final = 48
"""In a TransferTask, behind four counts of slices and bytes, a flag and its bytes: the id of its batch."""
_MOST_TASK_BYTES: Final = 512
_MOST_TASKS_BYTES: Final = 1 << 19
"""Of a batch: some 4,096 tasks.  Of one with more it is not known whether it is complete."""


@dataclass(frozen=True, slots=True)
class AreUnfinished:
    """Which of these batches of Mooncake, by their ids, have tasks that are not complete, by the process's memory?

    See `AreComplete`.  Of what does not look like a batch it is not known, and it counts as finished.
    """

    procfs: str
    pid: int
    batches: tuple[int, ...]
    moment: int
    """Tells one time of asking from another."""
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 5.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[tuple[bool, ...]]:
        """See `Question.find`."""
        del memory, descriptors
        with _memory_of(self.procfs, self.pid) as opened:
            return Found(
                tuple(is_unfinished(lambda at, size: read_memory(opened, size, at), one) for one in self.batches)
            )


def is_unfinished(read: Callable[[int, int], bytes | None], batch: int) -> bool:
    """Whether a batch of Mooncake has a task that is not complete.

    `read` reads memory: an address, and how many bytes.  How long a task is depends on the build: each names its batch.
    """
    head = read(batch, _BATCH.size)
    if head is None:
        return False
    itself, _, begin, end, _ = _BATCH.unpack(head)
    if itself != batch or not 0 < end - begin <= _MOST_TASKS_BYTES:
        return False
    tasks = read(begin, end - begin)
    if tasks is None:
        return False
    words = np.frombuffer(tasks, "<u8", len(tasks) // 8)
    named = np.flatnonzero(words == batch)
    first = _BATCH_OF_TASK // 8
    if not len(named) or named[0] != first:
        return False
    length = int(named[1]) - first if len(named) > 1 else len(words)
    if len(words) % length or length * 8 > _MOST_TASK_BYTES:
        return False
    of_tasks = words.reshape(-1, length)
    if (of_tasks[:, first] != batch).any():
        return False
    slices, succeeded, failed = (of_tasks[:, at] for at in range(3))
    # One that has no slices yet is not begun.
    return bool(((slices == 0) | (succeeded + failed < slices)).any())
