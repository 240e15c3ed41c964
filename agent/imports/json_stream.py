"""Large JSON files, one element at a time: of a long array inside an object only one element is in memory.

Python's own decoder reads each element from a window of the text, which moves on.  An element that is no JSON is
reported with its line and passed over; so is one that is nested too deep, or too large.

Why not ijson, measured with its yajl2_c backend: a trace of Kineto's of 200 MB takes it 2.4 s and 15 MiB, and this
reader 3.0 s and 20 MiB.  But ijson bounds nothing: 32 million opening brackets take all
memory (here 0.06 s), a text of 300 MB more than two minutes (here 0.5 s), and an element of 200 MB 0.6 GiB.  And it
ends at the first fault, without its line: at NaN, which profilers write, at a byte that is no UTF-8, at an element
that is broken.

Who wants speed names decoders: msgspec's, which take many elements at once into what the caller needs of them.  They
get the window up to the last place where an element like the first one seems to begin.  JSON is read from its beginning
on, so that what a decoder takes is what stands there, wherever that place is; where it refuses, for a fault or because
the place was none, this part of the window is read element by element.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

_READ_BYTES: Final = 1 << 20
_LARGEST_ELEMENT: Final = 1 << 25
"""Letters of one element; those of whole objects, such as a header, count as one."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_BETWEEN_ELEMENTS: Final = re.compile(r"[ \t\r\n,]*")
_NEXT_OBJECT: Final = re.compile(r"\}[ \t\r\n]*(?:,[ \t\r\n]*)?(?=\{)")
_NEAR_THE_END: Final = 16
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")

_FIRST_KEY: Final = re.compile(r'\{[ \t\r\n]*"[^"\\]{0,60}"')
_LEAST_BATCH: Final = 1 << 16
"""Letters that are read element by element before another batch is tried."""
_TRIES: Final = 8
_SPACES_BETWEEN: Final = 64
_DEEPEST: Final = 8
"""Of values that are opened, one in the other."""

Decode = Callable[[bytes], list[Any]]
"""Takes elements: a JSON array of them, or one a line where no array holds them.

Raises:
    msgspec.DecodeError: it is no such array.
"""
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


@dataclass(frozen=True, slots=True)
class Batch:
    """Elements one after the other, as a decoder has made them."""

    key: str
    values: list[Any]
    place: Callable[[int], int]
    """The line of the element of a number, from 0; it takes time."""


class _NoJson(Exception):
    """At this place of the window there is no JSON; `args` holds the reason."""


