"""Alerts on rails: links that are down or slow, packets that are lost, counters that count errors."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Severity
from railscope.dashboards import recorded
from railscope.dashboards.alerting.alert import Alert, Group, promql
from railscope.dashboards.alerting.thresholds import Thresholds

HOST: Final = "cluster, job, instance"
RAIL: Final = f"{HOST}, netns, rail, device"
_RAIL: Final = "Rail {{ $labels.rail }} ({{ $labels.device }}) of {{ $labels.instance }}"
_PORT: Final = f"{RAIL}, port"
_COUNTER: Final = (
    "{{ if $labels.counter }}{{ $labels.counter }}{{ else }}a counter with severity {{ $labels.severity }}{{ end }}"
)
_HOSTS_OF_PLANE: Final = (
    f"{{{{ with printf \"{catalogue.RAIL_UP}{{cluster='%s',rail='%s'}} == 0\" "
    '$labels.cluster $labels.rail | query | sortByLabel "instance" }} They are {{ range $at, $one := . }}'
    "{{ if lt $at 8 }}{{ if $at }}, {{ end }}"
    "{{ $one.Labels.instance }}{{ else if eq $at 8 }} and others{{ end }}{{ end }}.{{ end }}"
)
"""A sentence, as all that is made of a query: Grafana's rules make none, and are without it."""
_SWITCHES_OF_PLANE: Final = (
    f'{{{{ range $at, $one := printf "count by (switch) (last_over_time({catalogue.RAIL_SWITCH_INFO}'
    f"{{cluster='%s',rail='%s'}}[15m]) and on (cluster, instance, rail) {catalogue.RAIL_UP} == 0)\" "
    '$labels.cluster $labels.rail | query | sortByLabel "switch" }}{{ if lt $at 8 }}{{ if $at }}, {{ else }}  At the '
    "other end of their cables: {{ end }}{{ $one.Labels.switch }} ({{ $one.Value }} of them){{ end }}{{ end }}"
)
"""Nothing where no switch was heard."""
_MEAN: Final = 'stat="mean"'


def down_under_load(least: Thresholds) -> str:
    """PromQL: rails that are down, have carried traffic, and whose host has a job."""
    return promql(
        f"""
        {catalogue.RAIL_UP} == 0
        and on ({HOST})
        {catalogue.PROCESSES_OBSERVED} > 0
        and on ({RAIL})
        {recorded.TRANSMIT_GREATEST} > {least.rail_used_bytes_per_second:g}
        """
    )


def plane_down(least: Thresholds) -> str:
    """PromQL: on how many hosts a rail is down, of rails that are down on many and under a job."""
    under_load = textwrap.indent(down_under_load(least), "  ")
    return f"{recorded.RAILS_DOWN} >= {least.plane_hosts:g}\nand on (cluster, rail)\n(\n{under_load}\n)"


