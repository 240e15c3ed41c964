"""A number of things as people read it: `1 GPU`, `1,024 GPUs`."""

from __future__ import annotations


def format_count(number: int, noun: str, plural: str = "s") -> str:
    """A count with its noun: `1 GPU`, `32 GPUs`; `plural` is what is added."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
