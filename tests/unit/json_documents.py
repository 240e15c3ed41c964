"""Checks what the agent tells programs in JSON against the schemas that docs/reference publishes."""

from __future__ import annotations

import json
from typing import Any, Final

import jsonschema

from railscope.exporters.web.pages import render_stalls
from tests.docs.reference import PAGES

VERDICTS: Final = "verdicts"
STALLS: Final = "stalls"


def _validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((PAGES / f"{name}.schema.json").read_text())
    for one in schema["$defs"].values():
        # Clients take fields of later versions; what today's tells is all in the schema.
        one["additionalProperties"] = False
    return jsonschema.Draft202012Validator(schema)


_VALIDATORS: Final = {name: _validator(name) for name in (STALLS, VERDICTS)}


def checked(name: str, text: str | bytes) -> dict[str, Any]:
    """A document, after its schema has been asked.

    Raises:
        jsonschema.ValidationError: it is not what the schema says.
    """
    document: dict[str, Any] = json.loads(text)
    _VALIDATORS[name].validate(document)
    return document


def stalls_page(*arguments: Any) -> dict[str, Any]:
    """What `/stalls` shows, by the arguments of `render_stalls`."""
    return checked(STALLS, render_stalls(*arguments))
