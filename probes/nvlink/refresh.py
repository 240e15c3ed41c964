"""How often NVML's byte counters change: sampling faster than that shows the same value twice, then a jump."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

from railscope.probes.clock import Clock
from railscope.probes.nvlink.nvml import SUCCESS, Handle, NvmlSession

_LOOK_NS: Final = 250_000_000
_PAUSE_SECONDS: Final = 0.002
_FEWEST_CHANGES: Final = 4


def refresh_seconds(session: NvmlSession, gpu: Handle, field: tuple[int, int], clock: Clock) -> float | None:
    """Median time between two changes of a (field, scope), watched for a quarter of a second.

    As fine as the looks are apart, about 2 ms.  None: it changed too rarely to tell, as on an idle link.

    Raises:
        NvmlError: the field cannot be read any more.
    """
    started_ns = clock.monotonic_ns()
    changes_ns: list[int] = []
    last: int | None = None
    while (now_ns := clock.monotonic_ns()) - started_ns < _LOOK_NS:
        answer = session.field_values(gpu, [field])
        if answer.codes != (SUCCESS,):
            return None
        (value,) = answer.values
        if last is not None and value != last:
            changes_ns.append(now_ns)
        last = value
        clock.sleep(_PAUSE_SECONDS)
    if len(changes_ns) < _FEWEST_CHANGES:
        return None
    return median(after - before for before, after in pairwise(changes_ns)) / 1e9
