"""Reads a pickle of plain data and executes nothing.

A pickle is a program.  This is an interpreter of the part of it that builds numbers, texts, lists, tuples and
dictionaries; every instruction that would import or call something is refused, so nothing of the file is ever run.

Why not `pickle.Unpickler` with a `find_class` that refuses: it runs nothing either, but nine bytes that store at a high
place of its memo take 4 GiB, and 2 MB with a tuple of tuples as a key end the process with a segmentation fault
(Python 3.11).  Here the first takes nothing and the second is refused.  The price is speed: a dump of 20,000 entries
takes 0.4 s here and 0.01 s there.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterable
from typing import Any, Final

_VALUES: Final = frozenset(
    """BININT BININT1 BININT2 LONG1 LONG4 INT LONG BINFLOAT FLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 UNICODE
    BINSTRING SHORT_BINSTRING STRING BINBYTES SHORT_BINBYTES BINBYTES8""".split()
)
"""Instructions whose argument is the value."""
_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_KEYS: Final = (str, int, bytes)
_IGNORED: Final = frozenset({"PROTO", "FRAME"})
_MARK: Final = object()
_DEEPEST: Final = 64
"""Lists, tuples and dictionaries within each other: to look at deeper ones may take more stack than there is."""
_FREE_SIZE: Final = 1 << 22
_MOST_EXPANSION: Final = 64
"""How much larger than the pickle its value may be, where all that it holds twice is counted twice: 800 bytes can hold
a list whose text takes all memory.  An entry of PyTorch's, whose frames others have too, comes to 12."""
_LETTERS: Final = 8
"""Of a text that count as much as a value."""
_MOST_BITS: Final = 1 << 12
"""Of a number: Python writes those of 14,284 and more in no text."""


class PickleRefused(ValueError):
    """The pickle is damaged, or more than plain data; the message says which."""


def read_plain_pickle(content: bytes) -> Any:
    """The value in a pickle of plain values, read without running anything that it asks for.

    Raises:
        PickleRefused: it is no pickle of plain data.
    """
    machine = _Machine(max(_FREE_SIZE, _MOST_EXPANSION * len(content)))
    try:
        for instruction, argument, _ in pickletools.genops(io.BytesIO(content)):
            if instruction.name == "STOP":
                return machine.pop()
            machine.run(instruction.name, argument)
    except PickleRefused:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise PickleRefused(f"the pickle is damaged: {str(error)[:80]}") from None
    raise PickleRefused("the pickle is damaged: it has no end")


class _Machine:
    def __init__(self, most: int) -> None:
        """`most`: how many values the pickle may come to."""
        self._most = most
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._depths: dict[int, int] = {}
        """How deep each container is, by its identity: all of them live as long as the machine."""
        self._sizes: dict[int, int] = {}
        """How many values each holds, those of what it holds included."""
        self._taken: set[int] = set()
        """What another one holds."""
        self._containers: list[Any] = []

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefused("the pickle is damaged: a mark without an end")
        return value

    def run(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        if name in _VALUES:
            if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
                raise PickleRefused(f"the pickle has a number of more than {_MOST_BITS} bits: it is not read")
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(self._holding(_CONSTANTS[name](), ()))
        elif name == "MARK":
            self._stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self._stack.append(self._memo[argument])
        elif name not in _IGNORED:
            self._build(name)

    def _build(self, name: str) -> None:
        if name == "APPEND":
            value = self.pop()
            self._list().append(value)
            self._holding(self._stack[-1], [value])
        elif name == "APPENDS":
            values = self._marked()
            self._list().extend(values)
            self._holding(self._stack[-1], values)
        elif name == "SETITEM":
            values = [self.pop(), self.pop()]
            self._dictionary().update(self._entries(values[::-1]))
            self._holding(self._stack[-1], values)
        elif name == "SETITEMS":
            values = self._marked()
            self._dictionary().update(self._entries(values))
            self._holding(self._stack[-1], values)
        elif name in _TUPLES:
            values = [self.pop() for _ in range(_TUPLES[name])]
            self._stack.append(self._holding(tuple(reversed(values)), values))
        elif name == "TUPLE":
            values = self._marked()
            self._stack.append(self._holding(tuple(values), values))
        elif name == "LIST":
            values = self._marked()
            self._stack.append(self._holding(values, values))
        elif name == "DICT":
            values = self._marked()
            self._stack.append(self._holding(self._entries(values), values))
        else:
            raise PickleRefused(f"the pickle is more than plain data ({name}): it is not read")

    def _holding(self, container: Any, values: Iterable[Any]) -> Any:
        """What holds these values, unless it is too deep or too large by that.

        What another one holds grows no more, so that depths and sizes are right: no value is its own part.
        """
        if not isinstance(container, list | tuple | dict):
            return container
        own = id(container)
        if own not in self._depths:
            self._containers.append(container)
        elif own in self._taken:
            raise PickleRefused("the pickle adds to what something else holds already: it is not read")
        deepest, size = self._depths.get(own, 1), self._sizes.get(own, 1)
        for value in values:
            if isinstance(value, list | tuple | dict):
                inner = id(value)
                self._taken.add(inner)
                deepest = max(deepest, 1 + self._depths[inner])
                size += self._sizes[inner]
            else:
                size += 1 + (len(value) // _LETTERS if isinstance(value, str | bytes) else 0)
        self._depths[own], self._sizes[own] = deepest, size
        if deepest > _DEEPEST:
            raise PickleRefused(f"the pickle is nested deeper than {_DEEPEST} levels: it is not read")
        if size > self._most:
            raise PickleRefused("the pickle holds the same values again and again: it is not read")
        return container

    def _entries(self, values: list[Any]) -> dict[Any, Any]:
        """Keys and values in turn as a dictionary; hashing a tuple as a key would go down into it."""
        keys = values[::2]
        if not all(isinstance(key, _KEYS) for key in keys):
            raise PickleRefused("the pickle has a key that is neither text nor a number: it is not read")
        return dict(zip(keys, values[1::2], strict=True))

    def _marked(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def _list(self) -> list[Any]:
        top = self._stack[-1]
        if not isinstance(top, list):
            raise PickleRefused("the pickle is damaged: no list to append to")
        return top

    def _dictionary(self) -> dict[Any, Any]:
        top = self._stack[-1]
        if not isinstance(top, dict):
            raise PickleRefused("the pickle is damaged: no dictionary to add to")
        return top
