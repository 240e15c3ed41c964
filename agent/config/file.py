"""Reads a configuration file strictly: an unknown key is an error with file, line and key.

The file is YAML: groups of keys, one level deep, each value a scalar or a list of scalars.  A typing error in a
configuration that is silently ignored costs an operator more than a daemon that does not start, so an unknown or
doubled key, a value of the wrong kind and a value out of range are errors of one line that say what is allowed.  All
errors of a file are told at once.  PyYAML's safe loader parses; its nodes carry the line numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from railscope.agent.config.keys import TRUE_WORDS, ConfigError, Key, Kind, Written, one_line, suggest_nearest

__all__ = ["ConfigError", "Key", "Kind", "read_config_file"]

_LARGEST_FILE_BYTES: Final = 1 << 20
_LONGEST_NAME: Final = 80
_DID_YOU_MEAN: Final = "; did you mean "
_TAG: Final = "tag:yaml.org,2002:"


def read_config_file(path: Path, keys: Mapping[str, Key]) -> dict[str, Written]:
    """The values that a file sets, by `group.key`; lists are tuples.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or has something in it that `keys` does not allow: one line
            for each such thing, in the order of the file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    if len(content) > _LARGEST_FILE_BYTES:
        raise ConfigError(f"{path}: this is not a configuration file: it has more than {_LARGEST_FILE_BYTES} bytes")
    reader = _Reader(path, keys)
    values = reader.values(_parse(path, content))
    if reader.problems:
        raise ConfigError(*(f"{path}: line {line}: {problem}" for line, problem in sorted(reader.problems)))
    return values


