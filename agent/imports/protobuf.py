"""Messages of protocol buffers, read without their compiled schema: field numbers and raw values.

Source: the encoding guide of Protocol Buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from railscope.agent.imports.sources import SourceStream

Value = int | bytes
LARGEST_MESSAGE_BYTES: Final = 1 << 26
_LONGEST_VARINT: Final = 10


class BrokenMessage(ValueError):
    """It is no message; the text says why."""


def messages(stream: SourceStream) -> Iterator[bytes]:
    """Messages that each stand behind their length.

    Raises:
        BrokenMessage: a length cannot be, or the file ends in the middle of a message.
    """
    while True:
        length = _length(stream)
        if length is None:
            return
        if length > LARGEST_MESSAGE_BYTES:
            raise BrokenMessage(f"a message of {length} bytes")
        content = stream.read(length)
        if len(content) < length:
            raise BrokenMessage("the file ends in the middle of a message")
        yield content


def _length(stream: SourceStream) -> int | None:
    value = 0
    for position in range(_LONGEST_VARINT):
        letter = stream.read(1)
        if not letter:
            if position:
                raise BrokenMessage("the file ends in the middle of a length")
            return None
        value |= (letter[0] & 0x7F) << (7 * position)
        if letter[0] < 0x80:
            return value
    raise BrokenMessage("a length that is none")


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Field numbers and values: numbers as unsigned words, everything of a length as bytes.

    Raises:
        BrokenMessage: it is no message.
    """
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, kind = key >> 3, key & 7
        if not number:
            raise BrokenMessage("a field without a number")
        value: Value
        if kind == 0:
            value, at = varint(message, at)
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            if at + width > len(message):
                raise BrokenMessage("a number that is cut")
            value = int.from_bytes(message[at : at + width], "little")
            at += width
        elif kind == 2:
            length, at = varint(message, at)
            if at + length > len(message):
                raise BrokenMessage("a text that is cut")
            value = message[at : at + length]
            at += length
        else:
            raise BrokenMessage(f"a field of kind {kind}")
        yield number, value


def varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends.

    Raises:
        BrokenMessage: it is cut, or too long.
    """
    value = 0
    for position in range(_LONGEST_VARINT):
        if at >= len(message):
            raise BrokenMessage("a number that is cut")
        letter = message[at]
        at += 1
        value |= (letter & 0x7F) << (7 * position)
        if letter < 0x80:
            return value & (1 << 64) - 1, at
    raise BrokenMessage("a number that is too long")


def signed(value: int) -> int:
    """An unsigned word as the signed one of the same bits."""
    return value - (1 << 64) if value >> 63 else value


def zigzag(value: int) -> int:
    """The number of a `sint` field."""
    return (value >> 1) ^ -(value & 1)


def double(value: int) -> float:
    """The number of a `double` field."""
    return float(struct.unpack("<d", value.to_bytes(8, "little"))[0])
