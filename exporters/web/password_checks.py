"""Checks passwords on a thread of its own, those of clients that have guessed wrong last.

bcrypt takes some 50 ms a password, on purpose.  Passwords that wait stand in lines, one of each client and user; all
unknown users of a client are one.  The line with the fewest wrong passwords of the last half minute is next, lines of
equally many take turns.  Of the same line the newest comes first: of a client that guesses many wait, of one with the
right password one, and only once (auth.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    # bcrypt and its like are for those who configure passwords.
    from railscope.exporters.web.auth import BasicAuth

_logger: Final = logging.getLogger("railscope.http")
_MOST_OF_ONE: Final = 64
_MOST: Final = 128
_HALVED_SECONDS: Final = 30.0
"""In so long a client's wrong passwords come to count half."""
_MOST_LINES: Final = 1024
"""Whose wrong passwords are remembered; beyond them those that guessed longest ago are forgotten."""

W = TypeVar("W")
_Line = tuple[str, str | None]
"""A client and the known user whose password it gives."""


@dataclass(frozen=True, slots=True)
class Checked(Generic[W]):
    """A password, for the client that gave it."""

    waiter: W
    right: bool
    wrong_lately: float = 0.0
    """How many wrong ones the client has given for the user, this one included; older ones count less."""


class PasswordChecks(Generic[W]):
    """Passwords that wait to be checked.  `W` is the waiting request, compared by identity and hash.

    All methods are for one thread; the worker's is begun by the first password.
    """

    def __init__(
        self, name: str, done: Callable[[Checked[W]], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`done` is called on the worker's thread, which is `name`; `now` in seconds of a monotonic clock."""
        self._name = name
        self._done = done
        self._now = now
        self._changed = threading.Condition()
        self._waiting: OrderedDict[_Line, dict[W, tuple[BasicAuth, str]]] = OrderedDict()
        """Of lines with equally many wrong passwords, the one whose turn is next first."""
        self._wrong: OrderedDict[_Line, tuple[float, float]] = OrderedDict()
        """How many wrong passwords counted, and when; the line that guessed last at the end."""
        self._ending = False
        self._thread: threading.Thread | None = None

    def ask(self, auth: BasicAuth, authorization: str, client: str, waiter: W) -> W | None:
        """`done` will be called with the result; returns the waiter that will not be told: too many wait."""
        with self._changed:
            mine = self._waiting.setdefault((client, auth.known_user(authorization)), {})
            mine[waiter] = (auth, authorization)
            dropped = None
            if len(mine) > _MOST_OF_ONE:
                dropped = self._oldest(mine)
            elif sum(map(len, self._waiting.values())) > _MOST:
                dropped = self._oldest(max(self._waiting.values(), key=len))
            self._forget_empty()
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return dropped

    def withdraw(self, waiter: W) -> None:
        """The waiter has gone; a check that has begun may still name it."""
        with self._changed:
            for mine in self._waiting.values():
                mine.pop(waiter, None)
            self._forget_empty()

    def close(self, seconds: float) -> bool:
        """Check nothing more; whether the thread has ended within so long."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _oldest(self, mine: dict[W, tuple[BasicAuth, str]]) -> W:
        oldest = next(iter(mine))
        del mine[oldest]
        return oldest

    def _forget_empty(self) -> None:
        for line in [line for line, mine in self._waiting.items() if not mine]:
            del self._waiting[line]

    def _run(self) -> None:
        while (begun := self._begin()) is not None:
            line, waiter, auth, authorization = begun
            try:
                right = auth.accepts(authorization)
            except Exception as error:  # noqa: BLE001  # a password that cannot be checked is a wrong one
                _logger.error("a password cannot be checked: %s", type(error).__name__)
                right = False
            self._done(Checked(waiter, right, 0.0 if right else self._record_wrong(line)))

    def _begin(self) -> tuple[_Line, W, BasicAuth, str] | None:
        """The next one; None: there will be none."""
        with self._changed:
            while not self._ending:
                if self._waiting:
                    line = min(self._waiting, key=self._wrong_lately)  # of equals the first
                    waiter, (auth, authorization) = self._waiting[line].popitem()
                    self._waiting.move_to_end(line)
                    self._forget_empty()
                    return line, waiter, auth, authorization
                self._changed.wait()
            return None

    def _wrong_lately(self, line: _Line) -> float:
        count, at = self._wrong.get(line, (0.0, 0.0))
        return float(count * 0.5 ** ((self._now() - at) / _HALVED_SECONDS)) if count else 0.0

    def _record_wrong(self, line: _Line) -> float:
        with self._changed:
            count = self._wrong_lately(line) + 1
            self._wrong[line] = count, self._now()
            self._wrong.move_to_end(line)
            if len(self._wrong) > _MOST_LINES:
                self._wrong.popitem(last=False)
        return count
