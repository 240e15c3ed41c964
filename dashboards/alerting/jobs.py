"""Alerts on what jobs do: collectives that stall, and the rank that the others wait for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Cause, Severity, causes_as_severe_as
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.dashboards import recorded
from railscope.dashboards.alerting.alert import Alert, Group, promql
from railscope.dashboards.alerting.rails import plane_down
from railscope.dashboards.alerting.thresholds import Thresholds

_OF_COMM: Final = "cluster='%[1]s',comm='%[2]s'"
"""Matchers of a template's query; `_ASKS` gives it what they hold."""
_ASKS: Final = "$labels.cluster $labels.comm | query"
_BEST: Final = f"topk by (cluster, comm) (1, {recorded.STALL_EVIDENCE.where(_OF_COMM)})"
_SAID_OF_BEST: Final = f"and on (cluster, comm, cause) {_BEST}"
_INFO: Final = catalogue.COMM_STALL_INFO

_JOB: Final = (
    f"""{{{{ with printf "last_over_time({catalogue.COMM_INFO}{{{_OF_COMM},exported_job!=''}}[1h])" {_ASKS} """
    '| sortByLabel "exported_job" }}{{ (first .).Labels.exported_job }}{{ else }}unknown{{ end }}'
)
"""The batch job, where it is known: stalls of one job are one notification (deploy/alertmanager)."""

