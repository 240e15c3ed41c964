"""Answers that many clients share, and how many bytes of them are still to be sent."""

from __future__ import annotations


class Body:
    """The bytes of one answer, once for all whom it is sent to."""

    __slots__ = ("data", "holders")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.holders = 0


class UnsentBodies:
    """The bodies that are not sent to all of their clients yet."""

    def __init__(self) -> None:
        self.total_bytes = 0
        """Of each body once, however many share it."""

    def hold(self, body: Body) -> None:
        """One more is to get it."""
        if body.holders == 0:
            self.total_bytes += len(body.data)
        body.holders += 1

    def release(self, body: Body) -> None:
        """One fewer is to get it."""
        body.holders -= 1
        if body.holders == 0:
            self.total_bytes -= len(body.data)
