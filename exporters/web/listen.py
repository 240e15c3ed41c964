"""Binds the socket of the HTTP server; its address is written as other exporters' are."""

from __future__ import annotations

import errno
import os
import socket

from railscope.agent.config.values import ListenAddress, listen_address

_HINTS = {errno.EADDRINUSE: "stop the other process or choose another --web.listen-address"}
_HINT = "choose another --web.listen-address"


class ServerError(Exception):
    """The server cannot do what its settings ask; the text is one line that says what to do."""


def parse_listen_address(text: str) -> ListenAddress:
    """The address to serve on: `HOST:PORT`, `:PORT` or `[v6]:PORT`.

    Raises:
        ServerError: it is none of these.
    """
    try:
        return listen_address(text)
    except ValueError:
        raise ServerError(f"cannot listen on {text!r}: expected HOST:PORT, :PORT or [v6]:PORT") from None


def bound_socket(address: ListenAddress) -> socket.socket:
    """A TCP socket bound to the address but not yet listening; for every address it takes IPv6 and IPv4 alike.

    Raises:
        ServerError: the address is in use, is not one of this host's, or may not be used.
    """
    try:
        if not address.host and socket.has_dualstack_ipv6():
            try:
                return _bound(socket.AF_INET6, ("::", address.port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        host = address.host or "0.0.0.0"
        # As bytes: for a text Python loads its tables of all characters, though a name hardly ever has others.
        name = host.encode() if host.isascii() else host
        found = socket.getaddrinfo(name, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name that stands for both, as localhost does, means IPv4, as scrape configurations write it.
        family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
        return _bound(family, where)
    except socket.gaierror as error:
        problem = f"{str(error.strerror).lower()}; {_HINT}"
    except OSError as error:
        problem = f"{os.strerror(error.errno or 0).lower()}; {_HINTS.get(error.errno or 0, _HINT)}"
    raise ServerError(f"cannot listen on {address}: {problem}")


def _bound(family: int, where: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if where[0] == "::" else 1)
        sock.bind(where)
    except OSError:
        sock.close()
        raise
    return sock
