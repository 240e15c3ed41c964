"""Files that show counters, without a folder: simulated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager


@contextmanager
def showing(texts: Sequence[bytes]) -> Iterator[tuple[int, ...]]:
    """Descriptors of files with these contents."""
    with ExitStack() as files:
        found = []
        for text in texts:
            descriptor = os.memfd_create("counter")
            files.callback(os.close, descriptor)
            os.write(descriptor, text)
            found.append(descriptor)
        yield tuple(found)