def _parse(path: Path, content: bytes) -> yaml.Node | None:
    try:
        return yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {place}this is not YAML: {one_line(error.problem or error.context)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not YAML: {one_line(str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{path}: this is not a configuration file: it is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    keys: Mapping[str, Key]
    problems: list[tuple[int, str]] = field(default_factory=list)
    """With the line that each is in."""

    def values(self, document: yaml.Node | None) -> dict[str, Written]:
        """What the document sets; what it may not set is among the problems."""
        values: dict[str, Written] = {}
        if document is None or _is_null(document):
            return values
        groups = sorted({name.partition(".")[0] for name in self.keys})
        for group, node in self._entries(document, "", groups):
            if not _is_null(node):
                members = [name.partition(".")[2] for name in self.keys if name.startswith(f"{group}.")]
                for member, value in self._entries(node, f"{group}.", members):
                    key = self.keys[f"{group}.{member}"]
                    try:
                        read = self._value(value, key)
                    except _WrongValue as wrong:
                        self._add_problem(wrong.node, str(wrong))
                    else:
                        values[key.name] = Written(read, f"{self.path} line {value.start_mark.line + 1}")
        return values

    def _entries(self, node: yaml.Node, prefix: str, allowed: list[str]) -> list[tuple[str, yaml.Node]]:
        """The entries of a mapping whose names are known, each once."""
        if not isinstance(node, yaml.MappingNode):
            where = f"{prefix[:-1]} must hold" if prefix else "the file must hold"
            self._add_problem(node, f"{where} keys with values ({', '.join(allowed)})")
            return []
        lines: dict[str, int] = {}
        entries = []
        for name_node, value in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "?"
            if name not in allowed:
                self._add_problem(name_node, self._unknown(prefix, name, allowed))
            elif name in lines:
                self._add_problem(
                    name_node, f"{prefix}{name} is set a second time; line {lines[name]} has it too: remove one"
                )
            else:
                lines[name] = name_node.start_mark.line + 1
                entries.append((name, value))
        return entries

    def _unknown(self, prefix: str, name: str, allowed: list[str]) -> str:
        kind = "key" if prefix else "group"
        shown = one_line(name)[:_LONGEST_NAME]
        return f"{prefix}{shown} is no {kind} of this file{self._hint(prefix, name, allowed)}"

    def _hint(self, prefix: str, name: str, allowed: list[str]) -> str:
        """What to write instead: never what was written, which may be a key's very name in the wrong place."""
        word = name.strip().lstrip("-").replace("-", "_").casefold()
        listed = f" (allowed: {', '.join(allowed)})"
        by_flag = {key.flag.lstrip("-").replace("-", "_"): key.name for key in self.keys.values()}
        for whole in (prefix + word, word):
            if (key := self.keys.get(whole) or self.keys.get(by_flag.get(whole, ""))) is not None:
                return self._right_place(prefix, name, key.name)
        if word in allowed:
            return f"; did you mean {word}?{listed}"
        if hint := suggest_nearest(word, allowed):
            return hint + listed
        # A key of another group, or one whose group was mistyped, too.
        elsewhere = [key for key in self.keys if key.partition(".")[2] == word.rpartition(".")[2]]
        if not elsewhere and (close := suggest_nearest(prefix + word, self.keys)).startswith(_DID_YOU_MEAN):
            elsewhere = [close.removeprefix(_DID_YOU_MEAN).rstrip("?")]
        return self._right_place(prefix, name, elsewhere[0]) if elsewhere else listed

    def _right_place(self, prefix: str, written: str, name: str) -> str:
        """A hint at the key called `name`; keys stand below their groups, whatever messages and documents call them."""
        group, _, key = name.partition(".")
        if prefix == f"{group}.":
            return f"; did you mean {key}?"
        nested = f"write {group}: {{{key}: …}}"
        return f"; {nested}" if written == name else f"; did you mean {name}? ({nested})"

    def _value(self, node: yaml.Node, key: Key) -> object:
        if key.kind is not Kind.LIST:
            return self._scalar(node, key)
        if not isinstance(node, yaml.SequenceNode):
            raise self._wrong_kind(node, key)
        entry = Key(key.name, Kind.TEXT, key.read)
        read, wrong = [], []
        for value in node.value:
            try:
                read.append(self._scalar(value, entry))
            except _WrongValue as error:
                wrong.append(error)
        for one in wrong[:-1]:
            self._add_problem(one.node, str(one))
        if wrong:
            raise wrong[-1]
        return tuple(read)

    def _scalar(self, node: yaml.Node, key: Key) -> object:
        tag = node.tag.removeprefix(_TAG)
        if not isinstance(node, yaml.ScalarNode) or tag not in _TAGS[key.kind]:
            raise self._wrong_kind(node, key)
        if key.kind is Kind.BOOLEAN:
            return node.value.lower() in TRUE_WORDS
        try:
            return key.read(node.value)
        except ValueError as error:
            raise _WrongValue(node, f"{key.name}: {error}") from None

    def _wrong_kind(self, node: yaml.Node, key: Key) -> _WrongValue:
        if _is_null(node):
            return _WrongValue(node, f"{key.name} has no value: write {key.kind.value}, or remove the line")
        if isinstance(node, yaml.ScalarNode):
            quoted = " in quotes" if node.style in ("'", '"') else ""
            found = f"{one_line(node.value)[:80]!r}{quoted}"
        else:
            found = "a list" if isinstance(node, yaml.SequenceNode) else "a group of keys"
        return _WrongValue(node, f"{key.name}: {found} is not {key.kind.value}")

    def _add_problem(self, node: yaml.Node, problem: str) -> None:
        self.problems.append((node.start_mark.line + 1, problem))


class _WrongValue(Exception):
    """A value that its key does not take."""

    def __init__(self, node: yaml.Node, problem: str) -> None:
        super().__init__(problem)
        self.node = node


_TAGS: Final = {
    # A text may look like another type (`off`, `16`, `2024-01-01`): its reader sees what was written.
    Kind.TEXT: frozenset({"str", "int", "float", "bool", "timestamp"}),
    Kind.INTEGER: frozenset({"int"}),
    Kind.BOOLEAN: frozenset({"bool"}),
}


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == f"{_TAG}null")
