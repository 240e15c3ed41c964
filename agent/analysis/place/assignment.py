"""The best one-to-one assignment of rows to columns: the Hungarian method with potentials (Kuhn 1955, Munkres 1957).

Whole numbers throughout, so that the result is exact; O(n³), which for the GPUs of a server is nothing.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


def best_assignment(gains: NDArray[Any]) -> list[int]:
    """By row of a square matrix its column, so that the gains add up to the most.

    A row that gains as much where it is (row i in column i) as anywhere stays there, if that costs the others nothing.
    """
    count = len(gains)
    # Doubled, so that staying can be worth half of the smallest difference in all.
    costs = [[-2 * (count + 1) * int(gain) - (row == column) for column, gain in enumerate(line)]
             for row, line in enumerate(gains)]  # fmt: skip
    row_potential, column_potential = [0] * (count + 1), [0] * (count + 1)
    row_of = [0] * (count + 1)
    for row in range(1, count + 1):
        row_of[0], column = row, 0
        slack: list[int | None] = [None] * (count + 1)
        came_from, done = [0] * (count + 1), [False] * (count + 1)
        while row_of[column]:
            done[column] = True
            current, step, following = row_of[column], None, 0
            for other in range(1, count + 1):
                if done[other]:
                    continue
                reduced = costs[current - 1][other - 1] - row_potential[current] - column_potential[other]
                known = slack[other]
                if known is None or reduced < known:
                    slack[other], came_from[other] = reduced, column
                    known = reduced
                if step is None or known < step:
                    step, following = known, other
            for other in range(count + 1):
                if done[other]:
                    row_potential[row_of[other]] += step or 0
                    column_potential[other] -= step or 0
                else:
                    known = slack[other]
                    slack[other] = None if known is None else known - (step or 0)
            column = following
        while column:
            row_of[column], column = row_of[came_from[column]], came_from[column]
    column_of = [0] * count
    for column in range(1, count + 1):
        column_of[row_of[column] - 1] = column - 1
    return column_of
