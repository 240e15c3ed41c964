"""The bytes that a rank sends to the next one of a ring: the one source for live counts, recordings and the model.

A ring is single and directed, in the order of its members.  For a payload of b bytes a member of g sends to the next

| Operation                | Bytes                                                                  |
|--------------------------|------------------------------------------------------------------------|
| AllReduce                | 2b less two of the g chunks: 2b(g−1)/g where g divides b's elements    |
| AllGather, ReduceScatter | (g−1)b                                                                 |
| Broadcast                | b, but nothing to the root                                             |
| Reduce                   | b, but nothing from the root                                           |

and a ring of one sends nothing.  Where the root is not known, neither is what is sent, and that is no byte.

Source: NCCL's ring kernels (src/device/all_reduce.h, all_gather.h, reduce_scatter.h, broadcast.h, reduce.h).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

ALL_REDUCE: Final = "AllReduce"
_GATHERED: Final = frozenset({"AllGather", "ReduceScatter"})
_ROOTED: Final = frozenset({"Broadcast", "Reduce"})
RING_OPS: Final = frozenset({ALL_REDUCE}) | _GATHERED | _ROOTED

Integers = NDArray[np.int64]


def payloads_sent(op: str, members: int, place: Integers, root: Integers) -> Integers:
    """How often the members at these places send the payload to the next one; not of AllReduce, which sends parts.

    Raises:
        KeyError: the operation is none of a ring that sends whole payloads.
    """
    if op in _GATHERED:
        return np.full(place.shape, members - 1, dtype=np.int64)
    if op not in _ROOTED:
        raise KeyError(op)
    last = (place + 1) % members if op == "Broadcast" else place
    sent: Integers = ((root >= 0) & (root < members) & (last != root) & (members > 1)).astype(np.int64)
    return sent


def all_reduce_bytes(payload: Integers, element: Integers, members: int, place: Integers) -> Integers:
    """What the member at `place` of a ring sends to the next in an AllReduce, by call.

    The payload is split into chunks of whole elements, the first ones one element longer; a member sends all chunks but
    the one after its own in the reduce-scatter half, and all but the one after that in the all-gather half.  So bytes
    of a ring are exact also where its members do not divide the payload, and add up to 2b(g−1).
    """
    if members == 1:
        return np.zeros(np.broadcast_shapes(payload.shape, place.shape), dtype=np.int64)
    element = np.where(payload % element == 0, element, 1)
    elements = payload // element
    whole, over = elements // members, elements % members
    skipped = 2 * whole + ((place + 1) % members < over) + ((place + 2) % members < over)
    sent: Integers = element * (2 * elements - skipped)
    return sent


@lru_cache(1 << 14)
def ring_share(op: str, members: int, place: int, root: int) -> Fraction:
    """Bytes that a ring's member sends for each of payload, where only sums are known; of AllReduce as if g divided.

    Raises:
        KeyError: the operation is none of a ring.
    """
    if op == ALL_REDUCE:
        return Fraction(2 * (members - 1), members)
    return Fraction(int(payloads_sent(op, members, np.array(place), np.array(root))))
