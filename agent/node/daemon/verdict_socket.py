"""Tells programs on this host of each stall that begins, changes its cause or ends: a unix socket with lines of JSON.

The agent acts on nothing: it has rights that no script of an operator's needs, and a script may hang.  A program
that drains a node reads this socket as another user (`railscope verdicts --on-verdict PROGRAM`, agent/cli/verdicts.py).

A client gets a line of greeting, a line for each stall that stands, and from then on a line for each change:

    {"version": 1, "event": "hello", "host": "gpu-17", "railscope": "0.1", "stalls": 1, "lost": 0}
    {"version": 1, "event": "standing", "id": "7-81520034211", "confidence": "high", "verdict": {...}, "lost": 0}

`verdict` is what `/stalls` shows.  A later version may add fields and events; a change of what one means changes
`version`.  The loop never waits for a client: one that does not read loses lines, and `lost` in its next line says how
many.  Of one user's stalls at most `MOST_OF_A_USER` are told at a time, so that they crowd out no other user's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from railscope.agent.facts.hardware_evidence import NodeHardware, find_hardware_evidence
from railscope.agent.facts.stall import VERDICT_VERSION, Diagnosis, Stall
from railscope.exporters.web.listen import ServerError
from railscope.exporters.web.pages import describe_stall
from railscope.exporters.web.stall_documents import Change, HelloLine, VerdictLine
from railscope.probes.clock import Clock
from railscope.probes.printable import printable_document

_log = logging.getLogger("railscope.verdicts")

MOST_CLIENTS: Final = 16
MOST_OF_A_USER: Final = 64
MOST_UNSENT_BYTES: Final = 1 << 20
"""For one client."""
_MODE: Final = 0o660


@dataclass(slots=True, eq=False)
class _Client:
    channel: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    lost: int = 0
    """Lines that it was not sent, since the last one that it was."""


class VerdictSocket:
    """For the loop's thread only."""

    def __init__(self, path: Path, host: str, railscope: str, clock: Clock) -> None:
        """Listen at `path`, which its folder's rights and mode 0660 keep from others.  `railscope`: the version.

        Raises:
            ServerError: no socket can be had there.
        """
        self._path = path
        self._host = host
        self._railscope = railscope
        self._clock = clock
        self._listener = _listen(path)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: list[_Client] = []
        self._hardware: Callable[[], NodeHardware] = NodeHardware
        self._standing: dict[int, Stall] = {}
        """By instance: a communicator's end stalls in one operation at a time."""
        self._accepts = True
        """Whether the listener is looked at: not from when the host has no descriptor left until `publish`."""
        self._refused = ""
        """Why the last client was not taken; empty: it was."""

    def fileno(self) -> int:
        """Becomes readable when `serve` has something to do."""
        return self._selector.fileno()

    def serve(self) -> None:
        """Accept clients, drop those that have gone, and send what waits, as far as it goes."""
        for ready, events in self._selector.select(0):
            if ready.fileobj is self._listener:
                self._accept()
                continue
            client: _Client = ready.data
            if events & selectors.EVENT_READ and not self._listens(client):
                self._drop(client)
            elif events & selectors.EVENT_WRITE:
                self._send(client)

    def publish(self, current: Iterable[Stall], hardware: Callable[[], NodeHardware] = NodeHardware) -> None:
        """Tell what has changed since the last call.

        Args:
            current: all stalls that go on.
            hardware: what is known of this host's hardware; asked for where there is a stall to tell of, until the
                next call.
        """
        self._hardware = hardware
        if not self._accepts:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepts = True
        now = {stall.instance: stall for stall in current}
        before, self._standing = self._standing, now
        if not self._clients or not (before or now):
            return
        changes: list[tuple[Change, Stall]] = []
        for instance, stall in before.items():
            after = now.get(instance)
            if after is None or after.since_ns != stall.since_ns:
                ended_ns = stall.ended_ns or self._clock.monotonic_ns()
                changes.append(("ended", replace(stall, ended_ns=ended_ns)))
        for instance, stall in now.items():
            earlier = before.get(instance)
            if earlier is None or earlier.since_ns != stall.since_ns:
                changes.append(("begun", stall))
            elif _blame(earlier.diagnosis) != _blame(stall.diagnosis):
                changes.append(("changed", stall))
        self._tell(changes, self._clients)

    def close(self) -> None:
        """Close every connection, and take the socket away."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has gone again
        except OSError as error:
            # It goes on waiting, and would make the socket readable at once again.
            self._selector.unregister(self._listener)
            self._accepts = False
            self._refuse(error.strerror or str(error))
            return
        if len(self._clients) >= MOST_CLIENTS:
            self._refuse(f"{MOST_CLIENTS} are connected already")
            channel.close()
            return
        self._refused = ""
        channel.setblocking(False)
        client = _Client(channel)
        self._clients.append(client)
        self._selector.register(channel, selectors.EVENT_READ, client)
        hello: HelloLine = {
            "version": VERDICT_VERSION,
            "event": "hello",
            "host": self._host,
            "railscope": self._railscope,
            "stalls": len(self._standing),
            "lost": client.lost,
        }
        self._queue(client, hello)
        self._tell([("standing", stall) for stall in self._standing.values()], [client])
        if client in self._clients:
            self._send(client)

    def _refuse(self, why: str) -> None:
        """A line for the first of those who are refused for one reason in a row: a client may come again and again."""
        if why != self._refused:
            _log.warning("%s: clients are refused: %s", self._path, why)
        self._refused = why

    def _listens(self, client: _Client) -> bool:
        """Whether a client is still there; what it says is not read."""
        try:
            return bool(client.channel.recv(4096))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _tell(self, changes: Collection[tuple[Change, Stall]], clients: Collection[_Client]) -> None:
        told: Counter[str] = Counter()
        hardware = self._hardware() if changes and clients else NodeHardware()
        for event, stall in changes:
            user = stall.owner.user if stall.owner is not None else ""
            told[user] += 1
            if told[user] > MOST_OF_A_USER:
                for client in clients:
                    client.lost += 1
                continue
            evidence = find_hardware_evidence(hardware, stall)
            verdict = describe_stall(stall, self._clock.monotonic_ns(), hardware=evidence)
            for client in clients:
                line: VerdictLine = {
                    "version": VERDICT_VERSION,
                    "event": event,
                    "id": f"{stall.instance}-{stall.since_ns}",
                    "confidence": stall.confidence,
                    "verdict": verdict,
                    "lost": client.lost,
                }
                self._queue(client, line)
        if changes:
            for client in list(clients):
                self._send(client)

    def _queue(self, client: _Client, line: HelloLine | VerdictLine) -> None:
        data = json.dumps(printable_document(line), separators=(",", ":")).encode() + b"\n"
        if len(client.unsent) + len(data) > MOST_UNSENT_BYTES:
            client.lost += 1
        else:
            client.unsent += data
            client.lost = 0

    def _send(self, client: _Client) -> None:
        try:
            while client.unsent:
                del client.unsent[: client.channel.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.channel, events, client)

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.channel)
            client.channel.close()


def _blame(diagnosis: Diagnosis) -> tuple[object, ...]:
    return diagnosis.cause, diagnosis.blamed_rank, diagnosis.rail, diagnosis.device, diagnosis.netns


def _listen(path: Path) -> socket.socket:
    """A listening socket; one that a killed agent left behind is replaced.

    Raises:
        ServerError: no socket can be had there.
    """
    if not path.parent.is_dir():
        raise ServerError(f"--verdicts.socket: {path}: there is no folder {path.parent}; make it, or name another one")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
            path.unlink()
        listener.bind(os.fspath(path))
        path.chmod(_MODE)  # while it listens to no client
        listener.listen(MOST_CLIENTS)
    except OSError as error:
        listener.close()
        why = "another agent listens there" if _answers(path) else (error.strerror or str(error)).lower()
        raise ServerError(
            f"--verdicts.socket: {path}: {why}; name a socket in a folder that the agent may write to"
        ) from None
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True
