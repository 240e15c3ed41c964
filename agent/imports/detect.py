"""Which format a file has, by its beginning."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from railscope.agent.imports import (
    chakra,
    deepspeed,
    execution_trace,
    kineto,
    nccl_inspector,
    nccl_log,
    railscope_recording,
    torch_flight_recorder,
)
from railscope.agent.imports.sources import Source

HEAD_BYTES: Final = 1 << 22
"""A log may begin with much that is not NCCL's."""
_JSON: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*[\[{]")

_TESTS: Final[tuple[tuple[str, Callable[[bytes], bool]], ...]] = (
    (railscope_recording.FORMAT, railscope_recording.has_format),
    (nccl_inspector.FORMAT, nccl_inspector.has_format),
    (kineto.FORMAT, kineto.has_format),
    (torch_flight_recorder.FORMAT, torch_flight_recorder.has_format),
    (chakra.FORMAT, execution_trace.has_format),
    (chakra.FORMAT, chakra.has_format),
)
"""In this order: what comes first is the more certain.  Those of JSON are asked only of what begins as JSON does."""
_TEXT_TESTS: Final = (
    (nccl_log.FORMAT, nccl_log.has_format),
    (deepspeed.FORMAT, deepspeed.has_format),
)


def format_of(source: Source) -> str | None:
    """The name of the format; None: it is of none that is known."""
    with source.open() as stream:
        head = stream.read(HEAD_BYTES)
    return format_of_head(head)


def format_of_head(head: bytes) -> str | None:
    """As `format_of`, from the first bytes."""
    if not head:
        return None
    binary = not _JSON.match(head)
    text_first = binary and (b"NCCL INFO " in head or b"comm op: " in head)
    if not text_first:
        for name, test in _TESTS:
            if test(head) and (not binary or name in (railscope_recording.FORMAT, *_BINARY)):
                return name
    for name, test in _TEXT_TESTS:
        if test(head):
            return name
    return None


_BINARY: Final = (torch_flight_recorder.FORMAT, chakra.FORMAT)
"""Formats that have a binary form as well."""
