"""How much of the time in operations ranks wait for the slowest one of their communicator, and which one that is.

All ranks of a communicator leave an operation at about the same time, and the one that comes last spends least in it.
So what a rank spends longer than that one is waiting.  By rank the means are compared, as live ones are
(agent/node/collectives/slow_ranks.py): a rank that comes last now and then is none that the others wait for.  Point to
point, ranks wait for each other by design: Send and Recv do not count.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from railscope.agent.analysis.facts.report import Waiting
from railscope.agent.analysis.tables.gpu_rows import SOURCES
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.dataset.reader import Dataset

_BETWEEN_PAIRS: Final = ("Send", "Recv")
_LEAST: Final = 3
"""Operations of a rank that make a mean."""


def find_waiting(dataset: Dataset, gpus: Gpus) -> Waiting | None:
    """Over all communicators of which several ranks were recorded; None: there is none with times."""
    rows = dataset["operations"]
    rows = rows.filter(
        rows.begin_ns.notnull()
        & rows.end_ns.notnull()
        & (rows.end_ns > rows.begin_ns)
        & ~rows["op"].isin(_BETWEEN_PAIRS)
    )
    sums = rows.group_by("recording", "instance", "source").agg(
        operations=rows.count(), spent_ns=(rows.end_ns - rows.begin_ns).sum()
    )
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for row in dataset.rows(sums).to_pylist():
        end = row["recording"], row["instance"]
        of_source = SOURCES.index(row["source"]) if row["source"] in SOURCES else len(SOURCES)
        if end in gpus.gpu_of and end in gpus.communicator_of and row["operations"] >= _LEAST:
            best[end] = min(best.get(end, (99, 0, 0)), (of_source, row["operations"], int(row["spent_ns"])))
    ranks: defaultdict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for end, (_, operations, spent_ns) in best.items():
        ranks[gpus.communicator_of[end].comm].append((spent_ns / operations, operations, gpus.gpu_of[end]))
    compared = [of_comm for of_comm in ranks.values() if len(of_comm) > 1]
    if not compared:
        return None
    waited_for: defaultdict[int, float] = defaultdict(float)
    for of_comm in compared:
        least, _, slowest = min(of_comm)
        waited_for[slowest] += sum((mean - least) * operations for mean, operations, _ in of_comm)
    spent = sum(mean * operations for of_comm in compared for mean, operations, _ in of_comm)
    gpu = max(waited_for, key=lambda number: (waited_for[number], -number))
    return Waiting(sum(waited_for.values()) / spent, gpu)
