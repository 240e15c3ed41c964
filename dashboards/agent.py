"""The dashboard *Agent*: what railscope itself costs, what it loses, and where it sees less than it should."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.agent.facts import catalogue
from railscope.dashboards import page, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    BAD,
    FINE_OR_FAILED,
    GOOD,
    NEVER_FINE,
    NONE_REPORTED,
    WATCH,
    AnyPanel,
    query,
    stat,
    states,
    table,
    timeseries,
)
from railscope.dashboards.variables import HOST, or_zero

_COST = ((None, GOOD), (0.005, WATCH), (0.02, BAD))
_AGENTS = f"and on (cluster, job, instance) last_over_time({catalogue.BUILD_INFO.where(HOST)}[1h])"


def dashboard() -> Dashboard:
    """The dashboard of the agents themselves: cost, losses, what is observed."""
    return page.page(
        page.AGENT,
        "railscope itself: its cost to jobs and to Prometheus, its losses, attached probes and failing collectors.",
        [variables.host()],
        [
            Section("Agents", _agents()),
            Section("Cost", _cost()),
            Section("Losses", _losses(), folded=True),
            Section("What is observed", _observed(), folded=True),
        ],
    )


def _agents() -> list[AnyPanel]:
    return [
        stat("Agents", "Agents that answer.", "short", f"count({catalogue.BUILD_INFO.where(HOST)})"),
        stat(
            "Silent",
            "Agents that were scraped within the last hour and do not answer now.",
            "short",
            or_zero(f"count(up{{{HOST}}} == 0 {_AGENTS})"),
            thresholds=NEVER_FINE,
        ),
        stat(
            "Failing collectors",
            "Collectors whose last run failed. Other collectors are not affected.",
            "short",
            or_zero(f"count({catalogue.COLLECTOR_SUCCESS.where(HOST)} == 0)"),
            thresholds=NEVER_FINE,
        ),
        stat(
            "Simulated inputs",
            "Agents with a recorded or synthesised input: their values do not come from a real job.",
            "short",
            or_zero(f'count({catalogue.BUILD_INFO}{{simulated="true",{HOST}}})'),
            thresholds=((None, GOOD), (1.0, WATCH)),
        ),
        stat(
            "Oldest values",
            "Age of the oldest agent's values, including the time since the last scrape.",
            "s",
            f"max(time() - {catalogue.SNAPSHOT_TIMESTAMP.where(HOST)})",
        ),
        stat(
            "Processes",
            "Processes with NCCL that are observed.",
            "short",
            f"sum({catalogue.PROCESSES_OBSERVED.where(HOST)})",
        ),
        table(
            "Versions",
            "railscope's version and the kernel's, by host.",
            "instance version kernel simulated",
            catalogue.BUILD_INFO.where(HOST),
        ),
        states(
            "Agents up",
            "Whether each agent answered the scrape: fifty, first those that did not.",
            query(f"bottomk(50, up{{{HOST}}} {_AGENTS})", "{{instance}}"),
            words=FINE_OR_FAILED,
        ),
        timeseries(
            "Uptime",
            "Uptime of the twenty agents that were started last, and the time since the host's boot in which no "
            "agent counted (dark; only with "
            "--state.directory). After a restart (drop to 0), ranks that already ran are counted from that moment.",
            "s",
            query(f"bottomk(20, time() - {catalogue.AGENT_START_TIME.where(HOST)})", "{{instance}}"),
            query(f"topk(20, {catalogue.AGENT_DARK_SECONDS.where(HOST)})", "{{instance}}: dark"),
        ),
        timeseries(
            "Lateness of the loop",
            "Longest time by which each agent's loop woke late, or that one of its turns took: within five minutes, "
            "and since the agent's start: the twenty latest. Above 30 s the agent fails its health check.",
            "s",
            query(f"topk(20, {catalogue.LOOP_LATE_RECENT.where(HOST)})", "{{instance}}: 5 min"),
            query(f"topk(20, {catalogue.LOOP_LATE.where(HOST)})", "{{instance}}: since start"),
        ),
    ]


def _cost() -> list[AnyPanel]:
    overhead, calls = catalogue.OVERHEAD_SECONDS.name, catalogue.COLLECTIVE_CALLS.name
    return [
        timeseries(
            "Cost to jobs",
            "Calibrated CPU time that the eBPF programs take from observed processes, as a share of one CPU: the "
            "twenty hosts with the most.",
            "percentunit",
            query(
                f"topk(20, sum by (cluster, instance) (rate({overhead}{{{HOST}}}[$__rate_interval])))", "{{instance}}"
            ),
            thresholds=_COST,
        ),
        timeseries(
            "Cost by program",
            "The same cost by eBPF program, summed over all hosts.",
            "percentunit",
            query(f"sum by (program) (rate({overhead}{{{HOST}}}[$__rate_interval]))", "{{program}}"),
            stacked=True,
        ),
        timeseries(
            "Cost of one NCCL call",
            "CPU time of the eBPF programs / observed NCCL calls: the twenty dearest hosts.",
            "s",
            query(
                f"topk(20, sum by (cluster, instance) (rate({overhead}{{{HOST}}}[$__rate_interval])) "
                f"/ (sum by (cluster, instance) (rate({calls}{{{HOST}}}[$__rate_interval])) > 0))",
                "{{instance}}",
            ),
        ),
        timeseries(
            "CPU of the agents",
            "CPU time of each agent's own process, as a share of one CPU: the twenty with the most.",
            "percentunit",
            query(f"topk(20, rate(process_cpu_seconds_total{{{HOST}}}[$__rate_interval]) {_AGENTS})", "{{instance}}"),
        ),
        timeseries(
            "Memory of the agents",
            "Memory of each agent's own process: the twenty largest.",
            "bytes",
            query(f"topk(20, process_resident_memory_bytes{{{HOST}}} {_AGENTS})", "{{instance}} resident"),
            query(f"topk(20, process_virtual_memory_bytes{{{HOST}}} {_AGENTS})", "{{instance}} virtual"),
        ),
        timeseries(
            "File descriptors of the agents",
            "Open file descriptors of each agent / its limit: the twenty fullest.",
            "percentunit",
            query(
                f"topk(20, process_open_fds{{{HOST}}} / process_max_fds{{{HOST}}} {_AGENTS})",
                "{{instance}}",
            ),
        ),
        timeseries(
            "Age of agents' processes",
            "Time since the operating system started each agent's process: the twenty youngest.",
            "s",
            query(f"bottomk(20, time() - process_start_time_seconds{{{HOST}}} {_AGENTS})", "{{instance}}"),
        ),
        timeseries(
            "Duration of collectors",
            "Duration of each collector's last run, maximum over all hosts.",
            "s",
            query(f"max by (collector) ({catalogue.COLLECTOR_DURATION.where(HOST)})", "{{collector}}"),
        ),
        timeseries(
            "Series exported",
            "Series that each agent exports, as counted by Prometheus: the twenty with the most.",
            "short",
            query(f"topk(20, scrape_samples_scraped{{{HOST}}} {_AGENTS})", "{{instance}}"),
        ),
        timeseries(
            "Duration of scrapes",
            "Duration of each agent's scrape, as measured by Prometheus: the twenty slowest.",
            "s",
            query(f"topk(20, scrape_duration_seconds{{{HOST}}} {_AGENTS})", "{{instance}}"),
        ),
    ]


def _losses() -> list[AnyPanel]:
    return [
        timeseries(
            "Events lost",
            "Events that railscope itself lost, by reason: the twenty with the most; counts and bytes stay exact.",
            "cps",
            query(
                f"topk(20, sum by (cluster, instance, reason) "
                f"(rate({catalogue.EVENTS_LOST.where(HOST)}[$__rate_interval])))",
                "{{instance}} {{reason}}",
            ),
        ),
        timeseries(
            "Series dropped",
            "Series left out of expositions because of --limit.series, added up over expositions: 0 unless any is "
            "missing.",
            "cps",
            query(
                "topk(20, sum by (cluster, instance, reason) "
                f"(rate({catalogue.SERIES_DROPPED.where(HOST)}[$__rate_interval])))",
                "{{instance}} {{reason}}",
            ),
        ),
        timeseries(
            "Limits reached",
            "What users lost at limits of their own: detail of their jobs, never of others'.",
            "cps",
            query(
                "topk(20, sum by (cluster, instance, limit, uid) "
                f"(rate({catalogue.LIMIT_REACHED.where(HOST)}[$__rate_interval])))",
                "{{instance}} {{limit}} uid {{uid}}",
            ),
        ).no_value(NONE_REPORTED),
        timeseries(
            "Missed reads",
            "Scheduled reads of collectors that were skipped because the reader was late: the twenty with the most.",
            "cps",
            query(
                f"topk(20, sum by (cluster, instance, collector) (rate({catalogue.COLLECTOR_READS_MISSED.where(HOST)}"
                "[$__rate_interval])))",
                "{{instance}} {{collector}}",
            ),
        ),
        timeseries(
            "Flight recordings",
            "Flight recordings triggered by a stall or a signal; result says whether the file was written.",
            "short",
            query(
                f"sum by (reason, result) (increase({catalogue.RECORDINGS.where(HOST)}[$__rate_interval]))",
                "{{reason}} {{result}}",
            ),
        ).no_value(NONE_REPORTED),
        timeseries(
            "OTLP exports",
            "Exports to an OpenTelemetry collector (--otlp.endpoint), by result, of all hosts.",
            "cps",
            query(f"sum by (result) (rate({catalogue.OTLP_EXPORTS.where(HOST)}[$__rate_interval]))", "{{result}}"),
        ).no_value("none set up"),
        timeseries(
            "Refused HTTP connections and requests",
            "Connections and requests that the agent refused or closed, by reason: half-open, unread and idle ones "
            "made room for new connections.",
            "cps",
            query(
                "topk(20, sum by (cluster, instance, reason) "
                f"(rate({catalogue.HTTP_REFUSED.where(HOST)}[$__rate_interval])))",
                "{{instance}} {{reason}}",
            ),
        ),
    ]


def _observed() -> list[AnyPanel]:
    return [
        table(
            "Hosts",
            "What each host is called: by Prometheus, by Kubernetes or the operator, and by the kernel.",
            "instance node hostname",
            catalogue.NODE_INFO.where(HOST),
        ),
        states(
            "Collectors",
            "Whether each collector's last run succeeded: fifty, first those that failed.",
            query(f"bottomk(50, {catalogue.COLLECTOR_SUCCESS.where(HOST)})", "{{instance}} {{collector}}"),
            words=FINE_OR_FAILED,
        ),
        timeseries(
            "Probe level",
            "Observation level of each NCCL library: -1 watch, 0 counts, 1 completion, 2 rails, 3 all; the "
            "fifty lowest.",
            "short",
            query(f"bottomk(50, {catalogue.PROBE_LEVEL.where(HOST)})", "{{instance}} {{nccl_version}} {{library}}"),
            largest=3,
        ).min(-1),
        timeseries(
            "Calls without a probe",
            "Collectives that met no probe, at level watch, by NCCL's own numbers; and the 20 ranks with the most.",
            "cps",
            query(
                f"sum by (op) (rate({catalogue.COLLECTIVE_ESTIMATED_CALLS.where(HOST)}[$__rate_interval]))", "{{op}}"
            ),
            query(
                f"topk(20, rate({catalogue.COMM_ESTIMATED.where(HOST)}[$__rate_interval]))", "{{comm}} rank {{rank}}"
            ),
        ),
        timeseries(
            "Payload without a probe",
            "Estimated payload of these collectives, and its standard error.",
            "Bps",
            query(
                f"sum by (op) (rate({catalogue.COLLECTIVE_ESTIMATED_PAYLOAD_BYTES.where(HOST)}[$__rate_interval]))",
                "{{op}}",
            ),
            query(
                f"sum by (op) ({catalogue.COLLECTIVE_ESTIMATED_PAYLOAD_ERROR.where(HOST)} "
                f"* rate({catalogue.COLLECTIVE_ESTIMATED_PAYLOAD_BYTES.where(HOST)}[$__rate_interval]))",
                "{{op}}: error",
            ),
        ),
        table(
            "Programs that are not attached",
            "eBPF programs that are not attached to an NCCL library in use: their metrics are missing there.",
            "instance library nccl_version program",
            f"topk(500, {catalogue.PROBE_ATTACHED.where(HOST)} == 0)",
            empty=NONE_REPORTED,
        ),
        table(
            "NCCL libraries",
            "Observed NCCL libraries and the source of their struct layouts.",
            "instance library nccl_version layout_source",
            catalogue.PROBE_LAYOUT_INFO.where(HOST),
        ),
    ]
