"""Parses the head of an HTTP/1 request by RFC 9112.

Python's `http.server` would read it, too, and brings the machinery of e-mail and OpenSSL with it: 7 MB that an agent
keeps for as long as it runs, to read five lines at each scrape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

_VERSION: Final = re.compile(rb"HTTP/(\d{1,10})\.(\d{1,10})")
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET: Final = re.compile(rb"[!-~\x80-\xff]+")
_HOST: Final = re.compile(r"(\[[0-9A-Za-z:.%\-_~!$&'()*+,;=]+\]|[0-9A-Za-z.%\-_~!$&'()*+,;=]*)(:[0-9]*)?")
"""A host as a URL names it; may be empty.  Two of them, joined as a list, are none, for the space between them."""
_ORIGIN: Final = re.compile(r"https?://[^/?#]+", re.IGNORECASE)
_LINE_END: Final = re.compile(rb"\r?\n")
_EMPTY_LINES: Final = re.compile(rb"(?:\r?\n)*")
_MOST_FIELDS: Final = 100


class RequestRefused(Exception):
    """This is no request that can be answered."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One request without its body, for which there is no use here."""

    line: str
    """As it came, for the log."""
    method: str
    target: str
    headers: Mapping[str, str]
    """By name in lower case; those that were given several times as one list, which means the same (RFC 9110, 5.3)."""
    stays: bool
    """Whether the client means to ask again on this connection."""

    @property
    def path(self) -> str:
        """The target without its query, and without the host that one writes who believes to ask a proxy."""
        origin = _ORIGIN.match(self.target)
        path = self.target[origin.end() if origin else 0 :].partition("?")[0]
        return path or "/"

    @property
    def query(self) -> str:
        """What stands behind the target's question mark, as it came; empty: nothing."""
        return self.target.partition("?")[2]

    @property
    def has_body(self) -> bool:
        """Whether a body follows, which must not be taken for the next request."""
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers


def without_empty_lines(arrived: bytes) -> bytes:
    """What arrived of an HTTP request, from the first line that is not empty: some clients end requests with more."""
    found = _EMPTY_LINES.match(arrived)
    return arrived[found.end() :] if found else arrived


def parse_request(head: bytes) -> Request:
    """An HTTP request from its first line to its empty one.

    Raises:
        RequestRefused: with the status to answer.
    """
    first, *rest = _LINE_END.split(head)
    while rest and not rest[-1]:
        rest.pop()
    words = first.split(b" ")
    if len(words) == 2:
        words.append(b"HTTP/1.0")  # one who says nothing is an old one
    if len(words) != 3:
        raise RequestRefused(HTTPStatus.BAD_REQUEST)
    method, target, version = words
    number = _VERSION.fullmatch(version)
    if number is None or not _NAME.fullmatch(method) or not _TARGET.fullmatch(target):
        raise RequestRefused(HTTPStatus.BAD_REQUEST)
    if int(number[1]) != 1:
        raise RequestRefused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    headers = _headers(rest)
    # Exactly one Host header is required: a proxy on the way may have used the other one.
    host = headers.get("host", None if int(number[2]) >= 1 else "")
    if host is None or not _HOST.fullmatch(host):
        raise RequestRefused(HTTPStatus.BAD_REQUEST)
    wishes = {wish.strip().lower() for wish in headers.get("connection", "").split(",")}
    return Request(
        line=first.decode("latin-1"),
        method=method.decode("ascii"),
        target=target.decode("latin-1"),
        headers=headers,
        stays="close" not in wishes and (int(number[2]) >= 1 or "keep-alive" in wishes),
    )


def _headers(lines: list[bytes]) -> dict[str, str]:
    if len(lines) > _MOST_FIELDS:
        raise RequestRefused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        # No space before the colon, no line that goes on in the next: who forwards requests may read those otherwise.
        # The same goes for a carriage return that ends no line, and for what ends a string in C.
        if not colon or not _NAME.fullmatch(name) or b"\r" in value or b"\0" in value:
            raise RequestRefused(HTTPStatus.BAD_REQUEST)
        key, text = name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers
