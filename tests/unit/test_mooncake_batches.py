"""Whether a batch of Mooncake is complete, by its process's memory.

Simulated: that memory.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as some

from railscope.agent.node.transfers.files import is_unfinished

BATCH, TASKS = 0x7000, 0x9000
DONE, OPEN, FAILED, NOT_BEGUN = (2, 2, 0), (2, 1, 0), (2, 1, 1), (0, 0, 0)


class Memory:
    """Of a process with one batch, whose tasks have so many words each."""

    def __init__(self, *tasks: tuple[int, int, int], words: int = 14, batch: int = BATCH) -> None:
        content = b"".join(
            struct.pack(f"<{words}Q", *slices, 0, 0, 4096, BATCH, *([0x1234] * (words - 7))) for slices in tasks
        )
        head = struct.pack("<5Q", batch, len(tasks), TASKS, TASKS + len(content), TASKS + len(content))
        self._parts = {BATCH: head, TASKS: content}

    def read(self, at: int, size: int) -> bytes | None:
        found = self._parts.get(at, b"")[:size]
        return found if len(found) == size else None


@pytest.mark.parametrize("words", [11, 14, 15])
@pytest.mark.parametrize(
    ("tasks", "unfinished"),
    [
        ((DONE,), False),
        ((OPEN,), True),
        ((DONE, FAILED, DONE), False),
        ((DONE, DONE, OPEN), True),
        ((DONE, NOT_BEGUN), True),
        ((DONE,) * 999 + (OPEN,), True),
    ],
)
def test_it_is_complete_when_all_slices_of_its_tasks_are(
    tasks: tuple[tuple[int, int, int], ...], unfinished: bool, words: int
) -> None:
    assert is_unfinished(Memory(*tasks, words=words).read, BATCH) is unfinished


def test_of_what_is_no_batch_nothing_is_claimed() -> None:
    assert not is_unfinished(Memory(OPEN, batch=BATCH + 8).read, BATCH), "its id is not its address"
    assert not is_unfinished(Memory().read, BATCH)
    assert not is_unfinished(lambda _at, _size: None, BATCH)
    assert not is_unfinished(Memory(*[OPEN] * 10_000).read, BATCH), "too long to look at"


@given(some.binary(max_size=200), some.lists(some.integers(0, 2**64 - 1), min_size=5, max_size=5))
def test_any_memory_is_looked_at_within_bounds(content: bytes, head: list[int]) -> None:
    asked = []

    def read(at: int, size: int) -> bytes | None:
        asked.append(size)
        return struct.pack("<5Q", BATCH, *head[1:]) if at == BATCH else content[:size].ljust(size, b"\0")

    is_unfinished(read, BATCH)
    assert max(asked) <= 1 << 19
