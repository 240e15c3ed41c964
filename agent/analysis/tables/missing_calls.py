"""What a recording says of calls that were made and are not in it: figures that count calls are too small by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from railscope.agent.dataset.reader import Dataset

_WORDS: Final = {
    "calls_lost": "calls were observed and not recorded: counts and bytes are too small by them",
    "calls_removed": "calls were removed by --max-size: counts and bytes cover the others",
}
"""By column of `recordings`."""


def missing_calls_of(dataset: Dataset) -> tuple[str, ...]:
    """As `describe_missing_calls`, of an open dataset."""
    columns = dataset["recordings"].select("node", *_WORDS)
    return tuple(describe_missing_calls(dataset.rows(columns).to_pylist()))


def describe_missing_calls(recordings: Sequence[dict[str, Any]]) -> Iterable[str]:
    """How many calls are missing and on which nodes, one sentence each; none where none is known to be."""
    for column, words in _WORDS.items():
        yield from describe_count(recordings, column, words)


def describe_count(recordings: Sequence[dict[str, Any]], column: str, words: str) -> Iterable[str]:
    """`7 calls were observed … (on node-0).`: the sum of a column, and the nodes that have a part in it; 0: nothing."""
    count = sum(row[column] or 0 for row in recordings)
    if count:
        yield f"{count:,} {words} (on {some_names(sorted({row['node'] for row in recordings if row[column]}))})."


def some_names(names: Sequence[str]) -> str:
    """All names, or the first three and how many more."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
