"""How large calls are (transfer sizes; paper A's request-size distribution, paper B's message sizes).

The table is exact: every size that occurred, with its number of calls.  The cumulative distribution (CDF) of a size is
the part of calls that are at most so large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts.fact_columns import Sizes
from railscope.agent.analysis.tables.calls import NOTHING, CountedCalls
from railscope.agent.analysis.tables.grouping import Integers, sum_by_group


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """A cumulative distribution, as columns of equal length."""

    bytes: Integers
    """The sizes, rising."""
    calls_share: NDArray[np.float64]
    """Part of calls that are at most so large: rises from size to size, and ends at exactly 1."""

    def quantile_bytes(self, share: float) -> int | None:
        """The smallest size that at least this part of calls does not exceed; None: there are no calls."""
        if not len(self.bytes):
            return None
        return int(self.bytes[np.searchsorted(self.calls_share, share)])


def find_sizes(counted: CountedCalls) -> Sizes:
    """Transfer sizes: calls by operation and size, in this order; calls of unknown size are left out."""
    known = np.flatnonzero(counted.payload_bytes != NOTHING)
    op = counted.by_row(counted.kinds.op.astype(np.int32))
    (own, size), (calls,) = sum_by_group((op[known], counted.payload_bytes[known]), counted.calls[known])
    return Sizes(counted.op_names, own, size, calls)


def cdf(sizes: Sizes) -> Distribution:
    """The cumulative distribution of transfer sizes over all operations together."""
    found, calls = sizes.sum_over_ops()
    return Distribution(found, cumulative_shares(calls))


def cumulative_shares(calls: Integers) -> NDArray[np.float64]:
    """Which part of all calls come up to each of these sizes; ends at exactly 1."""
    reached = np.cumsum(calls)
    result: NDArray[np.float64] = reached / max(int(calls.sum()), 1)
    return result
