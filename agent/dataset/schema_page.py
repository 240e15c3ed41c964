"""The schema of datasets as a page: every table, its columns, what they mean; made from `schema` itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from railscope.agent.dataset import schema
from railscope.agent.dataset.schema import SCHEMA_VERSION, TABLE_MEANINGS, TABLES

_TYPES: Final = {"string": "text", "int64": "integer", "int32": "integer", "double": "number", "bool": "boolean"}


def schema_page() -> str:
    """Markdown, ending in a line feed."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f"# Recorded datasets, version {SCHEMA_VERSION}"
    yield ""
    yield (schema.__doc__ or "").strip()
    for name, columns in TABLES.items():
        yield ""
        yield f"## `{name}`"
        yield ""
        yield TABLE_MEANINGS[name]
        yield ""
        yield "| Column | Type | Meaning |"
        yield "|---|---|---|"
        for field in columns:
            meaning = field.metadata[b"description"].decode().replace("|", "\\|")
            yield f"| `{field.name}` | {_type(field.type)} | {meaning} |"


def _type(kind: Any) -> str:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return f"{_TYPES[str(plain)]} ({kind if plain is kind else 'one of few words'})"
