"""Shared readers of the programs' maps: totals by operation, and deletion of ended entries."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
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


def have_ended(tgids: Records, known: Collection[int]) -> Any:
    """Which of these process numbers, as the agent sees them, are among the `known` ones or no process's any more.

    A child that was forked and ended inside a call may never have been known.
    """
    gone = [tgid for tgid in np.unique(tgids).tolist() if tgid in known or not _exists(tgid)]
    return np.isin(tgids, np.array(gone, np.uint32))


def _exists(tgid: int) -> bool:
    try:
        os.kill(tgid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def delete_where(table: Map, chosen: Callable[[Records, Records], Any]) -> None:
    """Delete the entries of a BPF map that `chosen` picks from keys and values.

    Raises:
        KernelRefusal: the map cannot be read or written.
    """
    keys, values = table.read()
    for key in keys[chosen(keys, values)]:
        table.delete(key.tobytes())
