"""Puts the settings together: the command line goes before the environment, that before the file, that before defaults.

Errors of the file and of the environment are reported together, so that an operator mends them in one go.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, Final

from railscope.agent.config.environment import read_environment
from railscope.agent.config.keys import ConfigError, Kind, Written
from railscope.agent.config.options import COLLECTORS, ENVIRONMENT_KEYS, FILE_KEYS, OPTIONS, Config


class Source(Enum):
    """Where a value comes from; the value is the word for it."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Setting:
    """One option's effective value."""

    name: str
    """`group.key`, or the flag, without dashes, of what has no key."""
    field: str
    """Of `Config`; of a collector `collectors`."""
    value: object
    source: Source
    place: str
    """File and line, variable or flag; empty for a default."""


@dataclass(frozen=True, slots=True)
class Effective:
    """All settings of an agent."""

    config: Config
    settings: tuple[Setting, ...]
    """In the order of `OPTIONS`, then of `COLLECTORS`."""


_DEFAULTS: Final = Config()
_FILE_OPTION: Final = "config.file"


def config_from(args: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """The configuration from parsed arguments, an environment, and the file that they name.

    Raises:
        ConfigError: the file or the environment cannot be used.
    """
    return effective_settings(args, environment).config


def effective_settings(args: argparse.Namespace, environment: Mapping[str, str]) -> Effective:
    """Every setting of the configuration, and where it comes from.

    Raises:
        ConfigError: the file or the environment cannot be used: one line for each error of both.
    """
    given = vars(args)
    problems: list[str] = []
    from_environment: dict[str, Written] = {}
    from_file: dict[str, Written] = {}
    try:
        from_environment = read_environment(environment, ENVIRONMENT_KEYS)
    except ConfigError as error:
        problems += error.problems
    try:
        from_file = _read_file(_file_of(given, from_environment))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)

    def setting(name: str, field: str, flag: str, argument: str, default: object, kind: Kind) -> Setting:
        if argument in given:
            value = tuple(chain.from_iterable(given[argument])) if kind is Kind.LIST else given[argument]
            if kind is Kind.BOOLEAN and not value:
                flag = flag.replace("--", "--no-", 1)
            return Setting(name, field, value, Source.COMMAND_LINE, flag)
        for source, values in ((Source.ENVIRONMENT, from_environment), (Source.FILE, from_file)):
            if (written := values.get(name)) is not None:
                return Setting(name, field, written.value, source, written.place)
        return Setting(name, field, default, Source.DEFAULT, "")

    options = [
        setting(one.name, one.field, one.flag, one.field, getattr(_DEFAULTS, one.field), one.kind) for one in OPTIONS
    ]
    collectors = [setting(one.key, "collectors", one.flag, one.field, one.enabled, Kind.BOOLEAN) for one in COLLECTORS]
    names = {field.name for field in fields(Config)}
    values: dict[str, Any] = {name: value for name, value in given.items() if name in names}
    values.update({one.field: one.value for one in options})
    values["collectors"] = frozenset(
        collector.name for collector, one in zip(COLLECTORS, collectors, strict=True) if one.value
    )
    return Effective(Config(**values), (*options, *collectors))


def _file_of(given: Mapping[str, Any], from_environment: Mapping[str, Written]) -> Path | None:
    if "config_file" in given:
        named = given["config_file"]
    else:
        written = from_environment.get(_FILE_OPTION)
        named = written.value if written is not None else None
    assert named is None or isinstance(named, Path)
    return named


def _read_file(path: Path | None) -> dict[str, Written]:
    if path is None:
        return {}
    # A YAML parser is not for an agent without a file.
    from railscope.agent.config.file import read_config_file

    return read_config_file(path, FILE_KEYS)
