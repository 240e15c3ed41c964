"""JSON Schemas of typed documents: what their TypedDicts say, in the words of JSON Schema 2020-12.

Source: json-schema.org, draft 2020-12, "Core" and "Validation".
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from enum import StrEnum
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

_SCALARS: Final[dict[object, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def make_schema(title: str, *documents: type) -> dict[str, Any]:
    """The schema of a text that holds one of these documents.  Further fields are allowed: later versions may add some.

    Raises:
        TypeError: a field is of a type that JSON has no word for.
    """
    definitions: dict[str, Any] = {}
    roots = [_of(document, definitions) for document in documents]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return head | (roots[0] if len(roots) == 1 else {"oneOf": roots}) | {"$defs": dict(sorted(definitions.items()))}


def fields_of(document: type) -> Iterator[tuple[str, str, bool, str]]:
    """Name, type in words, whether it is always there, and meaning of each field."""
    for name, hint in get_type_hints(document, include_extras=True).items():
        schema = _of(_stripped(hint), {})
        yield name, _words(schema), _always(document, hint), schema.get("description", "")


def _always(document: Any, hint: Any) -> bool:
    """Whether a field is always there.  `__required_keys__` does not know, where annotations are strings."""
    return bool(document.__total__) and get_origin(hint) is not NotRequired


def _stripped(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is NotRequired else hint


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if is_typeddict(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a document may hold itself
            definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return {"type": "string", "enum": [str(one) for one in hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _of(arguments[0], definitions) | {"description": arguments[1]}
    if origin is Literal:
        return {"type": "string", "enum": [str(one) for one in arguments]}
    if origin is list:
        return {"type": "array", "items": _of(arguments[0], definitions)}
    if origin in (Union, types.UnionType):
        return {"type": [_of(one, definitions)["type"] for one in arguments]}
    raise TypeError(f"{hint} has no word in JSON Schema")


def _object(document: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(document, include_extras=True)
    return {
        "type": "object",
        "description": inspect.getdoc(document),
        "properties": {name: _of(_stripped(hint), definitions) for name, hint in hints.items()},
        "required": [name for name, hint in hints.items() if _always(document, hint)],
    }


def _words(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "items" in schema:
        return f"array of {_words(schema['items'])}"
    told = schema["type"]
    return " or ".join(told) if isinstance(told, list) else str(told)
