"""Telling the service manager how the agent does."""

from __future__ import annotations

import logging
import os
import socket

_log = logging.getLogger("railscope.daemon")


def notify(state: str) -> None:
    """Tell the service manager, where there is one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.send(state.encode())
        except OSError as error:
            _log.warning("systemd cannot be told: %s", error)
