"""What a metrics server is told: where it listens, and how much it gives its clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    listen_address: str = "127.0.0.1:9779"
    telemetry_path: str = "/metrics"
    max_connections: int = 512
    """Connections served at once; fewer where the process may not have four times as many descriptors.  A further one
    takes the place of one that needs it less (connection_table.py)."""
    request_timeout_seconds: float = 10.0
    """For a handshake, for a request to arrive once it began, and for an answer to be taken."""
    idle_timeout_seconds: float = 30.0
    """How long a connection may wait for its next request."""
    wrong_password_seconds: float = 2.0
    """How long after a request with a wrong password its answer comes; up to four times as long for a client that goes
    on guessing."""
    unsent_bytes: int = 64 * 1024 * 1024
    """Most bytes of answers that clients have not taken, each answer once; a single larger one is sent all the same."""
