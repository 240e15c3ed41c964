"""The agent's configuration: every option, its default, its flag and its key; the parser of all commands' flags.

`OPTIONS` is the one list of them all: flags, keys, variables of the environment, help and checks come from it;
agent/config/effective.py puts their values together.  Flags that other Prometheus exporters have carry the same names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.config.counter_severity import CounterSeverity, parse_counter_severity
from railscope.agent.config.excluded_counters import parse_excluded_counters
from railscope.agent.config.keys import VARIABLE_PREFIX, ConfigError, Key, Kind
from railscope.agent.config.rail_patterns import RailPattern, parse_rail_pattern
from railscope.agent.config.values import (
    ListenAddress,
    decimal,
    duration_ns,
    folder,
    label_text,
    listen_address,
    one_of,
    option_type,
    optional_file,
    otlp_endpoint,
    percentage,
    power_of_two,
    power_of_two_bytes,
    prom_file,
    size_bytes,
    split_list,
    telemetry_path,
    whole_number,
)

__all__ = ["COLLECTORS", "Config", "ConfigError", "ListenAddress", "add_arguments"]


@dataclass(frozen=True, slots=True)
class Collector:
    """One source of facts that can be switched off."""

    name: str
    help: str
    enabled: bool = True

    @property
    def field(self) -> str:
        """Where parsed arguments hold whether it runs."""
        return f"collector_{self.name}"

    @property
    def flag(self) -> str:
        return f"--collector.{self.name}"

    @property
    def key(self) -> str:
        """`group.key` in the file."""
        return f"collectors.{self.name}"


COLLECTORS: Final = (
    Collector("collective", "NCCL calls of running processes, counted by eBPF probes"),
    Collector("netdev", "counters of network devices"),
    Collector("ethtool", "driver statistics of rails (ethtool -S)"),
    Collector("qdisc", "queueing disciplines (qdiscs) of rails"),
    Collector("tcp", "TCP connections of observed processes on rails"),
    Collector("rdma", "counters of RDMA devices"),
    Collector("qp", "queue pairs of RDMA devices, and whose they are"),
    Collector("lldp", "the switch at the other end of each rail, as it says itself"),
    Collector("nvlink", "GPUs and NVLinks, read through NVIDIA's NVML"),
    Collector("pcie", "PCIe links of rails' devices and GPUs, and their errors (AER)"),
    Collector("module", "network modules (ethtool -m) and error correction of rails' ports"),
    Collector("kmsg", "hardware errors in the kernel's log: XIDs, PCIe, network drivers"),
    Collector(
        "cuda",
        "launches of CUDA graphs and waits for the GPU in processes with NCCL, by probes on CUDA's driver",
        enabled=False,
    ),
)


_DEFAULT_LISTEN: Final = ListenAddress("127.0.0.1", 9779)


@dataclass(frozen=True, slots=True)
class Config:
    """The agent's configuration; `OPTIONS` describes each field."""

    listen: ListenAddress = _DEFAULT_LISTEN
    telemetry_path: str = "/metrics"
    web_config_file: Path | None = None
    scope: str = "all"
    pids: tuple[int, ...] = ()
    namespaces: frozenset[int] = frozenset()
    """Network namespaces, by inode, whose processes alone are observed; none: `scope` says.  No option sets it: the
    demo keeps to its own hosts by it."""
    scan_interval_ns: int = 10_000_000_000
    probes_linger_ns: int = 60_000_000_000
    node_name: str | None = None
    """None: the host name."""
    node_cluster: str | None = None
    """None: no label tells it."""
    sysfs: Path = Path("/sys")
    procfs: Path = Path("/proc")
    pod_logs: Path = Path("/var/log/pods")
    rails: tuple[RailPattern, ...] = ()
    """Empty: the rails are found."""
    severities: tuple[CounterSeverity, ...] = ()
    """Of device counters, before those of agent/node/rails/counter_rules.py and its siblings."""
    excluded_counters: tuple[str, ...] = ()
    """DEVICE or DEVICE/COUNTER, patterns: not read."""
    sample_interval_ns: int = 100_000_000
    correlation_window_ns: int = 30_000_000_000
    small_payload_bytes: int = 65_536
    loader: str = "auto"
    level: str = "auto"
    budget_ratio: float = 0.01
    probe_attach: str = "auto"
    probe_enqueue_time: str = "auto"
    probe_sample_every: int = 16
    series_limit: int = 20_000
    series_profile: str = "full"
    """What a scrape shows that does not choose: one of railscope.exporters.series.lean.PROFILES."""
    series_detail: tuple[str, ...] = ()
    """What is shown beyond the usual, of railscope.exporters.series.selection.DETAILS, or all."""
    series_peers: int = 0
    """Peers of a rank for which bytes are shown; 0: of none."""
    comm_lifetime_ns: int = 300_000_000_000
    aggregate_entries: int = 65_536
    communicator_entries: int = 16_384
    ring_bytes: int = 2 << 20
    stall_after_ns: int = 30_000_000_000
    stall_factor: float = 8.0
    stall_floor_ns: int = 2_000_000_000
    stall_stacks: Path | None = None
    """None: where blamed ranks stand in their code is not read."""
    state_directory: Path | None = None
    """None: totals begin at 0 with each agent."""
    verdicts_socket: Path | None = None
    """None: stalls are told on `/stalls` and in the metrics alone."""
    otlp_endpoint: str | None = None
    """None: nothing is pushed."""
    otlp_interval_ns: int = 60_000_000_000
    otlp_headers_file: Path | None = None
    otlp_ca_file: Path | None = None
    otlp_certificate_file: Path | None = None
    otlp_key_file: Path | None = None
    recordings_directory: Path | None = Path("/var/lib/railscope/recordings")
    """None: nothing is written."""
    recordings_max_bytes: int = 256 << 20
    recordings_window_ns: int = 60_000_000_000
    recordings_memory_bytes: int = 16 << 20
    """0: nothing is kept for recordings."""
    log_level: str = "info"
    log_format: str = "logfmt"
    collectors: frozenset[str] = frozenset(collector.name for collector in COLLECTORS if collector.enabled)
    """Names of those that run."""
    once: bool = False
    once_settle_ns: int = 1_000_000_000
    textfile: Path | None = None
    """With `once`: where the metrics go; None: to standard output."""
    config_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """One option with a value."""

    field: str
    flag: str
    key: str
    """`group.key` in the file; empty: command line only."""
    kind: Kind
    read: Callable[[str], object]
    metavar: str
    default: str
    """As a person would write it; for the help."""
    help: str

    @property
    def name(self) -> str:
        """`group.key`, or the flag of what has none."""
        return self.key or self.flag.removeprefix("--")


