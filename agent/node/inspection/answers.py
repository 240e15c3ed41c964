"""Answers of inspection processes as bytes, and read again by a daemon that does not trust who wrote them.

A process that reads a tenant's files may be taken over by one, and then writes what it likes.  Pickle is no format for
that even where it builds chosen classes only: 80 bytes make its reader reserve a gigabyte, and a tuple of tuples that
stand in it twice takes for ever to hash.  Here an answer is JSON: its depth and its size are bounded, nothing stands in
it twice, and a class of those that the question names is built from values of the types that its fields declare.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union

DEEPEST: Final = 24
"""Values in values; the deepest answer has eight."""

_PLAIN: Final = (str, int, float, bool, types.NoneType)
_GROUPS: Final[Mapping[type, str]] = {tuple: "t", list: "l", frozenset: "f", set: "s"}
_GROUP_OF: Final[Mapping[str, Callable[[list[Any]], Any]]] = {kind: group for group, kind in _GROUPS.items()}
_BYTES, _MAPPING, _MEMBER = "b", "d", "e"


class AnswerError(Exception):
    """These bytes are no answer; the message says in a line why."""


def encode(answer: object, builds: Collection[type]) -> bytes:
    """An inspection process's answer as bytes.

    Raises:
        AnswerError: it holds something that is neither plain nor of these classes.
    """
    return json.dumps(_written(answer, frozenset(builds), 0)).encode()


def decode(data: bytes, builds: Collection[type]) -> object:
    """The answer of an inspection process in these bytes; every object in it has fields of the declared types.

    Raises:
        AnswerError: there is none, or it holds another class than these.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise AnswerError("this is not JSON") from None
    return _read(content, {_name(one): one for one in builds}, 0)


@cache
def promised(question: type) -> Any:
    """The type of an inspection process's answer to a question of this class, as its `find` declares it."""
    return typing.get_args(typing.get_type_hints(question.__dict__["find"])["return"])[0]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _written(value: object, builds: frozenset[type], depth: int) -> object:
    if depth > DEEPEST:
        raise AnswerError("the answer is nested too deeply")
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _GROUPS:
        assert isinstance(value, (tuple, list, frozenset, set))
        return [_GROUPS[kind], *(_written(one, builds, depth + 1) for one in value)]
    if isinstance(value, bytes):
        return [_BYTES, value.hex()]
    if isinstance(value, Mapping):
        parts = [part for entry in value.items() for part in entry]
        return [_MAPPING, *(_written(part, builds, depth + 1) for part in parts)]
    if kind in builds and isinstance(value, Enum):
        return [_MEMBER, _name(kind), value.value]
    if kind in builds and is_dataclass(value):
        return [_name(kind), *(_written(getattr(value, one.name), builds, depth + 1) for one in fields(value))]
    raise AnswerError(f"{_name(kind)} is not among what the question names")


def _read(content: Any, builds: Mapping[str, type], depth: int) -> Any:
    if not isinstance(content, list):
        if isinstance(content, dict):
            raise AnswerError("a JSON object stands where none is written")
        return content
    if depth > DEEPEST or not content or not isinstance(content[0], str):
        raise AnswerError("a value has no kind, or is nested too deeply")
    kind, *parts = content
    try:
        if kind == _BYTES:
            (text,) = parts
            return bytes.fromhex(text)
        if kind == _MEMBER:
            name, value = parts
            return _enumeration(builds, name)(value)
        values = [_read(part, builds, depth + 1) for part in parts]
        if kind in _GROUP_OF:
            return _GROUP_OF[kind](values)
        if kind == _MAPPING:
            return dict(zip(values[::2], values[1::2], strict=True))
        return _built(builds.get(kind), kind, values)
    except (ValueError, TypeError) as error:
        raise AnswerError(f"{kind[:100]!r} is not built of this: {error}") from None


def _enumeration(builds: Mapping[str, type], name: object) -> type[Enum]:
    found = builds.get(name) if isinstance(name, str) else None
    if found is None or not issubclass(found, Enum):
        raise AnswerError(f"{str(name)[:100]!r} is not among what the question names")
    return found


def _built(kind: type | None, name: str, values: Sequence[object]) -> object:
    if kind is None or not is_dataclass(kind):
        raise AnswerError(f"{name[:100]!r} is not among what the question names")
    declared = _declared(kind)
    if len(values) != len(declared):
        raise AnswerError(f"{name} has {len(declared)} fields, not {len(values)}")
    for (field, hint), value in zip(declared.items(), values, strict=True):
        if not fits(value, hint):
            raise AnswerError(f"{name}.{field} is not a {hint}")
    return kind(**dict(zip(declared, values, strict=True)))


@cache
def _declared(kind: type) -> Mapping[str, Any]:
    """The types of a class's fields, by name in their order."""
    hints = typing.get_type_hints(kind)
    assert is_dataclass(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def fits(value: object, hint: Any) -> bool:
    """Whether a value of an answer is of an annotated type, with all that it holds."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return True
    if hint is None:
        return value is None
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, _PLAIN) and value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(fits(one, inner[0]) for one in value)
        return len(value) == len(inner) and all(fits(one, kind) for one, kind in zip(value, inner, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, origin) and all(
            fits(key, inner[0]) and fits(one, inner[1]) for key, one in value.items()
        )
    if isinstance(origin, type) and issubclass(origin, Collection):
        held = value if isinstance(value, (tuple, list, Set)) and isinstance(value, origin) else None
        return held is not None and all(fits(one, inner[0]) for one in held)
    return isinstance(hint, type) and isinstance(value, hint)
