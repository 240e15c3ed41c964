"""Whose the bytes of a rail were and where they came from: one table, of which both series of metrics are sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from railscope.agent.facts.traffic_owners import TrafficOwner

RailKey = tuple[int, str]
"""Network namespace (inode) and device; RDMA ports have a namespace of 0 and `device:port`, or `device/port` as
samplers call them."""


class Origin(Enum):
    """Where port bytes came from, as labels call it.  Every byte has exactly one."""

    COLLECTIVE = "collective"
    """Moved by observed collectives."""
    TRANSFER = "transfer"
    """Moved by another communication library, whose sockets are known."""
    OVERHEAD = "overhead"
    """Headers of the packets of collectives and transfers, and of what is unseen."""
    RETRANSMISSION = "retransmission"
    """What these sent again."""
    FOREIGN = "foreign"
    """Of other processes, or of unknown ones."""
    UNSEEN = "unseen"
    """Of observed processes, and of no observed collective."""
    OFFLOAD = "offload"
    """Moved by the network itself."""


@dataclass(frozen=True, slots=True)
class DirectionLedger:
    """Port bytes of a rail in one direction by owner and origin, since railscope first saw them; none ever falls.

    See agent/node/attribution/ledger.py.  Together they are what the port counted until its connections were last read,
    which is at most some seconds ago.
    """

    cells: Mapping[tuple[TrafficOwner, Origin], int]
    """What is not there is 0."""
    error_ratio: float | None
    """Half the width of the band that an owner or an origin may lie in, over all bytes; None: there are none yet."""

    def of_origin(self, origin: Origin) -> int:
        """Bytes of all owners that came from there."""
        return sum(count for (_, one), count in self.cells.items() if one is origin)

    def of_owner(self, owner: TrafficOwner) -> int:
        """An owner's bytes, wherever they came from."""
        return sum(count for (one, _), count in self.cells.items() if one is owner)


@dataclass(frozen=True, slots=True)
class RailLedger:
    transmit: DirectionLedger
    receive: DirectionLedger
