"""Hostile clients in a process of their own: half-open heads, unread answers, silence, wrong passwords.

    python -m tests.unit.hostile_clients PORT COUNT KIND

Whoever is thrown out comes back.  It runs until its standard input ends; prints a line when all clients are there.
"""

from __future__ import annotations

import base64
import itertools
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_HALF_OPEN: Final = b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: "
_UNREAD: Final = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200
_PAUSE_SECONDS: Final = 0.1

_numbers: Final = itertools.count()


def connected(port: int) -> socket.socket:
    client = socket.socket()
    client.settimeout(5)
    client.connect(("127.0.0.1", port))
    return client


def half_open(client: socket.socket) -> None:
    client.sendall(_HALF_OPEN)


def unread(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.setblocking(False)
    client.send(_UNREAD)


def idle(_client: socket.socket) -> None:
    pass


def crowd(port: int, count: int, begin: Callable[[socket.socket], None], *, trickles: bool) -> None:
    """Hold so many connections, and replace those that end."""
    clients: list[socket.socket] = []
    told = False
    while not select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0]:
        staying = []
        for client in clients:
            try:
                if trickles:
                    client.send(b"a")
                # Answers stay unread: only the end is looked for.
                ended = not trickles and client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                ended = False
            except OSError:
                ended = True
            if ended:
                client.close()
            else:
                staying.append(client)
        clients = staying
        with suppress(OSError):
            while len(clients) < count:
                client = connected(port)
                clients.append(client)
                begin(client)
                client.setblocking(False)
        if not told and len(clients) == count:
            told = True
            print("there", flush=True)


def guess_for_ever(port: int, user: str) -> None:
    """Ask with one wrong password after the other."""
    while True:
        password = f"{user}:{next(_numbers)}".encode()
        head = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Basic " + base64.b64encode(password) + b"\r\n\r\n"
        with suppress(OSError), connected(port) as client:
            client.sendall(head)
            client.recv(100)


def main() -> None:
    port, count, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    crowds = {"half-open": half_open, "unread": unread, "idle": idle}
    if kind in crowds:
        crowd(port, count, crowds[kind], trickles=kind == "half-open")
        return
    for _ in range(count):
        threading.Thread(target=guess_for_ever, args=(port, kind), daemon=True).start()
    print("there", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
