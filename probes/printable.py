"""Text that others wrote, as it may be shown: on a terminal, in a label, in a log or on a page.

A process chooses its command line, its environment, its network devices' names and the paths of its files: in any
characters and as long as it likes.  A terminal obeys control characters, and marks of direction show a name as another;
a name without end fills a screen and a store.  Everything that is shown passes here on its way out.

What cannot be printed is what Unicode calls control, format (marks of direction and invisible joiners), private,
unassigned, half of a surrogate pair, or a separator other than the space: `str.isprintable`.
"""

from __future__ import annotations

from typing import Any, Final

LONGEST_SHOWN: Final = 1024
"""Characters of one value; a path may have 4,095."""
_REPLACEMENT: Final = "\ufffd"
_CUT: Final = "…"


def printable(text: str, longest: int | None = None, *, instead: str = _REPLACEMENT) -> str:
    """The text with `instead` for each character that cannot be printed, line breaks among them.

    Of what is longer than `longest` characters the last that stays is `…`; None: it is not cut.
    """
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + _CUT
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else instead for character in text)


def printable_lines(text: str) -> str:
    """The printable form of a text of several lines, whose line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_document(value: Any) -> Any:
    """A document of dictionaries, lists and plain values, with every text in it printable and bounded, keys too."""
    if isinstance(value, str):
        return printable(value, LONGEST_SHOWN)
    if isinstance(value, dict):
        return {printable_document(key): printable_document(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [printable_document(one) for one in value]
    return value