_CAUSE: Final = f'{{{{ range printf "{_BEST}" {_ASKS} }}}}: {{{{ .Labels.cause }}}}{{{{ end }}}}'
_HOST_OF_BLAMED: Final = (
    f"{{{{ range printf \"{catalogue.COMM_INFO}{{cluster='%s',comm='%s',rank='%s'}}\" "
    "$labels.cluster $labels.comm .Labels.blamed_rank | query }} on {{ .Labels.instance }}{{ end }}"
)
_CULPRIT: Final = (
    f'{{{{ with printf "{recorded.STALL_FINDINGS.where(_OF_COMM)}" {_ASKS} | sortByLabel "instance" }}}}'
    "{{ with first . }}"
    "{{ if .Labels.device }}, rail {{ .Labels.rail }} ({{ .Labels.device }}) of {{ .Labels.instance }}"
    f'{{{{ if and (eq .Labels.strength "weak") (or (eq .Labels.cause "{Cause.RAIL_SLOW}") '
    f'(eq .Labels.cause "{Cause.RAIL_LOSSY}")) }}}} or its other end{{{{ end }}}}'
    f"{{{{ else if .Labels.blamed_rank }}}}, rank {{{{ .Labels.blamed_rank }}}}{_HOST_OF_BLAMED}"
    f'{{{{ else if eq .Labels.rank "{UNKNOWN}" }}}}; a process on {{{{ .Labels.instance }}}} waits'
    "{{ else }}; rank {{ .Labels.rank }} on {{ .Labels.instance }} waits{{ end }}"
    "{{ end }}{{ end }}"
)
_MILD: Final = "|".join(causes_as_severe_as(Severity.WARNING))
"""Causes that wait until working hours."""
_EVIDENCE: Final = (
    f'{{{{ with printf "{_INFO}{{{_OF_COMM}}} {_SAID_OF_BEST}" {_ASKS} -}}}} '
    '{{ range $at, $stall := sortByLabel "rank" . }}{{ if lt $at 4 -}} '
    "{{ .Labels.instance }} says {{ .Labels.cause }}"
    f'{{{{ if ne .Labels.rank "{UNKNOWN}" }}}} of rank {{{{ .Labels.rank }}}}{{{{ end }}}}'
    "{{- with .Labels.blamed_rank }}, blaming rank {{ . }}{{ end }}"
    "{{- with .Labels.device }}, blaming {{ . }}{{ end }}"
    f'{{{{- if and (eq .Labels.cause "{Cause.RANK_BEHIND}") (not .Labels.blamed_rank) }}}}, which waits for another'
    "{{ end }}. {{ end }}{{ end -}} "
    "{{ if gt (len .) 4 }}{{ len . }} ranks are reported in total. {{ end }}{{ end -}} "
)
_STALLED: Final = (
    f'{{{{ if eq $labels.comm "{UNKNOWN}" }}}}A process of no known communicator'
    "{{ else }}Communicator {{ $labels.comm }}{{ end }}"
)
"""A call or a transfer of another library may be of no communicator that its host knows."""
_WAIT_FOR_GPUS: Final = (
    f'{{{{ if eq $labels.comm "{UNKNOWN}" }}}}Processes of no known communicator'
    "{{ else }}Processes of communicator {{ $labels.comm }}{{ end }} wait for their GPUs"
)
_DIAGNOSE: Final = (
    "railscope diagnose --prometheus URL"
    f'{{{{ if ne $labels.comm "{UNKNOWN}" }}}} --comm {{{{ $labels.comm }}}}{{{{ end }}}}'
)
_MEAN_OF_COMM: Final = f"max by (cluster, comm) ({recorded.OPERATION_SECONDS.where(_OF_COMM)})"
_MEAN_OF_RANK: Final = recorded.OPERATION_SECONDS.where("cluster='%s',instance='%s',comm='%s',rank='%s'")
_MADE: Final = f"increase({catalogue.COMM_OPERATIONS}{{cluster='%s',instance='%s',comm='%s',rank='%s'}}[5m])"
_ASKS_OF_RANK: Final = "$labels.cluster $labels.instance $labels.comm $labels.rank | query"
_PACE: Final = (
    f'{{{{ range printf "{_MADE}" {_ASKS_OF_RANK} -}}}} Of {{{{ printf "%.0f" .Value }}}} operations in five minutes '
    "{{ end -}} "
    f'{{{{ range printf "{_MEAN_OF_RANK}" {_ASKS_OF_RANK} -}}}} one takes {{{{ .Value | humanizeDuration }}}} on it '
    "and {{ end -}} "
    f'{{{{ range printf "{_MEAN_OF_COMM}" {_ASKS} -}}}} {{{{ .Value | humanizeDuration }}}} on another rank. '
    "{{ end -}} "
)
"""By how much and how often; nothing where completions are not seen."""
_PROCESS: Final = (
    f"{{{{ range printf \"{catalogue.COMM_INFO}{{cluster='%s',instance='%s',comm='%s',rank='%s'}}\" "
    "$labels.cluster $labels.instance $labels.comm $labels.rank | query -}} It is process {{ .Labels.pid }}."
    "{{- end }}"
)
_MOST_AWAITED: Final = f"topk(1, {recorded.WAITED_FOR.where(_OF_COMM)} or {catalogue.COMM_AWAITED}{{{_OF_COMM}}})"
_PARTS: Final = {
    "waiting": f'waiting for {{{{ with printf "{_MOST_AWAITED}" {_ASKS} }}}}{{{{ with first . }}}}'
    "rank {{ .Labels.rank }} on {{ .Labels.instance }}{{ end }}{{ else }}the slowest rank{{ end }}",
    "communication": "communication",
    "between": "the time between calls",
    "silent": "the time without a call",
    "unknown": "communication or computation",
}
"""Of a step, as agents tell them (agent/node/steps/parts.py)."""
_GROWN: Final = (
    f"topk(1, {recorded.STEP_PART_SECONDS.where(_OF_COMM)} "
    f"- on (cluster, comm, part) {recorded.STEP_PART_SECONDS_HELD.where(_OF_COMM)})"
)
_WHAT_GREW: Final = (
    f'{{{{ range printf "{_GROWN}" {_ASKS} }}}}; '
    + "".join(f'{{{{ if eq .Labels.part "{part}" }}}}{words}{{{{ end }}}}' for part, words in _PARTS.items())
    + " grew by {{ .Value | humanizeDuration }}{{ end }}"
)
_SINCE: Final = (
    f'{{{{ range printf "{recorded.STEPS_LONGER_SINCE.where(_OF_COMM)}" {_ASKS} }}}} at '
    "{{ .Value | humanizeTimestamp }}{{ end }}"
)
_AWAITED: Final = (
    f'{{{{ range printf "{_MOST_AWAITED}" {_ASKS} }}}}'
    " The others wait most for rank {{ .Labels.rank }} on {{ .Labels.instance }}, "
    "{{ .Value | humanizePercentage }} of their time.{{ end }}"
)


def _told_of(least: Thresholds) -> str:
    """Stalls that have an alert of their own: none whose best founded cause RailscopeRailPlaneDown tells."""
    evidence = promql(
        f"""
        {recorded.STALL_EVIDENCE_ROOT}
        and on (cluster, comm)
        {recorded.STALL_EVIDENCE.where(f'cause!~"{_MILD}"')}
        unless on (cluster, comm)
        """
    )
    below_plane = promql(
        f"""
        {_INFO}{{cause="{Cause.RAIL_DOWN}"}}
        and on (cluster, comm, cause)
        topk by (cluster, comm) (1, {recorded.STALL_EVIDENCE})
        and on (cluster, rail)
        """
    )
    inner = f"{below_plane}\n(\n{textwrap.indent(plane_down(least), '  ')}\n)"
    return f"{evidence}\n(\n{textwrap.indent(inner, '  ')}\n)"


