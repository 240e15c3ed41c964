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


class PickleRefused(ValueError):
    """The pickle is damaged, or more than plain data; the message says which."""


def read_plain_pickle(content: bytes) -> Any:
    """The value in a pickle of plain values, read without running anything that it asks for.

    Raises:
        PickleRefused: it is no pickle of plain data.
    """
    machine = _Machine()
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
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._depths: dict[int, int] = {}
        """How deep each container is, by its identity: all of them live as long as the machine."""
        self._containers: list[Any] = []

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefused("the pickle is damaged: a mark without an end")
        return value

    def run(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        if name in _VALUES:
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
        """What holds these values, unless it is too deep by that.

        Something that grows after another one took it in leaves the other's depth as it was.  Nothing here goes down
        into values, so what is deep in spite of that does no harm: who reads them looks at a few levels by name.
        """
        if not isinstance(container, list | tuple | dict):
            return container
        if id(container) not in self._depths:
            self._containers.append(container)
        deepest = 1 + max((self._depths.get(id(value), 0) for value in values), default=0)
        self._depths[id(container)] = max(deepest, self._depths.get(id(container), 0))
        if deepest > _DEEPEST:
            raise PickleRefused(f"the pickle is nested deeper than {_DEEPEST} levels: it is not read")
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
