"""Tells systemd how the agent does: ready, reloading, stopping, and that its loop turns.

Without a service manager (`NOTIFY_SOCKET` is not set) nothing is told.  A message is a datagram: it never waits, and
one that the manager's full socket does not take is lost; the watchdog's is sent again with the next turn.

Why not python-systemd: it is a binding of libsystemd, which a host without systemd lacks, for three datagrams.

Sources: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Final

from railscope.probes.clock import Clock

_log = logging.getLogger("railscope.daemon")

_NEVER: Final = 1 << 63
_MICROSECOND_NS: Final = 1_000


class ServiceManager:
    """For one thread."""

    def __init__(self, clock: Clock, environment: Mapping[str, str], pid: int) -> None:
        """Read where to tell it, and how often, from an environment; `pid` is this process's."""
        self._clock = clock
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._feed_every_ns: int | None = None
        watched = environment.get("WATCHDOG_PID", "")
        limit_us = environment.get("WATCHDOG_USEC", "")
        if self._address and watched in ("", str(pid)) and limit_us.isdecimal() and int(limit_us):
            self._feed_every_ns = int(limit_us) * _MICROSECOND_NS // 2
        self.feed_due_ns = clock.monotonic_ns() if self._feed_every_ns is not None else _NEVER
        """When the watchdog is to be fed next (monotonic); without one long after everything else."""
        self._failed = False

    def ready(self, status: str) -> None:
        """The agent serves, or has reloaded its configuration; `status` is for `systemctl status`."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """The agent reloads its configuration; `ready` ends that."""
        # systemd 253 and newer (Type=notify-reload) compare this time with that of their own request.
        self._send(f"RELOADING=1\nMONOTONIC_USEC={self._clock.monotonic_ns() // _MICROSECOND_NS}")

    def stopping(self) -> None:
        """The agent ends."""
        self._send("STOPPING=1")

    def feed(self, now_ns: int) -> None:
        """The loop has turned; from the loop only, or the watchdog watches nothing."""
        if self._feed_every_ns is not None and now_ns >= self.feed_due_ns and self._send("WATCHDOG=1"):
            self.feed_due_ns = now_ns + self._feed_every_ns

    def _send(self, state: str) -> bool:
        if not self._address:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.connect(self._address)
                sender.send(state.encode())
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    _log.warning("systemd cannot be told: %s", error)
                return False
        self._failed = False
        return True
