"""How work grows with its input, counted in lines of Python: unlike time, the same on a machine that is busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import log
from types import FrameType
from typing import Any, Final

MOST_EXPONENT: Final = 1.1
"""Work in proportion has 1, and what is done but once makes it less."""


def lines_run(act: Callable[[], object]) -> int:
    """Lines of Python that are run; what is done within C is not seen."""
    lines = 0

    def count(_frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any]:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


def exponent(work_of: Callable[[int], int], few: int, many: int) -> float:
    """By which power of its input's size work grows, where so much of it is done for each size."""
    return log(work_of(many) / work_of(few), many / few)
