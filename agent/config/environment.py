"""Reads settings from variables of the environment: `RAILSCOPE_WEB_LISTEN_ADDRESS` is `web.listen_address`.

The name is the key's, or the flag's where there is no key, in capitals, with `_` for each dot.  A list is written with
commas or spaces between its entries, and an empty text is the empty list.  true, yes, on and 1 are true; false, no, off
and 0 are false.

As in the file, a mistyped name is an error: a variable that begins with `RAILSCOPE_` and a group's name, or that is
close to a variable which sets a key, sets one, or is wrong; so is one that is made of a flag (`RAILSCOPE_STALL_AFTER`
of `--stall.after`, whose key is `stalls.after`).  Kubernetes gives every container variables of its services
(`RAILSCOPE_WEB_SERVICE_HOST`, `RAILSCOPE_PORT_9779_TCP_ADDR`), also of one that is called railscope or railscope-web:
those are left alone.
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
_SURELY: Final = 0.85
"""Likeness, of 1, from which a name outside of all groups is a mistyped one."""


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
    of_flags = {_of_flag(key.flag): variable for variable, key in keys.items() if key.flag}
    values: dict[str, Written] = {}
    problems = []
    for variable, text in sorted(environment.items()):
        key = keys.get(variable)
        if key is not None:
            try:
                values[key.name] = Written(_value(text, key), variable)
            except ValueError as error:
                problems.append(f"environment: {variable}: {error}")
        elif variable.startswith(VARIABLE_PREFIX) and not _OF_KUBERNETES.fullmatch(variable):
            group, underscore, _ = variable.removeprefix(VARIABLE_PREFIX).partition("_")
            if variable in of_flags:
                hint = f"; did you mean {of_flags[variable]}?"
            elif underscore and group in groups:
                hint = suggest_nearest(variable, keys) or "; unset it"
            else:
                hint = _close_to(variable, keys)
            if hint:
                problems.append(f"environment: {variable[:_LONGEST_NAME]} sets no key{hint}")
    if problems:
        raise ConfigError(*problems)
    return values


def _close_to(variable: str, keys: Mapping[str, Key]) -> str:
    """A hint at the variable that was surely meant, else nothing: other programs' begin with our name, too."""
    import difflib  # only ever for an error

    names = [known.removeprefix(VARIABLE_PREFIX) for known in keys]
    close = difflib.get_close_matches(variable.removeprefix(VARIABLE_PREFIX), names, n=1, cutoff=_SURELY)
    return f"; did you mean {VARIABLE_PREFIX}{close[0]}?" if close else ""


def _of_flag(flag: str) -> str:
    """The variable that someone would write who knows the flag."""
    return VARIABLE_PREFIX + re.sub(r"[.-]", "_", flag.removeprefix("--")).upper()


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