def alerts(least: Thresholds) -> Iterator[Alert]:
    """Alerts on rails, in the order of the rules' file."""
    yield Alert(
        Group.RAILS,
        "RailscopeRailPlaneDown",
        Severity.CRITICAL,
        plane_down(least),
        about="The same rail is down on many hosts, some of them with jobs: the cause is the switch below them, not "
        "their links.  The alert takes the place of those on each of these rails.",
        holds_for="15s",
        because="One more scrape brings the news from all hosts.",
        summary="Rail {{ $labels.rail }} is down on {{ $value }} hosts",
        description="{{ $value }} hosts have rail {{ $labels.rail }} down, and jobs run there: look at the switch that "
        f"they share first.{_HOSTS_OF_PLANE}{_SWITCHES_OF_PLANE}",
        page="RailDownUnderLoad",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeRailDownUnderLoad",
        Severity.CRITICAL,
        f"{down_under_load(least)}\nunless on (cluster, rail)\n{recorded.RAILS_DOWN} >= {least.plane_hosts:g}",
        about="The rail has carried traffic and is down on a host with a job; an unused port may be down for years.",
        holds_for="30s",
        because="A link that trains anew is back within seconds, and counted in "
        f"{catalogue.RAIL_COUNTER}; where a switch takes down many, all hosts are heard by then.",
        summary=f"{_RAIL} is down under a job",
        description="{{ $labels.device }} has carried traffic, a job runs on {{ $labels.instance }}, and the link "
        "is down.",
        page="RailDownUnderLoad",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeRailSlowerThanSiblings",
        Severity.WARNING,
        _slower_than_siblings(least),
        about="Bytes do not tell: in a ring the bytes of all rails drop together with those of the slowest.  What "
        "tells is a queue, or round trips, that the siblings do not have, or that less is carried while bytes are "
        "under way, though the rail is not full.  A rail that sends bytes again is said to lose packets; too little "
        "is under way on it to compare others with it.",
        holds_for="1m",
        because="Bursts of checkpoints and data loading fill one rail's queue for some seconds.",
        summary=f"{_RAIL} is slower than its siblings",
        description="Data waits on {{ $labels.device }} and not on the other rails of {{ $labels.instance }}, though "
        "the link is not full.  Every ring through this rail runs at its speed.  If this fires for the same rail of "
        "two hosts, one of them is slow, or the switch between them.",
        page="RailSlowerThanSiblings",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeRailLinkSlowerThanBefore",
        Severity.WARNING,
        promql(
            f"""
            {catalogue.RAIL_SPEED}
            < on ({RAIL}) group_left ()
            {recorded.SPEED_GREATEST}
            """
        ),
        about="Compares the speed that was negotiated with the greatest that the rail had.",
        holds_for="1m",
        because="Links report lower speeds for a moment while they train.",
        summary=f"{_RAIL} has a lower link speed than before",
        description="{{ $labels.device }} now runs at {{ $value | humanize }} bytes/s; its link speed was higher "
        "before.",
        page="RailSlowerThanSiblings",
    )
    ratio = catalogue.RAIL_LINK_TO_SIBLINGS
    yield Alert(
        Group.RAILS,
        "RailscopeRailLinkDegraded",
        Severity.WARNING,
        promql(
            f"""
            {ratio.where('of="lanes"')} < 1
            or on ({_PORT})
            {ratio.where('of="speed"')} < 1
            """
        ),
        about="Compared with the host's other rails of the same product: a link that came up slow or narrow before "
        "the agent did has no better past.",
        holds_for="5m",
        because="Links of a host that boots come up one after the other.",
        summary=f"{_RAIL} has a slower link than its siblings",
        description="The link of {{ $labels.device }} has {{ $value | humanizePercentage }} of the {{ $labels.of }} "
        "that other rails of {{ $labels.instance }} on the same kind of card have, and every ring goes at its pace. "
        "To see what is wrong run: railscope doctor --topology",
        page="RailSlowerThanSiblings",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeRailLossy",
        Severity.WARNING,
        promql(
            f"""
            {recorded.RETRANSMITTED} > {least.retransmitted_ratio:g}
            and on ({RAIL})
            rate({catalogue.RAIL_TCP_SENT_BYTES}[1m]) > {least.rail_used_bytes_per_second:g}
            """
        ),
        about="One per cent sent again costs TCP most of its speed; below 1 MB/s a few packets are a large share.",
        holds_for="2m",
        because="Congestion at the start of a job is over within a minute.",
        summary=f"{_RAIL} loses packets",
        description="{{ $value | humanizePercentage }} of the TCP payload that jobs send on {{ $labels.device }} is "
        "retransmitted.",
        page="RailLossy",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeRailErrors",
        Severity.WARNING,
        promql(
            f"""
            (
                increase({_counters("page")}[5m]) > 0
              or on ({_PORT})
                increase({_sums("page")}[5m]) > 0
            )
            unless on (cluster, rail)
            max_over_time({recorded.RAILS_DOWN}[5m]) >= {least.plane_hosts:g}
            unless on ({HOST})
            (
              min_over_time(up[5m]) == 0
              and on ({HOST})
              changes({catalogue.AGENT_START_TIME}[10m]) > 0
            )
            """
        ),
        about="Counters with severity page: a link that went down, retries exceeded, a fatal error of the card.  The "
        "increase is the event, and the five minutes of the range keep it visible.  RailscopeRailPlaneDown tells what "
        "a switch did to a whole plane.  A counter that appears with its first event has no 0 before it; the sum of "
        "them has.  Where a host booted within the range its counters began anew, which is no event: it was silent, "
        "and its agent is another one.",
        holds_for="30s",
        because="By then the alert on a rail or a plane that is down has fired, and takes the place of those on its "
        "counters.",
        summary=f"{_COUNTER} of {_RAIL[0].lower()}{_RAIL[1:]} increased",
        description=_COUNTER + " of rail {{ $labels.rail }} ({{ $labels.device }}) increased by "
        '{{ printf "%.0f" $value }} within five minutes; any increase matters.',
        page="RailErrors",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeCommFailedOver",
        Severity.WARNING,
        f"sum by ({HOST}, rail, device, port, carried_by) ({catalogue.COMM_DEGRADED})",
        about="NCCL moved connections off a port by itself; the alert stands for as long as they stay off it.  The "
        "job goes on with less bandwidth, and nothing else may tell of it.",
        holds_for="0s",
        because="None: NCCL moves connections only after a work request has failed with all of its retries.",
        summary="NCCL goes on without {{ $labels.device }} of {{ $labels.instance }}{{ with $labels.rail }}, rail "
        "{{ . }}{{ end }}",
        description="Port {{ $labels.port }} of {{ $labels.device }} on {{ $labels.instance }} failed, and NCCL moved "
        "connections to {{ $labels.carried_by }} ({{ $value }}): the jobs go on with less bandwidth until NCCL uses it "
        "again or they end. For what the completions said run: railscope diagnose --prometheus URL",
        page="CommFailedOver",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeRailCounterRises",
        Severity.WARNING,
        promql(
            f"""
            rate({_counters("warn")}[15m]) > {least.rail_warnings_per_second:g}
            or
            (
                rate({_sums("warn")}[15m]) > {least.rail_warnings_per_second:g}
              unless on ({_PORT})
                {_counters("warn")}
            )
            """
        ),
        about="Counters with severity warn: packets that were lost, came twice or were damaged.  A few are normal.  "
        "Profile lean has their sum alone.",
        holds_for="15m",
        because="Only a rate that lasts matters: a burst is over by then.",
        summary=f"{_COUNTER} of {_RAIL[0].lower()}{_RAIL[1:]} keeps rising",
        description=_COUNTER + " of rail {{ $labels.rail }} ({{ $labels.device }}) rises by "
        "{{ $value | humanize }} a second, for half an hour now: packets are lost or damaged there, and bandwidth with "
        "them.",
        page="RailErrors",
    )
    yield Alert(
        Group.RAILS,
        "RailscopeRailCounterPinned",
        Severity.INFO,
        f"{catalogue.RAIL_COUNTER_PINNED} == 1",
        about="From then on the counter tells of no further errors of this port.",
        holds_for="1h",
        because="The counter stays saturated until it is cleared, so an alert an hour later is no worse.",
        summary=f"{{{{ $labels.counter }}}} of {_RAIL[0].lower()}{_RAIL[1:]} is saturated",
        description="{{ $labels.counter }} reads its maximum and no longer counts; clear it (perfquery -R, or reload "
        "the driver).",
        page="RailErrors",
    )


