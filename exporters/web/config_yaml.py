"""Reads a YAML file strictly: every key must be read once with its type; a key that is left over is an error.

Errors are one line that names the file and the key, and never show a value that may be a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

_T = TypeVar("_T")

_EXPECTED: Final[Mapping[type, str]] = {str: "text", bool: "true or false", list: "a list", dict: "keys and values"}


class WebConfigError(Exception):
    """The file cannot be used; the text is one line that names the file and the key."""


class Section:
    """A mapping of the file; each key is popped once, and a key that is left over is an error."""

    def __init__(self, path: Path, name: str, content: object) -> None:
        self._path = path
        self._name = name
        self.given = content is not None
        if content is not None and not isinstance(content, dict):
            raise WebConfigError(f"{path}: {name or 'the file'}: expected keys and values")
        self._rest: dict[object, Any] = dict(content or {})

    def error(self, key: object, problem: str) -> WebConfigError:
        return WebConfigError(f"{self._path}: {self._name}{'.' if self._name else ''}{key}: {problem}")

    def section(self, key: str) -> Section:
        name = f"{self._name}.{key}" if self._name else key
        return Section(self._path, name, self._rest.pop(key, None))

    def pop(self, key: str, kind: type[_T], default: _T | None) -> _T | None:
        """The value of a key, `default` where it is absent or empty."""
        value = self._rest.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.error(key, f"expected {_EXPECTED[kind]}, found {type(value).__name__}")
        return value

    def text(self, key: str, default: str = "") -> str:
        return self.pop(key, str, default) or default

    def choice(self, key: str, choices: Mapping[str, object], default: str = "") -> str:
        value = self.text(key, default)
        if value and value not in choices:
            raise self.error(key, f"unknown value {value!r}; use one of {', '.join(choices)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.pop(key, list, None) or []
        if not all(isinstance(value, str) for value in values):
            raise self.error(key, "expected a list of texts")
        return tuple(values)

    def all_texts(self) -> dict[str, str]:
        """Every key that is left, and its text."""
        for key in self._rest:
            if not isinstance(key, str):
                raise self.error(key, "expected a text as key; put it in quotes")
        return {key: self.text(key) for key in list(map(str, self._rest))}

    def reject_unknown_keys(self) -> None:
        """Nothing may be left.

        Raises:
            WebConfigError: something is.
        """
        for key in self._rest:
            raise self.error(key, "unknown key")


def read_yaml(path: Path) -> Section:
    """The outermost mapping of the web configuration file; an empty file is an empty one.

    Raises:
        WebConfigError: it cannot be read, is not YAML, or holds the same key twice.
    """
    try:
        content = yaml.load(path.read_bytes(), _StrictLoader)
    except OSError as error:
        raise WebConfigError(f"{path}: cannot read the web configuration: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise WebConfigError(f"{path}: {where}{error.problem}") from None
    except (yaml.YAMLError, ValueError):
        # ValueError: a date or number that is none.
        raise WebConfigError(f"{path}: this is not a YAML text in UTF-8") from None
    return Section(path, "", content)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: of two settings the reader would see one and the server use the other."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    problem = f"the key {key_node.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)
