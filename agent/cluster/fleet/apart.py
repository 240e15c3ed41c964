"""Which communicators stand while their ranks are in different places, though no host calls them stalled yet.

A host sees its own ranks, and says after `--stall.after` that they wait for one elsewhere.  The store sees all: where
no rank of a communicator entered an operation between its last scrapes, all did so a while ago, and some entered more
than others, those wait for these.  Who is behind is for the verdict to find (agent/cluster/verdict/late.py).

The rule `comm_rank:railscope_operations_behind:standing` says the same (dashboards/rules/railscope-recording.yml).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import Scrapes, match_any
from railscope.agent.facts import catalogue

_STANDS_SCRAPES: Final = 2.5
"""Two scrapes of every host, also where one comes a little late."""
_MOST: Final = 64
"""Communicators of which all ranks are then read."""
_MOST_NAMED: Final = 512
"""Communicators that a question names; where there are more it is asked of all, also of those that do not stand."""
_NAMED: Final = 'comm!="unknown",rank!="unknown"'


def standing_question(scrapes: Scrapes) -> str:
    """The query for communicators that stand, with ranks that entered different numbers of operations."""
    entered = catalogue.COMM_ENQUEUED.where(_NAMED)
    return (
        f"stddev by (comm) ({entered}) > 0"  # 0 exactly where all are the same, and read only once
        f" and on (comm) max by (comm) (changes({entered}[{scrapes.promql_range(_STANDS_SCRAPES)}])) == 0"
        f" unless on (comm) {catalogue.COMM_STALLED}"
    )


def apart_question(scrapes: Scrapes, comms: Collection[str], window_seconds: float) -> str:
    """The query for those of such communicators whose ranks were all scraped lately, and all moved in the window.

    Ranks of which some were counted later stand apart by their counts alone: they are among the answer too.
    """
    of = f"{match_any('comm', comms)},{_NAMED}" if len(comms) <= _MOST_NAMED else _NAMED
    entered = catalogue.COMM_ENQUEUED.where(of)
    lately, window = scrapes.promql_range(_STANDS_SCRAPES), f"{window_seconds:.0f}s"
    return (
        f"min by (comm) (count_over_time({entered}[{lately}])) > 1"
        f" and on (comm) max by (comm) (changes({entered}[{lately}])) == 0"
        f" and on (comm) min by (comm) (changes({entered}[{window}])) > 0"
        f" unless on (comm) {catalogue.COMM_ENDED}"
    )


def apart_communicators(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Names of the communicators of an answer, of very many a few."""
    return tuple(sorted({sample.labels.get("comm", "") for sample in samples})[:_MOST])
