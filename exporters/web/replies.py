"""Decides what becomes of a request: an answer at once, a page to be rendered, or a password to be checked first."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from railscope.exporters.web.http_request import Request, RequestRefused, parse_request
from railscope.exporters.web.pages import Answer, Page, Pages, one_line_answer

if TYPE_CHECKING:
    # Passwords and TLS are 6 MB of code, for those who configure them.
    from railscope.exporters.web.auth import BasicAuth
    from railscope.exporters.web.config import WebConfigFile

_logger: Final = logging.getLogger("railscope.http")

MAX_HEAD_BYTES: Final = 16 * 1024
_CHALLENGE: Final = (("WWW-Authenticate", 'Basic realm="railscope", charset="UTF-8"'),)


@dataclass(frozen=True, slots=True)
class PasswordCheck:
    """A password that cannot be judged at once."""

    auth: BasicAuth
    authorization: str
    request: Request


@dataclass(frozen=True, slots=True)
class Reply:
    """What to do for one request."""

    todo: Answer | Page | PasswordCheck
    """The answer; or the page to be rendered, or the password to be checked, before there is one."""
    close: bool = True
    """The connection ends with the answer."""
    only_head: bool = False
    more_may_come: bool = False
    """The client may still be sending what is not read."""
    authenticated: bool = False
    """The request came with the right password."""


class Replies:
    """The requests of one server; never waits, and holds no lock that a snapshot holds."""

    def __init__(self, pages: Pages, web: WebConfigFile | None) -> None:
        self._pages = pages
        self._web = web

    def to_head(self, head: bytes, peer: str) -> Reply:
        """The reply to a request's head as it came, which may be too long or no request at all."""
        try:
            if len(head) > MAX_HEAD_BYTES:
                raise RequestRefused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            request = parse_request(head)
        except RequestRefused as refused:
            _logger.debug("%s: %d", peer, refused.status)
            return Reply(one_line_answer(refused.status, refused.status.phrase.lower()), more_may_come=True)
        # As a literal: what a client sent must not be able to write lines of the log.
        _logger.debug("%s: %r", peer, request.line)
        if self._web is None:
            return self._to_request(request)
        auth, authorization = self._web.auth(), request.headers.get("authorization", "")
        right = auth.recall(authorization)
        if right is None:
            return _reply(request, PasswordCheck(auth, authorization, request))
        return replace(self._to_request(request), authenticated=auth.has_users) if right else self._refused(request)

    def to_checked(self, check: PasswordCheck, *, right: bool) -> Reply:
        """The reply to a request whose password was checked."""
        return replace(self._to_request(check.request), authenticated=True) if right else self._refused(check.request)

    def format_head(self, answer: Answer, *, close: bool) -> bytes:
        """The head of a response, up to its empty line."""
        lines = [
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            "Server: railscope",
            # The C locale's names: a daemon sets no other.
            f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
        ]
        own_headers = self._web.headers() if self._web is not None else ()
        lines += [f"{name}: {value}" for name, value in (*answer.headers, *own_headers)]
        if close:
            lines.append("Connection: close")
        return "\r\n".join((*lines, "", "")).encode("latin-1")

    def _to_request(self, request: Request) -> Reply:
        if request.method not in ("GET", "HEAD"):
            allowed = (("Allow", "GET, HEAD"),)
            return _reply(request, one_line_answer(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", allowed))
        accept, accept_encoding = request.headers.get("accept", ""), request.headers.get("accept-encoding", "")
        page = self._pages.page(request.path, request.query, accept=accept, accept_encoding=accept_encoding)
        return _reply(request, self._pages.answer(request.path) if page is None else page)

    def _refused(self, request: Request) -> Reply:
        line = "a user and password are required"
        return _reply(request, one_line_answer(HTTPStatus.UNAUTHORIZED, line, _CHALLENGE))


def _reply(request: Request, todo: Answer | Page | PasswordCheck) -> Reply:
    return Reply(
        todo,
        close=request.has_body or not request.stays,
        only_head=request.method == "HEAD",
        more_may_come=request.has_body,
    )
