"""Families of transfers of libraries other than NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter

from railscope.agent.facts import catalogue
from railscope.agent.facts.stall import Stall
from railscope.agent.facts.transfers import NodeTransfers, TransferUnderWay
from railscope.exporters.series.family_draft import Draft


def transfer_families(transfers: NodeTransfers, stalls: Iterable[Stall], now_ns: int) -> Iterator[Draft]:
    """Totals of the node by library and operation, what processes have under way, and what went to whom.

    `stalls` are those that go on, of NCCL's operations too; `now_ns` is CLOCK_MONOTONIC.
    """
    totals = [((one.library, one.op, one.direction), one) for one in transfers.totals]
    yield Draft(catalogue.TRANSFER_OPERATIONS, ((labels, one.operations) for labels, one in totals))
    yield Draft(
        catalogue.TRANSFER_PROBE_ATTACHED,
        (((file, library), int(attached)) for file, library, attached in transfers.probed),
    )
    yield Draft(
        catalogue.TRANSFER_PAYLOAD_BYTES,
        ((labels, one.payload_bytes) for labels, one in totals if one.payload_bytes is not None),
    )
    yield Draft(catalogue.TRANSFER_UNSIZED, ((labels, one.unsized) for labels, one in totals if one.unsized))
    yield Draft(catalogue.TRANSFER_FAILURES, ((labels, one.failed) for labels, one in totals))
    yield Draft(catalogue.TRANSFER_UNFOLLOWED, ((labels, one.unfollowed) for labels, one in totals))
    yield Draft(
        catalogue.TRANSFER_SECONDS,
        histograms=(((one.library, one.op), one.durations) for one in transfers.totals if one.durations is not None),
    )
    in_flight: Counter[tuple[str, ...]] = Counter()
    oldest: dict[tuple[str, ...], TransferUnderWay] = {}
    for one in transfers.under_way:
        labels = (one.library, one.op, str(one.pid))
        in_flight[labels] += one.count
        oldest.setdefault(labels, one)
    yield Draft(catalogue.TRANSFERS_IN_FLIGHT, sorted(in_flight.items()))
    yield Draft(
        catalogue.TRANSFER_INFLIGHT_SECONDS,
        (((*labels, one.peer), one.oldest_seconds) for labels, one in sorted(oldest.items(), key=itemgetter(0))),
    )
    yield Draft(catalogue.TRANSFER_STALLED_SECONDS, _stalled(stalls, now_ns).items())
    peers = [((one.library, one.op, str(one.pid), one.peer), one) for one in transfers.shown_peers()]
    yield Draft(catalogue.TRANSFER_PEER_OPERATIONS, ((labels, one.operations) for labels, one in peers))
    yield Draft(
        catalogue.TRANSFER_PEER_PAYLOAD_BYTES,
        ((labels, one.payload_bytes) for labels, one in peers if one.payload_bytes is not None),
    )
    yield Draft(catalogue.TRANSFER_PEER_SECONDS, ((labels, one.seconds) for labels, one in peers))


def _stalled(stalls: Iterable[Stall], now_ns: int) -> dict[tuple[str, ...], float]:
    """The oldest of each process, operation and other end."""
    found: dict[tuple[str, ...], float] = {}
    for one in stalls:
        if one.library:
            blamed = "" if one.diagnosis.blamed_pid is None else str(one.diagnosis.blamed_pid)
            op = one.op.removeprefix(f"{one.library} ")
            labels = (one.library, op, str(one.pid), one.peer, one.diagnosis.cause.value, blamed)
            found[labels] = max(found.get(labels, 0.0), one.length_ns(now_ns) / 1e9)
    return found