def _text(
    field: str, flag: str, key: str, read: Callable[[str], object], metavar: str, default: str, help: str
) -> Option:
    return Option(field, flag, key, Kind.TEXT, read, metavar, default, help)


def _integer(field: str, flag: str, key: str, read: Callable[[str], object], default: str, help: str) -> Option:
    return Option(field, flag, key, Kind.INTEGER, read, "N", default, help)


def _list(
    field: str, flag: str, key: str, read: Callable[[str], object], metavar: str, default: str, help: str
) -> Option:
    return Option(field, flag, key, Kind.LIST, read, metavar, default, help)


OPTIONS: Final = (
    _text("listen", "--web.listen-address", "web.listen_address", listen_address, "HOST:PORT", "127.0.0.1:9779",
          "address on which the agent serves metrics; :9779 listens on every address of this host"),
    _text("telemetry_path", "--web.telemetry-path", "web.telemetry_path", telemetry_path, "PATH", "/metrics",
          "URL path of the metrics"),
    _text("web_config_file", "--web.config.file", "web.config_file", optional_file, "FILE", "none",
          "TLS and authentication, in the format of Prometheus' exporter toolkit"),
    _text("scope", "--scope", "probes.scope", one_of("all", "netns"), "all|netns", "all",
          "which processes the agent observes: all processes of this host, or those in the agent's network namespace "
          "(netns)"),
    _list("pids", "--pid", "probes.pids", whole_number(1, 1 << 22), "PID", "all processes of the scope",
          "observe these processes only, and not what they fork"),
    _text("scan_interval_ns", "--probe.scan-interval", "probes.scan_interval", duration_ns("100ms", "1h"), "TIME",
          "10s", "interval between scans for processes that map NCCL"),
    _text("probes_linger_ns", "--probe.linger", "probes.linger", duration_ns("0s", "1h"), "TIME", "60s",
          "how long probes stay on a library after its last process ended, for the next job that maps it"),
    _text("loader", "--loader", "probes.loader", one_of("auto", "libbpf", "bcc"), "auto|libbpf|bcc", "auto",
          "BPF loader: libbpf, bcc (compiles the programs on this host at the agent's start), or bcc only if libbpf "
          "cannot load them (auto)"),
    _text("level", "--level", "probes.level", one_of("auto", "watch", "counts", "completion", "rails", "all"),
          "auto|watch|counts|completion|rails|all", "auto",
          "observation level: NCCL's own numbers of collectives, with no probe on calls (watch), every call (counts), "
          "also completed operations (completion), also every message to a network device (rails), also every kernel "
          "launch (all); auto: the highest level that the budget allows"),
    _text("budget_ratio", "--budget", "probes.budget", percentage(0.01, 100), "PERCENT", "1%",
          "maximum share of the observed threads' CPU time that probes may cost; counting calls is included, and "
          "given up last, at four times the budget, where NCCL numbers collectives itself (level watch)"),
    _text("probe_attach", "--probe.attach", "probes.attach", one_of("auto", "multi", "perf"), "auto|multi|perf", "auto",
          "how probes attach: uprobe_multi links (kernel 6.6 and newer), perf events, or whichever works (auto)"),
    _text("probe_enqueue_time", "--probe.enqueue-time", "probes.enqueue_time", one_of("auto", "session", "pair", "off"),
          "auto|session|pair|off", "auto",
          "how host time inside a call is measured: uprobe session, entry and return probe (pair), or not at all "
          "(off)"),
    _integer("probe_sample_every", "--probe.sample-every", "probes.sample_every", power_of_two(1 << 16), "16",
             "measure the host time of one call in N; N is a power of two"),
    _list("rails", "--rail.devices", "rails.devices", parse_rail_pattern, "DEVICE", "found",
          "devices to use as rails: names, patterns (eth*), or names with a rail number (eth2=0)"),
    _list("excluded_counters", "--rail.counters.exclude", "rails.counters_exclude", parse_excluded_counters,
          "DEVICE[/COUNTER]", "none",
          "counters of devices that are not read, as patterns: all of a device (mlx5_1) or some "
          "(mlx5_*/port_xmit_wait); for firmware that logs each read, or takes long for it"),
    _list("severities", "--rail.severities", "rails.severities", parse_counter_severity, "COUNTER=SEVERITY", "none",
          "severity of device counters, by the driver's name or a pattern: page (any increase matters), warn (a rate "
          "that lasts) or context; a statistic of an Ethernet driver that is named here is also taken in"),
    _text("sample_interval_ns", "--rail.sample-interval", "rails.sample_interval", duration_ns("1ms", "10s"), "TIME",
          "100ms", "interval between reads of port counters"),
    _text("correlation_window_ns", "--rail.window", "rails.window", duration_ns("1s", "1h"), "TIME", "30s",
          "correlation window: expected wire bytes and port bytes are compared over it"),
    _text("small_payload_bytes", "--rail.small-message", "rails.small_message", size_bytes("0", "1GiB"), "SIZE",
          "64KiB", "messages up to this size may use a single rail"),
    _integer("series_limit", "--limit.series", "limits.series", whole_number(100, 10_000_000), "20000",
             "most exported series; communicators of the user with the most are dropped first and counted"),
    _text("series_profile", "--series.profile", "series.profile", one_of("full", "lean"), "full|lean", "full",
          "which series a scrape shows: all (full), or only what alerts, rules and 'railscope diagnose' need (lean: "
          "the setting for more than 200 nodes); a scrape of /metrics?profile=full or ?profile=lean chooses itself"),
    _list("series_detail", "--series.detail", "series.detail",
          one_of("counters", "nvlinks", "devices", "buckets", "all"), "NAME", "none",
          "export more series: every counter of every rail, including those at 0 (counters); speed, utilization and "
          "errors of every NVLink (nvlinks); short-interval rates and TCP of network devices that only RDMA uses "
          "(devices); every histogram bucket (buckets); or all of these (all)"),
    _integer("series_peers", "--series.peers", "series.peers", whole_number(0, 1024), "0",
             "export the wire bytes from each rank to each peer of its communicator: at most N peers of a rank by "
             "name, the other peers as one sum; 0: none"),
    _text("comm_lifetime_ns", "--limit.communicator-lifetime", "limits.communicator_lifetime",
          duration_ns("0s", "7d"), "TIME", "5m", "how long a communicator stays visible after its end"),
    _integer("aggregate_entries", "--limit.aggregates", "limits.aggregates", whole_number(1024, 1 << 22), "65536",
             "entries of the kernel's table of counts by process, communicator, operation, data type and size"),
    _integer("communicator_entries", "--limit.communicators", "limits.communicators", whole_number(64, 1 << 20),
             "16384", "entries of the kernel's table of communicators"),
    _text("ring_bytes", "--limit.ring", "limits.ring", power_of_two_bytes("64KiB", "1GiB"), "SIZE", "2MiB",
          "size of the ring buffer from the kernel to the agent, a power of two; one per CPU, unless all of them "
          "would need more than 64 MiB"),
    _text("stall_after_ns", "--stall.after", "stalls.after", duration_ns("1s", "24h"), "TIME", "30s",
          "an operation without progress for this long is stalled, even if nothing on this host explains it"),
    _text("stall_factor", "--stall.factor", "stalls.factor", decimal(2, 1000), "N", "8",
          "if a rank or rail of this host is suspect: an operation is stalled after N times the longest duration in "
          "its own history"),
    _text("stall_floor_ns", "--stall.floor", "stalls.floor", duration_ns("200ms", "1h"), "TIME", "2s",
          "an operation is never stalled before this time"),
    _text("stall_stacks", "--stall.stacks", "stalls.stacks", optional_file, "PROGRAM", "none",
          "py-spy, with which the agent reads where the Python code of blamed ranks of this host stands, for /stalls"),
    _text("state_directory", "--state.directory", "state.directory", optional_file, "DIR", "none",
          "folder in which the agent keeps its totals, so that they go on when it is restarted or killed; a machine "
          "that boots starts at 0"),
    _text("verdicts_socket", "--verdicts.socket", "verdicts.socket", optional_file, "PATH", "none",
          "unix socket on which the agent tells programs of this host of each stall, as lines of JSON; 'railscope "
          "verdicts' reads it"),
    _text("otlp_endpoint", "--otlp.endpoint", "otlp.endpoint", otlp_endpoint, "URL", "none",
          "push the metrics to an OpenTelemetry collector, by OTLP over HTTP: http://HOST:4318, or a URL with its "
          "path; needs OpenTelemetry's exporter (the extra 'otlp')"),
    _text("otlp_interval_ns", "--otlp.interval", "otlp.interval", duration_ns("1s", "1h"), "TIME", "1m",
          "interval between pushes; half of it is the longest that one may take"),
    _text("otlp_headers_file", "--otlp.headers-file", "otlp.headers_file", optional_file, "FILE", "none",
          "HTTP headers of each push, a line 'Name: value' for each"),
    _text("otlp_ca_file", "--otlp.ca-file", "otlp.ca_file", optional_file, "FILE", "none",
          "certificates that the endpoint's must be signed by, instead of the system's"),
    _text("otlp_certificate_file", "--otlp.certificate-file", "otlp.certificate_file", optional_file, "FILE", "none",
          "certificate that the agent shows to the endpoint"),
    _text("otlp_key_file", "--otlp.key-file", "otlp.key_file", optional_file, "FILE", "none",
          "key of the certificate"),
    _text("recordings_directory", "--recordings.directory", "recordings.directory", optional_file, "DIR",
          "/var/lib/railscope/recordings",
          "folder in which the flight recorder writes a recording on a stall and on SIGUSR2; empty: it writes none"),
    _text("recordings_max_bytes", "--recordings.max-bytes", "recordings.max_bytes", size_bytes("1MiB", "1024GiB"),
          "SIZE", "256MiB",
          "maximum size of all recordings on disk; recordings on a signal are removed first, then the oldest"),
    _text("recordings_window_ns", "--recordings.window", "recordings.window", duration_ns("1s", "1h"), "TIME", "60s",
          "time before the trigger that a recording covers, as far as --recordings.memory reaches"),
    _text("recordings_memory_bytes", "--recordings.memory", "recordings.memory", size_bytes("0", "4GiB"), "SIZE",
          "16MiB", "maximum memory of the flight recorder; 0 switches it off"),
    _text("node_name", "--node.name", "node.name", label_text, "NAME", "none",
          "what node_info calls this host, else by its host name: in a pod, the downward API's spec.nodeName"),
    _text("node_cluster", "--node.cluster", "node.cluster", label_text, "NAME", "none",
          "the label cluster of node_info, where Prometheus has no label of its own for it"),
    _text("sysfs", "--path.sysfs", "path.sysfs", folder, "DIR", "/sys", "where sysfs is mounted"),
    _text("procfs", "--path.procfs", "path.procfs", folder, "DIR", "/proc", "where procfs is mounted"),
    _text("pod_logs", "--path.pod-logs", "path.pod_logs", folder, "DIR", "/var/log/pods",
          "the kubelet's folder of logs, beside its folder 'containers': they tell the names of pods and containers"),
    _text("log_level", "--log.level", "logging.level", one_of("debug", "info", "warn", "error"),
          "debug|info|warn|error", "info",
          "lowest severity to log"),
    _text("log_format", "--log.format", "logging.format", one_of("logfmt", "json"), "logfmt|json", "logfmt",
          "format of log messages"),
    _text("once_settle_ns", "--once.settle", "", duration_ns("0s", "10m"), "TIME", "1s",
          "with --once: time to observe before printing"),
    _text("textfile", "--textfile", "", prom_file, "FILE", "none",
          "with --once: write the metrics to this file; *.prom for node_exporter's textfile collector"),
    _text("config_file", "--config.file", "", optional_file, "FILE", "none",
          "configuration file; the environment overrides it (RAILSCOPE_WEB_LISTEN_ADDRESS for web.listen_address), and "
          "the command line overrides both"),
)  # fmt: skip

