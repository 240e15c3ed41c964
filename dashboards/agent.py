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
    WATCH,
    AnyPanel,
    query,
    stat,
    states,
    table,
    timeseries,
)
from railscope.dashboards.variables import HOST

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
            Section("Losses", _losses()),
            Section("What is observed", _observed()),
        ],
    )


def _agents() -> list[AnyPanel]:
    return [
        stat("Agents", "Agents that answer.", "short", f"count({catalogue.BUILD_INFO.where(HOST)})"),
        stat(
            "Silent",
            "Agents that were scraped within the last hour and do not answer now.",
            "short",
            f"count(up{{{HOST}}} == 0 {_AGENTS}) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat(
            "Failing sources",
            "Collectors whose last run failed. Other collectors are not affected.",
            "short",
            f"count({catalogue.COLLECTOR_SUCCESS.where(HOST)} == 0) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat(
            "Simulated inputs",
            "Agents with a recorded or synthesised input: their values do not come from a real job.",
            "short",
            f'count({catalogue.BUILD_INFO}{{simulated="true",{HOST}}}) or vector(0)',
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
            "Answers",
            "Whether each agent answered the scrape.",
            query(f"up{{{HOST}}} {_AGENTS}", "{{instance}}"),
            words=FINE_OR_FAILED,
        ),
        timeseries(
            "Running for",
            "Uptime of each agent, and the time since the host's boot in which no agent counted (dark; only with "
            "--state.directory). After a restart (drop to 0), ranks that already ran are counted from that moment.",
            "s",
            query(f"time() - {catalogue.AGENT_START_TIME.where(HOST)}", "{{instance}}"),
            query(catalogue.AGENT_DARK_SECONDS.where(HOST), "{{instance}}: dark"),
        ),
        timeseries(
            "Loop late",
            "Longest time by which each agent's loop woke late, or that one of its turns took: within five minutes, "
            "and since the agent's start. Above 30 s the agent fails its health check.",
            "s",
            query(catalogue.LOOP_LATE_RECENT.where(HOST), "{{instance}}: 5 min"),
            query(catalogue.LOOP_LATE.where(HOST), "{{instance}}: since start"),
        ),
    ]


def _cost() -> list[AnyPanel]:
    overhead, calls = catalogue.OVERHEAD_SECONDS.name, catalogue.COLLECTIVE_CALLS.name
    return [
        timeseries(
            "Cost to jobs",
            "Calibrated CPU time that the eBPF programs take from observed processes, as a share of one CPU, by host.",
            "percentunit",
            query(f"sum by (cluster, instance) (rate({overhead}{{{HOST}}}[$__rate_interval]))", "{{instance}}"),
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
            "CPU time of the eBPF programs / observed NCCL calls.",
            "s",
            query(
                f"sum by (cluster, instance) (rate({overhead}{{{HOST}}}[$__rate_interval])) "
                f"/ (sum by (cluster, instance) (rate({calls}{{{HOST}}}[$__rate_interval])) > 0)",
                "{{instance}}",
            ),
        ),
        timeseries(
            "CPU of the agents",
            "CPU time of each agent's own process, as a share of one CPU.",
            "percentunit",
            query(f"rate(process_cpu_seconds_total{{{HOST}}}[$__rate_interval]) {_AGENTS}", "{{instance}}"),
        ),
        timeseries(
            "Memory of the agents",
            "Memory of each agent's own process: the hundred largest.",
            "bytes",
            query(f"topk(100, process_resident_memory_bytes{{{HOST}}} {_AGENTS})", "{{instance}} resident"),
            query(f"topk(100, process_virtual_memory_bytes{{{HOST}}} {_AGENTS})", "{{instance}} virtual"),
        ),
        timeseries(
            "File descriptors of the agents",
            "Open file descriptors of each agent / its limit.",
            "percentunit",
            query(
                f"process_open_fds{{{HOST}}} / process_max_fds{{{HOST}}} {_AGENTS}",
                "{{instance}}",
            ),
        ),
        timeseries(
            "Age of the agents' processes",
            "Time since the operating system started each agent's process.",
            "s",
            query(f"time() - process_start_time_seconds{{{HOST}}} {_AGENTS}", "{{instance}}"),
        ),
        timeseries(
            "Time of a source",
            "Duration of each collector's last run, maximum over all hosts.",
            "s",
            query(f"max by (collector) ({catalogue.COLLECTOR_DURATION.where(HOST)})", "{{collector}}"),
        ),
        timeseries(
            "Series",
            "Series that each agent exports, as counted by Prometheus.",
            "short",
            query(f"scrape_samples_scraped{{{HOST}}} {_AGENTS}", "{{instance}}"),
        ),
        timeseries(
            "Time of a scrape",
            "Duration of each agent's scrape, as measured by Prometheus.",
            "s",
            query(f"scrape_duration_seconds{{{HOST}}} {_AGENTS}", "{{instance}}"),
        ),
    ]


def _losses() -> list[AnyPanel]:
    return [
        timeseries(
            "Events lost",
            "Events that railscope itself lost, by reason: the hundred with the most; counts and bytes stay exact.",
            "cps",
            query(
                f"topk(100, sum by (cluster, instance, reason) "
                f"(rate({catalogue.EVENTS_LOST.where(HOST)}[$__rate_interval])))",
                "{{instance}} {{reason}}",
            ),
        ),
        timeseries(
            "Series left out",
            "Series left out of expositions because of --limit.series, added up over expositions: 0 unless any is "
            "missing.",
            "cps",
            query(
                f"sum by (cluster, instance, reason) (rate({catalogue.SERIES_DROPPED.where(HOST)}[$__rate_interval]))",
                "{{instance}} {{reason}}",
            ),
        ),
        timeseries(
            "At a limit",
            "What users lost at limits of their own: detail of their jobs, never of others'.",
            "cps",
            query(
                f"sum by (cluster, instance, limit, uid) "
                f"(rate({catalogue.LIMIT_REACHED.where(HOST)}[$__rate_interval]))",
                "{{instance}} {{limit}} uid {{uid}}",
            ),
        ),
        timeseries(
            "Reads missed",
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
        ),
        timeseries(
            "Refused by the HTTP server",
            "Connections and requests that the agent refused or closed, by reason: half-open, unread and idle ones "
            "made room for new connections.",
            "cps",
            query(
                f"sum by (cluster, instance, reason) (rate({catalogue.HTTP_REFUSED.where(HOST)}[$__rate_interval]))",
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
            "Sources",
            "Whether each collector's last run succeeded: a hundred, first those that failed.",
            query(f"bottomk(100, {catalogue.COLLECTOR_SUCCESS.where(HOST)})", "{{instance}} {{collector}}"),
            words=FINE_OR_FAILED,
        ),
        timeseries(
            "Level",
            "Observation level of each NCCL library: -1 watch, 0 counts, 1 completion, 2 rails, 3 all.",
            "short",
            query(catalogue.PROBE_LEVEL.where(HOST), "{{instance}} {{nccl_version}} {{library}}"),
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
            f"{catalogue.PROBE_ATTACHED.where(HOST)} == 0",
        ),
        table(
            "NCCL libraries",
            "Observed NCCL libraries and the source of their struct layouts.",
            "instance library nccl_version layout_source",
            catalogue.PROBE_LAYOUT_INFO.where(HOST),
        ),
    ]
