"""One job of several in a dataset, as `report --only` shows it.

Its GPUs keep the numbers that the report of all jobs gives them, so that the two can be laid side by side.  The
analyses name a GPU by its place among the job's; here places become numbers, in every fact that names one.

The rails' ports count what everybody on their server sends.  Those of servers that the job does not use are left out;
of servers where other jobs have GPUs too, nobody knows what was whose, and that is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from railscope.agent.analysis.facts.fact_columns import Pairs
from railscope.agent.analysis.facts.quantities import numbers
from railscope.agent.analysis.facts.report import Report
from railscope.agent.analysis.tables.gpus import Gpus


def with_numbers(report: Report, gpus: Gpus) -> Report:
    """The report with the GPUs' numbers where it has their places."""
    number = [gpu.number for gpu in gpus.gpus]
    if number == list(range(len(number))):
        return report
    pairs, lookup = report.matrix.pairs, np.array(number, dtype=np.int32)
    composition, regularity = report.composition, report.regularity
    return replace(
        report,
        communicators=tuple(
            replace(
                use,
                gpus=tuple(number[place] for place in use.gpus),
                links=tuple(
                    replace(link, source=_named(link.source, number), destination=_named(link.destination, number))
                    for link in use.links
                ),
            )
            for use in report.communicators
        ),
        matrix=replace(report.matrix, pairs=Pairs(lookup[pairs.source], lookup[pairs.destination], pairs.wire_bytes)),
        composition=replace(composition, ranks=tuple(replace(use, gpu=number[use.gpu]) for use in composition.ranks)),
        regularity=None if regularity is None else replace(regularity, gpu=number[regularity.gpu]),
        receives=tuple(replace(use, gpu=number[use.gpu]) for use in report.receives),
    )


def said_of_one(gpus: Gpus) -> str:
    """That the figures are of one job of several; empty: nothing was left out."""
    if not gpus.others:
        return ""
    own = [gpu.number for gpu in gpus.gpus]
    return (
        f"Of {len(own) + len(gpus.others):,} recorded GPUs only {numbers(own)}, which share no communicator with the "
        "others; their numbers are those of the report of all."
    )


def said_of_rails(gpus: Gpus) -> str:
    """What the rails' port bytes are of, where others than the job's GPUs are on its servers; empty: they are not."""
    servers = Counter(gpu.server for gpu in gpus.others)
    shared = sorted({gpu.server for gpu in gpus.gpus} & servers.keys())
    if not shared:
        return ""
    count = sum(servers[server] for server in shared)
    where = shared[0] if len(shared) == 1 else f"{len(shared):,} of its servers"
    return (
        f"The rails' port bytes are not of this job alone: {count:,} GPU{'s' * (count != 1)} of other jobs "
        f"{'are' if count != 1 else 'is'} on {where}, and a port counts what everybody sends."
    )


def _named(place: int | None, number: Sequence[int]) -> int | None:
    return None if place is None else number[place]
