"""Reads settings from variables of the environment: `RAILSCOPE_WEB_LISTEN_ADDRESS` is `web.listen_address`.

The name is the key's, or the flag's where there is no key, in capitals, with `_` for each dot.  A list is written with
commas or spaces between its entries, and an empty text is the empty list.  true, yes, on and 1 are true; false, no, off
and 0 are false.

As in the file, a mistyped name is an error: a variable that begins with `RAILSCOPE_` and a group's name sets a key, or
is wrong.  Kubernetes gives every container variables of its services (`RAILSCOPE_WEB_SERVICE_HOST`,
`RAILSCOPE_PORT_9779_TCP_ADDR`), also of one that is called railscope or railscope-web: those are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from railscope.agent.config.keys import (
    FALSE_WORDS,
    TRUE_WORDS,
    VARIABLE_PREFIX,
    ConfigError,
    Key,
    Kind,
    Written,
    suggest_nearest,
)
from railscope.agent.config.values import split_list

_OF_KUBERNETES: Final = re.compile(
    r".*_(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_[A-Z]+)?)?)"
)
"""Source: makeLinkVariables in pkg/kubelet/envvars/envvars.go of Kubernetes."""
_LONGEST_NAME: Final = 80


def read_environment(environment: Mapping[str, str], keys: Mapping[str, Key]) -> dict[str, Written]:
    """The values that an environment sets, by the key's name; lists are tuples.

    Args:
        environment: variables and their values.
        keys: what may be set, by variable.

    Raises:
        ConfigError: one line for each variable that sets no key though it looks like it, or whose value is wrong.
    """
    groups = {
        variable.removeprefix(VARIABLE_PREFIX).partition("_")[0] for variable, key in keys.items() if "." in key.name
    }
    values: dict[str, Written] = {}
    problems = []
    for variable, text in sorted(environment.items()):
        key = keys.get(variable)
        if key is not None:
            try:
                values[key.name] = Written(_value(text, key), variable)
            except ValueError as error:
                problems.append(f"environment: {variable}: {error}")
        elif _looks_like_ours(variable, groups):
            hint = suggest_nearest(variable, keys) or "; unset it"
            problems.append(f"environment: {variable[:_LONGEST_NAME]} sets no key{hint}")
    if problems:
        raise ConfigError(*problems)
    return values


def _looks_like_ours(variable: str, groups: set[str]) -> bool:
    group, underscore, _ = variable.removeprefix(VARIABLE_PREFIX).partition("_")
    return bool(
        variable.startswith(VARIABLE_PREFIX)
        and underscore
        and group in groups
        and not _OF_KUBERNETES.fullmatch(variable)
    )


def _value(text: str, key: Key) -> object:
    if key.kind is Kind.LIST:
        return tuple(key.read(entry) for word in text.split() for entry in split_list(word) if entry)
    if key.kind is not Kind.BOOLEAN:
        return key.read(text)
    if (word := text.strip().lower()) in TRUE_WORDS | {"1"}:
        return True
    if word in FALSE_WORDS | {"0"}:
        return False
    raise ValueError(f"{text!r} is not true or false")
