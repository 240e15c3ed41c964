"""Tells calls between steps (an evaluation, a checkpoint, a metric) from a step's own ones, by their communicator.

A communicator whose calls come once in many segments belongs to something between steps, or the segments are no steps:
the gradients of a pipeline's replicas come once in many micro-batches, and those of a group of experts once in many
layers.  What tells them apart:

- Gradients come after the same number of micro-batches every time; an evaluation may not.
- Gradients move about as much as a micro-batch does, or more; a metric a hundredth of that.
- Gradients are called one behind the other; the calls of an evaluation come over several steps' time, and what it
  takes is many steps' time.
- No model has as many layers, and no step as many micro-batches, as there may be steps between two evaluations.

Where none of these holds, it is not known, and segments are taken for parts of an iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from railscope.agent.rhythm.series import Integers

STEPS_BETWEEN: Final = 10
"""So many segments at least are between two stretches of other calls."""
NO_LAYERS: Final = 150
"""More layers no model has (126 in the largest that is published), nor micro-batches a step."""
CALLS_OF_A_STEP: Final = 6
"""Fewer may be those of a layer."""
LEAST_CALLS: Final = 3
"""Before one of two calls, silence tells nothing."""
_UNEQUAL: Final = 0.25
"""Numbers of segments that differ by so much are no number of micro-batches."""
_UNEQUAL_BY: Final = 2
_OFTEN: Final = 0.2
"""Of them: calls that were lost may have been in one."""
_NO_GRADIENTS: Final = 0.01
"""Of the payload of a segment: gradients are more."""
_SPREAD: Final = 2.0
"""Calls that come over so many segments' time are not called one behind the other."""
_LONG: Final = 8.0
"""What takes so many segments' time is more than gradients and the optimizer take."""


@dataclass(frozen=True, slots=True)
class OtherCalls:
    """Calls that usual segments lack, in stretches between these; columns of equal length."""

    segments_before: Integers
    """How many segments there were before each stretch."""
    called_ns: Integers
    """From its first call to its last one."""
    took_ns: Integers
    """Of the segments that it is in."""
    usual_calls: Integers
    """In these segments, such as usual segments have."""
    payload_bytes: int
    """Of all stretches together."""


def lie_between(others: OtherCalls, usual_ns: float, usual_bytes: int, usual_count: int, length: int) -> bool:
    """Whether these calls lie between segments that are steps: they begin after a silence as there is none within.

    Args:
        others: those of one communicator, or those of the segments' own ones that they lack.
        usual_ns: length of a usual segment.
        usual_bytes: payload of a usual segment.
        usual_count: usual segments in all.
        length: calls of a usual segment.
    """
    stretches = len(others.segments_before)
    apart = np.diff(others.segments_before)
    steps = float(np.median(apart)) if len(apart) else usual_count / stretches
    if steps < STEPS_BETWEEN or usual_count < STEPS_BETWEEN * stretches:
        return False
    if length < CALLS_OF_A_STEP or steps >= NO_LAYERS:
        return length >= LEAST_CALLS and steps >= NO_LAYERS
    unequal = np.abs(apart - steps) > max(_UNEQUAL * steps, _UNEQUAL_BY)
    uneven = len(apart) > 1 and unequal.mean() > _OFTEN
    light = others.payload_bytes < _NO_GRADIENTS * usual_bytes * stretches
    spread = np.median(others.called_ns) >= _SPREAD * usual_ns
    long = np.median(others.took_ns - others.usual_calls / length * usual_ns) >= _LONG * usual_ns
    return bool(uneven or light or spread or long)
