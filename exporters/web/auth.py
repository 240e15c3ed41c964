"""Who may read: basic authentication against bcrypt hashes.

bcrypt is slow on purpose (some 50 ms at cost 10), and Prometheus sends its password with every scrape.  So a password
that was right is remembered, as a digest under a key that dies with the process.  A wrong one costs the full time
again, and so does a user that does not exist, so that the response time does not reveal users.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Final

import bcrypt

_HASH: Final = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
_COSTS: Final = range(4, 32)
_MAX_PASSWORD_BYTES: Final = 72
"""bcrypt looks at no more; newer libraries refuse longer ones instead of cutting them, as htpasswd's do."""
_REMEMBERED: Final = 100


def is_bcrypt_hash(text: str) -> bool:
    """Whether the text is a bcrypt hash as htpasswd and others write it."""
    match = _HASH.fullmatch(text)
    return match is not None and int(match[1]) in _COSTS


class BasicAuth:
    """Checks Authorization headers against users and their hashes.  Safe to use from several threads."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """`users` maps names to bcrypt hashes, each of which passes `is_bcrypt_hash`."""
        self._hashes = {user: hashed.encode() for user, hashed in users.items()}
        costs = [int(hashed.split("$")[2]) for hashed in users.values()]
        # A hash that no password has, at the price of the dearest: what unknown users are checked against.
        self._nobody = bcrypt.gensalt(max(costs, default=_COSTS.start)) + b"." * 31
        self._secret = secrets.token_bytes(32)
        self._remembered: dict[bytes, None] = {}
        # One bcrypt at a time: a flood of wrong passwords takes one core at most.
        self._turn = threading.Lock()

    @property
    def has_users(self) -> bool:
        """Whether a password is asked for."""
        return bool(self._hashes)

    def recall(self, authorization: str) -> bool | None:
        """Whether the header's value names a user with the right password, as far as that can be said at once.

        True without users, and for a password that was right before; False where there is no password to check; None
        where only `accepts` can tell.
        """
        if not self._hashes:
            return True
        credentials = _basic_credentials(authorization)
        if credentials is None:
            return False
        user, password = credentials
        remembered = self._digest(user, password) in self._remembered  # first, so that it takes as long for any user
        return True if remembered and user in self._hashes else None

    def known_user(self, authorization: str) -> str | None:
        """The user that the header's value names, None where there is none of that name."""
        credentials = _basic_credentials(authorization)
        return credentials[0] if credentials is not None and credentials[0] in self._hashes else None

    def accepts(self, authorization: str) -> bool:
        """Whether the header's value names a user with the right password; always true without users.  Takes long."""
        recalled = self.recall(authorization)
        credentials = _basic_credentials(authorization)
        if recalled is not None or credentials is None:
            return recalled is True
        user, password = credentials
        hashed = self._hashes.get(user)
        with self._turn:
            right = _matches(password, hashed or self._nobody) and hashed is not None
            if right:
                if len(self._remembered) >= _REMEMBERED:
                    del self._remembered[next(iter(self._remembered))]
                self._remembered[self._digest(user, password)] = None
        return right

    def _digest(self, user: str, password: bytes) -> bytes:
        name = user.encode("utf-8", "surrogateescape")
        return hmac.digest(self._secret, len(name).to_bytes(8, "big") + name + password, hashlib.sha256)


def _matches(password: bytes, hashed: bytes) -> bool:
    try:
        return bcrypt.checkpw(password[:_MAX_PASSWORD_BYTES], hashed)
    except ValueError:
        # A NUL in the password, or a hash whose salt is no base64.
        return False


def _basic_credentials(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, encoded = authorization.strip().partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user.decode("utf-8", "surrogateescape"), password) if colon else None
