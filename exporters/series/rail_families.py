"""The metric families of rails: port bytes and their origin, queues, connections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rail_ledger import Origin
from railscope.agent.facts.snapshot import RailFacts
from railscope.agent.facts.traffic_owners import TrafficOwner
from railscope.exporters.series.family_draft import RECEIVE, TRANSMIT, Draft
from railscope.exporters.series.selection import SUMMED, Selection

COUNTERS: Final = (catalogue.RAIL_COUNTER, catalogue.RAIL_COUNTER_BY_SEVERITY)
RATES: Final = (catalogue.RAIL_RATE,)
_USUAL_OWNERS: Final = frozenset({TrafficOwner.NCCL, TrafficOwner.UNKNOWN})
"""Owners of which origins tell everything, where there is no other."""


def rail_families(rails: tuple[RailFacts, ...], selection: Selection) -> Iterator[Draft]:
    """The metric families of rails."""
    yield _of_rails(
        catalogue.RAIL_INFO,
        ((one, (one.port, one.netdev, one.pci, one.gpu, one.numa, one.link_layer, one.driver), 1) for one in rails),
    )
    yield _of_rails(catalogue.RAIL_UP, ((one, (one.port,), None if one.up is None else int(one.up)) for one in rails))
    yield _of_rails(catalogue.RAIL_SPEED, ((one, (one.port,), one.speed_bytes_per_second) for one in rails))
    yield _of_rails(
        catalogue.RAIL_LANES,
        ((one, (one.port,), one.lanes) for one in rails if selection.counters or _is_degraded(one)),
    )
    yield _of_rails(
        catalogue.RAIL_LINK_TO_SIBLINGS,
        (
            (one, (one.port, of), ratio)
            for one in rails
            for of, ratio in (("speed", one.speed_to_siblings), ("lanes", one.lanes_to_siblings))
            if ratio is not None and ratio < 1
        ),
    )
    yield _of_rails(catalogue.RAIL_TRANSMIT_BYTES, ((one, (one.port,), one.transmit_bytes) for one in rails))
    yield _of_rails(catalogue.RAIL_RECEIVE_BYTES, ((one, (one.port,), one.receive_bytes) for one in rails))
    yield _of_rails(
        catalogue.RAIL_EXPECTED_WIRE_BYTES,
        (
            (one, (direction,), value)
            for one in rails
            for direction, value in ((TRANSMIT, one.transmit_wire_bytes), (RECEIVE, one.receive_wire_bytes))
        ),
    )
    yield _of_rails(
        catalogue.RAIL_COLLECTIVE_BYTES, ((one, (TRANSMIT,), one.transmit_collective_bytes) for one in rails)
    )
    yield _of_rails(
        catalogue.RAIL_EXPLAINED_RATIO,
        (
            (one, (direction,), value)
            for one in rails
            for direction, value in ((TRANSMIT, one.transmit_explained_ratio), (RECEIVE, one.receive_explained_ratio))
        ),
    )
    yield from _ledgers(rails)
    yield _of_rails(
        catalogue.RAIL_UTILIZATION,
        (
            (one, (one.port, direction), value)
            for one in rails
            for direction, value in ((TRANSMIT, one.transmit_utilization), (RECEIVE, one.receive_utilization))
        ),
    )
    yield Draft(
        catalogue.RAIL_RATE,
        histograms=(
            ((one.rail, one.device, direction, one.netns or None), histogram)
            for one in rails
            for direction, histogram in ((TRANSMIT, one.transmit_rate), (RECEIVE, one.receive_rate))
        ),
        more_labels=("netns",),
    )
    yield from _counters(rails, selection)
    yield _of_rails(
        catalogue.RAIL_COUNTER_PINNED, ((one, (one.port, counter), 1) for one in rails for counter in one.pinned)
    )
    yield _of_rails(
        catalogue.RAIL_VALUE, ((one, (one.port, name), value) for one in rails for name, value in one.gauges)
    )
    yield _of_rails(
        catalogue.RAIL_PHYSICAL_STATE,
        ((one, (one.port, one.physical_state), 1) for one in rails if one.physical_state not in ("", "LinkUp")),
    )
    yield _of_rails(
        catalogue.RAIL_HARDWARE_INFO,
        (
            (one, (one.port, one.firmware or UNKNOWN, one.board or UNKNOWN), 1)
            for one in rails
            if one.firmware or one.board
        ),
    )
    yield _of_rails(
        catalogue.RAIL_BOND_MEMBER_UP,
        (
            (one, (one.port, member), None if up is None else int(up))
            for one in rails
            for member, up in one.bond_members
        ),
    )
    yield _of_rails(
        catalogue.RAIL_PCI_STALLED,
        ((one, (direction,), ratio) for one in rails for direction, ratio in one.pci_stalled),
    )
    yield from _queues(rails)
    yield from _tcp(rails)


def _counters(rails: tuple[RailFacts, ...], selection: Selection) -> Iterator[Draft]:
    yield _of_rails(
        catalogue.RAIL_COUNTER,
        (
            (one, (one.port, counter, severity), value)
            for one in rails
            for counter, severity, value in selection.select_counters(one)
        ),
    )
    yield _of_rails(
        catalogue.RAIL_COUNTER_BY_SEVERITY,
        _risen(rails, selection),
    )


def _risen(rails: tuple[RailFacts, ...], selection: Selection) -> Iterator[tuple[RailFacts, tuple[str, str], int]]:
    """(rail, (port, severity), what its counters rose by); rails of the same labels are one."""
    owners: dict[tuple[str, str, str, str, str], tuple[RailFacts, list[tuple[str, int]]]] = {}
    for one in rails:
        for severity in SUMMED:
            found = [(counter, value) for counter, of, value in one.counters if of == severity]
            if found:
                owner = (one.rail, one.device, one.port, one.netns, severity)
                owners.setdefault(owner, (one, []))[1].extend(found)
    for owner, (one, counters) in owners.items():
        yield one, (one.port, owner[-1]), selection.total_increase(owner, counters)


def _ledgers(rails: tuple[RailFacts, ...]) -> Iterator[Draft]:
    ledgers = [
        (one, direction, ledger)
        for one in rails
        if one.ledger is not None
        for direction, ledger in ((TRANSMIT, one.ledger.transmit), (RECEIVE, one.ledger.receive))
    ]
    yield _of_rails(
        catalogue.RAIL_BYTES_BY_ORIGIN,
        (
            (one, (direction, origin.value), ledger.of_origin(origin))
            for one, direction, ledger in ledgers
            for origin in Origin
            if origin is not Origin.TRANSFER or _is_shared(one)
        ),
    )
    yield _of_rails(
        catalogue.RAIL_BYTES_BY_OWNER,
        (
            (one, (direction, owner.value), count)
            for one, direction, ledger in ledgers
            if _is_shared(one)
            for owner in TrafficOwner
            if (count := ledger.of_owner(owner)) or owner in _USUAL_OWNERS
        ),
    )
    yield _of_rails(
        catalogue.RAIL_LEDGER_ERROR, ((one, (direction,), ledger.error_ratio) for one, direction, ledger in ledgers)
    )


def _is_shared(rail: RailFacts) -> bool:
    """Whether somebody moved bytes over it whom origins do not tell from others."""
    return rail.ledger is not None and any(
        count and owner not in _USUAL_OWNERS
        for ledger in (rail.ledger.transmit, rail.ledger.receive)
        for (owner, _), count in ledger.cells.items()
    )


def _queues(rails: tuple[RailFacts, ...]) -> Iterator[Draft]:
    queues = [(one, one.queue) for one in rails if one.queue is not None]
    yield _of_rails(catalogue.RAIL_QUEUE_BACKLOG_BYTES, ((one, (), queue.backlog_bytes) for one, queue in queues))
    yield _of_rails(catalogue.RAIL_QUEUE_BACKLOG_PACKETS, ((one, (), queue.queued_packets) for one, queue in queues))
    yield _of_rails(catalogue.RAIL_QUEUE_DROPS, ((one, (), queue.drops) for one, queue in queues))
    yield _of_rails(catalogue.RAIL_QUEUE_OVERLIMITS, ((one, (), queue.overlimits) for one, queue in queues))
    yield _of_rails(catalogue.RAIL_QUEUE_REQUEUES, ((one, (), queue.requeues) for one, queue in queues))


def _tcp(rails: tuple[RailFacts, ...]) -> Iterator[Draft]:
    found = [(one, one.tcp) for one in rails if one.tcp is not None]
    yield _of_rails(catalogue.RAIL_TCP_CONNECTIONS, ((one, (), tcp.connections) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_SENDING, ((one, (), tcp.sending) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_APPLICATION_LIMITED, ((one, (), tcp.application_limited) for one, tcp in found))
    yield _of_rails(
        catalogue.RAIL_TCP_ROUND_TRIP,
        (
            (one, (stat,), seconds)
            for one, tcp in found
            for stat, seconds in (
                ("mean", tcp.round_trip_mean_seconds),
                ("max", tcp.round_trip_maximum_seconds),
                ("deviation", tcp.round_trip_deviation_seconds),
            )
        ),
    )
    yield _of_rails(
        catalogue.RAIL_TCP_DELIVERY_RATE, ((one, (), tcp.delivery_rate_bytes_per_second) for one, tcp in found)
    )
    yield _of_rails(catalogue.RAIL_TCP_UNACKNOWLEDGED, ((one, (), tcp.unacknowledged_segments) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_UNSENT_BYTES, ((one, (), tcp.not_sent_bytes) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_SENT_BYTES, ((one, (), tcp.sent_bytes) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_ACKNOWLEDGED_BYTES, ((one, (), tcp.acknowledged_bytes) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_RECEIVED_BYTES, ((one, (), tcp.received_bytes) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_RETRANSMITTED_BYTES, ((one, (), tcp.retransmitted_bytes) for one, tcp in found))
    yield _of_rails(catalogue.RAIL_TCP_SENT_SEGMENTS, ((one, (), tcp.data_segments) for one, tcp in found))
    yield _of_rails(
        catalogue.RAIL_TCP_RETRANSMITTED_SEGMENTS, ((one, (), tcp.retransmitted_segments) for one, tcp in found)
    )
    yield _of_rails(catalogue.RAIL_TCP_BUSY_SECONDS, ((one, (), tcp.busy_seconds) for one, tcp in found))
    yield _of_rails(
        catalogue.RAIL_TCP_LIMITED_SECONDS,
        (
            (one, (limit,), seconds)
            for one, tcp in found
            for limit, seconds in (
                ("receive_window", tcp.receive_window_limited_seconds),
                ("send_buffer", tcp.send_buffer_limited_seconds),
            )
        ),
    )


def _is_degraded(rail: RailFacts) -> bool:
    """Whether its link is less than those of its siblings."""
    return any(ratio is not None and ratio < 1 for ratio in (rail.speed_to_siblings, rail.lanes_to_siblings))


def _of_rails(metric: Metric, values: Iterable[tuple[RailFacts, tuple[str, ...], int | float | None]]) -> Draft:
    """One sample a value; None, what cannot be known, is left out."""
    samples = (
        ((rail.rail, rail.device, *more, rail.netns or None), value)
        for rail, more, value in values
        if value is not None
    )
    return Draft(metric, samples, more_labels=("netns",))
