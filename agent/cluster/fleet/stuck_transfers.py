"""Which transfers of libraries other than NCCL hosts call stalls.

They have no communicator, so nothing joins those of several hosts: each is told of by itself, and what hosts say of
their stalls under the name of an unknown communicator is left out of what is concluded on communicators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from railscope.agent.cluster.fleet.facts import StuckTransfer
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import Scrapes
from railscope.agent.facts import catalogue
from railscope.agent.facts.label_numbers import UNKNOWN


def stuck_transfer_questions(looked_back: float) -> dict[str, str]:
    """What to ask about those that are stuck, and about those that were within so many seconds."""
    metric = catalogue.TRANSFER_STALLED_SECONDS
    return {
        "stuck": str(metric),
        "stuck_lately": f"count by (instance, cause) (last_over_time({metric}[{looked_back:.0f}s]))",
    }


def read_stuck_transfers(stuck: Iterable[Sample], scrapes: Scrapes) -> tuple[StuckTransfer, ...]:
    """Those that are stuck now, the oldest first."""
    found = [
        StuckTransfer(
            host=scrapes.names.get(one.labels.get("instance", ""), one.labels.get("instance", "unknown")),
            library=one.labels.get("library", ""),
            op=one.labels.get("op", ""),
            pid=one.labels.get("pid", ""),
            peer=one.labels.get("peer", ""),
            cause=one.labels.get("cause", "unknown"),
            blamed_pid=one.labels.get("blamed_pid", ""),
            seconds=one.value,
        )
        for one in stuck
    ]
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.host, one.pid)))


@dataclass(frozen=True, slots=True)
class TransferStalls:
    """Tells what hosts say of stuck transfers from what they say of ranks."""

    causes: frozenset[tuple[str, str]]
    """By instance."""

    @classmethod
    def from_samples(cls, lately: Iterable[Sample]) -> TransferStalls:
        """`lately`: the answer to `stuck_lately`."""
        return cls(frozenset((one.labels.get("instance", ""), one.labels.get("cause", "")) for one in lately))

    def is_one(self, labels: Mapping[str, str]) -> bool:
        """Whether the series with these labels tells of a stuck transfer."""
        nameless = labels.get("comm") == UNKNOWN and labels.get("rank", UNKNOWN) == UNKNOWN
        return nameless and (labels.get("instance", ""), labels.get("cause", "")) in self.causes