def alerts(least: Thresholds) -> Iterator[Alert]:
    """Alerts on what a job does, in the order of the rules' file."""
    yield Alert(
        Group.STALLS,
        "RailscopeCollectiveStalled",
        Severity.CRITICAL,
        _told_of(least),
        about="One alert for each communicator, for as long as it stalls.  The cause stands in the annotations and is "
        "no label: an alert whose labels change resolves and fires anew, and a host may find a better founded cause "
        "at any time.  There is none for communicators that another one holds up, and none where "
        "RailscopeRailPlaneDown tells the cause.",
        holds_for="15s",
        because="The host has already waited, 2 s where it knows a culprit and 30 s where it does not, unless the "
        "kernel told it what happened.  One more scrape brings what all hosts say, and what was held up for a moment "
        "has gone on by then.",
        more_labels={"exported_job": _JOB},
        summary=f"{_STALLED} is stalled{_CAUSE}{_CULPRIT}",
        description=f"{_EVIDENCE}For the verdict on all hosts run: {_DIAGNOSE}",
        page="CollectiveStalled",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeUnseenWorkStuck",
        Severity.WARNING,
        promql(
            f"""
            max by (cluster, comm) ({recorded.STALL_EVIDENCE.where(f'cause=~"{_MILD}"')})
            unless on (cluster, comm)
            {recorded.STALL_EVIDENCE.where(f'cause!~"{_MILD}"')}
            """
        ),
        about="Weak evidence: a process waits for its GPU, and no NCCL call tells what for.  Only with "
        "--collector.cuda.",
        holds_for="1m",
        because="Where all ranks run long kernels, the first of them has often ended by then, and that ends the alert.",
        more_labels={"exported_job": _JOB},
        summary=f"{_WAIT_FOR_GPUS}{_CAUSE}{_CULPRIT}",
        description=f"{_EVIDENCE}It is no fault where kernels are known to run so long. For the verdict on all hosts "
        f"run: {_DIAGNOSE}",
        page="CollectiveStalled",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeStallNotJudged",
        Severity.WARNING,
        str(recorded.STALL_NOT_JUDGED),
        about="Ranks wait for others that this Prometheus never scraped: those may write a checkpoint, or hang.  "
        "Scrape all hosts of a job with one Prometheus (deploy/prometheus/README.md).",
        holds_for="5m",
        because="Most checkpoints are written by then; after half an hour it counts as a stall.",
        more_labels={"exported_job": _JOB},
        summary="Communicator {{ $labels.comm }} waits for ranks that this Prometheus does not scrape",
        description="Every rank of it that is scraped here waits for one that is not, so whether it is stalled cannot "
        "be known here. Ask the Prometheus that scrapes the others: "
        "railscope diagnose --prometheus URL --comm {{ $labels.comm }}",
        page="RankBehindCommunicator",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeRankBehindCommunicator",
        Severity.CRITICAL,
        str(recorded.OPERATIONS_BEHIND_ROOT),
        about="Hosts see their own ranks only; the recording rule compares all of them.  A rank whose process waits in "
        "another communicator is held up itself.",
        holds_for="30s",
        because="Two scrapes of 15 s: by then both sides of the comparison were read after the stall began.",
        more_labels={"exported_job": _JOB},
        summary="Rank {{ $labels.rank }} on {{ $labels.instance }} keeps communicator {{ $labels.comm }} waiting",
        description="Rank {{ $labels.rank }} on {{ $labels.instance }} is {{ $value }} operation(s) behind the most "
        f"advanced rank, and the communicator is stalled. {_PROCESS}",
        page="RankBehindCommunicator",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeRankSlow",
        Severity.WARNING,
        promql(
            f"""
            (
                (
                    {recorded.WAITED_FOR} > {least.waited_for_ratio:g}
                  unless on (cluster, comm)
                    delta({recorded.COMM_SEQUENCE_MAX}[5m]) == 0
                )
              or
                (
                    {catalogue.COMM_AWAITED} > {least.waited_for_ratio:g}
                  unless on (cluster, comm)
                    {recorded.WAITED_FOR}
                )
            )
            unless on (cluster, job, instance, comm, rank)
            max_over_time({catalogue.COMM_WRITING}[5m]) == 1
            """
        ),
        about="Nothing hangs, and all go at the pace of one rank.  Ranks of point-to-point communicators, which have "
        "no sequence, wait for each other by design.  Where completions are not seen, each host compares the calls of "
        "its own ranks.  A rank that writes to storage is left out: it makes a checkpoint.",
        holds_for="10m",
        because="A checkpoint, an evaluation or the start of a job makes ranks wait for minutes.",
        more_labels={"exported_job": _JOB},
        summary="Rank {{ $labels.rank }} on {{ $labels.instance }} slows communicator {{ $labels.comm }} down",
        description="The other ranks wait for rank {{ $labels.rank }} on {{ $labels.instance }} for "
        f"{{{{ $value | humanizePercentage }}}} of their time, for ten minutes now. {_PACE}{_PROCESS}",
        page="RankSlow",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeCommunicatorErrors",
        Severity.WARNING,
        promql(
            f"""
            increase({catalogue.COMM_ERRORS}[5m]) > 0
            or
            (
                {catalogue.COMM_ERRORS}
              unless
                {catalogue.COMM_ERRORS} offset 5m
              and on (cluster, job, instance)
                {catalogue.AGENT_START_TIME} offset 5m
            )
            """
        ),
        about="The first error of a kind makes the series, which then has no increase, so a new series counts as an "
        "error, too; not one that is new because the agent is.",
        holds_for="0s",
        because="None: the error is the event, and five minutes keep it visible.",
        summary="NCCL reports {{ $labels.error }} on {{ $labels.instance }}",
        description='NCCL reported {{ $labels.error }} {{ printf "%.0f" $value }} time(s) within five minutes to '
        "processes on {{ $labels.instance }}: their communicators are broken, and the job ends or is restarted.",
        page="CommunicatorErrors",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeBusBandwidthFell",
        Severity.WARNING,
        promql(
            f"""
            {recorded.BUS_BANDWIDTH}
            < on (cluster, job, instance, op, size)
            {least.bus_bandwidth_ratio:g} * {recorded.BUS_BANDWIDTH_HELD}
            """
        ),
        about="Compared with what the same communicators held for half an hour, by operation and size, for as long as "
        "they live.  Time in which ranks wait for each other counts: a straggler lowers the bandwidth as a slow link "
        "does.",
        holds_for="15m",
        because="A checkpoint or an evaluation makes ranks wait for some minutes.",
        summary="{{ $labels.op }} of {{ $labels.size }} bytes has become slow on {{ $labels.instance }}",
        description="The bus bandwidth of {{ $labels.op }} of up to {{ $labels.size }} bytes is now "
        "{{ $value | humanize }}B/s on {{ $labels.instance }}; the same communicators held more than that for half an "
        "hour.",
        page="BusBandwidthFell",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeStepsLonger",
        Severity.WARNING,
        promql(
            f"""
            avg_over_time({recorded.STEP_SECONDS}[20m]) / on (cluster, comm) {recorded.STEP_SECONDS_HELD}
            and on (cluster, comm)
            quantile_over_time(0.25, {recorded.STEP_SECONDS}[20m])
            / on (cluster, comm) {recorded.STEP_SECONDS_HELD} > {least.step_time_ratio:g}
            """
        ),
        about="Compared with the shortest mean that the same job held for half an hour.  Steps have to be longer for "
        "three quarters of 20 minutes, so a step time that wanders, a file system that is busy for some minutes and a "
        "neighbour that comes and goes raise no alert.  Evaluations and checkpoints do not count as longer steps.",
        holds_for="5m",
        because="Near the threshold a step time goes above it and below it again.",
        more_labels={"exported_job": _JOB},
        summary=f'Steps became {{{{ printf "%.2g" $value }}}} times as long{_SINCE}{_WHAT_GREW}',
        description=f'Steps of the job with communicator {{{{ $labels.comm }}}} take {{{{ printf "%.2g" $value }}}} '
        f"times as long as before.{_AWAITED} To see what bounds the job run: "
        "railscope diagnose --prometheus URL --job JOB",
        page="StepsLonger",
    )
    yield Alert(
        Group.STALLS,
        "RailscopeRanksDisagree",
        Severity.CRITICAL,
        f"max_over_time({recorded.RANKS_DISAGREE}[1h]) > 0",
        about="Ranks of a communicator have different signatures for the same block of collectives.  The event is the "
        "fault, and what was computed with it stays wrong, so the alert stands for an hour.",
        holds_for="0s",
        because="Two signatures of one block are no accident of measurement.",
        more_labels={"exported_job": _JOB},
        summary="Ranks of communicator {{ $labels.comm }} do not make the same collectives",
        description="Operation, data type, bytes, root or order of collectives differ between ranks. NCCL may hang, or "
        "go on with wrong data. Where two of the ranks are on one host, the log of its agent names them.",
        page="RanksDisagree",
    )