class JsonStream:
    """The elements of one file.

    Several values one after the other (JSON lines, or objects without anything between them) are elements without a
    key each; an array at the outermost level has its elements without a key.
    """

    def __init__(
        self, stream: io.BufferedIOBase, streamed: Collection[str], report: Report, opened: Collection[str] = ()
    ) -> None:
        """`streamed`: keys of the outermost object whose arrays are read element by element; `opened`: keys whose
        values, objects or arrays of objects, are read as if what they hold stood in the outermost object."""
        self._stream = stream
        self._streamed = streamed
        self._opened = opened
        self._report = report
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._line = 1
        self._counted = 0
        """How far into the window lines are counted."""
        self._ended = False
        self._decoders: Mapping[str, Decode] = {}
        self._one_by_one = 0
        """Up to here in the window elements are read one by one."""

    def batches(self, decoders: Mapping[str, Decode]) -> Iterator[Element | Batch]:
        """As `elements`, but of the arrays of these keys many at a time where a decoder takes them; the key is empty
        for what no object holds."""
        self._decoders = decoders
        return self._all()

    def elements(self) -> Iterator[Element]:
        """Everything in the file, in its order."""
        for one in self._all():
            assert isinstance(one, Element), "without decoders there are no batches"
            yield one

    def _all(self) -> Iterator[Element | Batch]:
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
                if (batch := self._batch("", lines=True)) is not None:
                    yield batch
                elif (element := self._element("")) is not None:
                    yield element

    def _object(self, depth: int = 0) -> Iterator[Element | Batch]:
        """What an object holds, and move behind it."""
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
            elif key in self._opened and depth < _DEEPEST and self._peek() in ("{", "["):
                yield from self._inside(depth + 1)
            else:
                self._peek()
                if (element := self._element(key)) is not None:
                    yield element
        if letter:
            self._at += 1
        else:
            self._report(self._here(), "the file ends in the middle of an object")

    def _inside(self, depth: int) -> Iterator[Element | Batch]:
        """What an object holds, or what those of an array hold."""
        if self._peek() == "{":
            yield from self._object(depth)
            return
        self._at += 1
        while (letter := self._peek(_BETWEEN_ELEMENTS)) not in ("]", ""):
            if letter == "{":
                yield from self._object(depth)
            else:
                self._element("")
        self._at += 1

    def _array(self, key: str) -> Iterator[Element | Batch]:
        while (letter := self._peek(_BETWEEN_ELEMENTS)) not in ("]", ""):
            if (batch := self._batch(key, lines=False)) is not None:
                yield batch
            elif (element := self._element(key)) is not None:
                yield element
        if letter:
            self._at += 1
        else:
            self._report(self._here(), "the file ends in the middle of an array")

    def _batch(self, key: str, *, lines: bool) -> Batch | None:
        """Many elements from this place on; None: it takes one by itself."""
        decode = self._decoders.get(key)
        if decode is None or self._at < self._one_by_one:
            return None
        line = self._moved()
        if len(self._text) < _READ_BYTES and not self._ended:
            self._more(_READ_BYTES)
        end = self._last_boundary(lines)
        self._one_by_one = max(end, min(_LEAST_BATCH, len(self._text)))
        if not end:
            return None
        content = self._text[:end]
        try:
            values = decode(content.encode() if lines else f"[{content}]".encode())
        except (msgspec.DecodeError, RecursionError):
            return None
        self._at, self._one_by_one = end, 0
        return Batch(key, values, lambda number: self._line_of(content, line, number))

    def _last_boundary(self, lines: bool) -> int:
        """Where in the window the last element seems to end behind which another one begins; 0: there is no such."""
        if lines:
            return self._text.rfind("\n") + 1
        first = _FIRST_KEY.match(self._text)
        at = len(self._text)
        for _ in range(_TRIES if first is not None else 0):
            assert first is not None
            at = self._text.rfind(first[0], 1, at)
            if at < 0:
                break
            before = self._text[max(0, at - _SPACES_BETWEEN) : at].rstrip(" \t\r\n")
            gap = before[:-1].rstrip(" \t\r\n")
            if before.endswith(",") and gap.endswith("}"):
                return at - min(at, _SPACES_BETWEEN) + len(gap)
        return 0

    def _line_of(self, content: str, line: int, number: int) -> int:
        """The line of an element of a batch that begins at `line`."""
        at = 0
        for _ in range(number):
            at = _end_of(_BETWEEN_ELEMENTS, content, at)
            try:
                at = self._decoder.raw_decode(content, at)[1]
            except (ValueError, RecursionError):
                return line
        return line + content.count("\n", 0, _end_of(_BETWEEN_ELEMENTS, content, at))

    def _element(self, key: str) -> Element | None:
        """What begins at this place; None: it is no JSON, which is reported."""
        line = self._here() if self._at < _READ_BYTES else self._moved()
        try:
            return Element(key, self._decoded(), line)
        except _NoJson as error:
            self._report(line, f"no JSON: {error}")
            self._resynchronise()
            return None

    def _decoded(self) -> Any:
        """The value that begins at this place, and move behind it.

        Raises:
            _NoJson: there is none.
        """
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
            letters = len(self._text) - self._at
            if letters > _LARGEST_ELEMENT:
                raise _NoJson("too large")
            # As much again, as each attempt begins anew.
            self._more(min(max(letters, _READ_BYTES), _LARGEST_ELEMENT - letters + 1))

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
            self._more(_READ_BYTES)

    def _peek(self, passed_over: re.Pattern[str] = _SPACE) -> str:
        """The next letter that is not passed over; empty: the end."""
        while True:
            found = passed_over.match(self._text, self._at)
            assert found is not None, "it also matches the empty text"
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._moved()
            self._more(_READ_BYTES)

    def _more(self, size: int) -> None:
        content = self._stream.read(size)
        self._ended = not content
        self._text += self._decode(content, final=self._ended)

    def _moved(self) -> int:
        """Forget what is behind; returns the line of this place."""
        line = self._here()
        self._text = self._text[self._at :]
        self._one_by_one = max(0, self._one_by_one - self._at)
        self._at = self._counted = 0
        return line

    def _here(self) -> int:
        """The number of the line of this place."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line


def _end_of(passed_over: re.Pattern[str], text: str, at: int) -> int:
    found = passed_over.match(text, at)
    return found.end() if found is not None else at


def whole_number(value: object) -> int | None:
    """A value of imported JSON as a whole number of 64 bits, as JSON, or a text in it, has one; None: it is none."""
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(1 << 63) <= value < 1 << 63 else None


def small_number(value: object) -> int | None:
    """A value of imported JSON as a number of ranks or the like: whole, not negative, of 31 bits; None: it is none."""
    number = whole_number(value)
    return number if number is not None and 0 <= number < 1 << 31 else None


def text(value: object) -> str:
    """A value of imported JSON as a text; empty: it is none."""
    return value if isinstance(value, str) else ""
