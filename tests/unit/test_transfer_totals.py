"""Sums of transfers over processes: what a program claims to move may be anything.  Rows are made up (simulated)."""

from __future__ import annotations

import numpy as np

from railscope.agent.node.transfers.totals import Sums
from railscope.probes.transfers.functions import OPERATIONS
from railscope.probes.transfers.records import TRANSFER_TOTAL

PUT = next(number for number, one in enumerate(OPERATIONS) if (one.library.value, one.op) == ("ucx", "Put"))


def test_a_total_never_falls_whatever_processes_claim() -> None:
    rows = np.zeros(4, TRANSFER_TOTAL)
    rows["operations"] = 1
    rows["bytes"] = (1 << 63, (1 << 64) - 1, 5, 7)
    sums = Sums()
    sums.add(np.array((PUT, PUT, PUT, 255), np.uint32), rows)
    (one,) = sums.totals()
    assert (one.operations, one.payload_bytes) == (3, (1 << 63) + (1 << 64) + 4)
    before = sums.copy()
    sums.add(np.array((PUT,), np.uint32), rows[:1])
    assert sums.totals()[0].payload_bytes == (1 << 64) * 2 + 4
    assert before.totals() == (one,), "a copy is its own"


def test_operations_that_are_given_up_are_counted() -> None:
    sums = Sums()
    sums.add(np.array((PUT,), np.uint32), np.ones(1, TRANSFER_TOTAL))
    sums.give_up(np.array((PUT, PUT, 255), np.uint32))
    assert sums.totals()[0].unfollowed == 3
