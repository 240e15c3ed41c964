"""Matches communicators that a user types: a prefix of the hash, in either case, with or without 0x."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

HASH_DIGITS: Final = 16
"""NCCL's commHash has 64 bits."""
_MOST_NAMED: Final = 5


def normalise_hash(text: str) -> str:
    """The hash of a communicator that somebody typed, as hashes are shown."""
    return text.strip().lower().removeprefix("0x")


def matches_prefix(comm: str, text: str) -> bool:
    """Whether a communicator is one of those that were meant; imported ones may have names that are no hashes.

    A whole hash means the communicator that has it, and not those of other processes that only say so (`hash~pid`).
    """
    if comm[HASH_DIGITS : HASH_DIGITS + 1] == "~" and len(normalise_hash(text)) == HASH_DIGITS:
        return False
    return comm.startswith((text, normalise_hash(text) or text))


def describe_ambiguity(option: str, text: str, comms: Collection[str]) -> str:
    """That more than one communicator was meant where one must be, and the first of them."""
    named = sorted(comms)
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    first = ", ".join(named[:_MOST_NAMED])
    return f"{option} {text}: {len(named)} communicators begin so, name one of them: {first}{more}"
