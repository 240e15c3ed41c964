"""Which transfers of libraries other than NCCL hosts call stalls.

They have no communicator, so nothing joins those of several hosts: each is told of by itself, and what hosts say of
their stalls under the name of an unknown communicator is left out of what is concluded on communicators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import PastTransfer, StuckTransfer
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import MOST_POINTS, Scrapes
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
    found = [_transfer(one.labels, one.value, scrapes) for one in stuck]
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.host, one.pid)))


def read_past_transfers(
    ask: Asker, scrapes: Scrapes, stuck: Iterable[Sample], lately: Iterable[Sample], looked_back: float
) -> tuple[PastTransfer, ...]:
    """Those that were stuck within so many seconds and are not `stuck` now, the latest first.

    Args:
        lately: the answer to `stuck_lately`: of many series a shorter time is asked for.

    Raises:
        PrometheusError: the store does not answer.
    """
    now = {_which(one.labels) for one in stuck}
    series = max(1.0, sum(one.value for one in lately))
    seconds_back = max(1.0, min(looked_back, scrapes.spacing_seconds * MOST_POINTS / series))
    found: dict[tuple[str, ...], PastTransfer] = {}
    for one in ask.store.scrapes(catalogue.TRANSFER_STALLED_SECONDS.name, seconds_back, ask.at):
        which = _which(one.labels)
        if which in now or not one.points:
            continue
        last, seconds = one.points[-1]
        if which not in found or last > found[which].last:
            found[which] = PastTransfer(_transfer(one.labels, seconds, scrapes), last)
    return tuple(sorted(found.values(), key=lambda one: (-one.last, one.transfer.host, one.transfer.pid)))


def _which(labels: Mapping[str, str]) -> tuple[str, ...]:
    """One transfer, whatever it is put down to meanwhile."""
    return tuple(labels.get(name, "") for name in ("instance", "library", "op", "pid", "peer"))


def _transfer(labels: Mapping[str, str], seconds: float, scrapes: Scrapes) -> StuckTransfer:
    return StuckTransfer(
        host=scrapes.names.get(labels.get("instance", ""), labels.get("instance", "unknown")),
        library=labels.get("library", ""),
        op=labels.get("op", ""),
        pid=labels.get("pid", ""),
        peer=labels.get("peer", ""),
        cause=labels.get("cause", "unknown"),
        blamed_pid=labels.get("blamed_pid", ""),
        seconds=seconds,
    )


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
