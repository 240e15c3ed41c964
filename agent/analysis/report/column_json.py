"""Writes columns of facts as a JSON array in parts, so that millions of rows are never in memory as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, Final

from railscope.agent.analysis.facts.fact_columns import Columns

_AT_A_TIME: Final = 10_000
"""Facts that are written together."""
_NO_NAMES: Final[Mapping[str, str]] = {}


def column_parts(facts: Columns[Any], indent: int, names: Mapping[str, str] = _NO_NAMES) -> Iterator[str]:
    """Long columns of a report as JSON, as the standard library would write them, only ten times as fast.

    Args:
        indent: spaces before the array's closing bracket.
        names: keys that are not called as the facts' fields.
    """
    if not len(facts):
        yield "[]"
        return
    columns = [column.name for column in fields(facts[0])]
    inner = " " * (indent + 2)
    lines = ",\n".join(f'{inner}  "{names.get(name, name)}": %s' for name in columns)
    form = f"{inner}{{\n{lines}\n{inner}}}"
    values = attrgetter(*columns)
    for first in range(0, len(facts), _AT_A_TIME):
        written = ",\n".join([form % tuple(map(_token, values(fact))) for fact in facts[first : first + _AT_A_TIME]])
        yield f"{',' if first else '['}\n{written}"
    yield f"\n{' ' * indent}]"


def _token(value: int | str) -> int | str:
    return value if isinstance(value, int) else _quoted(value)


@cache
def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
