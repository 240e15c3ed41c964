"""Reads the rails of some hosts as a store knows them: state, rates, queues, TCP, counters that rose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import Rail
from railscope.agent.cluster.fleet.history import highest_rate
from railscope.agent.cluster.fleet.prometheus import Sample, Series
from railscope.agent.cluster.fleet.scrapes import MOST_POINTS, Scrapes, match_any
from railscope.agent.facts import catalogue

RailKey = tuple[str, str, str, str]
"""Instance, rail, device and network namespace."""


def read_rails(
    ask: Asker, scrapes: Scrapes, instances: Collection[str], rate_seconds: float, window_seconds: float
) -> tuple[Rail, ...]:
    """Every rail of these hosts.

    Args:
        ask: the store.
        scrapes: of the hosts.
        instances: of the hosts.
        rate_seconds: over which rates are taken.
        window_seconds: how far back counters are looked at.

    Raises:
        PrometheusError: the store does not answer.
    """
    on = match_any("instance", instances)
    window = f"{window_seconds:.0f}s"
    events = f'{catalogue.RAIL_COUNTER}{{{on},severity=~"page|warn"}}'
    transmit = catalogue.RAIL_TRANSMIT_BYTES.where(on)
    short = f"{max(rate_seconds, 30):.0f}s"
    found = ask.query_all(
        info=catalogue.RAIL_INFO.where(on),
        up=catalogue.RAIL_UP.where(on),
        speed=catalogue.RAIL_SPEED.where(on),
        transmit=f"rate({transmit}[{rate_seconds:.0f}s])",
        receive=f"rate({catalogue.RAIL_RECEIVE_BYTES.where(on)}[{rate_seconds:.0f}s])",
        # The queue before a slow rail is empty now and then.
        backlog=f"max_over_time({catalogue.RAIL_QUEUE_BACKLOG_BYTES.where(on)}[{rate_seconds:.0f}s])",
        unacknowledged=catalogue.RAIL_TCP_UNACKNOWLEDGED.where(on),
        unsent=catalogue.RAIL_TCP_UNSENT_BYTES.where(on),
        round_trip=f'{catalogue.RAIL_TCP_ROUND_TRIP}{{{on},stat="mean"}}',
        retransmitted=f"increase({catalogue.RAIL_TCP_RETRANSMITTED_BYTES.where(on)}[{short}])",
        sent=f"increase({catalogue.RAIL_TCP_SENT_BYTES.where(on)}[{short}]) > 0",
        events=f"increase({events}[{window}]) > 0",
        # A counter may be shown only once it is above 0, and then had no value to rise from; its sum is always there.
        appeared=f"{events} unless {events} offset {window} "
        "and on (job, instance, rail, device, port, netns, severity) "
        f"{catalogue.RAIL_COUNTER_BY_SEVERITY.where(on)} offset {window}",
    )
    by_rail: dict[str, dict[RailKey, float]] = {}
    for name, samples in found.items():
        numbers = by_rail.setdefault(name, {})
        for sample in samples:
            key = rail_key(sample)
            numbers[key] = max(numbers.get(key, sample.value), sample.value)
    seconds = min(window_seconds, scrapes.spacing_seconds * MOST_POINTS / max(len(found["up"]), 1))
    sent_points = {rail_key(one): one.points for one in ask.store.scrapes(transmit, seconds, ask.at)}
    errors: dict[RailKey, dict[tuple[str, str], float]] = defaultdict(dict)
    for sample in (*found["events"], *found["appeared"]):
        errors[rail_key(sample)][sample.labels.get("counter", ""), sample.labels.get("severity", "")] = sample.value

    def rail(key: RailKey) -> Rail:
        value: Callable[[str], float | None] = lambda name: by_rail[name].get(key)  # noqa: E731
        up, sent, again = value("up"), value("sent"), value("retransmitted")
        return Rail(
            host=scrapes.names.get(key[0], key[0]),
            rail=key[1],
            device=key[2],
            netns=key[3],
            up=None if up is None else bool(up),
            speed=value("speed"),
            transmit=value("transmit"),
            receive=value("receive"),
            usual_transmit=highest_rate(sent_points.get(key, ()), rate_seconds, value("speed")),
            backlog_bytes=value("backlog"),
            unacknowledged_segments=value("unacknowledged"),
            unsent_bytes=value("unsent"),
            round_trip_seconds=value("round_trip"),
            retransmitted_ratio=again / sent if sent and again is not None else None,
            events=tuple(sorted((*counter, value) for counter, value in errors[key].items())),
        )

    return tuple(rail(key) for key in sorted({*by_rail["info"], *by_rail["up"]}) if key[0] in scrapes.fresh)


def rail_key(sample: Sample | Series) -> RailKey:
    """Whose rail a sample or series is of."""
    labels = sample.labels
    return labels.get("instance", ""), labels.get("rail", ""), labels.get("device", ""), labels.get("netns", "")
