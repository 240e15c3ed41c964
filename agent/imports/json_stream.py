"""Large JSON files, one element at a time: of a long array inside an object only one element is in memory.

Python's own decoder reads each element from a window of the text, which moves on.  An element that is no JSON is
reported with its line and passed over; so is one that is nested too deep, or too large.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from railscope.agent.imports.sources import SourceStream

_READ_BYTES: Final = 1 << 20
_LARGEST_ELEMENT: Final = 1 << 25
"""Letters of one element; those of whole objects, such as a header, count as one."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_NEXT_OBJECT: Final = re.compile(r"\}[ \t\r\n]*(?:,[ \t\r\n]*)?(?=\{)")
_NEAR_THE_END: Final = 16
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")

Report = Callable[[int, str], None]
"""Takes the number of a line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Element:
    """One value: an element of a streamed array, the value of another key, or one of several values in a row."""

    key: str
    """The key of the outermost object; empty: there is none."""
    value: Any
    line: int
    """Where it begins."""


class _NoJson(Exception):
    """At this place of the window there is no JSON; `args` holds the reason."""


class JsonStream:
    """The elements of one file.

    Several values one after the other (JSON lines, or objects without anything between them) are elements without a
    key each; an array at the outermost level has its elements without a key.
    """

    def __init__(self, stream: SourceStream, streamed: Collection[str], report: Report) -> None:
        """`streamed`: keys of the outermost object whose arrays are read element by element."""
        self._stream = stream
        self._streamed = streamed
        self._report = report
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._line = 1
        self._counted = 0
        """How far into the window lines are counted."""
        self._ended = False

    def elements(self) -> Iterator[Element]:
        """Everything in the file, in its order."""
        if self._peek() == "\ufeff":
            self._at += 1
        first = self._peek()
        if first == "[":
            self._at += 1
            yield from self._array("")
        elif first == "{" and self._streamed:
            yield from self._object()
        else:
            while self._peek():
                yield from self._value("")

    def _object(self) -> Iterator[Element]:
        self._at += 1
        while (letter := self._peek()) not in ("}", ""):
            if letter == ",":
                self._at += 1
                continue
            try:
                key = self._decoded()
                if not isinstance(key, str) or self._peek() != ":":
                    raise _NoJson("expected a key")
            except _NoJson as error:
                self._report(self._here(), f"no JSON: {error}")
                return
            self._at += 1
            if key in self._streamed and self._peek() == "[":
                self._at += 1
                yield from self._array(key)
            else:
                yield from self._value(key)
        if not letter:
            self._report(self._here(), "the file ends in the middle of an object")

    def _array(self, key: str) -> Iterator[Element]:
        while (letter := self._peek()) not in ("]", ""):
            if letter == ",":
                self._at += 1
            else:
                yield from self._value(key)
        if letter:
            self._at += 1
        else:
            self._report(self._here(), "the file ends in the middle of an array")

    def _value(self, key: str) -> Iterator[Element]:
        line = self._here() if self._at < _READ_BYTES else self._moved()
        try:
            yield Element(key, self._decoded(), line)
        except _NoJson as error:
            self._report(line, f"no JSON: {error}")
            self._resynchronise()

    def _decoded(self) -> Any:
        """The value at this place, and move behind it.

        Raises:
            _NoJson: there is none.
        """
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                incomplete = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _NEAR_THE_END
                if not incomplete or self._ended:
                    raise _NoJson(error.msg) from None
            except RecursionError:
                raise _NoJson("nested too deep") from None
            except ValueError:
                raise _NoJson("a number of too many digits") from None
            else:
                # A number at the end of the window may go on behind it.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            if len(self._text) - self._at > _LARGEST_ELEMENT:
                raise _NoJson("too large")
            self._more()

    def _resynchronise(self) -> None:
        """Move to where the next object may begin, behind this place."""
        while True:
            found = _NEXT_OBJECT.search(self._text, self._at + 1)
            if found is not None:
                self._at = found.end()
                return
            if self._ended:
                self._at = len(self._text)
                return
            self._at = max(self._at, len(self._text) - _READ_BYTES)
            self._moved()
            self._more()

    def _peek(self) -> str:
        """The next letter that is no space; empty: the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None, "it matches nothing at all, too"
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._moved()
            self._more()

    def _more(self) -> None:
        content = self._stream.read(_READ_BYTES)
        self._ended = not content
        self._text += self._decode(content, final=self._ended)

    def _moved(self) -> int:
        """Forget what is behind; returns the line of this place."""
        line = self._here()
        self._text = self._text[self._at :]
        self._at = self._counted = 0
        return line

    def _here(self) -> int:
        """The number of the line of this place."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line


def whole_number(value: object) -> int | None:
    """A value as a whole number of 64 bits, as JSON, or a text in it, has one; None: it is none."""
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(1 << 63) <= value < 1 << 63 else None


def small_number(value: object) -> int | None:
    """A value as a number of ranks or the like: whole, not negative, of 31 bits; None: it is none."""
    number = whole_number(value)
    return number if number is not None and 0 <= number < 1 << 31 else None


def text(value: object) -> str:
    """A value as a text; empty: it is none."""
    return value if isinstance(value, str) else ""