def _counters(severity: str) -> str:
    return catalogue.RAIL_COUNTER.where(f'severity="{severity}"')


def _sums(severity: str) -> str:
    return catalogue.RAIL_COUNTER_BY_SEVERITY.where(f'severity="{severity}"')


def _slower_than_siblings(least: Thresholds) -> str:
    backlog, mean = catalogue.RAIL_QUEUE_BACKLOG_BYTES, catalogue.RAIL_TCP_ROUND_TRIP.where(_MEAN)
    deviation = catalogue.RAIL_TCP_ROUND_TRIP.where('stat="deviation"')
    return promql(
        f"""
        (
            (
                min_over_time({backlog}[1m]) > {least.queue_bytes:g}
              and on ({RAIL})
                (
                    {backlog}
                  > on (cluster, job, instance, netns) group_left ()
                    {least.queue_to_siblings_ratio:g} * min by (cluster, job, instance, netns) (
                        {backlog}
                      unless on ({RAIL})
                        {recorded.RETRANSMITTED} > {least.retransmitted_ratio:g}
                    )
                )
            )
          or on ({RAIL})
            (
                {recorded.ROUND_TRIP_TO_SIBLINGS} > {least.round_trip_to_siblings_ratio:g}
              and on ({RAIL})
                {mean} > {least.round_trip_seconds:g}
              # A deviation as long as the mean: acknowledgements that a receiver put off for 40 ms.  If half of them
              # were, the mean would be 20 ms, and the deviation less.
              unless on ({RAIL})
                (
                    {deviation}
                  >= ignoring (stat)
                    ({mean} < 0.02)
                )
            )
          or on ({RAIL})
            (
                {recorded.PACE_TO_SIBLINGS} < {least.pace_to_siblings_ratio:g}
              unless on ({RAIL})
                {recorded.RETRANSMITTED} > {least.retransmitted_ratio:g}
            )
        )
        unless on ({RAIL})
          {recorded.TRANSMIT_UTILIZATION} > {least.rail_full_ratio:g}
        """
    )
