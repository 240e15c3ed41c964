"""What processes transfer with libraries other than NCCL, between two readings of an agent's page of transfers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from railscope.exporters.top.counter_delta import increase, per_second, ratio

TransferKey = tuple[str, str, str, str]
"""Library, operation, pid, peer; the peer is empty where it has no name."""


@dataclass(frozen=True, slots=True)
class ScrapedTransfer:
    """What a process did with one peer, and has under way, as `/transfers` reports it."""

    library: str
    op: str
    pid: str
    peer: str
    operations: float
    payload_bytes: float | None
    completed: float
    """Without failures."""
    failed: float
    seconds: float
    """Sum of the durations of those that completed."""
    in_flight: int
    oldest_seconds: float
    """Of those in flight."""


@dataclass(frozen=True, slots=True)
class TransferView:
    """What a process did with one peer between two moments."""

    library: str
    op: str
    pid: str
    peer: str
    operations_per_second: float | None
    payload_bytes_per_second: float | None
    mean_seconds: float | None
    """How long those took that completed between the scrapes."""
    new_failures: int | None
    in_flight: int
    waiting_seconds: float | None
    """How long the oldest one has been under way; None: none is."""
    stalled: str
    """Cause of the stall that it is in; empty: it is in none."""


def parse_transfers(page: bytes) -> dict[TransferKey, ScrapedTransfer]:
    """The page of transfers.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is none.
    """
    found: dict[TransferKey, ScrapedTransfer] = {}
    for one in json.loads(page)["transfers"]:
        peer = "" if one["peer"] is None else str(one["peer"])
        key = (str(one["library"]), str(one["op"]), str(one["pid"]), peer)
        payload_bytes = one["payload_bytes"]
        found[key] = ScrapedTransfer(
            *key,
            operations=float(one["operations"]),
            payload_bytes=None if payload_bytes is None else float(payload_bytes),
            completed=float(one["completed"]),
            failed=float(one["failed"]),
            seconds=float(one["seconds"]),
            in_flight=int(one["in_flight"]),
            oldest_seconds=float(one["oldest_seconds"]),
        )
    return found


def make_transfer_views(
    before: Mapping[TransferKey, ScrapedTransfer] | None,
    now: Mapping[TransferKey, ScrapedTransfer],
    span: float | None,
    stalled: Mapping[TransferKey, str],
) -> tuple[TransferView, ...]:
    """What `railscope top` shows of transfers; `stalled` has the causes of stalls.

    A pair that is new has done all of it since the scrape before.  The stall of a peer without a name, which may go by
    its address, shows at the sum of those.
    """
    unnamed = {(*key[:3], ""): cause for key, cause in stalled.items() if key not in now}
    views = []
    for key, one in now.items():
        old = None
        if before is not None:
            nothing = ScrapedTransfer(*key, 0.0, None if one.payload_bytes is None else 0.0, 0.0, 0.0, 0.0, 0, 0.0)
            old = before.get(key, nothing)
        failures = None if old is None else increase(old.failed, one.failed)
        views.append(
            TransferView(
                library=one.library,
                op=one.op,
                pid=one.pid,
                peer=one.peer,
                operations_per_second=None if old is None else per_second(old.operations, one.operations, span),
                payload_bytes_per_second=None
                if old is None
                else per_second(old.payload_bytes, one.payload_bytes, span),
                mean_seconds=None
                if old is None
                else ratio(increase(old.seconds, one.seconds), increase(old.completed, one.completed)),
                new_failures=None if failures is None else int(failures),
                in_flight=one.in_flight,
                waiting_seconds=one.oldest_seconds if one.in_flight else None,
                stalled=(stalled.get(key) or unnamed.get(key, "")) if one.in_flight else "",
            )
        )
    return tuple(views)
