"""nccl-tests' factors from algorithm to bus bandwidth."""

from __future__ import annotations

from fractions import Fraction

from railscope.probes.nccl.abi import Op


def bus_factor(op: int, nranks: int) -> Fraction | None:
    """Bus bytes for each byte of payload; None: nccl-tests has none for this kind of operation."""
    match op:
        case Op.AllReduce:
            return Fraction(2 * (nranks - 1), nranks)
        case Op.AllGather | Op.ReduceScatter | Op.AllToAll:
            return Fraction(nranks - 1)
        case Op.Broadcast | Op.Reduce:
            return Fraction(1)
        case _:
            return None
