"""What may be asked of an inspection process, and how its answers are told apart.

A question knows how to find its own answer; that runs in the inspection process and never in the daemon.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

Kept = TypeVar("Kept")
A_co = TypeVar("A_co", covariant=True)


class Memory:
    """What an inspection process keeps from one question to the next: one object of each class, made when first
    asked for.  It goes with the process, so that nothing may rest on it but time."""

    def __init__(self) -> None:
        self._kept: dict[type, object] = {}

    def get(self, kind: type[Kept]) -> Kept:
        found = self._kept.get(kind)
        if not isinstance(found, kind):
            found = self._kept[kind] = kind()
        return found


@dataclass(slots=True)
class Found(Generic[A_co]):
    """An answer, and descriptors that go to the daemon with it; the inspection process closes its own."""

    answer: A_co
    descriptors: list[int] = field(default_factory=list)


class Question(Protocol[A_co]):
    """Asked by the daemon, hashable, and pickled on its way."""

    builds: ClassVar[Collection[type]]
    """Classes that an answer may hold beside plain values."""
    seconds: ClassVar[float]
    """How long an answer may take before the process that looks for it is killed."""

    @property
    def pid(self) -> int:
        """The process that it is about: looked at again when an answer comes late."""

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[A_co]:
        """Find the answer; `descriptors` are those that the daemon gave along.

        Raises:
            Refused: it cannot be had, and why.
        """


class Refused(Exception):
    """There is no answer; the message is one line that says why and what would help."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone
        """The process has ended, or has let go of the file: nothing is wrong."""


class NotYet(Exception):
    """The answer has not come: ask again when the inspection tells that it has."""
