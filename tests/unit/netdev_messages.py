"""Simulated netlink messages and clocks for the tests of network devices."""

from __future__ import annotations

import struct

RTM_NEWLINK, RTM_DELLINK, RTM_NEWSTATS, NLMSG_DONE = 16, 17, 92, 3
STATISTICS = 25
"""Counters of struct rtnl_link_stats64 in Linux 6.x."""


class SteppedClock:
    """Time that moves when told to, and by `cost_ns` at every look."""

    def __init__(self, now_ns: int = 1_000_000_000, cost_ns: int = 0) -> None:
        self.now_ns = now_ns
        self.cost_ns = cost_ns

    def monotonic_ns(self) -> int:
        self.now_ns += self.cost_ns
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def message(kind: int, body: bytes, *, sequence: int = 1, flags: int = 2) -> bytes:
    length = 16 + len(body)
    return struct.pack("=IHHII", length, kind, flags, sequence, 0) + body + bytes(-length % 4)


def attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)


def done() -> bytes:
    return message(NLMSG_DONE, bytes(4))


def statistics(index: int, counters: dict[int, int], *, words: int = STATISTICS, before: bytes = b"") -> bytes:
    """RTM_NEWSTATS of one device; `counters` by position in struct rtnl_link_stats64."""
    values = [counters.get(position, 0) for position in range(words)]
    return message(
        RTM_NEWSTATS, struct.pack("=BxxxII", 0, index, 1) + before + attribute(1, struct.pack(f"={words}Q", *values))
    )


def link(
    index: int,
    name: str,
    *,
    kind: int = RTM_NEWLINK,
    family: int = 0,
    up: bool = True,
    carrier: bool = True,
    changes: int = 1,
    declared: str = "",
    master: int = 0,
    hardware_type: int = 1,
    port_name: str = "",
    bond_status: int | None = None,
) -> bytes:
    """RTM_NEWLINK or RTM_DELLINK of one device; `bond_status`: IFLA_BOND_SLAVE_MII_STATUS of a member of a bond."""
    body = struct.pack("=BxHiII", family, hardware_type, index, int(up), 0)
    body += attribute(3, name.encode() + b"\0") + attribute(4, struct.pack("=I", 1500))
    body += attribute(33, bytes([carrier])) + attribute(35, struct.pack("=I", changes))
    info = attribute(1, declared.encode() + b"\0") if declared else b""
    if bond_status is not None:
        member = attribute(1, b"\x01") + attribute(2, bytes([bond_status]))  # IFLA_BOND_SLAVE_STATE before it
        info += attribute(4, b"bond\0") + attribute(5 | 0x8000, member)
    if info:
        body += attribute(18 | 0x8000, info)
    if master:
        body += attribute(10, struct.pack("=I", master))
    if port_name:
        body += attribute(38, port_name.encode() + b"\0")
    return message(kind, body)
