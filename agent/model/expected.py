"""Wire bytes that observed calls should have put on a host's edge, or why that cannot be known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from railscope.agent.model.edge_share import Placement, wire_share
from railscope.probes.nccl.abi import Op

SMALL_PAYLOAD_BYTES: Final = 64 * 1024
"""Messages up to this size may use a single rail."""


class ObservedCalls(NamedTuple):
    """All calls so far of one kind on one rank's end of a communicator."""

    comm: str
    """How to name the communicator to a person."""
    placement: Placement | None
    op: Op
    peer: int
    """Root or peer, as in `wire_share`."""
    payload_bytes: int
    """Sum over the calls; never falls."""
    largest_call_bytes: int
    """Upper bound of one call's payload (of the size bucket, for instance)."""
    active: bool = True
    """False once the communicator is gone: what could not be known of it then no longer hides what is known."""
    replayed: bool = False
    """The communicator also runs collectives without a call: CUDA graphs are replayed."""


@dataclass(frozen=True, slots=True)
class WireTotals:
    """Expected wire bytes so far in one direction; neither number ever falls."""

    spread_bytes: int = 0
    """Of messages that use all rails alike."""
    small_bytes: int = 0
    """Of messages that may use a single rail."""
    unknown: str = ""
    """Why the totals cannot be known; empty: they are known."""


@dataclass(frozen=True, slots=True)
class ExpectedBytes:
    rail_set: str
    transmit: WireTotals
    receive: WireTotals


def expected_bytes(
    rail_set: str, calls: Iterable[ObservedCalls], small_payload_bytes: int = SMALL_PAYLOAD_BYTES
) -> ExpectedBytes:
    """Sum what the calls of one rail set's processes should put on the wire.

    Pass every kind of call ever seen, also of processes that ended, so that the totals do not fall.
    """
    transmit, receive = _Sum(), _Sum()
    for call in calls:
        share = wire_share(call.placement, call.op, call.peer)
        small = call.largest_call_bytes <= small_payload_bytes
        transmit.add(call, None if share is None else share.egress_bytes(call.payload_bytes), small)
        receive.add(call, None if share is None else share.ingress_bytes(call.payload_bytes), small)
    return ExpectedBytes(rail_set, transmit.totals(), receive.totals())


@dataclass(slots=True)
class _Sum:
    spread_bytes: int = 0
    small_bytes: int = 0
    unknown: str = ""

    def add(self, call: ObservedCalls, wire_bytes: int | None, small: bool) -> None:
        if call.active and (wire_bytes is None or call.replayed):
            self.unknown = self.unknown or _why_unknown(call)
        if wire_bytes is None:
            return
        if small:
            self.small_bytes += wire_bytes
        else:
            self.spread_bytes += wire_bytes

    def totals(self) -> WireTotals:
        return WireTotals(self.spread_bytes, self.small_bytes, self.unknown)


def _why_unknown(call: ObservedCalls) -> str:
    if call.replayed:
        return f"communicator {call.comm} replays CUDA graphs, whose collectives are no calls"
    if call.placement is None:
        return f"the placement of communicator {call.comm}'s ranks is not known"
    if not call.placement.contiguous:
        return f"communicator {call.comm} does {call.op.name} with ranks that are not numbered node by node"
    return f"no model tells the bytes of {call.op.name} on communicator {call.comm}"
