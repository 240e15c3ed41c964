"""Has the pages read that probes go on, before the kernel needs them.

To put a breakpoint on an instruction the kernel reads the instruction's page, and until it has the page no process
of the host can fork.  A file server that does not answer, which a tenant may run himself, would so stop the daemon and
every other user.  Where the kernel does not keep a file itself, an inspection process reads these pages first: then
they are in the page cache, and attaching waits for no server.  A server that makes the kernel forget a page in just
that moment can still hold up the attaching, for as long as it likes.

Sources: kernel/events/uprobes.c (register_for_each_vma holds dup_mmap_sem while copy_insn reads), madvise(2)
(MADV_POPULATE_READ, since 5.14).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.questions import Found, Memory, Refused
from railscope.agent.node.inspection.tenants import Tenant
from railscope.probes.libraries.files import reopened
from railscope.probes.loading.links import ProbePoint

_LONGEST_INSTRUCTION_BYTES: Final = 16
"""So many are copied (MAX_UINSN_BYTES), from two pages where it must be."""
_MADV_POPULATE_READ: Final = 22


class ProbedFile(Protocol):
    """A file that is to be probed."""

    @property
    def descriptor(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def local(self) -> bool:
        """The kernel itself keeps it: reading it waits for no server."""

    @property
    def tenant(self) -> Tenant:
        """Whose inspection process looks at it."""


@dataclass(frozen=True, slots=True)
class LoadPages:
    """Have these pages of a file, whose descriptor goes along, read; answers how many there are."""

    pid: int
    path: str
    """A name of the file, which tells it from other files."""
    offsets: tuple[int, ...]
    """In the file, bytes."""
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 15.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[int]:
        """See `Question.find`."""
        del memory
        (descriptor,) = descriptors
        try:
            with open(reopened(descriptor), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                for offset in self.offsets:
                    length = min(mmap.PAGESIZE, size - offset)
                    if length > 0:
                        with mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=offset) as page:
                            page.madvise(_MADV_POPULATE_READ)
        except (OSError, ValueError) as error:
            raise Refused(f"its code cannot be read: {getattr(error, 'strerror', None) or error}") from None
        return Found(len(self.offsets))


def load_pages(inspection: Inspection, file: ProbedFile, points: Iterable[ProbePoint], pid: int = 0) -> None:
    """Have the pages of these probe points read; `pid` is looked at again when that is done late.

    Raises:
        NotYet: they are being read.
        Refused: they cannot be read.
    """
    ends = (point.file_offset + beyond for point in points for beyond in (0, _LONGEST_INSTRUCTION_BYTES - 1))
    offsets = tuple(sorted({end - end % mmap.PAGESIZE for end in ends}))
    if offsets and not file.local:
        inspection.ask(file.tenant, LoadPages(pid, file.path, offsets), (file.descriptor,))
