"""Alerts on railscope itself: agents that are silent, see less than they should, or see it late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Severity
from railscope.dashboards import recorded
from railscope.dashboards.alerting.alert import Alert, Group, promql
from railscope.dashboards.alerting.thresholds import Thresholds

_ON_HOST: Final = "on (cluster, job, instance)"
_CALLS: Final = 'program="calls"'


def alerts(least: Thresholds) -> Iterator[Alert]:
    """Alerts on the agents themselves, in the order of the rules' file."""
    yield Alert(
        Group.ITSELF,
        "RailscopeAgentSilent",
        Severity.WARNING,
        promql(
            f"""
            up == 0
            and {_ON_HOST}
            {recorded.AGENT_SEEN}
            """
        ),
        about="A target that answered Prometheus before and does not answer now.",
        holds_for="1m",
        because="An agent that is upgraded is back within seconds.",
        summary="railscope on {{ $labels.instance }} is silent",
        description="{{ $labels.instance }} does not answer.  Stalls of its ranks show only in the other hosts' "
        "findings.",
        page="AgentSilent",
    )
    yield Alert(
        Group.ITSELF,
        "RailscopeHostNotScraped",
        Severity.WARNING,
        promql(
            f"""
            time() - {recorded.JOB_SEEN} < {least.removed_host_seconds:g}
            unless {_ON_HOST}
            up
            """
        ),
        about="Prometheus does not scrape this host any more, though it had a job within the hour before.  A host "
        "without a job may be taken out of service without an alert.  The alert on a host with a job ends when it is "
        "scraped again, or when the job is old news.",
        holds_for="1m",
        because="Targets are gone for a moment while an inventory is written anew.",
        summary="railscope on {{ $labels.instance }} is scraped no more, and a job ran there",
        description="{{ $labels.instance }} is no target of Prometheus any more; {{ $value | humanizeDuration }} ago a "
        "job ran there.  Stalls of its ranks show only in the other hosts' findings.",
        page="AgentSilent",
    )
    yield from _impaired(least)


def _impaired(least: Thresholds) -> Iterator[Alert]:
    yield Alert(
        Group.ITSELF,
        "RailscopeCollectorFailing",
        Severity.WARNING,
        f"{catalogue.COLLECTOR_SUCCESS} == 0",
        holds_for="5m",
        because="A device that is being reset fails for a moment.",
        summary="{{ $labels.collector }} cannot be read on {{ $labels.instance }}",
        description="Metrics of collector {{ $labels.collector }} are missing; the other collectors work.  Run "
        "railscope doctor there.",
        page="AgentImpaired",
    )
    yield Alert(
        Group.ITSELF,
        "RailscopeProbeNotAttached",
        Severity.WARNING,
        f"{catalogue.PROBE_ATTACHED.where(_CALLS)} == 0",
        about="Without the program that counts calls nothing is known of the jobs that use this library.",
        holds_for="5m",
        because="A library that was just mapped is looked at first.",
        summary="NCCL is not observed on {{ $labels.instance }}",
        description="{{ $labels.library }} ({{ $labels.nccl_version }}) is in use and no probe is attached to it.  Run "
        "railscope doctor there.",
        page="AgentImpaired",
    )
    yield Alert(
        Group.ITSELF,
        "RailscopeLosesEvents",
        Severity.WARNING,
        f"increase({catalogue.EVENTS_LOST}[5m]) > 0",
        about="Counts and bytes stay exact; durations, stalls and recordings have gaps.",
        holds_for="10m",
        because="A burst may overrun a buffer once; a loss that lasts needs a larger one.",
        summary="railscope on {{ $labels.instance }} loses events ({{ $labels.reason }})",
        description="railscope lost {{ $value | humanize }} events within five minutes; counts and bytes are still "
        "exact.",
        page="AgentImpaired",
    )
    yield Alert(
        Group.ITSELF,
        "RailscopeDropsSeries",
        Severity.WARNING,
        f"increase({catalogue.SERIES_DROPPED}[5m]) > 0",
        holds_for="10m",
        because="A job that makes many communicators for a moment reaches the limit and falls below it again.",
        summary="railscope on {{ $labels.instance }} leaves series out ({{ $labels.reason }})",
        description="There are more series than --limit.series allows: some communicators or rails are not exported.",
        page="AgentImpaired",
    )
    yield Alert(
        Group.ITSELF,
        "RailscopeUserAtLimit",
        Severity.WARNING,
        f"increase({catalogue.LIMIT_REACHED}[5m]) > 0",
        about="Only this user's detail is missing; the node's totals and those of other users are exact.",
        holds_for="10m",
        because="A job that makes many communicators for a moment reaches its limit and falls below it again.",
        summary="uid {{ $labels.uid }} is at a limit of railscope on {{ $labels.instance }} ({{ $labels.limit }})",
        description="Detail of this user's jobs is left out, {{ $value | humanize }} times within five minutes.  Other "
        "users' is complete.",
        page="AgentImpaired",
    )
    yield Alert(
        Group.ITSELF,
        "RailscopeLoopLate",
        Severity.WARNING,
        f"{catalogue.LOOP_LATE_RECENT} > {least.loop_late_seconds:g}",
        about="Stalls are found late, and buffers may overrun.  systemd's watchdog ends an agent whose loop stands for "
        "30 s.",
        holds_for="10m",
        because="The series looks back five minutes: a single late turn, as at the start of a large job, is no alert.",
        summary="railscope on {{ $labels.instance }} does not keep up",
        description="The loop of the agent was late by {{ $value | humanizeDuration }} within five minutes.",
        page="AgentImpaired",
    )
    yield Alert(
        Group.ITSELF,
        "RailscopeDark",
        Severity.WARNING,
        f"increase({catalogue.AGENT_DARK_SECONDS}[1h]) > {least.dark_seconds:g}",
        about="A restart is dark for some seconds, and an upgrade for a minute.  Only with --state.directory.",
        holds_for="0s",
        because="None: the expression covers an hour.",
        summary="railscope on {{ $labels.instance }} was not running for a part of the last hour",
        description="No agent counted for {{ $value | humanizeDuration }}: the calls of that time are in no total.",
        page="AgentImpaired",
    )
