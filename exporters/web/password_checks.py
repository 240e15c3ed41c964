"""Checks passwords on a thread of its own, so that who has the right one waits for few wrong ones.

bcrypt takes some 50 ms a password, on purpose.  Those that wait are checked in turns: one of each address and user
after the other, all unknown users of an address being one.  Of the same address and user the newest comes first: of a
client that asks again and again with wrong passwords many wait, of one with the right password one, and only once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    # bcrypt and its like are for those who configure passwords.
    from railscope.exporters.web.auth import BasicAuth

_logger: Final = logging.getLogger("railscope.http")
_MOST_OF_ONE: Final = 16
_MOST: Final = 64

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Checked(Generic[W]):
    """A password, for who gave it."""

    waiter: W
    right: bool


class PasswordChecks(Generic[W]):
    """Passwords that wait to be checked.  `W` is who waits, compared by identity and hash.

    All methods are for one thread; the worker's is begun by the first password.
    """

    def __init__(self, name: str, done: Callable[[Checked[W]], None]) -> None:
        """`done` is called on the worker's thread, which is `name`."""
        self._name = name
        self._done = done
        self._changed = threading.Condition()
        self._waiting: OrderedDict[tuple[str, str | None], dict[W, tuple[BasicAuth, str]]] = OrderedDict()
        """By address and known user, whose turn is next first."""
        self._ending = False
        self._thread: threading.Thread | None = None

    def ask(self, auth: BasicAuth, authorization: str, address: str, waiter: W) -> W | None:
        """`done` will be called with the result; returns who will not be told, because there are too many."""
        with self._changed:
            mine = self._waiting.setdefault((address, auth.known_user(authorization)), {})
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
        """Nobody waits there any more; a check that has begun may still name the waiter."""
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
        for whose in [whose for whose, mine in self._waiting.items() if not mine]:
            del self._waiting[whose]

    def _run(self) -> None:
        while (begun := self._begin()) is not None:
            waiter, auth, authorization = begun
            try:
                right = auth.accepts(authorization)
            except Exception as error:  # noqa: BLE001  # a password that cannot be checked is a wrong one
                _logger.error("a password cannot be checked: %s", type(error).__name__)
                right = False
            self._done(Checked(waiter, right))

    def _begin(self) -> tuple[W, BasicAuth, str] | None:
        """The next one; None: there will be none."""
        with self._changed:
            while not self._ending:
                if self._waiting:
                    whose, mine = next(iter(self._waiting.items()))
                    waiter, (auth, authorization) = mine.popitem()
                    self._waiting.move_to_end(whose)
                    self._forget_empty()
                    return waiter, auth, authorization
                self._changed.wait()
            return None
