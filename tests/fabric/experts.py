"""What the workload's experts send each other, by the driver's own arithmetic (`moe_split` in driver_patterns.c)."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

_EQUAL_BYTES = (32 << 10) * 2
"""Of an AlltoAll, to each rank."""
_TOKEN_BYTES = 1024 * 2
_MOST_TOKENS = 256


def expert_bytes(seed: int, iterations: int, ranks: int) -> NDArray[np.int64]:
    """Bytes from one rank (row) to another (column): two rounds of Send and Recv an iteration, and an AlltoAll."""
    sent = np.full((ranks, ranks), iterations * _EQUAL_BYTES, dtype=np.int64)
    for round_, source, destination in product(range(2 * iterations), range(ranks), range(ranks)):
        tokens = _mixed(seed ^ round_, source << 32 | destination) % (_MOST_TOKENS + 1)
        sent[source, destination] += tokens * _TOKEN_BYTES
    np.fill_diagonal(sent, 0)
    return sent


def _mixed(a: int, b: int) -> int:
    """The driver's random numbers (`mix` in driver_data.c)."""
    whole = (1 << 64) - 1
    z = ((a + 1) * 0x9E3779B97F4A7C15 & whole) ^ ((b + 1) * 0xD1B54A32D192ED03 & whole)
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & whole
    z = (z ^ z >> 27) * 0x94D049BB133111EB & whole
    return z ^ z >> 31
