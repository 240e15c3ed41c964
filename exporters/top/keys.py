"""Which keys the bytes from a terminal are.

Special keys arrive as an escape sequence, over ssh sometimes in pieces; the Escape key alone is the first byte of one.
So an unfinished sequence waits for its rest, and is what it is when none comes soon.

Source: xterm's control sequences, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

_SEQUENCE: Final = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|O[ -~])")
_UNFINISHED: Final = re.compile("\x1b(?:\\[[0-?]*[ -/]*|O)?\\Z")
_NAMES: Final = {
    **{f"\x1b{kind}{letter}": name for kind in "[O" for letter, name in (("A", "up"), ("B", "down"))},
    **{f"\x1b{kind}{letter}": name for kind in "[O" for letter, name in (("C", "right"), ("D", "left"))},
    **{f"\x1b{kind}{letter}": name for kind in "[O" for letter, name in (("H", "home"), ("F", "end"))},
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[Z": "backtab",
    "\x1b[1~": "home",
    "\x1b[7~": "home",
    "\x1b[4~": "end",
    "\x1b[8~": "end",
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
}


class Keys:
    """Decodes what is typed."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""

    @property
    def unfinished(self) -> bool:
        """Something waits for its rest, or for `flush`."""
        return bool(self._waiting)

    def feed(self, data: bytes) -> list[str]:
        """The keys that are complete: a character, or a name as `up`, `enter`, `escape`."""
        text = self._waiting + self._decoder.decode(data)
        self._waiting = ""
        keys = []
        at = 0
        while at < len(text):
            if match := _SEQUENCE.match(text, at):
                if match[0] in _NAMES:
                    keys.append(_NAMES[match[0]])
                at = match.end()
            elif text[at] == "\x1b":
                if _UNFINISHED.match(text, at):
                    self._waiting = text[at:]
                    break
                keys.append("escape")
                at += 1
            else:
                keys.append(_NAMES.get(text[at], text[at]))
                at += 1
        return keys

    def flush(self) -> list[str]:
        """The keys in what waited in vain."""
        waiting, self._waiting = self._waiting, ""
        return ["escape", *waiting[1:]] if waiting else []
