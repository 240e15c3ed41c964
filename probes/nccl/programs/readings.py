"""Shared readers of the programs' maps: totals by operation, and deletion of ended entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.internals import DISTRIBUTION


def distributions_by_op(table: Map) -> dict[Op, Records]:
    """Sums over all processors of a per-CPU array of DISTRIBUTION by op; ops that never happened are left out.

    Raises:
        KernelRefusal: the map cannot be read.
    """
    _, values = table.read()
    totals = np.zeros(len(values), DISTRIBUTION)
    for name in ("count", "sum", "buckets"):
        totals[name] = values[name].sum(axis=1)
    return {Op(op): totals[op] for op in totals["count"].nonzero()[0].tolist()}


def delete_where(table: Map, chosen: Callable[[Records, Records], Any]) -> None:
    """Delete the entries of a BPF map that `chosen` picks from keys and values.

    Raises:
        KernelRefusal: the map cannot be read or written.
    """
    keys, values = table.read()
    for key in keys[chosen(keys, values)]:
        table.delete(key.tobytes())
