"""Wire bytes that observed calls should have put on a host's edge, or why that cannot be known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from railscope.agent.model.edge_share import Placement, wire_share
from railscope.probes.nccl.abi import Op

SMALL_PAYLOAD_BYTES: Final = 64 * 1024
"""Messages up to this size may use a single rail."""
_MOST_BY_COLUMN: Final = 1 << 31
"""Shares of greater numbers, which only a forged communicator has, are multiplied one by one."""
_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64((1 << 32) - 1)


class ObservedCalls(NamedTuple):
    """Calls of one kind on one rank's end of a communicator."""

    comm: str
    """How to name the communicator to a person."""
    placement: Placement | None
    op: Op
    peer: int
    """Root or peer, as in `wire_share`."""
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


class ExpectedSums:
    """What calls of certain kinds should put on one rail set's wire, whatever payload they have come to.

    Pass every kind of call ever seen, also of processes that ended, so that the totals do not fall.
    """

    def __init__(
        self, rail_set: str, calls: Sequence[ObservedCalls], small_payload_bytes: int = SMALL_PAYLOAD_BYTES
    ) -> None:
        """`small_payload_bytes`: messages up to this size may use a single rail."""
        self._rail_set = rail_set
        small = [call.largest_call_bytes <= small_payload_bytes for call in calls]
        shares = [wire_share(call.placement, call.op, call.peer) for call in calls]
        self._transmit = _Direction(calls, small, [None if one is None else one.egress for one in shares])
        self._receive = _Direction(calls, small, [None if one is None else one.ingress for one in shares])

    def expected(self, payload_bytes: npt.NDArray[np.uint64]) -> ExpectedBytes:
        """The totals where the calls of each kind have this payload together, in the order of the kinds."""
        return ExpectedBytes(self._rail_set, self._transmit.totals(payload_bytes), self._receive.totals(payload_bytes))


class _Direction:
    """The kinds of calls whose bytes are known in one direction, grouped by their share of the payload."""

    def __init__(
        self, calls: Sequence[ObservedCalls], small: Sequence[bool], shares: Sequence[Fraction | None]
    ) -> None:
        self._unknown = next(
            (
                _why_unknown(call)
                for call, share in zip(calls, shares, strict=True)
                if call.active and (share is None or call.replayed)
            ),
            "",
        )
        groups: dict[tuple[Fraction, bool], list[int]] = {}
        for row, (share, is_small) in enumerate(zip(shares, small, strict=True)):
            if share:
                groups.setdefault((share, is_small), []).append(row)
        self._groups = [(share, is_small, np.array(rows)) for (share, is_small), rows in groups.items()]

    def totals(self, payload_bytes: npt.NDArray[np.uint64]) -> WireTotals:
        spread_bytes = small_bytes = 0
        for share, is_small, rows in self._groups:
            wire_bytes = whole_bytes(share, payload_bytes[rows])
            if is_small:
                small_bytes += wire_bytes
            else:
                spread_bytes += wire_bytes
        return WireTotals(spread_bytes, small_bytes, self._unknown)


def whole_bytes(share: Fraction, payload_bytes: npt.NDArray[np.uint64]) -> int:
    """The sum of each payload's share in whole bytes; never falls as one of them grows."""
    numerator, denominator = share.as_integer_ratio()
    if numerator > _MOST_BY_COLUMN or denominator > _MOST_BY_COLUMN:
        return sum(one * numerator // denominator for one in payload_bytes.tolist())
    whole, rest = np.divmod(payload_bytes, np.uint64(denominator))
    # In halves, so that no sum takes more than 64 bits.
    halves = int((whole & _LOW_HALF).sum()) + (int((whole >> _HALF).sum()) << 32)
    return halves * numerator + int((rest * np.uint64(numerator) // np.uint64(denominator)).sum())


def _why_unknown(call: ObservedCalls) -> str:
    if call.replayed:
        return f"communicator {call.comm} replays CUDA graphs, whose collectives are no calls"
    if call.placement is None:
        return f"the placement of communicator {call.comm}'s ranks is not known"
    if not call.placement.contiguous:
        return f"communicator {call.comm} does {call.op.name} with ranks that are not numbered node by node"
    return f"no model tells the bytes of {call.op.name} on communicator {call.comm}"