FILE_KEYS: Final = {
    key.name: key
    for key in (
        *(Key(option.key, option.kind, option.read, option.flag) for option in OPTIONS if option.key),
        *(Key(collector.key, Kind.BOOLEAN, bool, collector.flag) for collector in COLLECTORS),
    )
}
"""What the configuration file may hold."""

ENVIRONMENT_KEYS: Final = {
    f"{VARIABLE_PREFIX}{key.name.upper().replace('.', '_')}": key
    for key in (
        *FILE_KEYS.values(),
        *(Key(option.name, option.kind, option.read, option.flag) for option in OPTIONS if not option.key),
    )
}
"""What the environment may hold, by variable."""

RELOADABLE: Final = frozenset(
    {
        *("probes.scan_interval", "probes.level", "probes.budget", "limits.series", "series.profile"),
        "series.detail",
        *("stalls.after", "stalls.factor", "stalls.floor", "recordings.max_bytes", "logging.level", "logging.format"),
    }
)
"""Keys that take effect while the agent runs, on SIGHUP; all others take a restart."""


def _each(read: Callable[[str], object]) -> Callable[[str], list[object]]:
    """A reader of the entries of one word: people write lists with spaces or with commas."""
    return lambda text: [read(entry) for entry in split_list(text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the agent's options; what is not given leaves no trace in the result, so that the file can speak."""
    for option in OPTIONS:
        several: dict[str, Any] = {"action": "extend", "nargs": "+"} if option.kind is Kind.LIST else {}
        read = _each(option.read) if option.kind is Kind.LIST else option.read
        parser.add_argument(
            option.flag,
            dest=option.field,
            type=option_type(read),
            metavar=option.metavar,
            default=argparse.SUPPRESS,
            help=f"{option.help} (default: {option.default})".replace("%", "%%"),
            **several,
        )
    for collector in COLLECTORS:
        default = "on" if collector.enabled else "off"
        for flag, enabled, help_text in (
            (collector.flag, True, f"{collector.help} (default: {default})"),
            (f"--no-collector.{collector.name}", False, "switch this collector off"),
        ):
            parser.add_argument(
                flag,
                dest=collector.field,
                action="store_const",
                const=enabled,
                default=argparse.SUPPRESS,
                help=help_text,
            )
    parser.add_argument(
        "--once",
        action="store_true",
        default=argparse.SUPPRESS,
        help="observe for --once.settle, print the metrics and exit",
    )
