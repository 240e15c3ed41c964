"""Questions that behave as hostile files make them behave; an inspection process imports this."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from railscope.agent.node.inspection.questions import Found, Memory, Refused


@dataclass(frozen=True, slots=True)
class Pair:
    first: int
    second: str


@dataclass(slots=True)
class Count:
    asked: int = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """Answers at once, or after a while, so many times its value, and tells how often it was asked for something."""

    pid: int
    value: str
    after_seconds: float = 0.0
    times: int = 1
    builds: ClassVar[Collection[type]] = (Pair,)
    seconds: ClassVar[float] = 3.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[Pair]:
        del descriptors
        time.sleep(self.after_seconds)
        count = memory.get(Count)
        count.asked += 1
        return Found(Pair(count.asked, self.times * self.value))


@dataclass(frozen=True, slots=True)
class Stranger:
    """Answers with a class that it does not name."""

    pid: int
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 1.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[object]:
        del memory, descriptors
        return Found(Pair(1, "x"))


@dataclass(frozen=True, slots=True)
class Code:
    """Answers with what pickle would run as a command."""

    pid: int
    path: str
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 1.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[object]:
        del memory, descriptors
        return Found(_Command(self.path))


@dataclass(frozen=True, slots=True)
class _Command:
    path: str

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


@dataclass(frozen=True, slots=True)
class Greedy:
    """Takes more memory than it may, or ends its process."""

    pid: int
    exits: bool = False
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 5.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[int]:
        del memory, descriptors
        if self.exits:
            os._exit(3)
        return Found(len(b"x" * (1 << 30)))


@dataclass(frozen=True, slots=True)
class Opened:
    """Answers with a descriptor of a file, or with what one holds that it was given."""

    pid: int
    path: str
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 1.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[bytes]:
        del memory
        if descriptors:
            return Found(b"".join(os.pread(one, 100, 0) for one in descriptors))
        try:
            return Found(b"", [os.open(self.path, os.O_RDONLY)])
        except OSError as error:
            raise Refused(f"{self.path}: {error.strerror}", gone=True) from None


@dataclass(frozen=True, slots=True)
class Rights:
    """What the inspection process may do: its effective capabilities, whether it may write, open files."""

    pid: int
    path: str
    builds: ClassVar[Collection[type]] = ()
    seconds: ClassVar[float] = 1.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[tuple[str, bool, int]]:
        del memory, descriptors
        with open("/proc/self/status") as file:
            effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
        try:
            with open(self.path, "wb", buffering=0) as file2:
                wrote = bool(file2.write(b"x"))
        except OSError:
            wrote = False
        return Found((effective, wrote, sum(1 for _ in Path("/proc/self/fd").iterdir())))
